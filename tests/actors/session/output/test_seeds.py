"""`seeds`: random numbers, many at a time."""

import os
from itertools import islice

import pytest

from ramify.actors.session.output.seeds import AT_ONCE, seeds


def test_they_are_different_and_in_range() -> None:
    found = list(islice(seeds(), 3 * AT_ONCE))
    assert len(set(found)) == len(found)
    assert all(0 <= seed < 1 << 62 for seed in found)
    assert max(found) > 1 << 60  # all bits are used


def test_the_system_is_asked_once_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def urandom(size: int) -> bytes:
        asked.append(size)
        return bytes(size)

    monkeypatch.setattr(os, "urandom", urandom)
    assert list(islice(seeds(), AT_ONCE + 1)) == [0] * (AT_ONCE + 1)
    assert asked == [8 * AT_ONCE] * 2
