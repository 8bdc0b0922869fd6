-- The best queued job of a model that this worker may take, had it the memory. Looks at the first LOOKS jobs.
-- A: model, fingerprint, reach, exact_wait in s, max_prompt, max_tokens, tokens for which it has memory when it runs nothing
-- (-1 is no limit), the fingerprints by adapter as JSON
-- Returns {} | {id, priority, tokens of prompt and answer as far as they are known, seconds for which it has waited, 1 when
-- something makes way for it already}.
local model = A[1]
local terms = { fingerprint = A[2], reach = A[3], exact_wait = tonumber(A[4]), max_prompt = A[5], max_tokens = A[6], room = A[7],
  adapters = adapters_of(A[8]) }
local function offer(id)
  local priority, prompt, wanted, queued_at, suspected =
    read(id, 'priority', 'prompt_tokens', 'max_tokens', 'queued_at', 'suspect')
  if suspected or too_late(id) or unfit(id, terms) then return nil end
  local tokens = tonumber(prompt or 0) + tonumber(wanted)
  local waited = string.format('%.3f', now() - tonumber(queued_at))
  return { id, tonumber(priority) + 0, tokens, waited, is_provided_for(id) and 1 or 0 }
end

return look(model, { 0, 0 }, LOOKS, function(id)
  local found = looked(offer, id)
  return found
end) or {}
