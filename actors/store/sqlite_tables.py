"""The tables of a store in an SQLite file, and the connection to it. It knows no session.

Old layouts are migrated. What SQLite would take for a new store, or for one of ours, is refused.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ramify.actors.kit.log import get_log
from ramify.actors.store.base import StoreDamaged, StoreError
from ramify.protocol.keyless import HOLD_KEYS, keyless

LAYOUT = 3  # of the tables; 1 had no fences, 2 no counts, and keys of sessions in clear
WAIT_SECONDS = 10.0  # for another process that writes
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


class SqliteTables:
    """The tables in the file `path`, which is made if it is not there. Raises StoreError."""

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
                if not is_damage(error):
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


def is_damage(error: sqlite3.Error) -> bool:
    """Whether a page of the file, or all of it, is not what was written."""
    return _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _advice(error: sqlite3.Error) -> str:
    code = _code(error)
    if code == sqlite3.SQLITE_FULL:
        return ": make room on the disk"
    if is_damage(error):
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
