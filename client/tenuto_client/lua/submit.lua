-- Accept a job: write its hash, index, first event, queue entry and ticket in one step.
-- A: id, model, tenant, priority, spec, retention, deadline, idempotency key's name or '', body hash
-- Returns {'created' | 'existing' | 'conflict' | 'unknown_model' | 'duplicate_id', job id}.
local id, model, tenant, priority, spec, retention, deadline, idem, body =
  A[1], A[2], A[3], A[4], A[5], A[6], A[7], A[8], A[9]

if idem ~= '' then
  local known = redis.call('GET', idem)
  if known then
    local job, hash = string.match(known, '^(.-)|(.*)$')
    return { hash == body and 'existing' or 'conflict', job }
  end
end
if redis.call('HEXISTS', key_models(), model) == 0 then return { 'unknown_model', '' } end
if redis.call('EXISTS', key_job(id)) == 1 then return { 'duplicate_id', id } end

local at = stamp()
redis.call('HSET', key_job(id), 'v', 1, 'id', id, 'model', model, 'tenant', tenant, 'priority', priority,
  'spec', spec, 'retention', retention, 'state', 'queued', 'epoch', 1, 'tokens', 0, 'events', 0,
  'stalls', 0, 'attempts', 0, 'exactness', 'exact', 'seq', redis.call('INCR', key_sequence()),
  'created_at', at, 'queued_at', at)
if deadline ~= '' then redis.call('HSET', key_job(id), 'deadline', deadline) end
if idem ~= '' then
  redis.call('SET', idem, id .. '|' .. body)
  redis.call('HSET', key_job(id), 'idem', idem)
end
redis.call('ZADD', key_jobs(), math.floor(now() * 1000), id)
emit(id, { type = 'state', state = 'queued', epoch = 1 })
enqueue(id)
return { 'created', id }
