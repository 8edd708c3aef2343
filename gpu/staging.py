"""Moves a step's integers to the device and its tokens back, without making either side wait.

A ring of pinned buffers: the host fills one while the device still reads those before it. On a
CPU (where the kernels run in Triton's interpreter) the same code copies at once. It does not know
what the arrays mean.
"""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

RING = 3  # two steps in flight and one that is being filled
_ALIGN = 16

Array = npt.NDArray[np.generic]
Int32s = npt.NDArray[np.int32]


class Upload:
    """One way to the device: arrays, laid one after another into a buffer, arrive as its views.

    With `fixed` bytes the device's buffer never moves, and so neither does an array whose
    predecessors keep their sizes: a CUDA graph may read it. It is written in the stream's order.
    Without, each slot of the ring has a device buffer of its own, which grows.
    """

    def __init__(self, device: torch.device, fixed: int | None = None) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._fixed = None if fixed is None else torch.zeros(fixed, dtype=torch.uint8, device=device)
        self._hosts = [self._host(fixed or 1 << 16) for _ in range(RING)]
        self._devices: list[Tensor | None] = [None] * RING

    def send(self, slot: int, arrays: Sequence[Array]) -> list[Tensor]:
        """Copy `arrays` through ring slot `slot`, whose earlier copy must be over."""
        offsets, size = [], 0
        for array in arrays:
            offsets.append(size)
            size += -(-array.nbytes // _ALIGN) * _ALIGN
        if size > len(self._hosts[slot]):
            if self._fixed is not None:
                raise ValueError(f"{size} bytes for a buffer of {len(self._fixed)}")
            self._hosts[slot] = self._host(2 * size)
        host = self._hosts[slot]
        view = host.numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            view[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        target = self._target(slot, len(host))
        target[:size].copy_(host[:size], non_blocking=True)
        return [
            target[offset : offset + array.nbytes].view(_TYPES[array.dtype.char]).view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    def _target(self, slot: int, size: int) -> Tensor:
        if self._fixed is not None:
            return self._fixed
        target = self._devices[slot]
        if target is None or len(target) < size:
            target = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._devices[slot] = target
        return target

    def _host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)


_TYPES = {"i": torch.int32, "l": torch.int64, "q": torch.int64, "f": torch.float32, "d": torch.float64}


class Download:
    """The way back: one copy a step on a stream of its own, and an event that says it is there."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._cuda = device.type == "cuda"
        self._hosts = [self._host(size) for _ in range(RING)]
        self._more: list[Tensor | None] = [None] * RING
        self._copied: torch.cuda.Event | None = None
        if self._cuda:
            self._stream = torch.cuda.Stream(device)

    def fetch(self, slot: int, tokens: Tensor, more: Tensor | None = None) -> "Fetched":
        """Start copying tokens int32[n], and `more` int32[m, words], into ring slot `slot`."""
        host = self._hosts[slot][: len(tokens)]
        room = None if more is None else self._room(slot, more)
        if not self._cuda:
            self._copy(host, tokens, room, more)
            return Fetched(host, room, None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(host, tokens, room, more)
        self._copied = torch.cuda.Event()
        self._copied.record(self._stream)
        return Fetched(host, room, self._copied)

    def settle(self) -> None:
        """Let the current stream overwrite what `fetch` copies only once it is copied."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def _copy(self, host: Tensor, tokens: Tensor, room: Tensor | None, more: Tensor | None) -> None:
        host.copy_(tokens, non_blocking=True)
        if room is not None and more is not None:
            room.copy_(more, non_blocking=True)

    def _room(self, slot: int, more: Tensor) -> Tensor:
        size = more.numel()
        room = self._more[slot]
        if room is None or len(room) < size:
            room = self._more[slot] = self._host(2 * size)
        return room[:size].view(more.shape)

    def _host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self._cuda)


class Fetched:
    """Tokens on their way to the host, and what came with them."""

    def __init__(self, host: Tensor, more: Tensor | None, event: "torch.cuda.Event | None") -> None:
        self._host = host
        self._more = more
        self._event = event
        self._arrays: tuple[Int32s, Int32s | None] | None = None

    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> "tuple[Int32s, Int32s | None]":
        """Tokens and `more`, once they are there; copies, for the ring slot is used again."""
        if self._arrays is None:
            if self._event is not None:
                self._event.synchronize()
            more = None if self._more is None else self._more.numpy().copy()
            self._arrays = self._host.numpy().copy(), more
        return self._arrays


class Stopwatch:
    """Device time between two points of a stream, in microseconds."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            make = torch.cuda.Event
            self._events = make(enable_timing=True), make(enable_timing=True)

    def start(self) -> None:
        if self._events is not None:
            self._events[0].record()

    def stop(self) -> None:
        if self._events is not None:
            self._events[1].record()

    def wait(self) -> None:
        """Wait for the second point."""
        if self._events is not None:
            self._events[1].synchronize()

    def elapsed_us(self) -> int:
        """Waits for the second point. 0 on a CPU, where it is not measured."""
        if self._events is None:
            return 0
        self.wait()
        return int(1000 * self._events[0].elapsed_time(self._events[1]))
