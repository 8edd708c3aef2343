"""The store actor: batches, answers, and what it does while the disk is full."""

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from ramify.actors.kit.fanout import Router
from ramify.actors.kit.mailbox import Mailbox
from ramify.actors.kit.report import StoreHealth
from ramify.actors.store import actor as module
from ramify.actors.store.actor import StoreActor
from ramify.actors.store.base import How, Refusal, StoreDamaged, StoreError, Taken
from ramify.protocol.messages import (
    Fetch,
    Fetched,
    Forget,
    Moved,
    NotSaved,
    Save,
    Saved,
    Saving,
    Unsaved,
    Waiting,
    Wanted,
)
from ramify.protocol.saved import HISTORY, Changes, SavedHistory, StoredSession


class Memory:
    """A store that remembers its calls, and fails when told to."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.broken = False
        self.tries = 0  # to write
        self.items: dict[str, dict[str, bytes]] = {}
        self.closed = threading.Event()
        self.moved: set[str] = set()  # sessions that another server has taken
        self.held: set[str] = set()  # that one has and keeps
        self.wanted: list[str] = []
        self.left: list[str] = []

    shared = False
    connections = 1
    seen: float | None = None

    def write(self, batch: Sequence[Changes]) -> dict[int, Refusal]:
        self.tries += 1
        if self.broken:
            raise StoreError("the disk is full")
        self.calls.append([each.session for each in batch])
        for each in batch:
            self.items.setdefault(each.session, {}).update(each.put)
        return {place: "moved" for place, each in enumerate(batch) if each.session in self.moved}

    def take(self, session: str, how: How) -> Taken | None:
        self.calls.append((session, how))
        if self.broken:
            raise StoreError("the disk is gone")
        if session in self.held and how != "force":
            return None
        return Taken(7, self.items.get(session, {}))

    def release(self, session: str) -> None:
        self.calls.append(("release", session))

    def forget(self, session: str, fence: int) -> None:
        self.items.pop(session, None)

    def head(self, session: str) -> bytes | None:
        if self.broken:
            raise StoreError("the disk is gone")
        return self.items.get(session, {}).get("head")

    def read(self, session: str) -> Mapping[str, bytes]:
        return self.items.get(session, {})

    def waiting(self) -> list[str]:
        return self.left

    def tend(self) -> list[str]:
        wanted, self.wanted = self.wanted, []
        return wanted

    def delete(self, sessions: Sequence[str]) -> None:
        for each in sessions:
            self.items.pop(each, None)

    def kept(self) -> Iterator[StoredSession]:
        return iter(())

    def sweep(self, *, older_than: float, most: int, now: float) -> int:
        self.calls.append("sweep")
        return 0

    def clock(self) -> float | None:
        return self.seen

    def secret(self) -> bytes:
        return b"s"

    def set_clock(self, now: float) -> None:
        self.seen = now

    def close(self) -> None:
        self.closed.set()


def save(session: str, ticket: int, number: int = 1, *, awaited: bool = True) -> Save:
    changes = Changes(session, "", {"head": b"x"}, [], 1, 0.0, None, False)
    return Save(number, ticket, changes, awaited)


class Running:
    """The actor with lists for a session and a directory."""

    def __init__(self, waiting: list[str] | None = None) -> None:
        self.store = Memory()
        self.mailbox: Mailbox[Any] = Mailbox("store", 100)
        self.sessions: Router[Any] = Router("sessions")
        self.session: Mailbox[Any] = Mailbox("session", 100)
        self.sessions.add(1, self.session)
        self.directory: Mailbox[Any] = Mailbox("directory", 100)
        self.actor = StoreActor(
            self.mailbox,
            self.store,
            self.sessions,
            self.directory,
            keep_s=1,
            most=1,
            waiting=waiting or [],
        )


async def test_saves_are_written_together_and_answered() -> None:
    it = Running(["s_9"])
    async with anyio.create_task_group() as group:
        for message in (
            save("a", 1),
            save("b", 2),
            save("a", 3, 0),
            Fetch("a"),
            Forget("a", 0),
            Fetch("a"),
        ):
            it.mailbox.tell(message)
        await group.start(it.actor.run)
        async with asyncio.timeout(60):
            told = await it.session.drain()
            while len(told) < 2:
                told += await it.session.drain()
            heard = await it.directory.drain()
            while len(heard) < 3:
                heard += await it.directory.drain()
        it.sessions.remove(1)
        it.mailbox.close()
    assert told == [Saved(1), Saved(2)]
    assert heard == [Waiting(["s_9"]), Fetched("a", {"head": b"x"}), Fetched("a", {})]
    assert it.store.calls[0] == ["a", "b", "a"]
    assert await asyncio.to_thread(it.store.closed.wait, 5)


async def test_saves_that_nobody_waits_for_are_gathered_and_wake_no_session(monkeypatch: Any) -> None:
    """One that is waited for, or a question, takes along what has come."""
    monkeypatch.setattr(module, "GATHER_SECONDS", 3600.0)
    it = Running()
    async with anyio.create_task_group() as group:
        await group.start(it.actor.run)
        reader = asyncio.ensure_future(it.session.drain())
        for ticket in (1, 2):
            it.mailbox.tell(save("a", ticket, awaited=False))
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
        assert not it.store.calls
        it.mailbox.tell(Fetch("a"))
        async with asyncio.timeout(60):
            assert await it.directory.drain() == [Fetched("a", {"head": b"x"})]
            assert it.store.calls[0] == ["a", "a"]
            assert not reader.done()
            it.mailbox.tell(save("b", 3))
            assert await reader == [Saved(1), Saved(2), Saved(3)]
        it.sessions.remove(1)
        it.mailbox.close()


async def test_who_lost_a_session_hears_it() -> None:
    """The others of the same batch are saved."""
    it = Running()
    other: Mailbox[Any] = Mailbox("other", 100)
    it.sessions.add(2, other)
    it.store.moved.add("a")
    for message in (save("a", 1), save("b", 5, 2), save("a", 2, 0)):
        it.mailbox.tell(message)
    async with anyio.create_task_group() as group:
        await group.start(it.actor.run)
        async with asyncio.timeout(60):
            assert await it.session.drain() == [Moved(taken=True)]
            assert await other.drain() == [Saved(5)]
        it.sessions.remove(1)
        it.sessions.remove(2)
        it.mailbox.close()


async def test_a_session_is_asked_for_before_it_is_taken(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(module, "HANDOVER_SECONDS", 0.05)
    it = Running()
    it.store.items = {"a": {"head": b"x", "s1": b"y"}}
    it.store.held.add("a")
    async with anyio.create_task_group() as group:
        await group.start(it.actor.run)
        async with asyncio.timeout(60):
            for how in ("look", "free", "ask"):
                it.mailbox.tell(Fetch("a", how))
            heard: list[Any] = []
            while len(heard) < 3:
                heard += await it.directory.drain()
        it.sessions.remove(1)
        it.mailbox.close()
    assert heard == [
        Fetched("a", {"head": b"x"}),
        Fetched("a", {}, held=True),
        Fetched("a", {"head": b"x", "s1": b"y"}, fence=7),
    ]
    asked = [call[1] for call in it.store.calls if call[0] == "a" and len(call) == 2]
    assert asked[:3] == ["free", "ask", "ask"]
    assert asked[-1] == "force"
    assert asked.count("force") == 1


async def test_in_a_shared_store_others_are_heard_and_the_dead_are_followed(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "TEND_SECONDS", 0.005)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    it = Running()
    it.store.shared = True
    it.store.wanted = ["a"]
    it.store.left = ["b", "elsewhere"]
    it.actor._takes = lambda session: session != "elsewhere"
    async with anyio.create_task_group() as group:
        await group.start(it.actor.run)
        async with asyncio.timeout(60):
            heard: list[Any] = []
            while len(heard) < 3:  # what cannot be taken up is told again, ever later
                heard += await it.directory.drain()
        it.sessions.remove(1)
        it.mailbox.close()
    assert heard[:3] == [Wanted(["a"]), Waiting(["b"]), Waiting(["b"])]


async def test_a_full_disk_is_waited_for(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.01)
    it = Running()
    it.store.broken = True
    async with anyio.create_task_group() as group:
        await group.start(it.actor.run)
        async with asyncio.timeout(60):
            for ticket in (1, 2):
                it.mailbox.tell(save("a", ticket))
                assert await it.session.drain() == [NotSaved(ticket)]
                tries = it.store.tries
                while it.store.tries < tries + 3:  # again and again, but told once
                    await anyio.sleep(0.005)
                assert it.session.drain_nowait() == []
            it.store.broken = False
            assert await it.session.drain() == [Saved(1)]
        it.sessions.remove(1)
        it.mailbox.close()


async def test_while_nothing_can_be_written_reads_are_refused(monkeypatch: Any) -> None:
    """Those that came with the batch, and those that come later; then all goes on in order."""
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.01)
    it = Running()
    it.store.broken = True
    for message in (save("a", 1), Fetch("b"), save("b", 2), Fetch("c")):
        it.mailbox.tell(message)
    refused = "the disk is full"
    async with anyio.create_task_group() as group:
        await group.start(it.actor.run)
        async with asyncio.timeout(60):
            heard: list[Any] = []
            while len(heard) < 3:
                heard += await it.directory.drain()
            assert heard == [Saving(refused), Fetched("b", {}, refused), Fetched("c", {}, refused)]
            it.mailbox.tell(Fetch("a"))
            assert await it.directory.drain() == [Fetched("a", {}, refused)]
            it.store.broken = False
            assert await it.directory.drain() == [Saving(None)]
            told = await it.session.drain()
            while len(told) < 4:
                told += await it.session.drain()
            assert told == [NotSaved(1), NotSaved(2), Saved(1), Saved(2)]
            it.mailbox.tell(Fetch("b"))
            assert await it.directory.drain() == [Fetched("b", {"head": b"x"})]
        it.sessions.remove(1)
        it.mailbox.close()


async def test_histories_are_saved_and_recalled_by_other_threads(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "RECALL_SECONDS", 0.2)
    running = Running()
    first = SavedHistory(b"1", "m", None, 0, [("a", b"1234")])
    then = SavedHistory(b"2", "m", b"1", 1, [("b", b"5678")])
    lost = SavedHistory(b"4", "m", b"3", 1, [("c", b"5678")])
    async with anyio.create_task_group() as group:
        await group.start(running.actor.run)
        for each in (first, then, lost):
            running.actor.keep("owner", each)
        with anyio.fail_after(5):
            while len(running.store.items) < 3:
                await anyio.sleep(0.01)

        async def recalled(*asked: bytes) -> list[SavedHistory]:
            return await anyio.to_thread.run_sync(running.actor.recall, asked)

        assert await recalled(b"4", b"2", b"1") == [first, then]  # of the other one not all is there
        assert await recalled(b"3") == []
        items = running.store.items[f"{HISTORY}{b'2'.hex()}"]
        whole = items[HISTORY]
        for damaged in (b"", whole[:-1], whole * 2, whole[:-1] + b"\x00", bytes(len(whole))):
            items[HISTORY] = damaged
            assert await recalled(b"2") == []
            assert await recalled(b"2", b"1") == [first]
        read = running.store.read
        monkeypatch.setattr(running.store, "read", lambda name: (time.sleep(0.5), read(name))[1])
        assert await recalled(b"1") == []  # it takes too long
        group.cancel_scope.cancel()
    assert running.actor.recall([b"1"]) == []  # it is closed


async def test_a_session_that_cannot_be_read_is_told_so() -> None:
    it = Running()
    it.store.broken = True
    async with anyio.create_task_group() as group:
        await group.start(it.actor.run)
        it.mailbox.tell(Fetch("a"))
        async with asyncio.timeout(60):
            assert await it.directory.drain() == [Fetched("a", {}, "the disk is gone")]
        it.store.broken = False
        it.sessions.remove(1)
        it.mailbox.close()


async def test_what_sessions_save_while_they_end_is_written() -> None:
    """The actor is cancelled together with them."""
    it = Running()
    async with anyio.create_task_group() as group:
        await group.start(it.actor.run)
        await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
        it.mailbox.tell(save("late", 1, 0))
        it.sessions.remove(1)
    assert "late" in it.store.items


async def test_what_was_begun_when_the_server_stopped_is_written() -> None:
    """It is cancelled in the middle of a batch, with more behind it."""
    it = Running()
    begun, go = threading.Event(), threading.Event()
    write = it.store.write

    def slow(batch: Sequence[Changes]) -> dict[int, Refusal]:
        begun.set()
        go.wait(10)
        return write(batch)

    it.store.write = slow  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        await group.start(it.actor.run)
        for message in (save("a", 1), Forget("z", 0), save("b", 2, 0)):
            it.mailbox.tell(message)
        await asyncio.to_thread(begun.wait, 10)
        it.sessions.remove(1)
        group.cancel_scope.cancel()
        go.set()
    assert {"a", "b"} <= it.store.items.keys()


class Damaged(Memory):
    """What it has of some sessions cannot be written; of some not even set aside."""

    def __init__(self, damaged: set[str], stuck: set[str]) -> None:
        super().__init__()
        self.damaged = damaged | stuck
        self.stuck = stuck

    def write(self, batch: Sequence[Changes]) -> dict[int, Refusal]:
        if self.damaged & {each.session for each in batch}:
            raise StoreDamaged("a page is damaged")
        return super().write(batch)

    def set_aside(self, session: str) -> None:
        if session in self.stuck:
            raise StoreDamaged("another page is damaged")
        self.damaged.discard(session)


async def test_damage_is_the_sessions_in_which_it_is(monkeypatch: Any) -> None:
    """The others of the batch are written; it is saved whole beside what is damaged, or tried again."""
    monkeypatch.setattr(module, "DAMAGED_SECONDS", 0.01)
    it = Running()
    healths: list[StoreHealth] = []
    names = [f"s{i}" for i in range(9)]
    it.store = Damaged({"s3"}, {"s7"})
    it.actor._store, it.actor._report = it.store, healths.append
    again = save("s3", 9, 0)
    for i, name in enumerate(names):
        it.mailbox.tell(save(name, i))
    it.mailbox.tell(msgspec.structs.replace(save("s3", 10, 0), again=lambda: again))
    async with anyio.create_task_group() as group:
        await group.start(it.actor.run)
        async with asyncio.timeout(60):
            told: list[Any] = []
            while len(told) < 10:
                told += await it.session.drain()
            tickets = {m.ticket for m in told if isinstance(m, Saved)}
            assert tickets == {0, 1, 2, 4, 5, 6, 8}
            assert Unsaved(3) in told
            assert told.count(NotSaved(7)) >= 1
            assert healths[-1].damaged == 1
            assert healths[-1].error is None
            assert "s3" in it.store.items  # its last save, whole
            it.store.damaged.clear()
            while Saved(7) not in told:
                told += await it.session.drain()
            assert healths[-1].damaged == 0
        it.sessions.remove(1)
        it.mailbox.close()


async def test_after_each_connection_what_is_missing_is_asked_for(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "TEND_SECONDS", 0.005)
    it = Running()
    it.store.shared = True
    asked: list[Any] = []

    def behind(known: Mapping[str, tuple[int, int]]) -> list[str]:
        asked.append(dict(known))
        if len(asked) == 1:
            raise StoreError("it is away again")
        return ["a"]

    it.store.behind = behind  # type: ignore[attr-defined]
    async with anyio.create_task_group() as group:
        await group.start(it.actor.run)
        async with asyncio.timeout(60):
            for name in ("a", "b"):
                it.mailbox.tell(save(name, 4))
            heard: list[Any] = []
            while len(heard) < 2:
                heard += await it.session.drain()
            assert not asked
            it.store.connections = 2
            assert await it.session.drain() == [Unsaved(0)]
            assert asked == [{"a": (0, 0), "b": (0, 0)}] * 2
        it.sessions.remove(1)
        it.mailbox.close()


async def test_how_the_store_is(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.01)
    it = Running()
    healths: list[StoreHealth] = []
    it.actor._report = healths.append
    it.store.broken = True
    async with anyio.create_task_group() as group:
        await group.start(it.actor.run)
        async with asyncio.timeout(60):
            it.mailbox.tell(save("a", 1))
            assert await it.session.drain() == [NotSaved(1)]
            assert healths == [StoreHealth("the disk is full")]
            it.store.broken = False
            assert await it.session.drain() == [Saved(1)]
            assert healths[1:] == [StoreHealth()]
        it.sessions.remove(1)
        it.mailbox.close()


async def test_nothing_is_forgotten_by_a_clock_that_may_be_wrong(monkeypatch: Any) -> None:
    it = Running()
    swept: list[tuple[float, float]] = []

    def sweep(*, older_than: float, most: int, now: float) -> int:
        swept.append((older_than, now))
        return 0

    it.store.sweep = sweep  # type: ignore[method-assign]
    now = 1e9
    monkeypatch.setattr(module.time, "time", lambda: now)
    for ago, trusted in ((None, True), (29, True), (-0.01, True), (31, False), (-1, False)):
        seen = None if ago is None else now - ago * 86_400
        it.store.seen = seen
        await it.actor._sweep()
        assert swept.pop() == ((now - 1, now) if trusted else (0.0, 0.0))
        assert it.store.seen == (now if trusted else seen)
