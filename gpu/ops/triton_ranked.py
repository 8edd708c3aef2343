"""The operations of one of several ranks on Triton kernels, as `ranked_ops` on torch.

A sum over the ranks needs the product that was put off. So the residual is added after the sum, with the
next norm, in one kernel.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.ops.base import Activation, LayerAttention, Projection
from ramify.gpu.ops.experts import LayerExperts
from ramify.gpu.ops.linear.base import Linear
from ramify.gpu.ops.ranked_ops import normed_widely
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.tilings import OpTilings
from ramify.gpu.ops.triton_halves import HalvedSums
from ramify.gpu.ops.triton_linear import UnscaledRows
from ramify.gpu.ops.triton_ops import LazyStream, TritonOps
from ramify.gpu.ops.triton_sums import sum_add_norm, sum_rows
from ramify.gpu.ranks.group import RankSums
from ramify.gpu.step.inputs import StepInputs


@dataclass(slots=True)
class RankPart(Projection):
    """A term whose sum over ranks, in a kernel of ours, is still to be made. `rows`: this rank's part.

    With `linear` that part is still to be computed of `rows`: the sum is to be made in halves.
    """


class RankedTritonOps(TritonOps):
    """`TritonOps` of a rank. `lines`: the size of the vocabulary."""

    def __init__(
        self, ranks: RankSums, lines: int, *args: Any, halved: bool = True, **options: Any
    ) -> None:
        """`halved`: whether sums may be in halves, for which other such objects do not wait."""
        super().__init__(*args, **options)
        self._ranks, self._lines = ranks, lines
        self._whole: Projection | None = None  # the last one that was summed ahead of `reduce`
        self._now = OpTilings()  # of the step
        halves = None if ranks.peers is None or not halved else ranks.peers.halves
        self._halved = None if halves is None else HalvedSums(halves)

    def begin(self, step: StepInputs[Tensor]) -> None:
        super().begin(step)
        self._join()

    def _join(self) -> None:
        """Wait for halves of a sum that are under way."""
        for _ in self._halves():
            pass

    def _halves(self) -> Iterator[slice]:
        return iter(()) if self._halved is None else self._halved.arrived()

    def embed(
        self, step: StepInputs[Tensor], table: Tensor, scale: float, norm: RMSNorm | None
    ) -> LazyStream:
        if self._ranks.rank:
            return self.stream(table.new_empty((len(step.input_ids), table.shape[1])), norm)
        return self.stream(super().embed(step, table, scale, None).residual, norm)

    def stream(self, residual: Tensor, norm: RMSNorm | None) -> LazyStream:
        """Make a stream of rank 0's residual."""
        peers = self._ranks.peers
        self._now = self._tilings(len(residual), self._sizes)
        if peers is None or len(residual) > peers.most:
            return super().stream(self._ranks.from_first(residual), norm)
        if self._ranks.rank:
            residual.zero_()  # its part of a sum
        whole = torch.zeros_like(residual)
        normed = sum_add_norm(residual, peers, whole, norm)
        return LazyStream(whole, normed, None, 0.0 if norm is None else norm.eps, self._now)

    def whole(self, x: LazyStream) -> Tensor:
        self._join()
        return super().whole(x)

    def attend(self, qkv: Tensor, layer: LayerAttention, step: StepInputs[Tensor]) -> Tensor:
        if layer.wide_norms:
            layer = normed_widely(qkv, layer, self._ranks)
        return super().attend(qkv, layer, step)

    def reduce(self, projection: Projection) -> Projection:
        if projection is self._whole:
            return projection
        rows, linear = projection.rows, projection.linear
        if linear is not None and self._halved is not None and self._halved.takes(len(rows)):
            return RankPart(rows, linear)
        return self._part(projection)

    def _part(self, projection: Projection) -> Projection:
        """Return this rank's part, whose sum is still to be made; the sum where the library makes it."""
        rows, linear = projection.rows, projection.linear
        if linear is None:
            added = super()._result(projection)
        else:
            added = self._products.plain(UnscaledRows(rows), linear, 0.0, self._now.add)
        peers = self._ranks.peers
        if peers is not None and len(added) <= peers.most:
            return RankPart(added, None)
        return Projection(self._ranks.sum(added), None)

    def _result(self, projection: Projection) -> Tensor:
        peers = self._ranks.peers
        if peers is not None and isinstance(projection, RankPart):
            if projection.linear is not None:
                return self._result(self._part(Projection(projection.rows, projection.linear)))
            return sum_rows(projection.rows, peers)
        return super()._result(projection)

    def add_norm(
        self, x: LazyStream, projection: Projection, norm: RMSNorm | None, post: RMSNorm | None = None
    ) -> LazyStream:
        peers = self._ranks.peers
        if isinstance(projection, RankPart) and projection.linear is not None:
            if norm is not None and post is None and self._halved is not None:
                return self._add_halves(x, projection.rows, projection.linear, norm, self._halved)
            projection = self._part(Projection(projection.rows, projection.linear))
        if peers is None or post is not None or not isinstance(projection, RankPart):
            return super().add_norm(x, projection, norm, post)
        normed = sum_add_norm(projection.rows, peers, x.residual, norm)
        return LazyStream(x.residual, normed, None, 0.0 if norm is None else norm.eps, x.tilings)

    def _add_halves(
        self, x: LazyStream, rows: Tensor, linear: Linear, norm: RMSNorm, sums: HalvedSums
    ) -> LazyStream:
        """Start an `add_norm` in halves, for which `linear`, `gated`, `experts` and `head` wait."""
        normed = torch.empty_like(x.residual)
        for half in sums.begin(len(rows)):
            part = self._products.plain(UnscaledRows(rows[half]), linear, 0.0, self._now.add)
            sums.send(half, part)
            sums.add(half, part, x.residual, norm, normed)
        return LazyStream(x.residual, normed, None, norm.eps, x.tilings)

    def linear(self, x: LazyStream, linear: Linear) -> Tensor:
        output = None
        for half in self._halves():
            if output is None:
                output = x.normed.new_empty((len(x.normed), linear.weight.shape[0]))
            rows = UnscaledRows(x.normed[half])
            self._products.plain(rows, linear, x.eps, x.tilings.linear, output[half])
        return super().linear(x, linear) if output is None else output

    def gated(self, x: LazyStream, linear: Linear, activation: Activation) -> Tensor:
        output = None
        for half in self._halves():
            if output is None:
                output = x.normed.new_empty((len(x.normed), linear.weight.shape[0] // 2))
            rows = UnscaledRows(x.normed[half])
            self._products.gated(rows, linear, x.eps, x.tilings.gated, activation, output[half])
        return super().gated(x, linear, activation) if output is None else output

    def experts(self, x: LazyStream, layer: LayerExperts) -> Projection:
        self._join()
        return super().experts(x, layer)

    def joined(
        self, first: Projection, first_norm: RMSNorm, second: Projection, second_norm: RMSNorm
    ) -> Projection:
        one, other = self.reduce(first), self.reduce(second)
        self._whole = super().joined(one, first_norm, other, second_norm)
        return self._whole

    def head(
        self,
        x: LazyStream,
        lines: Tensor | None,
        linear: Linear,
        softcap: float | None,
        output: Tensor | None = None,
    ) -> Tensor:
        self._join()
        each = -(-self._lines // self._ranks.count)
        count = max(0, min(each, self._lines - self._ranks.rank * each))
        own = x.normed.new_empty((len(x.normed if lines is None else lines), count))
        super().head(x, lines, linear, softcap, own)
        own = own if count == each else F.pad(own, (0, each - count))
        logits = self._ranks.columns(own, self._lines)
        return logits if output is None else output.copy_(logits)
