-- Requeue a running job whose lease has run out. A: id.
-- Returns {'alive' or the state that the job is in now, the worker that had it or '', what was wrong with the job or ''}.
local id = A[1]
local state, worker, moved = read(id, 'state', 'worker', 'moved')
if state == 'queued' or is_over(state) then
  redis.call('ZREM', key_running(), id)
  return { state, '', '' }
end
local why, names = fault(id)
if why then return { put_aside(id, why, names), worker or '', why } end
if redis.call('EXISTS', key_lease(id)) == 1 then return { 'alive', worker, '' } end
-- What loses a lease is mostly a machine or a network; a job that had got nowhere may be the cause.
if moved ~= '1' then suspect(id) end
return { attempt_died(id, 'lease lost', 'worker ' .. worker .. ' lost its lease'), worker, '' }
