"""Random submissions, cancels, deadlines and memory sizes, with every order of replies.

Whatever happens: each request ends exactly once, the tokens it got are those of an
uninterrupted run, its branch holds what `Finished` says, and no page or row is left behind. The
fakes check each plan on the way. The same programs run against the real radix cache.
"""

import random
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ramify.actors.cache import snapshots
from ramify.actors.cache.cache import RadixCache
from ramify.actors.cache.on_disk import OnDisk
from ramify.actors.cache.windows import Windows
from ramify.actors.scheduler import loads
from ramify.protocol.messages import (
    Brought,
    CancelRequest,
    CancelSession,
    DiskResult,
    ExtendBranch,
    OpenBranch,
)
from ramify.protocol.plan import pack, unpack, unpack_floats
from tests.actors.cache.integrity import check
from tests.amount import examples


def tried(some, every):
    """So many examples, the same ones each time."""
    return settings(
        max_examples=examples(some, every),
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


BLOCK = 4  # tokens of what moves between tiers


class RealCache:
    """The radix cache behind the fake's interface, checked after each Settle."""

    def __init__(self, pages, page_size, states=0, windows=None, host=0, disk=None):
        self.cache = RadixCache(
            pages,
            page_size,
            block=BLOCK,
            state_slots=states,
            windows=windows,
            host_blocks=host,
            disk=disk,
        )  # fmt: skip
        self.on_disk, self.dice = {}, random.Random(1)  # a block's key and KV by place
        self.branches = {}
        self.started = {}

    @property
    def runs(self):
        return self.cache.runs

    def put(self, branch, tokens):
        self.branches[branch] = list(tokens)
        self.cache.open_branch(OpenBranch(branch))
        self.cache.extend_branch(ExtendBranch(branch, pack(tokens)))

    def settle(self, settle):
        for commit in settle.commits:
            if commit.final:
                self.branches[self.cache.runs[commit.request].branch] += unpack(commit.tokens)
        settled = self.cache.settle(settle)
        check(self.cache)
        return settled

    def moved(self, executor, now):
        """What a disk does with the cache's orders: late, never, or not whole, now and then."""
        waits = self.cache.waits
        for order in waits.take_orders():
            place, slot = order.place, order.slot
            if order.write:
                whole = executor.host.get(slot, (b"",))[0] == order.key and self.dice.random() < 0.9
                if whole:
                    self.on_disk[place] = executor.host[slot]
            else:
                assert self.on_disk[place][0] == order.key
                if whole := self.dice.random() < 0.9:
                    executor.host[slot] = self.on_disk[place]
            waits.done(DiskResult(order, whole, 0.001))
            check(self.cache)
        if self.dice.random() < 0.5:
            waits.expire(now + 100)
        ready = waits.take_ready()
        return [Brought(ready)] if ready or self.cache.may_save else []

    def renew(self, pages, state_slots=0, host_blocks=0):
        self.cache.renew(pages, state_slots, host_blocks)
        check(self.cache)
        assert self.cache.free == pages

    def check_idle(self):
        check(self.cache)
        assert not self.cache.runs
        assert self.cache.referenced == 0
        assert self.cache.free + self.cache.evictable == self.cache.total


prompts = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.integers(1, 30).map(lambda n: list(range(n))),
)
submissions = st.builds(
    lambda *fields: ("submit", SimpleNamespace(**dict(zip(FIELDS, fields, strict=True)))),
    st.integers(1, 3),
    prompts,
    st.integers(0, 14),
    st.integers(0, 3),
    st.sets(st.integers(0, 96), max_size=12).map(sorted),
    st.sampled_from([0, 0, 0, 1, -1]),
    st.sampled_from([None, None, None, 3, 10, 30]),
    st.integers(1, 3),
    st.one_of(
        st.none(), st.lists(st.tuples(st.integers(0, 29), st.integers(0, 96)), min_size=1, max_size=9)
    ),
)
FIELDS = ("session", "prompt", "max_tokens", "seed", "stops", "priority", "deadline", "count", "scored")
OWNERS = {1: "", 2: "two", 3: "two"}  # of the sessions
programs = st.lists(
    st.one_of(
        submissions,
        submissions,
        st.tuples(st.just("cancel"), st.integers(0, 40), st.one_of(st.none(), st.integers(0, 10))),
        st.tuples(st.just("reply"), st.integers(1, 4)),
        st.tuples(st.just("result"), st.integers(1, 6)),
        st.tuples(st.just("result"), st.integers(1, 6)),
        st.tuples(st.just("both"), st.integers(1, 2)),
        st.tuples(st.just("close"), st.integers(1, 3)),
    ),
    max_size=30,
)
deaths = st.lists(  # at which parts of a program; after how many more another executor is there
    st.tuples(st.integers(0, 29), st.integers(0, 3)), min_size=1, max_size=4
)
worlds = st.fixed_dictionaries(
    {
        "pages": st.integers(8, 70),
        "rows": st.integers(1, 5),
        "budget": st.sampled_from([16, 19, 64]),
        "context": st.sampled_from([16, 25, 1000]),
        "lookahead": st.integers(1, 8),
        "in_flight": st.integers(1, 2),
        "max_waiting": st.sampled_from([4, 1000]),
        "mixed_tokens": st.sampled_from([16, 18, 2048]),
        "itl_target_ms": st.sampled_from([0.0, 1.0, 20.0]),
        "quantum_steps": st.sampled_from([1, 2, 32]),
        "ahead_tokens": st.sampled_from([16, 17, 512]),
    }
)


