"""What type checkers and editors know of programs. `make check` checks this file; nobody runs it.

A line with `type: ignore` is a mistake that has to be found.
"""

from collections.abc import Iterator
from typing import Literal, assert_type

import msgspec

from ramify.clients.agent import Agent, Answer, act, tool
from ramify.clients.branch import Branch
from ramify.clients.generation import Result
from ramify.clients.program import (
    AsyncState,
    Failed,
    Forks,
    Piece,
    Run,
    State,
    SyncForks,
    Value,
    assistant,
    gen,
    program,
    select,
    user,
)
from ramify.clients.sync import SyncBranch
from ramify.protocol.wire import BranchState, Ok


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


AGENT = Agent([add], max_tokens=80)


@program
def plain(s: State, topic: str, count: int = 1) -> list[str]:
    """A program that is a plain function."""
    s += user(topic) + assistant("A: ", gen("a", max_tokens=3, stop="."), select("b", ["x", "y"]))
    assert_type(s["a"], str)
    assert_type(s.result("a"), Result)
    assert_type(s.read("a", int), int)
    assert_type(s.read("a", list[int]), list[int])
    kind: Literal["x", "y"] = s.read("b", Literal["x", "y"])
    assert_type(s.stream("a"), Iterator[str])
    forks = s.fork(3, hidden=True)
    forks.join(prefix="All: ", each="{i}) {text}", role=None, keep=True)
    forks.join(eahc="x")  # type: ignore[call-arg]
    assert_type(forks, SyncForks)
    assert_type(forks[0], State)
    assert_type(forks.values("a"), list[str])
    assert_type(forks.prune(2, by="vote"), SyncForks)
    assert_type(act(s, AGENT, "What is 2 + 3?", name="sum"), Answer)
    return [s["a"], kind]


@program
async def waiting(s: AsyncState, topic: str) -> int:
    """A program that is asynchronous."""
    s += user(topic) + assistant(gen("a"))
    assert_type(s["a"], Value)
    assert_type(await s["a"], str)
    assert_type(await s["a"].result(), Result)
    assert_type(await s.read("a", float), float)
    forks = s.fork(2)
    assert_type(forks, Forks)
    assert_type(forks[0], AsyncState)
    assert_type(await forks.values("a"), list[str])
    assert_type(await act(s, AGENT, "What is 2 + 3?"), Answer)
    assert_type(await plain_part(s, "x"), str)
    return 1


@program
async def plain_part(s: AsyncState, topic: str) -> str:
    """A part of others."""
    return await s[topic]


def runs(s: State) -> None:
    """What comes of them."""
    assert_type(plain.run("sleep"), Run[list[str]])
    assert_type(plain.run("sleep", 2).value, list[str])
    assert_type(plain.run("sleep", count=2)["a"], str)
    assert_type(plain.run("sleep").results, dict[str, Result])
    assert_type(plain.run_batch([{"topic": "sleep"}]), list[Run[list[str]] | Failed])
    assert_type(plain.stream("sleep"), Iterator[Piece])
    assert_type(plain.using(temperature=0.0).run("sleep").value, list[str])
    assert_type(waiting.run("sleep").value, int)
    assert_type(plain(s, "sleep"), list[str])
    assert_type(plain.trace("sleep").whole, bool)


def handles(branch: SyncBranch) -> None:
    """Methods that are made from asynchronous ones."""
    assert_type(branch.append("text", expect=3), Ok)
    assert_type(branch.tree(text=True), BranchState)
    assert_type(branch.join("a", "b", each="{text}", role=None), Ok)
    branch.append(messages=3)  # type: ignore[arg-type]
    branch.tree(txt=True)  # type: ignore[call-arg]
    branch.join("a", role="nobody")  # type: ignore[arg-type]


async def mistakes() -> None:
    """What editors underline."""
    plain.run(1)  # type: ignore[arg-type]
    plain.run("sleep", nope=1)  # type: ignore[call-arg]
    plain.run()  # type: ignore[call-arg]
    plain.using(temprature=1.0)  # type: ignore[call-arg]
    gen("a", max_tokens="x")  # type: ignore[arg-type]
    user(3)  # type: ignore[arg-type]
    await waiting.arun(topic=2)  # type: ignore[arg-type]


class Town(msgspec.Struct):
    name: str


async def typed_outputs(branch: Branch) -> None:
    assert_type(await branch.chat("Where is Lima?", type=Town).parsed(), Town)
    assert_type(await branch.generate(type=Town, max_tokens=9).parsed(), Town)
    for each in branch.generate(type=Town, n=2):
        assert_type(await each.parsed(), Town)
    assert_type(await branch.chat("Hello."), Result)


def typed_outputs_without_await(branch: SyncBranch) -> None:
    assert_type(branch.chat("Where is Lima?", type=Town).parsed(timeout=9.0), Town)
