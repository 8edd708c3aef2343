"""The store actor: batches, answers, and what it does while the disk is full."""

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from ramify.actors.kit.fanout import Router
from ramify.actors.kit.mailbox import Mailbox
from ramify.actors.store import actor as module
from ramify.actors.store.actor import StoreActor
from ramify.actors.store.base import StoreError
from ramify.protocol.messages import Fetch, Fetched, Forget, NotSaved, Save, Saved, Saving, Waiting
from ramify.protocol.saved import Changes, Kept


class Memory:
    """A store that remembers its calls, and fails when told to."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.broken = False
        self.items: dict[str, dict[str, bytes]] = {}
        self.closed = threading.Event()

    def write(self, batch: Sequence[Changes]) -> None:
        if self.broken:
            raise StoreError("the disk is full")
        self.calls.append([each.session for each in batch])
        for each in batch:
            self.items.setdefault(each.session, {}).update(each.put)

    def read(self, session: str) -> Mapping[str, bytes]:
        if self.broken:
            raise StoreError("the disk is gone")
        return self.items.get(session, {})

    def delete(self, sessions: Sequence[str]) -> None:
        for each in sessions:
            self.items.pop(each, None)

    def kept(self) -> Iterator[Kept]:
        return iter(())

    def sweep(self, *, older_than: float, most: int, now: float) -> int:
        self.calls.append("sweep")
        return 0

    def close(self) -> None:
        self.closed.set()


def save(session: str, ticket: int, number: int = 1) -> Save:
    return Save(number, ticket, Changes(session, "", {"head": b"x"}, [], 0.0, None, False))


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
            Forget("a"),
            Fetch("a"),
        ):
            it.mailbox.tell(message)
        await group.start(it.actor.run)
        async with asyncio.timeout(10):
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


async def test_a_full_disk_is_waited_for(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.01)
    it = Running()
    it.store.broken = True
    async with anyio.create_task_group() as group:
        await group.start(it.actor.run)
        it.mailbox.tell(save("a", 1))
        await anyio.sleep(0.05)
        assert it.session.drain_nowait() == [NotSaved(1)]  # told once
        it.mailbox.tell(save("a", 2))
        await anyio.sleep(0.05)
        assert it.session.drain_nowait() == [NotSaved(2)]
        it.store.broken = False
        async with asyncio.timeout(10):
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
        async with asyncio.timeout(10):
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


async def test_a_session_that_cannot_be_read_is_told_so() -> None:
    it = Running()
    it.store.broken = True
    async with anyio.create_task_group() as group:
        await group.start(it.actor.run)
        it.mailbox.tell(Fetch("a"))
        async with asyncio.timeout(10):
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

    def slow(batch: Sequence[Changes]) -> None:
        begun.set()
        go.wait(10)
        write(batch)

    it.store.write = slow  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        await group.start(it.actor.run)
        for message in (save("a", 1), Forget("z"), save("b", 2, 0)):
            it.mailbox.tell(message)
        await asyncio.to_thread(begun.wait, 10)
        it.sessions.remove(1)
        group.cancel_scope.cancel()
        go.set()
    assert {"a", "b"} <= it.store.items.keys()
