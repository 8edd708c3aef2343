"""The planner by itself: rows, what is in flight, and results that do not fit their plan."""

from array import array

import msgspec
import pytest

from ramify.actors.scheduler.planner import Planner
from ramify.actors.scheduler.request import Account, Request, RequestRun, SchedulerError
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.messages import Submit
from ramify.protocol.plan import StepResult, pack, unpack
from ramify.protocol.sampling import SamplingParams


@pytest.fixture
def planner(world):
    return make(world)


def make(world, *, rows=4, budget=16, lookahead=4, in_flight=2, device="cpu"):
    info = world(rows=rows, budget=budget).info
    info = msgspec.structs.replace(info, device=device)
    return Planner(info, ScheduleConfig(lookahead=lookahead, in_flight=in_flight))


def run_of(planner, number, prompt=3, *, limit=5, slots=20, sampled=0):
    """A run with a row and pages of one slot each; it is admitted."""
    submit = Submit(number, number, prompt, limit, SamplingParams(), sampled=sampled)
    request = Request(submit, Account(number), number, number, 0, limit)
    tokens = pack(range(prompt))
    run = RequestRun(request, planner.take_row(), 0, tokens, pack(range(slots)), b"", True, 1)
    planner.admit(run)
    return run


def result(plan, tokens, seconds=0.0):
    rows = [extend.row for extend in plan.extends if extend.sample] + unpack(plan.decodes).tolist()
    return StepResult(plan.step, pack(rows), pack(tokens), 0, int(seconds * 1e6))


@pytest.mark.parametrize(("lookahead", "steps"), [(1, 4), (2, 4), (4, 3), (7, 2), (8, 0), (100, 0)])
def test_how_early_more_slots_are_asked_for(world, lookahead, steps):
    """A run with four slots beside its prompt asks after so many steps."""
    planner = make(world, lookahead=lookahead)
    run = run_of(planner, 1, limit=50, slots=7)
    asked = []
    for _ in range(5):
        planner.landed(result(planner.plan(), [5]))
        asked.append(planner.wanted == [run])
    assert asked.index(True) == steps


def test_rows_are_handed_out_from_the_first_on(planner):
    assert (planner.max_rows, planner.free_rows, planner.running) == (4, 4, 0)
    one, two = run_of(planner, 1), run_of(planner, 2)
    assert (one.row, two.row, planner.free_rows, planner.running) == (0, 1, 2, 2)
    planner.drop(one)
    assert (planner.free_rows, planner.running, planner.take_row()) == (3, 1, 0)


def test_no_more_rows_than_a_step_has_tokens(world):
    assert make(world, rows=32, budget=16).max_rows == 16


def test_what_a_step_is_made_of(planner):
    run = run_of(planner, 1, sampled=6)
    plan = planner.plan()
    (opened,), (extend,) = plan.opens, plan.extends
    assert (opened.row, opened.request, opened.cached, opened.sampled) == (0, 1, 0, 6)
    assert list(unpack(opened.pages)) == list(range(20))
    assert (extend.row, extend.start, list(unpack(extend.tokens)), extend.sample) == (
        0,
        0,
        [0, 1, 2],
        True,
    )
    assert (plan.step, planner.step, planner.processed, plan.decodes, plan.closes) == (1, 1, 3, b"", b"")
    assert (run.tokens, run.pages, run.planned) == (b"", b"", 1)
    second = planner.plan()
    assert (list(unpack(second.decodes)), second.opens, second.extends) == ([0], [], [])
    assert (planner.step, planner.processed) == (2, 4)
    assert planner.plan() is None  # two are in flight
    planner.landed(result(plan, [5]))
    assert planner.plan() is not None


@pytest.mark.parametrize(
    ("prompt", "device", "plans"), [(63, "cpu", 2), (64, "cpu", 1), (64, "cuda", 2)]
)
def test_on_a_cpu_a_step_with_many_prompt_tokens_is_awaited(world, prompt, device, plans):
    planner = make(world, budget=64, device=device)
    run_of(planner, 1, prompt, slots=100)
    assert len([plan for plan in (planner.plan(), planner.plan()) if plan is not None]) == plans


