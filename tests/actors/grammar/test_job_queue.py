"""Turns between owners, and bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.actors.grammar.job_queue import JobQueue
from ramify.protocol.errors import Overloaded


def test_owners_take_turns() -> None:
    queue: JobQueue[int] = JobQueue(workers=10, most=10, most_each=10)
    for job in (1, 2, 3):
        queue.add("a", job)
    queue.add("b", 4)
    queue.add("c", 5)
    assert [queue.take() for _ in range(6)] == [("a", 1), ("b", 4), ("c", 5), ("a", 2), ("a", 3), None]
    assert len(queue) == 0


def test_an_owner_never_has_all_workers() -> None:
    queue: JobQueue[int] = JobQueue(workers=3, most=10, most_each=10)
    for job in range(5):
        queue.add("hostile", job)
    assert queue.take() == ("hostile", 0)
    assert queue.take() == ("hostile", 1)
    assert queue.take() is None
    queue.add("other", 9)
    assert queue.take() == ("other", 9)
    queue.finished("hostile")
    assert queue.take() == ("hostile", 2)


def test_a_single_worker_serves_everybody() -> None:
    queue: JobQueue[int] = JobQueue(workers=1, most=10, most_each=10)
    queue.add("a", 1)
    assert queue.take() == ("a", 1)


def test_too_many_jobs_are_refused() -> None:
    queue: JobQueue[int] = JobQueue(workers=1, most=3, most_each=2)
    queue.add("a", 1)
    queue.add("a", 2)
    with pytest.raises(Overloaded, match="2 of yours") as caught:
        queue.add("a", 3)
    assert caught.value.retry_ms
    queue.add("b", 4)
    with pytest.raises(Overloaded, match="3 constraints wait"):
        queue.add("c", 5)
    assert queue.clear() == [1, 2, 4]
    queue.add("c", 5)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60), st.integers(1, 4))
def test_nothing_is_lost(steps: list[tuple[str, bool]], workers: int) -> None:
    queue: JobQueue[int] = JobQueue(workers, most=1000, most_each=1000)
    waiting: dict[str, list[int]] = {}
    running: list[str] = []
    for number, (owner, add) in enumerate(steps):
        if add:
            queue.add(owner, number)
            waiting.setdefault(owner, []).append(number)
        elif running and number % 2:
            queue.finished(running.pop())
        else:
            taken = queue.take() if len(running) < workers else None
            if taken is not None:
                assert waiting[taken[0]].pop(0) == taken[1]
                running.append(taken[0])
                assert running.count(taken[0]) <= max(1, workers - 1)
        assert len(queue) == sum(map(len, waiting.values()))
