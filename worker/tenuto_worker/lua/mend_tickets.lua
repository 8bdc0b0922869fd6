-- As many tickets as queued jobs: drop those without content, add what is missing, up to 250 a call, so as not to hold
-- Redis up. The counts of queued jobs are put right, if there are no more than 1000 lanes to count in; every move keeps them.
-- A: model. Returns the number of tickets added.
local MOST, MOST_FIELDS, MOST_LANES = 250, 1000, 1000
local model = A[1]
-- Of no job, so that none leaves a ticket behind.
local MENDED = P .. 'mended:'

local function count()
  local queued, counts = 0, {}
  for _, lane in ipairs(redis.call('ZRANGE', key_queue(model), 0, -1)) do
    local length = redis.call('ZCARD', key_lane(model, lane))
    local tenant = string.match(lane, ':(.*)$') or ''
    if length == 0 then redis.call('ZREM', key_queue(model), lane) end
    queued = queued + length
    if length > 0 then counts[tenant] = (counts[tenant] or 0) + length end
  end
  redis.call('DEL', key_queued(model))
  local fields = {}
  local function store(most)
    if #fields > most then
      redis.call('HSET', key_queued(model), unpack(fields))
      fields = {}
    end
  end
  if queued > 0 then fields = { '*', queued } end
  for tenant, length in pairs(counts) do
    fields[#fields + 1], fields[#fields + 2] = tenant, length
    store(MOST_FIELDS)
  end
  store(0)
end
if redis.call('ZCARD', key_queue(model)) <= MOST_LANES then count() end
local queued = number(redis.call('HGET', key_queued(model), '*')) or 0

local surplus = redis.call('ZCARD', key_tickets(model)) - queued
local function drop(ticket)
  redis.call('ZREM', key_tickets(model), ticket)
  redis.call('DEL', 'arq:job:' .. ticket)
  surplus = surplus - 1
end
for _, ticket in ipairs(redis.call('ZRANGE', key_tickets(model), 0, MOST)) do
  local is_mended = string.sub(ticket, 1, #MENDED) == MENDED
  if (surplus > 0 and is_mended) or redis.call('EXISTS', 'arq:job:' .. ticket) == 0 then drop(ticket) end
end
local missing = math.max(0, math.min(MOST, -surplus))
for _ = 1, missing do add_ticket(model, MENDED .. redis.call('INCR', key_sequence())) end
return missing
