"""Constraints on the CUDA executor, two steps in flight: against torch's, with and without jump-forward.

In Triton's interpreter, or on a GPU.
"""

import json
import random
import re
from concurrent.futures import Future
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from ramify.actors.grammar.automaton import Automaton as Machine
from ramify.actors.grammar.expression import Embedded, Literal, concat
from ramify.actors.grammar.nested import ARRAY, OBJECT, Containers, nested
from ramify.actors.grammar.schema.arrays import listed_items
from ramify.actors.grammar.schema.assembly import one_of, reduced, words
from ramify.actors.grammar.schema.members import Others, Separators, objects
from ramify.gpu.constraints.matcher import AutomatonConstraint
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.errors import ConstraintError
from ramify.protocol.plan import NO_TOKEN, STUCK, ExtendRow, OpenRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams
from tests.gpu.constraints.machines import machine_of

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", minversion=None if CUDA else "3.7")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's: garbage in padding
    pytest.mark.usefixtures("ordered_dots"),
]
DEVICE = torch.device("cuda" if CUDA else "cpu")
PAGE, ROWS, MOST, STOP = 16, 32, 5, 2
LENGTH = 18  # of the outputs that are compared
PATTERN = r'\{"name": "[a-z]", "job": "(cook|pilot)"\}'
WORDS = [b'{"name": "', b'"job": "', b"pilot", b"co", b"ok", b'", "', b"na", b"ab"]
SETTINGS = [
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.7, frequency_penalty=0.5, repetition_penalty=1.3, seed=3),
    SamplingParams(temperature=0.9, seed=4),  # without a constraint
]
FREE = 2


