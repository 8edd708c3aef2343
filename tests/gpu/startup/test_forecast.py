"""What `ramify info` tells of serving a model: bytes as they are when it is loaded, and reasons."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.gpu.models.config import parse_config, read_config
from ramify.gpu.models.decoder import EMBEDDING, Decoder
from ramify.gpu.models.split import part_of
from ramify.gpu.ops.linear.base import Linear
from ramify.gpu.startup import forecast
from ramify.gpu.startup.gguf_weights import load_gguf
from ramify.gpu.startup.packing import Packing
from ramify.gpu.startup.quantization import Quantization, choose_quantization
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from tests.gguf_files import SMALL, checkpoint, convert

pytest.importorskip("llvmlite")
CPU = torch.device("cpu")
WHOLE = SMALL | {  # nothing is padded
    "vocab_size": 192, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip


def packed_bytes(linear: Linear) -> int:
    from ramify.gpu.ops.linear.packed import cpu_weight

    packed = cpu_weight(linear).packed
    parts = [packed.panels]
    if hasattr(packed, "offsets"):
        parts += [packed.scales] if packed.offsets is None else [packed.scales, packed.offsets]
    return sum(part.nbytes for part in parts)


def bytes_of(model: Decoder) -> tuple[int, int]:
    """Of the packed products without sums and scales of outputs, and of all else."""
    products = sum(packed_bytes(linear) for linear, _ in model.products())
    norms = [norm.weight for layer in model.layers for _, norm in layer.norms("", model.config.names)]
    return products, sum(each.nbytes for each in (*norms, model.norm.weight))


@pytest.mark.parametrize(
    ("kinds", "asked"),
    [
        ({"": "Q4_0"}, "auto"),
        ({"": "Q4_K"}, "auto"),
        ({"": "Q8_0"}, "auto"),
        ({"": "Q4_K", "v_proj": "Q6_K", "down_proj": "Q6_K", "up_proj": "Q5_0"}, "auto"),
        ({"": "Q4_K", "untied": "", "embed_tokens": "Q6_K"}, "auto"),
        ({"": "F16"}, "auto"),
        ({"": "Q4_K"}, "int8"),
        ({"": "Q8_0"}, "int4"),
    ],
)
def test_bytes_are_those_of_the_loaded_model(tmp_path: Path, kinds: dict[str, str], asked: Any) -> None:
    from ramify.gpu.native.packer import Packer
    from ramify.gpu.ops.linear.packed import CpuForms

    tied = "untied" not in kinds
    folder = checkpoint(tmp_path / "model", "Llama", WHOLE | {"tie_word_embeddings": tied})
    path = convert(
        folder, tmp_path / "a.gguf", "llama", lambda name: kinds.get(name.split(".")[-2], kinds[""])
    )
    shape = read_config(path)
    chosen = choose_quantization(ModelConfig(path=path, quantization=asked), shape, CPU)
    if chosen.isa is None:
        pytest.skip("the kernels do not run on this CPU")
    forms = CpuForms(Packer(chosen.isa), chosen.name == "int4", chosen.kept)
    model = Decoder(shape, 64, torch.float32, CPU)
    views = model.weights()
    products = list(model.products())
    if not shape.tied:
        products.append((model.table, [EMBEDDING]))
    packing = Packing(views, products, forms.form, forms.stored)
    load_gguf(path, views, lambda what, share: None, shape, packing)
    weights, vectors = bytes_of(model)
    sizes = forecast.Sizes(path, shape, chosen, torch.float32)
    assert sizes.read == weights + vectors
    table = 0 if shape.tied else packed_bytes(model.table)
    floats = asked == "int8"  # which blocks become
    assert sizes.weights == sizes.read + (192 * 256 * 4 if floats else table)


def test_floats_are_counted_once_where_the_head_is_the_embedding(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "Llama", WHOLE)
    shape = read_config(folder)
    sizes = forecast.Sizes(folder, shape, Quantization("none", ""), torch.float32)
    assert sizes.weights == sizes.read == 4 * Decoder(shape, 1, torch.float32, CPU).parameters()


def test_it_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "bandwidth", lambda device: 10e9)
    folder = checkpoint(tmp_path / "model", "Llama", WHOLE)
    path = convert(folder, tmp_path / "a.gguf", "llama", lambda name: "Q4_0")
    with pytest.raises(ModelError, match="a GGUF file is not divided"):
        forecast.forecast(path, 2)
    facts = forecast.forecast(path)
    assert "256 tokens" in facts["longest sequence"]
    assert "10.0 GB/s" in facts["memory"]
    assert "one stream" in facts["tokens a second"]
    assert "MiB in memory" in facts["weights"]


@pytest.mark.parametrize("tied", [True, False])
def test_what_each_of_two_ranks_has(tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are there twice, the embedding once."""
    monkeypatch.setattr(forecast, "bandwidth", lambda device: 10e9)
    folder = checkpoint(tmp_path / "model", "Llama", WHOLE | {"tie_word_embeddings": tied})
    whole = read_config(folder)
    parts = [Decoder(part_of(whole, rank, 2), 1, torch.float32, CPU) for rank in range(2)]
    norms = sum(view.numel() for view in parts[1].weights().values() if view.dim() == 1)
    first, second = (part.parameters() for part in parts)
    head = parts[0].head.tensor.numel()
    total = Decoder(whole, 1, torch.float32, CPU).parameters()
    assert first + second == total + norms + (head if tied else 0)
    sizes = forecast.Sizes(folder, parts[0].config, Quantization("none", ""), torch.float32, whole)
    assert sizes.weights == 4 * first
    told = forecast.forecast(folder, 2)["weights"]
    assert "for each of 2 ranks" in told
    with pytest.raises(ModelError, match="no experts; leave --expert-parallel out"):
        forecast.forecast(folder, 2, whole_experts=True)
    monkeypatch.setattr(forecast, "quantization_of", lambda config, *_: Quantization("fp8", "stored"))
    fewer = forecast.forecast(folder, 2)["weights"]
    assert fewer.startswith("fp8 (stored)")
    sizes = forecast.Sizes(folder, parts[0].config, Quantization("fp8", ""), torch.float32, whole)
    assert f"{sizes.weights / 2**20:.0f} MiB in memory" in fewer


