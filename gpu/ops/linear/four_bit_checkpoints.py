"""Weights of 4 bits as checkpoints store them: AWQ, GPTQ, compressed-tensors, torchao, MXFP4.

Each has several tensors in place of a `weight`, which together are a `GroupedWeight`; where groups are
not runs of inputs the weight becomes floats.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ramify.gpu.ops.linear.base import PlainWeight, Weight
from ramify.gpu.ops.linear.grouped import FP4, GROUP, GroupedWeight

_MOST_GROUP = 1 << 16
_GROUPS = (32, 64, 128)  # that kernels read, and multiples of the last one
_EXPONENT = 127  # of MXFP4's scale of 1
_MIDDLE = 8  # the code of 0 where there are no zero points
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word each of eight outputs is
_SORTED = ("group", "dynamic", True)  # actorder, where inputs of a group are no neighbours
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class FoundCodes:
    """Unpacked codes uint8 [outputs, inputs], scales [outputs, groups]; zeros likewise, None: 8.

    `offsets`: terms to add, in place of zeros. `index` int64[inputs]: the group of each input; None:
    groups are runs.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    offsets: Tensor | None = None
    index: Tensor | None = None


class WeightParts:
    """The tensors of one product by the endings of their names, checked as they are read."""

    def __init__(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int, group: int) -> None:
        self._tensors = tensors
        self.outputs, self.inputs = outputs, inputs
        self.group = group or inputs
        self.groups = -(-inputs // self.group)

    def __contains__(self, ending: str) -> bool:
        return ending in self._tensors

    def get(self, ending: str, types: tuple[torch.dtype, ...], *shape: int) -> Tensor:
        """Return a tensor of one of `types` and this shape. Raises ValueError for any other."""
        tensor = self._tensors[ending]
        if tensor.dtype not in types or tensor.shape != shape:
            raise ValueError(
                f"{ending} is {_type(tensor.dtype)} {list(tensor.shape)}: config.json asks for "
                f"{' or '.join(map(_type, types))} {list(shape)}"
            )
        if tensor.is_floating_point() and not tensor.is_meta and not bool(tensor.isfinite().all()):
            raise ValueError(f"{ending} has numbers that are not finite")
        return tensor

    def words(self, ending: str, *shape: int) -> Tensor:
        """Unpack int32 of this shape to uint8 [.., 8]: the codes in each, the lowest bits first."""
        raw = self.get(ending, (torch.int32,), *shape).contiguous().view(torch.uint8)
        return torch.stack((raw & 15, raw >> 4), -1).view(*shape, 8)

    def index(self, ending: str) -> Tensor | None:
        """Read the group of each input; None: the groups are runs."""
        if ending not in self:
            return None
        index = self.get(ending, (torch.int32, torch.int64), self.inputs).long()
        if not bool(((index >= 0) & (index < self.groups)).all()):
            raise ValueError(f"{ending} names groups that are not there: there are {self.groups}")
        runs = torch.arange(self.inputs, device=index.device) // self.group
        return None if torch.equal(index, runs) else index


@dataclass(frozen=True, slots=True)
class FourBitFormat:
    """A format of 4 bits. `endings`: of the names of a weight's tensors, in place of `weight`.

    `group`: inputs with one scale; 0: all of a row.
    """

    endings: tuple[str, ...]
    group: int
    unpack: Callable[[WeightParts], FoundCodes]
    name: str = "int4"

    def part(self, name: str, tensor: Tensor) -> tuple[str, str] | None:
        """See `WeightFormat`."""
        for ending in self.endings:
            if name.endswith(f".{ending}"):
                return f"{name.removesuffix(ending)}weight", ending
        return None

    def missing(self, parts: Collection[str]) -> str | None:
        absent = [ending for ending in self.endings if ending not in parts]
        return f"no {absent[0]}" if absent else None

    def check(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
        """See `WeightFormat`."""
        self.unpack(WeightParts(parts, *shape, self.group))

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Weight:
        """Make the weight: floats where groups are no runs of 32, 64 or multiples of 128 inputs."""
        outputs, inputs = shape
        stored = WeightParts(parts, outputs, inputs, self.group)
        found = self.unpack(stored)
        scales = found.scales.float().contiguous()
        group = stored.group
        runs = inputs % group == 0 and (group in _GROUPS or group % _GROUPS[-1] == 0)
        if found.index is not None or not runs:
            runs_of = torch.arange(inputs, device=scales.device) // group
            index = runs_of if found.index is None else found.index
            values = found.codes.float()
            if found.offsets is None:
                values -= _MIDDLE if found.zeros is None else found.zeros.float()[:, index]
            values *= scales[:, index]
            return PlainWeight(values if found.offsets is None else values.add_(found.offsets[:, index]))
        codes = found.codes.contiguous().view(torch.int8)
        if found.offsets is not None:
            return GroupedWeight(codes, scales, found.offsets.contiguous(), 4)
        if found.zeros is None or bool((found.zeros == _MIDDLE).all()):
            return GroupedWeight(codes - _MIDDLE, scales, None, 4)
        return GroupedWeight(codes, scales, scales * -found.zeros.float(), 4)


# --- AWQ ---


def awq(config: dict[str, Any]) -> FourBitFormat:
    """Read a `quantization_config`, as the next ones do. Raises ValueError, which names the field."""
    _needs(config, "version", "gemm", "GEMM", None)
    _needs(config, "zero_point", True, None)
    _needs(config, "w_bit" if "w_bit" in config else "bits", 4)
    name = "q_group_size" if "q_group_size" in config else "group_size"
    return FourBitFormat(("qweight", "qzeros", "scales"), _group(config, name), _unpack_awq)


def _unpack_awq(parts: WeightParts) -> FoundCodes:
    columns, groups = parts.outputs // 8, parts.groups
    codes = parts.words("qweight", parts.inputs, columns)[:, :, _AWQ_ORDER]
    zeros = parts.words("qzeros", groups, columns)[:, :, _AWQ_ORDER]
    scales = parts.get("scales", _FLOATS, groups, parts.outputs)
    return FoundCodes(_turned(codes, parts.inputs), scales.t(), _turned(zeros, groups))


def _turned(values: Tensor, rows: int) -> Tensor:
    """Transpose so that outputs come first."""
    return values.reshape(rows, -1).t().contiguous()


# --- GPTQ ---


def gptq(config: dict[str, Any]) -> FourBitFormat:
    _needs(config, "bits", 4)
    name = "checkpoint_format"
    version = _needs(config, name, "gptq", "gptq_v2", None)
    if config.get("dynamic"):
        raise ValueError("has dynamic set: products of several kinds are not served")
    unpack = _unpack_gptq_2 if version == "gptq_v2" else _unpack_gptq
    endings = ("qweight", "qzeros", "scales", "g_idx")
    return FourBitFormat(endings, _group(config, "group_size"), unpack)


def _unpack_gptq(parts: WeightParts) -> FoundCodes:
    """Unpack GPTQ's first version, whose zero points are stored one lower."""
    found = _unpack_gptq_2(parts)
    assert found.zeros is not None
    return replace(found, zeros=found.zeros + 1)


def _unpack_gptq_2(parts: WeightParts) -> FoundCodes:
    outputs, groups = parts.outputs, parts.groups
    codes = parts.words("qweight", parts.inputs // 8, outputs).transpose(0, 1)
    zeros = parts.words("qzeros", groups, outputs // 8)
    scales = parts.get("scales", _FLOATS, groups, outputs)
    index = parts.index("g_idx")
    return FoundCodes(codes.reshape(outputs, -1), scales.t(), _turned(zeros, groups), None, index)


# --- compressed-tensors ---


def compressed(config: dict[str, Any]) -> FourBitFormat:
    _needs(config, "format", "pack-quantized")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ValueError("has config_groups that must have one group")
    name, one = next(iter(groups.items()))
    weights = one.get("weights") if isinstance(one, dict) else None
    if not isinstance(weights, dict) or one.get("input_activations"):
        raise ValueError(f"has config_groups.{name:.40}: must have weights, and no input_activations")
    _needs(weights, "num_bits", 4)
    _needs(weights, "type", "int")
    by_row = _needs(weights, "strategy", "group", "channel") == "channel"
    endings = ["weight_packed", "weight_scale", "weight_shape"]
    if not weights.get("symmetric", True):
        endings.append("weight_zero_point")
    if _needs(weights, "actorder", "group", "weight", "static", "dynamic", True, False, None) in _SORTED:
        endings.append("weight_g_idx")
    size = 0 if by_row else _group(weights, "group_size")
    return FourBitFormat(tuple(endings), size, _unpack_packed)


def _unpack_packed(parts: WeightParts) -> FoundCodes:
    outputs, groups = parts.outputs, parts.groups
    shape = parts.get("weight_shape", (torch.int32, torch.int64), 2).tolist()
    if shape != [outputs, parts.inputs]:
        raise ValueError(f"weight_shape is {shape}: config.json asks for {[outputs, parts.inputs]}")
    words = parts.words("weight_packed", outputs, -(-parts.inputs // 8))
    codes = words.view(outputs, -1)[:, : parts.inputs].contiguous()
    scales = parts.get("weight_scale", _FLOATS, outputs, groups)
    zeros: Tensor | None = None
    if "weight_zero_point" in parts:  # packed along the outputs
        packed = parts.words("weight_zero_point", -(-outputs // 8), groups)
        zeros = packed.transpose(1, 2).reshape(-1, groups)[:outputs]
    return FoundCodes(codes, scales, zeros, None, parts.index("weight_g_idx"))


# --- torchao: `Int4Tensor`, as its safetensors support writes it ---


def torchao(config: dict[str, Any]) -> FourBitFormat:
    kinds = config.get("quant_type")
    one = kinds.get("default") if isinstance(kinds, dict) and len(kinds) == 1 else None
    if not isinstance(one, dict) or one.get("_type") != "Int4WeightOnlyConfig":
        raise ValueError("has quant_type that is not served: must be a default Int4WeightOnlyConfig")
    data = one.get("_data")
    if not isinstance(data, dict):
        raise ValueError("has quant_type.default without _data: must be an object")
    endings = ("_weight_qdata", "_weight_scale", "_weight_zero_point")
    return FourBitFormat(endings, _group(data, "group_size", 128), _unpack_torchao)


def _unpack_torchao(parts: WeightParts) -> FoundCodes:
    """Unpack signed codes, even inputs in the lower halves; zero points are floats, of the middle."""
    outputs, groups = parts.outputs, parts.groups
    raw = parts.get("_weight_qdata", (torch.int8, torch.uint8), outputs, parts.inputs // 2)
    raw = raw.view(torch.uint8)
    codes = torch.stack((raw & 15, raw >> 4), -1).view(outputs, -1) ^ _MIDDLE
    scales = parts.get("_weight_scale", _FLOATS, groups, outputs).t().float()
    middle = parts.get("_weight_zero_point", _FLOATS, groups, outputs).t().float()
    return FoundCodes(codes, scales, None, middle - _MIDDLE * scales)


# --- MXFP4, as gpt-oss has its experts ---


class Mxfp4Format:
    """The format of MXFP4: bytes of two numbers, the lower bits first; blocks of 16 have an exponent."""

    name = "mxfp4"

    def part(self, name: str, tensor: Tensor) -> tuple[str, str] | None:
        """See `WeightFormat`."""
        for part in ("blocks", "scales"):
            if name.endswith(f"_{part}"):
                return name.removesuffix(f"_{part}"), part
        return None

    def missing(self, parts: Collection[str]) -> str | None:
        absent = [part for part in ("blocks", "scales") if part not in parts]
        return f"no {absent[0]}" if absent else None

    def check(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
        """See `WeightFormat`."""
        outputs, inputs = shape
        groups = -(-inputs // GROUP)
        blocks, scales = parts["blocks"], parts["scales"]
        if {blocks.dtype, scales.dtype} != {torch.uint8} or blocks.shape[-1] != GROUP // 2:
            raise ValueError(f"blocks are {_type(blocks.dtype)} {list(blocks.shape)}, scales "
                             f"{_type(scales.dtype)}: MXFP4 has bytes, 16 in a block")  # fmt: skip
        if list(blocks.shape[:-1]) != [outputs, groups] or list(scales.shape) != [outputs, groups]:
            raise ValueError(f"it has blocks {list(blocks.shape)} and scales {list(scales.shape)}: "
                             f"config.json asks for {[outputs, groups]} of both")  # fmt: skip
        if inputs % GROUP:
            raise ValueError(f"{inputs} inputs are not whole blocks of {GROUP}")

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Weight:
        """Make the weight, in units of 1/2, so that its codes are integers."""
        self.check(parts, shape)
        outputs, inputs = shape
        blocks, scales = parts["blocks"], parts["scales"]
        twice = [int(2 * value) for value in FP4]
        table = torch.tensor([*twice, *(-value for value in twice)], dtype=torch.int8)
        codes = torch.stack((blocks & 15, blocks >> 4), -1).view(outputs, inputs)
        half = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - _EXPONENT - 1)
        return GroupedWeight(table.to(blocks.device)[codes.int()], half, None, 5)


def mxfp4(config: dict[str, Any]) -> Mxfp4Format:
    return Mxfp4Format()


def _needs(config: dict[str, Any], name: str, *served: Any) -> Any:
    """Check that a field has one of these values (None: it may be missing). Raises ValueError."""
    value = config.get(name)
    if not any(value == each and type(value) is type(each) for each in served):
        shown = " or ".join(repr(each) for each in served if each is not None)
        raise ValueError(f"has {name} {value!r:.40}: served is {shown}")
    return value


def _group(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    if value == -1:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 2 <= value <= _MOST_GROUP:
        raise ValueError(f"has {name} {value!r:.40}: must be -1 or from 2 to {_MOST_GROUP}")
    return value


def _type(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
