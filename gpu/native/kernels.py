"""The kernels of a model, each compiled once for all models, and instructions that run them on tensors.

This file knows which argument of a kernel is which tensor, not what a model is made of.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ramify.gpu.native import (
    attention,
    attention_wide,
    embedding,
    experts,
    linear,
    matrices,
    rotary,
    rows,
    sampling,
)
from ramify.gpu.native.grouped import GROUP, OFFSETS, Grouping, PackedGroups, emit_grouped
from ramify.gpu.native.host import Isa, MachineCode, compiled
from ramify.gpu.native.ir import F16, F32, LANES, Module
from ramify.gpu.native.linear import PackedWeight
from ramify.gpu.native.packer import FLOAT_KINDS
from ramify.gpu.native.threads import Instruction, Words, aligned

Array = npt.NDArray[Any]
Packed = PackedWeight | PackedGroups
Grouped = tuple[tuple[str, Grouping], ...]
"""The epilogues of products with weights in groups, and the groupings."""

_KINDS = {torch.float32: F32, torch.float16: F16}


@dataclass(slots=True)
class DrawArrays:
    """The sampling of each line: temperature, number in [0, 1), cuts; and the token, or -1."""

    temperatures: npt.NDArray[np.float32]  # 0: the best token
    uniforms: npt.NDArray[np.float64]
    tokens: Words
    top_k: Words = field(init=False)  # 0: off
    top_p: npt.NDArray[np.float64] = field(init=False)  # 1: off
    floors: npt.NDArray[np.float32] = field(init=False)  # log of min_p, -infinity: off

    def __post_init__(self) -> None:
        lines = len(self.tokens)
        self.top_k, self.top_p = np.zeros(lines, dtype=np.int64), np.ones(lines)
        self.floors = np.full(lines, -np.inf, dtype=np.float32)


@dataclass(slots=True)
class Quantised:
    """Activations as 8-bit integers: values uint8 [rows, padded size], scales float32 [rows].

    For weights in groups the bytes are signed, with the sums of each 32: int32 [rows, groups].
    """

    values: Tensor
    scales: Tensor
    sums: Tensor | None = None


def empty_quantised(count: int, size: int, isa: Isa, grouped: bool = False) -> Quantised:
    """Allocate `count` rows. Padding counts nothing: its weights are 0, or, in groups, it is 0."""
    padded, room = linear.padded_inputs(size), count
    if isa.matrices and not grouped:  # rows that are read and do not count
        room = -(-count // matrices.ROOM) * matrices.ROOM
    values = torch.zeros((room, padded), dtype=torch.uint8)[:count]
    sums = torch.zeros((count, padded // GROUP), dtype=torch.int32) if grouped else None
    return Quantised(values, torch.zeros(count), sums)


@dataclass(slots=True)
class RoutedTokens:
    """The routes of a step's tokens, for one layer after another. `pair_count`, `most_tiles`: see
    `of_tokens`; the kernels write the others."""

    logits: Tensor  # float32[T, experts, padded]
    chosen: Tensor  # int64[T, top]
    weights: Tensor  # float32[T, top]
    beside: Tensor  # float32[T]: the weight of the shared expert
    starts: Tensor  # int64[experts]
    pairs: Tensor  # int64[T * top]
    tiles: Tensor  # int64: see `native.experts`
    experts: int
    once: Words  # 1
    pair_count: Words
    most_tiles: Words

    def of_tokens(self, count: int) -> None:
        """Prepare for a step of so many tokens."""
        top = self.chosen.shape[1]
        self.pair_count[0] = count * top
        self.most_tiles[0] = experts.most_tiles(count, top, self.experts)


def empty_routed(tokens: int, top: int, number: int) -> RoutedTokens:
    """Allocate routes of up to so many tokens."""
    once = aligned(1)
    once[0] = 1
    most = experts.most_tiles(tokens, top, number)
    return RoutedTokens(
        torch.zeros(tokens, number + 1), torch.zeros((tokens, top), dtype=torch.int64),
        torch.zeros(tokens, top), torch.zeros(tokens), torch.zeros(number, dtype=torch.int64),
        torch.zeros(tokens * top, dtype=torch.int64),
        torch.zeros(1 + experts.TILE_WORDS * most, dtype=torch.int64), number, once, aligned(1),
        aligned(1),
    )  # fmt: skip


class Kernels:
    """Maker of instructions, for heads of size `dim` and a KV pool of `dtype`.

    `endings`: epilogues of products, see `linear`; `grouped`: of those with weights in groups.
    Each kernel is a module of its own: models that share it compile it once.
    `table`: the form of the embedding, see `embedding`.
    """

    def __init__(
        self, isa: Isa, dim: int, dtype: torch.dtype, endings: Sequence[str], grouped: Grouped = (),
        table: Grouping | str = "F32",
    ) -> None:  # fmt: skip
        self.isa = isa
        kind = _KINDS[dtype]
        self._codes: dict[str, MachineCode] = {}  # by the names of their functions
        self._compile("norm_add", "", rows.emit_norm_add)
        self._compile("choose", "", sampling.emit_choose)
        self._compile(f"rotary_{dim}", dtype, partial(rotary.emit_rotary, dim=dim, kind=kind))
        wide = isa.registers >= 32
        self.tile_rows = attention_wide.WIDE_ROWS if wide else attention.MOST_ROWS
        attend = attention_wide.emit_attention_wide if wide else attention.emit_attention
        self._compile(f"attention_{dim}", (dtype, wide), partial(attend, dim=dim, kind=kind))
        embed = partial(embedding.emit_embed, isa=isa, table=table)
        self._compile(embedding.kernel_name(table), isa, embed)
        products: list[tuple[str, Grouping | None]] = [*((end, None) for end in endings), *grouped]
        for end, grouping in products:
            product = partial(_emit_product, isa=isa, end=end, grouping=grouping)
            self._compile(_product_name(end, grouping), isa, product)
        for signed in sorted({grouping is not None for _, grouping in products}):
            for normed in (False, True):
                quantise = partial(rows.emit_quantise, isa=isa, normed=normed, grouped=signed)
                self._compile(rows.quantise_name(normed, signed), isa, quantise)
        if any(end.startswith(experts.OF) for end, _ in products):
            self._compile("router route sort_pairs sum_experts", "", experts.emit_routing)
        self._dim = dim

    def _compile(self, names: str, depends: object, write: Callable[[Module], object]) -> None:
        """Compile the functions of a module. `depends`: what their code depends on besides `names`."""
        self._codes |= dict.fromkeys(names.split(), compiled(f"{names} {depends}", write))

    def embed(
        self, count: Words, ids: Words, table: PackedGroups | Tensor, scale: float, target: Tensor
    ) -> Instruction:
        """Set target[i] to row ids[i] of the table * scale."""
        given: dict[int, Tensor | Array | float] = {
            embedding.IDS: ids, embedding.TARGET: target, embedding.WIDTH: target.shape[1],
            embedding.EMBED_SCALE: scale,
        }  # fmt: skip
        if isinstance(table, Tensor):
            given |= {embedding.TABLE: table}
        else:
            given |= {embedding.TABLE: table.panels, embedding.SCALES: table.scales,
                      embedding.OFFSETS: 0 if table.offsets is None else table.offsets,
                      embedding.GROUPS: table.inputs // GROUP}  # fmt: skip
        args = _args(embedding.GROUPS + 1, given)
        name = embedding.kernel_name(table_kind(table))
        return self._instruction(name, count, args, (ids, table, target))

    def quantise(
        self, count: Words, source: Tensor, size: int, target: Quantised,
        norm: tuple[Tensor, float] | None = None, lines: Words | None = None,
    ) -> Instruction:  # fmt: skip
        """Quantise rows of `source` (those of `lines`), normed with weight and eps, to 8 bits."""
        sums = target.sums
        args = _args(rows.GROUP_SUMS_STRIDE + 1, {
            rows.ROWS_IN: source, rows.IN_STRIDE: source.stride(0), rows.SIZE: size,
            rows.NORM: 0 if norm is None else norm[0], rows.EPS: 0.0 if norm is None else norm[1],
            rows.QUANTISED: target.values, rows.Q_STRIDE: target.values.stride(0),
            rows.SCALES: target.scales, rows.LINES: 0 if lines is None else lines,
            rows.GROUP_SUMS: 0 if sums is None else sums,
            rows.GROUP_SUMS_STRIDE: 0 if sums is None else sums.stride(0),
        })  # fmt: skip
        name = rows.quantise_name(norm is not None, sums is not None)
        return self._instruction(name, count, args, (source, norm, target, lines))

    def norm_add(
        self, count: Words, source: Tensor, norm: tuple[Tensor, float] | None, target: Tensor
    ) -> Instruction:
        """Add norm(source[i]) to target[i]."""
        args = _args(rows.ADDED + 1, {
            rows.ROWS_IN: source, rows.IN_STRIDE: source.stride(0), rows.SIZE: target.shape[1],
            rows.NORM: 0 if norm is None else norm[0], rows.EPS: 0.0 if norm is None else norm[1],
            rows.ADDED: target,
        })  # fmt: skip
        return self._instruction("norm_add", count, args, (source, norm, target))

    def linear(
        self, count: Words, x: Quantised, weight: Packed, out: Tensor, end: str, cap: float = 0.0
    ) -> Instruction:
        """Compute out = x W^T, with epilogue `end`: "store", "add", "softcap", or a gated activation."""
        given = _product(x, weight, out) | {linear.ROWS: count, linear.CAP: cap}
        name, args = _product_name(end, _grouping(weight)), _args(linear.GROUP_SUMS_STRIDE + 1, given)
        one = self._instruction(name, count, args, (x, weight, out))
        one.block, one.items = linear.ROW_BLOCK, weight.outputs // linear.PANEL
        return one

    def route(
        self, count: Words, x: Tensor, norm: tuple[Tensor, float] | None, router: Tensor,
        correction: Tensor | None, to: RoutedTokens, flags: int, scale: float,
    ) -> list[Instruction]:  # fmt: skip
        """Choose the experts of each row of x, in `to`. router float32[experts (and a gate), size]."""
        given: dict[int, Tensor | Array | float] = {
            experts.ROWS_IN: x, experts.IN_STRIDE: x.stride(0), experts.SIZE: router.shape[1],
            experts.NORM: 0 if norm is None else norm[0], experts.EPS: 0.0 if norm is None else norm[1],
            experts.ROUTER: router, experts.EXPERTS: len(router), experts.LOGITS: to.logits,
            experts.LOGITS_STRIDE: to.logits.stride(0),
        }  # fmt: skip
        keep = (x, norm, router, correction, to)
        scores = self._instruction("router", count, _args(experts.CORRECTION, given), keep)
        scores.items = -(-len(router) // LANES)
        given |= {
            experts.EXPERTS: len(router) - bool(flags & experts.SHARED_GATE),
            experts.CORRECTION: 0 if correction is None else correction,
            experts.MANY: to.chosen.shape[1], experts.CHOSEN: to.chosen, experts.WEIGHTS: to.weights,
            experts.SCALE: scale, experts.FLAGS: flags, experts.BESIDE: to.beside,
        }  # fmt: skip
        best = self._instruction("route", count, _args(experts.BESIDE + 1, given), keep)
        order = _args(experts.S_TILES + 1, {
            experts.S_CHOSEN: to.chosen, experts.S_TOKENS: count, experts.S_TOP: to.chosen.shape[1],
            experts.S_EXPERTS: given[experts.EXPERTS], experts.S_STARTS: to.starts,
            experts.S_PAIRS: to.pairs, experts.S_TILES: to.tiles,
        })  # fmt: skip
        return [scores, best, self._instruction("sort_pairs", to.once, order, (to, count))]

    def of_experts(
        self, x: Quantised, weight: Packed, to: RoutedTokens, number: int, out: Tensor, end: str
    ) -> Instruction:
        """Multiply by `number` experts, stacked in the weight.

        `end`: an activation: tokens' rows -> rows in the experts' order; "weigh": these -> pairs' rows.
        """
        panels = weight.outputs // linear.PANEL // number
        counts = to.weights if end == linear.WEIGHED else to.chosen.shape[1]
        given = _product(x, weight, out) | {
            linear.TILES: to.tiles, linear.PAIRS: to.pairs, linear.TOP: counts, linear.PANELS: panels,
        }  # fmt: skip
        name = experts.product_name(end, _grouping(weight))
        args = _args(linear.PANELS + 1, given)
        one = self._instruction(name, to.most_tiles, args, (x, weight, out, to))
        one.items = panels
        return one

    def sum_experts(
        self, count: Words, added: Tensor, to: RoutedTokens, shared: Tensor | None, out: Tensor
    ) -> Instruction:
        """Set out[i] to the sum of the rows of its experts, and of the shared expert's row."""
        args = _args(experts.OPENED + 1, {
            experts.ADDED: added, experts.ADDED_STRIDE: added.stride(0),
            experts.SUM_TOP: to.chosen.shape[1], experts.TARGET: out,
            experts.TARGET_STRIDE: out.stride(0), experts.WIDTH: out.shape[1],
            experts.SHARED_ROWS: 0 if shared is None else shared,
            experts.SHARED_STRIDE: 0 if shared is None else shared.stride(0),
            experts.OPENED: to.beside,
        })  # fmt: skip
        return self._instruction("sum_experts", count, args, (added, to, shared, out))

    def rotate(
        self, count: Words, qkv: Tensor, positions: Words, slots: Words, angles: tuple[Tensor, Tensor],
        pool: tuple[Tensor, Tensor], heads: tuple[int, int],
        norms: tuple[Tensor, Tensor, float] | None, wide: bool = False,
    ) -> Instruction:  # fmt: skip
        """Rotate q in place; k, rotated, and v go to the pool. `wide`: norms are over all heads."""
        args = _args(rotary.WIDE + 1, {
            rotary.QKV: qkv, rotary.QKV_STRIDE: qkv.stride(0), rotary.POSITIONS: positions,
            rotary.SLOTS: slots, rotary.COS: angles[0], rotary.SIN: angles[1],
            rotary.KEYS: pool[0], rotary.VALUES: pool[1],
            rotary.HEADS: heads[0], rotary.KV_HEADS: heads[1],
            rotary.Q_NORM: 0 if norms is None else norms[0],
            rotary.K_NORM: 0 if norms is None else norms[1],
            rotary.EPS: 0.0 if norms is None else norms[2], rotary.WIDE: int(wide),
        })  # fmt: skip
        keep = (qkv, positions, slots, angles, pool, norms)
        return self._instruction(f"rotary_{self._dim}", count, args, keep)

    def attend(
        self, count: Words, tiles: Words, q: Tensor, pool: tuple[Tensor, Tensor], out: Tensor,
        heads: tuple[int, int], page_size: int, scale: float, softcap: float | None,
        window: int | None, sinks: Tensor | None,
    ) -> Instruction:  # fmt: skip
        """Attend for `count[0]` tiles; `tiles` int64 [.., TILE_WORDS]."""
        args = _args(attention.SINKS + 1, {
            attention.Q: q, attention.Q_STRIDE: q.stride(0), attention.KEYS: pool[0],
            attention.VALUES: pool[1], attention.OUT: out, attention.OUT_STRIDE: out.stride(0),
            attention.HEADS: heads[0], attention.KV_HEADS: heads[1],
            attention.PAGE_SHIFT: page_size.bit_length() - 1, attention.TILES: tiles,
            attention.SCALE: scale, attention.SOFTCAP: 0 if softcap is None else softcap,
            attention.WINDOW: 1 << 40 if window is None else window,
            attention.SINKS: 0 if sinks is None else sinks,
        })  # fmt: skip
        keep = (tiles, q, pool, out, sinks)
        one = self._instruction(f"attention_{self._dim}", count, args, keep)
        one.items = one.together = heads[1]
        return one

    def choose(self, count: Words, logits: Tensor, draws: DrawArrays, bad: int = -1) -> Instruction:
        """Set draws.tokens[i] to the best of logits[i], or a drawn one; `bad`: they are not finite."""
        args = _args(sampling.BAD + 1, {
            sampling.LOGITS: logits, sampling.STRIDE: logits.stride(0), sampling.SIZE: logits.shape[1],
            sampling.TEMPERATURES: draws.temperatures, sampling.UNIFORMS: draws.uniforms,
            sampling.TOP_K: draws.top_k, sampling.TOP_P: draws.top_p, sampling.FLOORS: draws.floors,
            sampling.TOKENS: draws.tokens, sampling.BAD: bad,
        })  # fmt: skip
        return self._instruction("choose", count, args, (logits, draws))

    def _instruction(self, name: str, count: Words, args: list[int], keep: object) -> Instruction:
        return Instruction(self._codes[name].address(name), count, args, keep=keep)