speculations = st.fixed_dictionaries(
    {
        "drafts": st.integers(1, 4),
        "acceptance": st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]),
        "generous": st.sampled_from([1.0, 0.6]),
        "absence": st.sampled_from([0.0, 0.3]),
        "policy": st.sampled_from(["dice", "dice", None]),
    }
)


def execute(w, program, expected, expected_scores, deaths=()):
    submitted, gone, count = {}, set(), 0
    closed = set()
    dies, back = dict(deaths), None
    for at, (kind, *arguments) in enumerate(program):
        w.now += 1.0
        if at in dies:
            w.die()
            back = at + dies[at]
        if at == back:
            w.back()
        if kind == "submit":
            (s,) = arguments
            session = s.session + 10 * sum(1 for c in closed if c % 10 == s.session)
            events = []
            more = {}
            if s.scored:  # places within the prompt, the last one often behind its end
                s.max_tokens = 0
                s.scored = sorted((min(place, len(s.prompt) - 1), target) for place, target in s.scored)
                places, targets = zip(*s.scored, strict=True)
                more = {"places": pack(places), "targets": pack(targets)}
            for copy in range(s.count):
                count += 1
                event = w.submit(
                    count,
                    s.prompt,
                    session=session,
                    max_tokens=s.max_tokens,
                    seed=s.seed + copy,
                    stop_token_ids=s.stops,
                    priority=s.priority,
                    deadline=None if s.deadline is None else w.now + s.deadline,
                    owner=OWNERS[s.session],
                    **more,
                )
                submitted[event.request] = (s, s.seed + copy)
                events.append(event)
            w.turn(*events)
        elif kind == "cancel" and submitted:
            which, keep = arguments
            w.turn(CancelRequest(list(submitted)[which % len(submitted)], keep))
        elif kind == "close":
            session = arguments[0] + 10 * sum(1 for c in closed if c % 10 == arguments[0])
            closed.add(session)
            gone |= {r for r in submitted if r >> 32 == session and r not in w.finished}
            w.turn(CancelSession(session))
        else:
            for _ in range(arguments[0]):
                events = []
                if kind != "result" and w.replies:
                    events.append(w.replies.popleft())
                if kind != "reply" and w.executor.plans:
                    events.append(w.executor.run())
                if events:
                    w.turn(*events)
    if w.core.lifecycle.down is not None:
        w.back()
    w.run(steps=5000)
    w.now += 100.0
    w.turn()
    w.run(steps=5000)
    w.check_idle()
    w.check_drafts()
    assert set(w.finished) == set(submitted) - gone
    size = w.info.pages * w.info.page_size
    for request, finished in w.finished.items():
        s, seed = submitted[request]
        limit = max(0, min(s.max_tokens, w.info.context - len(s.prompt), size - len(s.prompt) + 1))
        want = expected(s.prompt, seed, limit, s.stops)
        got = w.output.get(request, [])
        assert got == want[: len(got)]
        assert finished.output <= len(got)
        assert finished.accepted <= max(0, finished.output - 1)
        assert w.cache.branches[request] == s.prompt + want[: finished.output]
        if finished.reason in ("stop", "length"):
            assert finished.output == len(got) == len(want)
            assert (finished.reason == "stop") == (bool(want) and want[-1] in s.stops)
            assert finished.cached + finished.computed == finished.prompt
            assert finished.computed >= 1
            if s.scored:
                places, targets = zip(*s.scored, strict=True)
                wanted = expected_scores(s.prompt, places, targets)
                assert unpack_floats(finished.scores).tolist() == wanted
        elif finished.reason == "error":
            if finished.error == "internal":
                assert "died" in finished.message
                assert len(dies) > 1
                continue
            too_long = len(s.prompt) > min(w.info.context, size)
            assert finished.error == ("too_long" if too_long else "overloaded")
            assert finished.output == 0


