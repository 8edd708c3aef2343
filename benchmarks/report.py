"""What the benchmarks share to report: the machine and JSON files; numbers as `ramify bench` has them.

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

from ramify.clients.bench.report import cpu_model
from ramify.clients.bench.stats import percentile, spread, table

__all__ = ["headline", "machine", "percentile", "spread", "table", "write_json"]

PACKAGES = ("ramify", "msgspec", "numpy", "websockets")


def machine(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Where and with what the numbers were made. `load`: of the last minute, ours included."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
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


def write_json(path: str | None, about: Mapping[str, Any], results: Any) -> None:
    """Write `{"machine": ..., "results": ...}`; nothing without a path."""
    if path is None:
        return
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"machine": about, "results": results}, file, indent=1)
    print(f"written to {path}", file=sys.stderr)
