-- Every queued job has at least one ticket: drop tickets without content, add what is missing. The counts of queued jobs
-- are put right.
-- A: model. Returns the number of tickets added.
local model = A[1]
for _, ticket in ipairs(redis.call('ZRANGE', key_tickets(model), 0, 255)) do
  if redis.call('EXISTS', 'arq:job:' .. ticket) == 0 then redis.call('ZREM', key_tickets(model), ticket) end
end
local queued = 0
local oldest
local counts = {}
for _, lane in ipairs(redis.call('ZRANGE', key_queue(model), 0, -1)) do
  local length = redis.call('ZCARD', key_lane(model, lane))
  local tenant = string.match(lane, ':(.*)$')
  queued = queued + length
  counts[tenant] = (counts[tenant] or 0) + length
  oldest = oldest or redis.call('ZRANGE', key_lane(model, lane), 0, 0)[1]
end
redis.call('DEL', key_queued(model))
if queued > 0 then redis.call('HSET', key_queued(model), '*', queued) end
for tenant, count in pairs(counts) do redis.call('HSET', key_queued(model), tenant, count) end
local missing = queued - redis.call('ZCARD', key_tickets(model))
for _ = 1, missing do
  add_ticket(model, oldest .. ':' .. get(oldest, 'epoch') .. ':' .. redis.call('INCR', key_sequence()))
end
return math.max(missing, 0)
