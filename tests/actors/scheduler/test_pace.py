"""How many prompt tokens a step takes beside decodes: learnt, bounded, never none."""

import random
from types import SimpleNamespace

import pytest

from ramify.actors.scheduler.pace import DRAIN, ENOUGH, FIRST, FIRST_ON_CPU, LEAST, SMALL, Pace
from ramify.actors.scheduler.request import Account, Request
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.messages import Submit
from ramify.protocol.sampling import SamplingParams


def make(target=20.0, mixed=2048, step=8192, sizes=(), device="cuda", logits_cost=0.0):
    info = SimpleNamespace(
        step_tokens=step, extend_sizes=list(sizes), device=device, logits_cost=logits_cost
    )
    return Pace(info, ScheduleConfig(itl_target_ms=target, mixed_tokens=mixed))


class Device:
    """Steps of 4 ms, 30 us for each decode and 21 for each prompt token, with some scatter."""

    def __init__(self, base=4e-3, decode=30e-6, prompt=21e-6, scatter=0.0):
        self.base, self.decode, self.prompt, self.scatter = base, decode, prompt, scatter
        self.dice = random.Random(1)

    def seconds(self, prompts, decodes):
        exact = self.base + self.decode * decodes + self.prompt * prompts
        return exact * (1 + self.dice.uniform(-self.scatter, self.scatter))


def serve(pace, device, steps, decodes=64, every=2):
    """Steps beside `decodes`, each `every`-th full of prompts; returns those steps' seconds."""
    lasted = []
    for step in range(steps):
        prompts = pace.beside(decodes) if step % every == 0 else 0
        seconds = device.seconds(prompts, decodes)
        pace.learn(prompts, decodes, seconds)
        if prompts:
            lasted.append(seconds)
    return lasted


@pytest.mark.parametrize("target", [10, 20, 40])
@pytest.mark.parametrize("every", [1, 2, 7])
def test_steps_come_to_last_as_long_as_the_target(target, every):
    lasted = serve(make(target), Device(scatter=0.05), 400, every=every)
    assert 0.75 * target < 1e3 * sum(lasted[-20:]) / 20 <= target
    assert 1e3 * max(lasted[-20:]) <= 1.1 * target


def test_the_first_steps_are_careful():
    pace = make()
    assert pace.beside(64) == FIRST
    lasted = serve(pace, Device(), 100, every=1)
    assert max(lasted) <= 1.1 * 20e-3


def test_it_follows_contexts_that_grow_and_decodes_that_come():
    pace, device = make(), Device()
    serve(pace, device, 100)
    few = pace.beside(8)
    device.decode *= 3
    lasted = serve(pace, device, 200)
    assert max(lasted[-10:]) <= 20e-3
    assert pace.beside(8) > pace.beside(64)
    assert few > pace.beside(64)


def test_one_slow_step_changes_little():
    pace = make()
    serve(pace, Device(), 200)
    before = pace.beside(64)
    pace.learn(before, 64, 2.0)
    after = pace.beside(64)
    assert after >= before / 4
    serve(pace, Device(), 60)
    assert pace.beside(64) > 0.9 * before


def test_a_small_step_first_does_not_hide_what_large_ones_cost():
    """A machine of 2 ms a prompt token, whose first step was tiny."""
    pace, device = make(), Device(base=0.03, prompt=2e-3)
    pace.learn(24, 0, 0.05)
    for _ in range(3):
        pace.learn(2048, 0, device.seconds(2048, 0))
    for _ in range(6):
        prompts = pace.beside(4)
        pace.learn(prompts, 4, device.seconds(prompts, 4))
    assert pace.beside(4) == LEAST


def test_a_machine_that_becomes_much_slower_is_followed():
    pace, device = make(), Device()
    serve(pace, device, 100)
    device.base, device.decode, device.prompt = 0.04, 3e-4, 2.1e-4
    lasted = serve(pace, device, 40)
    assert lasted[-1] < 1.6 * (0.04 + 64 * 3e-4)


def test_prompts_never_starve():
    """The decodes alone take longer than the target: prompts get half as long again."""
    pace = make(target=5)
    lasted = serve(pace, Device(), 300)
    assert pace.beside(64) >= LEAST
    assert 1.2 * 5.9e-3 < lasted[-1] < 1.6 * 5.9e-3
    slow = make(target=1)
    serve(slow, Device(prompt=1.0), 50)
    assert slow.beside(64) == LEAST


