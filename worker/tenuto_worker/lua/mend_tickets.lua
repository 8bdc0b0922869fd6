-- Every queued job has at least one ticket: drop tickets without content, add what is missing.
-- A: model. Returns the number of tickets added.
local model = A[1]
for _, ticket in ipairs(redis.call('ZRANGE', key_tickets(model), 0, 255)) do
  if redis.call('EXISTS', 'arq:job:' .. ticket) == 0 then redis.call('ZREM', key_tickets(model), ticket) end
end
local queued = 0
local oldest
for _, lane in ipairs(redis.call('ZRANGE', key_queue(model), 0, -1)) do
  queued = queued + redis.call('ZCARD', key_lane(model, lane))
  oldest = oldest or redis.call('ZRANGE', key_lane(model, lane), 0, 0)[1]
end
local missing = queued - redis.call('ZCARD', key_tickets(model))
for _ = 1, missing do
  add_ticket(model, oldest .. ':' .. get(oldest, 'epoch') .. ':' .. redis.call('INCR', key_sequence()))
end
return math.max(missing, 0)
