"""4-bit weights of checkpoints against the arithmetic of each packing, in float64.

The packers here are written from the formats' descriptions, a number at a time, and share nothing with
the code that unpacks.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ramify.gpu.ops.linear import four_bit_checkpoints as formats
from ramify.gpu.ops.linear.base import PlainWeight
from ramify.gpu.ops.linear.grouped import GroupedWeight

OUTPUTS, INPUTS = 16, 128
SHAPE = (OUTPUTS, INPUTS)


class Numbers:
    """Codes [outputs, inputs], zeros and scales [outputs, groups], and what they stand for."""

    def __init__(
        self, group: int, zeros: str = "some", order: bool = False, outputs: int = OUTPUTS, seed: int = 0
    ) -> None:
        random = np.random.default_rng(seed)
        self.groups = -(-INPUTS // group)
        self.codes = random.integers(0, 16, (outputs, INPUTS))
        self.zeros = np.full((outputs, self.groups), 8)
        if zeros == "some":
            self.zeros = random.integers(1, 16, self.zeros.shape)
        self.scales = random.uniform(0.001, 0.1, self.zeros.shape).astype(np.float16)
        self.index = np.arange(INPUTS) // group
        if order:
            random.shuffle(self.index)
        zero, scale = self.zeros[:, self.index], self.scales[:, self.index].astype(np.float64)
        self.wanted = torch.from_numpy((self.codes - zero) * scale)


def words(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight numbers of a row in each int32; `order`: which has the lowest bits, the next ones, ..."""
    rows, columns = codes.shape
    packed = np.zeros((rows, columns // 8), np.uint32)
    for row in range(rows):
        for column in range(columns // 8):
            eight = codes[row, 8 * column : 8 * column + 8]
            packed[row, column] = sum(int(eight[which]) << 4 * at for at, which in enumerate(order))
    return torch.from_numpy(packed.view(np.int32))


def awq(one: Numbers) -> dict[str, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(one.codes.T, order),
        "qzeros": words(one.zeros.T, order),
        "scales": torch.from_numpy(one.scales.T.copy()),
    }


def gptq(one: Numbers, less: int) -> dict[str, Tensor]:
    return {
        "qweight": words(one.codes).t().contiguous(),
        "qzeros": words(one.zeros.T - less),
        "scales": torch.from_numpy(one.scales.T.copy()),
        "g_idx": torch.from_numpy(one.index.astype(np.int32)),
    }


def compressed(one: Numbers, order: bool = False) -> dict[str, Tensor]:
    found = {
        "weight_packed": words(one.codes),
        "weight_scale": torch.from_numpy(one.scales),
        "weight_shape": torch.tensor(SHAPE),
    }
    if bool((one.zeros != 8).any()):
        found["weight_zero_point"] = words(one.zeros.T).t().contiguous()
    return found | ({"weight_g_idx": torch.from_numpy(one.index.astype(np.int32))} if order else {})


def torchao(one: Numbers) -> dict[str, Tensor]:
    """w = code * scale + zero, of codes from -8."""
    signed = (one.codes - 8) & 15
    middle = (8 - one.zeros) * one.scales.astype(np.float64)
    return {
        "_weight_qdata": torch.from_numpy((signed[:, 1::2] << 4 | signed[:, ::2]).astype(np.uint8)),
        "_weight_scale": torch.from_numpy(one.scales.T.copy()),
        "_weight_zero_point": torch.from_numpy(middle.T.astype(np.float32)),
    }


def packed_config(**weights: Any) -> dict[str, Any]:
    given = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    return {"format": "pack-quantized", "config_groups": {"group_0": {"weights": given | weights}}}


def torchao_config(group: int) -> dict[str, Any]:
    return {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": group}}}}


AWQ = {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq"}
ROW = INPUTS


def case(name: str) -> tuple[formats.FourBitFormat, dict[str, Tensor], Numbers]:
    match name:
        case "awq":
            return formats.awq(AWQ), awq(one := Numbers(32)), one
        case "awq, one group":
            return formats.awq(AWQ | {"group_size": -1}), awq(one := Numbers(ROW)), one
        case "gptq":
            return formats.gptq(GPTQ), gptq(one := Numbers(32), 1), one
        case "gptq, symmetric":
            return formats.gptq(GPTQ), gptq(one := Numbers(32, "none"), 1), one
        case "gptq, in another order":
            return formats.gptq(GPTQ), gptq(one := Numbers(32, order=True), 1), one
        case "gptq, version 2":
            config = GPTQ | {"checkpoint_format": "gptq_v2", "group_size": 64}
            return formats.gptq(config), gptq(one := Numbers(64), 0), one
        case "gptq, a short last group":
            return formats.gptq(GPTQ | {"group_size": 96}), gptq(one := Numbers(96), 1), one
        case "compressed-tensors":
            return formats.compressed(packed_config()), compressed(one := Numbers(32, "none")), one
        case "compressed-tensors, zero points":
            config = packed_config(symmetric=False, group_size=64)
            return formats.compressed(config), compressed(one := Numbers(64)), one
        case "compressed-tensors, a scale for a row":
            config = packed_config(strategy="channel", group_size=None)
            return formats.compressed(config), compressed(one := Numbers(ROW, "none")), one
        case "compressed-tensors, in another order":
            config, one = packed_config(actorder="group"), Numbers(32, "none", order=True)
            return formats.compressed(config), compressed(one, order=True), one
        case "torchao":
            return formats.torchao(torchao_config(64)), torchao(one := Numbers(64)), one
    raise AssertionError(name)


RUNS = (
    "awq", "awq, one group", "gptq", "gptq, symmetric", "gptq, version 2", "compressed-tensors",
    "compressed-tensors, zero points", "compressed-tensors, a scale for a row", "torchao",
)  # fmt: skip
OTHERS = (
    "gptq, in another order",
    "gptq, a short last group",
    "compressed-tensors, in another order",
)


@pytest.mark.parametrize("name", [*RUNS, *OTHERS])
def test_numbers(name: str) -> None:
    """Exactly those of the format, in groups where these are runs that kernels read."""
    form, tensors, one = case(name)
    assert form.missing(tensors) is None
    weight = form.weight(tensors, SHAPE)
    assert isinstance(weight, GroupedWeight if name in RUNS else PlainWeight)
    error = (weight.floats().double() - one.wanted).abs().max()
    assert error <= (1e-7 if name == "torchao" else 0)  # whose zero points are floats


def test_symmetric_weights_need_no_offsets() -> None:
    form, tensors, _ = case("gptq, symmetric")
    weight = form.weight(tensors, SHAPE)
    assert isinstance(weight, GroupedWeight)
    assert weight.offsets is None
    assert int(weight.codes.min()) == -8


def test_parts_are_named() -> None:
    form, _, _ = case("awq")
    scales = torch.zeros(1)
    assert form.part("model.layers.0.mlp.up_proj.scales", scales) == (
        "model.layers.0.mlp.up_proj.weight",
        "scales",
    )
    assert form.part("model.layers.0.mlp.up_proj.bias", scales) is None
    assert form.missing(["qweight", "scales"]) == "no qzeros"


@pytest.mark.parametrize(
    ("name", "ending", "tensor", "told"),
    [
        ("awq", "qweight", torch.zeros(128, 4, dtype=torch.int32), r"qweight .*, 4\]: .*\[128, 2\]"),
        ("awq", "qweight", torch.zeros(128, 2), r"qweight is float32 .* asks for int32"),
        ("awq", "qzeros", torch.zeros(1, 2, dtype=torch.int32), r"qzeros .* asks for int32 \[4, 2\]"),
        ("awq", "scales", torch.zeros(4, 8), r"scales is float32 \[4, 8\]"),
        ("awq", "scales", torch.full((4, 16), torch.nan), "scales has numbers that are not finite"),
        ("gptq", "g_idx", torch.full((128,), 4, dtype=torch.int32), "g_idx names groups that are not"),
        ("gptq", "g_idx", torch.zeros(64, dtype=torch.int32), r"g_idx is int32 \[64\]"),
        ("compressed-tensors", "weight_shape", torch.tensor([16, 64]), r"weight_shape is \[16, 64\]"),
        ("compressed-tensors", "weight_packed", torch.zeros(16, 8).int(), "weight_packed is"),
        ("compressed-tensors", "weight_scale", torch.zeros(16, 2), r"weight_scale .*\[16, 4\]"),
        ("torchao", "_weight_qdata", torch.zeros(16, 128, dtype=torch.uint8), "_weight_qdata is uint8"),
    ],
)  # fmt: skip
def test_wrong_tensors(name: str, ending: str, tensor: Tensor, told: str) -> None:
    form, tensors, _ = case(name)
    with pytest.raises(ValueError, match=told):
        form.weight(tensors | {ending: tensor}, SHAPE)


@pytest.mark.parametrize(
    ("read", "config", "told"),
    [
        (formats.awq, AWQ | {"version": "gemv"}, "has version 'gemv': served is 'gemm'"),
        (formats.awq, AWQ | {"bits": 8}, "has bits 8: served is 4"),
        (formats.awq, AWQ | {"group_size": 0}, "has group_size 0"),
        (formats.awq, AWQ | {"group_size": True}, "has group_size True"),
        (formats.gptq, GPTQ | {"bits": 3}, "has bits 3"),
        (formats.gptq, GPTQ | {"checkpoint_format": "marlin"}, "has checkpoint_format 'marlin'"),
        (formats.gptq, GPTQ | {"dynamic": {"-:lm_head": {}}}, "has dynamic set"),
        (formats.gptq, GPTQ | {"group_size": 1 << 40}, "has group_size 10995116"),
        (formats.compressed, packed_config(num_bits=8), "has num_bits 8"),
        (formats.compressed, packed_config(strategy="block"), "has strategy 'block'"),
        (formats.compressed, packed_config(type="float"), "has type 'float'"),
        (formats.compressed, packed_config() | {"config_groups": {}}, "one group"),
        (formats.compressed, packed_config() | {"config_groups": {"a": 1}}, "has config_groups.a"),
        (formats.torchao, {"quant_type": {"default": {"_type": "Int8Config"}}}, "Int4WeightOnly"),
        (formats.torchao, {"quant_type": "int4_weight_only"}, "has quant_type"),
    ],
)  # fmt: skip
def test_configs_that_are_not_served(read: Any, config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read(config)