def test_what_is_under_way_of_a_run(planner):
    run = run_of(planner, 1, 20, slots=30)
    assert planner.in_vain(run) == 0
    first = planner.plan()
    assert planner.in_vain(run) == 16
    second = planner.plan()
    assert planner.in_vain(run) == 20  # its first token costs nothing beside its prompt
    planner.landed(result(first, []))
    planner.landed(result(second, [7]))
    run.computed = 20
    run.out.append(7)
    assert planner.in_vain(run) == 0
    planner.plan()
    planner.plan()
    assert planner.in_vain(run) == 2


def test_who_is_dropped_is_closed_and_its_pages_are_nobodys(planner):
    one, two = run_of(planner, 1), run_of(planner, 2)
    planner.landed(result(planner.plan(), [5, 6]))
    planner.grown(one, pack([50]))
    planner.grown(two, pack([60]))
    planner.drop(one)
    assert (one.live, one.decoding) == (False, False)
    plan = planner.plan()
    assert list(unpack(plan.closes)) == [0]
    assert [(grow.row, list(unpack(grow.pages))) for grow in plan.grows] == [(1, [60])]
    assert list(unpack(plan.decodes)) == [1]
    planner.landed(result(plan, [8]))
    plan = planner.plan()
    assert (plan.closes, plan.grows) == (b"", [])


def test_the_next_plan_copies_pages_each_as_was_said_last(planner):
    run_of(planner, 1)
    planner.copy(pack([3, 30, 4, 31]))
    planner.copy(pack([5, 30]))
    assert list(unpack(planner.plan().copies)) == [5, 30, 4, 31]
    assert planner.plan().copies == b""


def test_copies_wait_for_a_step(planner):
    planner.copy(pack([3, 30]))
    assert planner.plan() is None
    run_of(planner, 1)
    assert list(unpack(planner.plan().copies)) == [3, 30]


def test_an_executor_that_dies_takes_the_copies_along(planner, world):
    planner.copy(pack([3, 30]))
    planner.lost()
    planner.resume(world().info)
    run_of(planner, 1)
    assert planner.plan().copies == b""


def test_who_was_never_opened_is_not_closed(planner):
    planner.drop(run_of(planner, 1))
    assert planner.plan() is None


def test_a_row_is_closed_though_nothing_runs(planner):
    run = run_of(planner, 1)
    plan = planner.plan()
    planner.drop(run)
    assert planner.plan() is None  # the next step may as well tell it
    planner.landed(result(plan, [5]))
    plan = planner.plan()
    assert (list(unpack(plan.closes)), plan.extends, plan.decodes) == ([0], [], b"")


def test_results_that_do_not_fit(planner):
    with pytest.raises(SchedulerError, match="result of step 1, expected None"):
        planner.landed(StepResult(1, b"", b"", 0, 0))
    for number in (1, 2):
        run_of(planner, number)
    plan = planner.plan()
    good = result(plan, [5, 6])
    for wrong, why in (
        ({"step": 2}, "result of step 2, expected 1"),
        ({"rows": pack([1, 0])}, r"step 1: 2 tokens, rows \[1, 0\], not \[0, 1\]"),
        ({"tokens": pack([5])}, "step 1: 1 tokens"),
        ({"logprobs": [None]}, "step 1: 1 logprobs for 2 tokens"),
        ({"scores": pack([1])}, "step 1: 1 scores, expected 0"),
    ):
        in_flight = planner.in_flight.copy()
        with pytest.raises(SchedulerError, match=why):
            planner.landed(msgspec.structs.replace(good, **wrong))
        planner.in_flight = in_flight
    step, tokens = planner.landed(good)
    assert (step.step, step.firsts, list(tokens)) == (1, 2, [5, 6])
    assert not planner.in_flight


