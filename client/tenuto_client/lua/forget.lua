-- Forget a model that nobody serves and that has no jobs to do. A: model, seconds of silence after which a worker is gone.
-- Returns {'unknown' | 'forgotten', ''}, {'served', the worker}, or {'busy', how many jobs are queued or running}.
local model, alive = A[1], tonumber(A[2])
if redis.call('HEXISTS', key_models(), model) == 0 then return { 'unknown', '' } end
local workers = redis.call('HGETALL', key_workers())
for i = 1, #workers, 2 do
  local worker = cmsgpack.unpack(workers[i + 1])
  for _, served in ipairs(worker.models) do
    if served == model and now() - worker.seen_at <= alive then return { 'served', workers[i] } end
  end
end
local busy = 0
for _, lane in ipairs(redis.call('ZRANGE', key_queue(model), 0, -1)) do
  busy = busy + redis.call('ZCARD', key_lane(model, lane))
end
for _, id in ipairs(redis.call('ZRANGE', key_running(), 0, -1)) do
  if get(id, 'model') == model then busy = busy + 1 end
end
if busy > 0 then return { 'busy', tostring(busy) } end
redis.call('HDEL', key_models(), model)
for _, ticket in ipairs(redis.call('ZRANGE', key_tickets(model), 0, -1)) do redis.call('DEL', 'arq:job:' .. ticket) end
redis.call('DEL', key_tickets(model), key_queued(model))
return { 'forgotten', '' }
