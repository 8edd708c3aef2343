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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ramify.actors.kit.log import get_log
from ramify.actors.store.base import (
    ASIDE,
    SECRET_BYTES,
    How,
    Refusal,
    StoreDamaged,
    StoreError,
    Taken,
    refusal,
)
from ramify.actors.store.retention import surplus
from ramify.protocol.keyless import HOLD_KEYS, keyless
from ramify.protocol.saved import HEAD, Changes, StoredSession, next_fence

LAYOUT = 3  # of the tables; 1 had no fences, 2 no counts, and keys of sessions in clear
WAIT_SECONDS = 10.0  # for another process that writes
SWEPT = 100_000  # sessions that one sweep forgets for room at most
PAGES = 4000  # of the log, until it is moved into the file

log = get_log(__name__)
_SCHEMA = """
CREATE TABLE about (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY,
    session TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    used REAL NOT NULL,
    expires REAL,
    busy INTEGER NOT NULL,
    live INTEGER NOT NULL,
    size INTEGER NOT NULL,
    fence INTEGER NOT NULL DEFAULT 0,
    count INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX by_use ON sessions (used);
CREATE TABLE items (
    session INTEGER NOT NULL REFERENCES sessions (number) ON DELETE CASCADE,
    key TEXT NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (session, key)
) WITHOUT ROWID;
"""
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


class SqliteStore:
    """A `Store` in the file `path`, which is made if it is not there. Raises StoreError."""

    shared = False
    connections = 1

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._synced = False
        self._file: tuple[int, int] | None = None  # device and inode of what was opened
        try:
            if path.exists():
                _check_file(path, read_only)
            elif not read_only:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # nobody else reads what was said
            mode = "ro" if read_only else "rw"
            self._db = sqlite3.connect(
                f"file:{_quoted(path)}?mode={mode}",
                uri=True,
                timeout=WAIT_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"the store {path} cannot be opened: {error}") from error
        try:
            self._begin(read_only)
            self._file = self._found()
        except BaseException:
            self._db.close()
            raise

    def _begin(self, read_only: bool) -> None:
        with self._errors():
            self._db.execute("PRAGMA foreign_keys = ON")
            if not read_only:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = NORMAL")
                self._db.execute(f"PRAGMA wal_autocheckpoint = {PAGES}")
            known = self._db.execute("SELECT name FROM sqlite_master WHERE name = 'about'").fetchone()
            if known is None:
                if read_only:
                    raise StoreError(f"{self.path} is no store of sessions")
                self._make()
            found = self._db.execute("SELECT value FROM about WHERE name = 'format'").fetchone()
        if found is None or not isinstance(found[0], int):
            raise StoreError(f"{self.path} is no store of sessions, or it is damaged")
        if found[0] > LAYOUT:
            raise StoreError(
                f"the store {self.path} has format {found[0]}, this version of Ramify knows up to "
                f"{LAYOUT}: use the newer version, or another store"
            )
        if not read_only:
            if found[0] < LAYOUT:
                self._migrate()
            self._clean()

    def _make(self) -> None:
        with self._transaction():
            tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables:  # another process was faster, or it is somebody else's file
                if self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone():
                    return
                raise StoreError(f"{self.path} is a database of something else: give another file")
            for statement in _SCHEMA.split(";"):
                if statement.strip():
                    self._db.execute(statement)
            self._db.execute("INSERT INTO about VALUES ('format', ?)", (LAYOUT,))

    def _migrate(self) -> None:
        """Migrate from an older layout."""
        with self._errors(), self._transaction():
            columns = {row[1] for row in self._db.execute("PRAGMA table_info(sessions)")}
            for column in {"fence", "count"} - columns:  # else another process was faster
                self._db.execute(f"ALTER TABLE sessions ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0")
            if "count" not in columns:
                self._without_keys()
                self._db.execute("INSERT OR REPLACE INTO about VALUES ('to clean', 1)")
            self._db.execute("UPDATE about SET value = ? WHERE name = 'format'", (LAYOUT,))

    def _without_keys(self) -> None:
        """Take keys out of the items."""
        which = " OR ".join(["substr(key, 1, 1) = ?"] * len(HOLD_KEYS))
        find = f"SELECT key, body FROM items WHERE session = ? AND ({which})"
        for (number,) in self._db.execute("SELECT number FROM sessions").fetchall():
            try:
                found = self._db.execute(find, (number, *HOLD_KEYS)).fetchall()
                clean = [(keyless(key, body), number, key) for key, body in found]
                changed = [each for each in clean if each[0] is not None]
                self._db.executemany("UPDATE items SET body = ? WHERE session = ? AND key = ?", changed)
            except sqlite3.DatabaseError as error:
                if _code(error) not in _DAMAGE:
                    raise
                log.error("a damaged session keeps what it has", number=number, error=str(error))

    def _clean(self) -> None:
        """Write the file anew, if its free pages, or the log, may hold what it is not to hold."""
        with self._errors():
            due = self._db.execute("SELECT 1 FROM about WHERE name = 'to clean'").fetchone()
        if due is None:
            return
        log.info("the store is written anew, without what was deleted", store=str(self.path))
        try:
            self.rewrite()
            self._db.execute("DELETE FROM about WHERE name = 'to clean'")
        except (sqlite3.Error, StoreError) as error:
            log.warning(
                "the store could not be written anew; deleted items, and keys of sessions that an older "
                "version saved, may stand in its file until the next start can",
                store=str(self.path),
                error=str(error),
            )

    def rewrite(self) -> None:
        """Write the whole file anew: nothing of what was deleted or replaced stays in it. Takes as much
        room on the disk as the file has.
        """
        with self._errors():
            self._db.execute("VACUUM")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _found(self) -> tuple[int, int] | None:
        """Device and inode of the file at `path`, or None."""
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

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
            if _code(error) not in _DAMAGE:
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

    def close(self) -> None:
        self._db.close()

    # --- errors ----------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.rollback()
            damage = _code(error) == sqlite3.SQLITE_CORRUPT  # else it is the whole file
            kind = StoreDamaged if damage else StoreError
            raise kind(f"the store {self.path}: {error}{_advice(error)}") from error


_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _advice(error: sqlite3.Error) -> str:
    code = _code(error)
    if code == sqlite3.SQLITE_FULL:
        return ": make room on the disk"
    if code in _DAMAGE:
        return ": look at it with `ramify store check`, or give another `--store`"
    if code == sqlite3.SQLITE_READONLY:
        return ": the file and its folder must be writable"
    return ""


def _check_file(path: Path, read_only: bool) -> None:
    """Raises StoreError for what SQLite would take for a new store, or begin to write and then not."""
    if path.stat().st_size == 0:
        raise StoreError(
            f"the store {path} is damaged: the file is empty. Put a copy of it back, or remove it, and "
            f"{path.name}-wal, to begin with a new store"
        )
    if not read_only and not os.access(path, os.W_OK):
        raise StoreError(
            f"the store {path} is read-only: make the file writable, or give another --store"
        )


def _quoted(path: Path) -> str:
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