def test_what_a_step_took_is_learnt(planner):
    learnt = []
    planner.pace.learn = lambda work, decodes, seconds: learnt.append((work, decodes, seconds))
    run_of(planner, 1)
    first = planner.plan()
    run_of(planner, 2, 5)
    second = planner.plan()
    planner.landed(result(first, [5], 0.5))
    planner.landed(result(second, [5, 6], 0.25))
    assert learnt == [(3, 0, 0.5), (5, 1, 0.25)]


@pytest.mark.parametrize(("limit", "slots", "tokens"), [(3, 20, 3), (50, 4, 2), (1, 3, 1)])
def test_a_run_stops_at_its_limit_or_its_last_slot(planner, limit, slots, tokens):
    """It has three prompt tokens, and its last output token needs no slot."""
    run_of(planner, 1, limit=limit, slots=slots)
    for _ in range(tokens):
        planner.landed(result(planner.plan(), [5]))
    assert planner.plan() is None


# --- drafts ------------------------------------------------------------------------------------


class Asks:
    """A policy that always wants so many drafts for each row."""

    measuring = False

    def __init__(self, drafts):
        self.drafts = drafts
        self.told = []

    def choose(self, records, room, *, changed):
        return [self.drafts] * len(records) if room >= self.drafts * len(records) else None

    def landed(self, record, asked, drafted, accepted):
        self.told.append((asked, drafted, accepted))

    def took(self, rows, drafts, depth, tokens, seconds, late=0.0, missing=0):
        self.told.append((rows, drafts, depth, tokens, *(["other things"] if seconds is None else [])))

    def ended(self, tokens):
        self.told.append(tokens)


def drafting(world, drafts=3, most=4, *, rows=16, budget=64, in_flight=2, **more):
    """`more`: of what the executor says of itself."""
    info = msgspec.structs.replace(world(rows=rows, budget=budget, drafts=most).info, **more)
    planner = Planner(info, ScheduleConfig(lookahead=4, in_flight=in_flight))
    planner.drafts.speculation = Asks(drafts)
    return planner


def with_counts(plan, counts, drafted):
    rows = [extend.row for extend in plan.extends if extend.sample] + unpack(plan.decodes).tolist()
    tokens = pack([5] * sum(counts))
    return StepResult(plan.step, pack(rows), tokens, 0, 0, counts=pack(counts), drafted=pack(drafted))


def bound(planner, run):
    return planner._tick + run.offset if run.decoding else run.planned


def test_a_run_is_planned_by_what_it_has_if_every_draft_is_accepted(world):
    planner = drafting(world)
    run = run_of(planner, 1, limit=100, slots=103)
    planner.landed(result(planner.plan(), [5]))
    one, two = planner.plan(), planner.plan()
    assert [list(unpack(plan.drafts)) for plan in (one, two)] == [[3], [3]]
    assert bound(planner, run) == 1 + 4 + 4
    step, tokens = planner.landed(with_counts(one, [2], [3]))
    assert (list(step.counts), len(tokens)) == ([2], 2)
    assert bound(planner, run) == 1 + 2 + 4
    planner.landed(with_counts(two, [1], [0]))  # the drafter had no guess
    assert bound(planner, run) == 1 + 2 + 1
    told = planner.drafts.speculation.told
    assert told == [(3, 3, 1), (1, 3, 3, 2), (3, 0, 0), (1, 0, 3, 1)]
    run.computed, run.out = 3, array("i", [5] * 4)
    assert planner.in_vain(run) == 0
    planner.plan()
    assert planner.in_vain(run) == 4


def test_an_executor_that_drafted_nothing_gives_one_token_each(world):
    planner = drafting(world)
    run = run_of(planner, 1, limit=100, slots=103)
    planner.landed(result(planner.plan(), [5]))
    plan = planner.plan()
    step, _ = planner.landed(result(plan, [5]))
    assert step.counts is None
    assert bound(planner, run) == 2


