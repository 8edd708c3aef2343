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
from ramify.actors.store.redis_scripts import (
    DELETE,
    EVICT,
    FORGET_MINE,
    RELEASE,
    REPLACE,
    SWEEP,
    TAKE,
    WAITING,
    WRITE,
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
        self._write, self._take, self._release = script(WRITE), script(TAKE), script(RELEASE)
        self._forget, self._delete = script(FORGET_MINE), script(DELETE)
        self._waiting, self._sweep = script(WAITING), script(SWEEP)
        self._evict = script(EVICT)
        self._replace = script(REPLACE)
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
