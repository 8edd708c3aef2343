"""Work of a step that runs beside its model, on a stream of its own.

Masks and settings of lines are known before the model runs and needed behind it. Made in the order of
the step's stream they would add to it: the bytes of the longest token alone take 0.1 ms.
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
        """What `issued` issues next runs behind what came until now, and beside what follows."""
        self._forked = True
        if self._cuda:
            self._begun.record(self._steps)

    @contextmanager
    def issued(self) -> Iterator[None]:
        """Issue on the second stream; what is issued on the steps' behind this waits for it.

        Without `fork` before, that runs behind all that was issued. Tensors made within must not be
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
