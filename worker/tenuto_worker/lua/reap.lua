-- Requeue a running job whose lease has run out. A: id.
-- Returns {'alive' or the state that the job is in now, the worker that had it or ''}.
local id = A[1]
local state, worker, moved = unpack(redis.call('HMGET', key_job(id), 'state', 'worker', 'moved'))
if state ~= 'running' then
  redis.call('ZREM', key_running(), id)
  return { state or 'gone', '' }
end
if redis.call('EXISTS', key_lease(id)) == 1 then return { 'alive', worker } end
-- What loses a lease is mostly a machine or a network; a job that had got nowhere may be the cause.
if moved ~= '1' then suspect(id) end
return { attempt_died(id, 'lease lost', 'worker ' .. worker .. ' lost its lease'), worker }
