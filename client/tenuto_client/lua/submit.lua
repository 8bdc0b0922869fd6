-- Accept a job: write its hash, index, first event, queue entry and ticket in one step, unless a limit forbids it.
-- A: id, model, tenant, priority, spec, retention, deadline, idempotency key's name or '', body hash, max_tokens, metadata,
-- number of prompt tokens (of a text, which is not counted yet, the fewest that it can have, negative), then fields and values for the job's hash: queue_ttl, max_runtime, logprobs, ...
-- Returns {'created' | 'existing' | 'conflict' | 'unknown_model' | 'duplicate_id', job id}, or
-- {'limit', its name, what the job would make of it, the most that is allowed}.
local id, model, tenant, priority, spec, retention, deadline, idem, body, max_tokens, metadata, prompt_tokens = unpack(A)
prompt_tokens = tonumber(prompt_tokens or 0)
local OPTIONS = 13
local DEFAULT_MAX_QUEUED = 100000

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

-- The narrower of what holds for this model and for all.
local function limit(name)
  local own, all = unpack(redis.call('HMGET', key_limits(), model .. '|' .. name, '*|' .. name))
  own, all = tonumber(own), tonumber(all)
  if own and all then return math.min(own, all) end
  return own or all
end

local function option(name)
  for i = OPTIONS, #A, 2 do
    if A[i] == name then return A[i + 1] end
  end
end

local function new_bytes()
  -- The prompt's token ids come later, and take about as much as the prompt.
  local body_size = JOB_BYTES + 2 * #spec + #metadata
  return reserved_bytes(body_size, tonumber(max_tokens), tonumber(option('logprobs') or 0))
end

local function queued_of(field) return number(redis.call('HGET', key_queued(model), field)) or 0 end

-- In the order in which they are told: first those that no waiting mends.
local function refusal()
  local used = number(redis.call('HGET', key_usage(), 'bytes')) or 0
  local checks = {
    { 'max_tokens', tonumber(max_tokens), limit('max_tokens') },
    { 'max_prompt', math.abs(prompt_tokens), limit('max_prompt') },
    { 'max_queued_per_tenant', queued_of(tenant) + 1, limit('max_queued_per_tenant') },
    { 'max_queued', queued_of('*') + 1, limit('max_queued') or DEFAULT_MAX_QUEUED },
    { 'max_stream_memory', used + new_bytes(), tonumber(redis.call('HGET', key_limits(), '*|max_stream_memory')) },
  }
  for _, check in ipairs(checks) do
    local name, value, most = check[1], check[2], check[3]
    if most and value > most then return { 'limit', name, value, most } end
  end
end

local refused = refusal()
if refused then return refused end

local ms = math.floor(now() * 1000)
local at = string.format('%.3f', ms / 1000)
redis.call('HSET', key_job(id), 'v', 1, 'id', id, 'model', model, 'tenant', tenant, 'priority', priority,
  'spec', spec, 'retention', retention, 'state', 'queued', 'epoch', 1, 'tokens', 0, 'events', 0,
  'max_tokens', max_tokens, 'metadata', metadata,
  'stalls', 0, 'attempts', 0, 'exactness', 'exact', 'seq', redis.call('INCR', key_sequence()),
  'created_at', at, 'queued_at', at)
for i = OPTIONS, #A, 2 do redis.call('HSET', key_job(id), A[i], A[i + 1]) end
-- A text is counted at its first start, and judged by what holds now: a limit set later is no job's that was accepted.
local max_prompt = prompt_tokens <= 0 and limit('max_prompt')
if max_prompt then redis.call('HSET', key_job(id), 'max_prompt', max_prompt) end
local queue_ttl = option('queue_ttl')
if queue_ttl then
  redis.call('HSET', key_job(id), 'queue_until', string.format('%.3f', now() + tonumber(queue_ttl)))
end
if deadline ~= '' then redis.call('HSET', key_job(id), 'deadline', deadline) end
if idem ~= '' then
  redis.call('SET', idem, id .. '|' .. body)
  redis.call('HSET', key_job(id), 'idem', idem, 'body', body)
end
redis.call('ZADD', key_jobs(), ms, id)
emit(id, { type = 'state', state = 'queued', epoch = 1 })
hold(id, new_bytes())
enqueue(id)
return { 'created', id }