def test_mixed_tokens_is_the_most_and_without_a_target_the_answer():
    device = Device(prompt=1e-9)
    pace = make(mixed=300)
    serve(pace, device, 50)
    assert pace.beside(64) == 300
    pace = make(target=0, mixed=300)
    serve(pace, Device(), 50)
    assert pace.beside(64) == 300
    assert pace.alone(True) == 8192


def test_captured_sizes_are_chosen():
    pace = make(sizes=[16, 32, 64, 128, 192, 256, 320, 384, 448, 512])
    serve(pace, Device(), 200)
    assert pace.beside(64) == 512  # 576 would do
    pace = make(target=15, sizes=[16, 32, 64, 128, 192, 256, 320, 384, 448, 512])
    serve(pace, Device(), 200)
    assert pace.beside(64) in (320, 384)
    large = make(target=40, sizes=[64, 128])
    serve(large, Device(), 200)
    assert large.beside(64) > 1000  # no graph is so large: no padding


def test_steps_without_decodes():
    """Of full size, unless a prompt takes several of them anyway or they would take very long."""
    pace = make()
    assert pace.alone(False) == 8192
    assert pace.alone(True) == FIRST
    for _ in range(40):
        prompts = pace.alone(True)
        pace.learn(prompts, 0, Device().seconds(prompts, 0))
    assert 2000 < pace.alone(True) < 2700
    assert pace.alone(False) == 8192
    slow = make()
    for step in range(40):
        prompts = 500 + 500 * (step % 2)
        slow.learn(prompts, 0, Device(prompt=0.2e-3).seconds(prompts, 0))
    assert 500 < slow.alone(False) < 1500


def test_a_result_without_a_time_teaches_nothing():
    pace = make()
    pace.learn(100, 4, 0.0)
    pace.learn(0, 0, 1.0)
    assert pace.beside(4) == FIRST


def submitted(account, prompt, number):
    submit = Submit(number, number, prompt, 5, SamplingParams())
    return Request(submit, account, number, number, 0, 5)


def test_a_burst_of_many_tenants_is_computed_in_larger_steps():
    pace = make()
    serve(pace, Device(), 200)
    usual = pace.beside(64)
    crowd = [submitted(Account(i), 600, i) for i in range(100)]
    for request in crowd:
        pace.lacks(request, request.prompt)
    assert pace.beside(64) > 1.4 * usual
    for request in crowd:
        pace.lacks(request, 300)
        pace.lacks(request, 0)
    assert pace.beside(64) == usual
    few = [submitted(Account(i), 600, i) for i in range(5)]
    for request in few:
        pace.lacks(request, request.prompt)
    assert pace.beside(64) == usual  # 3,000 tokens take less than DRAIN seconds as it is
    assert 3000 / usual * 20e-3 < DRAIN


def test_nobody_alone_makes_the_steps_of_others_longer():
    pace = make()
    serve(pace, Device(), 200)
    usual = pace.beside(64)
    account = Account(1)
    for i in range(500):
        pace.lacks(submitted(account, 60_000, i), 60_000)
    assert pace.beside(64) == usual


CORE = {"base": 0.033, "decode": 2e-3, "prompt": 1.6e-3}  # one core of a CPU, a model of 30 M weights


@pytest.mark.parametrize("slower", [1, 3, 10])
def test_however_slow_the_machine_no_step_takes_all_that_waits(slower):
    """On a CPU. Four tenants bring more than it computes in `DRAIN` seconds: no reason for one step
    with all of it."""
    device = Device(**{part: slower * seconds for part, seconds in CORE.items()})
    pace = make(step=2048, device="cpu")
    for number in range(4):
        pace.lacks(submitted(Account(number), 1900, number), 1900)
    beside, alone = [], []
    for step in range(100):
        decodes = step % 2
        prompts = pace.beside(decodes) if decodes else pace.alone(False)
        seconds = device.seconds(prompts, decodes)
        pace.learn(prompts, decodes, seconds)
        (beside if decodes else alone).append((seconds, prompts))
    assert max(prompts for _, prompts in beside[:20]) <= 8 * FIRST_ON_CPU  # nothing was known
    assert max(beside[20:])[0] <= max(0.06, 3 * device.seconds(0, 1))
    assert max(alone[20:])[0] <= max(1.1 * ENOUGH, device.seconds(LEAST, 1))


def test_steps_without_decodes_are_worth_what_any_step_costs():
    """On a slow machine most of a short step is what each of them costs."""
    pace, device = make(step=2048, device="cpu"), Device(**CORE)
    for _ in range(30):
        prompts = pace.alone(False)
        pace.learn(prompts, 0, device.seconds(prompts, 0))
    assert device.seconds(prompts, 0) > 10 * device.base
    assert device.seconds(prompts, 0) <= 1.01 * ENOUGH


