"""The kernels of latent attention against torch: small in the interpreter, in earnest on a GPU."""

import numpy as np
import pytest
import torch

from ramify.gpu.attention.groups import GroupLimits, arrange, find_groups
from ramify.gpu.attention.latent import LatentHeads
from ramify.gpu.attention.spec import AttentionShape, AttentionSpec, latent_group
from ramify.gpu.kv.layout import LatentLayout
from ramify.gpu.ops.rmsnorm import RMSNorm

CUDA = torch.cuda.is_available()
# the interpreter of 3.6 does not know numpy 2.4
triton = pytest.importorskip("triton", minversion=None if CUDA else "3.7")

DEVICE = torch.device("cuda" if CUDA else "cpu")
# heads, rank, turned, page size, type
SIZES = (
    [(16, 512, 64, 16, torch.bfloat16), (20, 512, 64, 1, torch.bfloat16),
     (128, 512, 64, 1, torch.bfloat16), (32, 256, 64, 16, torch.float32)]
    if CUDA
    else [(4, 32, 16, 16, torch.float32), (40, 16, 16, 1, torch.float32)]
)  # fmt: skip
PREFIX, OWN = (4096, [1, 700, 64, 3000]) if CUDA else (32, [1, 9, 16])


class Latents:
    """Rows that share a prefix, under a random page table; what nobody owns is NaN."""

    def __init__(self, heads: int, rank: int, turned: int, page_size: int, dtype: torch.dtype) -> None:
        torch.manual_seed(5)
        self.lengths = [PREFIX + own for own in OWN]
        counts = [-(-own // page_size) for own in OWN]
        shared = PREFIX // page_size
        order = torch.randperm(shared + sum(counts) + 2).int()
        self.host = np.zeros((len(OWN), shared + max(counts)), dtype=np.int32)
        self.host[:, :shared], left = order[:shared], order[shared:]
        for row, count in enumerate(counts):
            self.host[row, shared : shared + count], left = left[:count], left[count:]
        self.pages = torch.from_numpy(self.host).to(DEVICE)
        pool = LatentLayout(1, rank, turned, dtype).allocate(len(order), page_size, DEVICE)
        self.kv, self.rank = pool.layers[0], rank
        self.kv.k.fill_(torch.nan)
        self.slots = []
        for row, length in enumerate(self.lengths):
            index = torch.arange(length, device=DEVICE)
            slots = self.pages[row][index // page_size].long() * page_size + index % page_size
            unset = slots[self.kv.k[slots][:, 0, 0].isnan()]
            self.kv.k[unset] = torch.randn((len(unset), 1, rank + turned), device=DEVICE).to(dtype)
            self.slots.append(slots)
        self.q = torch.randn((len(OWN), heads, rank + turned), device=DEVICE).to(dtype)
        self.rows = torch.arange(len(OWN), dtype=torch.int32, device=DEVICE)
        self.positions = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE) - 1
        self.spec = AttentionSpec((rank + turned) ** -0.5)
        self.limit = 1e-5 if dtype == torch.float32 else 1e-2

    def agree(self, ours: torch.Tensor, q: torch.Tensor, row: int, first: int = -1) -> None:
        """ours [n, heads * rank] of queries at positions `first`.. of `row`; -1: at its last one."""
        first = self.lengths[row] - 1 if first < 0 else first
        latents = self.kv.k[self.slots[row], 0].double()[: first + len(q)]
        scores = torch.einsum("nhd,kd->hnk", q.double(), latents) * self.spec.scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=DEVICE).triu(first + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        wanted = torch.einsum("hnk,kr->nhr", weights, latents[:, : self.rank]).flatten(1)
        assert (ours.double() - wanted).norm() <= self.limit * wanted.norm()


@pytest.mark.parametrize("sizes", SIZES)
def test_decodes(sizes: tuple[int, int, int, int, torch.dtype]) -> None:
    """In equal shares, split, and with the prefix read once for all of them."""
    from ramify.gpu.attention.triton_balanced import balanced_attention
    from ramify.gpu.attention.triton_decode import decode_attention
    from ramify.gpu.attention.triton_shared import TILE, SharedGroups, shared_attention

    own = Latents(*sizes)
    count, heads = len(OWN), sizes[0]
    where = own.rows, own.positions, own.pages, own.spec
    found = [decode_attention(own.q, own.kv, *where, splits) for splits in (1, 4)]
    output = own.q.new_empty((count, heads * own.rank))
    arrived = own.rows.new_zeros(count * heads)
    for shares in (2, 7):
        balanced_attention(own.q, output, own.kv, *where, shares, arrived)
        found.append(output.clone())
    lines = TILE // latent_group(heads)
    if lines > 1:
        page_size = own.kv.page_size
        rows, starts = np.arange(count), np.array(own.lengths) - 1
        groups = find_groups(own.host, rows, starts // page_size, 1, 2)
        assert groups.depths.tolist() == [PREFIX // page_size]
        arrays = arrange(groups, rows, page_size, count, GroupLimits(1, 1, 2, lines, 3))
        parts = (arrays.items, arrays.members, arrays.own)
        shared = SharedGroups(*(torch.from_numpy(part).to(DEVICE) for part in parts))
        left = shared_attention(own.q, own.kv, shared, own.pages, own.spec)
        found.append(decode_attention(own.q, own.kv, *where, 2, left))
    for ours in found:
        for row in range(count):
            own.agree(ours[row : row + 1], own.q[row : row + 1], row)


@pytest.mark.parametrize("sizes", SIZES)
def test_extends(sizes: tuple[int, int, int, int, torch.dtype]) -> None:
    """The last tokens of two rows over what lies before them."""
    from types import SimpleNamespace
    from typing import Any

    from ramify.gpu.attention.triton_extend import extend_attention, extend_items

    own, counts = Latents(*sizes), [OWN[1], OWN[2]]
    step: Any = SimpleNamespace(
        extends=2, rows=np.array([1, 2]), counts=np.array(counts),
        starts=np.array([PREFIX, PREFIX]),
    )  # fmt: skip
    shape = AttentionShape(sizes[0], 1, sizes[1] + sizes[2], sizes[4], (own.spec,), sizes[1]).tiled
    plan = extend_items(step, shape.heads, shape.kv_heads)
    items, merges = (torch.from_numpy(plan[name]).to(DEVICE) for name in ("items", "merges"))
    q = torch.randn((sum(counts), *own.q.shape[1:]), device=DEVICE).to(sizes[4])
    output = q.new_full((len(q), sizes[0] * sizes[1]), torch.nan)
    extend_attention(q, output, own.kv, items, merges, own.pages, own.spec)
    own.agree(output[: counts[0]], q[: counts[0]], 1, PREFIX)
    own.agree(output[counts[0] :], q[counts[0] :], 2, PREFIX)


@pytest.mark.usefixtures("ordered_dots")
@pytest.mark.parametrize("grows", [False, True])
def test_what_is_stored_and_products_by_head(grows: bool) -> None:
    from ramify.gpu.ops.triton_latent import absorb, open_latents, store_latents

    heads, nope, value, rank, turned, dtype = (
        (16, 128, 96, 512, 64, torch.bfloat16) if CUDA else (3, 24, 40, 32, 16, torch.float32)
    )
    torch.manual_seed(3)
    tokens, kept = 5, rank + turned

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).to(dtype)

    made = LatentHeads(draw(heads, nope + value, rank) * rank**-0.5, nope, AttentionSpec(1.0))
    norm = RMSNorm(draw(rank), 1e-6)
    given = draw(tokens, heads * (nope + turned) + kept)
    queries, latents = given[:, :-kept], given[:, -kept:]
    kv = LatentLayout(1, rank, turned, dtype).allocate(4, 2, DEVICE).layers[0]
    angles = torch.randn((8, turned // 2), device=DEVICE)
    cos_sin = angles.cos(), angles.sin()
    pages = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([1, 2, 0, 1, 3], dtype=torch.int32, device=DEVICE)
    growth = torch.rand(tokens, device=DEVICE) + 1 if grows else None

    where = norm, cos_sin, rows, positions, pages, kv, growth
    q = store_latents(queries, latents, made, *where)
    absorb(queries, made, q, growth, True)
    kv.k.zero_()
    assert torch.equal(store_latents(queries, latents, made, *where, True), q)  # in one launch

    def turn(x: torch.Tensor) -> torch.Tensor:
        c, s = (part[positions.long()][:, None] for part in cos_sin)
        low, high = x.float().chunk(2, -1)
        return torch.cat((low * c - high * s, high * c + low * s), -1)

    split = queries.view(tokens, heads, -1)
    wanted = torch.cat((split[..., :nope].float(), turn(split[..., nope:])), -1)
    if growth is not None:
        wanted = wanted * growth[:, None, None]
    exact = LatentHeads(made.up.float(), nope, made.spec)
    limits = {"rtol": 2e-2, "atol": 5e-2} if CUDA else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(q.float(), exact.absorb(wanted), **limits)
    slots = torch.tensor([7, 2, 0, 1, 5], device=DEVICE)
    stored = torch.cat((norm(latents[:, None, :rank]).float(), turn(latents[:, None, rank:])), -1)
    torch.testing.assert_close(kv.k[slots].float(), stored, **limits)

    mixed = draw(tokens, heads * rank)
    ours = open_latents(mixed, made, True)
    whole = exact.open(mixed.view(tokens, heads, rank).float()).flatten(1)
    torch.testing.assert_close(ours.float(), whole, **limits)
    for token in range(tokens):  # a row's bits do not depend on the others
        assert torch.equal(open_latents(mixed[token : token + 1], made, True), ours[token : token + 1])
