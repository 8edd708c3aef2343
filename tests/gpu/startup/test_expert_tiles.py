"""Tiles of experts: the fastest are taken and kept, within the time, and never in deterministic mode."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from ramify.gpu.models.experts import Experts  # noqa: E402
from ramify.gpu.ops.experts import ExpertTile, LayerExperts, RouterSettings  # noqa: E402
from ramify.gpu.ops.linear.base import plain  # noqa: E402
from ramify.gpu.ops.linear.fp8 import Fp8Weight  # noqa: E402
from ramify.gpu.ops.triton_experts_many import SERVED_TILES, tile_for  # noqa: E402
from ramify.gpu.startup.expert_tiles import TRIED, TunedTiles, drawn  # noqa: E402

NUMBER = 8


def layer(size: int = 4) -> LayerExperts:
    up = replace(plain(torch.zeros(NUMBER * 2 * size, 16, dtype=torch.bfloat16)), stacked=NUMBER)
    down = replace(plain(torch.zeros(NUMBER * 16, size, dtype=torch.bfloat16)), stacked=NUMBER)
    return LayerExperts(plain(torch.zeros(NUMBER, 16)), None, up, down, None, RouterSettings(2), "silu")


def model(*layers: LayerExperts) -> Any:
    parts = [SimpleNamespace(feed_forward=Experts(None, one, 4, 16, None)) for one in layers]
    return SimpleNamespace(
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        layers=[SimpleNamespace(feed_forward=None), *parts],
    )


def widest(one: LayerExperts, tokens: int) -> float:
    """As if more columns were faster."""
    assert one.tiles is not None
    return 1 / one.tiles[0][1].columns


def zero() -> float:
    return 0.0


def test_the_fastest_is_taken_and_kept(tmp_path: Path) -> None:
    first, second, third = layer(), layer(), layer(8)
    tiles = TunedTiles(model(first, second, third), 1 << 20, tmp_path / "kept")
    assert not tiles.recall()
    tried: list[int] = []

    def measure(one: LayerExperts, tokens: int) -> float:
        tried.append(tokens)
        return widest(one, tokens)

    tiles.tune(measure, zero, 60.0)
    assert first.tiles is not None
    assert first.tiles == second.tiles == third.tiles  # equal layers are measured once
    assert len(tried) == 2 * sum(1 + len(others) for _, others in TRIED)
    for (_, tile), (most, served), (pairs, others) in zip(first.tiles, SERVED_TILES, TRIED, strict=True):
        assert tile.columns == max(each.columns for each in (served, *others))
        assert tile_for(pairs * NUMBER, NUMBER, torch.bfloat16, False, first.tiles) == tile
        assert pairs <= most
    again = layer()
    assert TunedTiles(model(again), 1 << 20, tmp_path / "kept").recall()
    assert again.tiles == first.tiles
    assert not TunedTiles(model(layer()), 512, tmp_path / "kept").recall()  # steps of another size


def test_no_measurement_changes_deterministic_steps() -> None:
    odd = ((1 << 62, ExpertTile(16, 16, 16, 1, 1)),)
    for dtype, invariant in ((torch.bfloat16, True), (torch.float32, False), (torch.float32, True)):
        assert tile_for(64, NUMBER, dtype, invariant, odd) == tile_for(64, NUMBER, dtype, invariant)


def test_what_takes_too_long_is_served_as_before(tmp_path: Path) -> None:
    """And is not kept: the next start tries again."""
    one, clock = layer(), iter(range(100))
    tiles = TunedTiles(model(one), 1 << 20, tmp_path / "kept")
    tiles.tune(widest, lambda: float(next(clock)), 4.0)
    assert one.tiles is not None
    assert one.tiles[0] != SERVED_TILES[0]
    assert one.tiles[1:] == SERVED_TILES[1:]
    assert not TunedTiles(model(layer()), 1 << 20, tmp_path / "kept").recall()


def test_steps_that_cannot_be_are_not_measured(tmp_path: Path) -> None:
    one = layer()
    TunedTiles(model(one), 64, tmp_path / "kept").tune(widest, zero, 60.0)
    assert one.tiles is not None
    assert one.tiles[1:] == SERVED_TILES[1:]  # 24 pairs an expert are 96 tokens


def test_a_damaged_file_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "kept"
    TunedTiles(model(layer()), 1 << 20, place).tune(widest, zero, 60.0)
    (kept,) = place.iterdir()
    kept.write_bytes(kept.read_bytes()[:-3])
    with caplog.at_level(logging.WARNING, "ramify.gpu.startup"):
        assert not TunedTiles(model(layer()), 1 << 20, place).recall()
    assert "are damaged: they are measured again" in caplog.text


def test_weights_of_codes_are_measured_too(tmp_path: Path) -> None:
    """In float32 there is one tile, and nothing to measure."""
    one = layer()
    for linear in (one.gate_up, one.down):
        outputs, inputs = linear.weight.shape
        linear.weight = Fp8Weight(
            torch.zeros(outputs, inputs).to(torch.float8_e4m3fn), torch.ones(outputs, 1)
        )
    TunedTiles(model(one), 1 << 20, tmp_path / "kept").tune(widest, zero, 60.0)
    assert one.tiles is not None
    x, *_ = drawn(one, 20, torch.bfloat16)
    assert (x.shape, x.dtype) == ((20, 16), torch.bfloat16)
    exact = model(layer())
    exact.dtype = torch.float32
    assert TunedTiles(exact, 1 << 20, tmp_path / "other").recall()


def test_nothing_is_kept_without_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one = layer()
    TunedTiles(model(one), 1 << 20, tmp_path / "file").tune(widest, zero, 60.0)
    assert one.tiles is not None
