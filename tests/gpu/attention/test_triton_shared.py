"""Decode attention over keys that lines share, against torch: groups planned as in a step."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ramify.gpu.attention.groups import Grouper, GroupLimits, arrange, find_groups
from ramify.gpu.attention.spec import AttentionSpec
from ramify.gpu.kv.layout import LayerKV
from ramify.protocol.plan import ExtendRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams

CUDA = torch.cuda.is_available()
# the interpreter of 3.6 does not know numpy 2.4
pytest.importorskip("triton", minversion=None if CUDA else "3.7")

DEVICE = torch.device("cuda" if CUDA else "cpu")
BF16 = torch.bfloat16
# tokens of a prefix, and what each branch adds; a branch that is a list forks again
SMALL: list[Any] = [(70, [3, 1, (65, [2, 1])]), (0, [4]), (5, [1, 1])]
LARGE: list[Any] = [
    (512, [64] * 8 + [1]), (3000, [100] * 40), (0, [700]), (64, [1, 1]), (32000, [700, 1, 65, 64]),
    (1000, [(500, [30] * 20), (90, [1] * 3), 7]),
]  # fmt: skip


def tables(trees: list[Any], page_size: int) -> tuple[list[list[int]], list[int], int]:
    """Page table and length of each branch in no order, and the number of pages."""
    pages: list[list[int]] = []
    lengths: list[int] = []
    used = 0

    def grow(prefix: list[int], tokens: int, tree: Any) -> None:
        nonlocal used
        added, branches = tree if isinstance(tree, tuple) else (tree, None)
        shared = tokens // page_size  # a page that is not full is not shared
        count = -(-(tokens + added) // page_size)
        own = [*prefix[:shared], *range(used, used + count - shared)]
        used += count - shared
        if branches is None:
            pages.append(own)
            lengths.append(tokens + added)
        else:
            for branch in branches:
                grow(own, tokens + added, branch)

    for tree in trees:
        grow([], 0, tree)
    order = np.random.default_rng(3).permutation(len(pages))
    return [pages[i] for i in order], [lengths[i] for i in order], used


@pytest.mark.parametrize(
    ("dtype", "page_size", "heads", "kv_heads", "dim"),
    [(BF16, 1, 32, 8, 128), (BF16, 16, 16, 8, 128), (BF16, 16, 8, 1, 64), (BF16, 1, 28, 4, 128),
     (torch.float32, 16, 4, 4, 64)]
    if CUDA
    else [(torch.float32, 1, 4, 2, 16), (torch.float32, 16, 3, 1, 16)],
)  # fmt: skip
def test_shared_attention(
    dtype: torch.dtype, page_size: int, heads: int, kv_heads: int, dim: int
) -> None:
    from ramify.gpu.attention.triton_decode import decode_attention
    from ramify.gpu.attention.triton_shared import TILE, SharedGroups, shared_attention

    torch.manual_seed(11)
    own, lengths, used = tables(LARGE if CUDA else SMALL, page_size)
    order = torch.randperm(used).int()
    host = np.zeros((len(own), max(map(len, own))), dtype=np.int32)
    for row, table in enumerate(own):
        host[row, : len(table)] = order[table]
    pages = torch.from_numpy(host).to(DEVICE)
    shape = (used * page_size, kv_heads, dim)
    k, v = (torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    q = torch.randn((len(own), heads, dim), device=DEVICE).to(dtype)
    wanted = []
    for row, length in enumerate(lengths):
        index = torch.arange(length, device=DEVICE)
        slots = pages[row][index // page_size].long() * page_size + index % page_size
        for part in (k, v):
            unset = slots[part[slots][:, 0, 0].isnan()]
            part[unset] = torch.randn((len(unset), kv_heads, dim), device=DEVICE).to(dtype)
        keys, values = (
            part[slots].float().repeat_interleave(heads // kv_heads, 1).transpose(0, 1)
            for part in (k, v)
        )
        wanted.append(F.scaled_dot_product_attention(q[row][:, None].float(), keys, values).view(-1))
    rows, starts = np.arange(len(own)), np.array(lengths) - 1
    size = len(own)
    line_rows = torch.arange(size, dtype=torch.int32, device=DEVICE)
    positions = torch.from_numpy(starts).int().to(DEVICE)
    kv, spec = LayerKV(k, v, page_size), AttentionSpec(dim**-0.5)
    for members, items in ((2, 33), (4, 1), (len(own) + 1, 7)):
        limits = GroupLimits(1, 1, members, max(1, TILE * kv_heads // heads), items)
        groups = find_groups(host, rows, starts // page_size, 1, members)
        arrays = arrange(groups, rows, page_size, size, limits)
        shared = SharedGroups(
            *(torch.from_numpy(a).to(DEVICE) for a in (arrays.items, arrays.members, arrays.own))
        )
        for splits in (1, 8) if CUDA else (1, 2):
            parts = shared_attention(q, kv, shared, pages, spec)
            ours = decode_attention(q, kv, line_rows, positions, pages, spec, splits, parts)
            limit = 1e-5 if dtype == torch.float32 else 1e-2
            for line, reference in zip(ours.float(), wanted, strict=True):
                assert (line - reference).norm() <= limit * reference.norm()


@pytest.mark.parametrize("page_size", [1, 16] if CUDA else [16])
def test_the_executor_equals_the_one_on_torch(
    page_size: int,
    tmp_path: Path,
    tiny_config: dict[str, Any],
    drive: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forks, a fork of a fork, mixed steps, rows that end and are opened with other pages."""
    from ramify.gpu.attention import triton_paged

    found: list[int] = []

    class Watched(Grouper):
        def arrays(self, *args: Any) -> Any:
            arrays = super().arrays(*args)
            found.append(0 if arrays is None else int((arrays.own[:, 0] > 0).sum()))
            return arrays

    monkeypatch.setattr(
        triton_paged,
        "grouper_for",
        lambda table, shape, lines=1: Watched(table, GroupLimits(8, 8, 2, 3, 4)),
    )
    (tmp_path / "config.json").write_text(
        json.dumps(tiny_config | {"head_dim": 16, "num_hidden_layers": 1})
    )
    if not CUDA:  # each program takes the interpreter milliseconds
        monkeypatch.setattr(triton_paged, "splits_for", lambda *shape: 2)
    options = {
        "device": "cuda" if CUDA else "cpu", "dtype": "float32", "load_format": "dummy", "max_rows": 8
    }  # fmt: skip
    results = []
    for attention in ("torch", "triton"):
        d = drive(tmp_path, attention=attention, page_size=page_size, **options)
        trunk = d.pages(0, 32)
        branch = [*trunk, *d.pages(512, 16)]

        def opened(row: int, shared: list[int], cached: int, d: Any = d) -> Any:
            own = d.pages(1024 + 64 * row, 48)
            return d.open(row, [*shared, *own], cached, SamplingParams(temperature=0.9, seed=row))

        plans = [
            StepPlan(0, opens=[d.open(0, [*branch, *d.pages(960, 16)])],
                     extends=[ExtendRow(0, 0, pack(range(40)), False)]),
            StepPlan(1, opens=[opened(row, trunk, 32) for row in (1, 2, 3)],
                     extends=[ExtendRow(0, 40, pack(range(9)), True)]
                     + [ExtendRow(row, 32, pack([row]), True) for row in (1, 2, 3)]),
            StepPlan(2, decodes=pack([3, 0, 1, 2])),
            StepPlan(3, opens=[opened(4, branch, 48), opened(5, branch, 48)], decodes=pack([1, 2, 3]),
                     extends=[ExtendRow(row, 48, pack([row, 7]), True) for row in (4, 5)]),
            *(StepPlan(step, decodes=pack([1, 2, 3, 4, 5])) for step in (4, 5)),
            StepPlan(6, closes=pack([2]), decodes=pack([5, 1, 4, 3])),
            StepPlan(7, opens=[opened(2, branch, 48)], extends=[ExtendRow(2, 48, pack([9]), True)]),
            StepPlan(8, decodes=pack([1, 2, 3, 4, 5])),
        ]  # fmt: skip
        steps = [d.executor.launch(plan).result() for plan in plans]
        results.append([(r.step, unpack(r.rows), unpack(r.tokens)) for r in steps])
    assert results[0] == results[1]
    assert [n for n in found if n] == [4, 5, 5, 4, 5]
