-- Note that something makes way for a job that waits. A: id. Returns 1, or 0 where it does not wait, or is provided for already.
local id = A[1]
if get(id, 'state') ~= 'queued' or is_provided_for(id) then return 0 end
redis.call('HSET', key_job(id), 'room_at', stamp())
return 1
