-- Remove every key of a job, whatever its state; a worker that runs it is fenced by its absence. A: id.
-- Returns 'gone' | 'deleted'.
local id = A[1]
if redis.call('EXISTS', key_job(id)) == 0 then return 'gone' end
remove(id)
nudge('cancel', id)
return 'deleted'
