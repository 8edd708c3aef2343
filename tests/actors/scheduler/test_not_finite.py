"""KV that is not finite fails its own request at most, whoever computed it, and does not stay.

The scheduler's core over the real radix cache, with the fake executor and with torch's on the CPU.
"""

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.actors.cache.cache import RadixCache
from ramify.gpu.executors.base import BadLogits
from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.executors.fake_model import FakeModel
from ramify.gpu.startup.load import load_executor
from ramify.protocol.config import ModelConfig
from ramify.protocol.messages import ExtendBranch, OpenBranch
from ramify.protocol.plan import StepPlan, StepResult, pack
from tests.actors.cache.integrity import check

BAD = 77  # the token whose KV is spoiled
PROMPT = [*range(20, 40), BAD, *range(40, 50)]
SYSTEM = PROMPT[:16]


class Cache:
    """The radix cache as the world wants it."""

    def __init__(self, pages: int) -> None:
        self.cache = RadixCache(pages)
        self.branches: dict[int, list[int]] = {}
        self.runs = self.cache.runs

    def put(self, branch: int, tokens: list[int]) -> None:
        self.branches[branch] = list(tokens)
        self.cache.open_branch(OpenBranch(branch))
        self.cache.extend_branch(ExtendBranch(branch, pack(tokens)))

    def moved(self, executor: Any, now: float) -> tuple[()]:
        """It has no disk."""
        return ()

    def settle(self, settle: Any) -> Any:
        settled = self.cache.settle(settle)
        check(self.cache)
        return settled


class Executor:
    """One of ours as the world wants it. `spoil(n)`: the next n times BAD is computed, it goes wrong."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self.plans: deque[StepPlan] = deque()
        self.faults = 0
        if isinstance(executor, FakeExecutor):
            self.spoil(0)
        else:
            model = executor.model
            self.good = model.embedding[BAD].clone()

    def spoil(self, times: int) -> None:
        self.faults = times
        if isinstance(self.executor, FakeExecutor):
            self.executor.faults = {BAD: times}

    def run(self) -> StepResult:
        plan = self.plans.popleft()
        if not isinstance(self.executor, FakeExecutor):
            runs_it = any(BAD in memoryview(extend.tokens).cast("i") for extend in plan.extends)
            self.executor.model.embedding[BAD] = torch.nan if runs_it and self.faults else self.good
            self.faults -= runs_it and self.faults > 0
        try:
            return self.executor.launch(plan).result()
        except BadLogits as error:
            return error.result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=["fake", "torch"])
def w(request: pytest.FixtureRequest, world: Any, folder: Path) -> Any:
    """Chunks of 16 tokens, so that a prompt of 31 is published before it is sampled."""
    made = world(pages=128, budget=16, context=200, cache=Cache(128))
    if request.param == "fake":
        executor: Any = FakeExecutor(
            FakeModel(vocab_size=128), pages=128, context=200, max_rows=4, step_tokens=16
        )
    else:
        torch.manual_seed(0)
        settings = ModelConfig(
            path=folder, device="cpu", load_format="dummy", kv_tokens=128, max_rows=4, step_tokens=16
        )
        executor = load_executor(settings, lambda what, share: None)
    made.executor = Executor(executor)
    return made


def answer(w: Any, request: int, prompt: list[int] = PROMPT, n: int = 4) -> Any:
    """The end of a request of its own, alone."""
    event = w.submit(request, prompt, max_tokens=n)
    w.run(event)
    return w.finished[event.request]


def resident(w: Any, request: int) -> int:
    cache = w.cache.cache
    return int(cache._resident(cache.branches.head(1 << 32 | request), {})[0])


def test_the_same_prompt_works_again(w: Any) -> None:
    w.executor.spoil(1)
    failed = answer(w, 1)
    assert (failed.reason, failed.error, failed.output) == ("error", "internal", 0)
    assert resident(w, 1) == 0
    assert answer(w, 2).reason == "length"
    w.executor.spoil(0)
    assert w.output[1 << 32 | 2] == answer_again(w)


def answer_again(w: Any) -> list[int]:
    answer(w, 50)
    return w.output[1 << 32 | 50]


def test_what_was_computed_ahead_fails_nobody(w: Any) -> None:
    """Nothing is sampled there: the generation finds out, and computes it again by itself."""
    w.executor.spoil(1)
    assert answer(w, 1, n=0).reason == "length"
    assert resident(w, 1) == len(PROMPT)
    assert answer(w, 2).reason == "length"
    assert w.output[1 << 32 | 2] == answer_again(w)


def test_a_prompt_that_always_fails_ends_after_two_attempts(w: Any) -> None:
    w.executor.spoil(100)
    answer(w, 1, n=0)
    before = len(w.sent)
    failed = answer(w, 2)
    assert (failed.reason, failed.error) == ("error", "internal")
    assert len(w.sent) - before < 8
    assert resident(w, 2) == 0


def test_a_prefix_that_others_sampled_over_stays(w: Any) -> None:
    assert answer(w, 1, SYSTEM).reason == "length"
    w.executor.spoil(1)
    assert answer(w, 2).error == "internal"
    assert resident(w, 1) >= len(SYSTEM)
    good = answer(w, 3)
    assert (good.reason, good.cached) == ("length", len(SYSTEM))


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[10:24]], ids=["two chunks", "one chunk"])
def test_neighbours_with_the_same_prompt_get_their_answers(w: Any, prompt: list[int]) -> None:
    """They wait for what the first one computes; the fault is its own."""
    w.executor.spoil(1)
    events = [w.submit(i, [*prompt, i], max_tokens=4) for i in range(1, 4)]
    w.run(*events)
    ends = [w.finished[event.request] for event in events]
    assert [end.reason for end in ends].count("error") <= 1
    for event, end in zip(events, ends, strict=True):
        if end.reason == "length":
            assert len(w.output[event.request]) == 4
    assert answer(w, 9).reason == "length"
    assert w.cache.cache.referenced == 0


def test_tokens_that_were_accepted_stay(w: Any) -> None:
    """A step that fails in mid-answer: what came before it was finite and is kept."""
    event = w.submit(1, SYSTEM, max_tokens=8)
    w.turn(event)
    w.cache_settles()
    while len(w.output.get(event.request, ())) < 3:
        w.result()
    executor = w.executor.executor
    if isinstance(executor, FakeExecutor):
        executor._spoiled[:] = True
    else:
        for kv in executor._ops._pool.layers:
            kv.v[:] = torch.nan
    w.run()
    end = w.finished[event.request]
    assert (end.reason, end.error) == ("error", "internal")
    assert end.output >= 3
    assert resident(w, 1) == len(SYSTEM) + end.output - 1
