-- Let a cancelled or failed job go on. A: id.
-- Returns 'gone' | 'completed' | 'resumed' | 'active' (it is queued or running; a cancel not yet carried out is taken back).
local id = A[1]
local job = key_job(id)
local state = get(id, 'state')
if not state then return 'gone' end
if state == 'completed' then return 'completed' end
if not is_over(state) then
  redis.call('HDEL', job, 'cancel')
  return 'active'
end
redis.call('HDEL', job, 'finished_at', 'finish_reason', 'error', 'errors')
redis.call('HSET', job, 'stalls', 0)
-- Whoever resumes a job after its deadline wants it all the same; with the deadline it would fail at once.
local deadline = get(id, 'deadline')
if deadline and tonumber(deadline) <= now() then redis.call('HDEL', job, 'deadline') end
redis.call('ZREM', key_expiry(), id)
requeue(id, 'resume')
return 'resumed'
