"""The deterministic mode: warm = cold, alone = batched, cut = whole, bit for bit."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ramify.gpu.attention.spec import AttentionShape, AttentionSpec
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.startup.load import load_executor
from ramify.gpu.step.buckets import Bucket, decode_buckets, mixed_buckets
from ramify.gpu.step.inputs import StepInputs
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams

CUDA = torch.cuda.is_available()
# the interpreter of 3.6 does not know numpy 2.4
pytest.importorskip("triton", minversion=None if CUDA else "3.7")

pytestmark = pytest.mark.usefixtures("ordered_dots")

SIZES: dict[str, Any] = {"num_hidden_layers": 1, "head_dim": 16}
PROMPTS, OUTPUTS, PREFIX = [5, 70, 9], 3, 4
if CUDA:
    SIZES = {
        "vocab_size": 3001, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 12,
        "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 3,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    PROMPTS, OUTPUTS, PREFIX = [5, 700, 2100, 64, 65, 1500, 31, 129, 2047, 700, 3, 1024] * 5, 12, 600

Logits = dict[tuple[int, int], torch.Tensor]


class Traffic:
    """Requests with fixed tokens on an executor; keeps the logits of (request, position)."""

    def __init__(self, executor: Any, seed: int) -> None:
        self.executor = executor
        self.size = executor.info.page_size
        self.random = random.Random(seed)
        prefix = self._tokens(PREFIX)  # every second request begins with it
        self.texts = []
        for index, length in enumerate(PROMPTS):
            text = self._tokens(length + OUTPUTS)
            self.texts.append((prefix + text)[: len(text)] if index % 2 else text)
        self.pages = list(range(executor.info.pages))

    def alone(self, request: int, logits: Logits) -> None:
        """One request in one piece, then its decodes."""
        text, prompt = self.texts[request], PROMPTS[request]
        pages = pack(self.pages[: -(-len(text) // self.size)])
        opened = OpenRow(0, request, pages, 0, SamplingParams(temperature=0.0))
        self._run({0: request}, logits, opens=[opened], extends=[(0, 0, prompt)])
        for at in range(prompt, len(text) - 1):
            self._run({0: request}, logits, decodes=[(0, at)])
        self._run({}, logits, closes=pack([0]))

    def together(self, logits: Logits, rows: int) -> None:
        """All requests: in any order, cut anywhere, beside each other, some with a cached prefix."""
        order = list(range(len(self.texts)))
        self.random.shuffle(order)
        self.random.shuffle(self.pages)
        free, running = list(range(rows)), {}
        done, room = dict[int, int](), 0  # tokens computed by row; pages handed out
        cached: list[int] = []  # pages that hold the prefix
        while order or running:
            opens, closes = [], []
            for row in [row for row, own in running.items() if done[row] == len(self.texts[own]) - 1]:
                closes.append(row)
                del running[row]
            while order and len(free) > 0 and self.random.random() < 0.7:
                own, row = order.pop(), free.pop()
                text, shared = self.texts[own], 0
                if own % 2 and cached:
                    shared = min(len(cached) * self.size, PROMPTS[own] - 1) // self.size * self.size
                count = -(-len(text) // self.size) - shared // self.size
                fresh = [self.pages[(room + i) % len(self.pages)] for i in range(count)]
                room += count
                pages = cached[: shared // self.size] + fresh
                opens.append(OpenRow(row, own, pack(pages), shared, SamplingParams(temperature=0.0)))
                running[row], done[row] = own, shared
                if own % 2 and not cached and PROMPTS[own] > PREFIX:
                    candidate = row, pages[: PREFIX // self.size]
                    self.candidate = candidate
            extends, decodes, left = [], [], self.executor.info.step_tokens
            for row, own in running.items():
                prompt = PROMPTS[own]
                if self.random.random() < 0.3:
                    continue
                if done[row] >= prompt:
                    decodes.append((row, done[row]))
                elif left:
                    size = min(left, self.random.choice([1, 17, 64, 200, 5000]), prompt - done[row])
                    extends.append((row, done[row], size))
                    left -= size
            self._run(
                running, logits, opens=opens, extends=extends, decodes=decodes, closes=pack(closes)
            )
            free += closes
            for row, start, size in [*extends, *((row, at, 1) for row, at in decodes)]:
                done[row] = start + size
            if not cached and getattr(self, "candidate", None) is not None:
                row, pages = self.candidate
                if done.get(row, 0) >= PREFIX:
                    cached = pages

    def _run(
        self, running: dict[int, int], logits: Logits, extends: Any = (), decodes: Any = (), **plan: Any
    ) -> None:
        for row, at in decodes:  # the tokens are given, not sampled
            self.executor._last[row] = self.texts[running[row]][at]
        parts = [
            ExtendRow(row, start, pack(self.texts[running[row]][start : start + size]),
                      start + size >= PROMPTS[running[row]])
            for row, start, size in extends
        ]  # fmt: skip
        rows = pack([row for row, _ in decodes])
        step, values = self.executor.forward(StepPlan(0, extends=parts, decodes=rows, **plan))
        for line, index in enumerate(step.sampling.tolist()):
            own = running[int(step.rows[index])]
            at = int(step.starts[index] + step.counts[index])
            logits[own, at] = values[line].clone()

    def _tokens(self, count: int) -> list[int]:
        return self.random.choices(range(self.executor.info.vocab_size), k=count)


@pytest.fixture(params=[1, 16])
def executor(request: Any, tmp_path: Path, tiny_config: dict[str, Any]) -> Iterator[Any]:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config | SIZES))
    torch.manual_seed(1)
    made = load_executor(
        ModelConfig(
            path=tmp_path, device="cuda" if CUDA else "cpu", dtype="bfloat16" if CUDA else "float32",
            attention="auto" if CUDA else "triton", deterministic=True, load_format="dummy",
            page_size=request.param, kv_tokens=200_000 if CUDA else 1024, max_rows=24 if CUDA else 3,
            step_tokens=4096,
        ),
        lambda what, share: None,
    )  # fmt: skip
    yield made
    made.close()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("seed", [1, 2])
def test_random_traffic_on_a_gpu(executor: Any, seed: int) -> None:
    check_traffic(executor, seed)


@pytest.mark.skipif(CUDA, reason="a small version, for the interpreter")
def test_random_traffic(executor: Any) -> None:
    check_traffic(executor, 1)


def check_traffic(executor: Any, seed: int) -> None:
    traffic = Traffic(executor, seed)
    alone: Logits = {}
    for request in range(len(PROMPTS)):
        traffic.alone(request, alone)
    together: Logits = {}
    traffic.together(together, executor.info.max_rows)
    assert alone.keys() == together.keys()
    assert len(alone) == len(PROMPTS) * OUTPUTS
    different = [key for key, own in alone.items() if not torch.equal(own, together[key])]
    assert different == []


# each program takes the interpreter milliseconds, and the traffic has pages of one token there
either_page_size = pytest.mark.parametrize("executor", [1, 16] if CUDA else [16], indirect=True)


@either_page_size
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about the garbage in padding
def test_a_start_plays_steps_of_padding(executor: Any) -> None:
    """As the rehearsal does on a GPU, extends among them, for which the attention has no plan."""
    rows = executor.info.max_rows
    for bucket in [*decode_buckets(rows), *mixed_buckets(rows, 32)]:
        executor.run_padding(bucket)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_graphs_give_the_same_tokens(executor: Any) -> None:
    """Sampled tokens through CUDA graphs of several sizes, two steps in flight."""
    traffic = Traffic(executor, 3)
    settings = SamplingParams(temperature=2.0, top_p=0.9, seed=5, logprobs=3)
    prompt = traffic.texts[1][: PROMPTS[1]]
    outcomes = []
    for others in (0, 2, 20):
        opens = [
            OpenRow(row, row, pack(range(row * 800, row * 800 + 800)), 0, settings)
            for row in range(others + 1)
        ]
        if executor.info.page_size > 1:
            opens = [
                OpenRow(row, row, pack(range(row * 60, row * 60 + 60)), 0, settings)
                for row in range(others + 1)
            ]
        extends = [ExtendRow(0, 0, pack(prompt), True)]
        extends += [ExtendRow(row, 0, pack([row, 7, row]), True) for row in range(1, others + 1)]
        launched = [executor.launch(StepPlan(0, opens=opens, extends=extends))]
        rows = list(range(others + 1))
        output: list[Any] = []
        for step in range(40):
            launched.append(executor.launch(StepPlan(1 + step, decodes=pack(rows))))
            result = launched.pop(0).result()
            at = unpack(result.rows).index(0)
            output.append((unpack(result.tokens)[at], result.logprobs[at]))
        launched.pop(0).result()
        executor.launch(StepPlan(99, closes=pack(rows))).result()
        outcomes.append(output)
    assert outcomes[0] == outcomes[1] == outcomes[2]


ASKS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=3),
    SamplingParams(temperature=1.5, min_p=0.1, seed=4),
    SamplingParams(temperature=0.9, top_k=5, logprobs=2, seed=5),
    SamplingParams(temperature=0.8, top_p=0.6, repetition_penalty=1.2, seed=6),
]


def story(executor: Any, own: SamplingParams, prompt: list[int], cuts: list[int], company: int) -> Any:
    """Tokens and log-probabilities of row 0, whose prompt is computed in chunks of `cuts`.

    `company`: so many other rows come and go beside it, each with settings of its own.
    """
    dice, size, step = random.Random(company), executor.info.page_size, 0
    room = min(executor.info.pages // (company + 1), executor.info.context // size)  # pages of a row
    longest = min(100, room * size - 8)
    waiting: dict[int, tuple[int, int]] = {}  # row -> (done, prompt)
    left: dict[int, int] = {}  # row -> decodes
    opens = [OpenRow(0, 0, pack(range(room)), 0, own, history=pack(prompt) if own.penalized else b"")]
    cuts, done = [*cuts, len(prompt)], 0
    outcome: list[Any] = []
    while len(outcome) < OUTPUTS:
        closes = [row for row, count in left.items() if not count]
        for row in closes:
            del left[row]
        for row in range(1, company + 1):
            if row not in waiting and row not in left and dice.random() < 0.6:
                theirs = dice.choice(ASKS)
                pages = pack(range(row * room, (row + 1) * room))
                history = pack([row]) if theirs.penalized else b""
                opens.append(OpenRow(row, step * 100 + row, pages, 0, theirs, history=history))
                waiting[row] = 0, dice.randrange(1, longest)
        decodes = [row for row in left if dice.random() < 0.8]
        for row in decodes:
            left[row] -= 1
        extends = []
        for row, (begun, whole) in list(waiting.items()):
            count = min(whole - begun, dice.choice([1, 7, 64]))
            extends.append(ExtendRow(row, begun, pack([row] * count), begun + count == whole))
            waiting[row] = begun + count, whole
            if begun + count == whole:
                del waiting[row]
                left[row] = dice.randrange(1, 6)
        if done < len(prompt):
            until = min(len(prompt), done + cuts.pop(0))
            extends.append(ExtendRow(0, done, pack(prompt[done:until]), until == len(prompt)))
            done = until
        else:
            decodes.insert(dice.randrange(len(decodes) + 1), 0)
        plan = StepPlan(step, pack(closes), opens, [], extends, pack(decodes))
        result = executor.launch(plan).result()
        rows = list(unpack(result.rows))
        if 0 in rows:
            at = rows.index(0)
            outcome.append((unpack(result.tokens)[at], result.logprobs[at] if own.logprobs else None))
        opens, step = [], step + 1
    still = [0, *waiting, *left]
    executor.launch(StepPlan(step, closes=pack(still))).result()
    return outcome


@either_page_size
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about the garbage in padding
def test_what_is_sampled_does_not_depend_on_the_company(executor: Any) -> None:
    """Alone in graphs of one line; beside extends, in larger graphs, with padding; cut and whole."""
    if not CUDA:  # where a start captures nothing
        executor.capture(decode_buckets(executor.info.max_rows), lambda what, done: None)
    length = 900 if CUDA else 9
    prompt = random.Random(7).choices(range(executor.info.vocab_size), k=length)
    cuts = [1, 63, 130] if CUDA else [2]
    for own in ASKS if CUDA else ASKS[-1:]:
        alone = story(executor, own, prompt, [], 0)
        for company in (1, 3, 16, 23) if CUDA else (2,):
            assert story(executor, own, prompt, cuts, company) == alone


def test_products_of_all_tiles_give_the_same_bits() -> None:
    from ramify.gpu.ops.invariant_linear import _TILES, invariant_product
    from ramify.gpu.ops.linear.base import plain
    from ramify.gpu.ops.triton_tiles import EXACT, product_in_tiles

    device = torch.device("cuda" if CUDA else "cpu")
    torch.manual_seed(2)
    shapes = [(768, 1000, 500), (4096, 512, 100)] if CUDA else [(48, 50, 20)]
    for inputs, outputs, rows in shapes:
        for bias in (False, True):
            dtype = torch.bfloat16 if CUDA else torch.float32
            # of very different sizes, so that the order of additions shows
            x = torch.randn(rows, inputs, device=device) * torch.randn(inputs, device=device).exp()
            x = (x * 10 ** torch.randint(-3, 3, (rows, inputs), device=device)).to(dtype)
            weight = torch.randn(outputs, inputs, device=device).to(dtype)
            linear = plain(weight, torch.randn(outputs, device=device).to(dtype) if bias else None)
            whole = invariant_product(linear, x)
            wanted = x.double() @ weight.double().T
            if linear.bias is not None:
                wanted = wanted + linear.bias.double()
            assert (whole.double() - wanted).norm() <= (1e-2 if CUDA else 1e-5) * wanted.norm()
            for tile in {tile for _, *tiles in _TILES for tile in tiles} if CUDA else {EXACT}:
                assert torch.equal(product_in_tiles(linear, x, tile), whole)
            for first, last in ((0, 1), (3, 4), (7, 19), (rows - 1, rows)):
                assert torch.equal(invariant_product(linear, x[first:last]), whole[first:last])


def inputs_of(
    bucket: Bucket, rows: torch.Tensor, positions: torch.Tensor, plan: "dict[str, Any] | None" = None
) -> StepInputs[torch.Tensor]:
    """What attention reads of a step."""
    parts = {name: torch.from_numpy(array).to(rows.device) for name, array in (plan or {}).items()}
    return StepInputs.from_parts(bucket, {"rows": rows, "positions": positions, **parts})


@pytest.mark.parametrize("window", [None, 40])
def test_attention_agrees_with_the_plain_kernels(window: int | None) -> None:
    """Up to rounding, over several chunks of keys."""
    from ramify.gpu.attention.triton_invariant import InvariantPaged
    from ramify.gpu.attention.triton_paged import TritonPaged
    from ramify.gpu.step.rows import StepRows

    device = torch.device("cuda" if CUDA else "cpu")
    torch.manual_seed(3)
    heads, kv_heads, dim = 6, 2, 16
    starts, counts = np.array([1020, 0, 1100]), np.array([7, 5, 1])
    length = 2500 if CUDA else 1200
    pages = torch.randperm(3 * length, device=device).int().view(3, length)
    k, v = (torch.randn(3 * length, kv_heads, dim, device=device) for _ in range(2))
    kv, spec = LayerKV(k, v, 1), AttentionSpec(dim**-0.5, window=window)
    shape = AttentionShape(heads, kv_heads, dim, torch.float32, (spec,))
    index = np.arange(3)
    tokens = np.zeros(12, dtype=np.int32)
    step = StepRows(index, starts, counts, 2, tokens, index, index)
    q = torch.randn(13, heads, dim, device=device)
    rows = torch.tensor(np.repeat(index, counts), dtype=torch.int32, device=device)
    positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    outputs, bucket = [], Bucket(12, 2, 1, 3)
    table: Any = SimpleNamespace(page_size=1, max_guessed=0)
    invariant = InvariantPaged(pages, table, shape)
    for attention in (TritonPaged(pages, table, shape, shares_keys=False), invariant):
        plan = attention.plan(step, bucket, False)
        places = torch.from_numpy(positions).int().to(device)
        inputs = inputs_of(bucket, rows, places, plan)
        outputs.append(attention.attend(q, kv, inputs, spec))
    assert (outputs[0] - outputs[1]).norm() <= 1e-5 * outputs[0].norm()
    # the decode alone, its chunks on programs of their own
    alone = inputs_of(Bucket(0, 0, 1, 1), rows[12:], places[12:])
    assert torch.equal(invariant.attend(q[12:], kv, alone, spec), outputs[1][12:])


@pytest.mark.parametrize(
    ("dim", "page_size", "dtype"),
    [(64, 1, torch.bfloat16), (256, 16, torch.bfloat16), (256, 1, torch.float32)]
    if CUDA
    else [(32, 1, torch.float32), (32, 16, torch.float32)],
)
def test_attention_of_large_heads(dim: int, page_size: int, dtype: torch.dtype) -> None:
    """Against its definition, beside a decode; and each token alone, bit for bit."""
    from ramify.gpu.attention.triton_invariant import InvariantPaged
    from ramify.gpu.step.rows import StepRows

    device = torch.device("cuda" if CUDA else "cpu")
    torch.manual_seed(5)
    heads, kv_heads, length = 4, 2, 640 if CUDA else 96
    starts, counts = np.array([length - 40, 3, length - 1]), np.array([33, 20, 1])
    columns = length // page_size
    pages = torch.randperm(3 * columns, device=device).int().view(3, columns)
    k, v = (torch.randn(3 * length, kv_heads, dim, device=device).to(dtype) for _ in range(2))
    index = np.arange(3)
    step = StepRows(index, starts, counts, 2, np.zeros(53, dtype=np.int32), index, index)
    positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    rows = torch.from_numpy(np.repeat(index, counts)).int().to(device)
    places = torch.from_numpy(positions).int().to(device)
    q = torch.randn(54, heads, dim, device=device).to(dtype)
    kv, spec = LayerKV(k, v, page_size), AttentionSpec(dim**-0.5)
    table: Any = SimpleNamespace(page_size=page_size, max_guessed=0)
    attention = InvariantPaged(pages, table, AttentionShape(heads, kv_heads, dim, dtype, (spec,)))
    bucket = Bucket(53, 2, 1, 3)
    inputs = inputs_of(bucket, rows, places, attention.plan(step, bucket, False))
    found = attention.attend(q, kv, inputs, spec)
    for token, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        at = torch.arange(position + 1, device=device)
        slots = pages[row].long()[at // page_size] * page_size + at % page_size
        own_k, own_v = (part[slots].repeat_interleave(2, 1).double() for part in (k, v))
        scores = torch.einsum("hd,khd->hk", q[token].double(), own_k) * dim**-0.5
        wanted = torch.einsum("hk,khd->hd", scores.softmax(-1), own_v).flatten()
        error = (found[token].double() - wanted).norm() / wanted.norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)
    for token in (0, 32, 33, 53):
        one = slice(token, token + 1)
        single = inputs_of(Bucket(0, 0, 1, 1), rows[one].clone(), places[one].clone())
        assert torch.equal(attention.attend(q[one].clone(), kv, single, spec)[0], found[token])


def test_it_is_refused_where_it_cannot_hold(
    tmp_path: Path, tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config | {"head_dim": 16}))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = ModelConfig(path=tmp_path, device="cpu", deterministic=True, load_format="dummy")
    with pytest.raises(ModelError, match="serve on a CUDA device, or leave --deterministic out"):
        load_executor(config, lambda what, share: None)
    config = ModelConfig(
        path=tmp_path, device="cpu", deterministic=True, attention="torch", load_format="dummy"
    )
    with pytest.raises(ModelError, match="leave --attention torch out"):
        load_executor(config, lambda what, share: None)
