"""Which store a place is, and what is told when it cannot be had."""

import sys
from pathlib import Path
from typing import Any

import pytest

from ramify.actors.store import opening
from ramify.actors.store.base import StoreError, StoreStarting
from ramify.actors.store.opening import claim_store, open_store, prepare
from ramify.actors.store.sqlite import SqliteStore
from tests.actors.store.conftest import changes


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, url in (("postgres", "postgresql://u:secret@h/db"), ("redis", "redis://:secret@h")):
        monkeypatch.setitem(sys.modules, f"ramify.actors.store.{kind}", None)
        with pytest.raises(StoreError, match=rf"ramify\[{kind}\]") as error:
            open_store(url)
        assert "secret" not in str(error.value)


def test_encryption_without_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ramify.actors.store.sealed", None)
    with pytest.raises(StoreError, match=r"ramify\[encryption\]"):
        open_store(tmp_path / "s.db", tmp_path / "keys")
    assert not (tmp_path / "s.db").exists()


def test_a_file_has_one_server_a_database_many(tmp_path: Path) -> None:
    held = claim_store(tmp_path / "s.db")
    assert held is not None
    with pytest.raises(StoreError):
        claim_store(str(tmp_path / "s.db"))
    held.close()
    assert claim_store("redis://h") is None


def test_what_is_prepared_is_there(opened: Any, place: str) -> None:
    assert all("secret" not in warning for warning in prepare(place))
    store = opened(read_only=True)
    assert list(store.kept()) == []


def test_a_server_that_begins_has_no_session_of_a_file(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s.db")
    store.write([changes(live=True)])
    store.close()
    prepare(tmp_path / "s.db")
    store = open_store(tmp_path / "s.db")
    assert store.sweep(older_than=100, most=10, now=0) == 1
    store.close()


def test_a_database_that_is_starting_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = iter([StoreStarting("the database system is starting up")] * 2)

    def starting(place: Any, key_file: Any) -> Any:
        for error in tries:
            raise error
        return SqliteStore(Path(place))

    monkeypatch.setattr(opening, "open_store", starting)
    monkeypatch.setattr(opening, "AGAIN_SECONDS", 0.001)
    assert opening.prepare(tmp_path / "s.db") == []
    assert next(tries, None) is None
    tries = iter([StoreStarting("the database system is starting up")])
    monkeypatch.setattr(opening, "STARTING_SECONDS", -1.0)
    with pytest.raises(StoreStarting):
        opening.prepare(tmp_path / "s.db")


def test_what_a_killed_command_had_taken_is_free(tmp_path: Path) -> None:
    """`ramify store rekey` after a kill: nobody has the sessions, so none is left out."""
    path = tmp_path / "s.db"
    store = SqliteStore(path)
    store.write([changes()])
    assert store.take("s_1", "free") is not None
    store.close()
    opening.unclaimed(path)
    store = SqliteStore(path)
    assert [kept.live for kept in store.kept()] == [False]
    store.close()
