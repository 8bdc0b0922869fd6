-- Requeue at once a running job of a holder whose previous incarnation is known to be dead. A: id, holder, 1 when it died
-- by itself, so that this job may be the cause.
-- Returns 'foreign' or the state that the job is in now.
local id, holder = A[1], A[2]
local state, worker = unpack(redis.call('HMGET', key_job(id), 'state', 'worker'))
if state ~= 'running' or worker ~= holder then return 'foreign' end
if A[3] == '1' then suspect(id) end
return attempt_died(id, 'worker restarted', 'worker ' .. holder .. ' died')
