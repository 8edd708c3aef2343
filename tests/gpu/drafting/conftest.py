"""A tiny checkpoint folder and executors on it: torch in float32, and the CPU's kernels."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ramify.gpu.native.host import host_isa

SIZES = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 150,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip


def write_folder(path: Path, **sizes: Any) -> Path:
    """config.json and a tokenizer.json of 150 tokens."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(SIZES | sizes))
    vocabulary = {f"t{number}": number for number in range(150)}
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


@pytest.fixture(params=["none", "int8"])
def back_end(request: pytest.FixtureRequest) -> str:
    """A quantization: of torch, or of the kernels."""
    if request.param == "int8":
        pytest.importorskip("llvmlite")
        if host_isa() is None:
            pytest.skip("the kernels do not run on this CPU")
    return str(request.param)


@pytest.fixture
def load(folder: Path, drive: Any, back_end: str) -> Callable[..., Any]:
    """load(**ModelConfig fields) -> a driver of random weights."""

    def make(**settings: Any) -> Any:
        settings = {"page_size": 4, "max_rows": 32, **settings}
        return drive(folder, load_format="dummy", quantization=back_end, **settings)

    return make