# --- each constant by itself ----------------------------------------------------------------------


def exact(pace, device, steps=400, decodes=(16, 64), sizes=(64, 128, 256)):
    """Teach it a device without scatter, so that it knows the three weights."""
    for number in range(steps):
        prompts, count = sizes[number % len(sizes)], decodes[number % len(decodes)]
        pace.learn(prompts, count, device.seconds(prompts, count))


def learnt(pace):
    """All that it knows: what it expects of a step of nothing, with decodes, and with prompt tokens."""
    return [pace.expected(0, 0), pace.expected(0, 64), pace.expected(128, 64)]


def seen(pace, prompts, decodes=0):
    """A step that lasts as long as it knew: only its size is new."""
    pace.learn(prompts, decodes, Device().seconds(prompts, decodes))


def lack(pace, tokens):
    """So many prompt tokens wait, thousand by thousand for other tenants."""
    for number in range(0, tokens, 1000):
        pace.lacks(submitted(Account(number), 1000, number), min(1000, tokens - number))


def test_what_is_aimed_at_is_less_than_the_target():
    pace = make()
    exact(pace, Device())
    seen(pace, 1000, 64)
    assert pace.beside(64) == pytest.approx((0.9 * 20e-3 - 5.92e-3) / 21e-6, abs=2)


def test_of_eight_steps_of_decodes_alone_one_is_learnt_from():
    pace = make()
    exact(pace, Device())
    known = learnt(pace)
    pace.learn(0, 64, 6e-3)
    first = learnt(pace)
    assert first != known
    for _ in range(7):
        pace.learn(0, 64, 9e-3)
    assert learnt(pace) == first
    pace.learn(0, 64, 6.1e-3)
    assert learnt(pace) != first


def test_about_thirty_steps_count():
    """Steps that become longer by less than an exception: after 30 two thirds of that are learnt."""
    pace = make()
    exact(pace, Device())
    for number in range(30):
        size = (64, 128, 256)[number % 3]
        pace.learn(size, (16, 64)[number % 2], 1.2 * Device().seconds(size, (16, 64)[number % 2]))
    old = Device().seconds(128, 64)
    assert 0.5 < (pace.expected(128, 64) / old - 1) / 0.2 < 0.75


def test_a_step_counts_as_half_as_long_again_at_most():
    one, other = make(), make()
    for pace, factor in ((one, 1.5), (other, 50.0)):
        exact(pace, Device())
        pace.learn(128, 64, factor * Device().seconds(128, 64))
    assert learnt(one) == pytest.approx(learnt(other))
    for pace, factor in ((one, 0.5), (other, 0.01)):
        exact(pace, Device())
        pace.learn(128, 64, factor * Device().seconds(128, 64))
    assert learnt(one) == pytest.approx(learnt(other))


def test_two_exceptions_are_exceptions_and_three_are_not():
    pace, slow = make(), Device(base=0.04, decode=3e-4, prompt=2.1e-4)
    exact(pace, Device())
    for _ in range(2):
        pace.learn(128, 64, slow.seconds(128, 64))
    exact(pace, Device(), 6)
    for _ in range(2):
        pace.learn(128, 64, slow.seconds(128, 64))
    before, times = learnt(pace), slow.seconds(128, 64) / Device().seconds(128, 64)
    assert before[2] < 1.5 * Device().seconds(128, 64) < slow.seconds(128, 64)
    pace.learn(128, 64, slow.seconds(128, 64))  # a machine that is slower in all its parts
    assert learnt(pace) == pytest.approx([times * seconds for seconds in before], rel=0.2)
    exact(pace, slow, 12)  # which parts they are it is not sure of: it is soon told
    assert pace.expected(128, 64) == pytest.approx(slow.seconds(128, 64), rel=0.05)


def stuck(pace, device, decodes=64):
    """It believes that a prompt token takes a hundred times as long, by steps of one size."""
    believed = Device(base=0, decode=0, prompt=device.seconds(LEAST, decodes) / LEAST)
    exact(pace, believed, 100, decodes=(decodes, 0), sizes=(SMALL, 200, 1000))
    for _ in range(3):
        pace.learn(LEAST, decodes, device.seconds(LEAST, decodes))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_cost_that_is_far_too_great_is_found_out(kind):
    """Nothing varies: no noise, and every step takes the least because of what was learnt."""
    pace = make(device=kind, target=1)  # decodes alone take longer: half as long again is allowed
    device = Device()
    stuck(pace, device)
    assert pace.beside(64) == LEAST
    taken = []
    for _ in range(64):
        taken.append(pace.beside(64))
        pace.learn(taken[-1], 64, device.seconds(taken[-1], 64))
    right = 0.5 * device.seconds(0, 64) / device.prompt
    assert 0.5 * right < taken[-1] <= 1.1 * right


