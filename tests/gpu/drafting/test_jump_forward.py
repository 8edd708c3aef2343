"""Constraints on real logits: outputs obey, and are the same with and without jump-forward."""

import random
import re
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from ramify.actors.grammar.automaton import Automaton as Machine
from ramify.gpu.constraints.matcher import AutomatonConstraint
from ramify.gpu.constraints.rows import ConstrainedRows
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.gpu.drafting.base import Guesses
from ramify.gpu.drafting.host import HostDrafts
from ramify.gpu.drafting.ngram import NgramDrafter
from ramify.protocol.errors import ConstraintError
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams
from tests.gpu.constraints.machines import machine_of

PATTERN = r'\{"name": "[a-z]{1,6}", "job": "(cook|pilot)", "age": [1-9][0-9]\}'
STOP, MOST = 2, 5
WORDS = [b'{"name": "', b'", "job": "', b'", "age": ', b"pilot", b"co", b"ok", b'", "', b"na", b"ab"]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.0, seed=7),
    "truncated": SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, seed=8),
    "penalised": SamplingParams(temperature=0.7, frequency_penalty=0.5, repetition_penalty=1.3, seed=3),
    "told": SamplingParams(temperature=0.8, seed=9, logprobs=3),
}


@pytest.fixture
def driver(load: Any) -> Any:
    return load()