@tried(35, 150)
@given(worlds, programs)
def test_random_programs(world, expected, expected_scores, options, program):
    execute(world(**options), program, expected, expected_scores)


@pytest.mark.parametrize("page_size", [1, 4])
@tried(20, 100)
@given(worlds, programs)
def test_random_programs_on_the_real_cache(
    world, expected, expected_scores, page_size, options, program
):
    options = {**options, "pages": -(-options["pages"] // page_size)}
    cache = RealCache(options["pages"], page_size)
    execute(world(**options, page_size=page_size, cache=cache), program, expected, expected_scores)


@pytest.mark.parametrize("page_size", [1, 4])
@tried(35, 150)
@given(worlds, st.one_of(st.just({}), speculations), programs, deaths)
def test_random_programs_in_which_executors_die(
    world, expected, expected_scores, page_size, options, speculation, program, deaths
):
    """No token is lost or doubled, and nothing of the lost KV is used."""
    options = {**options, **speculation, "pages": -(-options["pages"] // page_size)}
    cache = RealCache(options["pages"], page_size)
    w = world(**options, page_size=page_size, cache=cache)
    execute(w, program, expected, expected_scores, deaths)


BASE = [i * i % 97 for i in range(60)]
forks = st.lists(  # of a few long prefixes, which take several steps
    st.one_of(
        submissions.flatmap(
            lambda kind: st.builds(
                lambda at, own: (
                    kind[0],
                    SimpleNamespace(**{**vars(kind[1]), "prompt": BASE[:at] + own}),
                ),
                st.sampled_from([18, 35, 50, 60]),
                st.lists(st.integers(0, 2), max_size=3),
            )
        ),
        st.tuples(st.just("cancel"), st.integers(0, 40), st.one_of(st.none(), st.integers(0, 10))),
        st.tuples(st.just("reply"), st.integers(1, 3)),
        st.tuples(st.just("result"), st.integers(1, 2)),
        st.tuples(st.just("both"), st.just(1)),
    ),
    min_size=3,
    max_size=24,
)


@pytest.mark.parametrize("page_size", [1, 4])
@tried(55, 300)
@given(worlds, st.sampled_from([70, 110, 300]), forks, st.one_of(st.just(()), deaths))
def test_random_forks_of_long_prefixes(
    world, expected, expected_scores, page_size, options, slots, program, deaths
):
    """Siblings get a prefix that steps under way compute, whatever becomes of who computes it."""
    pages = -(-slots // page_size)
    options = {**options, "pages": pages, "context": 1000, "budget": 16, "mixed_tokens": 16}
    w = world(**options, page_size=page_size, cache=RealCache(pages, page_size))
    execute(w, program, expected, expected_scores, deaths)


def returns(dice, length):
    """Conversations that do not fit into the pool together, and come back."""
    for _ in range(length):
        own, tail = dice.randrange(4), [dice.randrange(3) for _ in range(dice.randrange(9))]
        submit = SimpleNamespace(
            session=dice.randint(1, 3),
            prompt=[own + 3 * i for i in BASE[: dice.choice([18, 40])]] + tail,
            max_tokens=dice.choice([0, 1, 2, 3, 20]), seed=0, stops=[], priority=dice.choice([0, 0, 1]),
            deadline=None, count=1, scored=None,
        )  # fmt: skip
        yield dice.choice(
            [("submit", submit)] * 4
            + [("both", dice.choice([2, 9, 30])), ("result", 2), ("cancel", dice.randrange(40), None)]
        )


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("flips", [0.0, 0.2])
def test_random_returns_to_kv_that_left_the_device(world, expected, expected_scores, page_size, flips):
    """What is loaded again is what was saved, or is computed; with executors that die."""
    loaded = lost = most = 0
    for seed in range(examples(6, 200)):
        dice = random.Random(seed)
        # A plan moves one block beside decodes, and four without, or as many as there are.
        block_bytes = loads.CPU_BYTES if seed % 2 else 0
        pages, blocks = dice.choice([60, 80, 110]) // page_size, dice.choice([3, 20, 60])
        options = {"rows": dice.randint(1, 4), "budget": dice.choice([16, 64]), "max_waiting": 1000}
        cache = RealCache(pages, page_size, host=blocks)
        w = world(
            pages=pages, page_size=page_size, cache=cache, host_blocks=blocks, flips=flips,
            in_flight=dice.randint(1, 2), block_bytes=block_bytes, **options,
        )  # fmt: skip
        died = [(dice.randrange(40), dice.randrange(3))] if seed % 3 == 0 else []
        execute(w, list(returns(dice, 40)), expected, expected_scores, died)
        loaded, lost = loaded + w.executor.loaded, lost + w.executor.lost
        assert w.core.lifecycle.retractions["lost"] <= w.executor.lost
        # pages of decodes are saved at once
        assert not block_bytes or w.executor.most_moved <= loads.ALONE + options["rows"]
        most = max(most, w.executor.most_moved)
    assert most > 2 * loads.ALONE
    assert loaded > 60
    assert (lost > 5) == (flips > 0)


def test_random_returns_to_kv_that_went_to_a_disk(world, expected, expected_scores):
    """Tiers of every size: outputs are those without. A third of the executors die, their disk stays."""
    brought = 0
    for seed in range(examples(12, 300)):
        dice = random.Random(seed)
        pages, blocks = dice.choice([60, 80, 110]), dice.choice([2, 6, 20])
        options = {"rows": dice.randint(1, 4), "budget": dice.choice([16, 64]), "max_waiting": 1000}
        cache = RealCache(pages, 1, host=blocks, disk=OnDisk(dice.choice([3, 15, 60])))
        w = world(pages=pages, cache=cache, host_blocks=blocks, in_flight=dice.randint(1, 2), **options)
        w.executor.overtaken = True
        died = [(dice.randrange(40), dice.randrange(3))] if seed % 3 == 0 else []
        execute(w, list(returns(dice, 40)), expected, expected_scores, died)
        brought += cache.cache.tiers(1)[2].hit_tokens
    assert brought > 30


@tried(20, 100)
@given(worlds, programs)
def test_random_programs_in_which_rows_sit_steps_out(world, expected, expected_scores, options, program):
    execute(world(**options, absence=0.5), program, expected, expected_scores)


@pytest.mark.parametrize("page_size", [1, 4])
@tried(35, 150)
@given(worlds, speculations, programs)
def test_random_programs_with_drafts(
    world, expected, expected_scores, page_size, options, speculation, program
):
    """Whatever is guessed, and however much of it is right: nothing that anybody sees is different."""
    options = {**options, **speculation, "pages": -(-options["pages"] // page_size)}
    cache = RealCache(options["pages"], page_size)
    execute(world(**options, page_size=page_size, cache=cache), program, expected, expected_scores)


pressure = st.fixed_dictionaries(
    {
        "pages": st.integers(12, 40),
        "rows": st.integers(2, 5),
        "budget": st.sampled_from([16, 64]),
        "lookahead": st.integers(1, 6),
        "in_flight": st.integers(1, 2),
        "quantum_steps": st.sampled_from([1, 3, 32]),
    }
)
crowds = st.lists(
    st.tuples(
        st.integers(1, 3),  # session
        st.integers(1, 6),  # prompt
        st.integers(5, 30),  # max_tokens
        st.sampled_from([0, 0, 1]),  # priority
        st.sampled_from([(), (), (5, 50), tuple(range(0, 97, 13))]),  # stops
        st.one_of(st.none(), st.none(), st.integers(1, 80)),  # cancelled at this turn
    ),
    min_size=2,
    max_size=8,
)


@pytest.mark.parametrize("page_size", [1, 4])
@tried(12, 50)
@given(pressure, crowds, st.lists(st.booleans(), max_size=60))
def test_random_pressure(world, expected, page_size, options, crowd, choices):
    """A pool far too small for all: retraction after retraction, and yet every token is right."""
    under_pressure(world, expected, page_size, options, crowd, choices)


@pytest.mark.parametrize("page_size", [1, 4])
@tried(12, 50)
@given(pressure, speculations, crowds, st.lists(st.booleans(), max_size=60))
def test_random_pressure_with_drafts(world, expected, page_size, options, speculation, crowd, choices):
    under_pressure(world, expected, page_size, {**options, **speculation}, crowd, choices)


def under_pressure(world, expected, page_size, options, crowd, choices):
    pages = options["pages"] // page_size
    cache = RealCache(pages, page_size, options.get("states", 0), options.pop("windows", None))
    w = world(**{**options, "pages": pages}, page_size=page_size, cache=cache)
    submits = [
        w.submit(
            i,
            [i] * prompt,
            session=session,
            max_tokens=limit,
            seed=i,
            priority=priority,
            stop_token_ids=list(stops),
            owner=OWNERS[session],
        )
        for i, (session, prompt, limit, priority, stops, _) in enumerate(crowd)
    ]
    w.turn(*submits)
    turn = 0
    while w.replies or w.executor.plans:
        turn += 1
        assert turn < 5000
        w.now += 1.0
        w.turn(*(CancelRequest(s.request) for s, c in zip(submits, crowd, strict=True) if c[5] == turn))
        if w.executor.plans and (not w.replies or (choices and choices[turn % len(choices)])):
            w.result()
        elif w.replies:
            w.settled()
    w.check_idle()
    w.check_drafts()
    for submit, (_, prompt, limit, _, stops, cancelled) in zip(submits, crowd, strict=True):
        start = [submit.request & 0xFFFFFFFF] * prompt
        want = expected(start, submit.sampling.seed, min(limit, pages * page_size - prompt + 1), stops)
        finished = w.finished[submit.request]
        got = w.output.get(submit.request, [])
        assert got == want[: len(got)]
        assert w.cache.branches[submit.request] == start + want[: finished.output]
        if finished.reason == "cancelled":
            assert cancelled is not None
        else:
            assert finished.output == len(want) == len(got)


arrivals = st.lists(
    st.tuples(
        st.integers(0, 60),  # the turn in which it comes
        st.integers(1, 5),  # session
        st.integers(1, 20),  # prompt
        st.integers(1, 25),  # max_tokens
        st.sampled_from([0, 0, 0, 1, -1, 8]),  # priority
    ),
    min_size=6,
    max_size=24,
)


@pytest.mark.parametrize("page_size", [1, 4])
@tried(12, 30)
@given(
    st.integers(1, 4), st.sampled_from([1, 2, 5]), st.sampled_from([30, 60, 600]), arrivals,
    st.sampled_from(["", "a"]), st.one_of(st.just({}), speculations),
)  # fmt: skip
def test_random_crowds(world, expected, page_size, rows, quantum, slots, crowd, owner, speculation):
    """Rows for a few of many, taken back and forth. Every output is what it is without that, and what
    is computed twice is counted and bounded: two steps are in flight, and pages may be evicted."""
    pages = slots // page_size
    w = world(
        rows=rows, pages=pages, page_size=page_size, budget=16, quantum_steps=quantum,
        cache=RealCache(pages, page_size), **speculation,
    )  # fmt: skip
    coming = sorted(enumerate(crowd), key=lambda item: item[1][0])
    submits = {}
    turn = 0
    while coming or w.replies or w.executor.plans:
        turn += 1
        assert turn < 5000, "somebody waits for ever"
        events = []
        while coming and coming[0][1][0] <= turn:
            i, (_, session, prompt, limit, priority) = coming.pop(0)
            more = {"session": session, "priority": priority, "owner": owner if session < 3 else ""}
            submits[i] = w.submit(i, [i] * prompt, max_tokens=limit, seed=i, **more)
            events.append(submits[i])
        if w.replies:
            events.append(w.replies.popleft())
        elif w.executor.plans:
            events.append(w.executor.run())
        w.turn(*events)
    w.check_idle()
    w.check_drafts()
    for i, submit in submits.items():
        _, _, prompt, limit, _ = crowd[i]
        want = expected([i] * prompt, i, min(limit, pages * page_size - prompt + 1))
        assert w.output[submit.request] == want
        assert w.finished[submit.request].output == len(want)
    least = sum(f.computed + f.output - 1 for f in w.finished.values())
    if speculation:  # what a retraction drops may be a draft, or less than was asked for
        refused = w.executor.drafted - w.executor.accepted + w.executor.absent
        assert least <= w.executor.computed <= least + w.core.lifecycle.computed_twice + refused
        return
    assert w.executor.computed == least + w.core.lifecycle.computed_twice
    retractions = sum(w.core.lifecycle.retractions.values())
    if slots == 600:  # nothing is evicted
        assert w.core.lifecycle.computed_twice <= 2 * 16 * retractions
    else:
        assert w.core.lifecycle.computed_twice <= (2 * 16 + slots) * retractions


states = st.fixed_dictionaries(
    {
        "states": st.sampled_from([4, 7, 12, 60]),
        "in_flight": st.integers(1, 2),
        "absence": st.sampled_from([0.0, 0.0, 0.3]),
    }
)


@pytest.fixture
def small(monkeypatch):
    """Prompts here are short: so snapshots are close to each other."""
    monkeypatch.setattr(snapshots, "NEAR", 1)
    monkeypatch.setattr(snapshots, "STRIDE", 5)


@pytest.mark.parametrize("drafts", [False, True])
@tried(40, 300)
@given(worlds, states, speculations, programs, st.one_of(st.just(()), deaths))
def test_random_programs_with_states(
    world, expected, expected_scores, small, drafts, options, fixed, speculation, program, deaths
):
    """Each step reads the state of just the tokens before it, and nothing that anybody sees is
    different from a model without states."""
    options = {**options, **speculation} if drafts else options
    w = world(**options | fixed, cache=RealCache(options["pages"], 1, fixed["states"]))
    execute(w, program, expected, expected_scores, deaths)


@tried(70, 400)
@given(worlds, states, st.sampled_from([70, 110, 300]), forks, st.one_of(st.just(()), deaths))
def test_random_forks_with_states(
    world, expected, expected_scores, small, options, fixed, pages, program, deaths
):
    options = {**options, **fixed, "pages": pages, "context": 1000, "budget": 16, "mixed_tokens": 16}
    execute(
        world(**options, cache=RealCache(pages, 1, fixed["states"])),
        program,
        expected,
        expected_scores,
        deaths,
    )


@pytest.mark.parametrize("drafts", [False, True])
@tried(25, 150)
@given(pressure, states, speculations, crowds, st.lists(st.booleans(), max_size=60))
def test_random_pressure_with_states(
    world, expected, small, drafts, options, fixed, speculation, crowd, choices
):
    options = {**options, **speculation} if drafts else options
    under_pressure(world, expected, 1, {**options, **fixed}, crowd, choices)


windows = st.fixed_dictionaries(
    {
        "window": st.sampled_from([2, 3, 6, 20]),
        "window_pages": st.sampled_from([0, 5, 30, 300]),  # beyond those that one request needs
        "in_flight": st.integers(1, 2),
        "absence": st.sampled_from([0.0, 0.0, 0.3]),
    }
)


def with_windows(options, fixed):
    """The options of a world, and the windows of its cache."""
    options = {**options, **fixed}
    slack = (options["in_flight"] + 1) * (1 + options.get("drafts", 0))
    found = Windows(fixed["window"], 0, options["budget"], slack)
    found = found._replace(pages=found.least + fixed["window_pages"])
    return {**options, "window_pages": found.pages}, found


@pytest.mark.parametrize("drafts", [False, True])
@tried(40, 300)
@given(worlds, windows, speculations, programs, st.one_of(st.just(()), deaths))
def test_random_programs_with_windows(
    world, expected, expected_scores, small, drafts, options, fixed, speculation, program, deaths
):
    """No step reads a window page that is not its row's, and nothing that anybody sees is different."""
    options, found = with_windows({**options, **speculation} if drafts else options, fixed)
    w = world(**options, cache=RealCache(options["pages"], 1, windows=found))
    execute(w, program, expected, expected_scores, deaths)


@tried(55, 300)
@given(worlds, windows, st.sampled_from([70, 110, 300]), forks, st.one_of(st.just(()), deaths))
def test_random_forks_with_windows(
    world, expected, expected_scores, small, options, fixed, pages, program, deaths
):
    options = {**options, "pages": pages, "context": 1000, "budget": 16, "mixed_tokens": 16}
    options, found = with_windows(options, fixed)
    w = world(**options, cache=RealCache(pages, 1, windows=found))
    execute(w, program, expected, expected_scores, deaths)


@pytest.mark.parametrize("drafts", [False, True])
@tried(25, 150)
@given(pressure, windows, speculations, crowds, st.lists(st.booleans(), max_size=60))
def test_random_pressure_with_windows(
    world, expected, small, drafts, options, fixed, speculation, crowd, choices
):
    options, found = with_windows({**options, **speculation} if drafts else options, fixed)
    under_pressure(world, expected, 1, {**options, "windows": found}, crowd, choices)


def test_who_was_denied_window_pages_does_not_ask_for_them_in_each_turn(world, expected, small):
    """It outranks who runs, and there are enough other pages: nothing came of its being entitled."""
    outranking = (3, 6, 28, 1, (), None)
    crowd = [(3, 4, 7, 0, (), None), (1, 1, 29, 1, (), None), (1, 4, 16, 1, (5, 50), None), outranking]
    crowd += [(1, 2, 20, 0, (), None), (2, 3, 6, 0, (), None), (2, 6, 27, 0, (), None), outranking]
    fixed = {"window": 2, "window_pages": 0, "in_flight": 2, "absence": 0.3}
    options = {"pages": 33, "rows": 3, "budget": 16, "lookahead": 3, "quantum_steps": 3}
    options, found = with_windows(options, fixed)
    under_pressure(world, expected, 1, {**options, "windows": found}, crowd, [])
