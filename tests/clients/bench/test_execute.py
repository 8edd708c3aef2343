"""The order of levels, on lines that only take notes."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from ramify.clients.bench import execute as module
from ramify.clients.bench.execute import execute
from ramify.clients.bench.load_program import GenerateJob, Level, LoadProgram, Target, Trace
from ramify.clients.bench.session import BenchFailed

TARGET = Target("notes", "")


class Notes:
    """A driver, its sessions and its lines in one; `log`: what was asked, in order."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.closed = 0
        self.widths: list[int] = []

    async def session(self, width: int) -> "NoteSession":
        self.widths.append(width)
        return NoteSession(self)


class NoteSession:
    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.extras: list[Trace] = []
        self.root = NoteLine(self, "root")

    async def close(self) -> None:
        self.notes.closed += 1


class NoteLine:
    def __init__(self, session: NoteSession, name: str) -> None:
        self.session, self.name = session, name

    async def append(self, tokens: Sequence[int]) -> None:
        self.session.notes.log.append(("append", list(tokens)))

    async def say(self, job: GenerateJob, *, more: bool) -> Trace:
        self.session.notes.log.append((self.name, job.tokens, more))
        for _ in range(job.output):
            await asyncio.sleep(0)
        if job.seed == 13:
            raise BenchFailed("unlucky")
        return Trace(output=job.output)

    async def spread(
        self, prefix: Sequence[int], jobs: Sequence[GenerateJob], *, more: bool
    ) -> list[tuple["NoteLine", Trace]]:
        self.session.notes.log.append(("spread", self.name, list(prefix), more))
        lines = [NoteLine(self.session, f"{self.name}.{i}") for i in range(len(jobs))]
        self.session.extras.append(Trace(extra=True))
        return [(line, await line.say(job, more=more)) for line, job in zip(lines, jobs, strict=True)]


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    made = Notes()
    monkeypatch.setattr(module, "make_driver", lambda target: made)
    return made


async def test_levels_go_on_with_lines_or_fork_one(notes: Notes) -> None:
    program = LoadProgram(
        [
            Level([GenerateJob([1], 1), GenerateJob([2], 1)], parent=0, prefix=[9]),
            Level([GenerateJob([3], 1), GenerateJob([4], 1)]),
            Level([GenerateJob([], 1)], parent=1),
            Level([GenerateJob([5], 1)]),
        ]
    )
    outcome = await execute(TARGET, [program])
    assert notes.log == [
        ("spread", "root", [9], True),
        ("root.0", [1], True),
        ("root.1", [2], True),
        ("root.0", [3], True),
        ("root.1", [4], True),
        ("spread", "root.1", [], True),
        ("root.1.0", [], True),
        ("root.1.0", [5], False),
    ]
    assert [(t.level, t.extra) for t in outcome.traces] == [
        (0, True), (0, False), (0, False), (1, False), (1, False), (2, True), (2, False), (3, False),
    ]  # fmt: skip
    assert (notes.widths, notes.closed) == ([2], 1)


async def test_together_waits_for_the_slowest(notes: Notes) -> None:
    quick = LoadProgram([Level([GenerateJob([1], 1)]), Level([GenerateJob([2], 1)], together=True)])
    slow = LoadProgram([Level([GenerateJob([3], 20)]), Level([GenerateJob([4], 1)], together=True)])
    await execute(TARGET, [quick, slow])
    assert [tokens for _, tokens, _ in notes.log][:2] == [[1], [3]]
    apart = LoadProgram([Level([GenerateJob([1], 1)]), Level([GenerateJob([2], 1)])])
    notes.log.clear()
    seen: list[int] = []
    await execute(TARGET, [apart, apart], go=lambda: asyncio.sleep(0, seen.append(notes.closed)))
    assert seen == [2]  # asked for the word before anything ran


async def test_input_ahead(notes: Notes) -> None:
    await execute(TARGET, [LoadProgram([Level([GenerateJob([1, 2], 1)], ahead_s=0.001)])])
    assert notes.log == [("append", [1, 2]), ("root", [], False)]


async def test_the_first_fault_ends_all(notes: Notes) -> None:
    bad = LoadProgram([Level([GenerateJob([1], 2, 13)])])
    good = LoadProgram([Level([GenerateJob([2], 10_000)])])
    with pytest.raises(BenchFailed, match="unlucky"):
        await execute(TARGET, [good, bad])
    assert notes.closed == 2


async def test_an_unknown_kind() -> None:
    with pytest.raises(BenchFailed, match="ramify, sglang or openai"):
        await execute(Target("other", ""), [])
