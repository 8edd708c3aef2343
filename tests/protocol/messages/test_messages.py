"""Every mailbox's union can cross a process boundary, nested wire messages included."""

from typing import Any, get_args

import msgspec
import pytest

from ramify.protocol import messages, wire
from ramify.protocol.messages import (
    CacheMessage,
    DirectoryMessage,
    ExecutorMessage,
    GatewayMessage,
    SchedulerEvent,
    SessionMessage,
    session_of,
)
from ramify.protocol.plan import pack, pack_floats
from ramify.protocol.sampling import SamplingParams, TokenLogprobs

OPEN = wire.Open(client="c", have={"main": 1})
OPS: list[wire.ClientMessage] = [wire.Generate(id=1, as_=["x"]), wire.Ping(n=2)]
FINISHED = messages.Finished(1, "stop", 3, 2, 1, 1, 0.0, 0.1, 0.2, 0.3, scores=pack_floats([-1.0]))
CASES: list[tuple[Any, list[Any]]] = [
    (
        SessionMessage,
        [messages.Attach(1, OPEN, OPS, True), messages.Frame(1, OPS), messages.Detached(1)],
    ),
    (
        SessionMessage,
        [messages.Throttled(1), messages.Drained(1), messages.Inspected(1, [0, -1]), messages.Tick()],
    ),
    (
        SessionMessage,
        [
            messages.Tokens(
                [messages.Progress(1, pack([5]), [TokenLogprobs(-1.0, [5], [-1.0])])], [FINISHED]
            ),
        ],
    ),
    (
        DirectoryMessage,
        [
            messages.OpenSession(1, OPEN, OPS),
            messages.Shutdown("stop", 1),
        ],
    ),
    (
        GatewayMessage,
        [
            messages.Opened(1, 2),
            messages.OpenRefused(1, wire.Error(code="no_session", message="gone")),
            messages.Deliver(1, [wire.Delta(branch="a", position=1, text="x"), wire.Pong(n=1, load={})]),
            messages.CloseSocket(1, 1000, "done"),
        ],
    ),
    (
        CacheMessage,
        [
            messages.OpenBranch(1),
            messages.ExtendBranch(1, pack([1])),
            messages.ForkBranch(1, [2], 3),
            messages.MoveBranch(1, 0),
            messages.RetainBranches({1: 2.5}),
            messages.DropBranches([1]),
            messages.Inspect(1, 2, [3]),
            messages.Settle(
                [messages.Commit(1, 2, pack([3]), True)],
                [messages.Grow(1, 2)],
                [messages.Acquire(1, 2, 3, True, rerun=4), messages.Acquire(1, 2, 3)],
            ),
        ],
    ),
    (
        SchedulerEvent,
        [
            messages.Submit(1, 2, 3, 4, SamplingParams(), [5]),
            messages.Submit(1, 2, 3, 0, SamplingParams(), places=pack([2]), targets=pack([5])),
            messages.CancelRequest(1, keep=2, reason="stop"),
            messages.CancelSession(1),
            messages.Settled(
                [messages.Granted(1, 2, b"", b""), messages.Denied(1, "shared", on=2)],
                [messages.Grown(1, b"")],
                1,
                2,
                3,
            ),
        ],
    ),
]


@pytest.mark.parametrize(("union", "sent"), CASES)
def test_round_trip(union: Any, sent: list[Any]) -> None:
    decoder = msgspec.msgpack.Decoder(union)
    for message in sent:
        assert decoder.decode(msgspec.msgpack.encode(message)) == message


@pytest.mark.parametrize(
    "union",
    [CacheMessage, SchedulerEvent, SessionMessage, DirectoryMessage, GatewayMessage, ExecutorMessage],
)
def test_a_mailbox_can_tell_its_messages_apart(union: Any) -> None:
    tags = [msgspec.inspect.type_info(cls).tag for cls in get_args(union)]  # type: ignore[union-attr]
    assert len(set(tags)) == len(tags)
    msgspec.msgpack.Decoder(union)


def test_session_of_branch_and_request_numbers() -> None:
    assert session_of(7 << 32 | 123) == 7
