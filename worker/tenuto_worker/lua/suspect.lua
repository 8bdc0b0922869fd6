-- The first queued job of a model that has to run apart and that this worker may take when it runs nothing.
-- A: model, fingerprint, reach, exact_wait in s, max_prompt, max_tokens, tokens for which it has memory then (-1 is no limit),
-- the fingerprints by adapter as JSON
-- Returns its id, or ''.
local model = A[1]
local terms = { fingerprint = A[2], reach = A[3], exact_wait = tonumber(A[4]), max_prompt = A[5], max_tokens = A[6], room = A[7],
  adapters = adapters_of(A[8]) }
for _, id in ipairs(redis.call('ZRANGE', key_suspects(model), 0, 63)) do
  if not too_late(id) and not unfit(id, terms) then return id end
end
return ''
