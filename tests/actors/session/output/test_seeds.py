"""`Seeds`: random numbers, many at a time."""

import os

import pytest

from ramify.actors.session.output.generation import AT_ONCE, Seeds


def test_they_are_different_and_in_range() -> None:
    seeds = Seeds()
    found = [seeds() for _ in range(3 * AT_ONCE)]
    assert len(set(found)) == len(found)
    assert all(0 <= seed < 1 << 62 for seed in found)
    assert max(found) > 1 << 60  # all bits are used


def test_the_system_is_asked_once_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def urandom(size: int) -> bytes:
        asked.append(size)
        return bytes(size)

    monkeypatch.setattr(os, "urandom", urandom)
    seeds = Seeds()
    assert [seeds() for _ in range(AT_ONCE + 1)] == [0] * (AT_ONCE + 1)
    assert asked == [8 * AT_ONCE] * 2


def test_a_failure_ends_no_other_session(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = Seeds()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no entropy"):

        def urandom(size: int) -> bytes:
            raise OSError("no entropy")

        patch.setattr(os, "urandom", urandom)
        seeds()
    assert 0 <= seeds() < 1 << 62
