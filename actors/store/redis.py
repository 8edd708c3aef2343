"""Sessions in a Redis or Valkey database that several servers share.

    ramify:session:ID   hash: owner, used, expires, busy, holder, fence, count, size
    ramify:items:ID     hash: the session's items
    ramify:used, ramify:busy, ramify:expires    sorted sets of sessions, by time
    ramify:bytes        the size of all items
    ramify:alive:HOLDER, ramify:wanted:HOLDER   a server's sign of life, and what others want of it
    ramify:claimed:ID   for a moment: somebody has asked for it
    ramify:gone:ID      for a day: the fence under which it was deleted

Whatever changes more than one key is a script, which Redis runs as a whole: a batch with its fences is
one. How safe a `sync` commit is says Redis' own configuration (`warnings`); it must keep all keys
(`maxmemory-policy noeviction`). A cluster of Redis servers with its slots is not supported: a batch has
keys of many sessions. Every call has a time limit. A connection that is lost is made anew by the next.
"""

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ramify.actors.kit.log import get_log
from ramify.actors.store.base import (
    GONE_SECONDS,
    SECRET_BYTES,
    How,
    Refusal,
    StoreDamaged,
    StoreError,
    StoreStarting,
    Taken,
)
from ramify.actors.store.retention import surplus
from ramify.protocol.keyless import HOLD_KEYS, keyless
from ramify.protocol.saved import HEAD, HISTORY, Changes, StoredSession, next_fence
from ramify.protocol.store_url import shown

LAYOUT = 2  # of the keys; 1 had no counts, and keys of sessions in clear
CONNECT_SECONDS = 5
CALL_SECONDS = 10
LEASE_SECONDS = 10  # without a sign of life, until a server counts as dead
CLAIM_SECONDS = 3  # for who has asked for a session: it is let go for that one
BEAT_SECONDS = 2.0  # between two signs
SWEPT = 5000  # sessions that one sweep looks at, the longest unused first
CHUNK = 500  # sessions that are listed at once

log = get_log(__name__)
_WRITE = """
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

_TAKE = (
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

_RELEASE = """
local row = 'ramify:session:' .. ARGV[1]
if redis.call('HGET', row, 'holder') == ARGV[2] then redis.call('HSET', row, 'holder', '') end
"""

_FORGET_MINE = (
    _FORGET
    + """
if redis.call('HGET', 'ramify:session:' .. ARGV[1], 'fence') == ARGV[2] then
    redis.call('SET', 'ramify:gone:' .. ARGV[1], ARGV[2], 'EX', ARGV[3])
    forget(ARGV[1])
end
"""
)

_DELETE = (
    _FORGET
    + """
for place = 2, #ARGV do
    local fence = redis.call('HGET', 'ramify:session:' .. ARGV[place], 'fence')
    if fence then redis.call('SET', 'ramify:gone:' .. ARGV[place], fence, 'EX', ARGV[1]) end
    forget(ARGV[place])
end
"""
)

_REPLACE = """
local row, items = 'ramify:session:' .. ARGV[1], 'ramify:items:' .. ARGV[1]
if redis.call('HGET', items, ARGV[2]) == ARGV[3] then
    redis.call('HSET', items, ARGV[2], ARGV[4])
    local more = string.len(ARGV[4]) - string.len(ARGV[3])
    redis.call('HINCRBY', row, 'size', more)
    redis.call('INCRBY', 'ramify:bytes', more)
