"""Fixtures of the executor's tests: tiny checkpoints made by `transformers`, and plans for them."""

import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.gpu.startup.load import load_executor
from ramify.protocol.config import ModelConfig
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams
from tests.gpu.interpreter import quicken

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

GREEDY = SamplingParams(temperature=0.0)


class Driver:
    """Runs requests on an executor as a scheduler would, with as few words as possible."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self.page_size = executor.info.page_size
        self.states: dict[int, int] = {}  # the newest state slot of each row

    def open(
        self,
        row: int,
        pages: Sequence[int],
        cached: int = 0,
        sampling: SamplingParams = GREEDY,
        **more: Any,
    ) -> OpenRow:
        return OpenRow(row, 100 + row, pack(pages), cached, sampling, **more)

    def pages(self, first_token: int, tokens: int) -> list[int]:
        """Pages for `tokens` tokens from a place in the pool."""
        first = first_token // self.page_size
        return list(range(first, first + -(-tokens // self.page_size)))

    def plan(self, **plan: Any) -> StepPlan:
        """A plan. Row r reads its newest state slot, and writes one of 1 + 3 r, 2 + 3 r and 3 + 3 r."""
        for opened in plan.get("opens", ()):
            self.states[opened.row] = 0
        if self.executor.info.state_slots:
            running = [extend.row for extend in plan.get("extends", ())] + list(plan.get("decodes", ()))
            pairs: list[int] = []
            for row in running:
                newest = self.states[row]
                first = 1 + 3 * row
                self.states[row] = first + (newest - first + 1) % 3 if newest >= first else first
                pairs += newest, self.states[row]
            plan.setdefault("states", pack(pairs))
        for name in ("decodes", "closes"):
            if name in plan:
                plan[name] = pack(plan[name])
        return StepPlan(step=0, **plan)

    def forward(self, **plan: Any) -> torch.Tensor:
        """Run a plan without taking over what was sampled: logits."""
        _, logits = self.executor.forward(self.plan(**plan))
        assert logits is not None
        return logits

    def step(self, **plan: Any) -> dict[int, int]:
        """Run a plan; the sampled token of each row."""
        result = self.executor.launch(self.plan(**plan)).result()
        return dict(zip(unpack(result.rows), unpack(result.tokens), strict=True))

    def prefill(
        self, row: int, start: int, tokens: Sequence[int], sample: bool = True
    ) -> dict[int, int]:
        return self.step(extends=[ExtendRow(row, start, pack(tokens), sample)])

    def decode(self, rows: Sequence[int], steps: int) -> dict[int, list[int]]:
        output: dict[int, list[int]] = {row: [] for row in rows}
        for _ in range(steps):
            for row, token in self.step(decodes=rows).items():
                output[row].append(token)
        return output

    def generate(
        self,
        row: int,
        tokens: Sequence[int],
        n: int,
        pages: Sequence[int],
        sampling: SamplingParams = GREEDY,
    ) -> list[int]:
        """One request alone, from open to close."""
        first = self.step(
            opens=[self.open(row, pages, sampling=sampling)],
            extends=[ExtendRow(row, 0, pack(tokens), True)],
        )
        output = [first[row], *self.decode([row], n - 1)[row]]
        self.step(closes=[row])
        return output


def dot_in_order(self: Any, a: Any, b: Any, d: Any, input_precision: Any, imprecise: Any) -> Any:
    """What `tl.dot` is in the interpreter: each output one sum of its own, in the inputs' order.

    The interpreter's own asks numpy's matmul, that is BLAS, which may add in another order where
    there is another number of rows (OpenBLAS' Haswell kernels do). Tests that compare bits would then
    test the machine's library instead of our kernels.
    """
    from triton.runtime.interpreter import TensorHandle

    left, right = (part.data.astype(d.data.dtype, copy=False) for part in (a, b))
    products = left[..., :, :, None] * right[..., None, :, :]
    return TensorHandle(d.data + products.sum(axis=-2), d.dtype.scalar)


@pytest.fixture
def ordered_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter adds in one order, whatever the machine's BLAS does."""
    if not torch.cuda.is_available():
        from triton.runtime.interpreter import InterpreterBuilder

        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_in_order)


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that are ranks take turns in Triton's interpreter."""
    if torch.cuda.is_available():
        return
    pytest.importorskip("triton", minversion="3.7")
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    lock = threading.RLock()

    def alone(call: Callable[..., Any]) -> Callable[..., Any]:
        def locked(*args: Any, **options: Any) -> Any:
            with lock:
                return call(*args, **options)

        return locked

    monkeypatch.setattr(GridExecutor, "__call__", alone(GridExecutor.__call__))
    # two threads of Python 3.11 that parse at once end with "AST constructor recursion depth mismatch"
    monkeypatch.setattr(InterpretedFunction, "rewrite", alone(InterpretedFunction.rewrite))


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> None:
    if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
        quicken(importlib.import_module("triton.runtime.interpreter"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence's keys are shared by programs that fill a GPU; each takes the interpreter 50 ms.

    And where tables of constraints lie takes a while to be filled with zeros.
    """
    if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
        monkeypatch.setattr("ramify.gpu.attention.triton_decode._MOST_SPLITS", 4)
        monkeypatch.setattr("ramify.gpu.sampling.device_constraints.ARENA_BYTES", 8 << 20)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cuda triton", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """Where `drive` of the same test runs the model, and on which attention if not torch's."""
    if request.param != "cpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return str(request.param)


@pytest.fixture
def drive(request: pytest.FixtureRequest) -> Iterator[Callable[..., Driver]]:
    """drive(folder, **ModelConfig fields) or drive(executor). What it loads is closed at the end."""
    chosen = request.getfixturevalue("device") if "device" in request.fixturenames else "cpu"
    where, _, attention = chosen.partition(" ")
    loaded: list[Any] = []

    def make(source: Any, **settings: Any) -> Driver:
        if isinstance(source, Path):
            defaults = {"device": where, "kv_tokens": 4096, "attention": attention or "auto"}
            # what is compared with a reference is not rounded, unless a test says so
            settings = {**defaults, "quantization": "none", **settings}
            source = load_executor(ModelConfig(path=source, **settings), lambda what, share: None)
            loaded.append(source)
        return Driver(source)

    yield make
    for executor in loaded:
        executor.close()


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    """config.json of a Llama that needs no checkpoint (`load_format="dummy"`)."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
    }
