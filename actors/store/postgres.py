"""Sessions in a PostgreSQL database that several servers share.

A batch is one transaction, which locks the rows of its sessions and compares fences. A commit that
nobody waits for is not flushed first (`synchronous_commit = off`): a crash of the database's machine may
take the last half second along. A `sync` commit is as safe as the database's own setting says.

A server that lives has a row in `ramify_holders`, with a time of the database's clock. Every call has a
time limit. A connection that is lost is made anew by the next call.
"""

import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
import psycopg
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict

from ramify.actors.kit.log import get_log
from ramify.actors.store.base import (
    ASIDE,
    GONE_SECONDS,
    SECRET_BYTES,
    How,
    Refusal,
    StoreDamaged,
    StoreError,
    StoreStarting,
    Taken,
    refusal,
)
from ramify.actors.store.retention import surplus
from ramify.protocol.keyless import HOLD_KEYS, keyless
from ramify.protocol.saved import HEAD, HISTORY, Changes, StoredSession, next_fence
from ramify.protocol.store_url import shown

T = TypeVar("T")
LAYOUT = 2  # of the tables; 1 had no counts, and keys of sessions in clear
CONNECT_SECONDS = 5
CALL_SECONDS = 10
SWEEP_SECONDS = 30
LATE_SECONDS = 2  # beyond a call's limit, which the database keeps itself, until it is taken for dead
LEASE_SECONDS = 10  # without a sign of life, until a server counts as dead
CLAIM_SECONDS = 3  # for who has asked for a session: it is let go for that one
BEAT_SECONDS = 2.0  # between two signs
SWEPT = 5000  # sessions that one sweep forgets at most
CHUNK = 500  # sessions that one statement of a migration or a comparison looks at
CLEAN_SECONDS = 600  # for writing a table anew

# A server that vanishes is noticed by the system's TCP.
_CONNECTION: dict[str, Any] = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 1000 * CALL_SECONDS,
    "application_name": "ramify",
    "client_encoding": "utf8",
}

log = get_log(__name__)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS ramify_about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS ramify_holders (holder TEXT PRIMARY KEY, seen TIMESTAMPTZ NOT NULL);
CREATE TABLE IF NOT EXISTS ramify_sessions (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    session TEXT COLLATE "C" NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    used DOUBLE PRECISION NOT NULL,
    expires DOUBLE PRECISION,
    busy BOOLEAN NOT NULL,
    holder TEXT,
    wanted BOOLEAN NOT NULL DEFAULT FALSE,
    claimed TIMESTAMPTZ,
    fence BIGINT NOT NULL,
    size BIGINT NOT NULL,
    count BIGINT NOT NULL DEFAULT 0
) WITH (fillfactor = 70);
CREATE INDEX IF NOT EXISTS ramify_wanted ON ramify_sessions (holder) WHERE wanted;
CREATE INDEX IF NOT EXISTS ramify_busy ON ramify_sessions (number) WHERE busy;
CREATE TABLE IF NOT EXISTS ramify_items (
    session BIGINT NOT NULL REFERENCES ramify_sessions (number) ON DELETE CASCADE,
    key BYTEA NOT NULL,
    body BYTEA NOT NULL,
    PRIMARY KEY (session, key)
);
INSERT INTO ramify_about VALUES ('format', '2') ON CONFLICT DO NOTHING;
"""
# Sessions that were deleted, so that a server which has one in memory does not save it anew.
_GONE = """
CREATE TABLE IF NOT EXISTS ramify_gone (
    session TEXT COLLATE "C" PRIMARY KEY, fence BIGINT NOT NULL, at TIMESTAMPTZ NOT NULL DEFAULT now()
)
"""
_DELETE = """
WITH gone AS (DELETE FROM ramify_sessions WHERE {which} RETURNING session, fence)
INSERT INTO ramify_gone (session, fence) SELECT * FROM gone
ON CONFLICT (session) DO UPDATE SET fence = excluded.fence, at = now()
"""

_MAKING = (
    0x72616D696679  # an advisory lock: servers that start at once make the tables one after another
)

_INSERT = """
INSERT INTO ramify_sessions (session, owner, used, busy, fence, size)
SELECT session, '', 0, FALSE, fence, 0 FROM unnest(%s::text[], %s::bigint[]) AS t (session, fence)
RETURNING session, number
"""

_WRITE = """
WITH put AS (
    SELECT * FROM unnest(%(put_sessions)s::bigint[], %(put_keys)b::bytea[], %(put_bodies)b::bytea[])
        AS t (session, key, body)
), gone AS (
    SELECT * FROM unnest(%(gone_sessions)s::bigint[], %(gone_keys)b::bytea[]) AS t (session, key)
), before AS (
    SELECT session, octet_length(body) AS size FROM ramify_items
    JOIN (SELECT session, key FROM put UNION ALL SELECT session, key FROM gone) AS k
        USING (session, key)
), written AS (
    INSERT INTO ramify_items SELECT * FROM put
    ON CONFLICT (session, key) DO UPDATE SET body = excluded.body
), dropped AS (
    DELETE FROM ramify_items AS i USING gone WHERE i.session = gone.session AND i.key = gone.key
), grown AS (
    SELECT session, sum(size) AS size FROM (
        SELECT session, octet_length(body) AS size FROM put
        UNION ALL SELECT session, -size FROM before
    ) AS t GROUP BY session
)
UPDATE ramify_sessions AS s
SET owner = t.owner, used = t.used, expires = t.expires, busy = t.busy,
    holder = CASE WHEN t.live THEN %(holder)s END, wanted = s.wanted AND t.live,
    fence = t.fence, count = t.count,
    size = s.size + coalesce(grown.size, 0)
