-- Requeue at once a running job of a holder whose previous incarnation is known to be dead. A: id, holder, 1 when its child
-- is known to have died by itself, so that this job may be the cause however far it had got.
-- Returns 'foreign' or the state that the job is in now.
local id, holder = A[1], A[2]
local state, worker, moved = read(id, 'state', 'worker', 'moved')
if state ~= 'running' or worker ~= holder then return 'foreign' end
local why, names = fault(id)
if why then return put_aside(id, why, names) end
-- A supervisor may have died with its child, as in a container that was killed; then, as with a lost lease, a job that had got
-- nowhere may be the cause.
if A[3] == '1' or moved ~= '1' then suspect(id) end
return attempt_died(id, 'worker restarted', 'worker ' .. holder .. ' died')
