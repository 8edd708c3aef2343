"""Which prompt tokens a step takes: whose turn it is, beside decodes, ahead of time, in a hurry."""

import random
from types import SimpleNamespace

import pytest

from ramify.actors.scheduler.prompt_queue import LOT, PromptQueue
from ramify.actors.scheduler.request import Account, Tenant
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.messages import SPARE


class Fixed:
    """A pace that knows nothing of time: 60 tokens beside decodes, steps of the full size alone."""

    def __init__(self, step, mixed):
        self.step, self.mixed = step, mixed

    def beside(self, decodes):
        return self.mixed

    def alone(self, long):
        return self.step // 2 if long else self.step

    def work(self, run, start, end):
        return end - start


def make(step=100, mixed=60, ahead=20, work=None):
    """`work`: what positions of a prompt cost; else a token each."""
    config, pace = ScheduleConfig(ahead_tokens=ahead), Fixed(step, mixed)
    pace.work = work or pace.work
    return PromptQueue(SimpleNamespace(step_tokens=step, device="cuda"), config, pace)


@pytest.fixture
def prompts():
    """Steps of 100 tokens, 60 beside decodes, 20 with tokens that nobody waits for."""
    return make()


class FakeRun(SimpleNamespace):
    """Told apart by identity, as runs are."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def level(self):
        return not self.ahead, self.priority


def run(prompt, account=None, *, ahead=False, filled=0, priority=0, whole=()):
    return FakeRun(
        whole=[SimpleNamespace(start=start, stop=stop) for start, stop in whole],
        cut=prompt,
        prompt=prompt,
        filled=filled,
        cached=filled,
        ahead=ahead,
        priority=priority,
        account=account or Account(1),
        place=0,
        turn=0,
        lot=0,
    )


def add(prompts, *runs):
    for each in runs:
        prompts.add(each)
    return runs


def taken(prompts, decodes=0):
    return [(run, end - start) for run, start, end in prompts.take(decodes)]


GENERATION, AHEAD = (True, 0), (False, 0)


def test_a_prompt_goes_in_chunks_and_each_row_once_a_step(prompts):
    one, two = add(prompts, run(70, filled=10), run(90))
    assert prompts.take(0) == [(one, 10, 70), (two, 0, 40)]
    assert prompts.take(0) == [(two, 40, 90)]
    assert prompts.take(0) == []
    assert len(prompts) == 0
    big = make(step=3 * LOT)
    (long,) = add(big, run(7 * LOT))
    assert big.take(0) == [(long, 0, 3 * LOT // 2)]


@pytest.mark.parametrize(("decodes", "room"), [(0, 100), (1, 60), (40, 60), (41, 59), (99, 1), (100, 0)])
def test_fewer_beside_decodes(prompts, decodes, room):
    add(prompts, run(100))
    assert sum(size for _, size in taken(prompts, decodes)) == room


def test_priority_comes_first(prompts):
    low, middle, high = add(prompts, run(30), run(30, priority=1), run(50, priority=8))
    assert taken(prompts) == [(high, 50), (middle, 30), (low, 20)]


def test_a_short_prompt_goes_before_a_long_one_that_came_first():
    prompts = make(step=8192, mixed=512)
    (long,) = add(prompts, run(60_000))
    assert taken(prompts, 1) == [(long, 512)]
    (short,) = add(prompts, run(100, Account(2)))
    assert taken(prompts, 1) == [(short, 100), (long, 412)]


def test_of_one_session_too():
    prompts, account = make(step=512, mixed=512), Account(1)
    (long,) = add(prompts, run(60_000, account))
    prompts.take(1)
    (short,) = add(prompts, run(100, account))
    waited = 0
    while short.filled < short.prompt:
        prompts.take(1)
        waited += 1
    assert waited <= LOT // 512 + 1
    assert long.filled <= LOT + 512


def test_a_long_prompt_gets_its_part_under_a_stream_of_short_ones():
    """Two tenants that always have work share the steps; without its lots the long one would wait
    for ever, and no short one waits for more than a lot of it."""
    prompts = make(step=512, mixed=512)
    long, stream = run(60_000), Account(2)
    add(prompts, long)
    steps, worst, since = 0, 0, 0
    (short,) = add(prompts, run(512, stream))
    while long.filled < long.prompt:
        steps += 1
        prompts.take(1)
        if short.filled == short.prompt:
            worst, since = max(worst, steps - since), steps
            (short,) = add(prompts, run(512, stream))
    assert 60_000 // 512 <= steps <= 2 * 60_000 // 512 + 8
    assert worst <= LOT // 512 + 2


def test_a_flood_of_one_tenant_does_not_hold_another_up():
    """64 prompts of five sessions with one credential came first: a newcomer's goes before them."""
    prompts, crowd = make(step=512, mixed=512), Tenant()
    sessions = [Account(i, crowd) for i in range(5)]
    add(prompts, *(run(400, sessions[i % 5]) for i in range(64)))
    prompts.take(1)
    (new,) = add(prompts, run(400, Account(9)))
    assert (new, 400) in taken(prompts, 1)


