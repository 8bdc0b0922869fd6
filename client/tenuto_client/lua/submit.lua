-- Accept a job: write its hash, index, first event, queue entry and ticket in one step.
-- A: id, model, tenant, priority, spec, retention, deadline, idempotency key's name or '', body hash, max_tokens, metadata
-- Returns {'created' | 'existing' | 'conflict' | 'unknown_model' | 'duplicate_id', job id}.
local id, model, tenant, priority, spec, retention, deadline, idem, body, max_tokens, metadata = unpack(A)

-- A submit that waits for replicas needs a write of its own to wait for, also when the job is there already.
local function touch(job)
  if redis.call('EXISTS', key_job(job)) == 1 then redis.call('HSET', key_job(job), 'id', job) end
end

if idem ~= '' then
  local known = redis.call('GET', idem)
  if known then
    local job, hash = string.match(known, '^(.-)|(.*)$')
    touch(job)
    return { hash == body and 'existing' or 'conflict', job }
  end
end
if redis.call('HEXISTS', key_models(), model) == 0 then return { 'unknown_model', '' } end
if redis.call('EXISTS', key_job(id)) == 1 then
  touch(id)
  return { 'duplicate_id', id }
end

local ms = math.floor(now() * 1000)
local at = string.format('%.3f', ms / 1000)
redis.call('HSET', key_job(id), 'v', 1, 'id', id, 'model', model, 'tenant', tenant, 'priority', priority,
  'spec', spec, 'retention', retention, 'state', 'queued', 'epoch', 1, 'tokens', 0, 'events', 0,
  'max_tokens', max_tokens, 'metadata', metadata,
  'stalls', 0, 'attempts', 0, 'exactness', 'exact', 'seq', redis.call('INCR', key_sequence()),
  'created_at', at, 'queued_at', at)
if deadline ~= '' then redis.call('HSET', key_job(id), 'deadline', deadline) end
if idem ~= '' then
  redis.call('SET', idem, id .. '|' .. body)
  redis.call('HSET', key_job(id), 'idem', idem, 'body', body)
end
redis.call('ZADD', key_jobs(), ms, id)
emit(id, { type = 'state', state = 'queued', epoch = 1 })
enqueue(id)
return { 'created', id }
