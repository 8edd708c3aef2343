"""Long prompts in a pool that is too small: who is warm goes first, who is cold waits for others."""

import pytest

from ramify.actors.scheduler.admission import MARGIN, MOST_COLD, PROBES, SPACED, WARM
from ramify.actors.scheduler.request import RequestRun, RequestState
from ramify.protocol.messages import Denied
from tests.actors.scheduler.test_gate import Gate

LONG = 40  # tokens; a step takes 20


@pytest.fixture
def gate():
    """Half of the pool of 200 slots is held, none is free."""
    return Gate(available=50, step_tokens=20)


def grant(gate, request, cached=0, loaded=0):
    run = RequestRun(request, 1, cached, b"", b"", b"", True, 2, 0, loaded=loaded)
    gate.gate.granted(request, run)
    return run


def test_who_may_be_warm_is_asked_for_first_and_for_little(gate):
    waiting = gate.ask()
    request = gate.ask(prompt=LONG, begun=False)
    assert gate.gate.pick(1.0) == [request, waiting]
    assert (request.most, waiting.most) == (LONG // WARM + MARGIN + 4, 0)


def test_where_nobody_waits_nobody_is_asked_twice(gate):
    gate.settlements.free = 50
    request = gate.ask(prompt=LONG)
    assert gate.gate.pick() == [request]
    assert request.most == 0


def test_who_is_cold_waits_while_long_prompts_are_computed(gate):
    gate.planner.long_prompts = MOST_COLD
    request = gate.ask(prompt=LONG)
    assert gate.gate.pick() == [request]
    gate.gate.denied(request, Denied(request.submit.request, "memory", resident=2), None)
    assert (request.most, request.in_memory_queue) == (0, True)
    gate.planner.step += 1000
    assert gate.gate.pick() == []
    gate.planner.long_prompts -= 1
    assert gate.gate.pick() == [request]
    assert request.most == 0


def test_who_has_most_of_its_prompt_waits_for_nobody(gate):
    gate.planner.long_prompts = MOST_COLD
    request = gate.ask(prompt=LONG)
    request.resident = LONG - LONG // WARM
    assert not gate.gate.is_cold(request)
    request.resident -= 1
    assert not gate.gate.is_cold(request)  # no more than a step
    request.prompt *= 3
    assert gate.gate.is_cold(request)


def test_who_takes_nothing_from_others_waits_for_nobody(gate):
    gate.planner.long_prompts = MOST_COLD
    gate.settlements.free = LONG // 2
    request = gate.ask(prompt=LONG)
    assert not gate.gate.is_cold(request)
    gate.settlements.free -= 1
    assert gate.gate.is_cold(request)
    gate.planner.running = 0
    assert not gate.gate.is_cold(request)


def test_the_next_comes_when_the_last_is_paid_for_whatever_is_held(gate):
    gate.settlements.available = 49
    first, second = gate.ask(prompt=LONG), gate.ask(prompt=LONG)
    gate.gate.now = 100.0
    assert not gate.gate.is_cold(first)
    grant(gate, first)
    until = 100.0 + SPACED * LONG / 10.0
    gate.gate.now = until - 0.1
    assert gate.gate.is_cold(second)
    gate.settlements.available = 50  # half of the pool
    assert not gate.gate.is_cold(second)
    gate.settlements.available = 49
    gate.gate.now = until
    assert not gate.gate.is_cold(second)


def test_what_would_be_loaded_makes_a_prompt_warm(gate):
    gate.planner.long_prompts = MOST_COLD
    request = gate.ask(prompt=3 * LONG)
    assert gate.gate.is_cold(request)
    denied = Denied(request.submit.request, "memory", stored=3 * LONG - 20)
    gate.gate.denied(request, denied, None)
    assert not gate.gate.is_cold(request)


def returned(gate, times, loaded=LONG - 1):
    """Long prompts that had nothing on the device, and so many tokens in host memory."""
    for _ in range(times):
        grant(gate, gate.ask(prompt=LONG), cached=loaded, loaded=loaded)


def test_where_host_memory_has_what_goes_the_next_comes_sooner(gate):
    """A copy takes an eighth of computing it, and all that was lacking came from there."""
    returned(gate, 200)
    gate.settlements.available = 10
    gate.gate.now = 100.0
    first, second = gate.ask(prompt=LONG), gate.ask(prompt=LONG)
    grant(gate, first)
    gate.gate.now = 100.0 + SPACED * LONG / 10.0 / 4
    assert not gate.gate.is_cold(second)


def test_where_host_memory_has_what_goes_nobody_waits_for_room(gate):
    assert not gate.gate.returns.cheap
    returned(gate, 200, loaded=LONG // 4)
    assert not gate.gate.returns.cheap
    returned(gate, 200)
    assert gate.gate.returns.cheap


def test_who_was_warm_puts_nobody_off(gate):
    gate.settlements.available = 10
    first, second = gate.ask(prompt=LONG), gate.ask(prompt=LONG)
    grant(gate, first, cached=LONG - 1)
    assert not gate.gate.is_cold(second)


def test_half_of_the_rows_are_for_those_who_have_waited(gate):
    gate.planner.free_rows = 3
    waiting = [gate.ask() for _ in range(3)]
    one, other = gate.ask(prompt=LONG), gate.ask(prompt=LONG)
    assert gate.gate.pick() == [one, *waiting[:2]]
    assert (one.most > 0, other.most, other.ticket > 0) == (True, 0, True)


def test_who_has_ended_is_not_asked_for(gate):
    gate.ask()
    requests = [gate.ask(prompt=LONG) for _ in range(PROBES + 2)]
    gate.planner.free_rows = 100
    for each in requests[:-2]:
        each.state = RequestState.ENDED
    assert [each for each in gate.gate.pick() if each.most] == requests[-2:]


def test_so_many_are_asked_for_in_a_turn(gate):
    gate.ask()
    requests = [gate.ask(prompt=LONG) for _ in range(PROBES + 2)]
    gate.planner.free_rows = 100
    assert [each for each in gate.gate.pick() if each.most] == requests[:PROBES]
    assert [each for each in gate.gate.pick() if each.most] == requests[PROBES:]


def test_a_priority_above_all_that_runs_waits_for_no_cold_prompt(gate):
    gate.planner.long_prompts = MOST_COLD
    running = gate.ask(priority=1)
    grant(gate, running)
    equal = gate.ask(prompt=LONG, priority=1)
    higher = gate.ask(prompt=LONG, priority=2)
    assert gate.gate.is_cold(higher)
    for request in (equal, higher):
        gate.gate.enqueue(request)
    assert (equal.in_memory_queue, higher.in_memory_queue) == (True, False)
