-- Keep the lease (or make it anew: an owner that was not reaped is still the owner) and tell the progress.
-- A: id, epoch, nonce, durable, holder, lease in ms, phase, done, total, why the last checkpoint could not be saved ('' if it was)
-- Returns {'ok' | 'fenced', 1 when a cancel is wanted, 1 when the deadline has passed, 1 when max_runtime is over}.
local id, epoch, nonce, durable, holder, lease_ms, phase, done, total, unsaved = unpack(A)
if not owned(id, epoch, nonce) then return { 'fenced', 0, 0, 0 } end
local job = key_job(id)
redis.call('SET', key_lease(id), holder .. '|' .. epoch .. '|' .. nonce, 'PX', lease_ms)
redis.call('HSET', job, 'durable', durable)
if unsaved and unsaved ~= '' then
  redis.call('HSET', job, 'checkpoint_error', unsaved)
else
  redis.call('HDEL', job, 'checkpoint_error')
end
local before = redis.call('HMGET', job, 'phase', 'phase_done')
-- Only what no attempt before had read counts: a job that kills its worker after the prompt would never end.
if phase == 'prefill' and tonumber(done) > tonumber(get(id, 'prefilled') or 0) then
  redis.call('HSET', job, 'prefilled', done)
  progressed(id)
end
if before[1] ~= phase or before[2] ~= done then
  redis.call('HSET', job, 'phase', phase, 'phase_done', done, 'phase_total', total)
  redis.call('PUBLISH', key_progress(id), phase .. ' ' .. done .. ' ' .. total)
end
local deadline, max_runtime, ran, claimed_at =
  unpack(redis.call('HMGET', job, 'deadline', 'max_runtime', 'ran', 'claimed_at'))
local late = (deadline and tonumber(deadline) <= now()) and 1 or 0
local spent = tonumber(ran or 0) + now() - tonumber(claimed_at)
local over = (max_runtime and spent >= tonumber(max_runtime)) and 1 or 0
return { 'ok', cancel_wanted(id), late, over }
