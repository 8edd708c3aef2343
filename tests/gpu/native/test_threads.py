"""A crew: every item once, in order of the instructions, however many threads there are."""

import threading
import time
from itertools import pairwise

import pytest
import torch

from ramify.gpu.native.kernels import Kernels
from ramify.gpu.native.threads import Crew, Recording, aligned


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_instructions_follow_one_another(kernels: Kernels, threads: int) -> None:
    crew = Crew(kernels.isa, threads)
    count = aligned(1)
    count[0] = 300
    tables = [torch.zeros(300, 16) for _ in range(9)]
    # each adds what the one before wrote
    recording = Recording([kernels.norm_add(count, a, None, b) for a, b in pairwise(tables)])
    for turn in range(300):
        for table in tables[1:]:
            table.zero_()
        tables[0] += torch.arange(300)[:, None] + 1
        crew.run(recording)
        assert torch.equal(tables[-1], tables[0]), turn
    crew.close()


def test_helpers_sleep_between_runs_and_end(kernels: Kernels) -> None:
    before = threading.active_count()
    crew = Crew(kernels.isa, 3)
    count = aligned(1)
    count[0] = 1
    source, target = torch.ones(1, 16), torch.zeros(1, 16)
    recording = Recording([kernels.norm_add(count, source, None, target)])
    assert threading.active_count() == before + 2
    for _ in range(3):
        threading.Event().wait(0.002)  # long enough to sleep
        crew.run(recording)
    assert target[0, 0] == 3
    crew.close()
    assert threading.active_count() == before


def test_no_rows_are_no_work(kernels: Kernels) -> None:
    crew = Crew(kernels.isa, 2)
    target = torch.zeros(1, 16)
    recording = Recording([kernels.norm_add(aligned(1), torch.ones(1, 16), None, target)])
    crew.run(recording)
    assert not target.any()
    crew.close()


def test_a_crew_has_at_least_one_thread(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="0 threads"):
        Crew(kernels.isa, 0)


def test_the_time_that_the_crew_worked(kernels: Kernels) -> None:
    """Of two threads: not the time that the caller sleeps, and no more than one of them ran."""
    crew = Crew(kernels.isa, 2)
    try:
        since = crew.spent()
        time.sleep(0.05)
        assert crew.busy(since) < 0.04
        begin = time.thread_time()
        while time.thread_time() - begin < 0.01:
            pass
        assert crew.busy(since) >= 0.01
    finally:
        crew.close()
