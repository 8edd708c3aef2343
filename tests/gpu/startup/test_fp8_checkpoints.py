"""Checkpoints in 8-bit floats, as the tools that make them spell it; and what is refused of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ramify.gpu.models.config import read_config
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.ops.linear.base import PlainWeight
from ramify.gpu.ops.linear.fp8 import CODES, Fp8Weight, fp8_form, rounded
from ramify.gpu.startup.load import load_executor
from ramify.gpu.startup.packing import Packing
from ramify.gpu.startup.weights import check_weights, load_weights
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExtendRow, pack

CPU = torch.device("cpu")
BLOCK = 128
SHAPE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64,
    "hidden_size": 192, "intermediate_size": 160, "moe_intermediate_size": 160, "num_experts": 2,
    "num_experts_per_tok": 1, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "norm_topk_prob": True,
}  # fmt: skip
Spelled = Callable[[str, Tensor], dict[str, Tensor]]


def codes(weight: Tensor, scales: Tensor) -> Tensor:
    return (weight / scales).to(CODES)


def by_tensor(name: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax() / 448
    return {f"{name}.weight": codes(weight, scale), f"{name}.weight_scale": scale.reshape(1),
            f"{name}.input_scale": torch.ones(())}  # fmt: skip


def by_row(name: str, weight: Tensor) -> dict[str, Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    return {f"{name}.weight": codes(weight, scale.float()), f"{name}.weight_scale": scale}


def by_block(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Scales of blocks, of which the last ones may be smaller."""
    tall, wide = (-(-size // BLOCK) for size in weight.shape)
    scales = torch.rand(tall, wide) / 100 + 0.001
    return {f"{name}.weight": codes(weight, whole(scales, weight)),
            f"{name}.weight_scale_inv": scales}  # fmt: skip


def whole(scales: Tensor, weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    return scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]


def exact(parts: dict[str, Tensor], name: str) -> Tensor:
    """What they stand for, float64."""
    numbers = parts[f"{name}.weight"].double()
    for ending in ("weight_scale", "weight_scale_inv"):
        if (scales := parts.get(f"{name}.{ending}")) is not None:
            wide = whole(scales, numbers) if ending.endswith("inv") else scales.reshape(-1, 1)
            return numbers * wide.double()
    return numbers


def group(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip


KINDS: dict[str, tuple[dict[str, Any], Spelled]] = {
    "deepseek": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, by_block
    ),
    "autofp8": ({"quant_method": "fp8", "activation_scheme": "static"}, by_tensor),
    "tensor": (group(num_bits=8, type="float", strategy="tensor"), by_tensor),
    "channel": (group(num_bits=8, type="float", strategy="channel"), by_row),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, by_tensor),
}  # fmt: skip


def write(folder: Path, kind: str, **fields: Any) -> dict[str, Tensor]:
    """A checkpoint whose products but for the routers are in 8 bits. Returns its tensors."""
    torch.manual_seed(3)
    quantized, spelled = KINDS[kind]
    config = SHAPE | {"quantization_config": quantized} | fields
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    for name, view in Decoder(read_config(folder), 64, torch.float32, CPU).weights().items():
        random = torch.randn(view.shape) * 0.05
        base = name.removesuffix(".weight")
        if base.endswith("_proj"):
            tensors |= spelled(base, random)
        else:
            tensors[name] = random
    save_file(tensors, folder / "model.safetensors")
    return tensors


def load(folder: Path, kept: bool) -> Decoder:
    model = Decoder(read_config(folder), 64, torch.float32, CPU, late=kept)
    views = model.weights()
    form = fp8_form(CPU, rounds=False)
    packing = Packing(views, model.products(), form, (Fp8Weight,)) if kept else None
    load_weights(folder, views, lambda *_: None, packing, stored=model.config.stored)
    checked(folder)
    return model


def checked(folder: Path) -> None:
    """What `ramify info` checks."""
    shape = read_config(folder)
    empty = Decoder(shape, 1, torch.float32, torch.device("meta"))
    check_weights(folder, empty.weights(), shape.names, shape.stored)


@pytest.mark.parametrize("kind", KINDS)
def test_each_spelling_gives_the_numbers_of_its_definition(kind: str, tmp_path: Path) -> None:
    """Widened to floats, and kept as codes with scales: merged products, experts, uneven blocks."""
    tensors = write(tmp_path, kind)
    model, kept = load(tmp_path, kept=False), load(tmp_path, kept=True)
    products = zip(model.products(), kept.products(), strict=True)
    for (linear, names), (own, _) in products:
        bases = [name.removesuffix(".weight") for name in names]
        wanted = torch.cat([exact(tensors, base) for base in bases])
        assert torch.equal(linear.weight.floats(), wanted.float())
        assert torch.equal(own.weight.floats(), wanted.float())
        in_codes = all(base.endswith("_proj") for base in bases)
        assert isinstance(own.weight, Fp8Weight if in_codes else PlainWeight)
    for name, view in (
        ("model.embed_tokens.weight", kept.embedding),
        ("model.norm.weight", kept.norm.weight),
    ):
        assert torch.equal(view, tensors[name])


def test_a_product_of_codes_and_floats_becomes_floats(tmp_path: Path) -> None:
    """As where a tool left the values out: nothing else is rounded."""
    tensors = write(tmp_path, "deepseek")
    name = "model.layers.0.self_attn.v_proj"
    tensors[f"{name}.weight"] = exact(tensors, name).float()
    del tensors[f"{name}.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    mixer: Any = load(tmp_path, kept=True).layers[0].mixer
    assert isinstance(mixer.qkv.weight, PlainWeight)
    parts = [exact(tensors, name.replace("v_proj", each)) for each in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(mixer.qkv.weight.floats(), torch.cat(parts).float())


def test_experts_that_are_stacked(tmp_path: Path) -> None:
    tensors = write(tmp_path, "deepseek")
    part = "model.layers.0.mlp.experts"
    wanted = {}
    for kind, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        rows = tensors[f"{part}.0.{names[0]}.weight"].shape
        scales = torch.rand(2, -(-rows[0] * len(names) // BLOCK), -(-rows[1] // BLOCK)) / 100
        numbers = torch.randn(2, rows[0] * len(names), rows[1]).to(CODES)
        for number in range(2):
            both = numbers[number].double() * whole(scales[number], numbers[number]).double()
            for name, own in zip(names, both.chunk(len(names)), strict=True):
                wanted[f"{part}.{number}.{name}"] = own
                for ending in ("weight", "weight_scale_inv"):
                    del tensors[f"{part}.{number}.{name}.{ending}"]
        tensors |= {f"{part}.{kind}": numbers, f"{part}.{kind}_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    views = Decoder(read_config(tmp_path), 64, torch.float32, CPU).weights()
    load_weights(tmp_path, views, lambda *_: None, stored=read_config(tmp_path).stored)
    for name, numbers in wanted.items():
        assert torch.equal(views[f"{name}.weight"], numbers.float())


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop(f"{Q}.weight_scale_inv"), [Q, "no scales"]),
        (lambda t: t.pop(f"{Q}.weight"), [Q, "no codes"]),
        (lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(1, 3)}), [Q, "[1, 3]", "[1, 2]"]),
        (lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(1, 2).int()}), [Q, "int32"]),
        (lambda t: t[f"{Q}.weight_scale_inv"].fill_(float("nan")), [Q, "scales", "not finite"]),
        (lambda t: t[f"{Q}.weight"].view(torch.uint8)[5, 7].fill_(0x7F), [Q, "codes", "not finite"]),
        (lambda t: t[f"{Q}.weight"].view(torch.uint8)[127, 0].fill_(0xFF), [Q, "codes", "not finite"]),
        (lambda t: t.update({f"{Q}.weight": torch.ones(3, 5).to(CODES)}), [Q, "[3, 5]", "[128, 192]"]),
        (lambda t: t.update({f"{Q}s.weight": torch.ones(3, 5).to(CODES)}), [f"{Q}s", "no place"]),
        (lambda t: t.update({f"{Q}.weight_zero": torch.ones(1)}), [f"{Q}.weight_zero", "no place"]),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e5m2)}),
         ["model.norm.weight", "float8_e5m2"]),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_named(edit: Any, words: list[str], tmp_path: Path) -> None:
    tensors = write(tmp_path, "deepseek")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load(tmp_path, kept=True)
    assert all(word in caught.value.message for word in (*words, str(tmp_path)))
    if "not finite" not in words:  # which the numbers alone say
        with pytest.raises(ModelError) as before:
            checked(tmp_path)
        assert before.value.message == caught.value.message


