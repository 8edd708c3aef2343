"""Mailboxes and routers: order, bounds, wake-ups, the end."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.kit.fanout import Router
from ramify.actors.kit.mailbox import LimitedAddress, Mailbox, MailboxClosed, MailboxFull


async def test_drain_gives_everything_that_waits_in_order() -> None:
    mailbox: Mailbox[int] = Mailbox("m", 10)
    for i in range(5):
        mailbox.tell(i)
    assert len(mailbox) == 5
    assert await mailbox.drain() == [0, 1, 2, 3, 4]
    assert len(mailbox) == 0


async def test_reader_wakes_once_for_messages_told_together() -> None:
    mailbox: Mailbox[int] = Mailbox("m", 10)
    reader = asyncio.create_task(mailbox.drain())
    await asyncio.sleep(0)
    mailbox.tell(1)
    mailbox.tell(2)
    assert await reader == [1, 2]


async def test_what_is_left_wakes_nobody_and_comes_with_the_next_message() -> None:
    mailbox: Mailbox[int] = Mailbox("m", 2)
    router: Router[int] = Router("r")
    router.add(1, mailbox)
    reader = asyncio.create_task(mailbox.drain())
    await asyncio.sleep(0)
    assert router.leave(1, 1)
    assert not router.leave(2, 1)
    await asyncio.sleep(0)
    assert not reader.done()
    mailbox.tell(2)
    with pytest.raises(MailboxFull):
        mailbox.leave(3)
    assert await reader == [1, 2]
    mailbox.close()
    assert not router.leave(1, 1)


async def test_full_mailbox_refuses_and_recovers() -> None:
    mailbox: Mailbox[int] = Mailbox("inbox", 2)
    mailbox.tell(1)
    mailbox.tell(2)
    with pytest.raises(MailboxFull, match="inbox: 2 messages wait"):
        mailbox.tell(3)
    assert mailbox.drain_nowait() == [1, 2]
    mailbox.tell(3)
    assert mailbox.drain_nowait() == [3]
    assert mailbox.drain_nowait() == []


async def test_close_lets_the_reader_finish() -> None:
    mailbox: Mailbox[int] = Mailbox("m", 2)
    mailbox.tell(1)
    mailbox.close()
    with pytest.raises(MailboxClosed):
        mailbox.tell(2)
    assert await mailbox.drain() == [1]
    with pytest.raises(MailboxClosed):
        await mailbox.drain()


async def test_close_wakes_a_waiting_reader() -> None:
    mailbox: Mailbox[int] = Mailbox("m", 2)
    reader = asyncio.create_task(mailbox.drain())
    await asyncio.sleep(0)
    mailbox.close()
    with pytest.raises(MailboxClosed):
        await reader


async def test_cancelled_reader_loses_nothing() -> None:
    mailbox: Mailbox[int] = Mailbox("m", 2)
    reader = asyncio.create_task(mailbox.drain())
    await asyncio.sleep(0)
    mailbox.tell(1)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    mailbox.tell(2)
    assert await mailbox.drain() == [1, 2]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.one_of(st.integers(), st.none()), max_size=60), st.integers(1, 8))
def test_mailbox_is_a_bounded_fifo(operations: list[int | None], capacity: int) -> None:
    """A number is told, None drains; compared with a list."""
    mailbox: Mailbox[int] = Mailbox("m", capacity)
    model: list[int] = []
    for operation in operations:
        if operation is None:
            assert mailbox.drain_nowait() == model
            model = []
        elif len(model) == capacity:
            with pytest.raises(MailboxFull):
                mailbox.tell(operation)
        else:
            mailbox.tell(operation)
            model.append(operation)


def test_router_finds_forgets_and_refuses_doubles() -> None:
    router: Router[str] = Router("sessions")
    mailbox: Mailbox[str] = Mailbox("m", 2)
    router.add(7, mailbox)
    assert 7 in router
    assert len(router) == 1
    assert router.tell(7, "hello")
    assert not router.tell(8, "nobody")
    with pytest.raises(ValueError, match="7 is registered"):
        router.add(7, mailbox)
    router.remove(7)
    router.remove(7)
    assert not router.tell(7, "gone")
    assert mailbox.drain_nowait() == ["hello"]


def test_router_drops_what_a_stopped_actor_is_told_but_not_what_a_full_one_is() -> None:
    router: Router[str] = Router("sessions")
    mailbox: Mailbox[str] = Mailbox("m", 1)
    router.add(1, mailbox)
    assert router.tell(1, "first")
    with pytest.raises(MailboxFull):
        router.tell(1, "second")
    mailbox.close()
    assert not router.tell(1, "third")


def test_an_entrance_is_full_before_the_mailbox_behind_it() -> None:
    mailbox: Mailbox[str] = Mailbox("m", 3)
    entrance: LimitedAddress[str] = LimitedAddress(mailbox, 2)
    entrance.tell("a")
    mailbox.tell("b")
    with pytest.raises(MailboxFull):
        entrance.tell("c")
    mailbox.tell("own")
    assert mailbox.drain_nowait() == ["a", "b", "own"]
    entrance.tell("c")
    assert mailbox.drain_nowait() == ["c"]


def test_all_are_told_as_far_as_there_is_room() -> None:
    router: Router[str] = Router("sessions")
    mailbox: Mailbox[str] = Mailbox("m", 2)
    router.add(1, mailbox)
    messages = ["a", "b", "c"]
    with pytest.raises(MailboxFull):
        router.tell_all(1, messages)
    assert messages == ["c"]
    assert mailbox.drain_nowait() == ["a", "b"]
    router.tell_all(1, messages)
    assert (messages, mailbox.drain_nowait()) == ([], ["c"])
    router.tell_all(2, ["nobody"])
    mailbox.close()
    router.tell_all(1, ["gone"])
    assert not router.leave(1, "gone")
    assert not router.leave(2, "nobody")


async def test_a_mailbox_is_awaited_while_its_reader_waits_for_nothing_that_is_there() -> None:
    mailbox: Mailbox[str] = Mailbox("m", 2)
    assert not mailbox.awaited
    reader = asyncio.ensure_future(mailbox.drain())
    await asyncio.sleep(0)
    assert mailbox.awaited
    mailbox.leave("later")
    assert not mailbox.awaited  # else a message that is handled at once would overtake it
    mailbox.tell("now")
    assert not mailbox.awaited
    assert await reader == ["later", "now"]
    assert not mailbox.awaited
    reader = asyncio.ensure_future(mailbox.drain())
    await asyncio.sleep(0)
    reader.cancel()
    assert not mailbox.awaited
