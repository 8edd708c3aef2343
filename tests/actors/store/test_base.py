"""What every store does, on a file, on PostgreSQL and on Redis."""

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ramify.actors.store.base import Store, StoreError, Taken
from ramify.protocol.saved import HISTORY, SavedFrame, SavedHistory, next_fence
from ramify.protocol.wire import Open
from tests.actors.store.conftest import changes

Opened = Callable[..., Any]


def test_items_are_put_replaced_and_dropped(opened: Opened) -> None:
    store = opened()
    store.write([changes(put={"head": b"1", "s1": b"one", "s2": b"two"})])
    second = changes(put={"head": b"22", "s2": b"2"}, drop=["s1", "none"], size=3, sync=True)
    assert list(store.write([second, changes("s_2", expires=1e12, busy=True)])) == []
    assert dict(store.read("s_1")) == {"head": b"22", "s2": b"2"}
    sizes = {each.session: (each.owner, each.size, each.expires, each.busy) for each in store.kept()}
    assert sizes == {"s_1": ("me", 3, None, False), "s_2": ("me", 1, 1e12, True)}
    again = opened()
    assert dict(again.read("s_2")) == {"head": b"h"}
    assert dict(again.read("s_3")) == {}
    again.delete(["s_1", "s_3"])
    assert dict(again.read("s_1")) == {}
    assert again.check() == []


def test_a_history_is_kept_for_a_day_and_is_no_damage(opened: Opened) -> None:
    store = opened()
    history = SavedHistory(b"1", "m", None, 0, [("a", b"1234")])
    name = f"{HISTORY}{history.asked.hex()}"
    for _ in range(2):  # whoever writes it
        assert store.write([history.changes("owner")]) == {}
    assert list(store.read(name)) == [HISTORY]
    assert (store.head(name), store.waiting(), list(store.check())) == (None, [], [])
    assert store.sweep(older_than=0.0, most=1 << 40, now=time.time() + 90_000) == 1
    assert not store.read(name)


def test_a_batch_may_say_several_things_of_one_session(opened: Opened) -> None:
    store = opened()
    batch = [
        changes(put={"head": b"1", "s1": b"one", "s2": b"2"}),
        changes(put={"head": b"2"}, drop=["s1"], size=2, whole=False),
        changes("s_2"),
        changes(put={"s1": b"again", "s3": b""}, drop=["s2"], size=6, used=5.0, whole=False),
    ]
    assert list(store.write(batch)) == []
    assert dict(store.read("s_1")) == {"head": b"2", "s1": b"again", "s3": b""}
    assert [(kept.session, kept.size, kept.used) for kept in store.kept()] == [
        ("s_1", 6, 5.0),
        ("s_2", 1, 1.0),
    ]
    assert list(store.write([])) == []
    assert list(store.write([changes(put={}, drop=["s1"], whole=False)])) == []
    assert store.check() == []


@pytest.mark.parametrize("name", ["s 1", "\u00e4\u6771\U0001f642", "a'b\"c\\d%s", "x" * 300])
def test_names_and_keys_are_any_text(opened: Opened, name: str) -> None:
    """A client names itself, and its name is in a key."""
    store = opened()
    items = {"head": bytes(range(256)), f"r1:{name}": b"", "r2:\0\n": b"\0"}
    store.write([changes(name, put=items)])
    assert dict(store.read(name)) == items
    assert dict(store.take(name, "free").items) == items


def test_names_that_no_session_has(opened: Opened) -> None:
    store = opened()
    for name in ("", "\0", "s_\0", "*", "s" * 256):
        assert store.head(name) is None
        assert dict(store.read(name)) == {}
        assert store.take(name, "ask") == Taken(0, {})


def test_changes_of_a_session_that_was_forgotten_are_dropped(opened: Opened) -> None:
    """A save that was under way when the session ended must not make half of it again."""
    store = opened()
    assert list(store.write([changes(put={"s7": b"7"}, whole=False), changes(whole=False)])) == [0, 1]
    assert list(store.kept()) == []


