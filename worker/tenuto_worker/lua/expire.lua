-- Remove ended jobs whose retention is over. A: at most how many. Returns the removed ids.
local due = redis.call('ZRANGEBYSCORE', key_expiry(), '-inf', now(), 'LIMIT', 0, A[1])
for _, id in ipairs(due) do
  remove(id)
  redis.call('ZREM', key_expiry(), id)
end
return due
