"""Op ids: each runs once, and its replies are kept for a while."""

from typing import Any

import pytest

from ramify.actors.kit.memory import SESSION, Holdings, reply_bytes
from ramify.actors.session.sockets.clients import ReplyLog
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import Done, Hit, Ok, Usage


def ledger_of(**limits: Any) -> ReplyLog:
    settings = Limits(**limits)
    return ReplyLog(settings, Holdings(settings).open(""))


def test_ids_increase_within_a_frame_and_seen_ones_pass() -> None:
    reply_log = ledger_of()
    reply_log.begin(3, 1)
    reply_log.admit([1, 3, 4, 7])
    with pytest.raises(BadRequest):
        reply_log.admit([5, 5])
    assert reply_log.highest == 3


def test_replies_come_again_until_they_are_forgotten() -> None:
    reply_log = ledger_of(replies_kept=2)
    reply_log.begin(1, 2)
    assert reply_log.seen(1) == []
    reply_log.record(1, Ok(id=1, branch="a"))
    assert reply_log.waits(1)
    reply_log.record(1, Ok(id=1, branch="b"))
    assert not reply_log.waits(1)
    assert reply_log.idle
    assert reply_log.seen(1) == [Ok(id=1, branch="a"), Ok(id=1, branch="b")]
    for ident in (2, 3):
        reply_log.begin(ident, 1)
        reply_log.record(ident, Ok(id=ident))
    with pytest.raises(BadRequest):
        reply_log.seen(1)
    assert reply_log.seen(4) is None


def test_a_reply_that_is_not_kept_still_ends_its_op() -> None:
    reply_log = ledger_of(replies_kept=2)
    reply_log.begin(1, 1)
    reply_log.record(1, Ok(id=1), keep=False)
    assert reply_log.idle
    assert not reply_log.replies


def done(ident: int, text: str) -> Done:
    counts = {"prompt": 1, "cached": 0, "computed": 1, "output": 1, "forced": 0}
    usage = Usage(**counts, hit=Hit(), queue_ms=0.0, ttft_ms=None, total_ms=0.0)
    return Done(id=ident, branch="main", position=1, reason="stop", usage=usage, text=text)


def test_replies_are_bounded_in_bytes_and_counted() -> None:
    """The oldest go; the newest stays, however long."""
    holdings = Holdings(Limits())
    reply_log = ReplyLog(Limits(replies_bytes=10_000), holdings.open(""))
    for ident in range(10):
        reply_log.begin(ident, 1)
        reply_log.record(ident, done(ident, "x" * 3000))
    assert list(reply_log.replies) == [8, 9]
    assert holdings.held == SESSION + reply_log.held
    reply_log.begin(10, 1)
    reply_log.record(10, done(10, "x" * 50_000))
    assert list(reply_log.replies) == [10]
    reply_log.forget()
    assert holdings.held == SESSION


def test_a_client_without_ops_has_seen_none() -> None:
    reply_log = ledger_of()
    assert (reply_log.last, reply_log.highest, reply_log.held, reply_log.idle) == (-1, 0, 0, True)
    assert reply_log.seen(0) is None
    reply_log.admit([0, 1])
    reply_log.begin(0, 1)
    assert reply_log.highest == 0
    assert not reply_log.idle


def test_ids_of_one_frame_increase_by_themselves() -> None:
    reply_log = ledger_of()
    for ids in ([2, 2], [3, 2], [1, 3, 2]):
        with pytest.raises(BadRequest) as error:
            reply_log.admit(ids)
        assert error.value.details == {"id": 2, "last": max(ids)}
    assert reply_log.last == -1


def test_an_op_with_several_replies_waits_for_the_last() -> None:
    reply_log = ledger_of()
    reply_log.begin(1, 3)
    for left in (True, True, False):
        reply_log.record(1, Ok(id=1))
        assert reply_log.waits(1) is left
    reply_log.begin(2, 2)
    reply_log.drop(2)
    reply_log.drop(2)
    assert reply_log.idle
    reply_log.record(5, Ok(id=5))  # nobody counts on it
    assert reply_log.idle


def test_as_many_replies_are_kept_as_the_limits_say() -> None:
    size = reply_bytes(Ok(id=1))
    reply_log = ledger_of(replies_kept=3, replies_bytes=2 * size)
    for ident in range(5):
        reply_log.begin(ident, 1)
        reply_log.record(ident, Ok(id=ident))
    assert (list(reply_log.replies), reply_log.held) == ([3, 4], 2 * size)
    reply_log = ledger_of(replies_kept=3)
    for ident in range(5):
        reply_log.begin(ident, 1)
        reply_log.record(ident, Ok(id=ident))
    assert list(reply_log.replies) == [2, 3, 4]
    with pytest.raises(BadRequest) as error:
        reply_log.seen(1)
    assert error.value.details == {"last": 4}
