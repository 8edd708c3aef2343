"""A draft model on the device that is the model itself is always right; so its keys are, too.

In Triton's interpreter, or on a GPU. Steps are in flight two by two.
"""

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ramify.gpu.drafting import draft_keys
from ramify.gpu.step.buckets import decode_buckets
from ramify.protocol.plan import ExtendRow, GrowRow, OpenRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams
from tests.gpu.drafting.conftest import write_folder

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", minversion=None if CUDA else "3.7")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's: garbage in padding
    pytest.mark.usefixtures("ordered_dots"),
]
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, seed=11)
PROMPT = [5, 9, 2, 40, 7, 7, 7, 31, 100, 64, 3, 90]
SIZES = {
    "head_dim": 16, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
}  # fmt: skip
LENGTH = 40 if CUDA else 8


class Row:
    """One request: what it holds, and where it has pages."""

    def __init__(self, row: int, prompt: list[int], pages: list[int], cached: int = 0) -> None:
        self.row, self.prompt, self.pages, self.cached = row, prompt, pages, cached
        self.output: list[int] = []

    def plan(self, sampling: SamplingParams, **more: Any) -> StepPlan:
        tokens = self.prompt + self.output
        opened = OpenRow(self.row, self.row, pack(self.pages), self.cached, sampling, len(self.output))
        extend = ExtendRow(self.row, self.cached, pack(tokens[self.cached :]), True)
        return StepPlan(0, opens=[opened], extends=[extend], **more)


class Engine:
    """Launches plans, `depth` of them in flight, and gives each row its tokens."""

    def __init__(self, executor: Any, depth: int = 2) -> None:
        self.executor, self.depth = executor, depth
        self.rows: dict[int, Row] = {}
        self.pending: deque[Any] = deque()
        self.drafted = self.accepted = 0
        self.found: list[list[int]] = []  # drafts of each step with some asked for

    def start(self, *rows: Row, sampling: SamplingParams = GREEDY) -> None:
        for row in rows:
            self.rows[row.row] = row
            self.launch(row.plan(sampling))

    def launch(self, plan: StepPlan) -> None:
        self.pending.append((self.executor.launch(plan), bool(plan.drafts)))
        while len(self.pending) >= self.depth:
            self.take()

    def go_on(self, rows: list[Row], most: list[int]) -> None:
        drafts = pack(most) if any(most) else b""
        self.launch(StepPlan(0, decodes=pack(row.row for row in rows), drafts=drafts))

    def take(self) -> None:
        step, asked = self.pending.popleft()
        result = step.result()
        tokens, begin = list(unpack(result.tokens)), 0
        counts = list(unpack(result.counts)) or [1] * len(unpack(result.rows))
        drafted = list(unpack(result.drafted)) or [0] * len(counts)
        if asked:
            self.found.append(drafted)
            self.drafted += sum(drafted)
            self.accepted += sum(counts) - len(counts)
        for row, count in zip(unpack(result.rows), counts, strict=True):
            self.rows[row].output += tokens[begin : begin + count]
            begin += count

    def finish(self) -> None:
        while self.pending:
            self.take()

    def close(self, *rows: Row) -> None:
        self.finish()
        self.executor.launch(StepPlan(0, closes=pack(row.row for row in rows))).result()

    @property
    def all_accepted(self) -> bool:
        self.finish()
        return 0 < self.drafted == self.accepted


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", **SIZES)


@pytest.fixture
def load(folder: Path, drive: Any) -> Callable[..., Any]:
    def make(draft: str = "none", depth: int = 2, **settings: Any) -> Engine:
        settings = {"page_size": 4, "max_rows": 16, "kv_tokens": 1024, **settings}
        executor = drive(
            folder, device="cuda" if CUDA else "cpu", dtype="float32", load_format="dummy",
            attention="triton", step_tokens=64, draft=draft, draft_tokens=3, **settings,
        ).executor  # fmt: skip
        return Engine(executor, depth)

    return make


@pytest.fixture(scope="module")
def said() -> dict[Any, list[int]]:
    """What the model says by itself, once it was asked: its weights are the same in each test."""
    return {}


