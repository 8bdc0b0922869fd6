-- Append tokens first..last to the stream. A: id, epoch, nonce, durable, first, last, payload
-- Returns {'ok' | 'replay' | 'gap' | 'fenced', published tokens, 1 when a cancel is wanted, 1 while the job is to run apart}.
local id, epoch, nonce, durable, first, last, payload = A[1], A[2], A[3], A[4], tonumber(A[5]), tonumber(A[6]), A[7]
if not is_owner(id, epoch, nonce) then return { 'fenced', 0, 0, 0 } end
local published, wanted, written = read(id, 'tokens', 'max_tokens', 'written')
-- Only what is computed with here: this runs for every token.
if not (published and wanted and is_whole(published) and is_whole(written or '0')) then
  owned(id, epoch, nonce)
  return { 'fenced', 0, 0, 0 }
end
published = tonumber(published)
if last <= published then return { 'replay', published, cancel_wanted(id), trust(id, published) } end
-- An entry that begins with tokens that stand there would put them into the stream a second time.
if first ~= published + 1 then return { 'gap', published, cancel_wanted(id), trust(id, published) } end
if not append(id, A[6] .. '-0', 't', payload) then
  put_aside(id, 'stream: token ' .. A[6] .. ' cannot be appended, somebody else has changed it', {})
  return { 'fenced', 0, 0, 0 }
end
redis.call('HINCRBY', key_job(id), 'written', entry_bytes(#payload))
-- The next renewal is seconds away; until then the progress would still be that of the prompt.
redis.call('HSET', key_job(id), 'tokens', A[6], 'events', 0, 'durable', durable,
  'phase', 'decode', 'phase_done', A[6], 'phase_total', wanted)
progressed(id)
return { 'ok', last, cancel_wanted(id), trust(id, last) }
