"""The saver: what sockets may hear, and that one that has gone holds up nobody."""

from ramify.actors.kit.clock import Clock
from ramify.actors.kit.mailbox import Mailbox
from ramify.actors.session.saver import LAZY_SECONDS, NEXT_SECONDS, Saver
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.messages import Forget, Progress, Save, StoreMessage, Tokens
from ramify.protocol.plan import pack
from ramify.protocol.wire import Append, Generate, Set
from tests.actors.session.alone import Alone
from tests.manual_clock import ManualClock


def saving(
    tokenizer: Tokenizer, clock: Clock | None = None
) -> tuple[Alone, Saver, Mailbox[StoreMessage]]:
    alone = Alone(tokenizer)
    alone.core.record(model="m", priority=0, created=0.0)
    store: Mailbox[StoreMessage] = Mailbox("store", 10)
    return alone, Saver(alone.core, store, clock or ManualClock(), wall=lambda: 100.0), store


def ticket(store: Mailbox[StoreMessage]) -> int:
    (save,) = store.drain_nowait()
    assert isinstance(save, Save)
    return save.ticket


def test_nobody_hears_of_a_session_before_the_store_has_it(tokenizer: Tokenizer) -> None:
    alone, saver, store = saving(tokenizer)
    count = len(alone.core.publisher.subscribers[1].out)
    assert count
    saver.turn()
    assert saver.holds
    assert saver.ready(1) == 0
    saver.saved(ticket(store))
    assert saver.ready(1) == count
    saver.sent(1, count)
    assert not saver.holds


def test_what_changed_is_saved_when_its_time_has_come(tokenizer: Tokenizer) -> None:
    clock = ManualClock(10.0)
    alone, saver, store = saving(tokenizer, clock)
    saver.turn()
    saver.saved(ticket(store))
    alone.core.state.out.wake_at = None
    alone.core.state.meta, alone.core.state.changed = {"a": 1}, True
    saver.turn()
    assert not store.drain_nowait()
    assert alone.core.state.out.wake_at == 10.0 + LAZY_SECONDS
    clock.advance(LAZY_SECONDS)
    saver.turn()
    assert ticket(store)


def test_output_that_grows_waits_for_its_time(tokenizer: Tokenizer) -> None:
    clock = ManualClock(10.0)
    alone, saver, store = saving(tokenizer, clock)
    heard(alone, saver, store)
    asked = alone.send(Append(id=1, text="hello"), Generate(id=2, ignore_eos=True))
    heard(alone, saver, store)
    for _ in range(3):
        clock.advance(LAZY_SECONDS / 4)
        alone.said(asked[-1].request, 65)
        alone.core.state.out.wake_at = None
        saver.turn()
        assert not store.drain_nowait()
        assert not saver.holds
        assert alone.core.state.out.wake_at
    clock.advance(LAZY_SECONDS)
    saver.turn()
    assert ticket(store)


def test_an_op_that_is_done_while_a_save_is_under_way_is_saved_next(tokenizer: Tokenizer) -> None:
    """The answer to that save wakes nobody: the session comes back by itself."""
    clock = ManualClock(10.0)
    alone, saver, store = saving(tokenizer, clock)
    heard(alone, saver, store)
    alone.send(Set(id=1, meta={"a": 1}))
    saver.turn()
    first = ticket(store)
    alone.core.subscribers[1].out.clear()
    alone.core.state.out.wake_at = None
    alone.send(Set(id=2, meta={"a": 2}))
    saver.turn()
    assert not store.drain_nowait()
    assert alone.core.state.out.wake_at == 10.0 + NEXT_SECONDS
    alone.core.subscribers[1].out.clear()
    clock.advance(NEXT_SECONDS)
    saver.saved(first)
    saver.turn()
    assert ticket(store) == first + 1


def test_a_store_that_is_slow_is_asked_for_again(tokenizer: Tokenizer) -> None:
    clock = ManualClock(10.0)
    alone, saver, store = saving(tokenizer, clock)
    heard(alone, saver, store)
    alone.send(Set(id=1, meta={"a": 1}))
    saver.turn()
    assert ticket(store)
    alone.core.subscribers[1].out.clear()
    clock.advance(LAZY_SECONDS)
    alone.core.state.out.wake_at = None
    saver.turn()
    assert not store.drain_nowait()
    assert alone.core.state.out.wake_at == clock.now() + LAZY_SECONDS


