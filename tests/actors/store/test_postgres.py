"""The PostgreSQL store: connections that are lost, and what is wrong. `test_base.py` has what all do."""

import os
import signal
import threading
import time
from typing import Any
from unittest.mock import MagicMock

import psycopg
import pytest

from ramify.actors.store import postgres
from ramify.actors.store import postgres_tables as module
from ramify.actors.store.base import StoreDamaged, StoreError
from ramify.actors.store.postgres import PostgresStore
from ramify.actors.store.postgres_tables import LAYOUT
from tests.actors.store.conftest import changes


def terminate(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'ramify'"
        )


def test_a_lost_connection_is_made_anew(postgres_url: str) -> None:
    store = PostgresStore(postgres_url)
    store.write([changes()])
    terminate(postgres_url)
    with pytest.raises(StoreError):
        store.write([changes("s_2")])
    store.write([changes("s_2")])
    assert {kept.session for kept in store.kept()} == {"s_1", "s_2"}
    store.close()


def test_a_batch_is_written_as_a_whole(postgres_url: str) -> None:
    """The connection is lost in the middle of it."""
    store = PostgresStore(postgres_url)
    with psycopg.connect(postgres_url) as other:
        other.execute("LOCK TABLE ramify_items")
        failed: list[Exception] = []

        def write() -> None:
            try:
                store.write([changes(), changes("s_2")])
            except StoreError as error:
                failed.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        with psycopg.connect(postgres_url, autocommit=True) as third:
            waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            while third.execute(waits).fetchone() is None:
                time.sleep(0.01)
        terminate(postgres_url)
        thread.join()
    assert len(failed) == 1
    assert list(store.kept()) == []
    store.close()


def test_a_call_has_a_time_limit(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one goes on as if nothing had been."""
    store = PostgresStore(postgres_url)
    monkeypatch.setitem(module.PostgresTables._transaction.__wrapped__.__kwdefaults__, "seconds", 1)
    with psycopg.connect(postgres_url) as other:
        other.execute("LOCK TABLE ramify_items")
        with pytest.raises(StoreError, match="statement timeout"):
            store.write([changes()])
    store.write([changes()])
    assert store.head("s_1") == b"h"
    store.close()


def test_a_database_that_hangs_is_given_up(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process stands still, so that it keeps no limit itself."""
    monkeypatch.setattr(module, "LATE_SECONDS", 0.2)
    monkeypatch.setitem(module.PostgresTables._transaction.__wrapped__.__kwdefaults__, "seconds", 1)
    store = PostgresStore(postgres_url)
    with psycopg.connect(postgres_url, autocommit=True) as db:
        row = db.execute("SELECT pid FROM pg_stat_activity WHERE application_name = 'ramify'").fetchone()
        assert row is not None
        os.kill(row[0], signal.SIGSTOP)
        try:
            with pytest.raises(StoreError, match="does not answer"):
                store.write([changes()])
        finally:
            os.kill(row[0], signal.SIGCONT)
    store.write([changes()])
    assert store.head("s_1") == b"h"
    store.close()


def test_many_servers_make_the_tables_at_once(postgres_url: str) -> None:
    stores: list[Any] = []
    threads = [
        threading.Thread(target=lambda: stores.append(PostgresStore(postgres_url))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == 6
    for store in stores:
        store.close()


def test_servers_write_the_same_sessions_at_once(postgres_url: str) -> None:
    """In any order: nobody waits for another one for ever, and each batch is written or refused."""
    names = [f"s_{number}" for number in range(8)]
    stores = [PostgresStore(postgres_url) for _ in range(2)]
    stores[0].write([changes(name) for name in names])
    faults: list[Exception] = []

    def run(store: PostgresStore, order: list[str]) -> None:
        try:
            for count in range(20):
                store.write([changes(name, put={"s1": b"%d" % count}, whole=False) for name in order])
        except StoreError as error:
            faults.append(error)

    threads = [
        threading.Thread(target=run, args=pair)
        for pair in zip(stores, (names, names[::-1]), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    for store in stores:
        store.close()


def test_a_newer_store_is_refused(postgres_url: str) -> None:
    PostgresStore(postgres_url).close()
    with psycopg.connect(postgres_url) as db:
        db.execute("UPDATE ramify_about SET value = %s", (str(LAYOUT + 1),))
    with pytest.raises(StoreError, match="use the newer version"):
        PostgresStore(postgres_url)


def test_who_only_looks_makes_nothing(postgres_url: str) -> None:
    with pytest.raises(StoreError, match="no store of sessions"):
        PostgresStore(postgres_url, read_only=True)
    with psycopg.connect(postgres_url) as db:
        assert db.execute("SELECT to_regclass('ramify_about')").fetchone() == (None,)


@pytest.mark.parametrize("rest", ["h:1x/db", "h/db?nonsense=1", "h/%zz"])
def test_a_url_that_cannot_be_read(rest: str) -> None:
    with pytest.raises(StoreError) as error:
        PostgresStore(f"postgresql://u:sec%20ret@{rest}")
    assert "sec" not in str(error.value).replace("second", "")


def test_a_database_that_is_not_there() -> None:
    with pytest.raises(StoreError, match="refused"):
        PostgresStore("postgresql://u:secret@127.0.0.1:1/db")


def test_damage_of_the_database_is_told_from_what_passes(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PostgresStore(postgres_url)
    for error, kind in (
        (psycopg.errors.DataCorrupted("invalid page in block 7"), StoreDamaged),
        (psycopg.errors.DiskFull("no space left"), StoreError),
    ):
        monkeypatch.setattr(postgres, "_items", MagicMock(side_effect=error))
        with pytest.raises(StoreError, match=str(error)) as raised:
            store.read("s_1")
        assert type(raised.value) is kind
    store.close()


def test_damage_is_found(postgres_url: str) -> None:
    store = PostgresStore(postgres_url)
    store.write([changes(), changes("s_2")])
    with psycopg.connect(postgres_url) as db:
        db.execute(
            "DELETE FROM ramify_items WHERE session = "
            "(SELECT number FROM ramify_sessions WHERE session = 's_2')"
        )
    assert store.check() == ["session s_2: no head", "session s_2: 0 bytes, not 1"]
    store.close()
