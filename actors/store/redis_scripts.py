"""The scripts of the Redis store, in Lua: each runs as a whole. See `redis.py` for the keys.

What each gets and returns is where it is called.
"""

WRITE = """
local me, at = ARGV[1], 2
local changes, known, refused = {}, {}, {}
while ARGV[at] do
    local one = {session=ARGV[at], fence=tonumber(ARGV[at+1]), count=tonumber(ARGV[at+2]),
                 whole=ARGV[at+3] == '1', owner=ARGV[at+4], used=ARGV[at+5], expires=ARGV[at+6],
                 busy=ARGV[at+7], live=ARGV[at+8], drops=tonumber(ARGV[at+9]),
                 puts=tonumber(ARGV[at+10]), at=at+11}
    changes[#changes + 1] = one
    at = one.at + one.drops + 2 * one.puts
end
local function refusal(one, fence, count)  -- as `base.refusal`
    if not fence then
        local gone = redis.call('GET', 'ramify:gone:' .. one.session)
        if gone and tonumber(gone) >= one.fence then return 'moved' end
        if one.whole then return nil else return 'lost' end
    end
    if fence > one.fence then return 'moved' end
    if one.whole or (fence == one.fence and count >= one.count - 1) then return nil end
    return 'lost'
end
for place, one in ipairs(changes) do
    local found = known[one.session]
    if not found then
        found = redis.call('HMGET', 'ramify:session:' .. one.session, 'fence', 'count')
        found = {tonumber(found[1] or nil), tonumber(found[2] or '0')}
    end
    one.refused = refusal(one, found[1], found[2])
    if one.refused then refused[#refused + 1] = {place - 1, one.refused}
    else found = {one.fence, one.count} end
    known[one.session] = found
end
for _, one in ipairs(changes) do
    if not one.refused then
        local row, items = 'ramify:session:' .. one.session, 'ramify:items:' .. one.session
        local size, at, holder = 0, one.at, ''
        if one.live == '1' then holder = me end
        -- First what needs memory: it is refused before anything is written where there is none.
        redis.call('HSET', row, 'owner', one.owner, 'used', one.used, 'expires', one.expires,
                   'busy', one.busy, 'fence', string.format('%.0f', one.fence),
                   'count', string.format('%.0f', one.count), 'holder', holder)
        if one.whole then
            size = 0 - tonumber(redis.call('HGET', row, 'size') or '0')
            redis.call('UNLINK', items)
        end
        for i = at, at + one.drops - 1 do
            size = size - redis.call('HSTRLEN', items, ARGV[i])
            redis.call('HDEL', items, ARGV[i])
        end
        at = at + one.drops
        for i = at, at + 2 * one.puts - 1, 2 do
            size = size + string.len(ARGV[i + 1]) - redis.call('HSTRLEN', items, ARGV[i])
            redis.call('HSET', items, ARGV[i], ARGV[i + 1])
        end
        redis.call('HINCRBY', row, 'size', size)
        redis.call('INCRBY', 'ramify:bytes', size)
        redis.call('ZADD', 'ramify:used', one.used, one.session)
        if one.busy == '1' then redis.call('ZADD', 'ramify:busy', one.used, one.session)
        else redis.call('ZREM', 'ramify:busy', one.session) end
        if one.expires ~= '' then redis.call('ZADD', 'ramify:expires', one.expires, one.session)
        else redis.call('ZREM', 'ramify:expires', one.session) end
    end
end
return refused
"""

_HELD = """
local function held(session, me)
    local holder = redis.call('HGET', 'ramify:session:' .. session, 'holder')
    if not holder or holder == '' or holder == me then return false end
    return redis.call('EXISTS', 'ramify:alive:' .. holder) == 1 and holder
end
"""

