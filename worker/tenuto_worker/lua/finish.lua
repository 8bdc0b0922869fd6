-- End a job. A: id, epoch, nonce, durable, state, finish_reason, held text, error, exactness, its reason, how many tokens the
-- attempt knows to be published, and what it tells of itself as JSON ('' is nothing)
-- Returns the published tokens behind 'ok' | 'fenced' | 'requeued' (cancelled, but a resume took the cancel back in the meantime) |
-- 'gap' (Redis has lost some since: readers may have them, so the end must not stand in front of them).
local id, epoch, nonce, durable, state = unpack(A)
if not owned(id, epoch, nonce) then return { 'fenced', 0 } end
local published = tonumber(get(id, 'tokens'))
if published < tonumber(A[11] or 0) then return { 'gap', published } end
-- First what a full server lets pass: the end of a job makes room.
redis.call('DEL', key_lease(id))
redis.call('HSET', key_job(id), 'durable', durable)
if state == 'cancelled' and cancel_wanted(id) == 0 then
  requeue(id, 'resume')
  return { 'requeued', published }
end
redis.call('HSET', key_job(id), 'exactness', A[9])
if A[10] ~= '' then redis.call('HSET', key_job(id), 'exactness_reason', A[10]) end
if (A[12] or '') ~= '' then redis.call('HSET', key_job(id), 'stats', A[12]) end
finish(id, state, A[6], A[7], A[8])
return { 'ok', published }
