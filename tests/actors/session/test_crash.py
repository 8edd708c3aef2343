"""A session that crashes, at whatever point, takes nobody along.

A rich conversation is played once to see which lines of the session's code it runs. Then it is played
again for each of them, in one and the same engine, and an exception is raised there: only that session
may end, and nothing of it may stay.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from linecache import getline
from types import CodeType, FrameType
from typing import Any

import pytest

from ramify.actors.kit.memory import Holdings
from ramify.actors.session import actor as actor_module
from ramify.actors.session.actor import SessionActor
from ramify.actors.session.directory import Directory
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.config import Limits
from ramify.protocol.errors import Close
from tests.actors.cache.integrity import check
from tests.amount import stride

ACTORS = actor_module.__file__.rpartition("session/")[0]
OURS = tuple(
    f"{ACTORS}{place}"
    for place in (
        "session/",
        "calls/",
        "kit/memory",
        "kit/turns",
        "tokenizer/detokenizer",
        "tokenizer/encoder",
        "tokenizer/histories",
    )
)
Point = tuple[CodeType, int]  # a line
PROMPT = [7, 8, 9]
# Called by the loop and by other actors: they do no more than put a message into the mailbox, or guard.
CALLBACKS = ("_tick", "_tell", "tell", "leave", "tell_all")


class Fault(Exception):
    """Raised where no code expects it."""


class Panic(BaseException):
    """What native libraries raise when they panic is not an `Exception`."""


def ours(code: CodeType) -> bool:
    """Whether a crash there is a crash of a session; the directory and `live` only guard it."""
    if code is SessionActor.live.__code__ or "directory" in code.co_filename:
        return False
    return code.co_filename.startswith(OURS)


def belongs(frame: FrameType | None) -> bool:
    """Whether `frame` runs for a session that is to crash: any but the first."""
    while frame is not None and frame.f_code.co_name != "__del__":  # nobody hears what that raises
        owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if isinstance(owner, SessionActor) and hasattr(owner, "core"):
            if frame.f_code.co_name in CALLBACKS:
                return False
            return owner.core.state.number > 1
        if isinstance(owner, Directory):  # `_ended` cleans up behind a session
            return frame.f_code.co_name == "_begin" and bool(frame.f_locals["number"] > 1)
        frame = frame.f_back
    return False


@contextmanager
def tracing(trace: Callable[..., Any]) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Conversation:
    """Two clients on one session, with everything the protocol has."""

    def __init__(self, world: Any) -> None:
        self.world = world

    async def play(self) -> None:
        world = self.world
        user = [w.ChatMessage(role="user", content="Plan a 1-day trip.")]
        tools = [{"type": "function", "function": {"name": "look"}}]
        one = world.open(
            w.Append(id=1, messages=user),
            w.Fork(id=2, as_=["a", "b"]),
            w.Generate(id=3, branch=["a", "b"], max_tokens=6, temperature=0, stop=["e", "th"]),
            client="one",
            tools=tools,
            ttl_s=5.0,
            detach="pause",
        )
        await world.settle()
        state = next((s for s in world.sockets[one] if isinstance(s, w.StateReply)), None)
        if state is None:
            return
        two = world.open(
            w.Tree(id=1, text=True),
            client="two",
            session=state.session,
            key=state.key,
            tick_ms=5,
            tokens=True,
            template="strict",
            have={"main": 2, "a": 4},
            revision=1,
        )
        world.send(
            one,
            w.Generate(id=4, n=2, max_tokens=6, temperature=0, logprobs=2),
            w.Append(id=5, branch=["a", "b"], text="and then"),
            w.Set(id=6, branch="a", name="c", retain_s=5, meta={"x": 1}),
            w.Set(id=7, retain_s=2, meta={"y": 1}),
            w.Rollback(id=8, branch="b", turns=1),
            w.Rollback(id=9, branch="c", to=3),
            w.Append(id=10, branch="c", tokens=[5, 6, 7]),
            w.Generate(id=11, branch="c", max_tokens=40, temperature=0, ignore_eos=True),
            w.Append(id=12, branch="nobody", text="x"),
            w.Generate(id=13, branch="nobody"),
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        world.notice(m.Throttled(two))
        await world.settle()
        world.send(
            two,
            w.Append(id=2, messages=user),
            w.Append(id=3, messages=[w.ChatMessage(role="system", content="Be short.")]),
            w.Generate(id=4, max_tokens=4, temperature=0, quiet=True),
            w.Tree(id=5, branch="c", tokens=True),
            w.Credit(branch="c", upto=6),
        )
        world.notice(m.Drained(two))
        world.clock.advance(0.01)
        await world.settle()
        if one in world.closed:
            return
        world.send(two, w.Append(id=6, branch="c", text="long " * 4000), w.Cancel(id=7, ops=[6]))
        world.send(one, w.Select(id=14, choices=["x"]), w.Generate(id=15, max_tokens=9))
        world.notice(m.Detached(one))
        world.send(two, w.Generate(id=8, branch="b", max_tokens=40), w.Cancel(id=9, branch="b"))
        await world.settle()
        if two in world.closed:
            return
        again = world.open(
            w.Generate(id=15, max_tokens=9),
            w.Drop(id=16, branch=["b", "c"]),
            client="one",
            session=state.session,
            key=state.key,
            have={"main": 1, "b": 2},
            revision=3,
        )
        await world.settle()
        names = ["p", "q", "r"]
        world.send(
            again,
            w.Fork(id=17, as_=names),
            w.Append(id=18, branch=["p", "q"], text="so 5"),
            w.Generate(id=19, branch=names, max_tokens=4, temperature=0, ignore_eos=True),
            w.Prune(id=20, from_=names, by="logprob", k=2, into=["p", "x"], keep=True),
            w.Prune(id=21, from_=["q", "p", "r"], by="vote", into="main"),
            w.Fork(id=22, branch=None, as_=["y", "z"]),
            w.Append(id=23, branch="y", text="1 " * 1000),
            w.Append(id=24, branch="z", text="2 " * 1000),
            w.Generate(id=25, n=2, as_=["s", "t"], max_tokens=4, temperature=1, seed=3, hidden=True),
            w.Join(id=26, from_=["s", "t"], prefix="long " * 50, suffix="end"),  # off the loop by now
            w.Generate(id=27, n=2, as_=["v", "w"], max_tokens=4, temperature=1, seed=4),
            w.Generate(id=28, branch="v", max_tokens=90, temperature=1, seed=3, ignore_eos=True),
            w.Prune(id=29, from_=["v", "w"], by="first", into="main"),
            w.Prune(id=30, from_=["x", "main"], by="vote", k=2, into=["main", "x"]),
            w.Prune(id=31, from_=["x"], by="vote", into="main"),
        )
        await world.settle()
        world.send(
            again,
            w.Generate(id=40, n=2, as_=["x1", "x2"], max_tokens=90, temperature=0, ignore_eos=True),
            w.Join(id=41, from_=["x1"], role=None),
            w.Generate(id=42, max_tokens=2, temperature=0),
        )
        await asyncio.sleep(0)
        world.send(again, w.Cancel(id=43, branch="main", subtree=True))
        await world.settle()
        world.notice(m.Detached(two))
        world.notice(m.Detached(again))
        await world.settle()
        world.clock.advance(700.0)
        await world.settle()


class Bystander:
    """Another session, which generates while the first one plays."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.next = 2
        self.tokens = list(PROMPT)
        self.socket = world.open(w.Append(id=1, tokens=PROMPT), client="bystander", tokens=True)

    def begin(self) -> None:
        ident, self.next = self.next, self.next + 2
        generate = w.Generate(
            id=ident, max_tokens=12, temperature=0, ignore_eos=True, quiet=True, stop_token_ids=[]
        )
        self.world.send(self.socket, generate, w.Rollback(id=ident + 1, to=len(PROMPT)))

    def check(self, text: str) -> None:
        """It has the answer that it always gets."""
        (done,) = self.world.replies(self.socket, self.next - 2)
        assert (done.reason, done.text) == ("length", text)


