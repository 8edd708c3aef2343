"""Percentiles, weighted quantiles, tables."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ramify.clients.bench.stats import mean, percentile, quantiles, spread, table

FLOATS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(FLOATS, st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    assert math.isclose(percentile(values, percent), np.percentile(values, percent), abs_tol=1e-6)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), min_size=1, max_size=30))
def test_quantiles_count_values_by_weight(pairs: list[tuple[float, int]]) -> None:
    values, weights = [v for v, _ in pairs], [w for _, w in pairs]
    every = sorted(v for v, w in pairs for _ in range(w))
    found = quantiles(values, weights)
    assert len(found) == 101
    assert (found[0], found[-1]) == (every[0], every[-1])
    assert found == sorted(found)
    assert found[50] == every[max(1, round(len(every) / 2)) - 1]


def test_nothing_is_not_a_number() -> None:
    assert math.isnan(percentile([], 50))
    assert math.isnan(mean([]))
    assert quantiles([], []) == []


def test_spread_and_table() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert table(["", "x"], [["a", "10"], ["long", "1"]]) == "       x\na     10\nlong   1"
