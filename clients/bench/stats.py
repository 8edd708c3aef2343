"""Percentiles, spread and tables of numbers. Pure."""

from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """Compute a percentile by linear interpolation, as numpy does. nan if there are no values."""
    return _at(sorted(values), percent)


def quantiles(values: Sequence[float], weights: Sequence[int], points: int = 101) -> list[float]:
    """`points` evenly spaced quantiles, 0% to 100%, of values that count `weights` times.

    Empty if there are no values. A step function: no interpolation between values.
    """
    total = sum(weights)
    if not total:
        return []
    ordered = sorted(zip(values, weights, strict=True))
    out: list[float] = []
    seen, place = 0, -1
    for point in range(points):
        rank = max(1, round(total * point / (points - 1)))
        while seen < rank:
            place += 1
            seen += ordered[place][1]
        out.append(ordered[place][0])
    return out


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum of a few runs."""
    return {"median": percentile(values, 50), "min": min(values), "max": max(values)}


def mean(values: Sequence[float]) -> float:
    """The mean; nan if there are no values."""
    return sum(values) / len(values) if values else float("nan")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table. The first column is left-aligned, the others right-aligned."""
    every = [list(columns), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in every) for i in range(len(columns))]
    lines = []
    for row in every:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _at(ordered: Sequence[float], percent: float) -> float:
    if not ordered:
        return float("nan")
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