def test_who_took_a_session_last_has_it(opened: Opened) -> None:
    """Whoever had it before changes nothing, also with a head, and also once it is over."""
    old, new = opened(), opened()
    old.write([changes(put={"head": b"1", "s1": b"one"})])
    taken = new.take("s_1", "ask")
    assert taken.fence > next_fence() - 10**9
    assert dict(taken.items) == {"head": b"1", "s1": b"one"}
    late = changes(put={"head": b"late"}, drop=["s1"])
    assert list(old.write([late, changes("s_2"), late])) == [0, 2]
    assert dict(new.read("s_1")) == dict(taken.items)
    assert dict(new.read("s_2")) == {"head": b"h"}
    old.forget("s_1", 1)
    assert list(new.write([changes(put={"head": b"2"}, whole=False, fence=taken.fence)])) == []
    assert new.head("s_1") == b"2"
    again = old.take("s_1", "free")
    assert again.fence > taken.fence
    old.forget("s_1", again.fence)
    assert new.head("s_1") is None
    assert list(new.write([changes(whole=False, fence=taken.fence)])) == [0]
    assert new.take("s_1", "force") == Taken(0, {})
    assert new.check() == []


def test_a_write_that_is_told_twice_is_written_once(opened: Opened) -> None:
    """The connection was lost when nobody knew whether the first one had arrived."""
    store = opened()
    batch = [changes(put={"head": b"1", "s1": b"one"}), changes("s_2")]
    assert list(store.write(batch)) == []
    assert list(store.write(batch)) == []
    assert {each.session: each.size for each in store.kept()} == {"s_1": 4, "s_2": 1}


def test_a_session_of_a_server_that_lives_is_asked_for(opened: Opened) -> None:
    """Where several servers share a store. What waits there is not left behind."""
    one, other = opened(), opened()
    if not one.shared:
        pytest.skip("one server has it")
    one.write([changes(live=True, busy=True)])
    assert one.waiting() == []
    assert other.waiting() == []
    assert other.take("s_1", "free") is None
    assert one.tend() == []
    for _ in range(2):
        assert other.take("s_1", "ask") is None
    assert list(one.tend()) == ["s_1"]
    assert list(one.tend()) == []
    assert one.head("s_1") == b"h"
    one.write([changes(put={"head": b"last"}, live=False, busy=True, whole=False)])
    assert other.waiting() == []  # it is for who has asked
    taken = other.take("s_1", "ask")
    assert dict(taken.items) == {"head": b"last"}
    assert list(one.write([changes(whole=False)])) == [0]
    assert one.take("s_1", "ask") is None
    other.release("s_1")
    assert one.take("s_1", "ask").fence > taken.fence
    assert other.take("s_1", "ask") is None
    assert other.take("s_1", "force") is not None
    one.release("s_1")  # it is not its own any more
    assert one.take("s_1", "free") is None
    other.close()
    assert one.waiting() == ["s_1"]
    assert one.take("s_1", "free") is not None


