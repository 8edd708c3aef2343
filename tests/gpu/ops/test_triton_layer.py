"""Each Triton kernel against torch: small in the interpreter on a CPU, in earnest on a GPU."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ramify.gpu.attention.spec import AttentionSpec
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.ops.base import LayerAttention
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.step.rows import StepRows
from ramify.protocol.plan import ExtendRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams

CUDA = torch.cuda.is_available()
# the interpreter of 3.6 does not know numpy 2.4
pytest.importorskip("triton", minversion=None if CUDA else "3.7")

DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
LENGTHS = [1, 2, 63, 64, 65, 700, 5000, 32768] if CUDA else [1, 65, 70]
# cached, new
RUNS = (
    [(0, 1), (0, 300), (900, 7), (4000, 260), (31, 129), (32000, 40)]
    if CUDA
    else [(0, 3), (66, 2), (500, 5)]
)
STEPS = [[0, 1, 2, 3, 4, 5], [2], [5, 1], [3]] if CUDA else [[0, 1], [2, 0]]  # which run together


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


def close(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    """Relative error of the whole, against a float32 reference."""
    limit = 1e-5 if ours.dtype == torch.float32 else 1e-2
    assert (ours.float() - wanted).norm() <= limit * wanted.norm()


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def plain(dim: int, window: int | None) -> AttentionSpec:
    return AttentionSpec(dim**-0.5, window=window)


class Pool:
    """Random keys and values under a random page table; what nobody owns is NaN."""

    def __init__(
        self, lengths: list[int], page_size: int, kv_heads: int, dim: int, dtype: torch.dtype
    ) -> None:
        counts = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(counts) + 3)
        self.pages = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
        shape = ((len(order)) * page_size, kv_heads, dim)
        self.k, self.v = (torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
        self.kv = LayerKV(self.k, self.v, page_size)
        self.slots = []
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            own, order = order[:count], order[count:]
            self.pages[row, :count] = own
            slots = (own[:, None] * page_size + torch.arange(page_size)).view(-1)[:length].to(DEVICE)
            self.slots.append(slots)
            self.k[slots], self.v[slots] = (draw(length, kv_heads, dim, dtype=dtype) for _ in range(2))
        self.pages = self.pages.to(DEVICE)

    def reference(self, q: torch.Tensor, row: int, first: int, window: int | None) -> torch.Tensor:
        """q [n, heads, D] at positions first.. of `row` -> float32 [n, heads * D]."""
        group = q.shape[1] // self.k.shape[1]
        reach = torch.arange(first, first + len(q), device=DEVICE)[:, None]
        slots = self.slots[row][: first + len(q)]
        keys = torch.arange(len(slots), device=DEVICE)
        mask = keys <= reach
        if window is not None:
            mask &= keys > reach - window
        k, v = (t[slots].float().repeat_interleave(group, 1).transpose(0, 1) for t in (self.k, self.v))
        output = F.scaled_dot_product_attention(q.float().transpose(0, 1), k, v, attn_mask=mask)
        return output.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("page_size", "heads", "kv_heads", "dim", "window"),
    [(1, 4, 2, 16, None), (16, 4, 2, 16, 50)]
    + [(1, 32, 8, 128, None), (16, 16, 8, 128, None), (16, 6, 1, 64, 1000), (1, 28, 4, 128, 33)] * CUDA,
)
def test_decode_attention(
    dtype: torch.dtype, page_size: int, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    from ramify.gpu.attention.triton_decode import decode_attention

    pool = Pool(LENGTHS, page_size, kv_heads, dim, dtype)
    q = draw(len(LENGTHS), heads, dim, dtype=dtype)
    rows = torch.arange(len(LENGTHS), dtype=torch.int32, device=DEVICE)
    positions = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE) - 1
    for splits in (1, 4, 64) if CUDA else (1, 4):
        ours = decode_attention(q, pool.kv, rows, positions, pool.pages, plain(dim, window), splits)
        for row, length in enumerate(LENGTHS):
            close(ours[row : row + 1], pool.reference(q[row : row + 1], row, length - 1, window))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("page_size", "heads", "kv_heads", "dim", "window"),
    [(1, 4, 2, 16, None), (16, 3, 1, 16, 100)]
    + [(1, 32, 8, 128, None), (16, 16, 8, 128, None), (16, 6, 1, 64, 1000), (1, 28, 4, 128, 33),
       (1, 4, 1, 256, None)] * CUDA,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["many", "one long", "alike"])
def test_balanced_attention(
    dtype: torch.dtype, page_size: int, heads: int, kv_heads: int, dim: int, window: int | None,
    kind: str,
) -> None:  # fmt: skip
    """Sequences that no share cuts and some that many do; shares that are left empty."""
    from ramify.gpu.attention.triton_balanced import balanced_attention

    lengths = {
        "many": LENGTHS + [800] * 40 if CUDA else [150, 5, 17, 64, 128, 129, 1, 1],
        "one long": [1] * 5 + [400],
        "alike": [300, 310, 290, 300, 301, 300, 299, 305][: 8 if CUDA else 4],
    }[kind]
    pool = Pool(lengths, page_size, kv_heads, dim, dtype)
    q = draw(len(lengths), heads, dim, dtype=dtype)
    rows = torch.arange(len(lengths), dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([length - 1 for length in lengths], dtype=torch.int32, device=DEVICE)
    arrived = torch.zeros(len(lengths) * kv_heads, dtype=torch.int32, device=DEVICE)
    wanted = [
        pool.reference(q[row : row + 1], row, length - 1, window) for row, length in enumerate(lengths)
    ]
    for shares in (1, 7, 33, 99, 264) if CUDA else (1, 3, 33):
        results = []
        for _ in range(2 if CUDA else 1):
            ours = torch.full((len(lengths), heads * dim), torch.nan, dtype=dtype, device=DEVICE)
            balanced_attention(
                q, ours, pool.kv, rows, positions, pool.pages, plain(dim, window), shares, arrived,
            )  # fmt: skip
            results.append(ours)
        assert not arrived.any()
        assert torch.equal(results[0], results[-1])
        for row, reference in enumerate(wanted):
            close(ours[row : row + 1], reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("page_size", "heads", "kv_heads", "dim", "window"),
    [(1, 2, 1, 16, None), (16, 2, 1, 16, 40)]
    + [(1, 32, 8, 128, None), (16, 16, 8, 128, None), (16, 6, 1, 64, 100), (1, 28, 4, 128, 33)] * CUDA,
)
def test_extend_attention(
    dtype: torch.dtype, page_size: int, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    from ramify.gpu.attention.triton_extend import extend_attention, extend_items, extend_room

    pool = Pool([start + count for start, count in RUNS], page_size, kv_heads, dim, dtype)
    for rows in STEPS:
        runs = [RUNS[row] for row in rows]
        starts, counts = (np.array(part) for part in zip(*runs, strict=True))
        none = np.empty(0, dtype=np.int64)
        tokens = np.zeros(counts.sum(), dtype=np.int32)
        step = StepRows(np.array(rows), starts, counts, len(rows), tokens, none, none)
        plan = extend_items(step, heads, kv_heads)
        room = extend_room(len(tokens), len(rows), heads, kv_heads)  # as a graph runs it
        for name, exact in plan.items():
            room[name][: len(exact)] = exact
        q = draw(len(tokens), heads, dim, dtype=dtype)
        for arrays in (plan, room):
            output = torch.full((len(tokens), heads * dim), torch.nan, dtype=dtype, device=DEVICE)
            items, merges = (torch.from_numpy(arrays[name]).to(DEVICE) for name in ("items", "merges"))
            extend_attention(q, output, pool.kv, items, merges, pool.pages, plain(dim, window))
            first = 0
            for row, (start, count) in zip(rows, runs, strict=True):
                part = slice(first, first + count)
                close(output[part], pool.reference(q[part], row, start, window))
                first += count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, *([4096, 1024] if CUDA else [])])
def test_norms_and_activation(dtype: torch.dtype, size: int) -> None:
    from ramify.gpu.ops.triton_layer import add_norm, embed_norm, gate_mul

    n = 300 if CUDA else 3
    x, residual, weight = draw(n, size, dtype=dtype), draw(n, size, dtype=dtype), draw(size, dtype=dtype)
    total = x.float() + residual.float()
    close(add_norm(x, residual, RMSNorm(weight, 1e-6)), F.rms_norm(total, (size,), weight.float(), 1e-6))
    close(residual, total)
    gate, up = x.float().chunk(2, -1)
    close(gate_mul(x, "silu"), F.silu(gate) * up)
    close(gate_mul(x, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up)
    table, last = draw(20, size, dtype=dtype), torch.arange(19, -1, -1, dtype=torch.int32, device=DEVICE)
    codes = torch.tensor([3, -3, 0], dtype=torch.int32, device=DEVICE)  # the second: what row 2 sampled
    for scale in (1.0, 6.5):
        embedded, normed = embed_norm(codes, last, table, scale, RMSNorm(weight, 1e-6))
        wanted = table[torch.tensor([3, 17, 0], device=DEVICE)] * scale
        assert torch.equal(embedded, wanted)
        close(normed, F.rms_norm(wanted.float(), (size,), weight.float(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("normed", ["", "head", "width"])
def test_rope_store(dtype: torch.dtype, page_size: int, normed: str) -> None:
    from ramify.gpu.ops.triton_layer import rope_store

    heads, kv_heads, dim = (16, 8, 128) if CUDA else (4, 2, 16)
    lengths = [5, 40, 17]
    pool = Pool(lengths, page_size, kv_heads, dim, dtype)
    qkv = draw(3, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = draw(64, dim // 2)
    cos, sin = angles.cos(), angles.sin()
    sizes = (heads * dim, kv_heads * dim) if normed == "width" else (dim, dim)
    weights = [draw(size, dtype=dtype) for size in sizes]
    rows = torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([16, 4, 21], dtype=torch.int32, device=DEVICE)
    norms = [RMSNorm(weight, 1e-6) if normed else None for weight in weights]
    layer = LayerAttention(0, heads, kv_heads, dim, plain(dim, None), cast(Any, None), *norms)
    q = rope_store(qkv, layer, (cos, sin), rows, positions, pool.pages, pool.kv)
    parts = qkv.view(3, -1, dim).float().split([heads, kv_heads, kv_heads], 1)
    slots = torch.stack(
        [pool.slots[r][p] for r, p in zip(rows.tolist(), positions.tolist(), strict=True)]
    )
    for ours, part, weight in ((q, parts[0], weights[0]), (pool.k[slots], parts[1], weights[1])):
        if normed:
            whole = part.flatten(1) if normed == "width" else part
            part = F.rms_norm(whole, weight.shape, weight.float(), 1e-6).view_as(part)
        low, high = part.chunk(2, -1)
        c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]
        close(ours, torch.cat((low * c - high * s, high * c + low * s), -1))
    close(pool.v[slots], parts[2])


def test_sampling_follows_the_torch_sampler() -> None:
    from ramify.gpu.sampling.randomness import uniforms
    from ramify.gpu.sampling.torch_sampler import Sampler
    from ramify.gpu.sampling.triton_sampling import sample_into

    lines, vocabulary = (64, 151936) if CUDA else (6, 5000)
    sampler = Sampler(lines, vocabulary, DEVICE)
    heats = [[0.0, 0.7, 1.0, 1e-4][row % 4] for row in range(lines)]
    for row, heat in enumerate(heats):
        sampler.open(StepOpen(row, SamplingParams(temperature=heat, seed=row)))
    logits = draw(lines, vocabulary) * 3
    logits[0, [7, 4500]] = 50.0  # a tie: the lowest id wins
    rows, draws = np.arange(lines), np.full(lines, 5)
    wanted = sampler.sample(logits.clone(), rows, draws)
    logits[4, 9] = torch.nan
    temperatures = torch.tensor(heats, device=DEVICE)
    points = torch.from_numpy(uniforms(rows, draws)).to(DEVICE)
    last = torch.zeros(lines, dtype=torch.int32, device=DEVICE)
    tokens = torch.full((lines,), -7, dtype=torch.int32, device=DEVICE)
    index = torch.from_numpy(rows).int().to(DEVICE)
    sample_into(logits, index, temperatures, points, last, tokens)
    assert tokens[0] == 7
    assert (tokens[4], last[4]) == (-1, 0)
    others = [line for line in range(lines) if line != 4]
    # a point may fall on the other side of an edge between two tokens: float32 against float64
    same = (tokens[others] == wanted.tokens[others]).float().mean()
    assert same >= (0.95 if CUDA else 1.0)
    assert torch.equal(tokens[others], last[others])


def StepOpen(row: int, sampling: SamplingParams) -> Any:
    from ramify.protocol.plan import OpenRow

    return OpenRow(row, row, b"", 0, sampling)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about the garbage in padding
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_executor_equals_the_one_on_torch(
    page_size: int, tmp_path: Path, tiny_config: dict[str, Any], drive: Any
) -> None:
    """Mixed steps, late pages, truncated sampling and log-probabilities, extends of one token."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config | {"head_dim": 16}))
    where = "cuda" if CUDA else "cpu"
    results = []
    for attention in ("torch", "triton"):
        options = {"device": where, "dtype": "float32", "load_format": "dummy", "max_rows": 3}
        d = drive(tmp_path, attention=attention, page_size=page_size, **options)
        assert d.executor.info.attention == attention
        settings = [
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=0.8, seed=3),
            SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.5, logprobs=2, seed=4),
        ]
        opens = [
            d.open(row, d.pages(512 * row, 96), sampling=s, history=pack([1, 2, 3]))
            for row, s in enumerate(settings)
        ]
        plans = [
            StepPlan(0, opens=opens[:2], extends=[
                ExtendRow(0, 0, pack([1, 2, 3]), True), ExtendRow(1, 0, pack([4, 5]), False)]),
            StepPlan(1, extends=[ExtendRow(1, 2, pack([6, 7]), True)], decodes=pack([0])),
            StepPlan(2, opens=opens[2:], extends=[ExtendRow(2, 0, pack([1, 2, 3]), True)],
                     decodes=pack([1, 0])),
            StepPlan(3, decodes=pack([2, 0, 1])),
            StepPlan(4, closes=pack([0])),
            StepPlan(5, decodes=pack([1, 2])),
            # extends of one token: cached before, sampled or not, beside others and alone
            StepPlan(6, closes=pack([1]), opens=[
                         d.open(1, d.pages(512, 96), 3, settings[2], history=pack([4, 5, 6, 9])),
                         d.open(0, d.pages(1024, 96), sampling=settings[1])],
                     extends=[ExtendRow(0, 0, pack([1]), False), ExtendRow(1, 3, pack([9]), True)],
                     decodes=pack([2])),
            StepPlan(7, extends=[ExtendRow(0, 1, pack([2]), True)], decodes=pack([2, 1])),
            StepPlan(8, closes=pack([2, 1]), opens=[
                         d.open(1, d.pages(512, 96), 4, settings[0]),
                         d.open(2, d.pages(0, 96), 2, settings[1])],
                     extends=[ExtendRow(2, 2, pack([3]), True), ExtendRow(1, 4, pack([8, 9]), True)],
                     decodes=pack([0])),
            StepPlan(9, decodes=pack([0, 1, 2])),
        ]  # fmt: skip
        pending, tokens = [], []
        for plan in plans:
            pending.append(d.executor.launch(plan))
            if len(pending) == 2:
                tokens.append(pending.pop(0).result())
        tokens.append(pending.pop().result())
        results.append([(r.step, r.computed, unpack(r.rows), unpack(r.tokens)) for r in tokens])
        assert [bool(r.logprobs) for r in tokens] == [i in (2, 3, 5, 6, 7) for i in range(10)]
    assert results[0] == results[1]