def test_output_alone_is_saved_alone(tokenizer: Tokenizer) -> None:
    """Nothing else of the session is looked at, nor written again."""
    clock = ManualClock(10.0)
    alone, saver, store = saving(tokenizer, clock)
    heard(alone, saver, store)
    request = alone.send(Append(id=1, text="hello"), Generate(id=2, ignore_eos=True))[-1].request
    heard(alone, saver, store)
    found = []
    for _ in range(3):
        clock.advance(LAZY_SECONDS)
        alone.said(request, 65)
        saver.turn()
        (save,) = store.drain_nowait()
        assert isinstance(save, Save)
        saver.saved(save.ticket)
        found.append(set(save.changes.put))
    assert found[0] > {"head"}  # the first token's time is told there
    assert found[1] == found[2] == found[0] - {"head"}
    clock.advance(LAZY_SECONDS)
    progress = Progress(request, pack([65, 65]), [], accepted=1)
    alone.core.tokens(Tokens([progress], []), clock.now())
    saver.turn()
    (save,) = store.drain_nowait()
    assert isinstance(save, Save)
    assert "head" in save.changes.put  # drafts are counted there


def test_a_server_that_stops_tells_nothing_that_is_not_saved(tokenizer: Tokenizer) -> None:
    """The next one has the op, and answers it."""
    alone, saver, store = saving(tokenizer)
    saver.turn()
    assert saver.leave()
    alone.core.ended = "stopped"
    assert saver.holds
    assert saver.ready(1) == 0
    saver.end()
    assert [save.changes.live for save in store.drain_nowait()] == [True, False]


def test_a_socket_that_went_holds_up_nobody(tokenizer: Tokenizer) -> None:
    """It was detached in the moment in which it might have heard: who comes back hears the session."""
    alone, saver, store = saving(tokenizer)
    saver.turn()
    saver.saved(ticket(store))
    alone.detach(1)
    alone.attach()
    saver.turn()
    assert not saver.holds


def test_an_open_that_would_wait_for_a_broken_store_is_refused(tokenizer: Tokenizer) -> None:
    """A new session ends with it: nobody has heard of it."""
    alone, saver, store = saving(tokenizer)
    saver.turn()
    (save,) = store.drain_nowait()
    assert isinstance(save, Save)
    first = save.ticket
    saver.failed(first + 1)  # of another save
    saver.turn()
    assert not alone.core.state.out.refused
    saver.failed(first)
    saver.turn()
    ((socket, error),) = alone.core.state.out.refused
    assert (socket, error.code) == (1, "overloaded")
    assert (error.retry_ms or 0) > 0
    assert alone.core.ended == "unsaved"
    assert not alone.core.sockets
    saver.end()
    assert store.drain_nowait() == [Forget(alone.core.identity.session, save.changes.fence)]


def test_a_session_that_was_heard_of_goes_on_while_an_open_is_refused(tokenizer: Tokenizer) -> None:
    alone, saver, store = saving(tokenizer)
    saver.turn()
    saver.saved(ticket(store))
    saver.sent(1, len(alone.core.publisher.subscribers[1].out))
    alone.core.publisher.subscribers[1].out.clear()
    alone.core.state.persist = "sync"
    alone.send(Set(id=1, meta={"a": 1}))
    saver.turn()
    pending = ticket(store)
    saver.failed(pending)
    alone.attach("other")
    saver.turn()
    assert [socket for socket, _ in alone.core.state.out.refused] == [2]
    assert alone.core.sockets == [1]
    assert alone.core.ended is None
    saver.saved(pending)
    assert saver.ready(1) == 1


def heard(alone: Alone, saver: Saver, store: Mailbox[StoreMessage]) -> None:
    """The session is saved, and its sockets have heard all that was said."""
    saver.turn()
    for save in store.drain_nowait():
        assert isinstance(save, Save)
        saver.saved(save.ticket)
    for subscriber in alone.core.publisher.subscribers.values():
        saver.sent(subscriber.socket, len(subscriber.out))
        subscriber.out.clear()
    assert not saver.holds


