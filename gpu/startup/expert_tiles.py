"""Tiles of the experts' products for many tokens, measured at the first start on a GPU, and kept.

For each range of tokens an expert, several tiles are tried on the served weights, within a minute. A
later start on the same kind of GPU with the same kernels reads the choice. Tiles may differ in rounding,
so the deterministic mode has a tile of its own, which is not measured.
"""

# mypy: disable-error-code="import-untyped, no-untyped-call"

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from ramify.gpu.models.decoder import Decoder
from ramify.gpu.models.experts import Experts, ExpertsBeside
from ramify.gpu.native.kept import CachedCode, folder
from ramify.gpu.ops import triton_experts, triton_experts_many
from ramify.gpu.ops.experts import ExpertTile, LayerExperts
from ramify.gpu.ops.triton_experts import MOST_FEW, ExpertRoutes
from ramify.gpu.ops.triton_experts_many import SERVED_TILES, TileTable, run_many
from ramify.gpu.progress import Progress
from ramify.gpu.startup.compiling import compile_side_by_side

_LOG = logging.getLogger("ramify.gpu.startup")
BUDGET = 60.0  # seconds
_REPEATS = 5
_UNFIT = (TritonError, RuntimeError)  # a tile that a smaller GPU, or its compiler, does not take
# For each entry of the table: pairs of an expert that stand for it, and tiles beside the served one
TRIED: tuple[tuple[int, tuple[ExpertTile, ...]], ...] = (
    (
        12,
        (
            ExpertTile(16, 128, 64, 4, 4),
            ExpertTile(16, 128, 128, 4, 3),
            ExpertTile(16, 64, 256, 4, 3),
            ExpertTile(16, 32, 128, 2, 6),  # of 8-bit floats, which it takes in 0.82 of the time
        ),
    ),
    (
        24,
        (ExpertTile(32, 128, 64, 4, 4), ExpertTile(32, 128, 128, 8, 3), ExpertTile(16, 128, 128, 4, 3)),
    ),
    (64, (ExpertTile(64, 64, 128, 4, 3), ExpertTile(64, 64, 64, 4, 4), ExpertTile(32, 128, 64, 4, 4))),
    (
        256,
        (ExpertTile(128, 128, 64, 8, 4), ExpertTile(128, 64, 64, 4, 4), ExpertTile(64, 128, 64, 4, 4)),
    ),
)

Measure = Callable[[LayerExperts, int], float]
"""Takes a layer and a number of tokens, and measures the seconds."""