def test_a_session_that_was_asked_for_and_never_taken_is_left_behind(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who had asked is dead."""
    for name in ("postgres", "redis"):
        monkeypatch.setattr(f"ramify.actors.store.{name}.CLAIM_SECONDS", 1)
    one, other = opened(), opened()
    if not one.shared:
        pytest.skip("one server has it")
    one.write([changes(live=True, busy=True)])
    assert other.take("s_1", "ask") is None
    one.write([changes(live=False, busy=True, whole=False)])
    assert one.waiting() == []
    until = time.monotonic() + 10
    while not one.waiting() and time.monotonic() < until:
        time.sleep(0.05)
    assert one.waiting() == ["s_1"]


def test_the_sweep(opened: Opened) -> None:
    store = opened()
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
    other = opened()
    assert other.sweep(older_than=100, most=10_000, now=now) == 2
    assert {each.session for each in store.kept()} == {"old, in memory", "large", "new"}
    assert other.sweep(older_than=100, most=600, now=now) == 1
    assert {each.session for each in store.kept()} == {"old, in memory", "new"}
    store.release("old, in memory")
    assert other.sweep(older_than=100, most=600, now=now) == 1
    assert store.check() == []


def test_a_full_store_takes_the_oldest_of_the_owner_that_holds_most(opened: Opened) -> None:
    """Else the new sessions of one name push out the old ones of all others."""
    store = opened()
    store.write(
        [
            changes("old", owner="ann", used=10, put={"head": b"x" * 300}),
            changes("nobody's", owner="", used=11, put={"head": b"x" * 300}),
            changes("live", owner="bob", used=12, live=True, put={"head": b"x" * 900}),
            *(changes(f"b{i}", owner="bob", used=100 + i, put={"head": b"x" * 300}) for i in range(4)),
        ]
    )

    def left(most: int) -> set[str]:
        opened().sweep(older_than=0, most=most, now=1000)
        return {each.session for each in store.kept()}

    all_ = {"old", "nobody's", "live", "b0", "b1", "b2", "b3"}
    assert left(2700) == all_
    assert left(2699) == all_ - {"b0"}
    assert left(2100) == all_ - {"b0", "b1"}
    assert left(1500) == {"old", "nobody's", "live"}  # what is live counts as its owner's, and stays
    assert left(1200) in ({"old", "live"}, {"nobody's", "live"})
    assert store.check() == []


def test_what_has_expired_is_not_read(opened: Opened) -> None:
    store = opened()
    store.write([changes(expires=time.time() - 1), changes("s_2", expires=time.time() + 100)])
    assert dict(store.read("s_1")) == {}
    assert store.head("s_1") is None
    assert store.take("s_1", "force") == Taken(0, {})
    assert store.read("s_2")
    assert store.head("s_2") == b"h"


def test_who_waits(opened: Opened) -> None:
    store = opened()
    store.write([changes("a", busy=True, used=1), changes("b"), changes("c", busy=True, used=2)])
    assert store.waiting() == ["c", "a"]
    store.write([changes("c", used=2)])
    assert store.waiting() == ["a"]


def test_it_can_be_looked_at_beside_its_server(opened: Opened) -> None:
    store = opened()
    store.write([changes(live=True)])
    looking = opened(read_only=True)
    assert [(kept.session, kept.live) for kept in looking.kept()] == [("s_1", True)]
    assert dict(looking.read("s_1")) == {"head": b"h"}
    assert looking.check() == []
    assert list(store.write([changes(whole=False)])) == []
    assert [kept.live for kept in looking.kept()] == [False]


names = st.sampled_from(["a", "b"])
keys = st.sampled_from(["head", "s1", "s2", "r1:x"])
ops = st.one_of(
    st.tuples(
        st.just("write"),
        names,
        st.dictionaries(keys, st.binary(max_size=4)),
        st.lists(keys, unique=True),
    ),
    st.tuples(st.just("stale"), names, st.dictionaries(keys, st.binary(max_size=4)), st.just([])),
    st.tuples(st.just("take"), names),
    st.tuples(st.just("forget"), names),
    st.tuples(st.just("delete"), names),
)


class Model:
    """What a store is to hold, and the fence of each session."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, bytes]] = {}
        self.fences: dict[str, int] = {}

    def write(
        self, store: Store, name: str, put: dict[str, bytes], drop: list[str], stale: bool
    ) -> None:
        known = self.fences.get(name)
        fence = known or next_fence()
        items = {key: body for key, body in self.items.get(name, {}).items() if key not in drop} | put
        size = sum(map(len, items.values()))
        new = known is None and not stale
        moved = list(store.write([changes(name, put, drop, size=size, fence=fence - stale, whole=new)]))
        assert moved == ([0] if stale else [])
        if not stale:
            self.fences[name] = fence
            self.items[name] = items

    def take(self, store: Store, name: str) -> None:
        taken = store.take(name, "force")
        assert taken is not None
        assert dict(taken.items) == self.items.get(name, {})
        assert taken.fence > self.fences.get(name, 0) or name not in self.items
        if name in self.items:
            self.fences[name] = taken.fence

    def run(self, store: Store, op: Any) -> None:
        match op:
            case ("write" | "stale" as kind, name, put, drop):
                self.write(store, name, put, drop, kind == "stale")
            case ("take", name):
                self.take(store, name)
            case ("forget", name):
                store.forget(name, self.fences.pop(name, 0))
                self.items.pop(name, None)
            case ("delete", name):
                store.delete([name])
                self.fences.pop(name, None)
                self.items.pop(name, None)


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=st.lists(ops, max_size=12))
def test_it_holds_what_a_model_of_it_holds(opened: Opened, steps: list[Any]) -> None:
    store = opened()
    store.delete(["a", "b"])
    model = Model()
    for op in steps:
        model.run(store, op)
        for name in ("a", "b"):
            assert dict(store.read(name)) == model.items.get(name, {})
    sizes = {kept.session: kept.size for kept in store.kept()}
    assert sizes == {name: sum(map(len, items.values())) for name, items in model.items.items()}
    assert [fault for fault in store.check() if not fault.endswith("no head")] == []
    store.close()


