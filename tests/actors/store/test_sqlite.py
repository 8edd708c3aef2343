"""The SQLite store: its file, and what is wrong with one. `test_base.py` has what all stores do."""

import os
import sqlite3
from pathlib import Path

import pytest

from ramify.actors.store.base import StoreDamaged, StoreError
from ramify.actors.store.sqlite import SqliteStore, claim
from ramify.actors.store.sqlite_tables import LAYOUT
from tests.actors.store.conftest import changes


def test_only_its_user_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "state" / "s.db"
    SqliteStore(path).close()
    assert os.stat(path).st_mode & 0o077 == 0
    assert os.stat(path.parent).st_mode & 0o077 == 0


def test_a_store_without_fences_gets_them(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    SqliteStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE sessions DROP COLUMN fence")
        db.execute("ALTER TABLE sessions DROP COLUMN count")
        db.execute("INSERT INTO sessions VALUES (1, 's_1', '', 1.0, NULL, 0, 1, 1)")
        db.execute("INSERT INTO items VALUES (1, 'head', x'68')")
        db.execute("UPDATE about SET value = 1")
    store = SqliteStore(path)
    taken = store.take("s_1", "ask")
    assert taken is not None
    assert taken.items == {"head": b"h"}
    assert store.write([changes(whole=False, fence=taken.fence)]) == {}
    store.close()
    SqliteStore(path).close()


def test_a_batch_is_written_as_a_whole(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    wrong = changes("s_2", put={"head": b"x", "s1": "text"})  # type: ignore[dict-item]
    store._db.execute("CREATE TRIGGER t BEFORE INSERT ON items WHEN typeof(new.body) = 'text' "
                      "BEGIN SELECT raise(ABORT, 'no'); END")  # fmt: skip
    with pytest.raises(StoreError, match="no"):
        store.write([changes(), wrong])
    assert list(store.kept()) == []
    store.write([changes()])
    assert len(list(store.kept())) == 1
    store.close()


def test_a_server_that_begins_has_nothing_in_memory(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    store.write([changes(used=10, live=True)])
    assert store.sweep(older_than=100, most=100, now=1) == 0
    store.unclaimed()
    assert store.sweep(older_than=100, most=100, now=1) == 1
    store.close()


def test_one_server_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with claim(path), pytest.raises(StoreError, match="in use by another server"):
        claim(path)
    claim(path).close()


def test_a_newer_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    SqliteStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE about SET value = ?", (LAYOUT + 1,))
    with pytest.raises(StoreError, match="use the newer version"):
        SqliteStore(path)


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_another_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"ramify store check|another"):
        SqliteStore(path)
    assert path.read_bytes() == content


def test_another_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE mine (a)")
    with pytest.raises(StoreError, match="something else"):
        SqliteStore(path)
    with sqlite3.connect(path) as db:
        assert [row[0] for row in db.execute("SELECT name FROM sqlite_master")] == ["mine"]


def test_a_damaged_page_is_found(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = SqliteStore(path)
    store.write([changes(f"s_{i}", put={"head": os.urandom(3000)}) for i in range(50)])
    store.close()
    data = bytearray(path.read_bytes())
    for at in range(30 * 4096, len(data) - 8192, 3 * 4096):
        data[at : at + 64] = b"\xff" * 64
    path.write_bytes(bytes(data))
    again = SqliteStore(path)
    assert len(list(again.kept())) == 50
    found = [again.read(f"s_{i}") for i in range(50)]
    assert 0 < sum("head" in items for items in found) < 50  # what can be read
    assert again.check() != []
    again.close()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="choose another place"):
        claim(tmp_path / "file" / "s.db")
    with pytest.raises(StoreError, match="cannot be opened"):
        SqliteStore(tmp_path / "none.db", read_only=True)


def test_a_file_that_is_gone_takes_no_saves(tmp_path: Path) -> None:
    """SQLite would write on into a file without a name, and `sync` replies would not be true."""
    path, aside = tmp_path / "s.db", tmp_path / "aside.db"
    store = SqliteStore(path)
    store.write([changes()])
    path.rename(aside)
    with pytest.raises(StoreError, match="removed or replaced"):
        store.write([changes("s_2")])
    path.write_bytes(b"")
    with pytest.raises(StoreError, match="removed or replaced"):
        store.write([changes("s_2")])
    aside.rename(path)
    store.write([changes("s_2")])
    assert {each.session for each in store.kept()} == {"s_1", "s_2"}
    store.close()


def test_a_link_names_the_same_store(tmp_path: Path) -> None:
    path, other = tmp_path / "s.db", tmp_path / "other" / "link.db"
    other.parent.mkdir()
    other.symlink_to(path)
    with claim(path), pytest.raises(StoreError, match="in use by another server"):
        claim(other)
    with claim(other), pytest.raises(StoreError, match="in use by another server"):
        claim(path)
    other.unlink()
    SqliteStore(path).close()
    os.link(path, other)
    with pytest.raises(StoreError, match="hard link"):
        claim(other)


def test_an_empty_file_is_no_new_store(tmp_path: Path) -> None:
    """SQLite would take it for one, and throw its log away."""
    path = tmp_path / "s.db"
    store = SqliteStore(path)
    store.write([changes()])
    assert path.stat().st_size
    log = (tmp_path / "s.db-wal").read_bytes()
    store.close()
    path.write_bytes(b"")
    (tmp_path / "s.db-wal").write_bytes(log)
    for read_only in (False, True):
        with pytest.raises(StoreError, match="the file is empty"):
            SqliteStore(path, read_only=read_only)
    assert (tmp_path / "s.db-wal").read_bytes() == log


def test_a_read_only_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.db"
    SqliteStore(path).close()
    monkeypatch.setattr(os, "access", lambda *args: False)  # root may write everything
    with pytest.raises(StoreError, match="is read-only"):
        SqliteStore(path)
    SqliteStore(path, read_only=True).close()


def test_a_damaged_page_is_one_sessions(tmp_path: Path) -> None:
    """The others are written; it is saved anew, once what it has is set aside."""
    path = tmp_path / "s.db"
    store = SqliteStore(path)
    items = {f"s{i}": bytes([65 + i]) * 300 for i in range(60)}
    for name in ("first", "second", "third"):
        store.write([changes(name, put={"head": b"h"} | items, count=1)])
    store.close()
    data = bytearray(path.read_bytes())
    number = 2  # of the second session, in whose items a page of the middle is
    at = data.index(items["s30"], data.index(items["s30"]) + 1) // 4096 * 4096
    data[at : at + 4096] = b"\xff" * 4096
    path.write_bytes(bytes(data))
    store = SqliteStore(path)
    more = {"s30": b"new"}
    batch = [changes(name, put=more, count=2, whole=False) for name in ("first", "second", "third")]
    with pytest.raises(StoreDamaged):
        store.write(batch)
    assert store.write([batch[0]]) == store.write([batch[2]]) == {}
    with pytest.raises(StoreDamaged):
        store.write([batch[1]])
    assert 0 < len(store.read("second")) < 61  # what can be read, for who opens it
    store.set_aside("second")
    whole = {"head": b"h"} | items | more
    assert store.write([changes("second", put=whole, count=3)]) == {}
    for name in ("first", "second", "third"):
        assert store.read(name) == whole
    assert [kept.session for kept in store.kept() if "(" in kept.session] == [
        f"second (damaged {number})"
    ]
    store.close()
