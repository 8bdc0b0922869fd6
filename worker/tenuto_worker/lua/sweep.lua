-- End queued jobs whose time in the queue is over, whether anybody serves their models or not.
-- A: at most how many. Returns of each that ended two values: its id, and what was wrong with it or ''.
local ended = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key_due(), '-inf', now(), 'LIMIT', 0, A[1])) do
  local why, names
  if get(id, 'state') == 'queued' then
    why, names = fault(id)
  else
    redis.call('ZREM', key_due(), id)
  end
  if why then put_aside(id, why, names) end
  if why or (names and end_if_late(id)) then
    ended[#ended + 1], ended[#ended + 2] = id, why or ''
  elseif names then -- a clock that was set back
    redis.call('ZADD', key_due(), string.format('%.3f', due_at(id) or now()), id)
  end
end
return ended
