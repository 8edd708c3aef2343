"""Matrix products of a few tokens in Triton, with the operations before and after in one kernel.

A decode step reads every weight once and computes little, so its time is that of the weights' bytes plus
the gaps between kernels. These products close the gaps: the residual sum, the RMS norm and the gated
activation happen while the sums are still in registers, and with programmatic dependent launch a program
fetches its weights before the kernel ahead of it has ended.

An RMS norm is split in two. The kernel that completes a residual row writes row * gain, and for each
tile of columns the sum of its squares; the next product multiplies those rows as they are and scales its
sums by the inverse root mean square, one number a row. This file knows neither models nor requests. The
reference is `linear` with the plain layers beside this file. Imported only where Triton is used; runs on
a CPU with TRITON_INTERPRET=1.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ramify.gpu.ops.base import Activation
from ramify.gpu.ops.gluon_check import gluon_product
from ramify.gpu.ops.linear.base import Linear, PlainWeight
from ramify.gpu.ops.linear.four_bits import FourBitWeight
from ramify.gpu.ops.linear.humming import HummingWeight
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.tilings import (
    AnyTiling,
    FourBitTiling,
    FragmentTiling,
    GluonTiling,
    Tiling,
    few_tiling,
    four_bit_tiling,
    fragment_tiling,
)
from ramify.gpu.ops.triton_four_bits import four_bit_product, widened_product
from ramify.gpu.ops.triton_fragments import fragment_product
from ramify.gpu.ops.triton_layer import (
    add_norm,
    divide_rows,
    gate_mul,
    gather,
    load_squares,
    opened,
)
from ramify.gpu.ops.triton_tiles import many_rows
from ramify.gpu.programmatic_launch import launch_options, overlaps, wait
from ramify.gpu.triton_fp8 import widened

_STORE, _ADD, _GATED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_Own = Tiling | FourBitTiling | FragmentTiling  # those of our own kernels
_EARLY_TOKENS = tl.constexpr(32)
MOST_TILES = 8192  # of one launch that splits its inputs


@dataclass(slots=True)
class UnscaledRows:
    """Rows [T, hidden] that are still to be divided by their root mean square.

    squares float32[T, parts]: partial sums of squares of a row before it was multiplied with the gain.
    None: the rows are already divided.
    """

    values: Tensor
    squares: Tensor | None = None


class Products:
    """Launcher of a step's products: with a tiling on the kernel below, with a Gluon tiling on that of
    `gluon_linear`, which adds no bias, without one on torch's library.

    It owns the counters by which programs that share a tile find the last of them. The programs of a
    launch use them and leave them at 0, so launches must follow each other on one stream.
    """

    follows_tilings = True

    def __init__(self, device: torch.device) -> None:
        self._arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
        self._overlap = overlaps(device)
        self._options = launch_options(device)

    def plain(
        self,
        x: UnscaledRows,
        linear: Linear,
        eps: float,
        tiling: AnyTiling | None,
        output: Tensor | None = None,
    ) -> Tensor:
        """Multiply [T, inputs] -> [T, outputs], into `output` if it is given."""
        tiling = self._tiling(x.values, linear, tiling)
        if isinstance(tiling, GluonTiling) and linear.bias is None:
            return gluon_product(x.values, x.squares, linear.tensor, False, eps, tiling, output)
        if not isinstance(tiling, _Own):
            return self._by_library(_divided(x, eps), linear, output)
        if output is None:
            output = x.values.new_empty((len(x.values), linear.weight.shape[0]))
        self._launch(_STORE, x, linear, output, tiling, eps)
        return output

    def library(self, x: Tensor, linear: Linear) -> Tensor:
        """Multiply [T, inputs] -> [T, outputs], without an operation before or after."""
        if not linear.weight.coded:
            return linear(x)
        tiling = self._tiling(x, linear, None)
        if not isinstance(tiling, _Own):
            four = isinstance(linear.weight, FourBitWeight)
            return widened_product(x, linear) if four else many_rows(x, linear)
        output = x.new_empty((len(x), linear.weight.shape[0]))
        self._launch(_STORE, UnscaledRows(x), linear, output, tiling, 0.0)
        return output

    def _by_library(self, x: Tensor, linear: Linear, output: Tensor | None) -> Tensor:
        if output is None:
            return self.library(x, linear)
        self.head(x, linear, output)
        return output

    def gated(
        self,
        x: UnscaledRows,
        linear: Linear,
        eps: float,
        tiling: AnyTiling | None,
        activation: Activation = "silu",
        output: Tensor | None = None,
    ) -> Tensor:
        """Compute activation(gate) * up, [T, size], into `output` if it is given.

        The gate's rows come first in the weight [2 * size, inputs].
        """
        tiling = self._tiling(x.values, linear, tiling, gated=True)
        if isinstance(tiling, GluonTiling) and linear.bias is None and activation == "silu":
            return gluon_product(x.values, x.squares, linear.tensor, True, eps, tiling, output)
        if not isinstance(tiling, _Own):
            return gate_mul(self.library(_divided(x, eps), linear), activation, output)
        if output is None:
            output = x.values.new_empty((len(x.values), linear.weight.shape[0] // 2))
        self._launch(_GATED, x, linear, output, tiling, eps, gelu=activation == "gelu_tanh")
        return output

    def add(
        self, x: Tensor, linear: Linear, residual: Tensor, norm: RMSNorm, tiling: Tiling | None
    ) -> UnscaledRows:
        """Add the product to residual [T, outputs] in place. Returns its rows for `norm`."""
        own = self._tiling(x, linear, tiling)
        if own is None and linear.bias is None and isinstance(linear.weight, PlainWeight):
            torch.addmm(residual, x, linear.tensor.t(), out=residual)
            return UnscaledRows(add_norm(None, residual, norm))
        if not isinstance(own, _Own):
            return UnscaledRows(add_norm(self.library(x, linear), residual, norm))
        tokens, outputs = residual.shape
        parts = triton.cdiv(outputs, own.outputs)
        squares = torch.empty((tokens, parts), dtype=torch.float32, device=x.device)
        rows = UnscaledRows(torch.empty_like(residual), squares)
        self._launch(
            _ADD, UnscaledRows(x), linear, rows.values, own, 0.0, residual, norm.weight, squares
        )
        return rows

    def head(self, x: Tensor, linear: Linear, output: Tensor) -> None:
        """Multiply [S, inputs] into output [S, outputs], which is contiguous."""
        if linear.weight.coded:
            output.copy_(self.library(x, linear))
        else:
            linear.into(x, output)

    def _tiling(
        self, x: Tensor, linear: Linear, tiling: AnyTiling | None, gated: bool = False
    ) -> AnyTiling | None:
        """Choose the tiling for the weight's form; `tiling`: that of plain weights."""
        if isinstance(linear.weight, HummingWeight):
            known = linear.weight.fragments and x.dtype == torch.bfloat16
            return fragment_tiling(len(x), linear.weight.shape) if known else None
        if not linear.weight.coded:
            return tiling if isinstance(linear.weight, PlainWeight) else None
        if isinstance(linear.weight, FourBitWeight):
            return four_bit_tiling(len(x), linear.weight.shape[0], x.dtype)
        usable = self._overlap and x.dtype == torch.bfloat16
        grouped = linear.weight.operand.group < linear.weight.shape[1]
        return few_tiling(len(x), linear.weight.shape, gated, grouped) if usable else None

    def _launch(
        self,
        epilogue: Any,
        x: UnscaledRows,
        linear: Linear,
        output: Tensor,
        tiling: _Own,
        eps: float,
        residual: Tensor | None = None,
        gain: Tensor | None = None,
        squares_out: Tensor | None = None,
        gelu: bool = False,
    ) -> None:
        if isinstance(tiling, FourBitTiling):
            four_bit_product(
                epilogue, x.values, linear, output, tiling, self._arrived, x.squares, eps, residual,
                gain, squares_out, gelu,
            )  # fmt: skip
            return
        if isinstance(tiling, FragmentTiling):
            assert isinstance(linear.weight, HummingWeight)
            tensors = linear.weight.tensors
            fragment_product(
                epilogue, x.values, tensors["weight"], tensors["weight_scale"],
                tensors.get("zero_point"), linear.bias, output, self._arrived, tiling.warps,
                tiling.splits, x.squares, eps, residual, gain, squares_out, gelu,
            )  # fmt: skip
            return
        tokens, (outputs, inputs) = len(x.values), linear.weight.shape
        splits, width = tiling.splits, tiling.outputs
        weight = linear.weight.operand
        grouped = weight.scales is not None and weight.group < inputs
        if grouped and weight.group != tiling.inputs:
            raise ValueError(f"groups of {weight.group} inputs cannot be tiled as {tiling}")
        operands: tuple[Any, Any] = x.values, weight.codes
        if epilogue == _GATED:
            if splits > 1 or inputs % tiling.inputs:
                raise ValueError(
                    f"a gated product of {inputs} inputs cannot be tiled as {tiling}: give one split, "
                    f"and inputs that divide them"
                )
            outputs, width = outputs // 2, width // 2
        else:
            sizes = tiling.tokens, tiling.outputs
            operands = tuple(
                TensorDescriptor.from_tensor(tensor, [size, tiling.inputs])
                for tensor, size in zip(operands, sizes, strict=True)
            )
        programs = triton.cdiv(tokens, tiling.tokens) * triton.cdiv(outputs, width)
        partial = output
        if splits > 1:
            if programs > MOST_TILES:
                raise ValueError(f"{programs} tiles are too many for {tiling}: give one split")
            partial = torch.empty((splits, tokens, outputs), dtype=torch.float32, device=output.device)
        parts = x.squares.shape[1] if x.squares is not None else 1
        lines = max(1, tiling.warps * 32 // tiling.outputs)  # stretches of each row, one a thread
        stretch = weight.codes.itemsize * tiling.prefetch // lines
        groups = weight.scales.shape[1] if weight.scales is not None else 1
        _linear[(programs, splits)](
            *operands, weight.codes, weight.scales, linear.bias, x.squares, residual, gain, output,
            squares_out, partial, self._arrived, tokens, outputs, inputs, groups, parts, eps, stretch,
            EPILOGUE=epilogue, GELU=gelu, GROUPED=grouped, PAIRS=tiling.warps > 2,
            SCALED=x.squares is not None, BIAS=linear.bias is not None, SPLITS=splits,
            TOKENS=tiling.tokens, OUTPUTS=tiling.outputs, INPUTS=tiling.inputs,
            PARTS=triton.next_power_of_2(parts), SWAP=tiling.swap, LINES=lines, OVERLAP=self._overlap,
            num_warps=tiling.warps, num_stages=tiling.stages, **self._options,
        )  # fmt: skip


def _divided(x: UnscaledRows, eps: float) -> Tensor:
    return x.values if x.squares is None else divide_rows(x.values, x.squares, None, eps)


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    x, weight, weights, scales, bias, squares, residual, gain, output, squares_out, partial, arrived,
    tokens, outputs, inputs, groups, parts, eps, stretch,
    EPILOGUE: tl.constexpr, GELU: tl.constexpr, GROUPED: tl.constexpr, PAIRS: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, PARTS: tl.constexpr, SWAP: tl.constexpr, LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute a tile of a product.

    x, weight: descriptors of their tiles, which the hardware copies; of a gated product pointers,
    because gate and up rows alternate in its tiles. weights: the pointer. scales: of `groups` of a row's
    inputs each, one for a step of the loop, if it is GROUPED, else of whole rows. outputs: the columns
    that are written. stretch: bytes that each thread fetches ahead.
    """
    blocks = tl.cdiv(tokens, TOKENS)
    block = tl.program_id(0) % blocks  # neighbours read the same weights
    tile = tl.program_id(0) // blocks
    share = tl.cdiv(tl.cdiv(inputs, INPUTS), SPLITS) * INPUTS
    first = tl.program_id(1) * share
    stop = tl.minimum(first + share, inputs)
    token = block * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    WIDTH: tl.constexpr = OUTPUTS // 2 if EPILOGUE == _GATED else OUTPUTS
    column = tile * WIDTH + tl.arange(0, WIDTH)
    turn = tl.arange(0, OUTPUTS)
    if EPILOGUE == _GATED:
        row = tl.minimum(tile * WIDTH + turn // 2, outputs - 1) + turn % 2 * outputs
    else:
        row = tl.minimum(tile * OUTPUTS + turn, outputs - 1)
    start = row.to(tl.int64)[:, None] * inputs
    own_scales = scales
    if scales is not None:
        own_scales = scales + row.to(tl.int64) * groups
    SIZE: tl.constexpr = weights.dtype.element_ty.primitive_bitwidth // 8
    if OVERLAP and stretch > 0:
        ahead = tl.minimum(first, inputs - LINES * stretch // SIZE)
        _ask_ahead(weights + start + ahead, stretch, LINES, SIZE)
    scale = 1.0
    if GROUPED:  # a step ahead: nothing else hides how long they take to come
        scale = tl.load(own_scales + first // INPUTS)
    wait(OVERLAP)

    # Ahead of the loop is what the end needs, as far as there are registers for it.
    inside = there[:, None] & (column < outputs)[None, :]
    place = token.to(tl.int64)[:, None] * outputs + column[None, :]
    if SCALED and TOKENS <= _EARLY_TOKENS:
        sums = load_squares(squares, token, tokens, parts, PARTS)
    if EPILOGUE == _ADD and TOKENS <= _EARLY_TOKENS:
        before = tl.load(residual + place, mask=inside, other=0.0)
    if SWAP:
        acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    else:
        acc = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    if EPILOGUE == _GATED:
        step = tl.arange(0, INPUTS)[None, :]
        x_at = x + token.to(tl.int64)[:, None] * inputs + step
        w_at = weight + start + step
        for at in range(0, inputs, INPUTS):
            w, values = tl.load(w_at), tl.load(x_at, mask=there[:, None], other=0.0)
            acc = _product(w, values, acc, scale, GROUPED, SWAP, PAIRS)
            if GROUPED:
                scale = tl.load(own_scales + tl.minimum(at // INPUTS + 1, groups - 1))
            x_at += INPUTS
            w_at += INPUTS
    else:
        for at in range(first, stop, INPUTS):
            w, values = weight.load([tile * OUTPUTS, at]), x.load([block * TOKENS, at])
            acc = _product(w, values, acc, scale, GROUPED, SWAP, PAIRS)
            if GROUPED:
                scale = tl.load(own_scales + tl.minimum(at // INPUTS + 1, groups - 1))
    if SWAP:
        acc = tl.trans(acc)

    last = True
    if SPLITS > 1:
        acc, last = gather(acc, partial, place, inside, arrived, tokens, outputs, SPLITS)
    if last:
        y = acc
        if SCALED:
            if TOKENS > _EARLY_TOKENS:
                sums = load_squares(squares, token, tokens, parts, PARTS)
            y *= tl.rsqrt(tl.sum(sums, 1) / inputs + eps)[:, None]
        if scales is not None and not GROUPED:
            y *= tl.load(own_scales)[None, :]
        if BIAS:
            y += tl.load(bias + row).to(tl.float32)[None, :]
        kind = output.dtype.element_ty
        if EPILOGUE == _GATED:
            gate, up = tl.split(tl.reshape(y, (TOKENS, WIDTH, 2)))
            tl.store(output + place, (opened(gate, GELU) * up).to(kind), mask=inside)
        elif EPILOGUE == _ADD:
            if TOKENS > _EARLY_TOKENS:
                before = tl.load(residual + place, mask=inside, other=0.0)
            rounded = (y + before.to(tl.float32)).to(kind)
            tl.store(residual + place, rounded, mask=inside)
            wide = tl.where(inside, rounded.to(tl.float32), 0.0)
            factor = tl.load(gain + column, mask=column < outputs, other=0.0).to(tl.float32)
            tl.store(output + place, (wide * factor[None, :]).to(kind), mask=inside)
            tiles = tl.cdiv(outputs, OUTPUTS)
            tl.store(squares_out + token * tiles + tile, tl.sum(wide * wide, 1), mask=there)
        else:
            tl.store(output + place, y.to(kind), mask=inside)


@triton.jit
def _product(
    w, values, acc, scale, GROUPED: tl.constexpr, SWAP: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Add the product to acc, multiplied by `scale` [OUTPUTS] if it is GROUPED."""
    w = widened(w, values.dtype, False, PAIRS)
    if GROUPED:
        before = acc
        acc = tl.zeros_like(acc)
    if SWAP:
        total = tl.dot(w, tl.trans(values), acc, input_precision="ieee")
        if GROUPED:
            total = before + total * scale[:, None]
    else:
        total = tl.dot(values, tl.trans(w), acc, input_precision="ieee")
        if GROUPED:
            total = before + total * scale[None, :]
    return total


@triton.jit
def _ask_ahead(rows, stretch, LINES: tl.constexpr, SIZE: tl.constexpr):
    """Fetch the first LINES * stretch bytes at each of rows [R, 1] into the L2 cache."""
    ahead = rows + tl.arange(0, LINES)[None, :] * (stretch // SIZE)
    size = (ahead.to(tl.int64) * 0).to(tl.int32) + stretch
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [ahead.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
