"""Blocks between the host memories of two replicas: by reference and by bytes, checked in both ways."""

import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from ramify.actors.executor import copier
from ramify.actors.executor.copier import KvCopier
from ramify.actors.kit.metrics import Metrics
from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.kv.host_memory import HostMemory
from ramify.protocol.cluster import (
    BlocksRead,
    CopiedIn,
    CopyIn,
    CopyOut,
    PutBlocks,
    ReadBlocks,
)
from ramify.protocol.plan import ExecutorInfo, MovedBlock

KEYS = [bytes([i]) * 16 for i in range(3)]
BASE = FakeExecutor(pages=64).info


@pytest.fixture(scope="module", autouse=True)
def freed() -> Iterator[None]:
    """Other tests count descriptors."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there are cores."""
    monkeypatch.setattr(copier, "THREADS", 3)


class Side:
    """A copier with a memory of four blocks of 64 bytes, and what it says."""

    def __init__(self, stamp: str = "s", size: int = 64) -> None:
        self.memory = HostMemory(4, size)
        self.info: ExecutorInfo = msgspec.structs.replace(
            BASE, host_blocks=4, host_memory=self.memory.path, block_bytes=size, kv_stamp=stamp
        )
        self.said: list[Any] = []
        self.metrics = Metrics()
        self.copier = KvCopier(lambda: self.info, self, self, self.metrics)

    def put(self, messages: Iterable[tuple[int, Any]], /) -> None:
        self.said += [message for _, message in messages]

    def tell(self, message: Any, /) -> None:
        self.said.append(message)

    def start(self) -> None:
        pass

    flush = start

    def fill(self) -> "Side":
        for slot, key in enumerate(KEYS):
            self.memory.blocks[slot] = slot + 1
            self.memory.seals[slot] = self.memory.seal(key, self.memory.blocks[slot])
        return self

    async def does(self, job: CopyOut | CopyIn) -> Any:
        self.copier.copy(job)
        async with anyio.create_task_group() as group:
            await group.start(self.copier.run)
            with anyio.fail_after(10):
                while not self.said:
                    await anyio.sleep(0.001)
            group.cancel_scope.cancel()
        return self.said.pop()

    async def gives(self, shared: bool) -> BlocksRead:
        read = ReadBlocks(1, 2, 0, b"".join(KEYS), shared)
        answer = await self.does(CopyOut(read, [MovedBlock(i, key, b"") for i, key in enumerate(KEYS)]))
        assert isinstance(answer, BlocksRead)
        return answer

    async def takes(self, read: BlocksRead) -> tuple[bytes, bytes]:
        answer = await self.does(CopyIn(PutBlocks(1, 2, read), [3, -1, 1][: len(read.blocks)]))
        assert isinstance(answer, CopiedIn)
        return answer.kept, answer.refused


@pytest.mark.parametrize("shared", [True, False])
async def test_blocks_are_copied_whole(shared: bool) -> None:
    source, target = Side().fill(), Side()
    read = await source.gives(shared)
    assert [len(block.body) for block in read.blocks] == [0 if shared else 64] * 3
    assert await target.takes(read) == (KEYS[0] + KEYS[2], b"")
    assert [int(target.memory.blocks[slot, 0]) for slot in (3, 1, 0)] == [1, 3, 0]
    assert target.memory.read(3, KEYS[0]) is not None


@pytest.mark.parametrize("shared", [True, False])
async def test_a_flipped_bit_is_never_kept(shared: bool) -> None:
    source, target = Side().fill(), Side()
    read = await source.gives(shared)
    if shared:
        source.memory.blocks[2, 17] ^= 4
    else:
        body = np.frombuffer(read.blocks[2].body, dtype=np.uint8).copy()
        body[17] ^= 4
        read.blocks[2] = msgspec.structs.replace(read.blocks[2], body=body.tobytes())
    assert await target.takes(read) == (KEYS[0], KEYS[2])


async def test_what_is_not_what_it_is_named_is_not_sent() -> None:
    source = Side().fill()
    source.memory.seals[1] += 1
    assert [block.key for block in (await source.gives(False)).blocks] == KEYS[:1]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("other", [{"stamp": "another model"}, {"size": 128}])
async def test_blocks_of_another_model_or_form_are_refused(shared: bool, other: Any) -> None:
    read = await Side(**other).fill().gives(shared)
    assert await Side().takes(read) == (b"", KEYS[0] + KEYS[2])


async def test_a_source_that_has_gone_is_no_harm(tmp_path: Path) -> None:
    read = await Side().fill().gives(True)
    gone = msgspec.structs.replace(read, memory=str(tmp_path / "gone"))
    assert await Side().takes(gone) == (b"", KEYS[0] + KEYS[2])
    beyond = msgspec.structs.replace(read.blocks[0], slot=99)
    assert await Side().takes(msgspec.structs.replace(read, blocks=[beyond])) == (b"", KEYS[0])