@pytest.mark.parametrize(
    ("quantized", "words"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "[64, 64]"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        (group(num_bits=4, type="float", strategy="group"), "4 bits"),
        (group(num_bits=8, type="float", strategy="token"), "'token'"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "or none"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}}, "None bits"),
        ({"quant_method": "exl2"}, "exl2"),
        ({"quant_method": [1]}, "is not supported"),
        ({"quant_method": "x" * 10**5}, "is not supported"),
        ({"quant_method": "fp8", "fmt": ["e5m2"] * 10**5}, "fmt"),
        ({"quant_method": "fp8", "weight_block_size": [1] * 10**5}, "blocks of [1, 1"),
        ({"quant_method": "modelopt", "quant_algo": ["FP8"] * 10**5}, "quant_algo ['FP8'"),
        ({"quant_method": "compressed-tensors", "config_groups": [1] * 10**5}, "config_groups [1, 1"),
        (group(num_bits={}, type=["float"] * 10**5, strategy=[]), "type ['float'"),
        ("fp8", "no object"),
    ],
)
def test_a_config_that_is_refused(quantized: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"quantization_config": quantized}))
    with pytest.raises(ModelError) as caught:
        read_config(tmp_path)
    assert words in caught.value.message
    assert "quantization_config" in caught.value.message
    assert len(caught.value.message) < 1000


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "modelopt", quantization_config=None)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    stored = read_config(tmp_path).stored
    assert stored is not None
    assert stored.name == "fp8"
    (tmp_path / "hf_quant_config.json").write_text('{"a":' * 10**5)
    with pytest.raises(ModelError, match=r"hf_quant_config\.json cannot be read"):
        read_config(tmp_path)


def test_a_cpu_widens_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "channel")
    caplog.set_level("INFO", "ramify.gpu.startup")
    config = ModelConfig(path=tmp_path, device="cpu", kv_tokens=64, quantization="none")
    assert load_executor(config, lambda *_: None).info.quantization == "none"
    assert "in fp8 are widened to floats" in caplog.text


def test_floats_are_rounded_where_it_is_asked_for(tmp_path: Path, drive: Any) -> None:
    """All products but logits and routers: the logits are those of a model with the rounded weights."""
    tensors = write(tmp_path, "channel")
    floats = {}
    for name in tensors:
        if not name.endswith("_scale"):
            floats[name] = exact(tensors, name.removesuffix(".weight")).float()
    found = []
    for kind in ("fp8", "none"):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SHAPE))
        save_file(floats, folder / "model.safetensors")
        d = drive(folder, quantization=kind)
        assert d.executor.info.quantization == kind
        d.step(opens=[d.open(0, d.pages(0, 32))])
        found.append(d.forward(extends=[ExtendRow(0, 0, pack([3, 9, 27, 17]), True)]))
        for name in floats:
            if name.endswith("_proj.weight"):
                floats[name] = rounded(floats[name]).floats()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