async def lines_of(world: Any) -> dict[Point, int]:
    """The lines that the conversation runs, in the order of their first time, and how often."""
    found: dict[Point, int] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return local if ours(frame.f_code) and belongs(frame) else None

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and getline(frame.f_code.co_filename, frame.f_lineno).strip() != "try:":
            point = frame.f_code, frame.f_lineno
            found[point] = found.get(point, 0) + 1
        return local

    with tracing(trace):
        await Conversation(world).play()
    return found


async def play_with_fault(world: Any, point: Point, time: int, fault: type[BaseException]) -> bool:
    """Play, and raise where the point is reached for the `time`-th time. Whether it was."""
    code, line = point
    left = time

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return local if frame.f_code is code and left and belongs(frame) else None

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if event == "line" and frame.f_lineno == line and left:
            left -= 1
            if not left:
                sys.settrace(None)
                raise fault("a fault")
        return local

    with tracing(trace):
        await Conversation(world).play()
    return not left


@pytest.fixture
def quiet_log() -> Iterator[None]:
    """Hundreds of tracebacks are expected here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


async def test_a_crash_at_any_line_ends_only_that_session(
    world: Callable[..., Any], quiet_log: None
) -> None:
    """Every 75th line that is run, in a campaign every one (some minutes)."""
    holdings = Holdings(Limits())
    async with world(holdings=holdings) as each:
        bystander = Bystander(each)
        await each.settle()
        bystander.begin()
        await each.settle()
        text = each.replies(bystander.socket, 2)[0].text
        points = await lines_of(each)
        for _ in range(2):  # what is done once for all sessions, as for a template, is left out
            again = await lines_of(each)
            points = {line: min(times, again[line]) for line, times in points.items() if line in again}
        assert len(points) > 1000
        reached = 0
        chosen = list(points.items())[:: stride(75)]
        for number, (point, times) in enumerate(chosen):
            wanted = 1 if number % 2 else min(times, 1 + number % 7)
            fault = Panic if number % 4 == 3 else Fault
            # how often a line is run may differ where threads tokenize: then at its first time
            for time in dict.fromkeys((wanted, 1)):
                bystander.begin()
                before = len(each.sockets)
                hit = await play_with_fault(each, point, time, fault)
                where = f"{point[0].co_qualname}:{point[1]}, {time}"
                bystander.check(text)
                assert len(each.directory) == 1, where
                assert len(each.cache.branches) == 1, where
                assert (len(each.cache.runs), each.cache.referenced) == (0, 0), where
                check(each.cache)
                assert holdings.process.sessions == 1, where
                mine = range(before + 1, len(each.sockets) + 1)
                assert {each.closed.get(s) for s in mine} <= {None, Close.SERVER_BUG, Close.DONE}, where
                if hit:
                    reached += 1
                    break
        assert holdings.held < 2 << 20  # of the one that is left; its kept replies grow
        assert reached > 0.95 * len(chosen)  # the rest: what is done once for all sessions
