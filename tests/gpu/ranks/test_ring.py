"""One writer, several readers, memory that wraps around."""

import random
import threading
from typing import Any

import pytest

from ramify.gpu.ranks import ring
from ramify.gpu.ranks.ring import GroupMemory, StepRing
from tests.gpu.ranked import own_place


@pytest.fixture(params=[False, True], ids=["sleeping", "looking"])
def rings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ring, "RING_BYTES", 4096)
    with GroupMemory(3) as memory:
        made = [StepRing(own_place(place), spins=request.param) for place in memory.places]
    yield made
    for one in made:
        one.close()
        one.close()


def test_each_reader_gets_each_message_in_order(rings: Any) -> None:
    """More than fits at once: the writer waits for the slower reader."""
    dice = random.Random(1)
    sent = [dice.randbytes(dice.randrange(2000)) for _ in range(200)]
    writer = threading.Thread(target=lambda: [rings[0].put(message) for message in sent])
    writer.start()
    first = [rings[1].take(10) for _ in range(1)]
    second = []
    for _ in sent:
        second.append(rings[2].take(10))
        if len(first) < len(sent):
            first.append(rings[1].take(10))
    writer.join(10)
    assert first == second == sent


def test_a_reader_waits_no_longer_than_it_says(rings: Any) -> None:
    assert rings[1].take(0.01) is None
    rings[0].put(b"")
    assert (rings[1].take(1), rings[2].take(1)) == (b"", b"")


def test_what_never_fits_is_refused(rings: Any) -> None:
    with pytest.raises(ValueError, match="for a ring of 4096"):
        rings[0].put(bytes(2048))
