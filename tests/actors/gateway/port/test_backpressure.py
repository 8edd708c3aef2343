"""Clients that read slowly or not at all, and what their neighbours notice (nothing)."""

import asyncio

from ramify.protocol.config import Limits
from ramify.protocol.errors import Close
from ramify.protocol.messages import Deliver, Detached, Drained, Throttled
from ramify.protocol.wire import Delta, Pong

CHUNK = 64 << 10
LIMITS = Limits(queued_bytes=4 * CHUNK)


def chunk(position: int) -> Delta:
    return Delta(branch="main", position=position, text="x" * CHUNK)


async def fill(gateway, session, socket: int) -> int:
    """Deliver until the session is told to stop; how many frames that took."""
    count = 0
    while not len(session):
        gateway.mailbox.tell(Deliver(socket, [chunk(count)]))
        count += 1
        await asyncio.sleep(0)
        assert count < 100_000
    assert session.drain_nowait() == [Throttled(socket)]
    return count


async def test_throttled_then_drained_and_nothing_lost(serve) -> None:
    async with serve(limits=LIMITS) as gateway:
        session = gateway.session()
        async with gateway.connect(max_queue=1) as client:
            socket = await gateway.attach(client)
            count = await fill(gateway, session, socket)
            positions = [(await gateway.read(client))[0].position for _ in range(count)]
            assert positions == list(range(count))
            assert await session.drain() == [Drained(socket)]
            assert await fill(gateway, session, socket)  # and it can happen again
            client.transport.abort()


async def test_flood_is_cut_off_and_detached_once(serve) -> None:
    async with serve(limits=LIMITS) as gateway:
        session = gateway.session()
        async with gateway.connect(max_queue=1) as client, gateway.connect() as other:
            socket = await gateway.attach(client)
            await gateway.attach(other)
            await fill(gateway, session, socket)
            for position in range(10 * 4):
                gateway.mailbox.tell(Deliver(socket, [chunk(position)]))
            assert await session.drain() == [Detached(socket)]
            await other.send('{"type":"ping"}')
            assert isinstance((await gateway.read(other))[0], Pong)
            assert gateway.actor.sockets == 1
            client.transport.abort()


async def test_one_write_holds_a_whole_batch_and_still_throttles(serve) -> None:
    async with serve(limits=LIMITS) as gateway:
        session = gateway.session()
        async with gateway.connect(max_queue=1) as client:
            socket = await gateway.attach(client)
            for position in range(500):
                gateway.mailbox.tell(Deliver(socket, [chunk(position)]))
            assert await session.drain() == [Throttled(socket)]  # however much it was
            for position in range(500):
                gateway.mailbox.tell(Deliver(socket, [chunk(position)]))
            assert await session.drain() == [Detached(socket)]


async def test_a_client_that_never_reads_again_is_closed_by_the_heartbeat(serve) -> None:
    async with serve(limits=LIMITS) as gateway:
        session = gateway.session()
        async with gateway.connect(max_queue=1) as client:
            socket = await gateway.attach(client)
            await fill(gateway, session, socket)
            client.transport.pause_reading()
            for _ in range(5):
                gateway.clock.advance(20.1)
                await asyncio.sleep(0)
            assert await session.drain() == [Detached(socket)]
            gateway.clock.advance(5.1)
            await gateway.until_gone()
            client.transport.abort()


async def test_deltas_are_written_in_the_turn_that_says_them_behind_what_waits(serve) -> None:
    async with serve() as gateway:
        gateway.session()
        async with gateway.connect() as client:
            socket = await gateway.attach(client)
            written: list[bytes] = []
            connection = gateway.actor.hub.connections[socket]
            write = connection._transport.write
            connection._transport.write = lambda data: (written.append(data), write(data))
            await asyncio.sleep(0)
            gateway.actor.tell(Deliver(socket, [Delta(branch="main", position=1, text="a")]))
            assert len(written) == 1
            gateway.mailbox.tell(Deliver(socket, [Delta(branch="main", position=2, text="b")]))
            gateway.actor.tell(Deliver(socket, [Delta(branch="main", position=3, text="c")]))
            gateway.actor.tell(Deliver(socket + 1, [Delta(branch="main", position=3, text="c")]))
            assert len(written) == 1
            assert len(gateway.mailbox) == 3
            positions = [(await gateway.read(client))[0].position for _ in range(3)]
            assert positions == [1, 2, 3]
            gateway.actor.tell(Deliver(socket + 1, [Delta(branch="main", position=3, text="c")]))
            assert not len(gateway.mailbox)  # nobody is there


async def test_a_bug_with_a_delta_is_its_sockets_end_only(serve) -> None:
    async with serve() as gateway:
        gateway.session()
        async with gateway.connect() as client, gateway.connect() as other:
            socket = await gateway.attach(client)
            await gateway.attach(other)

            def fault(messages):
                raise ZeroDivisionError("a bug")

            gateway.actor.hub.connections[socket]._codec.encode = fault
            await asyncio.sleep(0)
            try:
                gateway.actor.tell(Deliver(socket, [Delta(branch="main", position=1, text="a")]))
            finally:
                del gateway.actor.hub.connections[socket]._codec.encode
            await client.wait_closed()
            assert client.close_code == Close.SERVER_BUG
            await other.send('{"type":"ping"}')
            assert isinstance((await gateway.read(other))[0], Pong)
