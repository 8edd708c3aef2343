"""Blocks go to the disk and come back, in threads; a disk that fails is left alone."""

import logging
import queue
from pathlib import Path

import numpy as np
import pytest

from ramify.actors.tiers.disk_file import DiskFile
from ramify.actors.tiers.mover import DiskMover
from ramify.gpu.kv.host_memory import HostMemory
from ramify.protocol.messages import DiskOrder, DiskResult

SIZE, KEY, OTHER = 256, b"k" * 16, b"o" * 16


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
