"""Relays: late addresses, full ones, closed ones."""

import asyncio

import pytest

from ramify.actors.kit.mailbox import Mailbox
from ramify.actors.kit.relay import Relay


async def test_messages_wait_for_the_address() -> None:
    delivered: list[None] = []
    relay: Relay[int] = Relay(lambda: delivered.append(None))
    relay.tell(1)
    relay.tell(2)
    assert (len(relay), len(delivered)) == (2, 0)
    mailbox: Mailbox[int] = Mailbox("m", 10)
    relay.connect(mailbox)
    relay.tell(3)
    assert mailbox.drain_nowait() == [1, 2, 3]
    assert (len(relay), len(delivered)) == (0, 3)
    with pytest.raises(ValueError, match="connected already"):
        relay.connect(mailbox)


async def test_full_address_gets_everything_in_order_later() -> None:
    relay: Relay[int] = Relay()
    mailbox: Mailbox[int] = Mailbox("m", 2)
    relay.connect(mailbox)
    for i in range(7):
        relay.tell(i)
    got: list[int] = []
    while len(got) < 7:
        got += await mailbox.drain()
    assert got == list(range(7))
    relay.close()


async def test_closed_address_ends_the_relay() -> None:
    relay: Relay[int] = Relay()
    mailbox: Mailbox[int] = Mailbox("m", 2)
    mailbox.close()
    relay.connect(mailbox)
    relay.tell(1)
    relay.tell(2)
    assert len(relay) == 0


async def test_close_cancels_the_retry() -> None:
    relay: Relay[int] = Relay()
    mailbox: Mailbox[int] = Mailbox("m", 1)
    relay.connect(mailbox)
    relay.tell(1)
    relay.tell(2)
    assert len(relay) == 1
    relay.close()
    relay.close()
    assert mailbox.drain_nowait() == [1]
    await asyncio.sleep(0.005)
    assert len(mailbox) == 0
