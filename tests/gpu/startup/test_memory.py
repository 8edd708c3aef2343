"""How large the KV pool becomes."""

from pathlib import Path

import pytest
import torch

from ramify.gpu.startup.memory import free_bytes, plan_pages
from ramify.protocol.errors import ModelError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30


@pytest.mark.parametrize(
    ("context", "page_size", "free", "device", "pages"),
    [
        (4096, 1, 64 * GIB, CPU, 65536),  # the default's ceiling
        (100_000, 1, 64 * GIB, CPU, 100_000),  # one whole context
        (4096, 1, 1 * GIB, CPU, GIB // 4 // 65536),  # a quarter of the free memory
        (4096, 16, 64 * GIB, CPU, 4096),
        (4096, 16, 10 * GIB, CUDA, int(10 * GIB * 0.9) // 65536 // 16),
    ],
)
def test_default_size(context: int, page_size: int, free: int, device: torch.device, pages: int) -> None:
    assert plan_pages(None, context, page_size, 65536, free, device) == pages


def test_what_was_asked_for() -> None:
    assert plan_pages(1000, 4096, 16, 65536, GIB, CPU) == 62
    with pytest.raises(ModelError, match="give at most 14745"):
        plan_pages(100_000, 4096, 1, 65536, GIB, CPU)
    with pytest.raises(ModelError, match="0 MiB are free on cpu"):
        plan_pages(None, 4096, 16, 65536, 1 << 19, CPU)
    with pytest.raises(ModelError, match="0 MiB are free on cuda"):  # no smaller cache would fit
        plan_pages(1000, 4096, 16, 65536, -GIB, CUDA)


def test_free_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert free_bytes(CPU, meminfo) == 2 * GIB
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    assert free_bytes(CPU, meminfo) == 2 << 20
    meminfo.write_text("MemTotal: 9 kB\n")
    assert free_bytes(CPU, meminfo) == 2 * GIB
    assert free_bytes(CPU) > 0
