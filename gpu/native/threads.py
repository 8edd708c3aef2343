"""A crew of threads that runs recordings of kernels, without Python and its lock in between.

The caller's thread is one of them. Helpers are Python threads, each in one call that does not hold the
interpreter's lock, until the crew is closed.
"""

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from ramify.gpu.native import crew as words
from ramify.gpu.native.host import Isa, compiled
from ramify.gpu.native.ir import CACHE_LINE

_SPINS = 2_000  # pauses of a helper before it sleeps: some 40 us

MOST_INSTRUCTIONS = 8192  # of a recording

_PLAIN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)

Words = npt.NDArray[np.int64]


@dataclass(slots=True)
class Instruction:
    """A call of a kernel for `rows[0]` rows: `items` items for each `block` rows. `args`: int64.

    A thread takes up to `together` items at a time, as long as there are as many for every thread.
    `keep` holds the memory that addresses among `args` point to.
    """

    kernel: int
    rows: Words
    args: Sequence[int]
    block: int = 1
    items: int = 1
    together: int = 1
    keep: object = field(default=None, repr=False)


class Recording:
    """A list of instructions."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.instructions = list(instructions)
        if len(self.instructions) > MOST_INSTRUCTIONS:
            raise ValueError(f"{len(self.instructions)} instructions are more than {MOST_INSTRUCTIONS}")
        self.words = aligned(len(self.instructions) * words.INSTRUCTION_WORDS)
        lines = self.words.reshape(-1, words.INSTRUCTION_WORDS)
        for line, one in zip(lines, self.instructions, strict=True):
            if len(one.args) > words.INSTRUCTION_WORDS - words.ARGUMENTS:
                raise ValueError(f"{len(one.args)} arguments are too many")
            line[words.KERNEL], line[words.ROWS] = one.kernel, one.rows.ctypes.data
            line[words.BLOCK], line[words.ITEMS] = one.block, one.items
            line[words.TOGETHER] = one.together
            line[words.ARGUMENTS : words.ARGUMENTS + len(one.args)] = one.args
        self.address = self.words.ctypes.data


class Crew:
    """Crew of `threads` threads, the caller's included. `close` ends the helpers."""

    def __init__(self, isa: Isa, threads: int) -> None:
        if not 1 <= threads <= words.MOST_THREADS:
            raise ValueError(f"{threads} threads: 1 to {words.MOST_THREADS} are possible")
        # the code that the helpers are in
        self._compiled = compiled(f"crew {isa}", partial(words.emit_crew, isa=isa))
        board = words.BOARD_HEAD + MOST_INSTRUCTIONS * words.BOARD_LINE
        self._boards = aligned(words.KEPT_BOARDS * board)
        self._state = aligned(words.STATE_WORDS)
        self._address = self._state.ctypes.data
        self._state[words.BOARDS], self._state[words.BOARD_WORDS] = self._boards.ctypes.data, board
        self._state[words.SPINS], self._state[words.THREADS] = _SPINS, threads
        self._call("initialise")
        self._run = _RUN(self._compiled.address("run"))
        self._work = _WORK(self._compiled.address("work"))
        # a helper holds this object, whose memory it reads
        self._helpers = [
            threading.Thread(target=self._help, args=(n,), name=f"kernels {n}", daemon=True)
            for n in range(1, threads)
        ]
        for helper in self._helpers:
            helper.start()
        idents = [helper.ident for helper in self._helpers]
        self._clocks = [time.pthread_getcpuclockid(ident) for ident in idents if ident is not None]

    def spent(self) -> tuple[float, float]:
        """Read the seconds that the calling thread has run, and all of the crew together."""
        own = time.thread_time()
        return own, own + sum(map(time.clock_gettime, self._clocks))

    def busy(self, since: tuple[float, float]) -> float:
        """Estimate the seconds since `since` that the work would take on cores of the crew's own.

        A single thread's work counts in full, shared work by the threads' mean.
        """
        own, all_ = self.spent()
        return max(own - since[0], (all_ - since[1]) / (1 + len(self._clocks)))

    def run(self, recording: Recording) -> None:
        """Run a recording. Returns when all of it is done."""
        self._run(self._address, recording.address, len(recording.instructions))

    def close(self) -> None:
        """End the helpers. No run may follow."""
        self._call("stop")
        for helper in self._helpers:
            helper.join()
        self._helpers.clear()

    def _help(self, number: int) -> None:
        self._work(self._address, number)

    def _call(self, name: str) -> None:
        _PLAIN(self._compiled.address(name))(self._address)


def aligned(count: int) -> Words:
    """Allocate `count` zeros that begin at a cache line."""
    line = CACHE_LINE // 8
    memory: Words = np.zeros(count + line, dtype=np.int64)
    skip = -(memory.ctypes.data // 8) % line
    return memory[skip : skip + count]
