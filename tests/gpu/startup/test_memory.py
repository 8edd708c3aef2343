"""How large the KV pool becomes."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ramify.gpu.models.config import read_config
from ramify.gpu.startup.memory import (
    check_host,
    container_bytes,
    free_bytes,
    has_windows,
    host_blocks,
    plan_pages,
    with_pages,
)
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExecutorInfo

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


def info(full: int, window_bytes: int, window: int = 1024, **more: Any) -> ExecutorInfo:
    """What is known before the pools are sized."""
    fields = {
        "model": "m", "architecture": "A", "parameters": 1, "vocab_size": 10, "context": 131_072,
        "page_size": 1, "pages": 0, "max_rows": 512, "step_tokens": 8192, "device": "cuda",
        "dtype": "bfloat16", "attention": "triton", "eos_token_ids": [], "load_seconds": 0.0,
        "kv_bytes_per_token": full, "window": window, "window_bytes": window_bytes,
    } | more  # fmt: skip
    return ExecutorInfo(**fields)


GEMMA = 10 * 4 * 512 * 2 * 2, 50 * 16 * 256 * 2 * 2  # the 31B's bytes of a token: full, window
CUDA = torch.device("cuda")


def test_a_pool_with_windows_holds_four_times_the_tokens() -> None:
    free = 80 << 30
    found = with_pages(info(*GEMMA), ModelConfig(path=Path()), free, CUDA)
    assert found.pages > 4 * (int(free * 0.9) // sum(GEMMA))
    given = found.pages * GEMMA[0] + (found.window_pages + 1) * GEMMA[1]
    assert 0.99 < given / (free * 0.9) <= 1
    assert found.window_pages > 16 * 1024  # tails


def test_a_short_window_takes_what_rows_may_need() -> None:
    found = with_pages(info(12_288, 12_288, 128), ModelConfig(path=Path()), 80 << 30, CUDA)
    assert found.window_pages == 4 * 128 * 512
    assert found.pages > 1.9 * (int((80 << 30) * 0.9) // 24_576)


def test_a_model_with_windows_alone_has_more_pages_than_memory_for_them() -> None:
    found = with_pages(info(0, 131_072, max_rows=16), ModelConfig(path=Path()), 40 << 30, CUDA)
    assert found.window_pages == 4 * 1024 * 16
    assert found.pages == 8 * found.window_pages


def test_too_small_a_pool_keeps_everything() -> None:
    found = with_pages(info(*GEMMA), ModelConfig(path=Path(), kv_tokens=16_384), 80 << 30, CUDA)
    assert (found.window, found.window_pages, found.window_bytes) == (0, 0, 0)
    assert found.kv_bytes_per_token == sum(GEMMA)


def test_asking_for_window_tokens() -> None:
    config = ModelConfig(path=Path(), window_tokens=20_000, kv_tokens=100_000)
    found = with_pages(info(*GEMMA), config, 80 << 30, CUDA)
    assert (found.window_pages, found.pages) == (20_000, 100_000)
    with pytest.raises(ModelError, match=r"--window-tokens 20000 does not fit: .*; give at most 11796"):
        with_pages(info(*GEMMA), config, 10 << 30, CUDA)
    with pytest.raises(ModelError, match=r"--window-tokens 5000: a step of 8192 tokens .* need 10238"):
        with_pages(info(*GEMMA), ModelConfig(path=Path(), window_tokens=5000), 80 << 30, CUDA)


def test_window_tokens_are_refused_where_no_layer_can_use_them(tmp_path: Path) -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
    fields = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 160,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
    } | layers  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    shape, asked = read_config(tmp_path), ModelConfig(path=tmp_path, window_tokens=4096)
    assert has_windows(asked, shape, 256)
    assert not has_windows(ModelConfig(path=tmp_path, window_tokens=0), shape, 256)
    assert not has_windows(ModelConfig(path=tmp_path, attention="flashinfer"), shape, 256)
    with pytest.raises(ModelError, match="--window-tokens 4096: FlashInfer keeps all keys and values"):
        has_windows(msgspec.structs.replace(asked, attention="flashinfer"), shape, 256)
    with pytest.raises(ModelError, match="its window of 20 tokens is no shorter than the context of 20"):
        has_windows(asked, shape, 20)
    paged = ModelConfig(path=tmp_path, window_tokens=4096, page_size=16)
    with pytest.raises(ModelError, match="--page-size 16: a window may begin at any token"):
        has_windows(paged, shape, 256)


def test_a_container_has_less_than_its_machine(tmp_path: Path) -> None:
    assert container_bytes(tmp_path) == 1 << 62
    for name, text in ("max", "max\n"), ("current", "300\n"), ("stat", "anon 20\ninactive_file 100\n"):
        (tmp_path / f"memory.{name}").write_text(text)
    assert container_bytes(tmp_path) == 1 << 62
    (tmp_path / "memory.max").write_text("1000\n")
    assert container_bytes(tmp_path) == 800


def test_host_memory_for_kv_is_as_many_blocks_as_it_holds() -> None:
    plain = msgspec.structs.replace(info(4096, 0, 0), device="cpu")
    config = ModelConfig(path=Path(), kv_host=1_000_000, kv_tokens=1000)
    assert with_pages(plain, config, 1 << 30, torch.device("cpu")).host_blocks == 3
    assert not with_pages(plain, ModelConfig(path=Path()), 1 << 30, torch.device("cpu")).host_blocks


@pytest.mark.parametrize(("beside", "ranks", "device", "blocks"), [
    (1, 1, "cpu", 100), (4, 1, "cpu", 25), (4, 2, "cpu", 25), (2, 1, "cuda:0", 50),
    (1, 2, "cuda:0", 100),
])  # fmt: skip
def test_half_of_the_free_memory_is_shared_by_the_replicas(
    beside: int, ranks: int, device: str, blocks: int
) -> None:
    """`free` is that of one rank."""
    plain = msgspec.structs.replace(info(4096, 0, 0), device=device)
    config = ModelConfig(path=Path(), kv_host=-1, beside=beside, tensor_parallel=ranks)
    assert host_blocks(plain, config, 200 * 64 * 4096) == blocks


@pytest.mark.parametrize(
    ("changes", "wanted", "told"),
    [
        ({"window": 16, "window_bytes": 300_000}, 1 << 20, "with a window takes 300000 bytes"),
        ({"state_bytes": 16, "kv_bytes_per_token": 0}, 1 << 20, "no layer keeps keys"),
        ({"device": "cuda:0", "drafter": "ngram"}, 1 << 20, "--draft none"),
        ({"page_size": 128}, 1 << 20, "--page-size that divides 64"),
        ({"drafter": "model"}, 1 << 20, "ngram on a CPU"),
        ({}, 1000, "takes 262144 bytes"),
        ({}, 1 << 30, f"{1 << 20} bytes are free"),
    ],
)
def test_host_memory_for_kv_is_refused_by_name(changes: Any, wanted: int, told: str) -> None:
    plain = msgspec.structs.replace(info(4096, 0, 0), **{"device": "cpu"} | changes)
    with pytest.raises(ModelError, match=rf"--kv-host {wanted}: .*{told}"):
        host_blocks(plain, ModelConfig(path=Path(), kv_host=wanted), 1 << 20)


def test_more_than_the_machine_has_is_refused_before_weights_are_loaded() -> None:
    plain = msgspec.structs.replace(info(4096, 0, 0), device="cpu")
    for wanted in (-1, 0, 1 << 20):
        check_host(plain, ModelConfig(path=Path(), kv_host=wanted))
    with pytest.raises(ModelError, match="bytes are free; give at most that"):
        check_host(plain, ModelConfig(path=Path(), kv_host=1 << 50))


def test_a_disk_too_small_for_one_block_is_refused_before_weights_are_loaded() -> None:
    plain = msgspec.structs.replace(info(4096, 0, 0), device="cpu")
    block = 64 * 4096
    enough = ModelConfig(path=Path(), kv_host=1 << 20, kv_disk=Path("kv"), kv_disk_bytes=block + 64)
    check_host(plain, enough)
    with pytest.raises(ModelError, match=f"a block takes {block + 64}; give at least that"):
        check_host(plain, msgspec.structs.replace(enough, kv_disk_bytes=block + 63))
    with pytest.raises(ModelError, match=f"a block takes {2 * block + 64}"):
        check_host(plain, msgspec.structs.replace(enough, tensor_parallel=2))
