-- Take the best queued job of a model: suspects, if nothing else runs here; then highest priority, then tenants in turn, then age.
-- A: model, holder, nonce, fingerprint, reach, lease in ms, exact_wait in s, 1 when this nonce was tried before,
-- max_prompt and max_tokens of this worker, tokens for which it has memory now (-1 is no limit), 1 when it runs nothing,
-- tokens for which it has memory then, for how many seconds a job waits for memory before nothing is taken in front of it, and
-- the fingerprints by adapter, as JSON
-- A job that has begun is left for exact_wait to workers of its own fingerprint and checkpoint reach.
-- A job that no step can be taken with is put aside.
-- Returns 'job', the id of this data set, the ids of the earlier ones whose checkpoints may be used, and the
-- fields of the job's hash; or 'aside' and of one that was put aside its id, its state or 'gone', and what is wrong with it.
-- Where there is no job for this worker: an empty list; or 'left' and,
-- of up to 16 jobs that it has to leave to others, three values each: id, seconds for which it still must (0: as long as they
-- want), 'geometry', 'checkpoints', 'adapter', 'limits', 'memory' or 'suspect' as the reason.
local model, holder, nonce, fingerprint, reach = A[1], A[2], A[3], A[4], A[5]
local lease_ms, exact_wait = A[6], tonumber(A[7])
local terms = { max_prompt = A[9], max_tokens = A[10], room = A[11], refuses = true, fingerprint = fingerprint, reach = reach, exact_wait = exact_wait,
  adapters = adapters_of(A[15]) }
local alone = A[12] == '1'
local most, memory_wait = tonumber(A[13] or -1), tonumber(A[14] or 0)
local keep_room = false
local at = now()
local left = {}

-- With the job, so that no attempt takes the id of a data set that was emptied since for that of its job.
local function answer(id)
  redis.call('SET', key_namespace(), nonce, 'NX')
  return { 'job', redis.call('GET', key_namespace()), redis.call('SMEMBERS', key_heirs()), redis.call('HGETALL', key_job(id)) }
end

local function leave(id, seconds, why)
  if #left < 3 * 16 then
    for _, each in ipairs({ id, string.format('%.3f', seconds), why }) do left[#left + 1] = each end
  end
  return false
end

-- A job that needs much memory would never get it while others keep coming: after a while its turn is kept.
local function may_fit_later(id)
  local prompt, wanted, queued_at = unpack(redis.call('HMGET', key_job(id), 'prompt_tokens', 'max_tokens', 'queued_at'))
  local is_possible = most < 0 or tonumber(prompt or 0) + tonumber(wanted) <= most
  return is_possible and at - tonumber(queued_at) > memory_wait
end

local function suits(id)
  local why, seconds = unfit(id, terms)
  if why == 'memory' and not alone and may_fit_later(id) then keep_room = true end
  if not why and not alone and get(id, 'suspect') then why = 'suspect' end
  return not why or leave(id, seconds or 0, why)
end

local function may_take(id) return not end_if_late(id) and suits(id) end

-- What to answer of an entry of the queue that is not that of a job which can be taken; nil if it is. `lane` is nil for a suspect.
local function put_right(id, lane)
  local why, names = fault(id)
  local state, of, tenant, priority = read(id, 'state', 'model', 'tenant', 'priority')
  local own = priority and tenant and priority .. ':' .. tenant
  local is_own = of == model and (own == lane or not lane)
  if not why and state == 'queued' and is_own then return nil end
  -- Of a job that is elsewhere only the entry is wrong.
  local is_elsewhere = not why and not is_own and redis.call('ZSCORE', key_lane(of, own), id)
  if is_elsewhere or state == 'running' or is_over(state) then
    if lane then leave_lane(id, model, lane) end
    redis.call('ZREM', key_suspects(model), id)
    return { 'aside', id, state, 'queue: the job stands in it, and should not' }
  end
  if not why then
    why, names = 'model, priority, tenant: are not those that it was queued with', { 'model', 'priority', 'tenant' }
  end
  return { 'aside', id, put_aside(id, why, names, model, lane), why }
end

local function take(id, lane, priority)
  dequeue(id)
  if redis.call('ZSCORE', key_queue(model), lane) then
    redis.call('ZADD', key_queue(model), lane_score(priority), lane)
  end
  local job = key_job(id)
  local epoch = redis.call('HGET', job, 'epoch')
  redis.call('HSET', job, 'state', 'running', 'worker', holder, 'nonce', nonce,
    'claimed_at', stamp(), 'moved', 0)
  redis.call('HDEL', job, 'queue_until', 'room_at')
  redis.call('HSETNX', job, 'started_at', stamp())
  redis.call('HSETNX', job, 'durable', 0)
  redis.call('HINCRBY', job, 'attempts', 1)
  redis.call('ZADD', key_running(), at, id)
  redis.call('SET', key_lease(id), holder .. '|' .. epoch .. '|' .. nonce, 'PX', lease_ms)
  drop_ticket(id)
  emit(id, { type = 'state', state = 'running', epoch = tonumber(epoch), worker = holder })
  return answer(id)
end

if A[8] == '1' then -- the answer to an earlier call may have been lost on its way
  for _, id in ipairs(redis.call('ZRANGE', key_running(), 0, -1)) do
    if get(id, 'nonce') == nonce then return answer(id) end
  end
end

if alone then
  for _, id in ipairs(redis.call('ZRANGE', key_suspects(model), 0, 63)) do
    local does_suit, why = looked(may_take, id)
    local wrong = (does_suit or why) and put_right(id, nil)
    if wrong then return wrong end
    if does_suit then
      local priority, tenant = unpack(redis.call('HMGET', key_job(id), 'priority', 'tenant'))
      return take(id, priority .. ':' .. tenant, priority)
    end
  end
end

local claimed = look_on(model, holder, function(id, lane, priority)
  local does_suit, why = looked(may_take, id)
  local wrong = (does_suit or why) and put_right(id, lane)
  if wrong then return wrong end
  if does_suit then return take(id, lane, priority) end
  if keep_room then return false end
end)
if claimed then return claimed end
if #left == 0 then return {} end
return { 'left', unpack(left) }
