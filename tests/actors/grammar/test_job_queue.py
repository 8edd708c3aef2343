"""Turns between names and sessions, and bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.actors.grammar.job_queue import JobQueue, Owner
from ramify.protocol.errors import Overloaded

A, B, C = Owner("a", 1), Owner("b", 2), Owner("c", 3)
HOSTILE, OTHER = Owner("hostile", 4), Owner("other", 5)


def nobody(session: int) -> Owner:
    return Owner("", session)


def taken(queue: JobQueue[int], count: int) -> list[int | None]:
    found = [queue.take() for _ in range(count)]
    return [each and each[1] for each in found]


def test_owners_take_turns() -> None:
    queue: JobQueue[int] = JobQueue(workers=10, most=10, most_each=10)
    for job in (1, 2, 3):
        queue.add(A, job)
    queue.add(B, 4)
    queue.add(C, 5)
    assert [queue.take() for _ in range(6)] == [(A, 1), (B, 4), (C, 5), (A, 2), (A, 3), None]
    assert len(queue) == 0


def test_an_owner_never_has_all_workers() -> None:
    queue: JobQueue[int] = JobQueue(workers=3, most=10, most_each=10)
    for job in range(5):
        queue.add(HOSTILE, job)
    assert queue.take() == (HOSTILE, 0)
    assert queue.take() == (HOSTILE, 1)
    assert queue.take() is None
    queue.add(OTHER, 9)
    assert queue.take() == (OTHER, 9)
    queue.finished(HOSTILE)
    assert queue.take() == (HOSTILE, 2)


def test_a_single_worker_serves_everybody() -> None:
    queue: JobQueue[int] = JobQueue(workers=1, most=10, most_each=10)
    queue.add(A, 1)
    assert queue.take() == (A, 1)


def test_too_many_jobs_are_refused() -> None:
    queue: JobQueue[int] = JobQueue(workers=1, most=3, most_each=2)
    queue.add(A, 1)
    queue.add(A, 2)
    with pytest.raises(Overloaded, match="2 of yours") as caught:
        queue.add(A, 3)
    assert caught.value.retry_ms
    queue.add(B, 4)
    with pytest.raises(Overloaded, match="3 constraints wait"):
        queue.add(B, 5)
    assert queue.add(C, 5) == 2  # of who has more than C will have
    assert queue.clear() == [1, 4, 5]
    queue.add(C, 5)


def test_sessions_of_a_name_take_turns() -> None:
    queue: JobQueue[int] = JobQueue(workers=10, most=20, most_each=20)
    for job in range(3):
        queue.add(Owner("a", 1), job)
    queue.add(Owner("a", 9), 3)
    queue.add(B, 4)
    assert taken(queue, 6) == [0, 4, 3, 1, 2, None]


def test_sessions_without_a_name_are_one_beside_named_ones() -> None:
    """However many they are: a name has each second turn, a worker, and a place in a full queue."""
    queue: JobQueue[int] = JobQueue(workers=4, most=40, most_each=8)
    queue.add(A, 100)
    for job in range(40):
        queue.add(nobody(job // 8), job) if job < 39 else None
    assert queue.add(A, 101) is not None
    assert taken(queue, 6) == [100, 0, 101, 8, 16, None]
    queue.add(B, 102)
    assert taken(queue, 2) == [102, None]


def test_five_sessions_do_not_take_constraints_from_everybody() -> None:
    """Without credentials at all: a sixth session has a place and its turn."""
    queue: JobQueue[int] = JobQueue(workers=2, most=256, most_each=64)
    for job in range(5 * 64):
        if job < 256:
            queue.add(nobody(job // 64), job)
    with pytest.raises(Overloaded):
        queue.add(nobody(0), 1000)
    assert queue.add(nobody(5), 1001) == 63  # the newest of who has most
    assert taken(queue, 3) == [0, 64, None]
    for session in (0, 1):
        queue.finished(nobody(session))
    assert taken(queue, 2) == [128, 192]
    queue.finished(nobody(2))
    assert taken(queue, 1) == [1001]


def test_without_names_all_workers_work() -> None:
    queue: JobQueue[int] = JobQueue(workers=2, most=10, most_each=10)
    for session in (1, 2):
        queue.add(nobody(session), session)
    assert taken(queue, 2) == [1, 2]


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", ""]), st.integers(1, 3), st.booleans()), max_size=80),
    st.integers(1, 4),
    st.sampled_from([3, 8, 1000]),
)
def test_nothing_is_lost(steps: list[tuple[str, int, bool]], workers: int, most: int) -> None:
    queue: JobQueue[int] = JobQueue(workers, most=most, most_each=1000)
    waiting: dict[Owner, list[int]] = {}
    running: list[Owner] = []
    for number, (name, session, add) in enumerate(steps):
        owner = Owner(name, session)
        if add:
            try:
                gone = queue.add(owner, number)
            except Overloaded:
                assert len(queue) == most
            else:
                for jobs in waiting.values():
                    if gone in jobs:
                        assert jobs.pop() == gone
                waiting.setdefault(owner, []).append(number)
        elif running and number % 2:
            queue.finished(running.pop())
        else:
            found = queue.take() if len(running) < workers else None
            if found is not None:
                assert waiting[found[0]].pop(0) == found[1]
                running.append(found[0])
                assert running.count(found[0]) <= max(1, workers - 1)
                each = found[0].name
                if each:
                    assert sum(one.name == each for one in running) <= max(1, workers - 1)
        assert len(queue) == sum(map(len, waiting.values())) <= most
