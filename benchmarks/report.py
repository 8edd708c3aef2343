"""What the benchmarks share to report: the machine, percentiles, tables, JSON files.

It does not know what is measured.
"""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("ramify", "msgspec", "numpy", "websockets")


def machine(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Where and with what the numbers were made. `load`: of the last minute, ours included."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "load": round(os.getloadavg()[0], 2),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def headline(about: Mapping[str, Any]) -> str:
    """`machine` in one line."""
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    return (
        f"{about['cpu']}, {about['cpus']} CPUs, load {about['load']}; {about['system']}; "
        f"Python {about['python']}, {packages}"
    )


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation, as numpy's default. nan if there are no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum of a few runs."""
    return {"median": percentile(values, 50), "min": min(values), "max": max(values)}


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns, the first one left-aligned."""
    every = [list(columns), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in every) for i in range(len(columns))]
    lines = []
    for row in every:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def write_json(path: str | None, about: Mapping[str, Any], results: Any) -> None:
    """Write `{"machine": ..., "results": ...}`; nothing without a path."""
    if path is None:
        return
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"machine": about, "results": results}, file, indent=1)
    print(f"written to {path}", file=sys.stderr)
