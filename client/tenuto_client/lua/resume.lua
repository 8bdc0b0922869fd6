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
local why, names = fault(id)
if why then put_aside(id, why, names) end
redis.call('HDEL', job, 'finished_at', 'finish_reason', 'error', 'errors')
redis.call('HSET', job, 'stalls', 0)
-- Whoever resumes a job after its time wants it all the same; with the old limits it would fail at once.
for _, field in ipairs({ 'deadline', 'queue_until' }) do
  local time = get(id, field)
  if time and tonumber(time) <= now() then redis.call('HDEL', job, field) end
end
if too_late(id) then redis.call('HSET', job, 'ran', 0) end
-- One that was never counted keeps it, or a cancel and a resume would be the way around it.
if get(id, 'prompt_tokens') then redis.call('HDEL', job, 'max_prompt') end
redis.call('ZREM', key_expiry(), id)
requeue(id, 'resume')
return 'resumed'