def test_five_sessions_of_one_tenant_get_what_one_gets():
    prompts, many = make(step=256, mixed=256), Tenant()
    tenants = [many] * 5 + [Tenant()]
    accounts = [Account(i, tenant) for i, tenant in enumerate(tenants)]
    got = [0] * 6
    for account in accounts:
        add(prompts, run(1 << 20, account))
    for _ in range(1000):
        for each, size in taken(prompts, 1):
            got[each.account.session] += size
    assert abs(sum(got[:5]) - got[5]) <= 2 * LOT
    assert max(got[:5]) - min(got[:5]) <= 2 * LOT


def test_what_nobody_waits_for_comes_last_and_makes_no_step_longer(prompts):
    (early,) = add(prompts, run(50, ahead=True))
    assert taken(prompts) == [(early, 20)]
    (short,) = add(prompts, run(15))
    assert taken(prompts, decodes=9) == [(short, 15), (early, 5)]
    (long,) = add(prompts, run(95))
    assert taken(prompts) == [(long, 95)]
    assert taken(prompts) == [(early, 20)]
    assert taken(prompts) == [(early, 5)]


def test_who_is_waited_for_gets_the_level_of_who_waits(prompts):
    first, second = add(prompts, run(50, ahead=True, priority=-8), run(70, ahead=True, priority=-8))
    third, other = add(prompts, run(80, priority=-4), run(90, priority=2))
    prompts.hurry(second, (True, 3))
    prompts.hurry(second, (True, 1))  # it has more already
    assert not second.ahead
    assert taken(prompts) == [(second, 70), (other, 30)]
    prompts.hurry(third, (True, 8))
    assert taken(prompts) == [(third, 80), (other, 20)]
    prompts.hurry(third, (True, 8))  # all of it is on the way
    assert taken(prompts) == [(other, 40)]
    assert taken(prompts) == [(first, 20)]


def test_room_for_more_is_counted_by_level(prompts):
    add(prompts, run(40, priority=1), run(1000), run(30, ahead=True))
    enough = prompts.enough
    assert prompts.lacking((True, 2), 0) == 3 * 50  # a long one is there: steps are shorter
    assert prompts.lacking((True, 1), 1) == 3 * 60 - 40
    assert prompts.lacking((True, 0), 1) == 3 * 60 - 40 - enough
    assert prompts.lacking((False, 5), 1) == 3 * 20 - 30
    prompts.take(1)
    assert prompts.lacking((True, 1), 1) == 3 * 60


def test_who_has_ended_is_skipped_and_not_kept(prompts):
    """Behind one that has no turn yet there may be thousands that were appended and taken back."""
    gone, ahead, left = add(prompts, run(30), run(30, ahead=True), run(30))
    for each in (gone, ahead):
        prompts.forget(each)
        prompts.forget(each)
    assert prompts.lacking(GENERATION, 0) == 270
    assert prompts.lacking(AHEAD, 0) == 60
    for _ in range(1000):
        (late,) = add(prompts, run(30))
        prompts.forget(late)
    assert len(prompts._lines[GENERATION].heap) < 100
    assert taken(prompts) == [(left, 30)]
    assert len(prompts) == 0


def test_who_takes_its_prompts_back_is_not_set_back(prompts):
    account = Account(1)
    for _ in range(50):
        (gone,) = add(prompts, run(90, account))
        prompts.forget(gone)
    other, mine = add(prompts, run(95, Account(2)), run(90, account))
    assert taken(prompts)[0] == (mine, 90)
    assert other.filled == 10


