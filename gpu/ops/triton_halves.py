"""Sums of two ranks in halves of their rows, each beside the product of the other half.

The first half of a product goes to the other rank while the second half is computed. A copy engine
carries it, on a stream of its own, so no multiprocessor is taken from products: kernels that wait for
the other rank would hold some. Then one launch adds both parts to the residual and normalises, and the
next product takes the half whose sum is there.

The halves of successive sums lie in two places by turns. A rank that writes to the place of a sum again,
for the next sum but one, has got both halves of the next sum. The other rank sent these after a product
that had waited for all of this sum, so it does not read that place any more.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.triton_layer import add_norm
from ramify.gpu.ranks.peers import PeerHalves

_ROUND = 128  # tokens of a product's tile


class HalvedSums:
    """The sums of one rank: `send` and `add` for each half, then `arrived` before a sum is read."""

    def __init__(self, peers: PeerHalves) -> None:
        self.peers = peers
        device = peers.mine.device
        self._on_gpu = device.type == "cuda"
        # ahead of products that wait for a multiprocessor
        self._side: Any = None
        if self._on_gpu:
            self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._values = torch.tensor([1, 2], dtype=torch.int32, device=device)
        self._under_way: list[tuple[slice, Any, tuple[Tensor, ...]]] = []
        if self._on_gpu:  # the first long prompt is not to wait for its kernels
            _await[(1,)](peers.my_bells, 0, 0, num_warps=1)
            row = torch.zeros_like(peers.mine[0, :1])
            add_norm(row, row, RMSNorm(row[0], 1.0), row, row)

    def takes(self, tokens: int) -> bool:
        """Whether sums of so many tokens are halved. No CUDA graph holds them: the host counts sums."""
        if not self.peers.least <= tokens <= self.peers.rows:
            return False
        return not (self._on_gpu and torch.cuda.is_current_stream_capturing())

    def begin(self, tokens: int) -> tuple[slice, slice]:
        """Begin the next sum. Returns its halves."""
        self.peers.made += 1
        middle = -(-(tokens // 2) // _ROUND) * _ROUND
        return slice(0, middle), slice(middle, tokens)

    def send(self, half: slice, part: Tensor) -> None:
        """Send `part` [n, hidden], this rank's rows of a half."""
        peers = self.peers
        turn, value, second = peers.made & 1, peers.made >> 1 & 1, int(half.start > 0)
        if self._on_gpu:
            self._side.wait_stream(torch.cuda.current_stream())
        with self._stream():
            peers.theirs[turn, half].copy_(part, non_blocking=True)
            peers.their_bells[second, turn].copy_(self._values[value], non_blocking=True)

    def add(self, half: slice, part: Tensor, residual: Tensor, norm: RMSNorm, normed: Tensor) -> None:
        """Add both ranks' parts of a half to residual [T, hidden]; `normed` gets it after `norm`."""
        peers, event = self.peers, None
        turn, value, second = peers.made & 1, peers.made >> 1 & 1, int(half.start > 0)
        with self._stream():
            # One program: the others of a larger kernel would hold multiprocessors while they wait
            _await[(1,)](peers.my_bells, second * 2 + turn, value + 1, num_warps=1)
            add_norm(part, residual[half], norm, peers.mine[turn, half], normed[half])
            if self._on_gpu:
                event = self._side.record_event()
        self._under_way.append((half, event, (part, residual, normed)))

    def arrived(self) -> Iterator[slice]:
        """Yield the halves that were under way, each once its sum is there."""
        for half, event, _ in self._under_way:
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
            yield half
        self._under_way.clear()  # their inputs may be used again from here on

    def _stream(self) -> Any:
        return torch.cuda.stream(self._side) if self._on_gpu else nullcontext()


@triton.jit(do_not_specialize=["place", "value"])
def _await(bells, place, value):
    while tl.atomic_add(bells + place, 0, sem="acquire", scope="sys") != value:
        pass