@pytest.mark.parametrize(("in_flight", "drafts"), [(1, [3, 3]), (2, [3, 2])])
def test_drafts_pass_neither_the_limit_nor_the_slots(world, in_flight, drafts):
    """With two steps in flight there is room for one more decode behind them, which need not wait."""
    for sizes in ({"limit": 9, "slots": 50}, {"limit": 50, "slots": 11}):
        planner = drafting(world, in_flight=in_flight)
        run = run_of(planner, 1, **sizes)
        planner.landed(result(planner.plan(), [5]))
        found = []
        while (plan := planner.plan()) is not None:
            found += unpack(plan.drafts)
            if in_flight == 1:
                planner.landed(with_counts(plan, [1 + found[-1]], [found[-1]]))
            if len(found) == 2:
                break
        assert found == drafts
        assert bound(planner, run) == 9 - (in_flight == 2)


def test_who_may_be_at_its_bound_pauses_and_goes_on(world):
    planner = drafting(world, in_flight=1)
    run = run_of(planner, 1, limit=6, slots=50)
    planner.landed(result(planner.plan(), [5]))
    plan = planner.plan()
    assert (list(unpack(plan.drafts)), bound(planner, run)) == ([3], 5)
    planner.landed(with_counts(plan, [4], [3]))
    plan = planner.plan()  # its last token
    assert (unpack(plan.decodes).tolist(), plan.drafts) == ([0], b"")
    planner.landed(result(plan, [5]))
    assert planner.plan() is None
    planner = drafting(world, in_flight=1)
    run = run_of(planner, 1, limit=5, slots=50)
    planner.landed(result(planner.plan(), [5]))
    plan = planner.plan()
    assert not run.decoding
    planner.landed(with_counts(plan, [1], [3]))
    assert run.decoding
    assert unpack(planner.plan().decodes).tolist() == [0]


def test_free_rows_bound_the_lines(world):
    planner = drafting(world, drafts=4, rows=5)
    for number in (1, 2):
        run_of(planner, number, limit=90, slots=99)
    planner.landed(result(planner.plan(), [5, 5]))
    assert planner.plan().drafts == b""  # three rows are free: not eight


def test_counts_that_do_not_fit(world):
    planner = drafting(world)
    run_of(planner, 1, limit=90, slots=99)
    planner.landed(result(planner.plan(), [5]))
    plan = planner.plan()
    for counts, drafted in (([5], [3]), ([2], [0]), ([1], [4]), ([-1], [0]), ([1, 1], [0, 0])):
        in_flight = planner.in_flight.copy()
        wrong = msgspec.structs.replace(with_counts(plan, counts, drafted), rows=pack([0]))
        with pytest.raises(SchedulerError, match="step 2: "):
            planner.landed(wrong)
        planner.in_flight = in_flight


def test_who_sits_a_step_out_runs_in_the_next_as_if_it_had_not_been(world):
    planner = make(world, in_flight=1)
    run = run_of(planner, 1, limit=2)
    planner.landed(msgspec.structs.replace(result(planner.plan(), []), counts=pack([0])))
    assert bound(planner, run) == 0
    plan = planner.plan()  # its prompt's last token again
    assert (plan.extends, list(unpack(plan.decodes))) == ([], [0])
    planner.landed(result(plan, [5]))
    for tokens in ([], [6]):
        plan = planner.plan()
        assert list(unpack(plan.decodes)) == [0]
        counts = pack([len(tokens)])
        planner.landed(msgspec.structs.replace(result(plan, tokens), counts=counts))
    assert (planner.plan(), run.decoding) == (None, False)


def test_who_sits_out_the_only_step_that_it_wants_is_planned_again(world):
    planner = make(world)
    run = run_of(planner, 1, limit=1)
    planner.landed(msgspec.structs.replace(result(planner.plan(), []), counts=pack([0])))
    assert list(unpack(planner.plan().decodes)) == [0]
    assert planner.plan() is None
    assert bound(planner, run) == 1