def test_nobody_starves_whatever_comes():
    """Random prompts of random tenants, always more than there is room for."""
    dice = random.Random(4)
    prompts = make(step=256, mixed=256)
    accounts = [Account(i) for i in range(8)]
    waiting = {}
    for step in range(4000):
        if len(waiting) < 40:
            size = dice.choice([10, 100, 100, 500, 3000, 9000])
            (new,) = add(prompts, run(size, dice.choice(accounts)))
            waiting[new] = step
        assert sum(end - start for _, start, end in prompts.take(3)) <= 256
        for done in [each for each in waiting if each.filled == each.prompt]:
            del waiting[done]
    assert min(waiting.values()) > 1500


def test_how_much_of_a_prompt_counts_as_one():
    """64 tokens, or a 32nd of the largest steps; a turn is 2,048."""
    assert [make(step=step).enough for step in (100, 2048, 2080, 6400)] == [64, 64, 65, 200]
    prompts = make(step=8192, mixed=8192)
    one, other = add(prompts, run(5000), run(5000, Account(2)))
    assert (one.lot, other.lot) == (2048, 2048)


def test_on_a_cpu_a_quarter_of_the_largest_step_lacks_in_any_case():
    for device, lacking in (("cuda", 3 * 10), ("cpu", 3 * 100)):
        info = SimpleNamespace(step_tokens=400, device=device)
        prompts = PromptQueue(info, ScheduleConfig(ahead_tokens=20), Fixed(400, 10))
        assert prompts.lacking(GENERATION, 4) == lacking
        assert prompts.lacking(AHEAD, 4) == 3 * 20


def test_ahead_no_more_than_a_step_takes():
    assert make(step=10, mixed=10).lacking(AHEAD, 1) == 3 * 10


@pytest.mark.parametrize(
    ("prompt", "filled", "first"), [(100, 0, 100), (101, 0, 50), (150, 50, 100), (151, 50, 50)]
)
def test_which_prompts_take_several_steps(prompts, prompt, filled, first):
    """What is cached does not count. They are computed in shorter steps, until they are gone."""
    (long,) = add(prompts, run(prompt, filled=filled))
    assert prompts.take(0) == [(long, filled, filled + first)]
    prompts.forget(long)
    (other,) = add(prompts, run(100, Account(2)))
    assert taken(prompts) == [(other, 100)]


def test_whose_prompts_are_computed(prompts):
    tenant = Tenant()
    one, two = Account(1, tenant), Account(2, tenant)
    first, second, third = add(prompts, run(10, one), run(10, one), run(10, two))
    assert (one.prefilling, two.prefilling, tenant.prefilling) == (2, 1, 2)
    prompts.forget(first)
    assert (one.prefilling, two.prefilling, tenant.prefilling) == (1, 1, 2)
    assert taken(prompts) == [(second, 10), (third, 10)]
    assert (one.prefilling, two.prefilling, tenant.prefilling) == (0, 0, 0)


def test_virtual_time_is_when_the_lot_in_work_was_begun():
    prompts = make(step=LOT, mixed=LOT)
    account = Account(1)
    add(prompts, run(3 * LOT, account))
    for now in (0, LOT, 2 * LOT):
        prompts.take(1)
        assert prompts._now == now
    (late,) = add(prompts, run(10, Account(2)))
    assert (late.turn, late.account.due) == (2 * LOT, 2 * LOT + 10)


def test_what_costs_more_is_taken_in_smaller_parts():
    prompts = make(work=lambda run, start, end: 2 * (end - start))
    (scored,) = add(prompts, run(70))
    assert taken(prompts, 1) == [(scored, 30)]
    prompts._pace.work = lambda run, start, end: 1000 * (end - start)
    assert taken(prompts, 1) == [(scored, 1)]  # it goes on at last


