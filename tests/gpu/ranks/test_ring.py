"""One writer, several readers, memory that wraps around."""

import random
import statistics
import struct
import threading
import time
from typing import Any

import pytest

from ramify.gpu.ranks import ring
from ramify.gpu.ranks.ring import GroupMemory, StepRing
from tests.gpu.ranked import own_place


@pytest.fixture(params=[False, True], ids=["sleeping", "looking"])
def rings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ring, "RING_BYTES", 4096)
    monkeypatch.setattr(ring, "PART_BYTES", 1024)
    monkeypatch.setattr(ring, "MOST_BYTES", 9000)
    with GroupMemory(3) as memory:
        made = [StepRing(own_place(place), spins=request.param) for place in memory.places]
    yield made
    for one in made:
        one.close()
        one.close()


def test_each_reader_gets_each_message_in_order(rings: Any) -> None:
    """More than fits at once: the writer waits for the slower reader; long ones go in parts."""
    dice = random.Random(1)
    sent = [dice.randbytes(dice.randrange(9000 if at % 9 == 0 else 1200)) for at in range(200)]
    taken: list[list[Any]] = [[], []]
    threads = [threading.Thread(target=lambda: [rings[0].put(message) for message in sent])]
    for ring_of, got in zip(rings[1:], taken, strict=True):
        threads.append(
            threading.Thread(target=lambda of=ring_of, got=got: got.extend(of.take(10) for _ in sent))
        )
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join(10)
    assert taken == [sent, sent]


def test_a_reader_waits_no_longer_than_it_says(rings: Any) -> None:
    assert rings[1].take(0.01) is None
    rings[0].put(b"")
    assert (rings[1].take(1), rings[2].take(1)) == (b"", b"")


def test_what_never_fits_is_refused(rings: Any) -> None:
    with pytest.raises(ValueError, match="9001 bytes is longer than 9000"):
        rings[0].put(bytes(9001))


def test_a_reader_that_sleeps_is_woken(rings: Any) -> None:
    """However it is caught: it has a message long before it would look again by itself."""
    late = []
    for pause in [0.0, 1e-5, 1e-4, 0.003] * 10:
        writer = threading.Timer(pause, lambda: rings[0].put(struct.pack("=d", time.perf_counter())))
        writer.start()
        message = rings[1].take(10)
        late.append(time.perf_counter() - struct.unpack("=d", message)[0])
        rings[2].take(10)
        writer.join()
    assert statistics.median(late) < ring.DOZE_SECONDS / 2


def test_who_watches_sees_how_far_ranks_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with GroupMemory(3) as memory:
        made = [StepRing(own_place(place)) for place in memory.places]
        counters = memory.counters()
    for _ in range(3):
        made[0].put(b"step")
    made[2].take(1)
    for one in made:
        one.close()
    assert counters.messages() == [3, 0, 1]  # also when they have ended
    counters.close()