def test_what_constraints_draft_is_no_profit_of_guesses(world):
    planner = drafting(world, max_forced=4)
    free, held = (run_of(planner, number, limit=100, slots=103) for number in (1, 2))
    held.jumps = True
    planner.landed(result(planner.plan(), [5, 5]))
    told = planner.drafts.speculation.told

    def step(counts, drafted):
        plan = planner.plan()
        assert list(unpack(plan.drafts)) == [3, 4]
        told.clear()
        planner.landed(with_counts(plan, counts, drafted))
        return told

    # neither its tokens nor its time
    assert step([2, 5], [3, 4]) == [(3, 3, 1), (2, 3, 3, 3, "other things")]
    assert step([2, 1], [3, 0]) == [(3, 3, 1), (2, 3, 3, 3)]  # nothing had to follow
    planner.drop(free)
    plan = planner.plan()
    told.clear()
    planner.landed(with_counts(plan, [1], [0]))
    assert told == [(1, 0, 0, 1)]  # a step without drafts


def test_what_constraints_force_is_learnt_as_prompt_tokens(world):
    """A row with a constraint is one decode, whatever it may jump: its drafts are computed like a
    prompt's tokens, each scored, and most that are asked for never run.
    """
    planner = drafting(world, max_forced=4, logits_cost=2.0)
    _, held = (run_of(planner, number, limit=100, slots=103) for number in (1, 2))
    held.jumps = True
    learnt, asked = [], []
    planner.pace.learn = lambda *given: learnt.append(given)
    planner.pace.beside = lambda decodes: asked.append(decodes) or 16
    planner.landed(result(planner.plan(), [5, 5]))
    run_of(planner, 3, prompt=40)
    asked.clear()
    plan = planner.plan()
    assert list(unpack(plan.drafts)) == [3, 4]
    assert set(asked) == {2 + 3}  # two rows and the guesses of one: not what a constraint may force
    planner.landed(with_counts(plan, [2, 3], [3, 2]))
    assert learnt[-1][:2] == (16 + 2 * (1 + 2), 2 + 3)


def test_a_constraint_is_asked_for_few_drafts_where_it_said_nothing(world):
    """Until it says as many: so it does not take the room of guesses."""
    planner = drafting(world, rows=64, max_forced=32)
    held = run_of(planner, 1, limit=300, slots=303)
    held.jumps = True
    planner.landed(result(planner.plan(), [5]))
    found = []
    for counts, drafted in (([33], [32]), ([1], [0]), ([3], [2]), ([9], [8]), ([1], [0])):
        plan = planner.plan()
        found += unpack(plan.drafts)
        planner.landed(with_counts(plan, counts, drafted))
    assert found == [32, 32, 8, 8, 32]


def test_guesses_of_a_run_with_a_constraint(world):
    """They are some of its drafts; what they gave is told, what had to follow is not."""
    planner = drafting(world, max_forced=4, guesses_constrained=True)
    free, held = (run_of(planner, number, limit=100, slots=103) for number in (1, 2))
    held.jumps = True
    planner.landed(result(planner.plan(), [5, 5]))
    told = planner.drafts.speculation.told

    def step(counts, drafted, guessed):
        plan = planner.plan()
        assert list(unpack(plan.drafts)) == [3, 4]
        assert list(unpack(plan.guesses)) == [0, 3]
        told.clear()
        landed = with_counts(plan, counts, drafted)
        planner.landed(msgspec.structs.replace(landed, guessed=pack([0, 0, *guessed])))
        return told

    # two had to follow, of two guesses behind them one was right
    assert step([2, 4], [3, 4], [2, 1]) == [(3, 3, 1), (3, 2, 1), (2, 5, 3, 4, "other things")]
    assert step([2, 3], [3, 3], [3, 2]) == [(3, 3, 1), (3, 3, 2), (2, 6, 3, 5)]  # nothing had to
    planner.drop(free)
    assert list(unpack(planner.plan().guesses)) == [3]
