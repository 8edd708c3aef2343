"""When weights become 8-bit integers, and what is said where they do not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.gpu.models.config import read_config
from ramify.gpu.native.host import Isa
from ramify.gpu.startup import quantization
from ramify.gpu.startup.quantization import choose_quantization
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from tests.gguf_files import SMALL, checkpoint, convert

CPU = torch.device("cpu")
VNNI = Isa("AVX-512 VNNI", "vnni512", 32)
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 150,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "_instructions", lambda: (VNNI, None))


def choose(path: Path, shape: dict[str, Any] | None = None, **settings: Any) -> Any:
    (path / "config.json").write_text(json.dumps(SHAPE | (shape or {})))
    config = ModelConfig(path=path, **settings)
    return choose_quantization(config, read_config(path), CPU)


def test_auto_takes_int8_where_the_cpu_has_instructions_for_it(tmp_path: Path) -> None:
    chosen = choose(tmp_path)
    assert (chosen.name, chosen.isa) == ("int8", VNNI)
    assert (
        chosen.reason
        == "this CPU has AVX-512 VNNI; --quantization none: exact float32, equal to transformers"
    )


def test_none_is_none(tmp_path: Path) -> None:
    chosen = choose(tmp_path, quantization="none")
    assert (chosen.name, chosen.isa) == ("none", None)


@pytest.mark.parametrize(
    ("settings", "shape", "reason"),
    [
        ({"dtype": "float32"}, {}, "leave --dtype float32 out"),
        ({"attention": "torch"}, {}, "leave --attention torch out"),
        ({"deterministic": True}, {}, "leave --deterministic out"),
        ({"page_size": 24}, {}, "not a power of 2"),
        ({}, {"head_dim": 48}, "heads of 48"),
        ({}, {"hidden_size": 96, "head_dim": 32}, "multiple of 64 wide"),
    ],
)
def test_what_rules_it_out_is_said(
    tmp_path: Path, settings: dict[str, Any], shape: dict[str, Any], reason: str
) -> None:
    chosen = choose(tmp_path, shape, **settings)
    assert chosen.name == "none"
    assert reason in chosen.reason
    with pytest.raises(ModelError, match="--quantization int8") as caught:
        choose(tmp_path, shape, quantization="int8", **settings)
    assert reason in str(caught.value)


def test_a_gpu_has_none(tmp_path: Path) -> None:
    choose(tmp_path)
    config = ModelConfig(path=tmp_path)
    chosen = choose_quantization(config, read_config(tmp_path), torch.device("cuda"))
    assert "CPUs only" in chosen.reason


def test_a_cpu_without_dot_products_is_served_int8_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Isa("NEON", "plain", 8, 0)
    monkeypatch.setattr(quantization, "_instructions", lambda: (plain, None))
    assert choose(tmp_path).name == "none"
    assert choose(tmp_path, quantization="int8").isa is plain


def test_without_the_compiler_torch_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(quantization.importlib.util, "find_spec", lambda name: None)
    assert "llvmlite is not installed" in choose(tmp_path).reason


def test_four_bits_are_served_if_asked(tmp_path: Path) -> None:
    chosen = choose(tmp_path, quantization="int4")
    assert (chosen.name, chosen.isa, chosen.kept) == ("int4", VNNI, False)
    with pytest.raises(ModelError, match="--quantization int4: heads of 48"):
        choose(tmp_path, {"head_dim": 48}, quantization="int4")


@pytest.mark.parametrize(
    ("kind", "asked", "name", "kept"),
    [
        ("Q4_0", "auto", "int4", True),
        ("Q8_0", "auto", "int8", True),
        ("F16", "auto", "int8", False),
        ("Q4_0", "int8", "int8", False),
        ("Q8_0", "int4", "int4", False),
    ],
)
def test_a_files_own_blocks_are_kept_unless_others_are_asked_for(
    tmp_path: Path, kind: str, asked: Any, name: str, kept: bool
) -> None:
    folder = checkpoint(tmp_path / "model", "Llama", SMALL)
    path = convert(folder, tmp_path / "a.gguf", "llama", lambda name: kind)
    chosen = choose_quantization(ModelConfig(path=path, quantization=asked), read_config(path), CPU)
    assert (chosen.name, chosen.kept) == (name, kept)
