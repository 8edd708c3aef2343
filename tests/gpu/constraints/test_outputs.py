"""Outputs whose matchers take long: who waits, who does not, and what is known when."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from ramify.actors.grammar.automaton import Automaton as Machine
from ramify.gpu.constraints.matcher import AutomatonConstraint
from ramify.gpu.constraints.outputs import FEW, LOST, NOTHING, Legal, Output
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.errors import ConstraintError
from tests.gpu.constraints.machines import machine_of

STOP = 256
WORDS = Vocabulary([bytes([i]) for i in range(256)] + [b""], [STOP], lambda text: list(text.encode()))


class Gate:
    """A constraint whose matchers wait for `open` wherever that may take long."""

    def __init__(self, pattern: str, quick: bool) -> None:
        made = Machine.from_regex(pattern)
        self.inner = AutomatonConstraint(machine_of(WORDS, made))
        self.quick = quick
        self.open = Event()
        self.taken: list[int] = []

    def matcher(self) -> "GateMatcher":
        return GateMatcher(self, self.inner.matcher())

    def close(self) -> None: ...


class GateMatcher:
    def __init__(self, gate: Gate, matcher: Any) -> None:
        self._gate, self._matcher, self.quick = gate, matcher, gate.quick

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def knows(self) -> bool:
        return False

    def advance(self, token: int) -> bool:
        self._gate.taken.append(token)
        if token == ord("!"):
            raise ConstraintError("past its limits")
        return bool(self._matcher.advance(token))

    def plan(self) -> Any:
        self._gate.open.wait(5.0)
        return self._matcher.plan()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def loaded(constraint: Any) -> "Future[Any]":
    future = Future[Any]()
    future.set_result(constraint)
    return future


def now(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def test_a_quick_one_is_never_busy(threads: ThreadPoolExecutor) -> None:
    made = Machine.from_regex("abc[xy]")
    rule = AutomatonConstraint(machine_of(WORDS, made))
    output = Output(loaded(rule), b"a", lambda: threads)
    assert output.ready
    assert output.look().tokens == tuple(b"bc")
    assert [legal.only for legal in output.look().legal] == [*b"bc", -1]
    assert output.along(list(b"bcx")) == [*output.look().legal, Legal(STOP, None)]
    assert output.along(list(b"zz")) == [Legal(ord("b"), None)]  # not legal: nothing is behind it
    output.advance(list(b"bcx"))
    assert output.look().legal == (Legal(STOP, None),)


@pytest.mark.parametrize("quick", [True, False])
def test_what_takes_long_is_done_elsewhere(threads: ThreadPoolExecutor, quick: bool) -> None:
    gate = Gate("abc[xy]", quick)
    output = Output(loaded(gate), [], lambda: threads)
    assert not output.ready
    assert not output.late  # nobody has waited for it
    assert not output.wait(now(0.001))
    output.missed()
    assert output.late
    gate.open.set()
    assert output.wait(now())
    assert not output.late
    assert output.look().tokens == tuple(b"abc")
    gate.open.clear()
    output.advance(list(b"abc"))
    assert (output.ready, output.late) == (False, False)
    gate.open.set()
    assert output.wait(now())
    assert gate.taken.count(ord("c")) == 2  # looking ahead, and then taken
    (legal,) = output.look().legal
    assert [legal.has(token) for token in b"xyz"] == [True, True, False]


def test_one_that_is_loaded_later_is_late_at_once(threads: ThreadPoolExecutor) -> None:
    coming, gate = Future[Any](), Gate("ab*", True)
    gate.open.set()
    output = Output(coming, list(b"ab"), lambda: threads)
    assert output.late
    assert output.matcher is None
    coming.set_result(gate)
    assert output.wait(now())
    assert [*map(output.look().legal[0].has, [*b"ab", STOP])] == [False, True, True]


def test_nothing_is_made_ahead_where_a_device_follows(threads: ThreadPoolExecutor) -> None:
    """Its masks would hold up the next constraint's loading. Nor where masks are made quickly."""
    made = Machine.from_regex("ab[xy]{600}")
    for elsewhere, quick in ((True, False), (False, True), (False, False)):
        machine = machine_of(WORDS, made)
        machine.elsewhere, machine._quick = elsewhere, quick
        coming = Future[Any]()
        output = Output(coming, list(b"ab"), lambda: threads)
        coming.set_result(AutomatonConstraint(machine))
        assert output.wait(now())
        assert (output._ahead is None) == (elsewhere or quick)
        assert len(output.look().legal) == 1  # who asks gets it


def test_a_long_replay_is_done_elsewhere_and_ends_with_the_row(threads: ThreadPoolExecutor) -> None:
    gate = Gate("a*", True)
    gate.open.set()
    output = Output(loaded(gate), b"a" * (FEW + 1), lambda: threads)
    assert output.wait(now())
    assert len(gate.taken) == FEW + 1
    held = Event()
    threads.submit(held.wait)
    output = Output(loaded(gate), b"a" * 1000, lambda: threads)
    output.close()
    held.set()
    assert output.wait(now())
    assert len(gate.taken) == FEW + 1


@pytest.mark.parametrize("quick", [True, False])
def test_what_cannot_be_followed_allows_nothing(
    threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture, quick: bool
) -> None:
    gate = Gate("[a!]*", quick)
    gate.open.set()
    output = Output(loaded(gate), [], lambda: threads)
    assert output.wait(now())
    assert output.matcher is not None
    output.advance(list(b"a!"))
    assert output.wait(now())
    assert output.matcher is None
    assert output.look().legal == (NOTHING,)
    assert output.along([1, 2]) == [NOTHING]
    assert not NOTHING.has(0)
    assert "past its limits" in caplog.text
    assert output.why == "past its limits"
    output = Output(loaded(ConstraintError("no room")), [], lambda: threads)
    assert output.look().legal == (NOTHING,)
    assert output.why == "no room"
    output.advance([1])
    assert output.ready


class Broken:
    """A constraint that makes no matchers: a bug."""

    def matcher(self) -> Any:
        raise RuntimeError("no matcher")


@pytest.mark.parametrize("fault", ["of the load", "of the matcher"])
def test_a_bug_ahead_of_the_first_token_leaves_no_row_waiting(
    threads: ThreadPoolExecutor, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    future = Future[Any]()
    output = Output(future, [], lambda: threads)
    if fault == "of the load":
        future.set_exception(RuntimeError("it was not loaded"))
    else:
        future.set_result(Broken())
    assert output.wait(now())
    assert output.look().legal == (NOTHING,)
    assert output.why == LOST
    assert "cannot be followed" in caplog.text


def test_free_text_is_not_all_tokens(threads: ThreadPoolExecutor) -> None:
    made = Machine.from_regex("(?s:.*)")
    rule = AutomatonConstraint(machine_of(WORDS, made))
    output = Output(loaded(rule), [], lambda: threads)
    assert not output.look().legal[0].free  # bytes that are no text
    assert Legal(-1, WORDS.everything, True).has(0)
