-- Put a job back that is not here any more. Its stream was built beforehand, under a name of its own.
-- A: id, second name of that stream or '' without tokens, state, finish_reason, held text, error, finished_at,
-- idempotency key's name or '', body hash, then fields and values of the job's hash
-- Returns 'recovered' | 'there' (the job is here, and was not touched).
local id, built, state = A[1], A[2], A[3]
local job = key_job(id)
if redis.call('EXISTS', job) == 1 then
  if built ~= '' then redis.call('DEL', key_half(id, built)) end
  return 'there'
end
redis.call('DEL', key_stream(id))
if built ~= '' then
  redis.call('RENAME', key_half(id, built), key_stream(id))
  redis.call('PERSIST', key_stream(id))
end
for i = 10, #A, 2 do redis.call('HSET', job, A[i], A[i + 1]) end
redis.call('HSET', job, 'id', id, 'events', 0, 'stalls', 0, 'state', state, 'queued_at', stamp(),
  'seq', redis.call('INCR', key_sequence()))
redis.call('ZADD', key_jobs(), math.floor(tonumber(get(id, 'created_at')) * 1000 + 0.5), id)
-- As if publish had written them one by one.
local payloads, entries = tonumber(get(id, 'written') or 0), redis.call('XLEN', key_stream(id))
if entries > 0 then redis.call('HSET', job, 'written', payloads + math.floor(payloads / 32) + ENTRY_BYTES * entries) end
if A[8] ~= '' and redis.call('SET', A[8], id .. '|' .. A[9], 'NX') then redis.call('HSET', job, 'idem', A[8]) end
if state == 'queued' then
  reserve(id)
  emit(id, { type = 'state', state = 'queued', epoch = tonumber(get(id, 'epoch')), reason = 'recover' })
  enqueue(id)
else
  finish(id, state, A[4], A[5], A[6])
  redis.call('HSET', job, 'finished_at', A[7])
end
return 'recovered'
