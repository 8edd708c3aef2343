"""Which bucket a step gets, and that a padded step says what the step says."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.gpu.buckets import (
    NO_SETTINGS,
    NOTHING,
    Bucket,
    BucketTable,
    decode_buckets,
    fields,
    largest,
    lay,
    mixed_buckets,
    tailored,
)
from ramify.gpu.rows import StepRows

ROWS, SPARE = 40, 40


@st.composite
def steps(draw: st.DrawFn) -> StepRows:
    """Extends of some rows, decodes of others; the first extends do not all sample."""
    order = draw(st.permutations(range(ROWS)))
    n, decodes = draw(st.integers(0, 12)), draw(st.integers(0, 25))
    counts = draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))
    silent = draw(st.sets(st.integers(0, 11)))
    sampling = [i for i in range(n + decodes) if i >= n or i not in silent]
    return StepRows(
        rows=np.array(order[: n + decodes], dtype=np.int64),
        starts=np.array(draw(st.lists(st.integers(0, 99), min_size=n + decodes, max_size=n + decodes))),
        counts=np.array([*counts, *[1] * decodes], dtype=np.int64),
        extends=n,
        tokens=np.arange(1000, 1000 + sum(counts), dtype=np.int32),
        sampling=np.array(sampling, dtype=np.int64),
        draws=np.array(sampling, dtype=np.int64),
    )


def laid(bucket: Bucket, step: StepRows) -> list[Any]:
    plan = [np.full((step.extends, 4), 7, dtype=np.int32)] if step.extends else []
    room = [np.full((bucket.runs, 4), 9, dtype=np.int32)] if bucket.extended else []
    arrays = [np.full(shape, -77).astype(kind) for kind, shape in fields(bucket, room)]  # dirty
    settings = np.arange(1, len(step.sampling) + 1) / 4
    lay(arrays, bucket, step, (settings, settings), plan if bucket.extended else [], SPARE)
    return [array.tolist() for array in arrays]


def check(bucket: Bucket, step: StepRows) -> None:
    codes, rows, positions, temperatures, uniforms, *mixed = laid(bucket, step)
    assert len(codes) == len(rows) == len(positions) == bucket.lines
    tokens, n = len(step.tokens), step.extends
    decoded = [*step.given.tolist(), *(-1 - step.rows[n + len(step.given) :]).tolist()]
    wanted = [  # code, row, position of each token, sequence by sequence
        [
            (int(step.tokens[step.counts[:i].sum() + k]) if i < n else decoded[i - n], row, start + k)
            for k in range(count)
        ]
        for i, (row, start, count) in enumerate(
            zip(step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True)
        )
    ]
    lines = list(zip(codes, rows, positions, strict=True))
    assert lines[:tokens] == [line for run in wanted[:n] for line in run]
    first, stop = bucket.extended, bucket.extended + len(step.rows) - n
    assert lines[first:stop] == [run[0] for run in wanted[n:]]
    assert set(lines[tokens:first] + lines[stop:]) <= {(0, SPARE, 0)}
    sampled = len(step.sampling)
    assert (
        temperatures
        == uniforms
        == [(i + 1) / 4 for i in range(sampled)] + [0] * (bucket.sampling - sampled)
    )
    if bucket.extended:
        index, owners, plan = mixed
        last = [wanted[i][-1] for i in step.sampling.tolist()]
        assert [lines[i] for i in index[:sampled]] == last
        assert owners == [row for _, row, _ in last] + [SPARE] * (bucket.sampling - sampled)
        assert set(index[sampled:]) <= {0}
        assert plan == [[7] * 4] * n + [[0] * 4] * (bucket.runs - n)


@given(steps(), st.booleans())
def test_a_padded_step_says_what_the_step_says(step: StepRows, decodes: bool) -> None:
    step = step.with_short_extends_as_decodes() if decodes else step
    table = BucketTable([*decode_buckets(ROWS), *mixed_buckets(ROWS, 256)])
    bucket = table.find(step)
    if bucket is not None:
        assert len(step.tokens) <= bucket.extended
        assert step.extends <= bucket.runs
        assert len(step.rows) - step.extends <= bucket.decodes
        assert len(step.sampling) <= bucket.sampling <= ROWS
        check(bucket, step)
    else:
        assert len(step.tokens) > 256 or step.extends > 8
    check(tailored(step, padded=True), step)
    check(tailored(step, padded=False), step)
    for bucket in decode_buckets(ROWS)[-1:] + mixed_buckets(ROWS, 64):
        check(bucket, NOTHING)


def test_no_padding_settings_are_needed() -> None:
    bucket = Bucket(16, 4, 2, 6)
    arrays = [np.ones(shape, dtype=kind) for kind, shape in fields(bucket, [])]
    lay(arrays, bucket, NOTHING, (NO_SETTINGS, NO_SETTINGS), [], SPARE)
    assert [array.tolist() for array in arrays[3:5]] == [[0.0] * 6] * 2


@pytest.mark.parametrize("rows", [1, 3, 8, 200, 256, 700])
def test_the_sizes(rows: int) -> None:
    decodes = decode_buckets(rows)
    assert [bucket.decodes for bucket in decodes] == sorted({bucket.decodes for bucket in decodes})
    assert decodes[-1] == Bucket(0, 0, rows, rows)
    mixed = mixed_buckets(rows, 300)
    assert len(set(mixed)) == len(mixed)
    assert {bucket.extended for bucket in mixed} == {16, 32, 64, 128, 192, 256}
    assert max(bucket.decodes for bucket in mixed) == rows
    assert all(bucket.sampling <= rows for bucket in mixed)
    assert mixed_buckets(rows, 15) == []
    assert largest(rows, 2050).extended == 2064


def test_the_smallest_that_fits_is_found() -> None:
    table = BucketTable([*decode_buckets(256), *mixed_buckets(256, 2048)])

    def find(tokens: int, runs: int, decodes: int) -> tuple[int, int] | None:
        rows = np.arange(runs + decodes)
        step = StepRows(rows, rows, rows, runs, np.zeros(tokens, dtype=np.int32), rows, rows)
        bucket = table.find(step)
        return None if bucket is None else (bucket.extended, bucket.decodes)

    assert find(0, 0, 5) == (0, 8)
    assert find(0, 0, 256) == (0, 256)
    assert find(1, 1, 0) == (16, 0)
    assert find(16, 4, 1) == (16, 8)
    assert find(16, 5, 1) == (192, 8)  # for the number of runs
    assert find(129, 1, 65) == (192, 128)
    assert find(2048, 32, 200) == (2048, 256)
    assert find(2049, 1, 1) is None
    assert find(64, 33, 1) is None
