-- Requeue at once a running job of a holder whose previous incarnation is known to be dead. A: id, holder
-- Returns 'foreign' or the state that the job is in now.
local id, holder = A[1], A[2]
local state, worker = unpack(redis.call('HMGET', key_job(id), 'state', 'worker'))
if state ~= 'running' or worker ~= holder then return 'foreign' end
return attempt_died(id, 'worker restarted', 'worker ' .. holder .. ' died')