def test_a_sync_reply_waits_for_a_lazy_save_that_has_its_change(tokenizer: Tokenizer) -> None:
    """It was made while another sync save was under way."""
    alone, saver, store = saving(tokenizer)
    alone.core.state.persist = "sync"
    heard(alone, saver, store)
    alone.send(Set(id=1, meta={"a": 1}))
    saver.turn()
    first = ticket(store)
    alone.send(Set(id=2, meta={"a": 2}))
    saver.turn()
    lazy = ticket(store)  # it has what op 2 changed
    saver.saved(first)
    assert saver.ready(1) == 1
    saver.turn()
    last = ticket(store)
    saver.saved(lazy)
    assert saver.ready(1) == 1
    saver.saved(last)
    assert saver.ready(1) == 2


def test_a_sync_session_shows_nobody_what_is_not_saved(tokenizer: Tokenizer) -> None:
    """Its ops ran while nobody was here: the answer to `open` waits for them."""
    alone, saver, store = saving(tokenizer)
    alone.core.state.persist = "sync"
    heard(alone, saver, store)
    alone.send(Append(id=1, text="hello"))
    alone.detach(1)
    saver.turn()
    lazy = [save.ticket for save in store.drain_nowait() if isinstance(save, Save)]
    socket = alone.attach()
    saver.turn()
    (save,) = store.drain_nowait()
    assert isinstance(save, Save)
    assert save.changes.sync
    for each in lazy:
        saver.saved(each)
    assert saver.holds
    assert not saver.ready(socket)
    saver.saved(save.ticket)
    assert saver.ready(socket)


def test_what_the_store_has_lost_is_saved_whole(tokenizer: Tokenizer) -> None:
    """What waited for saves that are lost waits for that one; late answers change nothing."""
    clock = ManualClock(10.0)
    alone, saver, store = saving(tokenizer, clock)
    alone.core.state.persist = "sync"
    heard(alone, saver, store)
    alone.send(Append(id=1, text="one"), Append(id=2, text="two"))
    heard(alone, saver, store)
    alone.send(Set(id=3, meta={"a": 1}))
    saver.turn()
    saves = [save for save in store.drain_nowait() if isinstance(save, Save)]
    assert saver.holds
    saver.unsaved(saves[0].ticket)
    saver.turn()
    (whole,) = store.drain_nowait()
    assert isinstance(whole, Save)
    assert (whole.changes.whole, whole.changes.sync, whole.awaited) == (True, True, True)
    assert whole.changes.count == saves[-1].changes.count + 1
    assert "head" in whole.changes.put
    assert sum(key[0] == "s" for key in whole.changes.put) == 2
    assert whole.changes.size == sum(map(len, whole.changes.put.values()))
    saver.unsaved(saves[-1].ticket)  # told before the whole was
    saver.turn()
    assert not store.drain_nowait()
    saver.saved(whole.ticket)
    assert saver.ready(1)


def test_a_session_that_is_over_is_saved_whole_as_well(tokenizer: Tokenizer) -> None:
    """It hears nothing more, so its last save brings along how to do that."""
    alone, saver, store = saving(tokenizer)
    heard(alone, saver, store)
    alone.send(Append(id=1, text="one"))
    heard(alone, saver, store)
    saver.end()
    (last,) = store.drain_nowait()
    assert isinstance(last, Save)
    assert (last.session, last.changes.whole) == (0, False)
    assert last.again is not None
    again = last.again()
    assert again is not None
    assert (again.session, again.changes.whole, again.changes.live) == (0, True, False)
    assert {key[0] for key in again.changes.put} == {"h", "r", "s"}


def test_nothing_waits_for_a_session_that_is_not_to_be_saved_any_more(tokenizer: Tokenizer) -> None:
    """It was told so while the store was away, which has lost it since."""
    alone, saver, store = saving(tokenizer)
    alone.core.state.persist = "sync"
    heard(alone, saver, store)
    alone.send(Set(id=1, meta={"a": 1}))
    saver.turn()
    lost = ticket(store)
    assert saver.holds
    alone.core.state.persist = "none"
    saver.unsaved(lost)
    saver.turn()
    (forgotten,) = store.drain_nowait()
    assert isinstance(forgotten, Forget)
    assert saver.ready(1)
