"""Slots that two processes share: read only under the key and the bytes that were written."""

import os
import subprocess
import sys

import numpy as np
import pytest

from ramify.gpu.kv.host_memory import HostMemory

KEY, OTHER = b"k" * 16, bytes(range(16))


def block(seed: int, size: int = 256) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def sealed(memory: HostMemory, key: bytes, data: bytes) -> int:
    return memory.seal(key, np.frombuffer(data, dtype=np.uint8))


def test_another_process_reads_what_was_written_here() -> None:
    memory, data = HostMemory(3, 256), block(1)
    assert memory.write(2, KEY, sealed(memory, KEY, data), data)
    code = (
        "import sys; from ramify.gpu.kv.host_memory import HostMemory as H; "
        "m = H(3, 256, sys.argv[1]); found = m.read(2, b'k' * 16); "
        "m.write(0, b'k' * 16, *found); print(m.read(1, b'k' * 16))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, memory.path], check=True, capture_output=True, env=os.environ
    )
    assert out.stdout == b"None\n"
    assert memory.read(0, KEY) == (sealed(memory, KEY, data), data)


def test_a_slot_is_no_other_key_s_and_none_before_it_is_written() -> None:
    memory, data = HostMemory(2, 256), block(1)
    assert memory.read(0, KEY) is None
    assert memory.write(0, KEY, sealed(memory, KEY, data), data)
    assert memory.read(0, OTHER) is None
    memory.blocks[0, 17] ^= 4
    assert memory.read(0, KEY) is None


def test_what_is_not_what_was_sealed_is_not_put() -> None:
    memory, data = HostMemory(2, 256), block(1)
    seal = sealed(memory, KEY, data)
    assert not memory.write(0, OTHER, seal, data)
    assert not memory.write(0, KEY, seal, block(2))
    assert not memory.write(0, KEY, seal, data[:-8])
    assert not memory.blocks.any()


def test_other_sizes_are_refused() -> None:
    memory = HostMemory(2, 256)
    with pytest.raises(OSError, match="does not hold 3 blocks of 256"):
        HostMemory(3, 256, memory.path)
