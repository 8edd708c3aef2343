"""The saver: what sockets may hear, and that one that has gone holds up nobody."""

from typing import Any

from ramify.actors.kit.mailbox import Mailbox
from ramify.actors.session.saver import Saver
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.messages import Save, StoreMessage
from tests.actors.session.alone import Alone


class NoTimers:
    """A clock whose timers never come."""

    def now(self) -> float:
        return 10.0

    def call_at(self, when: float, call: Any) -> Any:
        return self

    def cancel(self) -> None:
        pass


def saving(tokenizer: Tokenizer) -> tuple[Alone, Saver, Mailbox[StoreMessage]]:
    alone = Alone(tokenizer)
    alone.core.record(model="m", priority=0, created=0.0)
    store: Mailbox[StoreMessage] = Mailbox("store", 10)
    return alone, Saver(alone.core, store, NoTimers(), wall=lambda: 100.0), store


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


def test_a_socket_that_went_holds_up_nobody(tokenizer: Tokenizer) -> None:
    """It was detached in the moment in which it might have heard: who comes back hears the session."""
    alone, saver, store = saving(tokenizer)
    saver.turn()
    saver.saved(ticket(store))
    alone.detach(1)
    alone.attach()
    saver.turn()
    assert not saver.holds