def _product(x: Quantised, weight: Packed, out: Tensor) -> "dict[int, Tensor | Array | float]":
    """Collect the arguments that every product has."""
    given: dict[int, Tensor | Array | float] = {
        linear.X: x.values, linear.X_STRIDE: x.values.stride(0), linear.SCALES: x.scales,
        linear.WEIGHT: weight.panels, linear.WEIGHT_SCALES: weight.scales,
        linear.BIAS: 0 if weight.bias is None else weight.bias,
        linear.OUT: out, linear.OUT_STRIDE: out.stride(0),
    }  # fmt: skip
    if not isinstance(weight, PackedGroups):
        return given | {linear.STEPS: weight.inputs // 4, linear.SUMS: weight.sums}
    if x.sums is None:
        raise ValueError("weights in groups need the activations' sums")
    return given | {
        linear.STEPS: weight.inputs // GROUP, linear.GROUP_SUMS: x.sums,
        linear.GROUP_SUMS_STRIDE: x.sums.stride(0),
        OFFSETS: 0 if weight.offsets is None else weight.offsets,
    }  # fmt: skip


def table_kind(table: PackedGroups | Tensor) -> Grouping | str:
    """Name a table's form as `emit_embed` does."""
    return FLOAT_KINDS[table.dtype] if isinstance(table, Tensor) else table.grouping


def _grouping(weight: Packed) -> Grouping | None:
    return weight.grouping if isinstance(weight, PackedGroups) else None


def _product_name(end: str, grouping: Grouping | None) -> str:
    if end.startswith(experts.OF):
        return experts.product_name(end.removeprefix(experts.OF), grouping)
    return f"linear{'' if grouping is None else grouping.name}_{end}"


def _emit_product(module: Module, isa: Isa, end: str, grouping: Grouping | None) -> None:
    if end.startswith(experts.OF):
        experts.emit_product(module, isa, end.removeprefix(experts.OF), grouping)
    elif grouping is None:
        linear.emit_linear(module, isa, end)
    else:
        emit_grouped(module, isa, grouping, end)


def _args(count: int, given: "dict[int, Tensor | Array | float]") -> list[int]:
    """Convert arguments to words: addresses of tensors and arrays, whole numbers, bits of floats."""
    args = [0] * count
    for index, value in given.items():
        if isinstance(value, Tensor):
            args[index] = value.data_ptr()
        elif isinstance(value, int):
            args[index] = value
        elif isinstance(value, float):
            args[index] = int.from_bytes(struct.pack("<f", value), "little")
        else:
            args[index] = value.ctypes.data
    return args
