"""What is kept of pictures: the tower beside the steps, and who gets which picture."""

import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from ramify.gpu.step.rows import PlanError
from ramify.gpu.vision.pictures import Pictures
from ramify.protocol.pictures import Picture, PictureLook, PictureSettings, PlacedPicture
from ramify.protocol.plan import PicturesSeen, StepPlan

SETTINGS = PictureSettings(
    patch=4, unit=8, least=512, most=4096, mean=(0.5,) * 3, std=(0.5,) * 3, before=(), after=(),
    token=9, model="test",
)  # fmt: skip
TOKENS, WIDTH = 8, 3


class Tower:
    """Says of each token of a picture what its first pixel is, once it may run. Of black it fails."""

    class settings:
        frames, width, turned = 2, WIDTH, True

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self) -> None:
        self.may, self.runs, self.layers_run = threading.Event(), 0, 0
        self.may.set()

    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        assert self.may.wait(10)
        self.runs += len(patches)
        self.layers_run += 1
        if float(patches[0, 0, 0]) == -1:
            raise RuntimeError("it is black")
        return patches[:, :1, None, :1].expand(-1, rows * columns // 4, 1, WIDTH).clone()


def look(shade: int) -> PictureLook:
    return PictureLook(bytes([shade]) * 32, Picture(32, 16, bytes([shade]) * (3 * 32 * 16)))


def placed(shade: int, start: int = 0) -> PlacedPicture:
    return PlacedPicture(start, 2, 4, look(shade).key)


def plan(*shades: int, unseen: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(1, looks=[look(each) for each in shades], unseen=[look(each).key for each in unseen])


def shade(pictures: Pictures, *placed: PlacedPicture) -> list[int]:
    """What the tokens of these pictures, one after the other, are."""
    rows = np.zeros(TOKENS * len(placed), np.int32)
    shown = pictures.shown(rows, np.arange(len(rows), dtype=np.int32), {0: list(placed)})
    assert shown is not None
    assert shown.lines.tolist() == list(range(len(rows)))
    return ((shown.values[:, 0, 0] * 0.5 + 0.5) * 255).round().int().tolist()


def wait(pictures: Pictures) -> PicturesSeen:
    """All news until the tower has nothing to do."""
    found, failed, why = list[bytes](), list[bytes](), ""
    end = time.monotonic() + 10
    while pictures.busy:
        assert time.monotonic() < end
        if (seen := pictures.seen()) is not None:
            found += seen.keys
            failed += seen.failed
            why = why or seen.reason
        time.sleep(0.0005)
    return PicturesSeen(found, failed, why, seen.layers if seen else 0)


@pytest.fixture
def tower() -> Tower:
    return Tower()


@pytest.fixture
def pictures(tower: Tower) -> Iterator[Any]:
    made = Pictures(cast(Any, tower), SETTINGS)
    yield made
    tower.may.set()
    made.close()


def test_steps_go_on_while_the_tower_runs(tower: Tower, pictures: Pictures) -> None:
    pictures.take(plan(7))
    assert wait(pictures).keys == [look(7).key]
    tower.may.clear()
    pictures.take(plan(1, 2))
    assert pictures.busy
    assert pictures.seen() is None
    assert shade(pictures, placed(7)) == [7] * TOKENS  # its step waits for nobody
    with pytest.raises(PlanError, match="not kept"):
        shade(pictures, placed(1))
    tower.may.set()
    assert sorted(wait(pictures).keys) == [look(1).key, look(2).key]
    assert shade(pictures, placed(1), placed(2, TOKENS)) == [1] * TOKENS + [2] * TOKENS


def test_a_picture_is_forgotten_and_seen_again(tower: Tower, pictures: Pictures) -> None:
    """Each is what it was, however often it was forgotten."""
    kept, draw = set[int](), np.random.default_rng(3)
    for number in draw.integers(10, 15, 60).tolist():
        if number in kept:
            assert shade(pictures, placed(number)) == [number] * TOKENS
            pictures.take(plan(unseen=(number,)))
            kept.remove(number)
        else:
            pictures.take(plan(number))
            assert wait(pictures).keys == [look(number).key]
            kept.add(number)
    for number in set(range(10, 15)) - kept:
        with pytest.raises(PlanError, match="not kept"):
            shade(pictures, placed(number))
    assert tower.runs > 20


def test_a_plan_that_contradicts_itself(tower: Tower, pictures: Pictures) -> None:
    with pytest.raises(PlanError, match="forgets"):
        pictures.take(plan(unseen=(3,)))
    pictures.take(plan(3))
    with pytest.raises(PlanError, match="twice"):
        pictures.take(plan(3))
    wait(pictures)
    with pytest.raises(PlanError, match="twice"):
        pictures.take(plan(3))
    pictures.take(plan(3, unseen=(3,)))  # it was forgotten before


def test_what_the_tower_raises_is_told_of_its_pictures_alone(tower: Tower, pictures: Pictures) -> None:
    pictures.take(plan(0, 5))
    assert wait(pictures) == PicturesSeen([look(5).key], [look(0).key], "RuntimeError: it is black", 2)
    assert shade(pictures, placed(5)) == [5] * TOKENS
    pictures.take(plan(0))  # it may be tried again
    assert wait(pictures).failed == [look(0).key]


def test_signs_of_life(tower: Tower, pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a second, while the tower runs."""
    now = [0.0]
    monkeypatch.setattr("ramify.gpu.vision.pictures.time.monotonic", lambda: now[0])
    tower.may.clear()
    pictures.take(plan(1))
    said = []
    for now[0] in (0.5, 1.1, 1.5, 2.2):
        said.append(pictures.seen())
    assert said == [None, PicturesSeen(), None, PicturesSeen()]  # one that hangs counts no layers
    tower.layers_run, now[0] = 3, 3.3
    assert pictures.seen() == PicturesSeen(layers=3)


def test_it_can_be_closed_and_used_again(tower: Tower, pictures: Pictures) -> None:
    pictures.take(plan(1))
    wait(pictures)
    pictures.close()
    pictures.take(plan(1))
    assert wait(pictures).keys == [look(1).key]
    assert shade(pictures, placed(1)) == [1] * TOKENS
