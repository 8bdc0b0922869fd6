-- Whether an attempt of this worker is to make way, when it has no slot for what waits.
-- A: model, holder, fingerprint, reach, exact_wait in s, max_prompt, max_tokens, room in tokens, seconds that a job waits before
-- anything makes way for it, seconds that an attempt has at least (doubled with each time that its job made way before),
-- room when this worker runs nothing, 1 when it would take a suspect then, the fingerprints by adapter as JSON
-- Returns {} | {'yield', id of the attempt's job, id of the job that waits} | {'apart', id of a suspect that waits for a worker
-- which runs nothing}.
local model, holder = A[1], A[2]
local terms = { fingerprint = A[3], reach = A[4], exact_wait = tonumber(A[5]), max_prompt = A[6], max_tokens = A[7],
  adapters = adapters_of(A[13]) }
local room, patience, hold_s, room_alone, may_empty = tonumber(A[8]), tonumber(A[9]), tonumber(A[10]), A[11], A[12] == '1'
-- A worker that does not ask what it should has so long, before the next in order makes way.
local ABSENT_S, MOST_DOUBLINGS = 3, 4
local at = now()

local function waited(id) return at - tonumber(get(id, 'queued_at')) end

-- The attempts of the model that may make way, and whether any of this worker, of whatever model, may not yet.
local able, is_held = {}, false
for _, id in ipairs(redis.call('ZRANGE', key_running(), 0, -1)) do
  local of, priority, claimed_at, worker, moved, preemptions, yield_at, prompt, wanted = read(id,
    'model', 'priority', 'claimed_at', 'worker', 'moved', 'preemptions', 'yield_at', 'prompt_tokens', 'max_tokens')
  local is_asked = yield_at and at - (number(yield_at) or 0) < SETTLE_S
  local is_sound = number(priority) and number(claimed_at) and number(wanted)
  if (of == model or worker == holder) and not is_asked and is_sound and redis.call('EXISTS', key_lease(id)) == 1 then
    local doublings = math.min(number(preemptions) or 0, MOST_DOUBLINGS)
    if not (moved == '1' and at - tonumber(claimed_at) >= hold_s * 2 ^ doublings) then
      is_held = is_held or worker == holder
    elseif of == model then
      able[#able + 1] = {
        id = id, priority = tonumber(priority), claimed_at = tonumber(claimed_at), worker = worker,
        tokens = (number(prompt) or 0) + tonumber(wanted),
      }
    end
  end
end

-- What attempts have at least holds here, too; but a worker that always has a young one empties itself in the end.
local apart_wait = terms.exact_wait + (is_held and hold_s * 2 ^ MOST_DOUBLINGS or 0)
terms.room = room_alone
local function may_go_apart(id)
  local is_long = waited(id) > apart_wait and not is_provided_for(id)
  return is_long and not too_late(id) and not unfit(id, terms)
end
for _, id in ipairs(may_empty and redis.call('ZRANGE', key_suspects(model), 0, 63) or {}) do
  if looked(may_go_apart, id) then
    redis.call('HSET', key_job(id), 'room_at', stamp())
    return { 'apart', id }
  end
end

-- The least important first, of these the latest; and the first of this worker's.
table.sort(able, function(a, b)
  if a.priority ~= b.priority then return a.priority < b.priority end
  if a.claimed_at ~= b.claimed_at then return a.claimed_at > b.claimed_at end
  return a.id < b.id
end)
local mine
for _, each in ipairs(able) do
  if each.worker == holder then
    mine = each
    break
  end
end
if not mine or patience == math.huge then return {} end
terms.room = room < 0 and -1 or room + mine.tokens

local function may_have_it(id)
  local waits = waited(id)
  -- Another worker's turn; if that does nothing, the next in order is ours.
  if waits < patience or (able[1] ~= mine and waits < patience + ABSENT_S) then return false end
  return not (is_provided_for(id) or too_late(id) or get(id, 'suspect') or unfit(id, terms))
end

local to = look_on(model, holder .. ':ways', function(id, _, priority)
  if priority and priority <= mine.priority then return false end
  if priority and looked(may_have_it, id) then return id end
end)
if not to then return {} end
redis.call('HSET', key_job(mine.id), 'yield_at', stamp())
redis.call('HSET', key_job(to), 'room_at', stamp())
return { 'yield', mine.id, to }
