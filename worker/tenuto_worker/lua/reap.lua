-- Requeue a running job whose lease has run out. A: id.
-- Returns {'alive' or the state that the job is in now, the worker that had it or ''}.
local id = A[1]
local state, worker = unpack(redis.call('HMGET', key_job(id), 'state', 'worker'))
if state ~= 'running' then
  redis.call('ZREM', key_running(), id)
  return { state or 'gone', '' }
end
if redis.call('EXISTS', key_lease(id)) == 1 then return { 'alive', worker } end
return { attempt_died(id, 'lease lost', 'worker ' .. worker .. ' lost its lease'), worker }
