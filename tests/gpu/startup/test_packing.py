"""Weights come into their form while they are loaded."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ramify.gpu.models.config import read_config
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.native.host import isa_of
from ramify.gpu.native.packer import Packer
from ramify.gpu.ops.linear.base import Linear, Weight, plain
from ramify.gpu.ops.linear.packed import CpuForms, CpuWeight, cpu_weight
from ramify.gpu.startup.packing import Packing
from ramify.gpu.startup.random_weights import fill_random
from ramify.gpu.startup.weights import load_weights
from ramify.protocol.errors import ModelError


class Marked(Weight):
    """A form that remembers what it was made of."""

    def __init__(self, linear: Linear) -> None:
        self.sum = float(linear.tensor.sum())


def test_a_product_gets_its_form_when_its_last_tensor_is_there() -> None:
    whole = torch.zeros(4, 2)
    merged, other = plain(whole), plain(torch.zeros(3, 2))
    views = {"q": whole[:2], "k": whole[2:], "o": other.tensor, "norm": torch.zeros(2)}
    packing = Packing(views, [(merged, ["q", "k"]), (other, ["o"])], Marked)
    views["k"].fill_(1.0)
    packing.loaded("k")
    packing.loaded("norm")
    assert set(views) == {"q", "k", "o", "norm"}
    views["q"].fill_(2.0)
    packing.loaded("q")
    assert isinstance(merged.weight, Marked)
    assert merged.weight.sum == 12.0
    assert set(views) == {"o", "norm"}
    assert other.tensor.shape == (3, 2)


def test_what_was_read_is_freed_on_the_way(tmp_path: Path, tiny_config: dict[str, object]) -> None:
    """In 8 bits there are never two products as floats at once, but for those that are still to come."""
    isa = isa_of("x86_64", {"avx2", "fma", "f16c"})
    assert isa is not None
    model = tiny(tmp_path, tiny_config)
    views = model.weights()
    floats = [weakref.ref(linear.tensor) for linear, _ in model.products()]
    packing = Packing(views, model.products(), CpuForms(Packer(isa)).form)
    alive: list[int] = []

    def loaded(name: str) -> None:
        packing.loaded(name)
        alive.append(sum(each() is not None for each in floats))

    fill_random(views, loaded=loaded)
    assert alive[0] == len(floats)
    assert alive[-1] <= 1  # a tied head's floats are the embedding
    assert alive == sorted(alive, reverse=True)
    for linear, _ in model.products():
        assert isinstance(linear.weight, CpuWeight)
    with pytest.raises(TypeError, match="CpuWeight"):
        model.weights()


def test_forms_name_each_other() -> None:
    linear = plain(torch.zeros(4, 2))
    with pytest.raises(TypeError, match="packed weights, not a PlainWeight"):
        cpu_weight(linear)
    linear.weight = Marked(linear)
    with pytest.raises(TypeError, match="plain weights, not a Marked"):
        linear.tensor  # noqa: B018
    with pytest.raises(TypeError, match="no product with a Marked"):
        linear(torch.zeros(1, 2))


def test_a_tensor_that_two_files_hold(tmp_path: Path, tiny_config: dict[str, object]) -> None:
    model = tiny(tmp_path, tiny_config)
    views = model.weights()
    fill_random(views)
    tensors = {name: view.clone() for name, view in views.items()}
    save_file(tensors, tmp_path / "one.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "two.safetensors")
    names = dict.fromkeys(tensors, "one.safetensors") | {"more": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelError, match=r"two.safetensors holds model.norm.weight, which an earlier"):
        load_weights(tmp_path, model.weights(), lambda what, share: None)


def tiny(folder: Path, config: dict[str, object]) -> Decoder:
    (folder / "config.json").write_text(json.dumps(config))
    return Decoder(read_config(folder), 64, torch.float32, torch.device("cpu"))
