"""Op ids: each runs once, and its replies are kept for a while."""

import pytest

from ramify.actors.session.ledger import Ledger
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import Ok


def test_ids_increase_within_a_frame_and_seen_ones_pass() -> None:
    ledger = Ledger("c", keep=4)
    ledger.begin(3, 1)
    ledger.admit([1, 3, 4, 7])
    with pytest.raises(BadRequest):
        ledger.admit([5, 5])
    assert ledger.highest == 3


def test_replies_come_again_until_they_are_forgotten() -> None:
    ledger = Ledger("c", keep=2)
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
    ledger = Ledger("c", keep=2)
    ledger.begin(1, 1)
    ledger.record(1, Ok(id=1), keep=False)
    assert ledger.idle
    assert not ledger.replies
