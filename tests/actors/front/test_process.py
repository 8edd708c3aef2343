"""What a gateway process is told that cannot be encoded: its session ends, the others hear theirs."""

import asyncio
from typing import Any

import msgspec

from ramify.actors.front.gateway_messages import FromCore, FromEngine, ToSessions
from ramify.actors.front.process import GatewayProcess
from ramify.actors.links.bundle import Bundle
from ramify.actors.processes.messages import decoder, encoder
from ramify.protocol.messages import Inspected, Lost, Progress, Tokens


class StubLink:
    """Takes frames as its peer would read them."""

    def __init__(self) -> None:
        self.credits = 10
        self.told: list[tuple[int, FromEngine]] = []

    def tell(self, message: Any, /) -> None:
        frame = decoder(FromCore).decode(encoder().encode(message))
        assert isinstance(frame, ToSessions)
        self.told += frame.messages


async def test_a_session_whose_message_cannot_be_encoded_ends_alone() -> None:
    link = StubLink()
    process = object.__new__(GatewayProcess)  # without a process: only the way to it
    process.worker = 0
    process._sessions = Bundle(link, ToSessions, encoder())
    good = Tokens([Progress(1, b"1234")], [])
    process.put(64, good)
    process.put(65, Inspected(1, [2**70]))
    process.put(66, good)
    process.flush()
    await asyncio.sleep(0)
    assert [session for session, _ in link.told] == [64, 65, 66]
    assert [message for _, message in link.told[::2]] == [good, good]
    lost = link.told[1][1]
    assert isinstance(lost, Lost)
    assert "Inspected" in lost.reason or "tuple" in lost.reason
    assert msgspec.msgpack.encode(lost)
