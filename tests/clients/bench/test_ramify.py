"""The Ramify driver: what it sends, and what it does not let a server get away with."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from ramify.clients.bench.load_program import GenerateJob, Target, Trace
from ramify.clients.bench.ramify import RamifySession
from ramify.clients.bench.session import BenchFailed
from ramify.protocol.codec import Codec
from ramify.protocol.wire import (
    Append,
    ClientMessage,
    Delta,
    Done,
    Error,
    Fork,
    Generate,
    Hit,
    Ok,
    ServerMessage,
    Usage,
)

CODEC = Codec("msgpack")


class Wire:
    """In place of the socket: keeps what is sent, and speaks as a server would."""

    def __init__(self) -> None:
        self.frames: list[list[ClientMessage]] = []
        self.session = RamifySession(Target("ramify", "ws://x", temperature=0.5), CODEC)
        self.session._socket = self  # type: ignore[assignment]
        self.now = 0.0

    def send(self, payload: bytes) -> None:
        self.frames.append(CODEC.decode_client(payload))

    def abort(self) -> None:
        pass

    def hear(self, *messages: ServerMessage) -> None:
        self.now += 1.0
        self.session._receive(self.now, CODEC.encode(list(messages)))


def done(id: int, branch: str, position: int, output: int, **changes: Any) -> Done:
    prompt = position - output
    usage: dict[str, Any] = {
        "prompt": prompt, "cached": 0, "computed": prompt, "output": output, "forced": 0,
        "hit": Hit(), "queue_ms": 0.0, "ttft_ms": 1.5, "total_ms": 2.0,
    }  # fmt: skip
    fields = {"reason": "length"} | {k: v for k, v in changes.items() if k not in usage}
    usage |= {k: v for k, v in changes.items() if k in usage}
    return Done(id=id, branch=branch, position=position, usage=Usage(**usage), **fields)


async def asked(wire: Wire) -> "asyncio.Task[Trace]":
    """A line that has asked for 3 tokens after [7, 8]."""
    task = asyncio.create_task(wire.session.root.say(GenerateJob([7, 8], 3, 11), more=False))
    await asyncio.sleep(0)
    return task


async def test_a_turn() -> None:
    wire = Wire()
    task = await asked(wire)
    (append, generate) = wire.frames[0]
    assert append == Append(id=1, branch="main", tokens=[7, 8])
    assert generate == Generate(
        id=2, branch="main", max_tokens=3, temperature=0.5, ignore_eos=True, seed=11
    )
    wire.hear(Ok(id=1, branch="main", position=2), Delta(branch="main", position=3, text="x"))
    wire.hear(Delta(branch="main", position=5, text="yz"), done(2, "main", 5, 3))
    trace = await task
    assert (trace.arrivals, trace.counts, trace.ended) == ([1.0, 2.0], [1, 2], 2.0)
    assert (trace.prompt, trace.computed, trace.output, trace.server_ttft_ms) == (2, 2, 3, 1.5)


async def test_the_last_tokens_may_have_no_text() -> None:
    wire = Wire()
    task = await asked(wire)
    wire.hear(Ok(id=1), Delta(branch="main", position=3, text="x"), done(2, "main", 5, 3))
    assert (await task).counts == [1, 2]


async def test_a_spread_is_one_frame() -> None:
    wire = Wire()
    jobs = [GenerateJob([], 2, 5), GenerateJob([9], 1, 6)]
    task = asyncio.create_task(wire.session.root.spread([1, 2, 3], jobs, more=True))
    await asyncio.sleep(0)
    (frame,) = wire.frames
    assert frame[0] == Append(id=1, branch="main", tokens=[1, 2, 3])
    assert frame[1] == Fork(id=2, branch="main", as_=["b1", "b2"])
    assert [(type(op), getattr(op, "branch", None)) for op in frame[2:]] == [
        (Generate, "b1"),
        (Append, "b2"),
        (Generate, "b2"),
    ]
    wire.hear(*(Ok(id=i) for i in (1, 2, 4)))
    wire.hear(done(5, "b2", 5, 1), Delta(branch="b1", position=5, text=""), done(3, "b1", 5, 2))
    (one, first), (_, second) = await task
    assert (first.prompt, first.output, second.prompt, second.output) == (3, 2, 4, 1)
    again = asyncio.create_task(one.spread([], [GenerateJob([], 1)], more=False))
    await asyncio.sleep(0)
    assert wire.frames[1][0] == Fork(id=6, branch="b1", as_=["b3"])
    wire.hear(Ok(id=6), done(7, "b3", 6, 1))
    await again


Fault = Callable[[Wire], None]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (lambda w: w.hear(done(2, "main", 4, 2)), "2 tokens came of 3"),
        (lambda w: w.hear(done(2, "main", 5, 3, reason="stop")), "ended with stop"),
        (lambda w: w.hear(done(2, "main", 5, 3, reason="error", message="oops")), "oops"),
        (lambda w: w.hear(done(2, "main", 5, 3, prompt=4)), "counts 4 . 3 tokens"),
        (lambda w: w.hear(Ok(id=1), Ok(id=1)), "op 1 has got a second terminal reply"),
        (lambda w: w.hear(Ok(id=9)), "second terminal reply"),
        (lambda w: w.hear(Delta(branch="main", position=2, text="")), "a delta to 2 at 2"),
        (lambda w: w.hear(Delta(branch="who", position=2, text="")), "unknown: 'who'"),
        (lambda w: w.hear(Error(code="limit", message="too many", id=1)), "limit: too many"),
        (lambda w: w.session.fail(BenchFailed("lost")), "lost"),
    ],
)
async def test_faults_end_everything(fault: Fault, text: str) -> None:
    wire = Wire()
    task = await asked(wire)
    fault(wire)
    with pytest.raises(BenchFailed, match=text):
        await task
    with pytest.raises(BenchFailed, match=text):
        await wire.session.root.say(GenerateJob([], 1), more=False)
    await wire.session.close()  # says nothing more: the fault is known


async def test_a_second_end_is_a_fault() -> None:
    wire = Wire()
    task = await asked(wire)
    wire.hear(Ok(id=1), done(2, "main", 5, 3))
    await task
    wire.hear(done(2, "main", 5, 3))
    assert wire.session.fault is not None
    assert "second terminal reply" in wire.session.fault.message


async def test_an_op_without_reply_shows_at_the_end() -> None:
    wire = Wire()
    await wire.session.root.append([1])
    closing = asyncio.create_task(wire.session.close())
    await asyncio.sleep(0)
    wire.hear(Ok(id=2))
    with pytest.raises(BenchFailed, match="no terminal reply to 1 ops"):
        await closing
