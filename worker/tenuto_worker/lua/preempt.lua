-- Whether an attempt of this worker is to make way, when it has no slot for what waits.
-- A: model, holder, fingerprint, reach, exact_wait in s, max_prompt, max_tokens, room in tokens, seconds that a job waits before
-- anything makes way for it, seconds that an attempt has at least (doubled with each time that its job made way before)
-- Returns {} | {'yield', id of the attempt's job, id of the job that waits} | {'apart', id of a suspect that waits for a worker
-- which runs nothing}.
local model, holder = A[1], A[2]
local terms = { fingerprint = A[3], reach = A[4], exact_wait = tonumber(A[5]), max_prompt = A[6], max_tokens = A[7] }
local room, patience, hold_s = tonumber(A[8]), tonumber(A[9]), tonumber(A[10])
-- A worker that does not ask what it should has so long, before the next in order makes way.
local ABSENT_S, MOST_DOUBLINGS = 3, 4
local at = now()

local function waited(id) return at - tonumber(get(id, 'queued_at')) end

for _, id in ipairs(redis.call('ZRANGE', key_suspects(model), 0, 63)) do
  local is_long = waited(id) > terms.exact_wait and not is_provided_for(id)
  if is_long and not too_late(id) and not unfit(id, terms) then
    redis.call('HSET', key_job(id), 'room_at', stamp())
    return { 'apart', id }
  end
end

-- The attempts of the model that could make way: the least important first, of these the latest.
local running = {}
for _, id in ipairs(redis.call('ZRANGE', key_running(), 0, -1)) do
  local of, priority, claimed_at, worker, moved, preemptions, yield_at, prompt, wanted = unpack(redis.call('HMGET',
    key_job(id), 'model', 'priority', 'claimed_at', 'worker', 'moved', 'preemptions', 'yield_at', 'prompt_tokens', 'max_tokens'))
  local is_asked = yield_at and at - tonumber(yield_at) < SETTLE_S
  if of == model and not is_asked and redis.call('EXISTS', key_lease(id)) == 1 then
    local doublings = math.min(tonumber(preemptions or 0), MOST_DOUBLINGS)
    running[#running + 1] = {
      id = id, priority = tonumber(priority), claimed_at = tonumber(claimed_at), worker = worker,
      may = moved == '1' and at - tonumber(claimed_at) >= hold_s * 2 ^ doublings,
      tokens = tonumber(prompt or 0) + tonumber(wanted),
    }
  end
end
if #running == 0 then return {} end
table.sort(running, function(a, b)
  if a.priority ~= b.priority then return a.priority < b.priority end
  if a.claimed_at ~= b.claimed_at then return a.claimed_at > b.claimed_at end
  return a.id < b.id
end)

local function victim_for(id, priority)
  for _, each in ipairs(running) do
    if each.priority >= priority then return nil end
    terms.room = room < 0 and -1 or room + each.tokens
    if each.may and each.worker == holder then return not unfit(id, terms) and each.id or nil end
    -- Another worker's turn; if that does nothing, the next in order is ours.
    if each.may and waited(id) < patience + ABSENT_S then return nil end
  end
end

for _, lane in ipairs(redis.call('ZRANGE', key_queue(model), 0, -1)) do
  local priority = tonumber(string.match(lane, '^(-?%d+):'))
  if priority <= running[1].priority then return {} end
  for _, id in ipairs(redis.call('ZRANGE', key_lane(model, lane), 0, 63)) do
    local is_long = waited(id) >= patience and not is_provided_for(id)
    if is_long and not too_late(id) and not get(id, 'suspect') then
      local victim = victim_for(id, priority)
      if victim then
        redis.call('HSET', key_job(victim), 'yield_at', stamp())
        redis.call('HSET', key_job(id), 'room_at', stamp())
        return { 'yield', victim, id }
      end
    end
  end
end
return {}
