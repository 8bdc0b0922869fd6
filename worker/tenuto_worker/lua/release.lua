-- Hand a running job back. A: id, epoch, nonce, reason ('drain' | 'preempt' | 'outage' | 'error'), error
-- Only 'error' counts against the job. Returns 'fenced' or the state that the job is in now.
local id, epoch, nonce, reason, error_text = A[1], A[2], A[3], A[4], A[5]
if not owned(id, epoch, nonce) then return 'fenced' end
if reason == 'error' then return attempt_died(id, reason, error_text) end
if cancel_wanted(id) == 1 then
  finish(id, 'cancelled', '', '', '')
  return 'cancelled'
end
requeue(id, reason)
return 'queued'
