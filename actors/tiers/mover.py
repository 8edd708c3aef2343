"""Moves blocks between host memory and a disk, in threads: no loop and no step waits for the disk.

Blocks that come back go before those that leave. What is to be written may not be in host memory yet,
as the plan that saves it is still to run: its seal says when it is, and it is tried again until then.

A disk that fails (full, gone, broken) is said once: nothing more is written to it then, and what can
still be read is. Does not know which blocks are worth it.
"""

import asyncio
import queue
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address, MailboxClosed
from ramify.actors.tiers.disk_file import DiskFile, empty_block
from ramify.gpu.kv.host_memory import HostMemory, RankMemory, shared_memory, whole_block
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ConfigError
from ramify.protocol.messages import ERASE, DiskOrder, DiskResult
from ramify.protocol.plan import ExecutorInfo

READERS = 3
_TRY_AGAIN_S, _GIVE_UP_S = 0.004, 5.0  # for a block that is not in host memory yet

log = get_log(__name__)


def check_folder(folder: Path) -> None:
    """Raises ConfigError if nothing can be written to `folder`, which is made if it is not there.

    Warns if others may look into it: what they read there is what was said.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
        mode = stat.S_IMODE(folder.stat().st_mode)
    except OSError as error:
        raise ConfigError(f"--kv-disk {folder}: {error}; give a folder to write to") from error
    if mode & 0o077:
        log.warning(
            "others may look into the folder of --kv-disk: chmod 700 it",
            path=str(folder),
            mode=f"{mode:o}",
        )


async def open_disk(
    config: ModelConfig, info: ExecutorInfo, cache: Address[DiskResult]
) -> "DiskMover | None":
    """The disk of `--kv-disk`; None: there is none. `cache` hears of each order's end.

    Raises ConfigError.
    """
    if config.kv_disk is None:
        return None
    if not info.host_blocks:
        raise ConfigError(
            f"--kv-disk {config.kv_disk}: KV of this model does not leave the device; leave it out "
            "(--kv-host BYTES says why)"
        )
    loop = asyncio.get_running_loop()
    opened = partial(DiskFile, config.kv_disk, info.kv_stamp, whole_block(info), config.kv_disk_bytes)
    file = await asyncio.to_thread(opened)
    if file.renewed:
        log.warning(
            "blocks of KV on disk were of another model, format or number of ranks: it begins anew",
            file=file.name,
        )

    def tell(result: DiskResult) -> None:
        with suppress(MailboxClosed):  # it has ended
            cache.tell(result)

    def done(result: DiskResult) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, result)

    log.info("blocks of KV are kept on disk", file=file.name, places=file.places, found=len(file.found))
    mover = DiskMover(file, done)
    mover.renew(info.host_memory, info.host_blocks)
    return mover


class _Job(NamedTuple):
    order: DiskOrder
    memory: HostMemory | RankMemory
    until: float  # perf_counter seconds
    tried: int | None = None  # the seal with which the slot did not hold it


class DiskMover:
    """Serves one disk. `done` is called in a thread with the result of each order."""

    def __init__(self, file: DiskFile, done: Callable[[DiskResult], None]) -> None:
        self.file, self._done = file, done
        self._memory: HostMemory | RankMemory | None = None
        self._reads: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._fault = ""
        work = [self._write_all, *[self._read_all] * READERS]
        self._threads = [threading.Thread(target=each, name="kv disk", daemon=True) for each in work]
        for thread in self._threads:
            thread.start()

    def renew(self, path: str, slots: int) -> None:
        """From now on orders are about the host memory at `path`."""
        self._memory = None
        with suppress(OSError):  # the executor that made it has died, too
            self._memory = shared_memory(slots, self.file.size, path)

    def submit(self, orders: Iterable[DiskOrder]) -> None:
        memory, until = self._memory, time.perf_counter() + _GIVE_UP_S
        for order in orders:
            if memory is None:
                self._done(DiskResult(order, False, 0.0))
            else:
                (self._writes if order.write else self._reads).put(_Job(order, memory, until))

    def close(self, grace: float = 1.0) -> None:
        """End the threads; one that hangs in the disk is left to end with the process.

        What waits to be read is not read any more.
        """
        with suppress(queue.Empty):
            while True:
                self._reads.get_nowait()
        for jobs, count in ((self._writes, 1), (self._reads, READERS)):
            for _ in range(count):
                jobs.put(None)
        until = time.perf_counter() + grace
        for thread in self._threads:
            thread.join(max(0.0, until - time.perf_counter()))
        if not any(thread.is_alive() for thread in self._threads):
            self.file.close()
            if self._memory is not None:
                self._memory.close()

    # --- in the threads -----------------------------------------------------------------------

    def _read_all(self) -> None:
        block = empty_block(self.file.size)
        while (job := self._reads.get()) is not None:
            begin, order, whole = time.perf_counter(), job.order, False
            try:
                seal = self.file.read(order.place, order.key, block)
                if seal is not None:
                    whole = job.memory.write(order.slot, order.key, seal, block)
            except OSError as error:
                self._failed("read", error)
            self._done(DiskResult(order, whole, time.perf_counter() - begin))

    def _write_all(self) -> None:
        block = empty_block(self.file.size)
        stopping = False
        while True:
            job = self._writes.get()
            if job is None:
                if self._writes.empty() or stopping:
                    return
                stopping = True
                self._writes.put(None)
                continue
            begin, order = time.perf_counter(), job.order
            if order.slot == ERASE:
                self._erase(order)
                continue
            seal, there, whole = None, job.memory.told(order.slot), False
            if there != job.tried and not self._fault:
                seal = job.memory.copy(order.slot, order.key, block)
            if seal is None and not self._fault and begin < job.until and not stopping:
                self._writes.put(job._replace(tried=there))
                time.sleep(_TRY_AGAIN_S)
                continue
            if seal is not None:
                try:
                    self.file.write(order.place, order.key, seal, block, order.note)
                    whole = True
                except OSError as error:
                    self._failed("written", error)
                    self._fault = str(error)
            self._done(DiskResult(order, whole, time.perf_counter() - begin, bool(self._fault)))

    def _erase(self, order: DiskOrder) -> None:
        try:
            self.file.erase(order.place)
        except OSError as error:
            self._failed("erased", error)
        self._done(DiskResult(order, True, 0.0, bool(self._fault)))

    def _failed(self, what: str, error: OSError) -> None:
        if not self._fault:
            log.error("blocks of KV cannot be " + what + " on disk: it is left alone", reason=str(error))
            self._fault = str(error)
