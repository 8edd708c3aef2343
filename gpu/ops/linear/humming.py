"""Weights of 4 bits that the package `humming-kernels` (Apache-2.0) multiplies, on GPUs that have it.

The package compiles its kernels for a product's sizes and numbers of rows, and keeps them on disk. Where
it is not installed, finds no compiler, or does not take a weight, our own kernels serve (`four_bits`).
Its scales have the rows' dtype: those of float16 are rounded to bfloat16 beside rows of bfloat16.
"""

import importlib.util
import json
import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ramify.gpu.ops.fragment_check import fragment_obstacle
from ramify.gpu.ops.linear.base import Form, Linear, Weight
from ramify.gpu.ops.linear.four_bits import UNIT, FourBitWeight
from ramify.gpu.ops.tilings import FragmentTiling, fragment_tiling

_LOG = logging.getLogger("ramify.gpu.startup")
_HOPPER = (9, 0)  # the oldest where it was compared with our own kernels (docs/log/gpu.md)
_ROWS = (8, 16, 32, 64, 128, 256, 512, 2048)  # a kernel is compiled for up to so many; the last for more
_SPLIT = 256  # of these: 2 to 4 % faster where tensor cores are given work apart from waiting for them
_MOST_ROWS = 1 << 30
_TYPES = (torch.bfloat16, torch.float16)
_GROUPS = (32, 64, 128)
_OUTPUTS = 256  # a multiple of the outputs that a program of any kernel takes
_LOCKS = 2048  # by which programs that share a tile take turns
_REPACKED = 1 << 25  # codes at a time


@dataclass(slots=True)
class CompiledRows:
    """The kernels of a product's sizes, compiled in a thread. `names`: arguments of launches."""

    names: "Future[Tensor]"
    warm: bool = False


@dataclass(slots=True)
class HummingWeight(Weight):
    """A weight whose tensors the package laid out; `shape` is that of the matrix."""

    tensors: dict[str, Tensor]
    sizes: tuple[int, int]
    kernels: CompiledRows
    locks: Tensor  # int32, zeros between launches
    fragments: bool = False  # `triton_fragments` multiplies few tokens by it, too
    obstacle: str = ""  # why it does not, where it was tried

    @property
    def shape(self) -> tuple[int, int]:
        return self.sizes

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        # so that none is loaded while a CUDA graph is captured
        if not self.kernels.warm and not torch.cuda.is_current_stream_capturing():
            self.kernels.warm = True
            for rows in _ROWS:
                self._launch(x.new_zeros((rows, x.shape[1])))
        y = self._launch(x)
        return y if bias is None else y.add_(bias)

    def _launch(self, x: Tensor) -> Tensor:
        y: Tensor = import_module("humming.ops").launch_kernel(
            configs=self.kernels.names.result(), inputs=x, locks=self.locks, **self.tensors
        )
        return y


def humming_form(inner: Form, dtype: torch.dtype, device: torch.device) -> Form:
    """Make the form that brings weights in 4 bits, of `inner`, into the package's form if it can."""
    if device.type != "cuda" or dtype not in _TYPES or importlib.util.find_spec("humming") is None:
        return inner
    if torch.cuda.get_device_capability(device) < _HOPPER:
        return inner
    return _Forms(inner, dtype, device)


