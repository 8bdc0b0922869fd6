-- End a job. A: id, epoch, nonce, state, finish_reason, held text, error, exactness, its reason
-- Returns 'ok' | 'fenced' | 'requeued' (cancelled, but a resume took the cancel back in the meantime).
local id, epoch, nonce, state = A[1], A[2], A[3], A[4]
if not owned(id, epoch, nonce) then return 'fenced' end
if state == 'cancelled' and cancel_wanted(id) == 0 then
  requeue(id, 'resume')
  return 'requeued'
end
redis.call('HSET', key_job(id), 'exactness', A[8])
if A[9] ~= '' then redis.call('HSET', key_job(id), 'exactness_reason', A[9]) end
finish(id, state, A[5], A[6], A[7])
return 'ok'
