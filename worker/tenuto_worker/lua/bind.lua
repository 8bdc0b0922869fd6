-- Store what the first claim settles: the prompt's token ids and the geometry; later attempts use only those.
-- A: id, epoch, nonce, prompt ids, number of prompt tokens, fingerprint, geometry, reach, exactness, its reason
-- Returns 'ok' | 'fenced'.
local id, epoch, nonce = A[1], A[2], A[3]
if not owned(id, epoch, nonce) then return 'fenced' end
local job = key_job(id)
redis.call('HSETNX', job, 'prompt_ids', A[4])
redis.call('HSETNX', job, 'prompt_tokens', A[5])
redis.call('HSET', job, 'fingerprint', A[6], 'geometry', A[7], 'reach', A[8], 'exactness', A[9])
if A[10] ~= '' then redis.call('HSET', job, 'exactness_reason', A[10]) end
reserve(id)
return 'ok'
