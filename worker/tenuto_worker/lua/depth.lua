-- How many jobs of a model are queued, and how long that one has waited that waits longest. A: model.
-- Looks at the oldest job of each lane; where there are very many lanes, of those of each priority whose turn comes first.
-- Returns {count, seconds as a string}.
local MOST_OF_PRIORITY, MOST = 200, 1000
local model = A[1]
local at = now()
local longest, looked = 0, 0
local from = '-inf'
while looked < MOST do
  local lanes = redis.call('ZRANGEBYSCORE', key_queue(model), from, '+inf', 'LIMIT', 0, MOST_OF_PRIORITY)
  local priority = lanes[1] and number(string.match(lanes[1], '^(-?%d+):'))
  if not priority then break end
  for _, lane in ipairs(lanes) do
    if number(string.match(lane, '^(-?%d+):')) ~= priority then break end
    local oldest = redis.call('ZRANGE', key_lane(model, lane), 0, 0)[1]
    local queued_at = oldest and number(get(oldest, 'queued_at'))
    if queued_at then longest = math.max(longest, at - queued_at) end
    looked = looked + 1
  end
  from = string.format('%.0f', (101 - priority) * PRIORITY_STEP)
end
return { number(redis.call('HGET', key_queued(model), '*')) or 0, string.format('%.3f', longest) }
