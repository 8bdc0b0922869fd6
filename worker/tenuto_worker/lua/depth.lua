-- How many jobs of a model are queued, and how long that one has waited that waits longest. A: model.
-- Looks at the oldest job of each lane. Returns {count, seconds as a string}.
local model = A[1]
local at = now()
local longest = 0
for _, lane in ipairs(redis.call('ZRANGE', key_queue(model), 0, -1)) do
  local oldest = redis.call('ZRANGE', key_lane(model, lane), 0, 0)[1]
  local queued_at = oldest and tonumber(get(oldest, 'queued_at'))
  if queued_at then longest = math.max(longest, at - queued_at) end
end
return { tonumber(redis.call('HGET', key_queued(model), '*') or 0), string.format('%.3f', longest) }
