-- One stretch of the jobs older than a cursor, newest first. Looks at no more than 500, so as not to hold Redis up.
-- A: ms and id of the cursor ('+inf' and '' at the start), state or '', model or '', tenant or '', at most how many, then the fields
-- Returns {ms, id of the next cursor (id '' when there is no more), values of a job, values of the next, ...}.
local STRETCH = 500
local ms, id, state, model, tenant, limit = A[1], A[2], A[3], A[4], A[5], tonumber(A[6])
local fields = {}
for i = 7, #A do fields[i - 6] = A[i] end

local found = {}
local jobs = redis.call('ZREVRANGEBYSCORE', key_jobs(), ms, '-inf', 'WITHSCORES', 'LIMIT', 0, STRETCH)
for i = 1, #jobs, 2 do
  local job, at = jobs[i], jobs[i + 1]
  if id == '' or tonumber(at) < tonumber(ms) or job < id then
    ms, id = at, job
    local s = redis.call('HMGET', key_job(job), 'state', 'model', 'tenant')
    if s[1] and (state == '' or s[1] == state) and (model == '' or s[2] == model) and (tenant == '' or s[3] == tenant) then
      found[#found + 1] = redis.call('HMGET', key_job(job), unpack(fields))
      if #found == limit then return { ms, id, unpack(found) } end
    end
  end
end
return { ms, #jobs < 2 * STRETCH and '' or id, unpack(found) }
