"""What a session wants of other actors, until its actor takes it."""

from ramify.actors.session.branches.state import EncodeText, Outbox
from ramify.actors.session.branches.tasks import Prepared
from ramify.protocol.messages import CancelRequest, DropBranches, RetainBranches
from ramify.protocol.wire import Pong


def nothing() -> Prepared:
    raise AssertionError("it is not run here")


def test_the_earliest_wake_counts() -> None:
    out = Outbox()
    assert out.wake_at is None
    for when, expected in ((5.0, 5.0), (7.0, 5.0), (3.0, 3.0), (3.0, 3.0)):
        out.wake(when)
        assert out.wake_at == expected


def test_what_is_retained_is_one_message_behind_the_others() -> None:
    out = Outbox()
    out.seal()
    assert out.cache == []
    out.retained = {1: 2.0, 3: 4.0}
    out.cache.append(DropBranches([9]))
    out.seal()
    assert out.cache == [DropBranches([9]), RetainBranches({1: 2.0, 3: 4.0})]
    assert out.retained == {}
    out.seal()
    assert len(out.cache) == 2


def test_without_cache_and_scheduler_only_replies_are_left() -> None:
    out = Outbox()
    out.cache.append(DropBranches([9]))
    out.retained[1] = 2.0
    out.scheduler.append(CancelRequest(1))
    out.encode.append(EncodeText(1, 10, nothing))
    out.notes.append((1, Pong(n=1, load={})))
    out.closes.append((1, 1000, "over"))
    out.wake(3.0)
    out.forget()
    assert (out.cache, out.retained, out.scheduler, out.encode, out.wake_at) == ([], {}, [], [], None)
    assert (out.notes, out.closes) == ([(1, Pong(n=1, load={}))], [(1, 1000, "over")])