@pytest.mark.parametrize(
    ("model", "ranks", "refused"),
    [("gpt-oss", 2, False), ("gpt-oss", 4, True), ("qwen", 4, False), ("qwen", 8, True)],
)
def test_scales_that_ranks_would_share(model: str, ranks: int, refused: bool) -> None:
    """gpt-oss-120b's experts have 2,880 inputs in groups of 32, Qwen3-235B's 1,536 in blocks of 128."""
    shape = {"num_hidden_layers": 1, "num_attention_heads": 64, "vocab_size": 160}
    raw: dict[str, Any] = {
        "gpt-oss": shape | {
            "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880,
            "num_local_experts": 8, "quantization_config": {"quant_method": "mxfp4"},
        },
        "qwen": shape | {
            "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4096, "head_dim": 128,
            "moe_intermediate_size": 1536, "num_experts": 8, "num_key_value_heads": 4,
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        },
    }[model]  # fmt: skip
    whole = parse_config(raw, {}, Path("config.json"))
    assert whole.stored is not None
    kept = Quantization("mxfp4" if model == "gpt-oss" else "fp8", "", None, kept=True)
    forecast.check_groups(whole, part_of(whole, 0, ranks, whole_experts=True), kept)
    divided = part_of(whole, 0, ranks)
    if not refused:
        forecast.check_groups(whole, divided, kept)
        return
    with pytest.raises(ModelError, match=r"experts.* groups of .* --expert-parallel"):
        forecast.check_groups(whole, divided, kept)


def test_bandwidth_is_measured() -> None:
    assert forecast.bandwidth(CPU) > 1e8
