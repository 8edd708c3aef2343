"""The SQLite store: what was committed is there, and what is wrong is told."""

import os
import sqlite3
import time
from pathlib import Path

import pytest

from ramify.actors.store.base import StoreError, Taken
from ramify.actors.store.sqlite import LAYOUT, SqliteStore, claim
from ramify.protocol.saved import Changes, next_fence


def changes(
    session: str = "s_1",
    put: dict[str, bytes] | None = None,
    drop: list[str] | None = None,
    *,
    used: float = 1.0,
    expires: float | None = None,
    busy: bool = False,
    live: bool = False,
    sync: bool = False,
    fence: int = 1,
    new: bool = True,
) -> Changes:
    put = {"head": b"h"} if put is None else put
    return Changes(session, "me", put, drop or [], used, expires, busy, live, sync, fence, new)


def test_items_are_put_replaced_and_dropped(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "deep" / "s.db")
    store.write([changes(put={"head": b"1", "s1": b"one", "s2": b"two"})])
    store.write(
        [changes(put={"head": b"22", "s2": b"2"}, drop=["s1", "none"], sync=True), changes("s_2")]
    )
    assert dict(store.read("s_1")) == {"head": b"22", "s2": b"2"}
    sizes = {each.session: (each.owner, each.size) for each in store.kept()}
    assert sizes == {"s_1": ("me", 3), "s_2": ("me", 1)}
    store.close()
    again = SqliteStore(tmp_path / "deep" / "s.db")
    assert dict(again.read("s_2")) == {"head": b"h"}
    assert again.read("s_3") == {}
    again.delete(["s_1", "s_3"])
    assert again.read("s_1") == {}
    assert again.check() == []
    again.close()


def test_only_its_user_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "state" / "s.db"
    SqliteStore(path).close()
    assert os.stat(path).st_mode & 0o077 == 0
    assert os.stat(path.parent).st_mode & 0o077 == 0


def test_changes_of_a_session_that_was_forgotten_are_dropped(tmp_path: Path) -> None:
    """A save that was under way when the session ended must not make half of it again."""
    store = SqliteStore(tmp_path / "s.db")
    assert store.write([changes(put={"s7": b"7"}, new=False), changes(new=False)]) == [0, 1]
    assert list(store.kept()) == []
    store.close()


def test_who_took_a_session_last_has_it(tmp_path: Path) -> None:
    """Whoever had it before changes nothing, also with a head, and also once it is over."""
    path = tmp_path / "s.db"
    old, new = SqliteStore(path), SqliteStore(path)
    old.write([changes(put={"head": b"1", "s1": b"one"})])
    taken = new.take("s_1", "ask")
    assert taken is not None
    assert taken.fence > next_fence() - 10**9
    assert dict(taken.items) == {"head": b"1", "s1": b"one"}
    late = changes(put={"head": b"late"}, drop=["s1"])
    assert old.write([late, changes("s_2"), late]) == [0, 2]
    assert new.read("s_1") == taken.items
    assert new.read("s_2") == {"head": b"h"}
    old.forget("s_1", 1)
    assert new.write([changes(put={"head": b"2"}, new=False, fence=taken.fence)]) == []
    assert new.head("s_1") == b"2"
    again = old.take("s_1", "free")
    assert again is not None
    assert again.fence > taken.fence
    old.forget("s_1", again.fence)
    assert new.head("s_1") is None
    assert new.write([changes(new=False, fence=taken.fence)]) == [0]
    assert new.take("s_1", "force") == Taken(0, {})
    old.close()
    new.close()


def test_a_store_without_fences_gets_them(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    SqliteStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE sessions DROP COLUMN fence")
        db.execute("INSERT INTO sessions VALUES (1, 's_1', '', 1.0, NULL, 0, 1, 1)")
        db.execute("INSERT INTO items VALUES (1, 'head', x'68')")
        db.execute("UPDATE about SET value = 1")
    store = SqliteStore(path)
    taken = store.take("s_1", "ask")
    assert taken is not None
    assert taken.items == {"head": b"h"}
    assert store.write([changes(new=False, fence=taken.fence)]) == []
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


def test_the_sweep(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    now = 1000.0
    store.write(
        [
            changes("old", used=10),
            changes("old, in memory", used=10, live=True),
            changes("expired", used=900, expires=950),
            changes("large", used=901, put={"head": b"x" * 600}),
            changes("new", used=990, put={"head": b"x" * 500}),
        ]
    )
    assert store.sweep(older_than=100, most=10_000, now=now) == 2
    assert {each.session for each in store.kept()} == {"old, in memory", "large", "new"}
    assert store.sweep(older_than=100, most=600, now=now) == 1
    assert {each.session for each in store.kept()} == {"old, in memory", "new"}
    store.unclaimed()
    assert store.sweep(older_than=100, most=600, now=now) == 1
    store.close()


def test_what_has_expired_is_not_read(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    store.write([changes(expires=time.time() - 1), changes("s_2", expires=time.time() + 100)])
    assert store.read("s_1") == {}
    assert store.read("s_2")
    store.close()


def test_who_waits(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    store.write([changes("a", busy=True, used=1), changes("b"), changes("c", busy=True, used=2)])
    assert store.waiting() == ["c", "a"]
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
    for at in range(6 * 4096, len(data) - 8192, 4096):
        data[at : at + 64] = b"\xff" * 64
    path.write_bytes(bytes(data))
    again = SqliteStore(path)
    with pytest.raises(StoreError, match="ramify store check"):
        list(again.kept())
        for i in range(50):
            again.read(f"s_{i}")
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
