"""The recorder: much text is encoded in parts, and a save is of one moment all the same."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from ramify.actors.kit.mailbox import Mailbox
from ramify.actors.kit.turns import TURN, Work
from ramify.actors.session.branches.segments import Tail
from ramify.actors.session.durable import recorder as recorder_file
from ramify.actors.session.durable.recorder import AHEAD
from ramify.actors.session.saver import Saver
from ramify.protocol.messages import Save, StoreMessage
from ramify.protocol.saved import Changes
from ramify.protocol.wire import ChatMessage, Drop, Fork
from tests.actors.session.alone import Alone
from tests.manual_clock import ManualClock

TEXT = "x" * 100_000
TOKENS = array("i", [5]) * 10_000
NAMES = [f"b{i}" for i in range(30)]


class Saving:
    """A session with text that its store does not have, and what each of its turns encodes."""

    def __init__(self, alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alone, self.core = alone, alone.core
        self.core.record(model="m", priority=0, created=0.0)
        self.store: Mailbox[StoreMessage] = Mailbox("store", 100)
        self.clock = ManualClock()
        self.saver = Saver(self.core, self.store, self.clock, wall=lambda: 100.0)
        self.changes: list[Changes] = []
        self.items: dict[str, bytes] = {}
        self._bytes = 0
        encode = recorder_file._encode

        def counted(value: Any) -> bytes:
            body = encode(value)
            self._bytes += len(body)
            return body

        monkeypatch.setattr(recorder_file, "_encode", counted)
        alone.send(Fork(id=1, as_=NAMES))
        self.core.work = Work(TURN)
        self.save()

    def append(self, name: str) -> None:
        """As if an op had done it."""
        self.core.state.changed = True
        self.core.state.extend(self.core.state.branches[name], TOKENS, TEXT, tail=Tail.RAW)

    def turns(self) -> list[int]:
        """Let the session do all, and save. Returns the bytes that each turn encoded."""
        found: list[int] = []
        while True:
            if self.core.unfinished:
                self.core.go_on(self.alone.now)
            if not self.core.inside:
                self.saver.turn()
            found.append(self._bytes)
            self._bytes = 0
            if not self.core.unfinished:
                return found

    def save(self) -> list[int]:
        """Let it save all that there is, as often as it likes. Returns what `turns` does."""
        found: list[int] = []
        for _ in range(4):
            self.clock.advance(10.0)
            found += self.turns()
            for each in self.store.drain_nowait():
                assert isinstance(each, Save)
                self.changes.append(each.changes)
                if each.changes.whole:
                    self.items.clear()
                for key in each.changes.drop:
                    del self.items[key]  # nothing is dropped that the store never had
                self.items |= each.changes.put
                self.saver.saved(each.ticket)
                assert each.changes.size == sum(map(len, self.items.values()))
        return found

    @property
    def texts(self) -> int:
        """Segments that the store has."""
        return sum(key[0] == "s" for key in self.items)


@pytest.fixture
def saving(alone: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Saving:
    return Saving(alone(context=1 << 20), monkeypatch)


def test_much_text_is_encoded_in_parts_and_saved_at_once(saving: Saving) -> None:
    """300 appends of 1 MB together held the loop for 84 ms."""
    for name in NAMES:
        saving.append(name)
    count = len(saving.changes)
    turns = saving.save()
    assert sum(turns) > len(NAMES) * len(TEXT)
    assert max(turns) < 2 * AHEAD
    assert saving.texts == len(NAMES)
    put = [sum(key[0] == "s" for key in changes.put) for changes in saving.changes[count:]]
    assert [each for each in put if each] == [len(NAMES)]


def test_many_messages_are_much_too(saving: Saving) -> None:
    """The 16,000 of one append were encoded in the turn in which they were appended."""
    messages = [ChatMessage(role="user", content="x")] * 16_000
    main = saving.core.state.branches["main"]
    saving.core.state.extend(main, TOKENS, "x", tail=Tail.CLOSED, messages=messages)
    saving.core.state.changed = True
    assert saving.core.inside
    saving.save()
    assert saving.texts == 1


def test_what_the_store_has_lost_is_encoded_in_parts(saving: Saving) -> None:
    for name in NAMES:
        saving.append(name)
    saving.save()
    count = len(saving.changes)
    saving.saver.unsaved(saving.changes[-1].count)
    turns = saving.save()
    assert sum(turns) > len(NAMES) * len(TEXT)
    assert max(turns) < 2 * AHEAD
    assert [each.whole for each in saving.changes[count:]] == [True]
    assert saving.texts == len(NAMES)


def test_text_that_goes_before_its_save_never_comes_to_the_store(saving: Saving) -> None:
    for name in NAMES:
        saving.append(name)
    while saving.core.unfinished:  # encoded, and not saved
        saving.core.go_on(saving.alone.now)
    saving.core.state.branches["b1"].persist = "none"
    saving.alone.send(Drop(id=2, branch=NAMES[10:]))
    count = len(saving.changes)
    saving.save()
    assert saving.texts == 9
    assert all(sum(key[0] == "s" for key in each.put) in (0, 9) for each in saving.changes[count:])
    saving.core.state.branches["b1"].persist = None
    saving.core.state.changed = True
    saving.save()
    assert saving.texts == 10


def test_branches_that_share_text_keep_it_where_one_of_them_is_not_saved(saving: Saving) -> None:
    for _ in range(12):
        saving.append("b1")
    while saving.core.unfinished:
        saving.core.go_on(saving.alone.now)
    saving.alone.send(Fork(id=2, branch="b1", as_=["copy"]))
    saving.append("copy")
    saving.core.state.branches["copy"].persist = "none"
    saving.save()
    assert saving.texts == 12
