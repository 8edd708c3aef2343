"""Rotation, storing and attention against float64, and the same bits however a step is made up."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ramify.gpu.native.kernels import Kernels
from ramify.gpu.native.threads import aligned

DIM, HEADS, KV_HEADS, PAGE, WIDTH = 32, 4, 2, 4, (4 + 2 * 2) * 32
LENGTH = 45


class Sequences:
    """Two sequences on shuffled pages, and a way to run some of their tokens."""

    def __init__(self, kernels: Kernels, run: Callable[..., None], seed: int, **spec: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.qkv = torch.randn(2, LENGTH, WIDTH, generator=generator)
        self.wide = bool(spec.pop("wide", False))
        sizes = [n * DIM if self.wide else DIM for n in (HEADS, KV_HEADS)]
        q_norm, k_norm = (torch.rand(size, generator=generator) + 0.5 for size in sizes)
        self.norms = (q_norm, k_norm, 1e-6)
        angles = torch.arange(LENGTH)[:, None] * torch.rand(DIM // 2, generator=generator)
        self.angles = angles.cos(), angles.sin()
        self.pool = tuple(
            torch.full((30 * PAGE, KV_HEADS, DIM), torch.nan, dtype=torch.float16) for _ in "kv"
        )
        order = np.random.default_rng(seed).permutation(30).astype(np.int32)
        self.pages = order[:24].reshape(2, 12).copy()
        self.spec = {"scale": DIM**-0.5, "softcap": None, "window": None, "sinks": None} | spec
        self._kernels, self._run = kernels, run

    def run(self, *parts: tuple[int, int, int]) -> list[Tensor]:
        """Run (sequence, start, stop), all in one step. Returns each part's outputs."""
        count = sum(stop - start for _, start, stop in parts)
        counts, tiles_count, positions, slots = (aligned(n) for n in (1, 1, count, count))
        most = self._kernels.tile_rows // (HEADS // KV_HEADS)
        cut = [(which, at, min(at + most, stop)) for which, start, stop in parts
               for at in range(start, stop, most)]  # fmt: skip
        tiles = aligned(4 * len(cut))
        counts[0], tiles_count[0] = count, len(cut)
        qkv, first = torch.empty(count, WIDTH), 0
        for line, (which, start, stop) in zip(tiles.reshape(-1, 4), cut, strict=True):
            at = np.arange(start, stop)
            span = slice(first, first + len(at))
            qkv[span], positions[span] = self.qkv[which, start:stop], at
            slots[span] = self.pages[which, at // PAGE] * PAGE + at % PAGE
            address = self.pages.ctypes.data + which * self.pages.strides[0]
            line[:] = address, first, len(at), start
            first += len(at)
        out = torch.empty(count, HEADS * DIM)
        kernels, heads = self._kernels, (HEADS, KV_HEADS)
        self._run(
            kernels.rotate(
                counts, qkv, positions, slots, self.angles, self.pool, heads, self.norms, self.wide
            ),
            kernels.attend(tiles_count, tiles, qkv, self.pool, out, heads, PAGE, **self.spec),
        )
        return list(out.split([stop - start for _, start, stop in parts]))

    def reference(self, which: int) -> Tensor:
        """float64, of keys and values as float16 holds them."""
        parts = self.qkv[which].double().view(LENGTH, -1, DIM)
        q, k, v = parts.split([HEADS, KV_HEADS, KV_HEADS], 1)
        q, k = (self._rotated(x, norm) for x, norm in zip((q, k), self.norms[:2], strict=True))
        k, v = (x.half().double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.spec["scale"]
        cap, window, sinks = (self.spec[name] for name in ("softcap", "window", "sinks"))
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        at = torch.arange(LENGTH)
        seen = at <= at[:, None]
        if window is not None:
            seen &= at > at[:, None] - window
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, LENGTH, 1)), -1)
        shares = scores.softmax(-1)[..., :LENGTH]
        return torch.einsum("hqk,khd->qhd", shares, v).reshape(LENGTH, -1)

    def _rotated(self, x: Tensor, weight: Tensor) -> Tensor:
        over = (-2, -1) if self.wide else -1
        x = x / (x.pow(2).mean(over, keepdim=True) + 1e-6).sqrt()
        x = x * (weight.view(-1, DIM) if self.wide else weight)
        a, b = x.chunk(2, -1)
        cos, sin = (table.double()[:, None] for table in self.angles)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


SPECS = [{}, {"softcap": 3.0}, {"window": 9}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
         {"wide": True}]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: next(iter(spec), "plain"))
def test_prefill_and_decode_against_float64(
    kernels: Kernels, run: Callable[..., None], spec: dict[str, Any]
) -> None:
    sequences = Sequences(kernels, run, 3, **spec)
    found = [sequences.run((0, at, end))[0] for at, end in ((0, 8), (8, 24), (24, 40))]
    found += [sequences.run((0, at, at + 1))[0] for at in range(40, LENGTH)]
    wanted = sequences.reference(0)
    torch.testing.assert_close(torch.cat(found).double(), wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: next(iter(spec), "plain"))
def test_a_step_s_other_tokens_and_chunks_change_no_bit(
    kernels: Kernels, run: Callable[..., None], spec: dict[str, Any]
) -> None:
    alone, mixed = (Sequences(kernels, run, 5, **spec) for _ in range(2))
    alone.pages = alone.pages[::-1].copy()
    mixed.pages[1] = mixed.pages[1, ::-1].copy()
    wanted = torch.cat([alone.run((0, at, at + 1))[0] for at in range(LENGTH)])
    found, at = [], 0
    for size in (8, 3, 16, 1, 9, 5, 3):
        found.append(mixed.run((1, at, at + size), (0, at, at + size))[1])
        at += size
    assert torch.equal(torch.cat(found), wanted)


def test_what_float16_cannot_hold_is_stored_as_its_largest(
    kernels: Kernels, run: Callable[..., None]
) -> None:
    sequences = Sequences(kernels, run, 7)
    sequences.qkv[0, 0, -DIM:] = 1e6
    (out,) = sequences.run((0, 0, 1))
    assert (out[0, -DIM:] == 65504).all()
