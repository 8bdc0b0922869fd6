-- Ask for a stop. A: id. Idempotent. Returns 'gone' | 'over' | 'cancelled' (was queued) | 'flagged' (is running).
local id = A[1]
local state = get(id, 'state')
if not state then return 'gone' end
if is_over(state) then return 'over' end
local why, names = fault(id)
if why then
  put_aside(id, why, names)
  return 'over'
end
if state == 'queued' then
  dequeue(id)
  drop_ticket(id)
  finish(id, 'cancelled', '', '', '')
  return 'cancelled'
end
begin_freeing(id)
redis.call('HSET', key_job(id), 'cancel', 1)
nudge('cancel', id)
return 'flagged'
