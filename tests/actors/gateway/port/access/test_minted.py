"""Minted tokens: each works once, whoever takes it, for as long as it lives."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ramify.actors.gateway.port.access.minted import Minted, OwnMinted, SharedMinted, table_bytes

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
    assert minted.add(digest("a"), "me", 10.0, 0.0, MOST)
    assert not minted.take(digest("b"), 1.0)
    assert minted.take(digest("a"), 1.0)
    assert not minted.take(digest("a"), 1.0)


def test_a_token_expires(minted: Minted) -> None:
    minted.add(digest("a"), "me", 10.0, 0.0, MOST)
    assert not minted.take(digest("a"), 10.0)
    assert not minted.take(digest("a"), 1.0)


def test_there_is_a_bound_until_tokens_expire_or_are_used(minted: Minted) -> None:
    for i in range(MOST):
        assert minted.add(digest(i), "me", 10.0 + i, float(i), MOST)
    assert not minted.add(digest("more"), "me", 20.0, 9.0, MOST)
    assert minted.take(digest(0), 9.0)
    assert minted.add(digest("more"), "me", 20.0, 9.0, MOST)
    assert minted.add(digest("late"), "me", 30.0, 12.0, MOST)  # two have expired
    assert minted.take(digest("more"), 12.0)
    assert minted.take(digest("late"), 12.0)


def test_one_that_is_never_used_keeps_no_other_out(minted: Minted) -> None:
    assert minted.add(digest("unused"), "me", 10.0, 0.0, MOST)
    for i in range(3 * MOST):
        assert minted.add(digest(i), "me", 10.0, 0.0, MOST)
        assert minted.take(digest(i), 0.0)
    assert minted.take(digest("unused"), 0.0)


def test_a_name_has_no_more_than_its_part(minted: Minted) -> None:
    for i in range(3):
        assert minted.add(digest(i), "greedy", 10.0, 0.0, 3)
    for i in range(100):
        assert not minted.add(digest(f"more {i}"), "greedy", 10.0, 0.0, 3)
    assert [minted.add(digest(f"other {i}"), "other", 10.0, 0.0, 3) for i in range(4)] == [1, 1, 1, 0]
    assert minted.take(digest(0), 1.0) == "greedy"
    assert minted.add(digest("again"), "greedy", 11.0, 1.0, 3)
    assert minted.take(digest("other 1"), 1.0) == "other"
    assert minted.add(digest("late"), "greedy", 20.0, 10.0, 3)  # two of its have expired


def test_processes_divide_the_part_of_a_name() -> None:
    with table() as fd:
        one, two = SharedMinted(fd, MOST, 2), SharedMinted(fd, MOST, 2)
        for shared in (one, two):
            added = [shared.add(digest((id(shared), i)), "me", 10.0, 0.0, 4) for i in range(3)]
            assert added == [True, True, False]
        assert two.take(digest((id(one), 0)), 0.0) == "me"  # used elsewhere: there is room again
        assert one.add(digest("new"), "me", 10.0, 0.0, 4)
        one.close()
        two.close()


def test_a_table_holds_as_many_as_it_was_made_for() -> None:
    most = 2000
    fd = os.memfd_create("test-minted")
    os.truncate(fd, table_bytes(most))
    shared = SharedMinted(fd, most)
    assert all(shared.add(digest(i), "me", 10.0, 0.0, most) for i in range(most))
    assert all(shared.take(digest(i), 1.0) for i in range(most))
    shared.close()
    os.close(fd)


TAKER = """
import hashlib, sys
from ramify.actors.gateway.port.access.minted import SharedMinted
shared = SharedMinted(int(sys.argv[1]), int(sys.argv[2]))
sys.stdin.read()  # until all are here
for i in range(int(sys.argv[2])):
    if shared.take(hashlib.sha256(str(i).encode()).digest(), 1.0):
        print(i)
"""


def test_processes_share_a_table() -> None:
    """What one process mints another can use, and of several only one."""
    with table() as fd:
        shared = SharedMinted(fd, MOST)
        for i in range(MOST):
            shared.add(digest(i), "me", 10.0, 0.0, MOST)
        takers = [
            subprocess.Popen(
                [sys.executable, "-c", TAKER, str(fd), str(MOST)],
                pass_fds=[fd],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(3)
        ]
        taken = [int(i) for taker in takers for i in taker.communicate(timeout=30)[0].split()]
        assert sorted(taken) == list(range(MOST))
        assert not shared.take(digest(0), 1.0)
        shared.close()