def test_what_does_not_follow_is_not_written(opened: Opened) -> None:
    """The store has lost a save: the next one brings all, and replaces what is there."""
    store = opened()
    store.write([changes(put={"head": b"1", "s1": b"one"}, count=1)])
    third = changes(put={"s3": b"3"}, count=3, whole=False)
    assert dict(store.write([third, changes("s_2", count=1)])) == {0: "lost"}
    assert dict(store.read("s_1")) == {"head": b"1", "s1": b"one"}
    if store.shared:  # a file loses nothing while a process lives that has it open
        assert list(store.behind({"s_1": (1, 2), "s_2": (1, 1), "s_3": (1, 1)})) == ["s_1", "s_3"]
    batch = [
        changes(put={"head": b"4", "s2": b"22"}, count=4),
        changes(put={"s3": b"3"}, count=5, whole=False, size=4),
    ]
    for _ in range(2):  # its answer was lost
        assert dict(store.write(batch)) == {}
        assert dict(store.read("s_1")) == {"head": b"4", "s2": b"22", "s3": b"3"}
    assert list(store.behind({"s_1": (1, 5), "s_2": (1, 1)})) == []
    assert {each.session: each.size for each in store.kept()} == {"s_1": 4, "s_2": 1}
    assert store.check() == []


def test_an_older_fence_is_a_loss_and_a_newer_one_another_server(opened: Opened) -> None:
    """A standby that took over may not know yet who has the session."""
    store = opened()
    store.write([changes(fence=5, count=1)])
    assert dict(store.write([changes(put={}, fence=9, count=3, whole=False)])) == {0: "lost"}
    assert list(store.behind({"s_1": (9, 2)})) == (["s_1"] if store.shared else [])
    assert dict(store.write([changes(put={"head": b"9"}, fence=9, count=4)])) == {}
    assert dict(store.write([changes(fence=5, count=2)])) == {0: "moved"}
    assert list(store.behind({"s_1": (5, 2)})) == []
    assert store.head("s_1") == b"9"


def test_a_session_that_was_deleted_is_not_lost(opened: Opened) -> None:
    """Whoever has it in memory must not save it again; one that is imported may have its name."""
    store = opened()
    if not store.shared:
        pytest.skip("no server has it meanwhile")
    store.write([changes(fence=5, count=1), changes("s_2", fence=5, count=1)])
    store.delete(["s_1"])
    store.forget("s_2", 5)
    for name in ("s_1", "s_2"):
        for whole in (False, True):
            late = changes(name, fence=5, count=2, whole=whole)
            assert dict(store.write([late])) == {0: "moved"}
        assert list(store.behind({name: (5, 1)})) == []
        assert dict(store.write([changes(name, fence=6, count=1)])) == {}


