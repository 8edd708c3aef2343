"""Blocks go to the disk and come back, in threads; a disk that fails is left alone."""

import logging
import os
import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramify.actors.tiers.disk_file import DiskFile, empty_block
from ramify.actors.tiers.mover import READERS, DiskMover
from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.kv.host_memory import HostMemory, of_ranks, shared_memory
from ramify.protocol.messages import DiskOrder, DiskResult

SIZE, KEY, OTHER = 256, b"k" * 16, b"o" * 16
INFO = FakeExecutor().info


class Stage:
    def __init__(self, folder: Path) -> None:
        self.memory = HostMemory(4, SIZE)
        self.file = DiskFile(folder, "a" * 32, SIZE, 4 * (SIZE + 64))
        self.results: queue.SimpleQueue[DiskResult] = queue.SimpleQueue()
        self.mover = DiskMover(self.file, self.results.put)
        self.mover.renew(self.memory.path, 4)

    def fill(self, slot: int, key: bytes) -> bytes:
        data = np.random.default_rng(slot).bytes(SIZE)
        seal = self.memory.seal(key, np.frombuffer(data, dtype=np.uint8))
        assert self.memory.write(slot, key, seal, data)
        return data

    def move(self, order: DiskOrder) -> DiskResult:
        self.mover.submit([order])
        return self.results.get(timeout=30)


def test_a_block_goes_to_the_disk_and_comes_back_to_another_slot(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    data = stage.fill(1, KEY)
    assert stage.move(DiskOrder(True, KEY, 1, 2)).whole
    assert stage.move(DiskOrder(False, KEY, 3, 2)).whole
    found = stage.memory.read(3, KEY)
    assert found is not None
    assert found[1] == data
    assert not stage.move(DiskOrder(False, OTHER, 0, 2)).whole
    assert stage.memory.read(0, OTHER) is None
    stage.mover.close()


def test_a_block_that_is_saved_later_is_written_then(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.mover.submit([DiskOrder(True, KEY, 1, 2)])
    with pytest.raises(queue.Empty):
        stage.results.get(timeout=0.05)
    stage.fill(1, KEY)
    assert stage.results.get(timeout=30).whole
    stage.mover.close()


def test_parts_of_ranks_go_and_come_back_together(tmp_path: Path) -> None:
    """What one rank has not, or not whole, no rank gets."""
    ranks = [HostMemory(4, SIZE // 2) for _ in range(2)]
    stage = Stage(tmp_path)
    stage.mover.renew(of_ranks([rank.described(INFO, whole=False) for rank in ranks]).host_memory, 4)
    parts = [np.frombuffer(np.random.default_rng(n).bytes(SIZE // 2), dtype=np.uint8) for n in range(2)]
    stage.mover.submit([DiskOrder(True, KEY, 1, 2)])
    for rank, part in zip(ranks, parts, strict=True):
        with pytest.raises(queue.Empty):
            stage.results.get(timeout=0.02)
        assert rank.write(1, KEY, rank.seal(KEY, part), part)
    assert stage.results.get(timeout=30).whole
    assert stage.move(DiskOrder(False, KEY, 3, 2)).whole
    for rank, part in zip(ranks, parts, strict=True):
        found = rank.read(3, KEY)
        assert found is not None
        assert found[1] == part.tobytes()
    path = tmp_path / "kv-0.blocks"
    blocks = bytearray(path.read_bytes())
    blocks[2 * SIZE + SIZE - 1] ^= 1  # rank 1's
    path.write_bytes(blocks)
    assert not stage.move(DiskOrder(False, KEY, 0, 2)).whole
    assert [rank.read(0, KEY) for rank in ranks] == [None, None]
    whole, seal = np.concatenate(parts), stage.file.read(2, KEY, empty_block(SIZE))
    assert seal is None
    memory = shared_memory(4, SIZE, f"{ranks[0].path}:{ranks[1].path}")
    told = memory.told(1)
    assert memory.write(0, KEY, told, whole)
    assert not memory.write(2, KEY, told, np.roll(whole, SIZE // 2))  # each as the other's
    stage.mover.close()


def test_the_memory_of_an_executor_that_died_at_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.mover.renew(f"/proc/{os.getpid()}/fd/99999", 4)
    assert not stage.move(DiskOrder(True, KEY, 1, 2)).whole
    stage.mover.renew(stage.memory.path, 4)
    stage.fill(1, KEY)
    assert stage.move(DiskOrder(True, KEY, 1, 2)).whole
    stage.mover.close()


def test_an_end_waits_for_no_reads(tmp_path: Path) -> None:
    stage, begun, go_on = Stage(tmp_path), threading.Semaphore(0), threading.Event()

    def slow(place: int, key: bytes, block: Any) -> int | None:
        begun.release()
        go_on.wait(30)
        return None

    stage.file.read = slow  # type: ignore
    stage.mover.submit([DiskOrder(False, KEY, 3, 2)] * 100)
    for _ in range(READERS):
        begun.acquire()
    stage.mover.close(0.0)
    go_on.set()
    for _ in range(READERS):
        stage.results.get(timeout=30)
    assert not begun.acquire(timeout=0.05)
    stage.mover.close()


def test_a_disk_that_fails_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    stage.file.put = full  # type: ignore
    with caplog.at_level(logging.ERROR):
        for slot in (0, 1):
            stage.fill(slot, KEY)
            result = stage.move(DiskOrder(True, KEY, slot, slot))
            assert (result.whole, result.broken) == (False, True)
    assert sum("No space left" in record.getMessage() for record in caplog.records) <= 1
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    stage.mover.close()
