"""Compares blocks of KV in host memory with the same tokens' KV, computed again, in a thread.

Two computations of the same tokens differ where a sum is made in another order: chunks of a prompt, rows
beside it, a decode instead of a prompt. A value of b significant bits is rounded by at most u = 2^-b.
Some 11 roundings a layer add up like a random walk: over 80 layers a relative error (RMS) of about
u sqrt(11 x 80) / sqrt(3) = 17 u for each, 24 u between two. `BOUNDS` are 32 u of 16-bit floats. In
float32 the sums themselves round, sqrt(15,000) u each: 120 times as much, of which the bound is six
times the sum. Other tokens' KV differs by 50 % and more.

A block is looked at in 64 parts of about one layer's keys or values, by root mean squares: so a layer
whose values are small counts as much as others, and one token that a router sent elsewhere little.

Does not know which blocks are to be compared.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ramify.actors.kit.mailbox import Address, MailboxClosed
from ramify.gpu.kv.host_memory import Bytes, HostMemory
from ramify.protocol.cluster import BLOCK
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ConfigError
from ramify.protocol.messages import CompareOrder, CompareResult
from ramify.protocol.plan import ExecutorInfo

BOUNDS = {"bfloat16": 2**-3, "float16": 2**-6, "float32": 2**-10}
_TRY_AGAIN_S, _GIVE_UP_S = 0.004, 5.0  # for a block that is not in host memory yet


def open_comparer(
    config: ModelConfig, info: ExecutorInfo, cache: Address[CompareResult]
) -> "BlockComparer | None":
    """What `--kv-canary` needs; None: it is 0. `cache` hears of each order's end. Raises ConfigError."""
    if not config.kv_canary:
        return None
    if info.state_slots or info.window:
        raise ConfigError(
            f"--kv-canary {config.kv_canary:g}: states of recurrent layers and windows are not "
            "compared; leave it out for this model"
        )
    if not info.host_blocks or not info.host_memory:
        raise ConfigError(
            f"--kv-canary {config.kv_canary:g}: KV of this model does not leave the device; leave it "
            "out (--kv-host BYTES says why)"
        )
    loop = asyncio.get_running_loop()

    def tell(result: CompareResult) -> None:
        with suppress(MailboxClosed):  # it has ended
            cache.tell(result)

    def done(result: CompareResult) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, result)

    comparer = BlockComparer(info.dtype, info.block_bytes, done)
    comparer.renew(info.host_memory, info.host_blocks)
    return comparer


class BlockComparer:
    """Of blocks of `size` bytes. `done` is called in a thread with the result of each order.

    `dtype`: of their values, by torch's name; one that is no float is compared bit by bit.
    """

    def __init__(self, dtype: str, size: int, done: Callable[[CompareResult], None]) -> None:
        self.bound = BOUNDS.get(dtype, 0.0)
        self._dtype, self._size, self._done = dtype, size, done
        self._memory: HostMemory | None = None
        self._jobs: queue.SimpleQueue[tuple[CompareOrder, HostMemory] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv canary", daemon=True)
        self._thread.start()

    def renew(self, path: str, slots: int) -> None:
        """From now on orders are about the host memory at `path`."""
        self._memory = None
        with suppress(OSError):  # the executor that made it has died, too
            self._memory = HostMemory(slots, self._size, path)

    def submit(self, orders: Iterable[CompareOrder]) -> None:
        for order in orders:
            if self._memory is None:
                self._done(CompareResult(order, "unknown"))
            else:
                self._jobs.put((order, self._memory))

    def close(self, grace: float = 1.0) -> None:
        """End the thread, behind at most the order that it is at."""
        while not self._jobs.empty():
            with suppress(queue.Empty):
                self._jobs.get_nowait()
        self._jobs.put(None)
        self._thread.join(grace)
        if not self._thread.is_alive() and self._memory is not None:
            self._memory.close()

    # --- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        stored, computed = (np.empty(self._size, dtype=np.uint8) for _ in range(2))
        while (job := self._jobs.get()) is not None:
            order, memory = job
            there = _arrives(memory, order.slot, order.key, stored)
            worst = None
            if there and _arrives(memory, order.other, order.twin, computed):
                worst = difference(stored, computed, self._dtype)
            if worst is None:
                self._done(CompareResult(order, "unknown"))
            else:
                verdict = "equal" if worst <= self.bound else "differs"
                self._done(CompareResult(order, verdict, worst, self.bound))


def _arrives(memory: HostMemory, slot: int, key: bytes, into: Bytes) -> bool:
    """Copy a block once it is there; False: it does not come."""
    until = time.perf_counter() + _GIVE_UP_S
    while memory.copy(slot, key, into) is None:
        if time.perf_counter() > until:
            return False
        time.sleep(_TRY_AGAIN_S)
    return True


def difference(stored: Bytes, computed: Bytes, dtype: str) -> float | None:
    """The largest relative RMS of the difference of a part; infinite where a stored value is not finite.

    None: what was computed is not finite. Of other values than floats: 0 if all are equal, or else
    infinite.
    """
    if dtype not in BOUNDS:
        return 0.0 if np.array_equal(stored, computed) else np.inf
    worst = 0.0
    for one, other in zip(stored.reshape(BLOCK, -1), computed.reshape(BLOCK, -1), strict=True):
        if np.array_equal(one, other):
            continue
        was, now = _values(one, dtype), _values(other, dtype)
        if not np.isfinite(now).all():
            return None
        if not np.isfinite(was).all():
            return np.inf
        scale = max(np.dot(was, was), np.dot(now, now))
        apart = was - now
        worst = max(worst, float(np.sqrt(np.dot(apart, apart) / scale)))
    return worst


def _values(part: Bytes, dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "bfloat16":  # the upper half of a float32
        return (part.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return part.view(np.dtype(dtype)).astype(np.float64)