FROM unnest(%(numbers)s::bigint[], %(owners)s::text[], %(used)s::float8[], %(expires)s::float8[],
            %(busy)s::bool[], %(live)s::bool[], %(fences)s::bigint[], %(counts)s::bigint[])
    AS t (number, owner, used, expires, busy, live, fence, count)
LEFT JOIN grown ON grown.session = t.number
WHERE s.number = t.number
"""

_ALIVE = (
    "EXISTS (SELECT 1 FROM ramify_holders AS h WHERE h.holder = s.holder "
    f"AND h.seen > now() - interval '{LEASE_SECONDS} seconds')"
)


class _Connection(psycopg.Connection[Any]):
    """A connection with time limits: a server that hangs, or its machine, never answers.

    `until`: a time of `time.monotonic`.
    """

    until = math.inf

    def wait(self, gen: PQGen[T], *args: Any, **settings: Any) -> T:
        return super().wait(self._limited(gen), *args, **settings)  # looks ten times a second

    def _limited(self, gen: PQGen[T]) -> PQGen[T]:
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > self.until:
                    raise psycopg.OperationalError("the database does not answer")
                wanted = gen.send(ready)
        except StopIteration as end:
            result: T = end.value
            return result


def _built(statement: str) -> bytes:
    """A statement made of our own parts only: psycopg takes text that is no literal as bytes."""
    return statement.encode()


TOLD = "numbers", "owners", "used", "expires", "busy", "live", "fences", "counts"


class _SessionBatch(msgspec.Struct):
    """The changes of one batch to one session."""

    number: int
    fence: int
    count: int
    last: Changes | None = None
    anew: bool = False  # what is there goes
    put: dict[str, bytes] = {}
    drop: set[str] = set()

    def add(self, changes: Changes) -> None:
        if changes.whole:
            self.anew, self.put, self.drop = True, {}, set()
        for key in changes.drop:
            self.put.pop(key, None)
            self.drop.add(key)
        for key, body in changes.put.items():
            self.put[key] = body
            self.drop.discard(key)
        self.last = changes
        self.fence, self.count = changes.fence, changes.count

    def told(self) -> tuple[Any, ...]:
        """What the session's row gets: `TOLD`."""
        last = self.last
        assert last is not None
        return (
            self.number,
            last.owner,
            float(last.used),
            _float(last.expires),
            last.busy,
            last.live,
            last.fence,
            last.count,
        )