class TunedTiles:
    """The tiles of a model's layers, which are set in the layers. `step_tokens`: the most of a step."""

    def __init__(self, model: Decoder, step_tokens: int, place: Path | None = None) -> None:
        self._shapes: dict[tuple[Any, ...], list[LayerExperts]] = {}
        for layer in _layers(model) if model.dtype != torch.float32 else ():  # which has one tile
            self._shapes.setdefault(_shape(layer), []).append(layer)
        self._dtype = model.dtype
        self._step_tokens = step_tokens
        self._device = model.device
        self._place = folder() if place is None else place

    def recall(self) -> bool:
        """Read the tiles that an earlier start kept. Returns whether these were all."""
        for shape, layers in self._shapes.items():
            kept = self._kept(shape)
            table = _decoded(found) if (found := kept.read()) is not None else None
            if table is None and kept.exists:
                _LOG.warning("the tiles kept in %s are damaged: they are measured again", self._place)
            for layer in layers:
                layer.tiles = table
        return all(layers[0].tiles is not None for layers in self._shapes.values())

    def tune(self, measure: Measure, clock: Callable[[], float], end: float) -> None:
        """Measure the tiles that are not known, until `end`, and keep them."""
        for shape, layers in self._shapes.items():
            if layers[0].tiles is not None:
                continue
            table = list(SERVED_TILES)
            for number, one, tokens, tiles in self._trials(layers[0]):
                times = {tile: measure(with_tile(one, tile), tokens) for tile in tiles if clock() < end}
                if times:  # the first one of equal ones
                    table[number] = table[number][0], min(times, key=lambda tile: times[tile])
            for layer in layers:
                layer.tiles = tuple(table)
            if clock() < end:  # all of them were measured
                self._kept(shape).write(json.dumps([astuple(tile) for _, tile in table]).encode())

    def launch(self) -> None:
        """Launch every kernel that `tune` measures."""
        for layers in self._shapes.values():
            for _, one, tokens, tiles in self._trials(layers[0]):
                for tile in tiles if one.tiles is None else ():
                    run_many(*drawn(with_tile(one, tile), tokens, self._dtype))

    def _trials(
        self, one: LayerExperts
    ) -> Iterator[tuple[int, LayerExperts, int, tuple[ExpertTile, ...]]]:
        """Yield for each entry of the table: number, layer, tokens, and the served tile with others."""
        for number, (pairs, tiles) in enumerate(TRIED):
            tokens = -(-pairs * one.experts // one.settings.top)
            if MOST_FEW < tokens <= self._step_tokens:
                yield number, one, tokens, (SERVED_TILES[number][1], *tiles)

    def _kept(self, shape: tuple[Any, ...]) -> CachedCode:
        """Find where the tiles of a shape are kept: by GPU, kernels, and the version of Triton."""
        name = "none" if self._device.type != "cuda" else torch.cuda.get_device_name(self._device)
        files = (triton_experts.__file__, triton_experts_many.__file__)
        source = "".join(Path(file).read_text(encoding="utf-8") for file in files)
        tried = str((TRIED, SERVED_TILES, self._step_tokens))
        return CachedCode(["tiles", name, triton.__version__, source, tried, str(shape)], self._place)


def tune_experts(model: Decoder, step_tokens: int, progress: Progress) -> None:
    """Give a model's experts the tiles that an earlier start kept, or measure them."""
    tiles, begin = TunedTiles(model, step_tokens), time.monotonic()
    if tiles.recall():
        return
    progress("measuring the tiles of experts: up to a minute, once", 0.0)
    with suppress(*_UNFIT):  # that tile is not taken, either
        compile_side_by_side(tiles.launch, model.device)
    tiles.tune(partial(timed, dtype=model.dtype), time.monotonic, begin + BUDGET)
    torch.cuda.empty_cache()
    _LOG.info("measured the tiles of experts in %.1f s", time.monotonic() - begin)


def with_tile(one: LayerExperts, tile: ExpertTile) -> LayerExperts:
    return replace(one, shared=None, tiles=((1 << 62, tile),))


@torch.inference_mode()
def drawn(
    one: LayerExperts, tokens: int, dtype: torch.dtype
) -> tuple[Tensor, LayerExperts, ExpertRoutes, None, bool]:
    """Draw random arguments of `run_many`: rows, and the experts that they choose."""
    device = one.down.weight.operand.codes.device
    x = torch.randn((tokens, one.gate_up.weight.shape[1]), device=device).to(dtype)
    scores = torch.rand((tokens, one.experts), device=device)
    chosen = scores.topk(one.settings.top, dim=-1).indices.int()
    counts = torch.full(chosen.shape, 1 / one.settings.top, device=device)
    return x, one, ExpertRoutes(chosen, counts), None, False


@torch.inference_mode()
def timed(one: LayerExperts, tokens: int, dtype: torch.dtype) -> float:
    """Measure the median of seconds; infinite where the GPU does not take the tile."""
    given = drawn(one, tokens, dtype)
    times: list[float] = []
    try:
        for _ in range(_REPEATS + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run_many(*given)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    except _UNFIT:
        return float("inf")
    return sorted(times[2:])[_REPEATS // 2]


def _layers(model: Decoder) -> Iterable[LayerExperts]:
    for layer in model.layers:
        one = layer.feed_forward
        if isinstance(one, ExpertsBeside):
            one = one.experts
        if isinstance(one, Experts):
            yield one.layer


def _shape(one: LayerExperts) -> tuple[Any, ...]:
    weight = one.down.weight.operand
    form = *weight.codes.shape, str(weight.codes.dtype), weight.group
    return one.experts, one.settings.top, *form, one.activation


def _decoded(found: bytes) -> TileTable | None:
    """Decode the table that was kept; None: it is damaged, or holds a tile that is not tried."""
    try:
        rows = [ExpertTile(*row) for row in json.loads(found)]
    except (ValueError, TypeError):
        return None
    known = [{served, *tiles} for (_, served), (_, tiles) in zip(SERVED_TILES, TRIED, strict=True)]
    if len(rows) != len(known) or any(row not in each for row, each in zip(rows, known, strict=True)):
        return None
    return tuple((most, row) for (most, _), row in zip(SERVED_TILES, rows, strict=True))
