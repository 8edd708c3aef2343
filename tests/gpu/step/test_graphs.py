"""Steps by CUDA graphs against the same steps launched kernel by kernel; and that all was compiled.

On a CPU nothing is captured, but the steps are padded all the same.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ramify.gpu.step.buckets import Bucket, decode_buckets, mixed_buckets
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams

CUDA = torch.cuda.is_available()
# the interpreter of 3.6 does not know numpy 2.4
pytest.importorskip("triton", minversion=None if CUDA else "3.7")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's: garbage in padding

ROWS = 40 if CUDA else 3
VOCABULARY = 128
LONGEST = 200 if CUDA else 3


@pytest.fixture
def load(
    tmp_path: Path, tiny_config: dict[str, Any], drive: Any, monkeypatch: pytest.MonkeyPatch
) -> Any:
    from ramify.gpu.attention.triton_paged import TritonPaged

    # so that the larger ones of these small steps take the way of large ones
    monkeypatch.setattr(TritonPaged, "fewest_balanced", 16 if CUDA else 4)
    (tmp_path / "config.json").write_text(
        json.dumps(
            tiny_config
            | {"head_dim": 16, "max_position_embeddings": 2048, "num_hidden_layers": 2 if CUDA else 1}
        )
    )

    def make(**more: Any) -> Any:
        options: dict[str, Any] = {"device": "cuda" if CUDA else "cpu", "dtype": "float32"}
        options |= {
            "load_format": "dummy",
            "attention": "triton",
            "max_rows": ROWS,
            "step_tokens": 512,
            "kv_tokens": 65536,
        }
        return drive(tmp_path, **options | more).executor

    return make


def plans(seed: int, steps: int, page_size: int) -> list[StepPlan]:
    """Random requests: prefilled in chunks, a few decodes each, closed; at any step some of each."""
    dice = random.Random(seed)
    waiting: dict[int, tuple[int, int]] = {}  # row -> (done, prompt)
    decoding: dict[int, int] = {}  # row -> steps left
    made = []
    for step in range(steps):
        closes = [row for row, left in decoding.items() if left == 0]
        for row in closes:
            del decoding[row]
        opens: list[OpenRow] = []
        extends: list[ExtendRow] = []
        for row in dice.sample(range(ROWS), dice.randint(1, ROWS // 2)):
            if row in waiting or row in decoding:
                continue
            first = row * 1024 // page_size
            pages = pack(range(first, first + 1024 // page_size))
            heat = dice.choice([0.0, 0.9])
            settings = SamplingParams(temperature=heat, seed=row)
            opens.append(OpenRow(row, row, pages, 0, settings))
            waiting[row] = 0, dice.choice([1, 2, LONGEST // 2, dice.randint(1, LONGEST)])
        decodes = [row for row in decoding if dice.random() < 0.9]
        for row in decodes:
            decoding[row] -= 1
        budget = 512
        for row, (done, prompt) in list(waiting.items()):
            size = min(budget, prompt - done, dice.choice([prompt, LONGEST // 2 + 1]))
            if not size or dice.random() < 0.3:
                continue
            budget -= size
            tokens = pack(dice.randrange(VOCABULARY) for _ in range(size))
            extends.append(ExtendRow(row, done, tokens, done + size == prompt))
            waiting[row] = done + size, prompt
            if done + size == prompt:
                del waiting[row]
                decoding[row] = dice.randrange(1, 12)
        made.append(StepPlan(step, pack(closes), opens, [], extends, pack(decodes)))
    return made


def run(executor: Any, todo: list[StepPlan]) -> list[tuple[list[int], list[int]]]:
    """Rows and tokens of each step, two steps in flight."""
    pending: list[Any] = []
    results: list[Any] = []
    for plan in todo:
        pending.append(executor.launch(plan))
        if len(pending) == 2:
            results.append(pending.pop(0).result())
    results += [step.result() for step in pending]
    return [(list(unpack(r.rows)), list(unpack(r.tokens))) for r in results]


@pytest.mark.parametrize("page_size", [1, 16] if CUDA else [16])
def test_padding_and_graphs_change_no_token(load: Any, page_size: int) -> None:
    todo = plans(page_size, 60 if CUDA else 3, page_size)
    graphs, eager = load(page_size=page_size), load(page_size=page_size)
    graphs.capture([*decode_buckets(ROWS), *mixed_buckets(ROWS, 512)], lambda what, done: None)
    eager.capture([], lambda what, done: None)
    assert run(graphs, todo) == run(eager, todo)


def test_a_captured_size_runs_grouped_too(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever captures names sizes; which decodes share keys is found out by each step."""
    rows, heat = range(ROWS - 1), SamplingParams(temperature=0.9, seed=1)
    opens = [OpenRow(row, row, pack(range(2 * row, 2 * row + 2)), 0, heat) for row in rows]
    extends = [ExtendRow(row, 0, pack([row + 1, row + 2]), True) for row in rows]
    todo = [StepPlan(0, opens=opens, extends=extends)]
    todo += [StepPlan(step, decodes=pack(rows)) for step in (1, 2, 3)]
    wanted = run(load(page_size=16), todo)
    executor = load(page_size=16)
    attention = executor._attention
    items = np.zeros((4, 5), np.int32)

    def nobody(bucket: Bucket) -> dict[str, Any]:  # groups without members: nothing is shared after all
        size = bucket.decodes
        return {"shared_items": items, "members": np.zeros(size, np.int32),
                "own": np.zeros((size, 4), np.int32)}  # fmt: skip

    plan = attention.plan
    monkeypatch.setattr(attention, "room", nobody)
    monkeypatch.setattr(
        attention, "plan",
        lambda step, bucket, captured: plan(step, bucket, captured) if step.extends else nobody(bucket),
    )  # fmt: skip
    sizes = decode_buckets(ROWS)
    assert executor.capture(sizes, lambda what, done: None) == 2 * len(sizes)
    replayed: list[Any] = []
    replay = executor._graphs.replay
    monkeypatch.setattr(executor._graphs, "replay", lambda b: (replayed.append(b), replay(b)))
    assert run(executor, todo) == wanted
    assert [bucket.grouped for bucket in replayed] == [True] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_nothing_is_compiled_once_it_is_ready(load: Any) -> None:
    """Steps in graphs and without, of any size, alignment and number of runs."""
    from triton import knobs  # type: ignore[import-untyped]

    compiled: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"])
    try:
        for seed, captured, deterministic in ((5, True, False), (6, False, False), (7, True, True)):
            executor = load(dtype="bfloat16", deterministic=deterministic)
            if not captured:
                executor.capture([], lambda what, done: None)
            compiled.clear()
            run(executor, plans(seed, 80, 1))
            assert compiled == []
    finally:
        knobs.runtime.jit_post_compile_hook = None