end
"""

_WAITING = (
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

_SWEEP = (
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

_EVICT = (
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


class RedisStore:
    """A `Store` in the database at `url`. Raises StoreError."""

    shared = True

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self._name = shown(url)
        self._read_only = read_only
        self._holder = secrets.token_hex(8)
        self._beaten = 0.0
        self.connections = 0
        scheme, _, rest = url.partition("://")
        secure = "s" if scheme in ("rediss", "valkeys") else ""
        try:
            self._db: Any = redis.Redis.from_url(
                f"redis{secure}://{rest}",
                socket_timeout=CALL_SECONDS,
                socket_connect_timeout=CONNECT_SECONDS,
                socket_keepalive=True,
                retry=Retry(NoBackoff(), 0),
                client_name="ramify",
                redis_connect_func=self._connected,
            )
        except (ValueError, TypeError, redis.RedisError):  # what it says may hold a password
            raise StoreError(f"--store {self._name}: cannot be read as a URL of Redis") from None
        script = self._db.register_script
        self._write, self._take, self._release = script(_WRITE), script(_TAKE), script(_RELEASE)
        self._forget, self._delete = script(_FORGET_MINE), script(_DELETE)
        self._waiting, self._sweep = script(_WAITING), script(_SWEEP)
        self._evict = script(_EVICT)
        self._replace = script(_REPLACE)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        if not self._read_only:
            self._call(lambda: self._db.hsetnx("ramify:about", "format", LAYOUT))
        found = self._call(lambda: self._db.hget("ramify:about", "format"))
        if found is None or not found.isdigit():
            raise StoreError(f"{self._name} is no store of sessions")
        if int(found) > LAYOUT:
            raise StoreError(
                f"the store {self._name} has format {int(found)}, this version of Ramify knows up to "
                f"{LAYOUT}: use the newer version, or another store"
            )
        if not self._read_only:
            if int(found) < LAYOUT:
                self._migrate()
            self.tend()

    def _connected(self, connection: Any) -> None:
        connection.on_connect()
        self.connections += 1
        if self.connections > 1 and not self._read_only:  # the database may have come back empty
            connection.send_command("HSETNX", "ramify:about", "format", LAYOUT)
            connection.read_response()

    def _migrate(self) -> None:
        """Migrate from layout 1: takes keys of sessions out of the items, and out of the database's
        files.
        """
        for session in (
            name.decode() for name in self._call(lambda: self._db.zrange("ramify:used", 0, -1))
        ):
            for key, body in self.read(session).items():
                clean = keyless(key, body) if key.startswith(HOLD_KEYS) else None
                if clean is not None:
                    self._call(partial(self._replace, args=[session, key, body, clean]))
        self._call(lambda: self._db.hset("ramify:about", "format", LAYOUT))
        try:
            self.rewrite()
        except StoreError as error:
            log.warning(
                "the database does not write its files anew now; keys of sessions that an older version "
                "saved stand in them until it does (BGREWRITEAOF, BGSAVE)",
                error=str(error),
            )

    def rewrite(self) -> None:
        """Have the database write its files anew, without what was deleted or replaced."""
        if self._call(lambda: self._db.config_get("appendonly")).get("appendonly") == "yes":
            self._call(lambda: self._db.bgrewriteaof())
        elif self._call(lambda: self._db.config_get("save")).get("save"):
            self._call(lambda: self._db.bgsave(schedule=True))

    def warnings(self) -> list[str]:
        try:
            known = self._call(
                lambda: {
                    name: self._db.config_get(name).get(name, "")
                    for name in ("appendonly", "appendfsync", "maxmemory-policy")
                }
            )
        except StoreError:  # some that are hosted do not tell
            return [
                f"{self._name} does not tell its settings: `sync` needs appendonly yes and appendfsync "
                "always, all sessions maxmemory-policy noeviction"
            ]
        found: list[str] = []
        if known["appendonly"] != "yes":
            found.append(
                f"{self._name} has appendonly {known['appendonly']}: a restart of it loses sessions"
            )
        elif known["appendfsync"] != "always":
            found.append(
                f"{self._name} has appendfsync {known['appendfsync']}: a crash of its machine may lose "
                "replies of `sync`, which needs appendfsync always"
            )
        if known["maxmemory-policy"].startswith("allkeys"):
            found.append(
                f"{self._name} has maxmemory-policy {known['maxmemory-policy']}: it may throw sessions "
                "away, give it noeviction"
            )
        return found

    # --- a `Store` -------------------------------------------------------------------------------

    def write(self, batch: Sequence[Changes]) -> dict[int, Refusal]:
        args: list[Any] = [self._holder]
        for each in batch:
            args += (each.session, each.fence, each.count, int(each.whole), each.owner, repr(each.used))
            args += ("" if each.expires is None else repr(each.expires), int(each.busy), int(each.live))
            args += (len(each.drop), len(each.put), *each.drop)
            for item in each.put.items():
                args += item
        return {place: why.decode() for place, why in self._call(lambda: self._write(args=args))}

    def behind(self, known: Mapping[str, tuple[int, int]]) -> list[str]:
        lost: list[str] = []
        names = list(known)
        for at in range(0, len(names), CHUNK):
            part = names[at : at + CHUNK]
            found = self._call(partial(self._fences, part))
            for name, ((fence, count), gone) in zip(part, found, strict=True):
                has = (int(fence or 0), int(count or 0))
                if not (fence is None and gone) and has < known[name]:
                    lost.append(name)
        return lost

    def _fences(self, names: Sequence[str]) -> list[Any]:
        with self._db.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hmget(f"ramify:session:{name}", "fence", "count")
                pipe.exists(f"ramify:gone:{name}")
            found = pipe.execute()
        return list(zip(found[::2], found[1::2], strict=True))

    def set_aside(self, session: str) -> None:
        raise StoreDamaged(f"the store {self._name}: its items are in memory, where they do not break")

    def take(self, session: str, how: How) -> Taken | None:
        args: list[Any] = [session, self._holder, how, repr(time.time()), next_fence(), CLAIM_SECONDS]
        found = self._call(lambda: self._take(args=args))
        fence = int(found[0])
        if fence < 0:
            return None
        return Taken(fence, _items(found[1]) if fence else {})

    def release(self, session: str) -> None:
        self._call(lambda: self._release(args=[session, self._holder]))

    def forget(self, session: str, fence: int) -> None:
        self._call(lambda: self._forget(args=[session, fence, GONE_SECONDS]))

    def head(self, session: str) -> bytes | None:
        body: bytes | None = self._call(lambda: self._db.hget(f"ramify:items:{session}", HEAD))
        return body if body is not None and not self._expired(session) else None

    def read(self, session: str) -> Mapping[str, bytes]:
        found = self._call(lambda: self._db.hgetall(f"ramify:items:{session}"))
        if not found or self._expired(session):
            return {}
        return {key.decode(): body for key, body in found.items()}

    def _expired(self, session: str) -> bool:
        at = self._call(lambda: self._db.hget(f"ramify:session:{session}", "expires"))
        return bool(at) and float(at) <= time.time()

    def delete(self, sessions: Sequence[str]) -> None:
        for at in range(0, len(sessions), CHUNK):
            part = list(sessions[at : at + CHUNK])
            self._call(partial(self._delete, args=[GONE_SECONDS, *part]))

    def kept(self) -> Iterator[StoredSession]:
        alive: dict[bytes, bool] = {}
        names = self._call(lambda: self._db.zrevrange("ramify:used", 0, -1))
        for at in range(0, len(names), CHUNK):
            part = [name.decode() for name in names[at : at + CHUNK]]
            for name, row in zip(part, self._rows(part), strict=True):
                if row[1] is not None:  # else it went meanwhile
                    owner, used, expires, busy, size, holder = row
                    if holder not in alive:
                        key = b"ramify:alive:" + holder
                        alive[holder] = bool(holder) and bool(self._call(partial(self._db.exists, key)))
                    yield StoredSession(
                        name,
                        owner.decode(),
                        float(used),
                        float(expires) if expires else None,
                        busy == b"1",
                        int(size),
                        alive[holder],
                    )

    def _rows(self, names: Sequence[str]) -> list[Any]:
        def ask() -> list[Any]:
            with self._db.pipeline(transaction=False) as pipe:
                for name in names:
                    row = f"ramify:session:{name}"
                    pipe.hmget(row, "owner", "used", "expires", "busy", "size", "holder")
                return list(pipe.execute())

        return list(self._call(ask))

    def waiting(self) -> list[str]:
        return [name.decode() for name in self._call(lambda: self._waiting())]

    def sweep(self, *, older_than: float, most: int, now: float) -> int:
        args: list[Any] = [repr(older_than), repr(now), SWEPT]
        gone, size = self._call(lambda: self._sweep(args=args))
        return int(gone) + (self._evict_over(size - most) if size > most else 0)

    def _evict_over(self, over: int) -> int:
        """Reads the row of each session: the database does not add them up by owner."""
        held: Counter[str] = Counter()
        free: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)  # the last used first
        for kept in self.kept():
            held[kept.owner] += kept.size
            if not kept.live:
                free[kept.owner].append((kept.session, kept.size))
        names = surplus(held, lambda owner: reversed(free[owner]), over, SWEPT)
        gone = 0
        for at in range(0, len(names), CHUNK):
            gone += int(self._call(partial(self._evict, args=names[at : at + CHUNK])))
        return gone

    def tend(self) -> list[str]:
        now = time.monotonic()
        if now - self._beaten > BEAT_SECONDS:
            alive = f"ramify:alive:{self._holder}"
            self._call(lambda: self._db.set(alive, "1", ex=LEASE_SECONDS))
            self._beaten = now
        wanted = self._call(lambda: self._db.spop(f"ramify:wanted:{self._holder}", CHUNK))
        return [name.decode() for name in wanted]

    def clock(self) -> float | None:
        found = self._call(lambda: self._db.hget("ramify:about", "clock"))
        return None if found is None else float(found)

    def set_clock(self, now: float) -> None:
        self._call(lambda: self._db.hset("ramify:about", "clock", repr(now)))

    def secret(self) -> bytes:
        made = secrets.token_bytes(SECRET_BYTES)
        self._call(partial(self._db.hsetnx, "ramify:about", "secret", made))
        secret: bytes = self._call(lambda: self._db.hget("ramify:about", "secret"))
        return secret

    def mark(self) -> bytes | None:
        mark: bytes | None = self._call(lambda: self._db.hget("ramify:about", "mark"))
        return mark

    def set_mark(self, value: bytes, *, replace: bool) -> None:
        put = self._db.hset if replace else self._db.hsetnx
        self._call(partial(put, "ramify:about", "mark", value))

    def check(self) -> list[str]:
        faults = []
        for kept in self.kept():
            items = self._call(partial(self._db.hgetall, f"ramify:items:{kept.session}"))
            size = sum(map(len, items.values()))
            if HEAD.encode() not in items and not kept.session.startswith(HISTORY):
                faults.append(f"session {kept.session}: no head")
            if size != kept.size:
                faults.append(f"session {kept.session}: {size} bytes, not {kept.size}")
        return faults

    def close(self) -> None:
        with suppress(redis.RedisError):
            if not self._read_only:
                self._db.delete(f"ramify:alive:{self._holder}")
        self._db.close()

    # --- errors ----------------------------------------------------------------------------------

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (redis.RedisError, OSError) as error:
            text = " ".join(str(error).split())
            advice = ": give it more memory" if "maxmemory" in text else ""
            kind = StoreStarting if isinstance(error, redis.BusyLoadingError) else StoreError
            raise kind(f"the store {self._name}: {text}{advice}") from error


def _items(flat: Sequence[bytes]) -> dict[str, bytes]:
    """A dict of alternating keys and bodies."""
    return {flat[at].decode(): flat[at + 1] for at in range(0, len(flat), 2)}
