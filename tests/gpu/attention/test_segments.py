"""Cutting slots into runs: every key of every sequence in exactly one part."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.gpu.attention.segments import cut

PADDING = 9999
runs = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 30)), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    prefix=runs,
    tails=st.lists(st.tuples(st.integers(0, 6), runs), min_size=1, max_size=5),
    shortest=st.sampled_from([1, 5, 12, 10_000]),
)
def test_each_key_is_read_once(
    prefix: list[tuple[int, int]],
    tails: list[tuple[int, list[tuple[int, int]]]],
    shortest: int,
) -> None:
    sequences = []
    for shared, own in tails:
        parts = [np.arange(start, start + n) for start, n in [*prefix[:shared], *own]]
        sequences.append(np.concatenate(parts))
    segments = cut(sequences, PADDING, shortest)
    read: list[list[int]] = [[] for _ in sequences]
    for run in segments.runs:
        assert run.stop > run.start
        assert len(set(run.readers)) == len(run.readers) or shortest < 31
        for reader in run.readers:
            read[reader] += range(run.start, run.stop)
    for line, reader in enumerate(segments.readers.tolist()):
        n = int(segments.rest_lens[line])
        assert n > 0
        read[reader] += segments.rest[line, :n].tolist()
        assert (segments.rest[line, n:] == PADDING).all()
    assert [sorted(slots) for slots in read] == [sorted(own.tolist()) for own in sequences]


def test_a_shared_prefix_is_one_run() -> None:
    prefix = np.arange(100, 612)
    sequences = [np.concatenate([prefix, np.arange(start, start + 5)]) for start in (1000, 2000, 3000)]
    sequences.append(np.arange(100, 400))
    segments = cut(sequences, PADDING)
    assert [(run.start, run.stop, sorted(run.readers)) for run in segments.runs] == [
        (100, 400, [0, 1, 2, 3]),
        (400, 612, [0, 1, 2]),
    ]
    assert segments.readers.tolist() == [0, 1, 2]


def test_one_contiguous_sequence_is_one_run() -> None:
    segments = cut([np.arange(7, 500)], PADDING)
    assert len(segments.runs) == 1
    assert len(segments.readers) == 0
