"""Minted tokens: each works once, whoever takes it, for as long as it lives."""

import hashlib
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ramify.actors.gateway.minted import Minted, OwnMinted, SharedMinted, table_bytes

MOST = 8


def digest(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


@contextmanager
def table() -> Iterator[int]:
    fd = os.memfd_create("test-minted")
    os.truncate(fd, table_bytes(MOST))
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture(params=["own", "shared"])
def minted(request: pytest.FixtureRequest) -> Iterator[Minted]:
    if request.param == "own":
        yield OwnMinted(MOST)
        return
    with table() as fd:
        shared = SharedMinted(fd, MOST)
        yield shared
        shared.close()


def test_a_token_is_taken_once(minted: Minted) -> None:
    assert minted.add(digest("a"), 10.0, 0.0)
    assert not minted.take(digest("b"), 1.0)
    assert minted.take(digest("a"), 1.0)
    assert not minted.take(digest("a"), 1.0)


def test_a_token_expires(minted: Minted) -> None:
    minted.add(digest("a"), 10.0, 0.0)
    assert not minted.take(digest("a"), 10.0)
    assert not minted.take(digest("a"), 1.0)


def test_there_is_a_bound_until_tokens_expire_or_are_used(minted: Minted) -> None:
    for i in range(MOST):
        assert minted.add(digest(i), 10.0 + i, float(i))
    assert not minted.add(digest("more"), 20.0, 9.0)
    assert minted.take(digest(0), 9.0)
    assert minted.add(digest("more"), 20.0, 9.0)
    assert minted.add(digest("late"), 30.0, 12.0)  # two have expired
    assert minted.take(digest("more"), 12.0)
    assert minted.take(digest("late"), 12.0)


def _take(fd: int, results: "multiprocessing.Queue[list[int]]") -> None:
    shared = SharedMinted(fd, MOST)
    results.put([i for i in range(MOST) if shared.take(digest(i), 1.0)])


def test_processes_share_a_table() -> None:
    """What one process mints another can use, and of several only one."""
    with table() as fd:
        shared = SharedMinted(fd, MOST)
        for i in range(MOST):
            shared.add(digest(i), 10.0, 0.0)
        fork = multiprocessing.get_context("fork")
        results: multiprocessing.Queue[list[int]] = fork.Queue()
        takers = [fork.Process(target=_take, args=(fd, results)) for _ in range(3)]
        for taker in takers:
            taker.start()
        taken = sum((results.get(timeout=20) for _ in takers), [])
        for taker in takers:
            taker.join()
        assert sorted(taken) == list(range(MOST))
        assert not shared.take(digest(0), 1.0)
        shared.close()
