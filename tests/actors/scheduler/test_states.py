"""Which slots the steps of a run read and write."""

import pytest

from ramify.actors.scheduler.request import SchedulerError
from ramify.actors.scheduler.states import StateSlots
from ramify.protocol.messages import CancelRequest, Constrain, Granted
from ramify.protocol.plan import pack, unpack
from tests.actors.scheduler.test_model import RealCache


def states(slots=(1, 2, 3), marks=(), first=0, cuts=()):
    granted = Granted(1, 0, b"", b"", state=first, slots=pack(slots), marks=pack(marks))
    return StateSlots(granted, 3, cuts)


def test_each_chunk_reads_what_the_one_before_wrote():
    run = states(first=9)
    assert [run.chunk(end) for end in (10, 20, 30, 40)] == [(9, 1), (1, 2), (2, 3), (3, 1)]
    assert run.in_prompt(40) == [40, 1]
    assert run.in_prompt(20) == [20, 2]
    assert run.in_prompt(10) == []  # written over


def test_a_snapshot_leaves_the_turn_and_a_spare_slot_takes_its_place():
    run = states((1, 2, 3, 4), (20,))
    assert run.cut == 20
    assert [run.chunk(end) for end in (10, 20)] == [(0, 1), (1, 2)]
    assert run.cut == 0
    assert [run.chunk(end) for end in (30, 40, 50, 60)] == [(2, 3), (3, 1), (1, 4), (4, 3)]
    assert run.told(19) == []
    assert run.told(20) == [20, 2]
    assert run.told(99) == []
    assert run.in_prompt(20) == []


def test_decodes_go_on_from_the_prompt_and_pause():
    run = states()
    run.chunk(10)
    run.decodes(100)
    assert [run.pair(tick) for tick in (100, 101, 102, 103)] == [(1, 2), (2, 3), (3, 1), (1, 2)]
    run.pauses(102)
    assert run.newest == 3
    assert [run.after_prompt(12, steps) for steps in (0, 1, 2)] == [[12, 3], [12, 2], [12, 1]]
    run.decodes(200)
    assert run.pair(200) == (3, 1)


def test_what_no_token_came_from_is_no_state():
    run = states()
    run.chunk(10)
    run.lost = True
    assert run.after_prompt(10, 0) == []


def test_rows_are_as_many_as_there_are_slots_for(world):
    assert world(states=12, rows=8).core.planner.max_rows == 3
    assert world(states=12, rows=8, in_flight=1).core.planner.max_rows == 4
    with pytest.raises(SchedulerError, match="3 state slots"):
        world(states=3)


def test_another_executor_may_have_fewer_slots_or_more(world, expected):
    w = world(pages=300, rows=8, budget=64, cache=RealCache(300, 1, 16), states=16)
    prompts = [[i * i % 97 + k for i in range(9)] for k in range(6)]
    jobs = [w.submit(k + 1, prompt, max_tokens=20) for k, prompt in enumerate(prompts)]
    w.turn(*jobs)
    for _ in range(3):
        w.cache_settles()
        w.result()
    assert w.core.running == 4
    w.die()
    w.cache_settles()
    w.back(state_slots=8)
    assert w.core.planner.max_rows == 2
    w.cache_settles()
    w.result()
    assert w.core.running == 2
    w.die()
    w.cache_settles()
    w.back(state_slots=24)
    assert w.core.planner.max_rows == 6
    w.run()
    for job, prompt in zip(jobs, prompts, strict=True):
        assert w.output[job.request] == expected(prompt, 0, 20)
    w.check_idle()


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_next_turn_begins_where_the_last_one_ended(world, expected, drafts):
    w = world(
        pages=300, budget=64, cache=RealCache(300, 1, 20), states=20, drafts=drafts, acceptance=0.6
    )
    prompt = [i * i % 97 for i in range(150)]
    first = w.submit(1, prompt, max_tokens=10)
    w.run(first)
    assert w.output[first.request] == expected(prompt, 0, 10)
    second = w.submit(2, branch=first.branch, max_tokens=3)
    w.run(second)
    assert w.output[second.request] == expected(prompt + w.output[first.request], 0, 3)
    finished = w.finished[second.request]
    assert (finished.prompt, finished.cached, finished.replayed) == (160, 159, 0)
    w.check_idle()


def test_a_model_without_states_sends_none(world):
    w = world()
    w.run(w.submit(1, [1, 2, 3], max_tokens=4))
    assert all(not plan.states for plan in w.sent)
    assert all(not acquire.slots for settle in w.settles for acquire in settle.acquires)


def test_a_constrained_prompt_runs_its_last_token_in_a_step_of_its_own(world):
    w = world(pages=300, budget=64, cache=RealCache(300, 1, 20), states=20)
    w.turn(Constrain(0, b"words"), Constrain(5, b"body"))
    w.run(w.submit(1, list(range(30)), max_tokens=4, constraint=5))
    chunks = [[len(unpack(e.tokens)) for e in plan.extends] for plan in w.sent if plan.extends]
    assert chunks == [[29], [1]]


def test_a_run_that_is_cancelled_with_two_steps_in_flight_keeps_its_last_state(world):
    w = world(pages=300, budget=64, cache=RealCache(300, 1, 20), states=20)
    first = w.submit(1, list(range(40)), max_tokens=50)
    w.turn(first)
    while len(w.output.get(first.request, ())) < 5:
        w.settled() if w.replies else w.result()
    assert len(w.executor.plans) == 2
    w.run(CancelRequest(first.request))
    second = w.submit(2, branch=first.branch, max_tokens=3)
    w.run(second)
    finished = w.finished[second.request]
    assert (finished.prompt, finished.cached, finished.replayed) == (45, 44, 0)


def test_a_prompt_that_is_retracted_goes_on_behind_its_last_chunk(world):
    w = world(pages=300, budget=16, rows=1, cache=RealCache(300, 1, 20), states=20)
    first = w.submit(1, list(range(100)), max_tokens=2)
    w.turn(first)
    w.settled()
    for _ in range(3):
        w.result()
    done = w.core.requests[first.request].run.computed
    urgent = w.submit(2, [5, 6], max_tokens=1, priority=1, session=2)
    w.run(urgent)
    assert sum(w.core.lifecycle.retractions.values()) == 1
    assert w.core.lifecycle.computed_twice <= 2 * 16
    assert done >= 48
    assert w.finished[first.request].output == 2
    w.check_idle()


def test_children_of_a_fork_replay_once(world, expected):
    w = world(pages=2000, budget=64, rows=8, cache=RealCache(2000, 1, 60), states=60)
    base = [i * i % 97 for i in range(400)]
    w.run(w.submit(1, base[:100], max_tokens=0))
    w.run(w.submit(2, base, max_tokens=0))
    before = w.executor.computed
    children = [w.submit(10 + i, base[:300] + [i] * 80, max_tokens=2) for i in range(4)]
    w.run(*children)
    for child, i in zip(children, range(4), strict=True):
        assert w.output[child.request] == expected(base[:300] + [i] * 80, 0, 2)
    assert w.executor.computed - before <= 201 + 4 * 82
    assert sum(w.finished[child.request].replayed for child in children) <= 201
    w.check_idle()