@pytest.fixture
def plain(load: Any, said: dict[Any, list[int]]) -> Callable[..., list[int]]:
    """What the model says by itself."""

    def say(prompt: list[int], length: int, sampling: SamplingParams = GREEDY) -> list[int]:
        known = said.setdefault((*prompt, sampling.temperature), [])
        if len(known) < length:
            engine, row = load(), Row(0, prompt, list(range(32)))
            engine.start(row, sampling=sampling)
            while len(row.output) < max(length, LENGTH):
                engine.go_on([row], [0])
            engine.finish()
            assert row.output[: len(known)] == known
            known[:] = row.output
        return known[:length]

    return say


@pytest.mark.parametrize(
    ("sampling", "depth"), [(GREEDY, 1), (GREEDY, 2), (SEEDED, 2)], ids=["alone", "greedy", "seeded"]
)
def test_the_model_itself_is_always_right(
    load: Any, folder: Path, plain: Any, sampling: SamplingParams, depth: int
) -> None:
    """Its guesses draw with the numbers that the model draws with."""
    engine = load(str(folder), depth)
    info = engine.executor.info
    assert (info.drafter, info.max_drafts, info.drafts_from_history) == ("model", 3, False)
    one = Row(0, PROMPT, list(range(32)))
    engine.start(one, sampling=sampling)
    for _ in range(2 + LENGTH // 4):
        engine.go_on([one], [3])
    assert engine.all_accepted
    assert set(map(tuple, engine.found)) == {(3,)}
    assert one.output[:LENGTH] == plain(PROMPT, LENGTH, sampling)
    assert not engine.executor.rows.unsettled.any()


def test_drafting_that_stops_and_goes_on(load: Any, folder: Path, plain: Any) -> None:
    """Steps without drafts, and with fewer of them: what is missing is caught up with."""
    engine, one = load(str(folder)), Row(0, PROMPT, list(range(32)))
    engine.start(one)
    for most in (2, 0, 0, 3, 1, 0, 0, 0, 0, 0, 3, 2):
        engine.go_on([one], [most])
    assert engine.all_accepted
    assert one.output == plain(PROMPT, len(one.output))


def test_rows_with_other_numbers_of_drafts(load: Any, folder: Path, plain: Any) -> None:
    engine = load(str(folder))
    rows = [Row(row, PROMPT[row:], list(range(32 * row, 32 * row + 32))) for row in range(4)]
    engine.start(*rows)
    for most in ([1, 0, 3, 2], [0, 2, 0, 3], [3, 3, 1, 0]):
        engine.go_on(rows, most)
    assert engine.all_accepted
    for row in rows:
        assert row.output == plain(row.prompt, len(row.output))


def test_catching_up_in_parts(
    load: Any, folder: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 tokens a step; another row waits behind it. Drafts that cannot be guessed do not run."""
    monkeypatch.setattr(draft_keys, "CATCH_UP", 5)
    engine = load(str(folder))
    one, other = Row(0, PROMPT, list(range(32))), Row(1, PROMPT[:6], list(range(32, 64)))
    engine.start(one, other)
    timed: list[str] = []
    for clock in engine.executor._clocks:
        monkeypatch.setattr(clock, "start_part", lambda: timed.append("start"))
        monkeypatch.setattr(clock, "stop_part", lambda: timed.append("stop"))
    for _ in range(5):
        engine.go_on([one, other], [2, 2])
    engine.finish()
    assert timed == ["start", "stop"] * 3  # what is no step's own work is timed apart
    assert engine.found == [[0, 0], [2, 0], [2, 2], [2, 2], [2, 2]]
    assert engine.all_accepted
    for row in (one, other):
        assert row.output == plain(row.prompt, len(row.output))


def test_a_prefix_that_another_row_left(load: Any, folder: Path, plain: Any) -> None:
    """Pages of another row are a new row's prefix: its keys are found; not in pages that were reused."""
    engine, one = load(str(folder)), Row(0, PROMPT, list(range(32)))
    engine.start(one)
    engine.go_on([one], [3])
    engine.close(one)
    keys = engine.executor.drafts.drafter._keys
    fork = Row(3, PROMPT, [*range(2), *range(50, 65)], cached=8)
    engine.start(fork)
    assert keys.missing[3] == len(PROMPT) - 8
    engine.go_on([fork], [3])
    assert engine.all_accepted
    assert fork.output == plain(PROMPT, len(fork.output))
    stranger = Row(1, PROMPT[::-1], list(range(32)))
    engine.start(stranger)  # pages that somebody else's prompt was written to, undrafted, are stale
    engine.close(stranger)
    again = Row(1, PROMPT[::-1], [*range(2), *range(70, 85)], cached=8)
    engine.start(again)
    assert keys.missing[1] == len(PROMPT)
    engine.go_on([again], [3])
    assert engine.all_accepted


def test_rows_that_begin_together_share_the_work(load: Any, folder: Path, plain: Any) -> None:
    """Of rows with one prompt the first computes what they share, in the same step."""
    engine = load(str(folder))
    rows = [Row(0, PROMPT, list(range(32)))]
    engine.start(*rows)
    more = [Row(row, PROMPT, [0, 1, *range(32 * row, 32 * row + 30)], cached=8) for row in (1, 2)]
    engine.start(*more)
    rows += more
    drafter = engine.executor.drafts.drafter
    engine.go_on(rows, [2, 2, 2])
    assert drafter._guessing.counts.tolist() == [len(PROMPT) - 1]
    engine.go_on(rows, [3, 3, 3])
    assert engine.all_accepted
    for row in rows:
        assert row.output == plain(PROMPT, len(row.output))


def test_drafted_rows_read_a_shared_prefix_together(
    load: Any, folder: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of captured sizes, with other numbers of drafts, and where one row has none."""
    from ramify.gpu.attention import triton_paged
    from ramify.gpu.attention.groups import Grouper, GroupLimits

    limits = GroupLimits(4, 4, 2, 2, 3)
    monkeypatch.setattr(
        triton_paged, "grouper_for", lambda table, shape, lines=1: Grouper(table, limits)
    )
    engine = load(str(folder))
    engine.executor.capture(decode_buckets(16), lambda what, done: None)
    replayed: list[Any] = []
    replay = engine.executor._graphs.replay
    monkeypatch.setattr(engine.executor._graphs, "replay", lambda b: (replayed.append(b), replay(b)))
    rows = [Row(0, PROMPT, list(range(32)))]
    engine.start(*rows)
    rows += [
        Row(row, [*PROMPT[:8], row, 5], [0, 1, *range(32 * row, 32 * row + 30)], 8) for row in (1, 2)
    ]
    engine.start(*rows[1:])
    replayed.clear()
    for most in ([3, 3, 2], [1, 0, 3], [0, 0, 0], [3, 3, 3]):
        engine.go_on(rows, most)
    assert engine.all_accepted
    assert [(b.grouped, b.drafted) for b in replayed] == [
        (True, True), (True, True), (True, False), (True, True)
    ]  # fmt: skip
    for row in rows:
        assert row.output == plain(row.prompt, len(row.output))


def test_extends_with_drafts_of_their_own(load: Any, folder: Path, plain: Any) -> None:
    """Tokens that were forced, and drafts that a plan brings: the row is caught up with."""
    wanted = plain(PROMPT, 8)
    engine, one = load(str(folder), depth=1), Row(0, PROMPT, list(range(32)))
    engine.start(one)
    for given in (wanted[1:3], [wanted[4] + 1 - 2 * (wanted[4] > 0), 3]):
        length = int(engine.executor.rows.lengths[0])
        run = [one.output[-1], *given]
        engine.launch(StepPlan(0, extends=[ExtendRow(0, length, pack(run), True, drafts=2)]))
    engine.go_on([one], [3])
    engine.go_on([one], [3])
    assert engine.all_accepted
    assert one.output[:8] == wanted


def test_a_shorter_context_ends_the_guesses(load: Any, tmp_path: Path) -> None:
    short = write_folder(tmp_path / "short", **SIZES | {"max_position_embeddings": 16})
    engine, one = load(str(short), depth=1), Row(0, PROMPT, list(range(32)))
    engine.start(one)
    while len(one.output) < 8:
        last = len(one.prompt) + len(one.output) - 1
        engine.go_on([one], [3])
        assert engine.found[-1] == [max(0, min(3, 16 - last))]


@pytest.mark.parametrize(
    ("sampling", "page_size"), [(GREEDY, 16), (SEEDED, 1)], ids=["greedy 16", "seeded 1"]
)
def test_another_model_changes_nothing(
    load: Any, tmp_path: Path, page_size: int, sampling: SamplingParams
) -> None:
    """Four rows, drafts of a model that is mostly wrong, in random numbers; pages come as rows grow."""
    small = write_folder(tmp_path / "small", **SIZES | {"hidden_size": 64, "vocab_size": 192})
    outputs = []
    for draft in ("none", str(small)):
        engine = load(draft, page_size=page_size, max_rows=12)
        rows, dice = [], random.Random(1)
        free = list(range(1024 // page_size))
        dice.shuffle(free)
        held = dict[int, int]()
        for row in range(4):
            prompt = PROMPT[row:]
            held[row] = -(-len(prompt) // page_size) + 1
            rows.append(Row(row, prompt, [free.pop() for _ in range(held[row])]))
        engine.start(*rows, sampling=sampling)
        while left := [row for row in rows if len(row.output) < LENGTH]:
            most = [dice.randint(0, 2) if draft != "none" else 0 for _ in left]
            grows = []
            for row, count in zip(left, most, strict=True):
                end = int(engine.executor.rows.lengths[row.row]) + 1 + count
                more = max(0, -(-end // page_size) - held[row.row])
                if more:
                    grows.append(GrowRow(row.row, pack(free.pop() for _ in range(more))))
                    held[row.row] += more
            drafts = pack(most) if any(most) else b""
            decodes = pack(row.row for row in left)
            engine.launch(StepPlan(0, grows=grows, decodes=decodes, drafts=drafts))
        engine.finish()
        outputs.append([row.output[:LENGTH] for row in rows])
    assert outputs[0] == outputs[1]
    assert engine.drafted > engine.accepted
    assert engine.drafted > 2 * LENGTH // 3


def test_keys_of_the_draft_model_count_as_memory(load: Any, folder: Path) -> None:
    alone, both = load(), load(str(folder))
    layout = alone.executor.info.kv_bytes_per_token
    assert both.executor.info.kv_bytes_per_token == 2 * layout + 4
    assert both.executor.drafts.drafter.bytes_per_token == layout
    assert alone.executor.info.drafter == ""


def test_undrafted_rows_cost_nothing(load: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(str(folder))
    drafter = engine.executor.drafts.drafter
    ran: list[Any] = []
    monkeypatch.setattr(drafter, "_forward", lambda *about: ran.append(about))
    rows = [Row(row, PROMPT[row:], list(range(32 * row, 32 * row + 32))) for row in range(2)]
    engine.start(*rows)
    for _ in range(3):
        engine.go_on(rows, [0, 0])
    assert ran == []
    assert np.array_equal(drafter._keys.missing[:2], [len(PROMPT) + 3, len(PROMPT) - 1 + 3])


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize(("deterministic", "page_size"), [(False, 1), (True, 16)])
def test_the_bundled_models(drive: Any, deterministic: bool, page_size: int) -> None:
    """In CUDA graphs, in bfloat16: nothing is compiled while it serves, many guesses are right.

    With deterministic kernels the outputs are those without drafts, bit by bit.
    """
    from triton import knobs  # type: ignore[import-untyped]

    from ramify.gpu.startup.drafts import bundled

    dice, outputs, compiled = random.Random(4), dict[str, list[list[int]]](), list[str]()
    prompts = [[dice.randrange(8192) for _ in range(dice.randint(1, 300))] for _ in range(12)]
    for draft in ("none", "model"):
        executor = drive(
            bundled("default_model"), device="cuda", draft=draft, draft_tokens=4, max_rows=64,
            page_size=page_size, deterministic=deterministic, kv_tokens=12 * 512,
        ).executor  # fmt: skip
        engine, each = Engine(executor), 512 // page_size
        rows = [
            Row(i, prompt, list(range(i * each, (i + 1) * each))) for i, prompt in enumerate(prompts)
        ]
        knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"])
        try:
            for row in rows:
                engine.start(row, sampling=SEEDED if row.row % 2 else GREEDY)
            while left := [row for row in rows if len(row.output) < 64]:
                most = [dice.randint(0, 4) if draft != "none" else 0 for _ in left]
                engine.go_on(left, most)
            engine.finish()
        finally:
            knobs.runtime.jit_post_compile_hook = None
        outputs[draft] = [row.output[:64] for row in rows]
        assert not executor.rows.unsettled.any()
        executor.close()
    assert compiled == []
    assert engine.drafted > engine.accepted > engine.drafted // 10
    if deterministic:
        assert outputs["none"] == outputs["model"]