def test_a_cost_that_is_right_is_tried_rarely():
    """Of 2,000 steps on a slow machine nine are larger, and no more than that."""
    pace, device = make(target=1, device="cpu"), Device(prompt=0.1)
    taken = []
    for _ in range(2000):
        taken.append(pace.beside(64))
        pace.learn(taken[-1], 64, device.seconds(taken[-1], 64))
    assert set(taken[20:]) == {LEAST, SMALL}
    assert taken[20:].count(SMALL) <= 9


def test_whatever_was_learnt_a_step_takes_a_part_of_what_waits():
    for waiting, least in ((0, 16), (4096, 16), (8192, 32), (16_384, 64), (1 << 18, 64)):
        pace = make(device="cpu", target=1)
        exact(pace, Device(base=0, decode=0, prompt=1e4), 100, sizes=(SMALL, 1000))
        lack(pace, waiting)
        assert pace.beside(4) == least


def test_what_no_step_has_told_is_kept():
    """Only decodes for a long time: the cost of a prompt token is not forgotten, nor unsure for ever."""
    pace = make()
    exact(pace, Device())
    slope = pace.expected(512, 64) - pace.expected(0, 64)
    for _ in range(8 * 2000):
        pace.learn(0, 64, Device().seconds(0, 64))
    assert pace.expected(512, 64) - pace.expected(0, 64) == pytest.approx(slope, rel=1e-3)
    dearer = Device(prompt=25e-6)
    exact(pace, dearer, 12)
    assert pace.expected(128, 64) == pytest.approx(dearer.seconds(128, 64), rel=0.02)


def test_a_graph_is_taken_unless_much_more_is_allowed():
    def taken(allowed, sizes):
        return make(sizes=sizes, mixed=allowed).beside(4)

    found = [taken(tokens, [64, 96]) for tokens in (20, 64, 95, 96, 120, 121)]
    assert found == [64, 64, 64, 96, 96, 121]
    assert [taken(tokens, []) for tokens in (LEAST, 17)] == [LEAST, 17]
    slow = make(sizes=[8], target=1)
    serve(slow, Device(prompt=1.0), 50)
    assert slow.beside(64) == LEAST  # though that is no captured size


def test_how_much_of_what_is_lacking_counts():
    pace = make()
    one, other = Account(1), Account(2)

    def ask(account, number):
        return Request(Submit(number, 1, 5000, 1, SamplingParams()), account, number, 1, 0, 1)

    first = ask(one, 1)
    pace.lacks(first, 5000)
    assert (pace.waiting, one.tenant.lacking) == (1024, 1024)
    for number in range(2, 6):
        pace.lacks(ask(one, number), 1023)
    assert (pace.waiting, one.tenant.lacking) == (4096, 1024 + 4 * 1023)
    pace.lacks(ask(other, 9), 10)
    assert pace.waiting == 4106
    pace.lacks(first, 0)
    assert pace.waiting == 4 * 1023 + 10


def test_a_gpus_first_steps_and_a_cpus():
    assert (make().beside(4), make(device="cpu").beside(4)) == (FIRST, FIRST_ON_CPU)
    gpu, cpu = make(), make(device="cpu")
    for pace in (gpu, cpu):
        pace.learn(400, 4, 1e-4)
    assert gpu.beside(4) == 600  # half as many again as in any step
    assert cpu.beside(4) == 800  # twice as many


def test_steps_without_decodes_last_some_targets():
    pace = make(step=1 << 20)
    exact(pace, Device())
    base, slope, target = 4e-3, 21e-6, 18e-3
    assert pace.alone(False) == pytest.approx((12 * target - base) / slope, rel=0.01)
    seen(pace, 100)
    assert pace.alone(True) == 256
    seen(pace, 1000)
    assert pace.alone(True) == 1500
    seen(pace, 1 << 20)
    assert pace.alone(True) == pytest.approx((3 * target - base) / slope, rel=0.01)


