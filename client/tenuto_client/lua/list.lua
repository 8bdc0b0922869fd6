-- One stretch of the jobs older than a cursor, newest first. Looks at no more than 500, so as not to hold Redis up.
-- A: ms and id of the cursor ('+inf' and '' at the start), state or '', model or '', at most how many, then the fields
-- Returns {ms, id of the next cursor (id '' when there is no more), values of a job, values of the next, ...}.
local STRETCH = 500
local ms, id, state, model, limit = A[1], A[2], A[3], A[4], tonumber(A[5])
local fields = {}
for i = 6, #A do fields[i - 5] = A[i] end

local found = {}
local jobs = redis.call('ZREVRANGEBYSCORE', key_jobs(), ms, '-inf', 'WITHSCORES', 'LIMIT', 0, STRETCH)
for i = 1, #jobs, 2 do
  local job, at = jobs[i], jobs[i + 1]
  if id == '' or tonumber(at) < tonumber(ms) or job < id then
    ms, id = at, job
    local s = redis.call('HMGET', key_job(job), 'state', 'model')
    if s[1] and (state == '' or s[1] == state) and (model == '' or s[2] == model) then
      found[#found + 1] = redis.call('HMGET', key_job(job), unpack(fields))
      if #found == limit then return { ms, id, unpack(found) } end
    end
  end
end
return { ms, #jobs < 2 * STRETCH and '' or id, unpack(found) }
