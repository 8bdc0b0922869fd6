-- End queued jobs whose time in the queue is over, whether anybody serves their models or not.
-- A: at most how many. Returns the ids of those that ended.
local ended = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key_due(), '-inf', now(), 'LIMIT', 0, A[1])) do
  if get(id, 'state') ~= 'queued' then
    redis.call('ZREM', key_due(), id)
  elseif end_if_late(id) then
    ended[#ended + 1] = id
  else -- a clock that was set back
    redis.call('ZADD', key_due(), string.format('%.3f', due_at(id) or now()), id)
  end
end
return ended