class _Forms:
    """The form of `humming_form`, with the kernels that were compiled, by sizes."""

    def __init__(self, inner: Form, dtype: torch.dtype, device: torch.device) -> None:
        self._inner, self._dtype, self._device = inner, dtype, device
        self._kernels: dict[str, CompiledRows] = {}
        self._obstacles: dict[tuple[FragmentTiling, bool, bool], str] = {}
        self._threads = ThreadPoolExecutor(4, "humming")
        self._usable = True

    def __call__(self, linear: Linear) -> Weight:
        weight = self._inner(linear)
        if not self._usable or linear.stacked or not fits(weight):
            return weight
        assert isinstance(weight, FourBitWeight)
        try:
            return self._made(weight, linear.use == "gated")
        except Exception as error:  # no compiler, another driver: the package raises any
            self._usable = False
            _LOG.warning("humming-kernels cannot be used, our own kernels multiply 4 bits: %s: %.300s",
                         type(error).__name__, error)  # fmt: skip
            return weight

    def _made(self, weight: FourBitWeight, gated: bool) -> HummingWeight:
        config, tensors = self._laid_out(weight)
        locks = torch.zeros(_LOCKS, dtype=torch.int32, device=self._device)
        kernels = self._compiled(config)
        made = HummingWeight(tensors, weight.shape, kernels, locks)
        tiling = fragment_tiling(1, weight.shape)
        if tiling is not None and _has_fragments(weight, self._dtype):
            made.obstacle = self._obstacle(weight, tiling, gated)
            made.fragments = not made.obstacle
        return made

    def _obstacle(self, weight: FourBitWeight, tiling: FragmentTiling, gated: bool) -> str:
        kind = tiling, weight.zeros is None, gated
        if kind not in self._obstacles:
            codes, scales = weight.codes[:, :_OUTPUTS], weight.scales[:, :_OUTPUTS].to(self._dtype)
            zeros = None if weight.zeros is None else weight.zeros[:, :_OUTPUTS]
            part = FourBitWeight(codes, scales, zeros, weight.group, weight.inputs)
            _, tensors = self._laid_out(part)
            self._obstacles[kind] = fragment_obstacle(tensors, part.floats(), tiling, gated)
        return self._obstacles[kind]

    def _laid_out(self, weight: FourBitWeight) -> tuple[Any, dict[str, Tensor]]:
        dtypes = import_module("humming.dtypes")
        schema_of = import_module("humming.schema").HummingWeightSchema
        kind = dtypes.DataType.from_torch_dtype(self._dtype)
        parts = {"weight": eights(weight)}
        if weight.is_mxfp4:
            scales = weight.scales.t()[:, : weight.inputs // weight.group].contiguous()
            parts["weight_scale"] = scales.view(torch.float8_e8m0fnu)
            schema = schema_of(
                b_dtype=dtypes.float4e2m1, bs_dtype=dtypes.float8e8m0,
                weight_scale_group_size=weight.group,
            )  # fmt: skip
        else:
            scales = weight.scales.t()[:, : weight.inputs // weight.group]
            parts["weight_scale"] = scales.to(self._dtype).contiguous()
            schema = schema_of(
                b_dtype=dtypes.uint4, bs_dtype=kind, weight_scale_group_size=weight.group,
                has_zero_point=weight.zeros is not None,
            )  # fmt: skip
            if weight.zeros is not None:  # packed along the outputs
                zeros = weight.zeros[: weight.inputs // weight.group]
                parts["zero_point"] = _packed(zeros.t())
        outputs, inputs = weight.shape
        prepare = import_module("humming.transform").prepare_and_transform_humming_tensors
        laid_out: tuple[Any, dict[str, Tensor]] = prepare(
            parts, outputs, inputs, schema, torch_dtype=self._dtype, device=self._device
        )
        return laid_out

    def _compiled(self, config: Any) -> CompiledRows:
        heuristics = import_module("humming.tune").get_heuristics_config
        name = config.to_str()
        if name not in self._kernels:
            ranges, below = [], 0
            for rows in _ROWS:
                chosen = heuristics(config, shape_m=rows, device=self._device)
                most = rows if rows < _ROWS[-1] else _MOST_ROWS
                own = {"use_pdl": True} | ({"wgmma_split_issue_wait": True} if rows == _SPLIT else {})
                ranges.append([below, most, chosen | own])
                below = rows
            names = self._threads.submit(_compile, name, json.dumps(ranges), self._device)
            if not self._kernels:
                names.result()  # whether there is a compiler
            self._kernels[name] = CompiledRows(names)
        return self._kernels[name]


def _compile(config: str, ranges: str, device: torch.device) -> Tensor:
    kernel = import_module("humming.kernel.humming").HummingKernel
    with torch.cuda.device(device):
        names: Tensor = kernel.prepare_kernels(config, None, ranges, device)
    return names


def _has_fragments(weight: FourBitWeight, dtype: torch.dtype) -> bool:
    """Whether `triton_fragments` reads the weight: integers in groups of 128."""
    return not weight.is_mxfp4 and weight.group == UNIT and dtype == torch.bfloat16


def told(reason: str, products: Iterable[tuple[Linear, list[str]]]) -> str:
    """Add to `reason` why our own kernel does not multiply few tokens, where it failed.

    products: a model's, with the names of their tensors.
    """
    weights = [linear.weight for linear, _ in products]
    failed = {weight.obstacle for weight in weights if isinstance(weight, HummingWeight)} - {""}
    return "; ".join([reason, *(f"few tokens are slower: {obstacle}" for obstacle in sorted(failed))])


def fits(weight: Weight) -> bool:
    """Whether the package takes such a weight: in 4 bits, of whole tiles, zero points of 4 bits."""
    if not isinstance(weight, FourBitWeight) or weight.zero_kind == "floats":
        return False
    if weight.zeros is not None and int(weight.zeros.max()) > 15:
        return False
    outputs, inputs = weight.shape
    return outputs % _OUTPUTS == 0 and inputs % UNIT == 0 and weight.group in _GROUPS


def eights(weight: FourBitWeight) -> Tensor:
    """Pack codes: int32 [outputs, inputs / 8], eight neighbouring inputs each, the lowest bits first."""
    units, outputs, _ = weight.codes.shape
    words = torch.empty((outputs, units * UNIT // 8), dtype=torch.int32, device=weight.codes.device)
    step = max(1, _REPACKED // weight.inputs)
    for first in range(0, outputs, step):
        some = weight.codes[:, first : first + step].transpose(0, 1).int()
        codes = torch.stack([(some >> 4 * place) & 15 for place in range(4)], 2)
        words[first : first + step] = _packed(codes.view(len(some), -1).t()).t()
    return words


def _packed(codes: Tensor) -> Tensor:
    """Pack codes [8 n, m] to int32 [n, m]: eight of the first dimension in one."""
    bits = codes.reshape(-1, 8, codes.shape[1]).to(torch.int64)
    shifts = torch.arange(0, 32, 4, device=codes.device).view(1, 8, 1)
    return (bits << shifts).sum(1).to(torch.int32)