def vocabulary(size: int) -> Vocabulary:
    """The printable characters and some words, behind three ids without a text."""
    tokens = [b"", b"", b"", *[bytes([i]) for i in range(32, 127)], *WORDS]
    known = {data: i for i, data in enumerate(tokens) if data}

    def encode(text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            longest = max((w for w in known if data.startswith(w)), key=len)
            ids.append(known[longest])
            data = data[len(longest) :]
        return ids

    assert len(tokens) <= size
    return Vocabulary(tokens, [STOP], encode, size)


Outputs = dict[int, list[int]]


class Slow:
    """A constraint whose masks take long now and then; nothing of it is known ahead."""

    def __init__(self, constraint: Any, quick: bool) -> None:
        self.constraint, self.quick, self.dice = constraint, quick, random.Random(3)

    def matcher(self) -> Any:
        return SlowMatcher(self.constraint.matcher(), self)

    def close(self) -> None: ...


class SlowMatcher:
    def __init__(self, matcher: Any, constraint: Slow) -> None:
        self._matcher, self._constraint, self.quick = matcher, constraint, constraint.quick

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def __len__(self) -> int:
        return len(self._matcher)

    def knows(self) -> bool:
        return False

    def plan(self) -> Any:
        if self._constraint.dice.random() < 0.3:
            time.sleep(0.02)
        return self._matcher.plan()


class Knows:
    """A drafter that has seen the outputs, and is wrong now and then, also with what is not legal."""

    def __init__(self, outputs: Outputs, behind: bool = True) -> None:
        self.outputs, self.behind, self.dice = outputs, behind, random.Random(5)
        self.places: dict[int, int] = {}

    def open(self, opened: OpenRow) -> None:
        self.places[opened.row] = opened.sampled

    def close(self, row: int) -> None:
        del self.places[row]

    def propose(self, rows: Any, most: Any) -> Guesses:
        found = [self._guess(row, 0, count) for row, count in zip(rows.tolist(), most, strict=True)]
        tokens = np.array([token for guess in found for token in guess], dtype=np.int32)
        return Guesses(np.array([len(guess) for guess in found], dtype=np.int64), tokens)

    def continued(self, row: int, behind: Any, most: int) -> list[int]:
        assert behind
        return self._guess(row, len(behind), most) if self.behind else []

    def _guess(self, row: int, behind: int, most: int) -> list[int]:
        begin = self.places[row] + behind
        right = self.outputs[row][begin : begin + int(most)]
        return [token if self.dice.random() < 0.8 else self.dice.randint(1, 90) for token in right]

    def runs(self, step: Any) -> None: ...

    def observe(self, rows: Any, counts: Any, tokens: Any) -> None:
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            self.places[row] += count


def generate(
    driver: Any, jumps: bool, sampled: int = 0, slow: str = "", drafter: Any = None
) -> tuple[Outputs, list[Any], int, bytes]:
    """A row for each way of sampling, and one without a constraint: outputs, logprobs, steps, forced.

    `sampled`: close and open all rows again behind so many outputs. `slow`: "masks" take long, or "all"
    that is done with matchers, or it takes four steps until the constraint is "loaded".
    """
    executor = driver.executor
    words = vocabulary(executor.info.vocab_size)
    machine = Machine.from_regex(PATTERN)
    rules = ConstrainedRows(executor.info.max_rows, executor.info.vocab_size, jumps=jumps)
    rule: Any = AutomatonConstraint(machine_of(words, machine))
    if slow in ("masks", "all"):
        rule = Slow(rule, quick=slow == "masks")
    rules.put(1, rule)
    loading: Future[Any] | None = None
    if slow == "loaded":
        rules._known[1] = loading = Future()
    executor.constraints = rules
    executor.rows.max_drafts = MOST
    executor.drafts = HostDrafts(executor.rows, drafter, rules)
    rows = dict(enumerate([*SAMPLINGS.values(), SamplingParams(temperature=0.0)]))
    prompt = [5, 9, 40, 7, 31, 100]
    outputs: dict[int, list[int]] = {row: [] for row in rows}
    logprobs: list[Any] = []
    flags: dict[int, bytes] = dict.fromkeys(rows, b"")

    def opens(closes: bytes) -> StepPlan:
        opened, extends = [], []
        for row, sampling in rows.items():
            before = prompt + outputs[row]
            pages = pack(range(60 * row, 60 * row + 60))
            history = pack(before)
            constraint = int(row < len(SAMPLINGS))
            made = len(outputs[row])
            opened.append(OpenRow(row, row, pages, 0, sampling, made, history, constraint, made))
            extends.append(ExtendRow(row, 0, history, True))
        return StepPlan(1, closes, opens=opened, extends=extends)

    plan, steps, cut = opens(b""), 0, sampled
    while True:
        result = executor.launch(plan).result()
        steps += 1
        if loading is not None:
            assert not any(outputs[row] for row in range(len(SAMPLINGS)))
            assert len(outputs[len(SAMPLINGS)]) == steps - 1
            if steps == 4:
                loading.set_result(rule)
                loading = None
        places = list(unpack(result.rows))
        counts = unpack(result.counts) if result.counts else [1] * len(places)
        at = 0
        check_guesses(result, counts)
        entries = result.logprobs or [None] * len(result.tokens)
        for row, count in zip(places, counts, strict=True):
            outputs[row] += unpack(result.tokens)[at : at + count]
            flags[row] += result.forced[at : at + count] if result.forced else bytes(count)
            if row == 4:
                logprobs += entries[at : at + count]
            at += count
        done = [STOP in outputs[row] or row >= len(SAMPLINGS) for row in rows]
        if all(done):
            break
        if cut and min(map(len, outputs.values())) >= cut and not any(done[:-1]):
            plan, cut = opens(pack(rows)), 0
            continue
        live = [row for row in rows if not done[row] or row >= len(SAMPLINGS)]
        live = [row for row in live if len(outputs[row]) < 50]
        drafts = pack(MOST if row < len(SAMPLINGS) else 0 for row in live)
        guesses = pack(3 if row < len(SAMPLINGS) else 0 for row in live) if drafter else b""
        plan = StepPlan(1, decodes=pack(live), drafts=drafts, guesses=guesses)
    cut_at = {row: out.index(STOP) + 1 if row < len(SAMPLINGS) else 20 for row, out in outputs.items()}
    kept = {row: out[: cut_at[row]] for row, out in outputs.items()}
    told = b"".join(flags[row][: cut_at[row]] for row in range(len(SAMPLINGS)))
    executor.launch(StepPlan(1, closes=pack(rows))).result()
    return kept, logprobs[: cut_at[4]], steps, told


def check_guesses(result: Any, counts: Any) -> None:
    """Guesses are drafts, and those that are output are among what is accepted."""
    if result.guessed:
        guessed, right = np.frombuffer(result.guessed, dtype=np.int32).reshape(-1, 2).T
        assert (guessed <= unpack(result.drafted)).all()
        assert (right <= np.minimum(guessed, np.array(counts) - 1)).all()
        assert (right >= 0).all()


def text_of(driver: Any, tokens: list[int]) -> str:
    words = vocabulary(driver.executor.info.vocab_size)
    return b"".join(words.tokens[token] for token in tokens).decode()


def test_the_same_output_with_and_without(driver: Any) -> None:
    plain, told, steps, forced = generate(driver, jumps=False)
    for row in range(len(SAMPLINGS)):
        assert plain[row][-1] == STOP
        assert re.fullmatch(PATTERN, text_of(driver, plain[row][:-1]))
    jumped, told_too, fewer, forced_too = generate(driver, jumps=True)
    free = len(SAMPLINGS)  # ran as long as the others did
    assert jumped.pop(free) == plain.pop(free)[: min(20, fewer)]
    assert jumped == plain
    assert forced_too == forced
    assert [entry.top_ids for entry in told_too] == [entry.top_ids for entry in told]
    assert np.allclose([e.logprob for e in told_too], [e.logprob for e in told], atol=1e-3)
    assert sum(forced) > 20
    assert fewer < 0.75 * steps


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("sampled", [0, 3])
def test_the_same_output_with_guesses(driver: Any, jumps: bool, behind: bool, sampled: int) -> None:
    """Of those that are not legal nothing runs, and what must follow comes ahead of them."""
    plain, told, steps, forced = generate(driver, jumps=jumps)
    guessing, told_too, fewer, forced_too = generate(
        driver, jumps=jumps, drafter=Knows(plain, behind), sampled=sampled
    )
    free = len(SAMPLINGS)
    size = min(len(plain.pop(free)), len(guessing.pop(free)))
    assert size
    assert guessing == plain
    assert forced_too == forced
    assert [entry.top_ids for entry in told_too] == [entry.top_ids for entry in told]
    assert driver.executor.drafts.accepted > 20
    if not sampled:
        assert fewer < steps


def test_the_same_output_with_n_grams(driver: Any) -> None:
    plain, *_ = generate(driver, jumps=True)
    drafter = NgramDrafter(driver.executor.info.max_rows)
    guessing, *_ = generate(driver, jumps=True, drafter=drafter)
    del plain[len(SAMPLINGS)], guessing[len(SAMPLINGS)]
    assert guessing == plain


@pytest.mark.parametrize("slow", ["masks", "all", "loaded"])
def test_who_waits_for_a_mask_or_a_constraint_sits_steps_out(driver: Any, slow: str) -> None:
    """Each row alone: the one without a constraint is in every step. The outputs are the same."""
    plain, told, steps, forced = generate(driver, jumps=True)
    late, told_too, more, forced_too = generate(driver, jumps=True, slow=slow)
    free = len(SAMPLINGS)
    assert len(late[free]) == min(20, more)
    assert late.pop(free)[:5] == plain.pop(free)[:5]
    assert late == plain
    assert forced_too == forced
    assert [entry.top_ids for entry in told_too] == [entry.top_ids for entry in told]
    assert driver.executor.constraints.counters.sat_out > 0
    assert more > steps


@pytest.mark.parametrize("sampled", [1, 3, 6])
def test_opened_again_in_the_midst(driver: Any, sampled: int) -> None:
    """As after a retraction: the constraint stands where the output has come to."""
    plain, *_ = generate(driver, jumps=True)
    again, *_ = generate(driver, jumps=True, sampled=sampled)
    assert {row: again[row] for row in range(len(SAMPLINGS))} == {
        row: plain[row] for row in range(len(SAMPLINGS))
    }


def test_a_constraint_that_cannot_be_followed_gives_no_token(driver: Any) -> None:
    """Never a text that it does not allow."""
    rows = ConstrainedRows(8, 64)
    rows.put(3, ConstraintError("no room for it"))
    rows.begin(StepPlan(1, opens=[OpenRow(2, 7, b"", 0, SamplingParams(), constraint=3)]))
    masks = rows.masks(np.array([0, 2]))
    assert masks is not None
    assert masks.lines.tolist() == [1]
    assert not masks.flags(64).any()
    assert rows.stuck == {1: "no room for it"}