def test_who_is_hurried_keeps_its_turn(prompts):
    (slow,) = add(prompts, run(30, ahead=True, priority=-3))
    prompts.hurry(slow, (False, -3))
    assert slow.level == (False, -3)
    place = slow.place
    prompts.hurry(slow, (True, 2))
    assert (slow.level, prompts.order, slow.place > place) == ((True, 2), [(True, 2)], True)
    prompts.hurry(slow, (True, 1))
    assert slow.level == (True, 2)
    assert prompts.lacking((True, 2), 1) == 3 * 60 - 30
    prompts.forget(slow)
    prompts.hurry(slow, (True, 9))
    assert (slow.level, len(prompts), prompts.order) == ((True, 2), 0, [])


def test_places_of_prompts_that_left_are_forgotten_in_time(prompts):
    runs = add(prompts, *(run(10) for _ in range(40)))
    heap = prompts._lines[GENERATION].heap
    for gone in runs[:20]:
        prompts.forget(gone)
    assert len(heap) == 40
    prompts.forget(runs[20])
    assert len(heap) == 19
    for gone in runs[21:39]:
        prompts.forget(gone)
    assert len(heap) == 19  # so few are not worth it
    assert taken(prompts) == [(runs[39], 10)]


def test_no_room_is_no_room_on_a_gpu(prompts):
    assert prompts.lacking(GENERATION, 100) == 0


@pytest.mark.parametrize("sessions", [1, 3])
def test_what_a_prompt_did_not_use_of_its_turn_goes_back_to_its_session(sessions):
    """Each session of a tenant is charged as many times what it gets as there are of them."""
    prompts, tenant = make(), Tenant()
    accounts = [Account(i, tenant) for i in range(sessions)]
    runs = add(prompts, *(run(90, account) for account in accounts))
    last = accounts[-1]
    assert last.due == sessions * 90
    (more,) = add(prompts, run(60, last))
    assert last.due == sessions * (90 + 60)
    prompts.forget(more)
    assert last.due == sessions * 90
    prompts.forget(runs[-1])
    assert last.due == 0


def test_who_is_hurried_has_its_turn_now(prompts):
    """Its session's prompts before it had theirs first, until somebody waited for it."""
    account = Account(1)
    first, second, other = add(prompts, run(90, account), run(50, account, priority=-1), run(95))
    assert (second.turn, account.due) == (90, 140)
    prompts.hurry(second, GENERATION)
    assert second.turn == 0
    assert taken(prompts) == [(second, 50), (first, 50)]
    assert taken(prompts) == [(first, 40), (other, 60)]


def test_who_is_hurried_when_its_turn_has_come_goes_by_when_it_is_due():
    prompts = make(step=LOT, mixed=LOT)
    (slow,) = add(prompts, run(1000, priority=-1))
    (long,) = add(prompts, run(3 * LOT, Account(2)))
    for _ in range(3):
        prompts.take(0)
    (short,) = add(prompts, run(10, Account(3)))
    prompts.hurry(slow, GENERATION)  # due at 1,000
    assert (slow.turn, short.turn) == (0, LOT)
    assert taken(prompts)[:2] == [(slow, 1000), (short, 10)]
    assert long.filled < long.prompt


def test_a_hurry_that_raises_nothing_moves_nothing(prompts):
    one, two = add(prompts, run(30), run(30))
    place = one.place
    prompts.hurry(one, GENERATION)
    assert one.place == place
    assert taken(prompts) == [(one, 30), (two, 30)]


