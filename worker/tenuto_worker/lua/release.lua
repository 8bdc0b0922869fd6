-- Hand a running job back. A: id, epoch, nonce, durable, reason ('drain' | 'preempt' | 'limits' | 'adapter' | 'memory' | 'error'), error
-- Only 'error' counts against the job. Returns 'fenced' or the state that the job is in now.
local id, epoch, nonce, durable, reason, error_text = unpack(A)
if not owned(id, epoch, nonce) then return 'fenced' end
redis.call('HSET', key_job(id), 'durable', durable)
if reason == 'error' then return attempt_died(id, reason, error_text) end
if cancel_wanted(id) == 1 then
  finish(id, 'cancelled', '', '', '')
  return 'cancelled'
end
if reason == 'preempt' then redis.call('HINCRBY', key_job(id), 'preemptions', 1) end
return requeue(id, reason)
