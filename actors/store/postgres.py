"""Sessions in a PostgreSQL database that several servers share.

A batch is one transaction, which locks the rows of its sessions and compares fences. A commit that
nobody waits for is not flushed first (`synchronous_commit = off`): a crash of the database's machine may
take the last half second along. A `sync` commit is as safe as the database's own setting says.

A server that lives has a row in `ramify_holders`, with a time of the database's clock. The tables and
the connection: `postgres_tables.py`.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import psycopg

from ramify.actors.store.base import (
    ASIDE,
    GONE_SECONDS,
    SECRET_BYTES,
    How,
    Refusal,
    Taken,
    refusal,
)
from ramify.actors.store.postgres_tables import CHUNK, SWEEP_SECONDS, PostgresTables, as_query
from ramify.actors.store.retention import surplus
from ramify.protocol.saved import HEAD, HISTORY, Changes, StoredSession, next_fence

T = TypeVar("T")
LEASE_SECONDS = 10  # without a sign of life, until a server counts as dead
CLAIM_SECONDS = 3  # for who has asked for a session: it is let go for that one
BEAT_SECONDS = 2.0  # between two signs
SWEPT = 5000  # sessions that one sweep forgets at most

_DELETE = """
WITH gone AS (DELETE FROM ramify_sessions WHERE {which} RETURNING session, fence)
INSERT INTO ramify_gone (session, fence) SELECT * FROM gone
ON CONFLICT (session) DO UPDATE SET fence = excluded.fence, at = now()
"""

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


class PostgresStore(PostgresTables):
    """A `Store` in the database at `url`. Raises StoreError."""

    shared = True

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        super().__init__(url, read_only=read_only)
        self._beaten = 0.0
        try:
            if not read_only:
                self.tend()
        except BaseException:
            self.close()
            raise

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
                as_query(
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
                        as_query(
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
            db.execute(as_query(_DELETE.format(which="session = %s AND fence = %s")), (session, fence))

    def head(self, session: str) -> bytes | None:
        return self._read(session, "AND key = %s", HEAD.encode()).get(HEAD)

    def read(self, session: str) -> Mapping[str, bytes]:
        return self._read(session)

    def _read(self, session: str, which: str = "", *keys: bytes) -> dict[str, bytes]:
        if "\0" in session:
            return {}
        with self._transaction() as db:
            found = db.execute(
                as_query(
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
            db.execute(as_query(_DELETE.format(which="session = ANY(%s)")), (list(sessions),))

    def kept(self) -> Iterator[StoredSession]:
        with self._transaction() as db:
            rows = db.execute(
                as_query(
                    f"SELECT session, owner, used, expires, busy, size, {_ALIVE} "
                    "FROM ramify_sessions AS s ORDER BY used DESC"
                )
            ).fetchall()
        for row in rows:
            yield StoredSession(*row)

    def waiting(self) -> list[str]:
        with self._transaction() as db:
            rows = db.execute(
                as_query(
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
                as_query(f"DELETE FROM ramify_gone WHERE at < now() - interval '{GONE_SECONDS} seconds'")
            )
            gone = db.execute(
                as_query(
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
                            as_query(
                                "SELECT number, size FROM ramify_sessions AS s "
                                f"WHERE owner = %s AND {free} ORDER BY used, number LIMIT %s"
                            ),
                            (owner, SWEPT),
                        )
                    )

                gone += db.execute(
                    as_query(f"DELETE FROM ramify_sessions AS s WHERE number = ANY(%s) AND {free}"),
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


def _columns(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """As arrays, one for each name."""
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _items(rows: Any) -> dict[str, bytes]:
    return {bytes(key).decode(): bytes(body) for key, body in rows}
