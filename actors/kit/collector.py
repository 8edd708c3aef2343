"""Bounds the pauses of Python's garbage collector in a process that serves.

The collector finds objects that only each other know; all others go with their last reference. Now and
then it walks all objects that there are: a fifth of a second where clients hold 300,000, in which
nothing else runs. So what has survived a full collection is *frozen*, and later ones walk only what has
come since. Rings among frozen objects are found by a *whole* collection: when the process has nothing
to do, seldom; still more seldom when it always has; and when memory has grown by half since the last
one. What ends by itself, like a session, must therefore leave no rings behind (`SessionCore.part`).
"""

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

from ramify.actors.kit.clock import Clock, Timer

YOUNG = (1000, 5, 1)  # `gc.set_threshold`: a full collection walks some 12,000 objects
LOOK_SECONDS = 5.0  # between two looks at whether the process is idle
IDLE = 0.05  # of a processor
WHOLE_SECONDS = 600.0  # between two whole collections of a process that is idle now and then
LATEST_SECONDS = 1800.0  # and of one that never is
GROWTH = 1.5  # of the blocks of memory that the last one left
FEW_BLOCKS = 200_000  # some 20 MB: what so few may grow by is no matter


class Collector:
    """The garbage collector of this process, for all of its threads. `cpu()`: processor seconds of the
    event loop's thread. `whole`: whole collections so far.
    """

    def __init__(self, clock: Clock, cpu: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._cpu = cpu
        self._spent = self._last = 0.0
        self._blocks = 0  # of memory, behind the last whole collection
        self._frozen = False  # something was, since the last whole collection
        self._before: tuple[int, int, int] | None = None
        self._timer: Timer | None = None
        self.whole = 0

    def begin(self) -> None:
        """Start-up is done, or about to begin: what is there now stays for good."""
        self._before = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.collect()  # of nothing: CPython waits until a quarter of what the last one left has come
        gc.set_threshold(*YOUNG)
        gc.callbacks.append(self._collected)
        self._last, self._spent = self._clock.now(), self._cpu()
        self._blocks = sys.getallocatedblocks()
        self._look_later()

    def end(self) -> None:
        """Leave all as it was before `begin`, but for what is frozen. Nothing happens without one."""
        if self._before is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        gc.callbacks.remove(self._collected)
        gc.set_threshold(*self._before)
        self._before = None

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "stop" and info["generation"] == 2:
            gc.freeze()
            self._frozen = True

    def _look_later(self) -> None:
        self._timer = self._clock.call_at(self._clock.now() + LOOK_SECONDS, self._look)

    def _look(self) -> None:
        now, before, self._spent = self._clock.now(), self._spent, self._cpu()
        idle = self._spent - before < IDLE * LOOK_SECONDS
        late = now - self._last >= (WHOLE_SECONDS if idle else LATEST_SECONDS)
        grown = sys.getallocatedblocks() > GROWTH * max(self._blocks, FEW_BLOCKS)
        if self._frozen and (late or grown):
            gc.unfreeze()
            gc.collect()
            self._last, self._spent, self._frozen = now, self._cpu(), False
            self._blocks = sys.getallocatedblocks()
            self.whole += 1
        self._look_later()
