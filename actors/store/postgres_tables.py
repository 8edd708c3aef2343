"""The tables of a store in PostgreSQL, and the connection to them. It knows no session.

Every call has a time limit. A connection that is lost is made anew by the next call. Old layouts are
migrated; servers that start at once make the tables one after another.
"""

import math
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict

from ramify.actors.kit.log import get_log
from ramify.actors.store.base import StoreDamaged, StoreError, StoreStarting
from ramify.protocol.keyless import HOLD_KEYS, keyless
from ramify.protocol.store_url import shown

T = TypeVar("T")
LAYOUT = 2  # of the tables; 1 had no counts, and keys of sessions in clear
CONNECT_SECONDS = 5
CALL_SECONDS = 10
LATE_SECONDS = 2  # beyond a call's limit, which the database keeps itself, until it is taken for dead
CLEAN_SECONDS = 600  # for writing a table anew
SWEEP_SECONDS = 30
CHUNK = 500  # sessions that one statement of a migration or a comparison looks at

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
_MAKING = (
    0x72616D696679  # an advisory lock: servers that start at once make the tables one after another
)
_STARTING = ("starting up", "not yet accepting connections", "in recovery mode")


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


def as_query(statement: str) -> bytes:
    """A statement made of our own parts only: psycopg takes text that is no literal as bytes."""
    return statement.encode()


class PostgresTables:
    """The tables in the database at `url`, which are made if they are not there. Raises StoreError."""

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self._name = shown(url)
        self._read_only = read_only
        self._holder = secrets.token_hex(8)
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
            db.execute(as_query(begin), prepare=False)
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


def _make(db: psycopg.Connection[Any]) -> None:
    """Make the tables that are not there."""
    db.execute("SELECT pg_advisory_xact_lock(%s)", (_MAKING,))
    for statement in f"{_SCHEMA}{_GONE}".split(";"):
        if statement.strip():
            db.execute(statement.encode())


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
