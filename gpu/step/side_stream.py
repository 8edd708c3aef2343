"""A second CUDA stream, for work of a step that runs beside the model.

Masks and settings of lines are known before the model runs and needed after it. On the step's own stream
they would add to its time: the bytes of the longest token alone take 0.1 ms.
"""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A second stream beside that of the steps. On a CPU all is one."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._forked = False
        if self._cuda:
            self._steps = torch.cuda.current_stream(device)
            self._stream = torch.cuda.Stream(device)
            self._begun, self._ended = torch.cuda.Event(), torch.cuda.Event()

    def fork(self) -> None:
        """Let what `issued` issues next run after all that came until now, and beside what follows."""
        self._forked = True
        if self._cuda:
            self._begun.record(self._steps)

    @contextmanager
    def issued(self) -> Iterator[None]:
        """Issue on the second stream; what is issued on the steps' stream later waits for it.

        Without `fork` before, this runs after all that was issued. Tensors made within must not be
        freed before the step is over.
        """
        if not self._forked:
            self.fork()
        self._forked = False
        if not self._cuda:
            yield
            return
        self._stream.wait_event(self._begun)
        torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(self._steps)
        self._ended.record(self._stream)
        self._steps.wait_event(self._ended)