class PostgresStore:
    """A `Store` in the database at `url`, whose tables are made if they are not there.

    Raises StoreError.
    """

    shared = True

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self._name = shown(url)
        self._read_only = read_only
        self._holder = secrets.token_hex(8)
        self._beaten = 0.0
        self.connections = 0
        self._flush = "" if read_only else "SET LOCAL synchronous_commit = on;"
        self._db: _Connection | None = None
        try:
            given = conninfo_to_dict(url)
        except psycopg.Error:  # what it says may hold a password
            raise StoreError(f"--store {self._name}: cannot be read as a URL of PostgreSQL") from None
        self._settings: dict[str, Any] = _CONNECTION | given
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        with self._transaction() as db:
            known = db.execute("SELECT to_regclass('ramify_about') IS NOT NULL").fetchone()
            if known is None or not known[0]:
                if self._read_only:
                    raise StoreError(f"{self._name} is no store of sessions")
                _make(db)
            found = db.execute("SELECT value FROM ramify_about WHERE name = 'format'").fetchone()
            durable = db.execute("SHOW synchronous_commit").fetchone()
        if found is None or not found[0].isdecimal():
            raise StoreError(f"{self._name} is no store of sessions, or it is damaged")
        if int(found[0]) > LAYOUT:
            raise StoreError(
                f"the store {self._name} has format {found[0]}, this version of Ramify knows up to "
                f"{LAYOUT}: use the newer version, or another store"
            )
        if not self._read_only:
            if durable is not None and durable[0] != "off":
                self._flush = ""  # what the database does by itself may be more
            if int(found[0]) < LAYOUT:
                self._migrate()
            self._clean()
            self.tend()

    def _migrate(self) -> None:
        """Migrate from layout 1. Other servers wait, or repeat it."""
        with self._transaction() as db:
            db.execute("SELECT pg_advisory_xact_lock(%s)", (_MAKING,))
            db.execute(
                "ALTER TABLE ramify_sessions ADD COLUMN IF NOT EXISTS count BIGINT NOT NULL DEFAULT 0"
            )
            db.execute(_GONE)
            db.execute("INSERT INTO ramify_about VALUES ('to clean', '1') ON CONFLICT DO NOTHING")
            rows = db.execute("SELECT number FROM ramify_sessions").fetchall()
        numbers = [row[0] for row in rows]
        for at in range(0, len(numbers), CHUNK):
            self._without_keys(numbers[at : at + CHUNK])
        with self._transaction() as db:
            db.execute("UPDATE ramify_about SET value = %s WHERE name = 'format'", (str(LAYOUT),))

    def _without_keys(self, numbers: list[int]) -> None:
        """Take keys out of the items of these sessions."""
        with self._transaction(seconds=SWEEP_SECONDS) as db:
            found = db.execute(
                "SELECT i.session, key, body FROM ramify_items AS i JOIN ramify_sessions AS s "
                "ON i.session = s.number WHERE i.session = ANY(%s) AND substr(key, 1, 1) = ANY(%s) "
                "FOR UPDATE",
                (numbers, [each.encode() for each in HOLD_KEYS]),
                binary=True,
            )
            for number, key, body in found.fetchall():
                clean = keyless(bytes(key).decode(), bytes(body))
                if clean is not None:
                    db.execute(
                        "UPDATE ramify_items SET body = %s WHERE session = %s AND key = %s",
                        (clean, number, key),
                    )
                    db.execute(
                        "UPDATE ramify_sessions SET size = size + %s WHERE number = %s",
                        (len(clean) - len(body), number),
                    )

    def _clean(self) -> None:
        """Write the items anew, if old versions of them hold keys of sessions."""
        with self._transaction() as db:
            due = db.execute("SELECT 1 FROM ramify_about WHERE name = 'to clean'").fetchone()
        if due is None:
            return
        log.info("the store is written anew, without what was deleted", store=self._name)
        try:
            self.rewrite()
            with self._transaction() as db:
                db.execute("DELETE FROM ramify_about WHERE name = 'to clean'")
        except StoreError as error:
            log.warning(
                "the store could not be written anew; keys of sessions that an older version saved may "
                "stand in its files until the next start can, or VACUUM FULL ramify_items",
                store=self._name,
                error=str(error),
            )

    def rewrite(self) -> None:
        """Write the tables anew: nothing of what was deleted or replaced stays in them. The database's
        own log, and its archive, have it as long as they are kept.
        """
        with self._transaction(seconds=CLEAN_SECONDS):
            pass  # a connection
        assert self._db is not None
        try:
            self._db.until = time.monotonic() + CLEAN_SECONDS
            self._db.execute("VACUUM (FULL) ramify_items", prepare=False)
        except psycopg.Error as error:
            self._undo(self._db)
            raise StoreError(f"the store {self._name}: {_told(error)}") from error

    def warnings(self) -> list[str]:
        with self._transaction() as db:
            row = db.execute("SHOW fsync").fetchone()
        if row is not None and row[0] == "off":
            return [f"{self._name} has fsync off: a crash of its machine may lose replies of `sync`"]
        return []

    # --- a `Store` -------------------------------------------------------------------------------

    def write(self, batch: Sequence[Changes]) -> dict[int, Refusal]:
        refused: dict[int, Refusal] = {}
        with self._transaction(sync=any(changes.sync for changes in batch)) as db:
            names = list({changes.session for changes in batch})
            found = db.execute(
                "SELECT session, number, fence, count FROM ramify_sessions WHERE session = ANY(%s) "
                "ORDER BY number FOR UPDATE",
                (names,),
            )
            rows = {row[0]: _SessionBatch(*row[1:]) for row in found}
            gone = self._gone(db, [name for name in names if name not in rows])
            for place, changes in enumerate(batch):
                row = rows.get(changes.session)
                known = None if row is None else (row.fence, row.count)
                why = refusal(changes, known, gone.get(changes.session, 0))
                if why is not None:
                    refused[place] = why
                    continue
                if row is None:
                    row = rows[changes.session] = _SessionBatch(0, changes.fence, 0)
                row.add(changes)
            self._write(db, {name: row for name, row in rows.items() if row.last is not None})
        return refused

    @staticmethod
    def _gone(db: psycopg.Connection[Any], names: list[str]) -> dict[str, int]:
        """Under which fences these were deleted, if they were."""
        if not names:
            return {}
        found = db.execute("SELECT session, fence FROM ramify_gone WHERE session = ANY(%s)", (names,))
        return dict(found.fetchall())

    def behind(self, known: Mapping[str, tuple[int, int]]) -> list[str]:
        lost: list[str] = []
        names = list(known)
        for at in range(0, len(names), CHUNK):
            part = names[at : at + CHUNK]
            with self._transaction() as db:
                found = db.execute(
                    "SELECT session, fence, count FROM ramify_sessions WHERE session = ANY(%s)", (part,)
                )
                rows = {row[0]: (row[1], row[2]) for row in found}
                gone = self._gone(db, [name for name in part if name not in rows])
            lost += [name for name in part if name not in gone and rows.get(name, (0, 0)) < known[name]]
        return lost

    def set_aside(self, session: str) -> None:
        with self._transaction() as db:
            db.execute(
                "UPDATE ramify_sessions SET session = session || %s || number || ')', holder = NULL, "
                "busy = FALSE WHERE session = %s",
                (ASIDE, session),
            )

    def _write(self, db: psycopg.Connection[Any], rows: dict[str, _SessionBatch]) -> None:
        self._make_room(db, rows)
        puts = [
            (row.number, key.encode(), body) for row in rows.values() for key, body in row.put.items()
        ]
        gone = [(row.number, key.encode()) for row in rows.values() for key in row.drop]
        last = [row.told() for row in rows.values() if row.last is not None]
        if last:
            columns = {
                **_columns(("put_sessions", "put_keys", "put_bodies"), puts),
                **_columns(("gone_sessions", "gone_keys"), gone),
                **_columns(TOLD, last),
            }
            db.execute(_WRITE, {**columns, "holder": self._holder})

    @staticmethod
    def _make_room(db: psycopg.Connection[Any], rows: dict[str, _SessionBatch]) -> None:
        """Number those that are new, and empty those that come anew."""
        new = [(name, row.fence) for name, row in rows.items() if not row.number]
        if new:
            names, fences = zip(*new, strict=True)
            for name, number in db.execute(_INSERT, (list(names), list(fences))):
                rows[name].number = number
        anew = [row.number for row in rows.values() if row.anew and row.number]
        if anew:
            db.execute("DELETE FROM ramify_items WHERE session = ANY(%s)", (anew,))
            db.execute("UPDATE ramify_sessions SET size = 0 WHERE number = ANY(%s)", (anew,))

    def take(self, session: str, how: How) -> Taken | None:
        if "\0" in session:  # PostgreSQL has no such text
            return Taken(0, {})
        with self._transaction() as db:
            row = db.execute(
                _built(
                    f"SELECT number, fence, holder <> %s AND {_ALIVE} FROM ramify_sessions AS s "
                    "WHERE session = %s AND (expires IS NULL OR expires > %s) FOR UPDATE OF s"
                ),
                (self._holder, session, time.time()),
            ).fetchone()
            if row is None:
                return Taken(0, {})
            number, fence, held = row
            if held and how != "force":
                if how == "ask":
                    db.execute(
                        _built(
                            "UPDATE ramify_sessions SET wanted = TRUE, "
                            f"claimed = now() + interval '{CLAIM_SECONDS} seconds' WHERE number = %s"
                        ),
                        (number,),
                    )
                return None
            fence = next_fence(fence)
            db.execute(
                "UPDATE ramify_sessions SET fence = %s, count = 0, holder = %s, wanted = FALSE, "
                "claimed = NULL WHERE number = %s",
                (fence, self._holder, number),
            )
            found = db.execute(
                "SELECT key, body FROM ramify_items WHERE session = %s", (number,), binary=True
            )
            return Taken(fence, _items(found))

    def release(self, session: str) -> None:
        with self._transaction(sync=False) as db:
            db.execute(
                "UPDATE ramify_sessions SET holder = NULL, wanted = FALSE "
                "WHERE session = %s AND holder = %s",
                (session, self._holder),
            )

    def forget(self, session: str, fence: int) -> None:
        with self._transaction() as db:
            db.execute(_built(_DELETE.format(which="session = %s AND fence = %s")), (session, fence))

    def head(self, session: str) -> bytes | None:
        return self._read(session, "AND key = %s", HEAD.encode()).get(HEAD)

    def read(self, session: str) -> Mapping[str, bytes]:
        return self._read(session)

    def _read(self, session: str, which: str = "", *keys: bytes) -> dict[str, bytes]:
        if "\0" in session:
            return {}
        with self._transaction() as db:
            found = db.execute(
                _built(
                    "SELECT key, body FROM ramify_items AS i JOIN ramify_sessions AS s "
                    "ON i.session = number WHERE s.session = %s AND (expires IS NULL OR expires > %s) "
                    f"{which}"
                ),
                (session, time.time(), *keys),
                binary=True,
            )
            return _items(found)

    def delete(self, sessions: Sequence[str]) -> None:
        with self._transaction() as db:
            db.execute(_built(_DELETE.format(which="session = ANY(%s)")), (list(sessions),))

    def kept(self) -> Iterator[StoredSession]:
        with self._transaction() as db:
            rows = db.execute(
                _built(
                    f"SELECT session, owner, used, expires, busy, size, {_ALIVE} "
                    "FROM ramify_sessions AS s ORDER BY used DESC"
                )
            ).fetchall()
        for row in rows:
            yield StoredSession(*row)

    def waiting(self) -> list[str]:
        with self._transaction() as db:
            rows = db.execute(
                _built(
                    "SELECT session FROM ramify_sessions AS s "
                    f"WHERE busy AND (holder IS NULL OR NOT {_ALIVE}) "
                    "AND (claimed IS NULL OR claimed < now()) ORDER BY used DESC"
                )
            )
            return [row[0] for row in rows]

    def sweep(self, *, older_than: float, most: int, now: float) -> int:
        free = f"(holder IS NULL OR NOT {_ALIVE})"
        with self._transaction(seconds=SWEEP_SECONDS) as db:
            db.execute("DELETE FROM ramify_holders WHERE seen < now() - interval '1 day'")
            db.execute(
                _built(f"DELETE FROM ramify_gone WHERE at < now() - interval '{GONE_SECONDS} seconds'")
            )
            gone = db.execute(
                _built(
                    "DELETE FROM ramify_sessions WHERE number IN (SELECT number "
                    f"FROM ramify_sessions AS s WHERE (used < %s OR expires < %s) AND {free} "
                    "LIMIT %s FOR UPDATE OF s SKIP LOCKED)"
                ),
                (older_than, now, SWEPT),
            ).rowcount
            held: dict[str, int] = dict(
                db.execute("SELECT owner, sum(size)::bigint FROM ramify_sessions GROUP BY owner")
            )
            over = sum(held.values()) - most
            if over > 0:

                def oldest(owner: str) -> Iterator[tuple[int, int]]:
                    return iter(
                        db.execute(
                            _built(
                                "SELECT number, size FROM ramify_sessions AS s "
                                f"WHERE owner = %s AND {free} ORDER BY used, number LIMIT %s"
                            ),
                            (owner, SWEPT),
                        )
                    )

                gone += db.execute(
                    _built(f"DELETE FROM ramify_sessions AS s WHERE number = ANY(%s) AND {free}"),
                    (surplus(held, oldest, over, SWEPT),),
                ).rowcount
        return gone

    def tend(self) -> list[str]:
        now = time.monotonic()
        with self._transaction(sync=False) as db:
            if now - self._beaten > BEAT_SECONDS:
                db.execute(
                    "INSERT INTO ramify_holders VALUES (%s, now()) "
                    "ON CONFLICT (holder) DO UPDATE SET seen = now()",
                    (self._holder,),
                )
            rows = db.execute(
                "UPDATE ramify_sessions SET wanted = FALSE WHERE holder = %s AND wanted "
                "RETURNING session",
                (self._holder,),
            ).fetchall()
        if now - self._beaten > BEAT_SECONDS:
            self._beaten = now
        return [row[0] for row in rows]

    def clock(self) -> float | None:
        with self._transaction() as db:
            row = db.execute("SELECT value FROM ramify_about WHERE name = 'clock'").fetchone()
        return None if row is None else float(row[0])

    def set_clock(self, now: float) -> None:
        with self._transaction(sync=False) as db:
            db.execute(
                "INSERT INTO ramify_about VALUES ('clock', %s) "
                "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                (repr(now),),
            )

    def secret(self) -> bytes:
        with self._transaction() as db:
            db.execute(
                "INSERT INTO ramify_about VALUES ('secret', %s) ON CONFLICT DO NOTHING",
                (secrets.token_hex(SECRET_BYTES),),
            )
            row = db.execute("SELECT value FROM ramify_about WHERE name = 'secret'").fetchone()
        assert row is not None
        return bytes.fromhex(row[0])

    def mark(self) -> bytes | None:
        with self._transaction() as db:
            row = db.execute("SELECT value FROM ramify_about WHERE name = 'mark'").fetchone()
        return None if row is None else bytes.fromhex(row[0])

    def set_mark(self, value: bytes, *, replace: bool) -> None:
        otherwise = "(name) DO UPDATE SET value = excluded.value" if replace else "DO NOTHING"
        with self._transaction() as db:
            db.execute(
                f"INSERT INTO ramify_about VALUES ('mark', %s) ON CONFLICT {otherwise}", (value.hex(),)
            )

    def check(self) -> list[str]:
        with self._transaction(seconds=SWEEP_SECONDS) as db:
            rows = db.execute(
                "SELECT session, size, (SELECT coalesce(sum(octet_length(body)), 0) "
                "FROM ramify_items AS i WHERE i.session = number) AS found, "
                "EXISTS (SELECT 1 FROM ramify_items AS i WHERE i.session = number AND key = %s) "
                "FROM ramify_sessions",
                (HEAD.encode(),),
            ).fetchall()
        headless = [row[0] for row in rows if not row[3] and not row[0].startswith(HISTORY)]
        faults = [f"session {name}: no head" for name in headless]
        faults += [f"session {row[0]}: {row[2]} bytes, not {row[1]}" for row in rows if row[1] != row[2]]
        return faults

    def close(self) -> None:
        db, self._db = self._db, None
        if db is not None and not db.closed:
            with suppress(psycopg.Error):
                db.until = time.monotonic() + LATE_SECONDS
                if not self._read_only:
                    db.execute("DELETE FROM ramify_holders WHERE holder = %s", (self._holder,))
            db.close()

    # --- the connection --------------------------------------------------------------------------

    @contextmanager
    def _transaction(
        self, *, sync: bool = True, seconds: int = CALL_SECONDS
    ) -> Iterator[psycopg.Connection[Any]]:
        flush = self._flush if sync else "SET LOCAL synchronous_commit = off;"
        only = "READ ONLY" if self._read_only else ""
        begin = f"BEGIN {only}; {flush} SET LOCAL statement_timeout = '{seconds}s'"
        db: _Connection | None = None
        try:
            if self._db is None:
                self._db = _Connection.connect(autocommit=True, **self._settings)
                self._joined(self._db)
            db = self._db
            db.until = time.monotonic() + seconds + LATE_SECONDS
            db.execute(_built(begin), prepare=False)
            yield db
            db.execute("COMMIT")
        except psycopg.Error as error:
            self._undo(db)
            damage = psycopg.errors.DataCorrupted, psycopg.errors.IndexCorrupted
            kind = StoreDamaged if isinstance(error, damage) else StoreError
            if db is None and any(phrase in str(error) for phrase in _STARTING):
                kind = StoreStarting
            raise kind(f"the store {self._name}: {_told(error)}") from error
        except BaseException:
            self._undo(db)
            raise

    def _joined(self, db: _Connection) -> None:
        """A connection was made. The database may have come back without its tables."""
        self.connections += 1
        if self.connections == 1 or self._read_only:
            return
        db.until = time.monotonic() + CALL_SECONDS + LATE_SECONDS
        known = db.execute("SELECT to_regclass('ramify_gone') IS NOT NULL").fetchone()
        if known is None or not known[0]:
            with db.transaction():
                _make(db)

    def _undo(self, db: _Connection | None) -> None:
        """Leave the transaction; a connection that cannot is given up."""
        if db is None:
            return
        try:
            db.until = time.monotonic() + LATE_SECONDS
            db.execute("ROLLBACK")
        except psycopg.Error:
            db.close()
            self._db = None


_STARTING = ("starting up", "not yet accepting connections", "in recovery mode")


def _make(db: psycopg.Connection[Any]) -> None:
    """Make the tables that are not there."""
    db.execute("SELECT pg_advisory_xact_lock(%s)", (_MAKING,))
    for statement in f"{_SCHEMA}{_GONE}".split(";"):
        if statement.strip():
            db.execute(statement.encode())


def _columns(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """As arrays, one for each name."""
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _items(rows: Any) -> dict[str, bytes]:
    return {bytes(key).decode(): bytes(body) for key, body in rows}


def _told(error: psycopg.Error) -> str:
    """The error's message on one line, with what may help."""
    text = " ".join(str(error).split())
    match error:
        case psycopg.errors.DiskFull() | psycopg.errors.InsufficientResources():
            return f"{text}: make room on the database's disk"
        case psycopg.errors.InsufficientPrivilege():
            return f"{text}: let the user of the URL make and write tables, or make them for it"
        case _:
            return text
