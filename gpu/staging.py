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
        self._hosts = [torch.empty(size, dtype=torch.int32, pin_memory=self._cuda) for _ in range(RING)]
        self._copied: torch.cuda.Event | None = None
        if self._cuda:
            self._stream = torch.cuda.Stream(device)

    def fetch(self, slot: int, tokens: Tensor) -> "Fetched":
        """Start copying tokens int32[n] into ring slot `slot`."""
        host = self._hosts[slot][: len(tokens)]
        if not self._cuda:
            host.copy_(tokens)
            return Fetched(host, None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(tokens, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(self._stream)
        return Fetched(host, self._copied)

    def settle(self) -> None:
        """Let the current stream overwrite what `fetch` copies only once it is copied."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)


class Fetched:
    """Tokens on their way to the host."""

    def __init__(self, host: Tensor, event: "torch.cuda.Event | None") -> None:
        self._host = host
        self._event = event
        self._tokens: npt.NDArray[np.int32] | None = None

    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> npt.NDArray[np.int32]:
        """The tokens, once they are there; a copy, for the ring slot is used again."""
        if self._tokens is None:
            if self._event is not None:
                self._event.synchronize()
            self._tokens = self._host.numpy().copy()
        return self._tokens


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
