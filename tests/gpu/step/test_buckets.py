"""Which sizes there are, and which bucket a step gets."""

import numpy as np
import pytest

from ramify.gpu.step.buckets import Bucket, BucketTable, decode_buckets, largest, mixed_buckets
from ramify.gpu.step.rows import StepRows


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
