"""The gateway under uvloop, whose transports are not asyncio's."""

import asyncio

import pytest

from ramify.protocol.config import Limits
from ramify.protocol.messages import Deliver, Detached, Throttled
from ramify.protocol.wire import Delta, Generate

uvloop = pytest.importorskip("uvloop")


def test_life_of_a_socket_and_flood(serve) -> None:
    async def scenario() -> None:
        async with serve(limits=Limits(queued_bytes=256 << 10)) as gateway:
            session = gateway.session()
            async with gateway.connect(max_queue=1) as client:
                assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
                socket = await gateway.attach(client)
                await client.send('{"type":"generate","id":2}')
                (frame,) = await session.drain()
                assert (frame.socket, frame.ops) == (socket, [Generate(id=2)])
                delta = Delta(branch="main", position=1, text="x" * (64 << 10))
                gateway.mailbox.tell(Deliver(socket, [delta]))
                assert await gateway.read(client) == [delta]
                for cut in (Throttled(socket), Detached(socket)):
                    for _ in range(100):
                        gateway.mailbox.tell(Deliver(socket, [delta]))
                    assert await session.drain() == [cut]
                client.transport.abort()
            assert (await gateway.get("/healthz"))[0] == 200

    uvloop.run(scenario())