def test_what_a_chunk_costs_at_all_is_counted_once():
    prompts = make(work=lambda run, start, end: 10 + end - start)
    (long,) = add(prompts, run(100))
    assert taken(prompts, 1) == [(long, 60 * 60 // 70)]  # 61 of 60: no room for more


def test_a_cost_that_does_not_divide_evenly_leaves_room_for_a_token():
    prompts = make(mixed=61, work=lambda run, start, end: 2 * (end - start))
    one, two = add(prompts, run(30), run(70, Account(2)))
    assert taken(prompts, 1) == [(one, 30), (two, 1)]
    assert taken(prompts, 1) == [(two, 31)]


def test_a_prompt_as_long_as_the_largest_step_is_not_long(prompts):
    """And when it is done, the next long one still is; what is cached does not count."""
    for prompt, cached in ((100, 0), (90, 50)):
        add(prompts, run(prompt, filled=cached))
        prompts.take(0)
        (long,) = add(prompts, run(101))
        assert taken(prompts) == [(long, 50)]
        prompts.forget(long)


def test_what_is_left_of_a_prompt_is_what_counts(prompts):
    (long,) = add(prompts, run(100))
    prompts.take(1)
    assert long.filled == 60
    assert prompts.lacking(GENERATION, 1) == 3 * 60 - 40


@pytest.mark.parametrize(("count", "left"), [(32, 32), (33, 16)])
def test_a_few_places_of_prompts_that_left_are_kept(prompts, count, left):
    runs = add(prompts, *(run(10) for _ in range(count)))
    for gone in runs[: count - 16]:
        prompts.forget(gone)
    assert len(prompts._lines[GENERATION].heap) == left
    for gone in runs:
        prompts.forget(gone)
    assert prompts._lines[GENERATION].heap == []


def test_who_is_left_when_places_were_forgotten_goes_in_order():
    for seed in range(5):
        dice, prompts = random.Random(seed), make()
        runs = add(prompts, *(run(size, Account(size)) for size in dice.sample(range(1, 100), 40)))
        gone = dice.sample(runs, 21)
        for each in gone:
            prompts.forget(each)
        assert len(prompts._lines[GENERATION].heap) == 19
        order = []
        while prompts.order:
            order += [each for each, _ in taken(prompts) if each.filled == each.prompt]
        assert order == sorted((each for each in runs if each not in gone), key=lambda r: r.prompt)


def test_what_nobody_waits_for_has_steps_of_its_own(prompts):
    (spare,) = add(prompts, run(50, ahead=True, priority=SPARE))
    assert taken(prompts, 1) == []
    (asked,) = add(prompts, run(5))
    assert taken(prompts) == [(asked, 5)]
    (ahead,) = add(prompts, run(5, ahead=True, priority=-8))
    assert taken(prompts) == [(ahead, 5)]
    assert taken(prompts) == [(spare, 20)]
    prompts.hurry(spare, GENERATION)  # now somebody does
    assert taken(prompts, 1) == [(spare, 30)]


def test_long_prompts_that_nobody_waits_for_are_not_counted(prompts):
    ahead, awaited = run(300, ahead=True), run(300)
    prompts.add(ahead)
    assert prompts.long_awaited == 0
    prompts.add(awaited)
    prompts.add(run(100))
    assert prompts.long_awaited == 1
    prompts.hurry(ahead, (True, 0))  # now somebody does
    assert prompts.long_awaited == 2
    prompts.forget(ahead)
    prompts.forget(awaited)
    assert prompts.long_awaited == 0


def test_no_chunk_ends_inside_of_a_picture_whose_tokens_see_each_other(prompts):
    """It ends ahead of one that does not fit, or takes more than beside decodes; a step's room holds."""
    one, two = add(prompts, run(200, whole=[(50, 90), (90, 110), (150, 200)]), run(30, Account(2)))
    assert prompts.take(30) == [(two, 0, 30), (one, 0, 30)]
    assert prompts.take(30) == [(one, 30, 90)]
    assert prompts.take(30) == [(one, 90, 150)]
    assert prompts.take(30, 51) == []
    assert prompts.take(30, 50) == [(one, 150, 200)]
    assert len(prompts) == 0


def test_pictures_in_chunks_of_any_size():
    draw = random.Random(4)
    for _ in range(60):
        prompts, runs = make(step=100, mixed=draw.choice([1, 17, 60])), []
        for number in range(draw.randint(1, 4)):
            edges = sorted(draw.sample(range(300), 8))
            pictures = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a <= 60]
            new = run(300, Account(number % 2), whole=pictures, ahead=draw.random() < 0.3)
            new.filled = new.cached = draw.choice([0, edges[0] + 1, 299])
            runs.append(new)
        add(prompts, *runs)
        at = {each: each.filled for each in runs}
        while len(prompts):
            decodes = draw.choice([0, 1, 40])
            chunks = prompts.take(decodes, decodes)
            assert chunks
            assert decodes + sum(end - start for _, start, end in chunks) <= 100
            for each, start, end in chunks:
                assert at[each] == start < end
                at[each] = end
                assert not any(one.start < end < one.stop for one in each.whole)
        assert set(at.values()) == {300}
        assert not any(each.account.prefilling for each in runs)
