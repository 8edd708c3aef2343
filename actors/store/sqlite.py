"""Sessions in one SQLite file, in WAL mode.

A commit without a waiter is in the kernel's hands: it survives the process, but a loss of power may take
the last ones. A `sync` commit is flushed to the disk first. Several processes of one server may have the
file open; `claim` keeps other servers out. Each session has its place in one of these processes. So a
process that asks for a session gets it: its former owner has gone, or hangs.
"""

import fcntl
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from ramify.actors.kit.log import get_log
from ramify.actors.store.base import (
    ASIDE,
    SECRET_BYTES,
    How,
    Refusal,
    StoreError,
    Taken,
    refusal,
)
from ramify.actors.store.retention import surplus
from ramify.actors.store.sqlite_tables import SqliteTables, is_damage
from ramify.protocol.saved import HEAD, Changes, StoredSession, next_fence

SWEPT = 100_000  # sessions that one sweep forgets for room at most

log = get_log(__name__)
_UPDATE = (
    "UPDATE sessions SET owner = ?, used = ?, expires = ?, busy = ?, live = ?, size = ?, count = ?, "
    "fence = ? WHERE session = ?"
)
_NEXT = f"{_UPDATE} AND fence = ? AND count >= ? RETURNING number"
_INSERT = (
    "INSERT INTO sessions (owner, used, expires, busy, live, size, count, fence, session) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


def claim(path: Path) -> IO[bytes]:
    """Be the only server on this store until the file that is returned is closed. Raises StoreError."""
    path = path.resolve()  # whatever link it was named by
    if path.exists() and os.stat(path).st_nlink > 1:
        raise StoreError(
            f"--store {path} has another name, a hard link, under which a second server could have it: "
            "remove the other name, or give a copy"
        )
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = open(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")  # noqa: SIM115
    except OSError as error:
        raise StoreError(f"--store {path}: {error.strerror}: choose another place, or `none`") from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        held.close()
        raise StoreError(
            f"--store {path} is in use by another server: stop it, or give this one another "
            "--store (by default each --port has its own)"
        ) from None
    return held


class SqliteStore(SqliteTables):
    """A `Store` in the file `path`. Raises StoreError."""

    shared = False
    connections = 1

    # --- a `Store` -------------------------------------------------------------------------------

    def write(self, batch: Sequence[Changes]) -> dict[int, Refusal]:
        if self._found() != self._file:  # SQLite would go on in a file that nobody can open again
            raise StoreError(
                f"the store {self.path} was removed or replaced while the server runs: "
                "put it back, or restart the server"
            )
        sync = any(changes.sync for changes in batch)
        with self._errors():
            if sync != self._synced:
                self._db.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
                self._synced = sync
            with self._transaction():
                return self._write(batch)

    def _write(self, batch: Sequence[Changes]) -> dict[int, Refusal]:
        refused: dict[int, Refusal] = {}
        put: dict[tuple[int, str], bytes] = {}
        drop: dict[tuple[int, str], None] = {}
        seen: set[int] = set()
        for place, changes in enumerate(batch):
            number = self._row(changes)
            if isinstance(number, str):
                refused[place] = number
                continue
            if changes.whole:
                if number in seen:  # what came earlier in the batch
                    put = {name: body for name, body in put.items() if name[0] != number}
                self._db.execute("DELETE FROM items WHERE session = ?", (number,))
            seen.add(number)
            for key in changes.drop:
                drop[number, key] = None
                put.pop((number, key), None)
            for key, body in changes.put.items():
                drop.pop((number, key), None)
                put[number, key] = body
        if drop:
            self._db.executemany("DELETE FROM items WHERE session = ? AND key = ?", drop)
        self._db.executemany(
            "INSERT INTO items VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET body = excluded.body",
            [(*name, body) for name, body in put.items()],
        )
        return refused

    def _row(self, changes: Changes) -> int | Refusal:
        """Write the session's row. Returns its number."""
        row = (
            changes.owner,
            changes.used,
            changes.expires,
            changes.busy,
            changes.live,
            changes.size,
            changes.count,
            changes.fence,
            changes.session,
        )
        if not changes.whole:  # as for nearly every save
            found = self._db.execute(_NEXT, (*row, changes.fence, changes.count - 1)).fetchone()
            if found is not None:
                return int(found[0])
        find = "SELECT number, fence, count FROM sessions WHERE session = ?"
        found = self._db.execute(find, (changes.session,)).fetchone()
        why = refusal(changes, None if found is None else (found[1], found[2]), 0)
        if why is not None:
            return why
        if found is None:
            return int(self._db.execute(_INSERT, row).lastrowid or 0)
        self._db.execute(_UPDATE, row)
        return int(found[0])

    def behind(self, known: Mapping[str, tuple[int, int]]) -> list[str]:
        return []  # the system keeps what was written, whatever becomes of this process

    def set_aside(self, session: str) -> None:
        with self._errors(), self._transaction():
            self._db.execute(
                "UPDATE sessions SET session = session || ? || number || ')', live = 0, busy = 0 "
                "WHERE session = ?",
                (ASIDE, session),
            )

    def take(self, session: str, how: How) -> Taken | None:
        with self._errors(), self._transaction():
            found = self._db.execute(
                "SELECT number, fence FROM sessions "
                "WHERE session = ? AND (expires IS NULL OR expires > ?)",
                (session, time.time()),
            ).fetchone()
            if found is None:
                return Taken(0, {})
            number, fence = found[0], next_fence(found[1])
            self._db.execute(
                "UPDATE sessions SET fence = ?, live = 1, count = 0 WHERE number = ?", (fence, number)
            )
            return Taken(fence, self._items(number))

    def release(self, session: str) -> None:
        with self._errors(), self._transaction():
            self._db.execute("UPDATE sessions SET live = 0 WHERE session = ?", (session,))

    def forget(self, session: str, fence: int) -> None:
        with self._errors(), self._transaction():
            self._db.execute("DELETE FROM sessions WHERE session = ? AND fence = ?", (session, fence))

    def head(self, session: str) -> bytes | None:
        with self._errors():
            row = self._db.execute(
                "SELECT body FROM items JOIN sessions ON items.session = number "
                "WHERE sessions.session = ? AND key = ? AND (expires IS NULL OR expires > ?)",
                (session, HEAD, time.time()),
            ).fetchone()
        return None if row is None else row[0]

    def read(self, session: str) -> Mapping[str, bytes]:
        with self._errors():
            found = self._db.execute(
                "SELECT number FROM sessions WHERE session = ? AND (expires IS NULL OR expires > ?)",
                (session, time.time()),
            ).fetchone()
            return {} if found is None else self._items(found[0])

    def _items(self, number: int) -> dict[str, bytes]:
        """The items of a session; of a damaged one those that can be read."""
        find = "SELECT key, body FROM items WHERE session = ?"
        try:
            return dict(self._db.execute(find, (number,)).fetchall())
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            log.error("a session is damaged", number=number, error=str(error))
        keys = {key for order in ("ASC", "DESC") for key in self._keys(number, order)}
        items: dict[str, bytes] = {}
        for key in keys:
            with suppress(sqlite3.DatabaseError):
                row = self._db.execute(f"{find} AND key = ?", (number, key)).fetchone()
                items.update([] if row is None else [row])
        return items

    def _keys(self, number: int, order: str) -> Iterator[str]:
        """The keys of a session's items in `order`, up to the first unreadable one."""
        find = f"SELECT key FROM items WHERE session = ? ORDER BY key {order}"
        with suppress(sqlite3.DatabaseError):
            for row in self._db.execute(find, (number,)):
                yield row[0]

    def delete(self, sessions: Sequence[str]) -> None:
        with self._errors(), self._transaction():
            self._db.executemany(
                "DELETE FROM sessions WHERE session = ?", [(each,) for each in sessions]
            )

    def kept(self) -> Iterator[StoredSession]:
        with self._errors():
            rows = self._db.execute(
                "SELECT session, owner, used, expires, busy, size, live FROM sessions ORDER BY used DESC"
            ).fetchall()
        for session, owner, used, expires, busy, size, live in rows:
            yield StoredSession(session, owner, used, expires, bool(busy), size, bool(live))

    def waiting(self) -> list[str]:
        with self._errors():
            rows = self._db.execute("SELECT session FROM sessions WHERE busy ORDER BY used DESC")
            return [row[0] for row in rows]

    def unclaimed(self) -> None:
        """Record that no server has any session in memory. The server that has just claimed the store
        calls it.
        """
        with self._errors(), self._transaction():
            self._db.execute("UPDATE sessions SET live = 0 WHERE live")

    def sweep(self, *, older_than: float, most: int, now: float) -> int:
        with self._errors(), self._transaction():
            gone = self._db.execute(
                "DELETE FROM sessions WHERE NOT live AND (used < ? OR expires < ?)", (older_than, now)
            ).rowcount
            held = dict(self._db.execute("SELECT owner, sum(size) FROM sessions GROUP BY owner"))
            over = sum(held.values()) - most
            oldest = surplus(held, self._oldest, over, SWEPT) if over > 0 else []
            self._db.executemany(
                "DELETE FROM sessions WHERE number = ?", [(number,) for number in oldest]
            )
            gone += len(oldest)
        return gone

    def _oldest(self, owner: str) -> Iterator[tuple[int, int]]:
        return self._db.execute(
            "SELECT number, size FROM sessions WHERE owner = ? AND NOT live ORDER BY used", (owner,)
        )

    def tend(self) -> list[str]:
        return []

    def clock(self) -> float | None:
        with self._errors():
            row = self._db.execute("SELECT value FROM about WHERE name = 'clock'").fetchone()
        return None if row is None else row[0]

    def set_clock(self, now: float) -> None:
        with self._errors(), self._transaction():
            self._db.execute("INSERT OR REPLACE INTO about VALUES ('clock', ?)", (now,))

    def secret(self) -> bytes:
        with self._errors(), self._transaction():
            made = secrets.token_bytes(SECRET_BYTES)
            self._db.execute("INSERT OR IGNORE INTO about VALUES ('secret', ?)", (made,))
            row = self._db.execute("SELECT value FROM about WHERE name = 'secret'").fetchone()
        return bytes(row[0])

    def mark(self) -> bytes | None:
        with self._errors():
            row = self._db.execute("SELECT value FROM about WHERE name = 'mark'").fetchone()
        return None if row is None else row[0]

    def set_mark(self, value: bytes, *, replace: bool) -> None:
        otherwise = "REPLACE" if replace else "IGNORE"
        with self._errors(), self._transaction():
            self._db.execute(f"INSERT OR {otherwise} INTO about VALUES ('mark', ?)", (value,))

    def check(self) -> list[str]:
        try:
            found = [row[0] for row in self._db.execute("PRAGMA integrity_check")]
            found += [
                f"{row[0]} {row[1]}: no session" for row in self._db.execute("PRAGMA foreign_key_check")
            ]
        except sqlite3.Error as error:
            return [str(error)]
        return [] if found == ["ok"] else found

    def warnings(self) -> list[str]:
        return []