def test_a_cpus_steps_last_twelve_times_what_any_step_costs():
    pace = make(target=1, device="cpu", step=1 << 20)
    exact(pace, Device())
    seen(pace, 1 << 20)
    assert pace.alone(False) == pytest.approx((12 * 4e-3 - 4e-3) / 21e-6, rel=0.01)
    pace = make(target=1, device="cpu", step=1 << 20)
    exact(pace, Device(base=0.1))
    pace.learn(1 << 20, 0, Device(base=0.1).seconds(1 << 20, 0))
    assert pace.alone(True) == pytest.approx((0.4 - 0.1) / 21e-6, rel=0.01)


def test_only_scored_positions_cost_more():
    pace = make(logits_cost=3.0)
    plain = SimpleNamespace(request=SimpleNamespace(targets=None))
    assert pace.work(plain, 2, 7) == 5
    scored = SimpleNamespace(
        request=SimpleNamespace(targets=SimpleNamespace(lines=lambda start, end: 2))
    )
    assert pace.work(scored, 2, 7) == 5 + 6


def test_any_step_that_took_time_teaches():
    for prompts, decodes in ((4, 4), (4, 0), (0, 4)):
        pace = make()
        pace.learn(prompts, decodes, 0.01)
        assert pace.expected(prompts, decodes) > 0


def test_the_most_that_was_seen():
    """Half as many again are trusted: beside decodes those, in steps without decodes those."""
    quick = Device(base=1e-4, decode=0, prompt=1e-9)
    pace = make()
    for prompts, decodes, beside, alone in (
        (500, 4, 750, FIRST),
        (300, 4, 750, FIRST),
        (700, 0, 750, 1050),
        (600, 0, 750, 1050),
    ):
        pace.learn(prompts, decodes, quick.seconds(prompts, decodes))
        assert (pace.beside(4), pace.alone(True)) == (beside, alone)
    cpu = make(device="cpu")  # twice as many, of any step
    cpu.learn(500, 4, quick.seconds(500, 4))
    assert (cpu.beside(4), cpu.alone(True)) == (1000, 1000)


def draining(waiting, served, **settings):
    """Prompt tokens beside 64 decodes where so many wait."""
    pace = make(**settings)
    exact(pace, served)
    pace.learn(2048, 64, served.seconds(2048, 64))
    lack(pace, waiting)
    return pace.beside(64)


def test_how_much_more_is_taken_where_many_wait():
    """What waits is done in half a second: steps of 5.92 ms of decodes take what comes meanwhile."""
    alone = 4e-3 + 64 * 30e-6
    for waiting in (12_000, 16_000):  # the target alone would allow 141
        rate = waiting / 0.5
        found = draining(waiting, Device(), target=1)
        assert found == pytest.approx(rate * alone / (1 - rate * 21e-6), rel=0.02, abs=1)
    assert draining(24_000, Device(), target=1) == 2048  # more than it computes in that time
    cpu = {"device": "cpu", "mixed": 4096}
    assert draining(24_000, Device(), **cpu) == pytest.approx((3 * 0.018 - alone) / 21e-6, rel=0.01)
    slow = Device(base=0.04 - 64 * 30e-6)
    assert draining(24_000, slow, **cpu) == pytest.approx(0.04 / 21e-6, rel=0.01)


def test_a_cpus_steps_grow_by_half_or_to_twice():
    for device, alone in (("cpu", 400), ("cuda", 300)):
        pace = make(device=device, step=1 << 20)
        exact(pace, Device(), sizes=(50, 100, 200))
        seen(pace, 200)
        assert pace.alone(True) == alone


def test_what_routers_are_told_of_the_pace():
    pace = make()
    assert pace.rate(10) == 0.0
    device = Device()
    serve(pace, device, 200)
    assert pace.rate(0) == pytest.approx(8192 / device.seconds(8192, 0), rel=0.1)
    beside = pace.beside(64)
    assert pace.rate(64) == pytest.approx(beside / device.seconds(beside, 64), rel=0.1)
    assert pace.rate(64) < pace.rate(0)


@pytest.mark.parametrize(("device", "step"), [(Device(), 8192), (Device(0.033, 2e-3, 1.6e-3), 2048)])
def test_small_steps_alone_do_not_make_prompts_cheap(device, step):
    """As after a restart: steps of one small size say little of what a token takes."""
    pace = make(step=step, device="cpu")
    best = step / device.seconds(step, 0)
    for _ in range(20):
        pace.learn(32, 0, device.seconds(32, 0))
        assert 32 / device.seconds(32, 0) <= pace.rate(0) < 2 * best
    for size in (64, 256, 1024):
        pace.learn(size, 0, device.seconds(size, 0))
    assert pace.rate(0) == pytest.approx(best, rel=0.2)