_FORGET = """
local function forget(session)
    local size = redis.call('HGET', 'ramify:session:' .. session, 'size')
    if not size then return 0 end
    redis.call('DECRBY', 'ramify:bytes', size)
    redis.call('UNLINK', 'ramify:session:' .. session, 'ramify:items:' .. session)
    for _, set in ipairs({'used', 'busy', 'expires'}) do
        redis.call('ZREM', 'ramify:' .. set, session)
    end
    return 1
end
"""

TAKE = (
    _HELD
    + """
local session, me, how, now, clock = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local row = 'ramify:session:' .. session
local fence, expires = unpack(redis.call('HMGET', row, 'fence', 'expires'))
if not fence or (expires ~= '' and tonumber(expires) <= now) then return {'0'} end
local holder = held(session, me)
if holder and how ~= 'force' then
    if how == 'ask' then
        redis.call('SADD', 'ramify:wanted:' .. holder, session)
        redis.call('EXPIRE', 'ramify:wanted:' .. holder, 60)
        redis.call('SET', 'ramify:claimed:' .. session, 1, 'EX', ARGV[6])
    end
    return {'-1'}
end
fence = string.format('%.0f', math.max(tonumber(fence) + 1, clock))
redis.call('HSET', row, 'fence', fence, 'count', 0, 'holder', me)
redis.call('DEL', 'ramify:claimed:' .. session)
return {fence, redis.call('HGETALL', 'ramify:items:' .. session)}
"""
)

RELEASE = """
local row = 'ramify:session:' .. ARGV[1]
if redis.call('HGET', row, 'holder') == ARGV[2] then redis.call('HSET', row, 'holder', '') end
"""

FORGET_MINE = (
    _FORGET
    + """
if redis.call('HGET', 'ramify:session:' .. ARGV[1], 'fence') == ARGV[2] then
    redis.call('SET', 'ramify:gone:' .. ARGV[1], ARGV[2], 'EX', ARGV[3])
    forget(ARGV[1])
end
"""
)

DELETE = (
    _FORGET
    + """
for place = 2, #ARGV do
    local fence = redis.call('HGET', 'ramify:session:' .. ARGV[place], 'fence')
    if fence then redis.call('SET', 'ramify:gone:' .. ARGV[place], fence, 'EX', ARGV[1]) end
    forget(ARGV[place])
end
"""
)

REPLACE = """
local row, items = 'ramify:session:' .. ARGV[1], 'ramify:items:' .. ARGV[1]
if redis.call('HGET', items, ARGV[2]) == ARGV[3] then
    redis.call('HSET', items, ARGV[2], ARGV[4])
    local more = string.len(ARGV[4]) - string.len(ARGV[3])
    redis.call('HINCRBY', row, 'size', more)
    redis.call('INCRBY', 'ramify:bytes', more)
end
"""

WAITING = (
    _HELD
    + """
local left = {}
for _, session in ipairs(redis.call('ZREVRANGE', 'ramify:busy', 0, -1)) do
    if not held(session, '') and redis.call('EXISTS', 'ramify:claimed:' .. session) == 0 then
        left[#left + 1] = session
    end
end
return left
"""
)

SWEEP = (
    _HELD
    + _FORGET
    + """
local older, now, count = ARGV[1], ARGV[2], tonumber(ARGV[3])
local gone = 0
local expired = redis.call('ZRANGEBYSCORE', 'ramify:expires', '-inf', '(' .. now, 'LIMIT', 0, count)
for _, session in ipairs(expired) do
    if not held(session, '') then gone = gone + forget(session) end
end
local oldest = redis.call('ZRANGEBYSCORE', 'ramify:used', '-inf', '(' .. older, 'LIMIT', 0, count)
for _, session in ipairs(oldest) do
    if not held(session, '') then gone = gone + forget(session) end
end
return {gone, tonumber(redis.call('GET', 'ramify:bytes') or '0')}
"""
)

EVICT = (
    _HELD
    + _FORGET
    + """
local gone = 0
for _, session in ipairs(ARGV) do
    if not held(session, '') then gone = gone + forget(session) end
end
return gone
"""
)
