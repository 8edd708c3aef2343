"""Steps by CUDA graphs against the same steps launched kernel by kernel; and that all was compiled.

On a CPU nothing is captured, but the steps are padded all the same.
"""

import gc
import json
import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ramify.gpu.startup.load import load_executor
from ramify.gpu.step.buckets import Bucket, decode_buckets, mixed_buckets
from ramify.gpu.step.graphs import StepGraphs
from ramify.protocol.config import ModelConfig
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


class Graph:
    """A CUDA graph's interface, without CUDA: `events` has what became of all of them."""

    events: list[str]

    def pool(self) -> int:
        return 7

    def replay(self) -> None:
        self.events.append("replay")

    def reset(self) -> None:
        self.events.append("reset")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What becomes of graphs, which torch would capture on a GPU."""
    found: list[str] = []

    @contextmanager
    def graph(captured: Graph, pool: int | None) -> Iterator[None]:
        captured.events = found
        found.append(f"begin {pool}")
        try:
            yield
        finally:
            found.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


class Steps:
    """Who runs steps and has their graphs."""

    def __init__(self, events: list[str], error: Exception | None = None) -> None:
        self.events, self.error = events, error
        self.graphs = StepGraphs(self.prepare, self.run, torch.device("cuda"))

    def prepare(self, bucket: Bucket) -> None:
        self.events.append(f"prepare {bucket.lines} {'on' if gc.isenabled() else 'off'}")

    def run(self, bucket: Bucket) -> None:
        self.events.append(f"run {'on' if gc.isenabled() else 'off'}")
        if self.error is not None:
            raise self.error


def test_the_collector_rests_during_a_capture(events: list[str]) -> None:
    assert gc.isenabled()
    steps = Steps(events)
    steps.graphs.capture(decode_buckets(2), lambda what, done: None)
    capture = ["run off", "end"]
    assert events == ["prepare 2 on", "begin None", *capture, "prepare 1 on", "begin 7", *capture]
    assert gc.isenabled()
    gc.disable()
    try:
        steps.graphs.capture(decode_buckets(1), lambda what, done: None)
        assert not gc.isenabled()
    finally:
        gc.enable()
    steps.error = ValueError("does not fit")
    with pytest.raises(ValueError, match="does not fit"):
        steps.graphs.capture(decode_buckets(1), lambda what, done: None)
    assert gc.isenabled()


def test_graphs_are_destroyed_when_they_are_closed(events: list[str]) -> None:
    """And nothing but its owner keeps alive what they belong to."""
    steps = Steps(events)
    steps.graphs.capture(decode_buckets(2), lambda what, done: None)
    events.clear()
    steps.graphs.replay(decode_buckets(1)[0])
    steps.graphs.close()
    assert events == ["replay", "reset", "reset"]
    gc.disable()
    try:
        gone = weakref.ref(steps)
        del steps
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_a_closed_executor_holds_nothing_and_is_held_by_nobody(
    draft: str, tmp_path: Path, tiny_config: dict[str, Any]
) -> None:
    """No collection is needed to be rid of it and of its graphs, whenever its last reference goes."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config | {"head_dim": 16}))
    config = ModelConfig(
        path=tmp_path, device="cuda" if CUDA else "cpu", dtype="float32", load_format="dummy",
        attention="triton", max_rows=ROWS, kv_tokens=256, page_size=16, draft=draft,
    )  # fmt: skip
    executor: Any = load_executor(config, lambda what, done: None)
    executor.capture(decode_buckets(ROWS)[:1], lambda what, done: None)
    opened = OpenRow(0, 0, pack([0, 1]), 0, SamplingParams(temperature=0.0))
    first = StepPlan(0, opens=[opened], extends=[ExtendRow(0, 0, pack([1, 2]), True)])
    drafts = pack([2]) if draft != "none" else b""
    pending = [executor.launch(plan) for plan in (first, StepPlan(1, decodes=pack([0]), drafts=drafts))]
    del pending
    held = [weakref.ref(part) for part in (executor, executor._graphs, executor.model)]
    gc.disable()
    try:
        executor.close()
        assert [part() for part in held[1:]] == [None, None]
        executor.close()
        del executor
        assert held[0]() is None
    finally:
        gc.enable()


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
