"""Who a constraint is compiled for. What becomes of it: `e2e/test_constrained.py`."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ramify.actors.grammar.actor import GrammarActor
from ramify.actors.grammar.job_queue import Owner
from ramify.actors.kit.mailbox import Mailbox
from ramify.protocol.constraints import CompiledConstraint, ConstraintSpec
from ramify.protocol.messages import Abandon, AbandonSession, Compile, Compiled, Constrain


async def words() -> bytes:
    return b"words"


class Compiler:
    """Compiles anything, and keeps for whom."""

    def __init__(self) -> None:
        self.owners: list[Owner] = []

    async def compile(self, spec: ConstraintSpec, owner: Owner) -> CompiledConstraint:
        self.owners.append(owner)
        return CompiledConstraint(b"body", "automaton")


async def test_who_has_no_credential_takes_turns_as_a_session() -> None:
    compiler, told = Compiler(), list[Any]()
    scheduler = SimpleNamespace(tell=told.append)
    none = cast(Any, None)
    actor = GrammarActor(none, compiler, words, cast(Any, scheduler), none)
    for session, owner in ((1, ""), (2, ""), (3, "ann"), (4, "ann")):
        spec = ConstraintSpec("regex", "a" * session)
        for _ in range(2):  # the second time it is known
            answer = await actor._compiled(Compile(session << 32 | 7, spec, owner))
            assert isinstance(answer, Compiled)
            assert answer.constraint == session
    assert compiler.owners == [("", 1), ("", 2), ("ann", 3), ("ann", 4)]
    assert told == [Constrain(0, b"words"), *(Constrain(i, b"body") for i in range(1, 5))]


async def test_who_has_left_is_not_compiled_for() -> None:
    """Withdrawn by request and by session; the others get their answers."""
    asked, left, gate = list[str](), list[str](), asyncio.Event()

    class Waiting:
        async def compile(self, spec: ConstraintSpec, owner: Owner) -> CompiledConstraint:
            asked.append(spec.text)
            try:
                await gate.wait()
            except asyncio.CancelledError:
                left.append(spec.text)
                raise
            return CompiledConstraint(b"body", "automaton")

    mailbox: Mailbox[Any] = Mailbox("grammar", 64)
    told = list[Any]()
    sessions = SimpleNamespace(put=told.extend, start=lambda: None)
    scheduler = cast(Any, SimpleNamespace(tell=lambda message: None))
    actor = GrammarActor(mailbox, Waiting(), words, scheduler, cast(Any, sessions))
    task = asyncio.create_task(actor.run())
    for request in (1 << 32 | 1, 1 << 32 | 2, 2 << 32 | 3, 2 << 32 | 4, 3 << 32 | 5):
        mailbox.tell(Compile(request, ConstraintSpec("regex", str(request & 7)), ""))
    async with asyncio.timeout(30):
        while len(asked) < 5:
            await asyncio.sleep(0.001)
        mailbox.tell(Abandon(1 << 32 | 2))
        mailbox.tell(Abandon(9 << 32 | 9))  # has been answered, perhaps
        mailbox.tell(AbandonSession(2))
        while len(left) < 3:
            await asyncio.sleep(0.001)
        gate.set()
        while len(told) < 2:
            await asyncio.sleep(0.001)
    assert sorted(left) == ["2", "3", "4"]
    assert sorted((session, answer.request & 7) for session, answer in told) == [(1, 1), (3, 5)]
    assert not actor._waiting
    mailbox.close()
    await task


@pytest.mark.parametrize(("ahead", "unable"), [(True, None), (False, None), (True, "cannot")])
async def test_the_vocabulary_is_read_ahead_of_the_first_constraint(
    ahead: bool, unable: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it is worth it; once; and what fails then is tried again when a constraint comes."""
    asked, told = list[int](), list[Any]()

    async def read() -> bytes:
        asked.append(len(asked))
        if len(asked) == 1:
            raise OSError("no process could be started")
        return b"words"

    mailbox: Mailbox[Any] = Mailbox("grammar", 64)
    scheduler = cast(Any, SimpleNamespace(tell=told.append))
    none = cast(Any, None)
    actor = GrammarActor(mailbox, Compiler(), read, scheduler, none, ahead=ahead, unable=unable)
    task = asyncio.create_task(actor.run())
    for _ in range(5):
        await asyncio.sleep(0)
    tried = ahead and unable is None
    assert asked == ([0] if tried else [])
    assert ("no process could be started" in caplog.text) == tried
    if tried:
        for request in (1, 2):
            await actor._compiled(Compile(request, ConstraintSpec("regex", "a"), ""))
        assert asked == [0, 1]
        assert told == [Constrain(0, b"words"), Constrain(1, b"body")]
    mailbox.close()
    await task
