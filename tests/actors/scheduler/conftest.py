"""A world for the pure core: a cache and an executor that check everything they are told.

`FakeExecutor` keeps "KV" in slots: a slot holds the hash of all tokens up to its position,
computed from what the slot before holds. A sampled token is a function of that hash, the seed
and the index of the output token. So a page that is overwritten, handed out twice or not
computed at all shows as a token that differs from `reference`.
"""

import random
from collections import Counter, deque
from types import SimpleNamespace

import msgspec
import pytest

from ramify.actors.scheduler.core import Scheduler
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.messages import (
    Denied,
    Finished,
    Granted,
    Grown,
    Settle,
    Settled,
    Submit,
)
from ramify.protocol.plan import (
    ExecutorDown,
    ExecutorInfo,
    StepPlan,
    StepResult,
    pack,
    pack_floats,
    unpack,
)
from ramify.protocol.sampling import SamplingParams, TokenLogprobs

VOCAB = 97
ROOT = 12345


def extend_hash(state, token):
    return (state * 1000003 + token + 1) % (1 << 61)


def sample(state, seed, index):
    return (state * 31 + seed * 7919 + index * 104729) // 7 % VOCAB


def score(state, target):
    """The log-probability of `target` behind tokens with that hash. Exact as a float32."""
    return -((state * 17 + target * 6007) // 11 % 4096) / 256


def reference_scores(tokens, places, targets):
    """What a request is told of these targets, behind these places of its branch."""
    state, states = ROOT, []
    for token in tokens:
        state = extend_hash(state, token)
        states.append(state)
    return [score(states[place], target) for place, target in zip(places, targets, strict=True)]


def reference(tokens, seed, limit, stops=(), sampled=0):
    """The output of an uninterrupted generation."""
    state = ROOT
    for token in tokens:
        state = extend_hash(state, token)
    output = []
    while len(output) < limit:
        token = sample(state, seed, sampled + len(output))
        output.append(token)
        if token in stops:
            break
        state = extend_hash(state, token)
    return output


class FakeCache:
    """One page per token; the resident prefixes are the keys of a dict."""

    def __init__(self, pages):
        self.total = pages
        self.pages = list(range(pages))
        self.branches = {}
        self.resident = {}  # prefix -> page
        self.locks = Counter()
        self.computing = {}  # prefix -> request
        self.runs = {}

    def settle(self, settle):
        for commit in settle.commits:
            self._commit(commit)
        grown = [self._grow(grow) for grow in settle.grows]
        verdicts = [self._acquire(acquire) for acquire in settle.acquires]
        return Settled(verdicts, grown, len(self.pages), self._evictable(), self.referenced())

    def put(self, branch, tokens):
        """A branch with `tokens`, of which nothing is computed yet (by it)."""
        self.branches[branch] = list(tokens)

    def check_idle(self):
        assert not self.runs
        assert not self.computing
        assert not self.referenced()
        assert sorted([*self.pages, *self.resident.values()]) == list(range(self.total))

    def moved(self, executor, now):
        """It has no disk."""
        return ()

    def renew(self, pages, state_slots=0, host_blocks=0):
        assert not self.runs
        self.total, self.pages = pages, list(range(pages))
        self.resident.clear()
        self.locks.clear()

    def referenced(self):
        held = sum(len(run.own) for run in self.runs.values())
        return held + sum(1 for prefix in self.resident if self.locks[prefix])

    def _evictable(self):
        return sum(1 for prefix in self.resident if not self.locks[prefix])

    def _take(self, count):
        if count > len(self.pages) + self._evictable():
            return None
        victims = sorted((p for p in self.resident if not self.locks[p]), key=len, reverse=True)
        for prefix in victims[: max(0, count - len(self.pages))]:
            self.pages.append(self.resident.pop(prefix))
        taken, self.pages = self.pages[:count], self.pages[count:]
        return taken

    def _acquire(self, acquire):
        request = acquire.request
        assert request not in self.runs
        if acquire.branch not in self.branches:
            return Denied(request, "gone")
        tokens = self.branches[acquire.branch]
        prefixes = [tuple(tokens[: i + 1]) for i in range(len(tokens))]
        resident = 0
        while resident < len(tokens) and prefixes[resident] in self.resident:
            resident += 1
        last = len(tokens) - 1 if acquire.rerun is None else min(acquire.rerun, len(tokens) - 1)
        owners = [self.computing[p] for p in prefixes[resident:last] if p in self.computing]
        if owners:
            return Denied(request, "shared", resident=resident, on=owners[0])
        cached = min(resident, last)
        for prefix in prefixes[:cached]:
            self.locks[prefix] += 1
        need = len(tokens) + acquire.extra - cached
        short = need + acquire.leave - len(self.pages) - (0 if acquire.spare else self._evictable())
        own = self._take(need) if short <= 0 else None
        if own is None:
            for prefix in prefixes[:cached]:
                self.locks[prefix] -= 1
            return Denied(request, "memory", resident=resident, short=short)
        for prefix in prefixes[resident:]:
            self.computing[prefix] = request
        table = [self.resident[p] for p in prefixes[:cached]] + own
        own = dict(zip(range(cached, cached + need), own, strict=True))
        self.runs[request] = SimpleNamespace(
            branch=acquire.branch, tokens=list(tokens), locked=prefixes[:cached], own=own, end=len(table)
        )
        history = pack(tokens) if acquire.history else b""
        return Granted(request, cached, pack(tokens[cached:]), pack(table), history)

    def _grow(self, grow):
        run = self.runs[grow.request]
        assert grow.tokens > 0
        pages = self._take(grow.tokens)
        if pages is None:
            return Grown(grow.request, b"")
        run.own.update(zip(range(run.end, run.end + grow.tokens), pages, strict=True))
        run.end += grow.tokens
        return Grown(grow.request, pack(pages))

    def _commit(self, commit):
        run = self.runs[commit.request]
        assert commit.final or not commit.tokens
        tokens = run.tokens + list(unpack(commit.tokens))
        assert commit.computed <= min(len(tokens), run.end)
        for position in range(commit.computed):
            prefix = tuple(tokens[: position + 1])
            if self.computing.get(prefix) == commit.request:
                del self.computing[prefix]
            if position in run.own and prefix not in self.resident:
                self.resident[prefix] = run.own.pop(position)
                self.locks[prefix] += 1
                run.locked.append(prefix)
        if commit.final:
            self.computing = {p: r for p, r in self.computing.items() if r != commit.request}
            self.pages += run.own.values()
            for prefix in run.locked:
                self.locks[prefix] -= 1
            del self.runs[commit.request]
            if self.branches.get(run.branch) == run.tokens:
                self.branches[run.branch] = tokens


class FakeExecutor:
    """Runs plans strictly in order and checks each against its rows."""

    def __init__(self, info, acceptance=0.0, generous=1.0, absence=0.0):
        self.info = info
        self.dice = random.Random(7)
        self.absence = absence  # chance that a row sits a step out
        self.absent = 0
        self.acceptance = acceptance  # chance that a draft is what is sampled behind it
        self.generous = generous  # chance that the drafter gives one draft more
        self.drafted = self.accepted = self.asked = self.copied = 0
        self.plans = deque()
        self.rows = {}
        self.kv = {}
        self.states = {}  # by slot: the hash of the tokens that it stands for
        self.seen = {}  # by window page: the same, up to its position
        self.host = {}  # by slot: a block's key and KV
        self.flips = 0.0  # chance that a block cannot be loaded
        self.loaded = self.lost = 0  # blocks
        self.most_moved = 0  # blocks in a plan
        self.overtaken = False  # a disk may fill a slot that a plan under way still saves to
        self.computed = 0
        self.ran = []  # (tokens extended, rows decoded) of every step

    def run(self):
        plan = self.plans.popleft()
        self.most_moved = max(self.most_moved, len(plan.saves) + len(plan.loads))
        for block in plan.saves:
            self.host[block.slot] = block.key, [self.kv[at] for at in self._places(block)]
        self._copy(unpack(plan.copies))
        lost = self._load(plan.loads)
        for row in unpack(plan.closes):
            del self.rows[row]
        for opened in plan.opens:
            assert opened.row not in self.rows
            assert 0 <= opened.row < self.info.max_rows
            self.rows[opened.row] = SimpleNamespace(
                pages=list(unpack(opened.pages)),
                length=opened.cached,
                last=None,
                sampling=opened.sampling,
                index=opened.sampled,
                history=list(unpack(opened.history)),
                windows=[-1] * ((len(opened.pages) - len(opened.windows)) // 4)
                + list(unpack(opened.windows)),
            )
        for grow in plan.grows:
            self.rows[grow.row].pages += unpack(grow.pages)
            self.rows[grow.row].windows += unpack(grow.windows)
        work = 0
        sampling = []
        scores = []
        for extend in plan.extends:
            row = self.rows[extend.row]
            tokens = unpack(extend.tokens)
            assert extend.start == row.length
            assert len(tokens) > 0
            for token in tokens:
                self._forward(row, token)
            work += len(tokens)
            for place, target in zip(unpack(extend.places), unpack(extend.targets), strict=True):
                assert extend.start <= place < row.length
                scores.append(score(self._state(row, place + 1), target))
            if extend.sample:
                sampling.append(extend.row)
        decodes = unpack(plan.decodes).tolist()
        before = [self.rows[extend.row].length - len(extend.tokens) // 4 for extend in plan.extends]
        before += [self.rows[row].length for row in decodes]
        asked = unpack(plan.drafts).tolist() or [0] * len(decodes)
        assert len(asked) == len(decodes)
        assert all(0 <= count <= self.info.max_drafts for count in asked)
        self.asked += sum(asked)
        lines = len(decodes) + sum(asked)
        assert lines + len(sampling) <= self.info.max_rows
        assert not set(decodes) & {extend.row for extend in plan.extends}
        assert len(set(decodes)) == len(decodes)
        out = {row for row in sampling + decodes if self.dice.random() < self.absence}
        if self.info.state_slots:  # what may sit out has its last token in a step of its own
            out -= {extend.row for extend in plan.extends if len(extend.tokens) > 4}
        self.absent += len(out)
        for extend in plan.extends:
            if extend.row in out:  # its last token is run again
                row = self.rows[extend.row]
                row.length, row.last = row.length - 1, unpack(extend.tokens)[-1]
        for index in decodes:
            assert self.rows[index].last is not None
            if index not in out:
                self._forward(self.rows[index], self.rows[index].last)
        self.ran.append((work, len(decodes)))
        assert work + lines <= self.info.step_tokens
        given = [
            self._guess(self.rows[row], 0 if row in out else count)
            for row, count in zip(decodes, asked, strict=True)
        ]
        for index, length in zip([e.row for e in plan.extends] + decodes, before, strict=True):
            self._read_windows(self.rows[index], length)
        given = [[]] * len(sampling) + given
        sampling += decodes
        runs = [
            [] if row in out else self._verify(self.rows[row], drafts)
            for row, drafts in zip(sampling, given, strict=True)
        ]
        if self.info.state_slots:
            ran = [extend.row for extend in plan.extends] + decodes
            self._step_states(unpack(plan.states).tolist(), ran, before, out)
        else:
            assert not plan.states
        computed = work + len(decodes) + sum(map(len, given))
        self.computed += computed
        self.drafted += sum(map(len, given))
        self.accepted += sum(len(run) - 1 for run in runs if run)
        logprobs = []
        if any(self.rows[index].sampling.logprobs for index in sampling):
            logprobs = [
                TokenLogprobs(-1.0, [token], [-1.0]) if self.rows[index].sampling.logprobs else None
                for index, run in zip(sampling, runs, strict=True)
                for token in run
            ]
        counts = drafted = b""
        if plan.drafts or out:
            counts, drafted = pack(map(len, runs)), pack(map(len, given))
        return StepResult(
            plan.step, pack(sampling), pack([token for run in runs for token in run]), computed, 1000,
            logprobs, pack_floats(scores), counts, drafted, lost=pack(lost),
        )  # fmt: skip

    def _step_states(self, slots, rows, before, out):
        """Each row reads the state of just its tokens before the step, and writes that behind them."""
        sources, targets = slots[::2], slots[1::2]
        assert len(sources) == len(targets) == len(rows)
        assert len(set(targets)) == len(targets)
        assert not set(targets) & set(sources)
        assert all(0 < target <= self.info.state_slots for target in targets)
        for source, target, index, length in zip(sources, targets, rows, before, strict=True):
            row = self.rows[index]
            if source == 0:
                assert length == 0
            else:
                assert self.states[source] == self._state(row, length), "another state than the row's"
            self.states[target] = self._state(row, length if index in out else row.length)

    def _load(self, blocks):
        lost = []
        for block in blocks:
            self.loaded += 1
            if self.dice.random() < self.flips:
                lost.append(block.slot)
                continue
            key, kept = self.host[block.slot]
            if key != block.key and self.overtaken:  # their seals tell
                lost.append(block.slot)
                continue
            assert key == block.key
            for at, kv in zip(self._places(block), kept, strict=True):
                if at >= 0:
                    self.kv[at] = kv
        self.lost += len(lost)
        return lost

    def _places(self, block):
        size = self.info.page_size
        return [page * size + i for page in unpack(block.pages) for i in range(size)]

    def _copy(self, pages):
        size = self.info.page_size
        slots = [(page * size + i) for page in pages for i in range(size)]
        pairs = [(slots[i], slots[i + size]) for i in range(len(slots)) if i // size % 2 == 0]
        assert len({target for _, target in pairs}) == len(pairs)
        read = {target: self.kv[source] for source, target in pairs}  # all before one is written
        self.copied += len(pages) // 2
        self.kv.update(read)

    def _guess(self, row, most):
        """Drafts behind the row's last token, which has run: each right by chance. They run at once."""
        drafts = []
        seed, index = row.sampling.seed, row.index
        for i in range(most):
            if self.dice.random() >= self.generous:
                break
            token = sample(self._state(row, row.length), seed, index + i)
            if self.dice.random() >= self.acceptance:
                token = (token + 1) % VOCAB
            drafts.append(token)
            self._forward(row, token)
        row.length -= len(drafts)
        return drafts

    def _verify(self, row, drafts):
        """What is sampled: as many of the drafts as agree, and one token more."""
        run = [self._sample(row)]
        for draft in drafts:
            if draft != run[-1]:
                break
            row.length += 1
            run.append(self._sample(row))
        return run

    def _slot(self, row, position):
        size = self.info.page_size
        return row.pages[position // size] * size + position % size

    def _forward(self, row, token):
        position = row.length
        before = self.kv[self._slot(row, position - 1)][1] if position else ROOT
        self.kv[self._slot(row, position)] = (before, extend_hash(before, token))
        if self.info.window_pages:
            assert 0 <= row.windows[position] < self.info.window_pages
            self.seen[row.windows[position]] = extend_hash(before, token)
        row.length += 1

    def _read_windows(self, row, length):
        """What a step reads that began at `length`: all that it writes is written."""
        if self.info.window_pages:
            assert len(row.windows) == len(row.pages)
            for position in range(max(0, length - self.info.window + 1), row.length):
                _, expected = self.kv[self._slot(row, position)]
                assert self.seen[row.windows[position]] == expected, "another row's KV, or older"

    def _state(self, row, length):
        state = ROOT
        for position in range(length):  # the whole context must be intact
            before, after = self.kv[self._slot(row, position)]
            assert before == state, f"position {position} of {row.length} was overwritten"
            state = after
        return state

    def _sample(self, row):
        row.last = sample(self._state(row, row.length), row.sampling.seed, row.index)
        row.index += 1
        return row.last


class DicePolicy:
    """Instead of `Speculation`: any number of drafts for any row, whatever they are worth."""

    def __init__(self, most):
        self.most = most
        self.dice = random.Random(11)

    def choose(self, records, room, *, changed):
        drafts = []
        for _ in records:
            drafts.append(min(room, self.dice.randint(0, self.most)))
            room -= drafts[-1]
        return drafts

    def landed(self, record, asked, drafted, accepted):
        assert 0 <= accepted <= drafted <= asked

    def took(self, rows, drafts, depth, tokens, seconds, late=0.0, missing=0):
        assert tokens <= rows + drafts
        assert seconds is None or rows <= tokens
        assert missing >= 0

    def ended(self, tokens):
        assert tokens > 0


class World:
    """The core between the fakes. Time is `now`; nothing happens unless a test says so."""

    def __init__(
        self,
        *,
        pages=64,
        page_size=1,
        rows=4,
        budget=16,
        context=1000,
        cache=None,
        logits_cost=0.0,
        drafts=0,
        acceptance=0.0,
        generous=1.0,
        absence=0.0,
        policy=None,
        states=0,
        window=0,
        window_pages=0,
        host_blocks=0,
        flips=0.0,
        block_bytes=0,
        **config,
    ):
        self.info = ExecutorInfo(
            model="fake",
            architecture="Fake",
            parameters=1,
            vocab_size=VOCAB,
            context=context,
            page_size=page_size,
            pages=pages,
            max_rows=rows,
            step_tokens=budget,
            device="cpu",
            dtype="float32",
            attention="fake",
            eos_token_ids=[],
            kv_bytes_per_token=1,
            load_seconds=0.0,
            logits_cost=logits_cost,
            drafter="dice" if drafts else "",
            max_drafts=drafts,
            state_slots=states,
            window=window,
            window_pages=window_pages,
            host_blocks=host_blocks,
            block_bytes=block_bytes,
        )
        config.setdefault("lookahead", 4)
        self.core = Scheduler(self.info, ScheduleConfig(**config))
        self.cache = cache or FakeCache(pages)
        self.executor = FakeExecutor(self.info, acceptance, generous, absence)
        self.executor.flips = flips
        if policy == "dice" and drafts:
            self.core.planner.drafts.speculation = DicePolicy(drafts)
        self.now = 1.0
        self.replies = deque()  # of the cache, not delivered yet
        self.settles = []
        self.sent = []  # plans
        self.output = {}
        self.logprobs = {}
        self.finished = {}
        self.order = []
        self.messages = []

    def submit(
        self, request=1, tokens=(1, 2, 3), *, session=1, max_tokens=4, seed=0, branch=None, **more
    ):
        """A Submit on a branch of its own (unless `branch` exists); not handled yet."""
        ident = session << 32 | request
        branch = branch if branch is not None else ident
        if branch not in self.cache.branches and tokens is not None:
            self.cache.put(branch, tokens)
        sampling = more.pop("sampling", None) or SamplingParams(seed=seed)
        prompt = len(self.cache.branches.get(branch, ())) or len(tokens or ())
        more.setdefault("arrived", self.now)
        return Submit(
            request=ident,
            branch=branch,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            **more,
        )

    def turn(self, *events):
        """One wake-up of the actor."""
        core = self.core
        for event in events:
            core.handle(event, self.now)
        core.expire(self.now)
        if core.lifecycle.down is not None and (renewed := core.renewed()) is not None:
            self.cache.renew(
                renewed.pages, renewed.state_slots or renewed.window_pages, renewed.host_blocks
            )
        while (plan := core.plan()) is not None:
            assert isinstance(plan, StepPlan)
            self.check_saved(plan)
            self.executor.plans.append(plan)
            self.sent.append(plan)
        if (settle := core.settle(self.now)) is not None:
            assert isinstance(settle, Settle)
            self.settles.append(settle)
            self.replies.append(self.cache.settle(settle))
            self.replies.extend(self.cache.moved(self.executor, self.now))
        told = core.deliver()
        assert len({session for session, _ in told}) == len(told)
        for session, tokens in told:
            self.messages.append((session, tokens))
            for progress in tokens.progress:
                assert progress.request >> 32 == session
                assert progress.request not in self.finished
                self.output.setdefault(progress.request, []).extend(unpack(progress.tokens))
                self.logprobs.setdefault(progress.request, []).extend(progress.logprobs)
            for finished in tokens.finished:
                assert isinstance(finished, Finished)
                assert finished.request not in self.finished, "ended twice"
                assert finished.request not in self.cache.runs, "told before the cache knew"
                self.finished[finished.request] = finished
                self.order.append(finished.request)

    def die(self):
        """The executor dies, with all plans and KV."""
        executor = self.executor
        for lost in (
            executor.plans, executor.rows, executor.kv, executor.states, executor.seen, executor.host
        ):  # fmt: skip
            lost.clear()
        self.turn(ExecutorDown("it died"))

    def back(self, pages=None, **sizes):
        """Another executor is there."""
        if pages is not None:
            sizes["pages"] = pages
        self.info = self.executor.info = msgspec.structs.replace(self.info, **sizes)
        self.turn(self.info)

    def check_saved(self, plan):
        """No page that is to be saved yet may be written."""
        saving = {page for block in self.core.planner.loads.saves for page in unpack(block.pages)}
        written = {page for grow in plan.grows for page in unpack(grow.pages)}
        written.update(unpack(plan.copies)[1::2])
        for opened in plan.opens:
            written.update(unpack(opened.pages)[opened.cached // self.info.page_size :])
        assert not written & saving

    def settled(self):
        """Deliver the cache's oldest reply."""
        self.turn(self.replies.popleft())

    def result(self):
        """Run the oldest plan and deliver its result."""
        self.turn(self.executor.run())

    def cache_settles(self):
        while self.replies:
            self.settled()

    def run(self, *events, steps=10_000):
        """Handle `events`, then go on until nothing is left to do."""
        if events:
            self.turn(*events)
        while self.replies or self.executor.plans:
            steps -= 1
            assert steps > 0, "no end"
            self.now += 0.001
            # a step ends at last, however often the cache is asked meanwhile
            if self.replies and (steps % 16 or not self.executor.plans):
                self.settled()
            else:
                self.result()

    def check_drafts(self):
        """All that was drafted is accounted for, and what was accepted is told."""
        executor = self.executor
        assert 0 <= executor.accepted <= executor.drafted <= executor.asked
        assert sum(finished.accepted for finished in self.finished.values()) <= executor.accepted

    def check_idle(self):
        """Nothing runs, nothing waits, nothing is held."""
        assert (self.core.running, self.core.waiting) == (0, 0)
        assert not self.executor.rows
        prompts = self.core.planner.prompts
        assert (len(prompts), prompts.order) == (0, [])
        assert all(not line.weight for line in prompts._lines.values())
        for account in self.core.accounts.values():
            tenant = account.tenant
            assert (account.rows, account.prefilling, account.shares) == (0, 0, {})
            assert (tenant.rows, tenant.prefilling, tenant.slots, tenant.shares) == (0, 0, 0, {})
            assert (account.held, account.foreseen) == (0, 0)
            assert (tenant.requests, tenant.lacking) == (0, 0)
        admission = self.core.lifecycle.admission
        admission.active.expire(1 << 40)
        assert (admission.active.reserved, len(admission._memory_queue)) == (0, 0)
        assert not admission.active._rows
        self.cache.check_idle()


@pytest.fixture
def world():
    """The class: tests make the world they need."""
    return World


@pytest.fixture
def expected():
    return reference


@pytest.fixture
def expected_scores():
    return reference_scores
