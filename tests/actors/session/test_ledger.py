"""Op ids: each runs once, and its replies are kept for a while."""

from typing import Any

import pytest

from ramify.actors.session.ledger import Ledger
from ramify.actors.session.meter import SESSION, Holdings
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import Done, Hit, Ok, Usage


def ledger_of(**limits: Any) -> Ledger:
    settings = Limits(**limits)
    return Ledger("c", settings, Holdings(settings).open(""))


def test_ids_increase_within_a_frame_and_seen_ones_pass() -> None:
    ledger = ledger_of()
    ledger.begin(3, 1)
    ledger.admit([1, 3, 4, 7])
    with pytest.raises(BadRequest):
        ledger.admit([5, 5])
    assert ledger.highest == 3


def test_replies_come_again_until_they_are_forgotten() -> None:
    ledger = ledger_of(replies_kept=2)
    ledger.begin(1, 2)
    assert ledger.seen(1) == []
    ledger.record(1, Ok(id=1, branch="a"))
    assert ledger.waits(1)
    ledger.record(1, Ok(id=1, branch="b"))
    assert not ledger.waits(1)
    assert ledger.idle
    assert ledger.seen(1) == [Ok(id=1, branch="a"), Ok(id=1, branch="b")]
    for ident in (2, 3):
        ledger.begin(ident, 1)
        ledger.record(ident, Ok(id=ident))
    with pytest.raises(BadRequest):
        ledger.seen(1)
    assert ledger.seen(4) is None


def test_a_reply_that_is_not_kept_still_ends_its_op() -> None:
    ledger = ledger_of(replies_kept=2)
    ledger.begin(1, 1)
    ledger.record(1, Ok(id=1), keep=False)
    assert ledger.idle
    assert not ledger.replies


def done(ident: int, text: str) -> Done:
    counts = {"prompt": 1, "cached": 0, "computed": 1, "output": 1, "forced": 0}
    usage = Usage(**counts, hit=Hit(), queue_ms=0.0, ttft_ms=None, total_ms=0.0)
    return Done(id=ident, branch="main", position=1, reason="stop", usage=usage, text=text)


def test_replies_are_bounded_in_bytes_and_counted() -> None:
    """The oldest go; the newest stays, however long."""
    holdings = Holdings(Limits())
    ledger = Ledger("c", Limits(replies_bytes=10_000), holdings.open(""))
    for ident in range(10):
        ledger.begin(ident, 1)
        ledger.record(ident, done(ident, "x" * 3000))
    assert list(ledger.replies) == [8, 9]
    assert holdings.held == SESSION + ledger.held
    ledger.begin(10, 1)
    ledger.record(10, done(10, "x" * 50_000))
    assert list(ledger.replies) == [10]
    ledger.forget()
    assert holdings.held == SESSION
