"""4-bit checkpoints from config.json to an executor; what is wrong with one is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ramify.gpu.models.config import read_config
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.ops.linear.grouped import GroupedWeight, four_bits, mxfp4
from ramify.gpu.startup.forecast import forecast
from ramify.gpu.startup.packing import Packing
from ramify.gpu.startup.weights import check_weights, load_weights
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExtendRow, pack
from tests.gpu.ops.linear.test_four_bit_checkpoints import GPTQ, Numbers, gptq

CPU = torch.device("cpu")
SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_key_value_heads": 4}
Q = "model.layers.0.self_attn.q_proj"
Edit = Callable[[dict[str, Tensor]], object]


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_config: dict[str, Any]) -> Path:
    """GPTQ, where `o_proj` has inputs in another order; the folder `floats` has what it stands for."""
    config, floats = tiny_config | SIZES, tmp_path / "floats"
    floats.mkdir()
    (floats / "config.json").write_text(json.dumps(config))
    config |= {"quantization_config": GPTQ | {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for name, view in Decoder(read_config(tmp_path), 64, torch.float32, CPU).weights().items():
        base = name.removesuffix("weight")
        if base.endswith("_proj."):
            one = Numbers(32, order="o_proj" in name, outputs=128, seed=len(wanted))
            one.scales[:] *= 0.2
            wanted[name] = (one.wanted * 0.2).float()
            tensors |= {base + ending: part for ending, part in gptq(one, 1).items()}
            tensors[f"{base}bias"] = torch.zeros(128)  # as AutoGPTQ wrote them
        else:
            tensors[name] = wanted[name] = torch.randn(view.shape) * 0.05
    save_file(tensors, tmp_path / "model.safetensors")
    save_file(wanted, floats / "model.safetensors")
    return tmp_path


def load(folder: Path, stored: tuple[type[GroupedWeight], ...] = (GroupedWeight,)) -> Decoder:
    model = Decoder(read_config(folder), 64, torch.float32, CPU)
    packing = Packing(model.weights(), model.products(), lambda linear: linear.weight, stored)
    load_weights(folder, model.weights(), lambda *_: None, packing, stored=model.config.stored)
    checked(folder)
    return model


def checked(folder: Path) -> None:
    """What `ramify info` checks."""
    shape = read_config(folder)
    empty = Decoder(shape, 1, torch.float32, torch.device("meta"))
    check_weights(folder, empty.weights(), shape.names, shape.stored)


def test_weights(checkpoint: Path) -> None:
    """Widened, and kept in groups where these are runs."""
    wanted = load_file(checkpoint / "floats" / "model.safetensors")
    for stored in ((), (GroupedWeight,)):
        kept = 0
        for linear, names in load(checkpoint, stored).products():
            whole = torch.cat([wanted[name] for name in names])
            torch.testing.assert_close(linear.weight.floats(), whole, rtol=1e-3, atol=0)
            kept += isinstance(linear.weight, GroupedWeight)
        assert kept == (6 if stored else 0)  # three of each layer's four


def test_kernels_of_a_cpu_serve_it(checkpoint: Path, drive: Any) -> None:
    """What differs from the floats is the rounding of activations to 8 bits."""
    pytest.importorskip("llvmlite")
    found = []
    for folder, asked in ((checkpoint, "auto"), (checkpoint / "floats", "none"), (checkpoint, "none")):
        d = drive(folder, quantization=asked)
        info = d.executor.info
        if asked == "auto":
            if info.quantization == "none":
                pytest.skip("the kernels do not run on this CPU")
            assert info.quantization == "int4"
            assert "the checkpoint's" in info.quantization_reason
            assert forecast(folder)["weights"].startswith("int4 (the checkpoint's")
        found.append(first_logits(d))
    kept, floats, widened = found
    torch.testing.assert_close(widened, floats, rtol=1e-2, atol=1e-3)
    assert (kept - floats).norm() < 0.05 * floats.norm()


@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
def test_triton_kernels_serve_floats_in_4_bits(kind: str, checkpoint: Path, drive: Any) -> None:
    """All products but the logits': the logits are those of a model with the rounded weights."""
    pytest.importorskip("triton", minversion="3.6")
    folder = checkpoint / "floats"
    d = drive(folder, quantization=kind, attention="triton")
    assert d.executor.info.quantization == kind
    found = first_logits(d)
    floats = load_file(folder / "model.safetensors")
    for name, weight in floats.items():
        if name.endswith("_proj.weight"):
            floats[name] = (mxfp4(weight) if kind == "mxfp4" else four_bits(weight, 128)).floats()
    save_file(floats, folder / "model.safetensors")
    torch.testing.assert_close(
        found, first_logits(drive(folder, quantization="none")), rtol=1e-3, atol=1e-4
    )


def first_logits(d: Any) -> Tensor:
    d.step(opens=[d.open(0, d.pages(0, 64))])
    found: Tensor = d.forward(extends=[ExtendRow(0, 0, pack([3, 9, 27, 81]), True)])
    return found


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop(f"{Q}.scales"), [Q, "no scales"]),
        (lambda t: t.pop(f"{Q}.g_idx"), [Q, "no g_idx"]),
        (lambda t: t.update({f"{Q}.qweight": torch.ones(8, 128).int()}), ["qweight is int32 [8, 128]"]),
        (lambda t: t.update({f"{Q}.qzeros": torch.ones(3, 16).int()}), ["qzeros is int32 [3, 16]"]),
        (lambda t: t.update({f"{Q}s.qweight": torch.ones(1)}), [f"{Q}s.qweight", "no place"]),
        (lambda t: t.update({f"{Q}.qother": torch.ones(1)}), [f"{Q}.qother", "no place"]),
        (lambda t: t.update({f"{Q}.bias": torch.ones(128)}), [f"{Q}.bias", "no place"]),
        (lambda t: t.update({f"{Q}.weight": torch.ones(128, 128)}), [Q, "an earlier file has too"]),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_named(edit: Edit, words: list[str], checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    edit(tensors)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load(checkpoint)
    assert all(word in caught.value.message for word in (*words, str(checkpoint)))
    with pytest.raises(ModelError) as before:
        checked(checkpoint)
    assert before.value.message == caught.value.message


def test_a_tensor_that_two_files_hold(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    save_file(tensors, checkpoint / "one.safetensors")
    save_file({f"{Q}.scales": tensors[f"{Q}.scales"]}, checkpoint / "two.safetensors")
    names = dict.fromkeys(tensors, "one.safetensors") | {"more": "two.safetensors"}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelError, match=r"two.safetensors holds .*q_proj.scales, which an earlier"):
        load(checkpoint)


def test_a_config_that_is_refused(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["bits"] = 3
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantization_config \(gptq\) has bits 3: served is 4"):
        read_config(checkpoint)