def test_what_is_set_aside_leaves_its_place(opened: Opened) -> None:
    store = opened()
    store.write([changes(put={"head": b"1", "s1": b"one"}, count=1, live=True)])
    try:
        store.set_aside("s_1")
    except StoreError:
        return  # this kind does not break so
    assert dict(store.read("s_1")) == {}
    assert dict(store.write([changes(put={"head": b"2"}, count=2)])) == {}
    assert dict(store.read("s_1")) == {"head": b"2"}
    assert sorted(kept.session.partition(" ")[0] for kept in store.kept()) == ["s_1", "s_1"]


def older(place: str) -> None:
    """Make it a store of the version before, which saved keys."""
    if place.startswith("postgres"):
        import psycopg

        with psycopg.connect(place) as db:
            db.execute("ALTER TABLE ramify_sessions DROP COLUMN count")
            db.execute("DROP TABLE ramify_gone")
            db.execute("UPDATE ramify_about SET value = '1' WHERE name = 'format'")
    elif place.startswith("redis"):
        import redis

        with redis.Redis.from_url(place) as db:
            db.hset("ramify:about", "format", 1)
    else:
        with sqlite3.connect(place) as db:
            db.execute("ALTER TABLE sessions DROP COLUMN count")
            db.execute("UPDATE about SET value = 2 WHERE name = 'format'")
        db.close()


def test_keys_in_an_older_store_are_taken_out_when_it_is_opened(
    opened: Opened, place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Also of what was deleted, and of what stands in its files: the database's log apart."""
    key, other = "k_" + "secret" * 4, "k_" + "gone" * 6
    frame = SavedFrame("c", Open(client="c", session="s_1", key=key, detach="pause"))
    gone = SavedFrame("c", Open(client="c", session="s_1", key=other))
    store = opened()
    items = {"head": b"h", "f1": msgspec.msgpack.encode(frame), "f2": msgspec.msgpack.encode(gone)}
    store.write([changes(put=items, count=1, fence=5)])
    store.write([changes(put={}, drop=["f2"], count=2, fence=5, whole=False)])
    store.close()
    older(place)
    store = opened()
    kept = store.read("s_1")
    saved = msgspec.msgpack.decode(kept["f1"], type=SavedFrame)
    assert (saved.opened.key, saved.opened.detach) == (None, "pause")
    if place.startswith("redis"):
        server = request.getfixturevalue("redis_server")
        rewritten(place)
        folders = [server.folder]
    elif place.startswith("postgres"):
        server = request.getfixturevalue("postgres_server")
        with psycopg_connected(place) as db:
            db.execute("CHECKPOINT")
        folders = [server.folder / "data" / "base"]
    else:
        folders = [tmp_path]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    held = [str(path) for path in files for each in (key, other) if each.encode() in path.read_bytes()]
    assert held == []
    found = store.take("s_1", "force")
    assert dict(store.write([changes(put={}, fence=found.fence, count=1, whole=False)])) == {}
    assert store.check() == []


def psycopg_connected(place: str) -> Any:
    import psycopg

    return psycopg.connect(place, autocommit=True)


def rewritten(place: str) -> None:
    """Wait until Redis has written its files anew."""
    import redis

    with redis.Redis.from_url(place) as db:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            info = db.info("persistence")
            if not info["aof_rewrite_in_progress"] and not info["aof_rewrite_scheduled"]:
                return
            time.sleep(0.02)


def test_a_store_has_one_secret(opened) -> None:
    secret = opened().secret()
    assert len(secret) == 32
    assert opened().secret() == opened().secret() == secret