def vocabulary(size: int) -> Vocabulary:
    tokens = [b"", b"", b"", *[bytes([i]) for i in range(32, 127)], *WORDS]
    known = {data: i for i, data in enumerate(tokens) if data}

    def encode(text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            longest = max((w for w in known if data.startswith(w)), key=len)
            ids.append(known[longest])
            data = data[len(longest) :]
        return ids

    return Vocabulary(tokens, [STOP], encode, size)


@pytest.fixture
def make(tmp_path: Path, tiny_config: dict[str, Any], drive: Any) -> Any:
    config = tiny_config | {
        "head_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    def executor(attention: str = "triton", **more: Any) -> Any:
        made = drive(
            tmp_path, device=DEVICE.type, dtype="float32", load_format="dummy", attention=attention,
            max_rows=ROWS, step_tokens=256, kv_tokens=64 * PAGE, page_size=PAGE, **more,
        ).executor  # fmt: skip
        if attention == "triton":
            made.capture([], lambda what, done: None)
        return made

    return executor


class Run:
    """A row for each way of sampling. The first `cut` outputs over, all rows are opened again."""

    def __init__(
        self,
        executor: Any,
        drafts: int,
        most: int,
        cut: int = 0,
        behind: int = 1,
        machine: Machine | None = None,
    ) -> None:
        words = vocabulary(executor.info.vocab_size)
        machine = Machine.from_regex(PATTERN) if machine is None else machine
        constraints = executor.constraints
        rows = getattr(constraints, "rows", constraints)
        rows.put(1, AutomatonConstraint(machine_of(words, machine)))
        self.words, self.executor, self.drafts = words, executor, drafts
        self.outputs: dict[int, list[int]] = {row: [] for row in range(len(SETTINGS))}
        self.forced: dict[int, list[int]] = {row: [] for row in range(len(SETTINGS))}
        self.steps = 0  # until all rows with a constraint have ended
        prompt = [5, 9, 40, 7, 31, 100]
        plan, pending = self.opening(prompt, b""), []
        while True:
            pending.append(executor.launch(plan))
            self.steps += not all(STOP in self.outputs[row] for row in range(FREE))
            while pending and (len(pending) > behind or self.done(most)):
                self.take(pending.pop(0).result())
            if self.done(most):
                break
            if cut and min(map(len, self.outputs.values())) >= cut:
                for step in pending:
                    self.take(step.result())
                pending, cut = [], 0
                plan = self.opening(prompt, pack(self.outputs))
                continue
            live = [row for row, out in self.outputs.items() if len(out) < most + 4]
            asked = [drafts if row != FREE else 0 for row in live]
            plan = StepPlan(1, decodes=pack(live), drafts=pack(asked) if drafts else b"")
        executor.launch(StepPlan(1, closes=pack(self.outputs))).result()
        for row, out in self.outputs.items():
            size = out.index(STOP) + 1 if STOP in out and row != FREE else most
            self.outputs[row] = out[:size]
            self.forced[row] = self.forced[row][:size]

    def done(self, most: int) -> bool:
        return all(
            (row != FREE and STOP in out) or len(out) >= most for row, out in self.outputs.items()
        )

    def opening(self, prompt: list[int], closes: bytes) -> StepPlan:
        opens, extends = [], []
        for row, sampling in enumerate(SETTINGS):
            out = self.outputs[row]
            history = pack([*prompt, *out])
            pages = pack(range(10 * row, 10 * row + 10))
            opens.append(
                OpenRow(row, row, pages, 0, sampling, len(out), history, int(row != FREE), len(out))
            )
            extends.append(ExtendRow(row, 0, history, True))
        return StepPlan(0, closes, opens, extends=extends)

    def take(self, result: Any) -> None:
        rows, tokens = unpack(result.rows), list(unpack(result.tokens))
        counts = list(unpack(result.counts)) or [1] * len(rows)
        forced = list(result.forced) or [0] * len(tokens)
        assert len(tokens) == sum(counts) == len(forced)
        at = 0
        for row, count in zip(rows, counts, strict=True):
            self.outputs[row] += tokens[at : at + count]
            self.forced[row] += forced[at : at + count]
            at += count
        assert NO_TOKEN not in tokens

    def text(self, row: int) -> str:
        tokens = [token for token in self.outputs[row] if token != STOP]
        return b"".join(self.words.tokens[token] for token in tokens).decode()


@pytest.fixture(scope="module")
def known() -> list[Run]:
    """What `plain` has found: its model's weights are the same in each test."""
    return []


@pytest.fixture
def plain(make: Any, known: list[Run]) -> Run:
    """Without drafts."""
    if not known:
        known.append(Run(make(), 0, LENGTH))
    return known[0]


def same(one: Run, other: Run) -> None:
    assert one.outputs == other.outputs
    assert one.forced == other.forced


def test_it_obeys_and_jumps(make: Any, plain: Run) -> None:
    """The same as on torch, with and without drafts, one step in flight or two."""
    for row in range(FREE):
        assert re.fullmatch(PATTERN, plain.text(row)), plain.text(row)
        assert plain.outputs[row][-1] == STOP
    assert sum(map(sum, plain.forced.values())) > 10
    same(Run(make("torch"), 0, LENGTH, behind=0), plain)
    executor = make()
    jumped = Run(executor, MOST, LENGTH)
    same(plain, jumped)
    assert jumped.steps < plain.steps
    assert not executor.rows.unsettled.any()
    same(plain, Run(executor, MOST, LENGTH, cut=3))
    assert executor.constraints.automata.used_bytes > 0
    executor.launch(StepPlan(2, forgets=pack([1]))).result()
    assert executor.constraints.automata.used_bytes == 0


def free_values() -> Machine:
    """Two members of any value, of which few are no arrays or objects."""
    key, plain = Machine.from_regex('"a"|"ok"'), Machine.from_regex('"b"')
    value = one_of([plain, words([bytes((OBJECT,))]), words([bytes((ARRAY,))])])
    separators = Separators(b", ", b": ")
    objects_of_any = objects([], [Others(key, value)], 0, None, separators)
    arrays_of_any = listed_items([], value, 0, None, separators.comma)
    both = concat(Literal(b'{"name": '), Embedded(value), Literal(b', "job": '), Embedded(value))
    whole = Machine.from_expression(concat(both, Literal(b"}")))
    return nested(whole, Containers.of(reduced(objects_of_any), reduced(arrays_of_any)))


def test_values_that_no_schema_describes(make: Any) -> None:
    """On the device as on torch, with drafts and without, and gone on with inside of one."""
    length, machine = 36, free_values()
    plain = Run(make("torch"), 0, length, behind=0, machine=machine)
    assert any(sum(plain.text(row).count(each) for each in "[{") > 2 for row in range(FREE))
    executor = make()
    same(plain, Run(executor, 0, length, machine=machine))
    assert executor.constraints.automata.used_bytes > 0
    same(plain, Run(executor, MOST, length, cut=12, machine=machine))


def test_followed_on_the_host(make: Any, plain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no room on the device has the same output."""
    monkeypatch.setattr("ramify.gpu.sampling.device_constraints.ARENA_BYTES", 1 << 10)
    executor = make()
    same(plain, Run(executor, 0, LENGTH))
    assert executor.constraints.automata.used_bytes == 0
    same(plain, Run(executor, MOST, LENGTH))


def test_a_late_constraint_delays_its_rows_alone(make: Any, plain: Run) -> None:
    """Their prompts are computed; they sample when the constraint is there, as if it had always been."""
    executor = make()
    rows = executor.constraints.rows
    loaded = Future[Any]()
    put, launch = rows.put, executor.launch
    rows.put = lambda ident, constraint: rows._known.update({ident: loaded})
    launches = 0

    def late(plan: StepPlan) -> Any:
        nonlocal launches
        launches += 1
        if launches == 4:
            words = vocabulary(executor.info.vocab_size)
            machine = Machine.from_regex(PATTERN)
            loaded.set_result(AutomatonConstraint(machine_of(words, machine)))
            for row in range(FREE):
                assert rows.wait(row, monotonic() + 5)
        step = launch(plan)
        if launches < 4 and plan.decodes:
            step.settle()
            assert unpack(step.result().rows).tolist() == [0, 1, 2]
            assert unpack(step.result().counts).tolist() == [0, 0, 1]
        return step

    executor.launch = late
    delayed = Run(executor, 0, LENGTH)
    same(plain, delayed)
    assert rows.put is not put
    assert delayed.steps == plain.steps + 3
    assert rows.counters.sat_out == 3 * FREE
    assert not executor.rows.unsettled.any()


def test_a_prompt_of_one_token_beside_forced_drafts(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its extend runs as a decode, and its row, followed on the host, has its mask all the same."""
    monkeypatch.setattr("ramify.gpu.sampling.device_constraints.ARENA_BYTES", 1 << 10)
    executor = make()
    words = vocabulary(executor.info.vocab_size)
    machine = Machine.from_regex(r'\{"name": "pilot, pilot, pilot"\}')
    made = AutomatonConstraint(machine_of(words, machine))
    executor.constraints.rows.put(1, made)
    sampling = SamplingParams(temperature=5.0, seed=1)

    def opening(row: int) -> dict[str, Any]:
        opens = [OpenRow(row, row, pack([row]), 0, sampling, 0, pack([40 + row]), 1)]
        return {"opens": opens, "extends": [ExtendRow(row, 0, pack([40 + row]), True)]}

    first = unpack(executor.launch(StepPlan(0, **opening(0))).result().tokens)[0]
    for row in range(1, 4):  # another row each time, as its turn to draft comes again
        plan = StepPlan(row, **opening(row), decodes=pack([0]), drafts=pack([2]))
        result = executor.launch(plan).result()
        assert list(unpack(result.counts)) == [1, 3]
        assert unpack(result.tokens)[0] == first


def test_one_that_cannot_be_followed(make: Any) -> None:
    """Its row is stuck, and hears why; others go on."""
    executor = make()
    executor.constraints.rows.put(1, ConstraintError("its rules never end"))
    opens = [OpenRow(row, row, pack([row]), 0, SETTINGS[0], 0, pack([5]), row) for row in range(2)]
    extends = [ExtendRow(row, 0, pack([5]), True) for row in range(2)]
    result = executor.launch(StepPlan(0, opens=opens, extends=extends)).result()
    first, second = unpack(result.tokens)
    assert first >= 0
    assert second == STUCK
    assert result.reasons == ["its rules never end"]


def test_beside_a_drafter(make: Any, plain: Run) -> None:
    """Its guesses are for rows without a constraint."""
    executor = make(draft="ngram", draft_tokens=3)
    constrained = Run(executor, 3, LENGTH)
    same(plain, constrained)


def test_forks_share_what_is_computed(make: Any) -> None:
    """With `--deterministic`, side by side: n outputs of a prompt, one that is rolled back and written
    again, one on a fork in the midst of another, which is text to it, and one that goes on there.
    """
    executor = make(deterministic=True)
    words = vocabulary(executor.info.vocab_size)
    machine = Machine.from_regex(PATTERN)
    constraint = AutomatonConstraint(machine_of(words, machine))
    executor.constraints.rows.put(1, constraint)
    prompt = list(range(20, 20 + PAGE + 2))  # a page that all share, and more

    def outputs(rows: dict[int, tuple[list[int], int, int]]) -> dict[int, list[int]]:
        """Of each row: its tokens, how many of them it sampled before, and its seed."""
        opens, extends = [], []
        for row, (tokens, sampled, seed) in rows.items():
            cached = PAGE if row else 0
            sampling = SamplingParams(temperature=1.0, seed=seed)
            pages = pack([0, *range(3 * row + 1, 3 * row + 4)])
            opens.append(
                OpenRow(row, row, pages, cached, sampling, sampled, pack(tokens), 1, sampled)
            )  # fmt: skip
            extends.append(ExtendRow(row, cached, pack(tokens[cached:]), True))
        found: dict[int, list[int]] = {row: [] for row in rows}
        plan = StepPlan(0, opens=opens, extends=extends)
        while plan.extends or plan.decodes:
            result = executor.launch(plan).result()
            tokens = list(unpack(result.tokens))
            counts = list(unpack(result.counts)) or [1] * len(tokens)
            for row, count in zip(unpack(result.rows).tolist(), counts, strict=True):
                found[row] += tokens[:count]
                tokens = tokens[count:]
            live = [row for row, out in found.items() if STOP not in out]
            plan = StepPlan(1, decodes=pack(live), drafts=pack([MOST] * len(live)))
        executor.launch(StepPlan(2, closes=pack(rows))).result()
        return {row: out[: out.index(STOP) + 1] for row, out in found.items()}

    first = outputs({0: (prompt, 0, 7)})[0]
    half = len(first) // 2
    others = outputs({
        1: (prompt, 0, 7), 2: (prompt, 0, 8), 3: ([*prompt, *first[:half]], 0, 9),
        4: ([*prompt, *first[:half]], half, 7),
    })  # fmt: skip
    assert others[1] == first
    assert others[4] == first[half:]
    for row in (1, 2, 3):
        text = b"".join(words.tokens[token] for token in others[row][:-1]).decode()
        assert re.fullmatch(PATTERN, text), text
    assert others[2] != first


PATTERNS = [rf"\{{{n}[a-z]{{0,{1 + n % 3}}}\}}" for n in range(8)]


class Crowd:
    """Rows that open and close at random, two steps in flight, under more constraints than the device's
    memory holds.
    """

    def __init__(self, executor: Any, drafts: int) -> None:
        self.executor, self.drafts = executor, drafts
        self.words = vocabulary(executor.info.vocab_size)
        self.dice = random.Random(11)
        self.live: dict[int, tuple[int, list[int]]] = {}  # by row: its constraint, what it sampled
        self.closes: list[int] = []
        self.texts: list[tuple[str, str]] = []
        self.step = self.placed = self.unplaced = 0
        for ident, pattern in enumerate(PATTERNS, 1):
            machine = Machine.from_regex(pattern)
            made = AutomatonConstraint(machine_of(self.words, machine))
            executor.constraints.prepare(ident, made)
            executor.constraints.rows.put(ident, made)

    def plan(self, rows: int) -> StepPlan:
        decodes = [*self.live]
        closes, self.closes = self.closes, []
        opens, extends = [], []
        free = [row for row in range(rows) if row not in self.live]
        for row in self.dice.sample(free, min(len(free), self.dice.randrange(3))):
            ident = self.dice.randrange(len(PATTERNS)) + 1
            self.live[row] = ident, []
            prompt = pack([5, 9, 40 + ident])
            pages = pack(range(4 * row, 4 * row + 4))
            sampling = SamplingParams(temperature=1.0, seed=self.dice.randrange(99))
            opens.append(OpenRow(row, self.step, pages, 0, sampling, 0, prompt, ident))
            extends.append(ExtendRow(row, 0, prompt, True))
        self.step += 1
        asked = pack([self.drafts] * len(decodes)) if self.drafts else b""
        return StepPlan(
            self.step, pack(closes), opens, extends=extends, decodes=pack(decodes), drafts=asked
        )

    def take(self, step: Any, opened: dict[int, Any]) -> None:
        """What the step says of rows that were not closed since."""
        result = step.result()
        tokens = list(unpack(result.tokens))
        counts = list(unpack(result.counts)) or [1] * len(tokens)
        for row, count in zip(unpack(result.rows).tolist(), counts, strict=True):
            own, tokens = tokens[:count], tokens[count:]
            if self.live.get(row) is not opened.get(row) or row not in self.live:
                continue
            ident, output = self.live[row]
            for token in own:
                assert token >= 0, result.reasons
                if token == STOP or len(output) == 40:
                    self.end(row, ident, output, token == STOP)
                    break
                output.append(token)
            else:
                if self.dice.random() < 0.02:  # a client cancels
                    self.end(row, ident, output, False)

    def end(self, row: int, ident: int, output: list[int], whole: bool) -> None:
        text = b"".join(self.words.tokens[token] for token in output).decode()
        if whole:
            self.texts.append((PATTERNS[ident - 1], text))
        del self.live[row]
        self.closes.append(row)

    def run(self, steps: int, rows: int) -> None:
        pending: list[tuple[Any, dict[int, Any]]] = []
        constraints = self.executor.constraints
        for _ in range(steps):
            pending.append((self.executor.launch(self.plan(rows)), dict(self.live)))
            followed = [constraints.on_device(row) for row in self.live]
            self.placed += followed.count(True)
            self.unplaced += followed.count(False)
            if len(pending) > 1:
                self.take(*pending.pop(0))
        for step in pending:
            self.take(*step)


@pytest.mark.parametrize("drafts", [0, 3])
def test_more_constraints_than_fit(make: Any, monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    """Some rows are followed on the host, the next of the same constraint on the device: all obey."""
    monkeypatch.setattr("ramify.gpu.constraints.token_automaton.QUICK_NODES", 0)
    monkeypatch.setattr("ramify.gpu.sampling.device_constraints.ARENA_BYTES", 3 * 1280)
    crowd = Crowd(make(), drafts)
    crowd.run(16 if drafts else 24, 5)
    assert crowd.placed > 10
    assert crowd.unplaced > 5
    assert len(crowd.texts) > 5
    for pattern, text in crowd.texts:
        assert re.fullmatch(pattern, text), (pattern, text)


def test_no_thread_moves_what_the_device_follows(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps come two at a time, so nobody else may look ahead from where it stands: though a row
    of the same constraint, which found no place there, was followed on the host before.
    """
    monkeypatch.setattr("ramify.gpu.constraints.token_automaton.QUICK_NODES", 0)
    executor = make()
    constraints = executor.constraints
    words = vocabulary(executor.info.vocab_size)
    machine = Machine.from_regex("[a-z]{9}")
    made = AutomatonConstraint(machine_of(words, machine))
    constraints.prepare(1, made)
    constraints.rows.put(1, made)

    def opened(row: int) -> Any:
        opens = [OpenRow(row, row, pack([row]), 0, SETTINGS[0], 0, pack([5]), 1)]
        plan = StepPlan(0, opens=opens, extends=[ExtendRow(row, 0, pack([5]), True)])
        executor.launch(plan).result()
        return constraints.rows._of[row]

    with monkeypatch.context() as patched:
        patched.setattr(constraints.automata, "open", lambda *given: False)
        opened(0)
    output = opened(1)
    assert [constraints.on_device(row) for row in (0, 1)] == [False, True]
    began: list[object] = []
    monkeypatch.setattr(output, "_threads", lambda: began.append(1))
    steps = [executor.launch(StepPlan(n, decodes=pack([1]))) for n in (1, 2)]
    for step in steps:
        assert unpack(step.result().tokens)[0] >= 0
    assert output.ready
    assert not began
