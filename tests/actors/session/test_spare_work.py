"""Spare work, and the warm start: whose branches are computed, in which order, and when it ends."""

import asyncio
import threading
from array import array
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import anyio.lowlevel
import pytest

from ramify.actors.kit.fanout import Router
from ramify.actors.kit.mailbox import Mailbox
from ramify.actors.spare_work import WAITING, SpareWork, WarmStart
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.plan import unpack
from ramify.protocol.saved import StoredSession
from tests.manual_clock import ManualClock

MODEL = "fake"


class Memory:
    """A store of these sessions, the last used first."""

    def __init__(self, sessions: Mapping[str, Mapping[str, bytes]], busy: str = "") -> None:
        self.sessions, self.busy, self.closed = sessions, busy, threading.Event()

    def kept(self) -> Iterator[StoredSession]:
        for session in self.sessions:
            yield StoredSession(session, "", 0.0, None, session == self.busy, 0)

    def read(self, session: str) -> Mapping[str, bytes]:
        return self.sessions[session]

    def close(self) -> None:
        self.closed.set()


class Engine:
    """Answers requests: `ends` are their reasons, in order, then "length"."""

    def __init__(self, store: Memory, *ends: str, most: int | None = None, here: str = "") -> None:
        self.store = store
        self.ends = list(ends)
        self.cache: Mailbox[Any] = Mailbox("cache", 100)
        self.scheduler: Mailbox[Any] = Mailbox("scheduler", 100)
        self.sessions: Router[Any] = Router("sessions")
        self.asked: list[list[int]] = []  # the tokens of each request
        self.held: set[int] = set()
        self.spare = SpareWork(
            context=50,
            cache=self.cache,
            scheduler=self.scheduler,
            sessions=self.sessions,
            numbers=count(7),
            clock=ManualClock(),
        )
        self.warm_start = WarmStart(
            self.spare,
            lambda: store,
            model=MODEL,
            most=most,
            takes=lambda session: session != "elsewhere",
            here=lambda session: session == here,
        )

    async def run(self) -> list[list[int]]:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(self.answer)
                await self.warm_start.run()
                group.cancel_scope.cancel()
        assert not len(self.sessions)
        self._tell_cache()
        assert not self.held  # every branch was dropped
        return self.asked

    def _tell_cache(self) -> None:
        for message in self.cache.drain_nowait():
            match message:
                case m.OpenBranch(branch, namespace):
                    assert namespace == "tenant"
                    self.held.add(branch >> 32)
                case m.ExtendBranch(_, tokens):
                    self.asked.append(list(unpack(tokens)))
                case m.DropSessions(sessions):
                    self.held -= set(sessions)

    async def answer(self) -> None:
        while True:
            for message in await self.scheduler.drain():
                self._tell_cache()
                if not isinstance(message, m.Submit):
                    continue
                assert (message.spare, message.max_tokens, message.priority) == (True, 0, m.SPARE)
                assert message.prompt == len(self.asked[-1])
                reason = self.ends.pop(0) if self.ends else "length"
                session = message.request >> 32
                if reason == "gone":
                    self.sessions.tell(session, m.Lost("gone"))
                    continue
                ended = m.Finished(message.request, reason, 0, 1, 0, 1, 0.0, 0.0, 0.0, 0.0)  # type: ignore[arg-type]
                self.sessions.tell(session, m.Tokens([], [ended]))


@pytest.fixture
def saved(sim_class: Any, tokenizer: Tokenizer) -> Any:
    """`saved(text)`: the items of a session that said so, and the tokens that it has."""

    def make(text: str, **ops: Any) -> tuple[dict[str, bytes], list[int]]:
        engine = sim_class(tokenizer, stored=True)
        client = engine.session()
        engine.cores[1].state.namespace = "tenant"
        client.send(w.Append(id=client.id(), text="old"), w.Append(id=client.id(), text=text))
        client.send(w.Fork(id=client.id(), branch="main", as_=["b"], at=2))
        client.send(w.Append(id=client.id(), branch="b", text=text))
        engine.pump()
        engine.save(1)
        branch = engine.cores[1].state.branches["b"]
        return engine.saved[1], list(branch.tokens())

    return make


async def test_the_branch_that_was_written_last_of_each_session_in_order(saved: Any) -> None:
    first, tokens = saved("one two")
    second, others = saved("three four five")
    store = Memory({"s_2": second, "s_b": first, "s_1": first, "elsewhere": first}, busy="s_b")
    assert await Engine(store).run() == [others, tokens]
    assert await asyncio.to_thread(store.closed.wait, 5)


async def test_it_ends_with_its_tokens(saved: Any) -> None:
    items, tokens = saved("one two")
    store = Memory({"a": items, "b": items, "c": items})
    assert await Engine(store, most=2 * len(tokens) + 1).run() == [tokens, tokens]
    assert await asyncio.to_thread(store.closed.wait, 5)


@pytest.mark.parametrize("reason", ["cancelled", "error", "gone"])
async def test_it_ends_where_there_is_no_room(saved: Any, reason: str) -> None:
    items, tokens = saved("one two")
    store = Memory({"a": items, "b": items, "c": items})
    assert await Engine(store, "length", reason).run() == [tokens, tokens]


async def test_what_cannot_be_computed_is_passed_over(saved: Any) -> None:
    items, tokens = saved("one two")
    long, _ = saved("word " * 60)
    top = max(key for key in items if key[0] == "s")
    broken = {key: body for key, body in items.items() if key != top}
    store = Memory({"gone": {}, "long": long, "broken": broken, "here": items, "a": items})
    assert await Engine(store, here="here").run() == [tokens]


async def test_a_store_that_cannot_be_read_ends_it_alone(saved: Any, caplog: Any) -> None:
    class Broken(Memory):
        def read(self, session: str) -> Mapping[str, bytes]:
            raise OSError("the disk is gone")

    store = Broken({"a": {}})
    assert await Engine(store).run() == []
    assert await asyncio.to_thread(store.closed.wait, 5)
    assert "the disk is gone" in caplog.text or caplog.records


async def test_next_prompts_are_computed_the_newest_first_and_a_bad_one_hurts_no_other() -> None:
    engine = Engine(Memory({}))
    for number in range(WAITING + 2):
        tokens = array("i", [number + 1])
        engine.spare.put("tenant", (lambda: 1 / 0) if number == WAITING else lambda each=tokens: each)  # type: ignore[misc, arg-type, return-value]
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(engine.answer)
            group.start_soon(engine.spare.run)
            while len(engine.asked) < WAITING - 1:
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    assert engine.asked == [[number + 1] for number in range(WAITING + 1, 1, -1) if number != WAITING]
