"""Copies a step's inputs to the device and its tokens back. Neither side waits for the other.

The host fills one of a ring of pinned buffers while the device may still read the ones before it. Views,
streams and events are made once and used again, because making them costs more than the copies. On a
CPU, where Triton's interpreter runs the kernels, the same code copies at once. This file does not know
what the arrays mean.
"""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

RING = 3  # two steps in flight and one that is being filled
_ALIGN = 16

Array = npt.NDArray[np.generic]
Int32s = npt.NDArray[np.int32]
Layout = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape


class StagedArrays:
    """Named arrays, one after another in a pinned buffer, and their views on the device."""

    def __init__(self, layout: Layout, host: Tensor, device: Tensor) -> None:
        self.arrays: dict[str, Array] = {}
        self.views: dict[str, Tensor] = {}
        start = 0
        for name, (kind, shape) in layout.items():
            size = int(np.prod(shape)) * np.dtype(kind).itemsize
            part = slice(start, start + size)
            self.arrays[name] = host.numpy()[part].view(kind).reshape(shape)
            self.views[name] = device[part].view(_TYPES[kind]).view(shape)
            start += _aligned(size)
        self._host, self._device = host[:start], device[:start]

    def send(self) -> None:
        """Copy the arrays, in the order of the current stream."""
        self._device.copy_(self._host, non_blocking=True)


class Upload:
    """A ring of pinned buffers that are copied into one buffer on the device, in the stream's order.

    `fixed`: the size of the buffer in bytes. Then it never moves, and a CUDA graph may read it. Without
    a size it grows as needed.
    """

    def __init__(self, device: torch.device, fixed: int | None = None) -> None:
        self._pinned = device.type == "cuda"
        self._fixed = fixed is not None
        size = fixed if fixed is not None else 1 << 16
        self._hosts = [self._host(size) for _ in range(RING)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)

    def frame(self, entry: int, layout: Layout) -> StagedArrays:
        """Make a frame in ring entry `entry`, whose earlier copy must be over.

        Raises ValueError where a `fixed` buffer is too small.
        """
        size = frame_bytes(layout)
        if size > len(self._device) and self._fixed:
            raise ValueError(f"{size} bytes for a buffer of {len(self._device)}")
        if size > len(self._device):
            self._device = self._device.new_zeros(2 * size)
        if size > len(self._hosts[entry]):
            self._hosts[entry] = self._host(2 * size)
        return StagedArrays(layout, self._hosts[entry], self._device)

    def send(self, entry: int, **arrays: Array) -> dict[str, Tensor]:
        """Copy `arrays` through ring entry `entry`. Returns their views on the device by name."""
        frame = self.frame(
            entry, {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
        )
        for name, array in arrays.items():
            frame.arrays[name][...] = array
        frame.send()
        return frame.views

    def _host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)


def frame_bytes(layout: Layout) -> int:
    """Count the bytes of a frame."""
    sizes = (int(np.prod(shape)) * np.dtype(kind).itemsize for kind, shape in layout.values())
    return sum(map(_aligned, sizes))


_TYPES = {
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class StepClock:
    """The events of one ring entry: its step began, ended, and its tokens arrived.

    A part of the step that is not its own work may be timed apart.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._has_part = self.moves = False  # `moves`: blocks of KV move in it
        if self._cuda:
            self._steps = torch.cuda.current_stream(device)  # named, because looking it up takes long
            self._began, self.ended, self._part_began, self._part_ended, self._moved = (
                torch.cuda.Event(enable_timing=True) for _ in range(5)
            )
            self.arrived = torch.cuda.Event()
            self._over = self.ended

    def start(self) -> None:
        """Record that the next step's kernels begin."""
        self._has_part = self.moves = False
        if self._cuda:
            self._began.record(self._steps)

    def start_part(self) -> None:
        """Record that what is timed apart begins."""
        self._has_part = True
        if self._cuda:
            self._part_began.record(self._steps)

    def stop_part(self) -> None:
        """Record that what is timed apart ends."""
        if self._cuda:
            self._part_ended.record(self._steps)

    def moved(self) -> None:
        """Record that the blocks of KV, which move first in the step, have moved."""
        self.moves = True
        if self._cuda:
            self._moved.record(self._steps)

    def stop(self, fetched: bool) -> None:
        """Record that the kernels end. `fetched`: the step is over only when its tokens have arrived."""
        if self._cuda:
            self.ended.record(self._steps)
            self._over = self.arrived if fetched else self.ended

    def ready(self) -> bool:
        return not self._cuda or bool(self._over.query())

    def wait(self) -> None:
        """Wait until the step is over."""
        if self._cuda:
            self._over.synchronize()

    def elapsed_us(self) -> int:
        """Read the device time of the step, which must be over. 0 on a CPU, where it is not measured."""
        return int(1000 * self._began.elapsed_time(self.ended)) if self._cuda else 0

    def moved_us(self) -> int:
        """Read how much of the step's time moving blocks took."""
        return int(1000 * self._began.elapsed_time(self._moved)) if self._cuda and self.moves else 0

    def part_us(self) -> int:
        """Read how much of the step's time was timed apart."""
        if not self._cuda or not self._has_part:
            return 0
        return int(1000 * self._part_began.elapsed_time(self._part_ended))


class Download:
    """The copy back to the host: all of `tokens` int32[n] once a step, on a stream of its own.

    Steps with log-probabilities or scores have a second copy, whose buffer is made on first use.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self._cuda = tokens.device.type == "cuda"
        self._hosts = [torch.empty(len(tokens), dtype=tokens.dtype, pin_memory=self._cuda)
                       for _ in range(RING)]  # fmt: skip
        self._arrays: list[Int32s] = [host.numpy() for host in self._hosts]
        self._more: list[Tensor | None] = [None] * RING
        self._copying: StepClock | None = None
        if self._cuda:
            self._steps = torch.cuda.current_stream(tokens.device)
            self._copies = torch.cuda.Stream(tokens.device)

    def fetch(
        self, entry: int, clock: StepClock, more: Tensor | None = None
    ) -> tuple[Int32s, Int32s | None]:
        """Start copying the tokens of the step whose end `clock` recorded, and `more` int32[m].

        Returns int32[n] and int32[m]. They are valid after `clock.arrived`, until the ring entry is used
        again.
        """
        host = self._hosts[entry]
        room = None if more is None else self._room(entry, more)
        arrays = self._arrays[entry], None if room is None else room.numpy()
        if not self._cuda:
            host.copy_(self._tokens)
            if room is not None and more is not None:
                room.copy_(more)
            return arrays
        self._copies.wait_event(clock.ended)
        torch.cuda.set_stream(self._copies)
        try:
            host.copy_(self._tokens, non_blocking=True)
            if room is not None and more is not None:
                room.copy_(more, non_blocking=True)
                more.record_stream(self._copies)
        finally:
            torch.cuda.set_stream(self._steps)
        clock.arrived.record(self._copies)
        self._copying = clock
        return arrays

    def _room(self, entry: int, more: Tensor) -> Tensor:
        room = self._more[entry]
        if room is None or len(room) < more.numel():
            room = torch.empty(2 * more.numel(), dtype=more.dtype, pin_memory=self._cuda)
            self._more[entry] = room
        return room[: more.numel()]

    def settle(self) -> None:
        """Make the next step wait, on the device, until the last tokens are copied."""
        if self._copying is not None:
            self._steps.wait_event(self._copying.arrived)
