"""The report of a measurement: a table for people, JSON for plots and comparisons."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ramify.clients.bench.stats import table
from ramify.clients.commands.info import local_info
from ramify.protocol.errors import BadRequest

FORMAT = 1
TOKEN_FLAGS = ("--token", "--auth-token")

# Of each figure: the column's head, and how its numbers read.
COLUMNS: dict[str, tuple[str, str]] = {
    "output_tok_s": ("tok/s", ",.0f"),
    "prefill_tok_s": ("prefill tok/s", ",.0f"),
    "seconds": ("s", ".3f"),
    "ttft_mean_ms": ("TTFT ms", ".1f"),
    "ttft_p50_ms": ("TTFT p50", ".1f"),
    "ttft_p90_ms": ("TTFT p90", ".1f"),
    "ttft_p99_ms": ("TTFT p99", ".1f"),
    "itl_mean_ms": ("ITL ms", ".2f"),
    "itl_p50_ms": ("ITL p50", ".2f"),
    "itl_p99_ms": ("ITL p99", ".2f"),
    "step_ms": ("ms/step", ".3f"),
    "steady_share": ("steady", ".0%"),
    "level_1_s": ("level 1 s", ".3f"),
    "level_2_s": ("level 2 s", ".3f"),
    "computed_ratio": ("computed/optimum", ".3f"),
    "hit_rate": ("hit rate", ".3f"),
    "prompt_computed": ("computed", ",.0f"),
    "prompt_optimum": ("optimum", ",.0f"),
    "wall_over_device": ("wall/device", ".3f"),
    "device_s": ("device s", ".3f"),
    "steps": ("steps", ",.0f"),
    "ready_s": ("ready s", ".2f"),
}


def headline(report: Mapping[str, Any]) -> str:
    """Describe the machine, the server and the model, in a line or two."""
    machine = report["machine"]
    gpus = machine["gpus"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v != "not installed")
    where = f"{machine['cpu']}, {machine['cpus']} CPUs, load {machine['load']}"
    where += f"; {', '.join(gpus)}" if isinstance(gpus, list) else ""
    return f"{report['label']}: ramify bench {report['workload']}\n{where}; {versions}"


def text(report: Mapping[str, Any]) -> str:
    """Make a table for each set of columns: medians, with (min-max) where there are several runs."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for case in report["cases"]:
        groups.setdefault(tuple(case["shown"]), []).append(case)
    tables = []
    for shown, cases in groups.items():
        columns = ["", *[COLUMNS[key][0] for key in shown]]
        rows = [
            [case["name"], *[_cell(key, case["figures"].get(key)) for key in shown]] for case in cases
        ]
        tables.append(table(columns, rows))
    if "ready_s" in report:
        tables.append(f"ready {report['ready_s']:.2f} s after the start of its process")
    return "\n\n".join(tables)


def _cell(key: str, value: Mapping[str, float] | None) -> str:
    if value is None:
        return "-"
    form = COLUMNS[key][1]
    median, least, most = (format(value[part], form) for part in ("median", "min", "max"))
    return median if least == most else f"{median} ({least}-{most})"


def assemble(
    workload: str,
    label: str,
    engine: Mapping[str, Any],
    options: Mapping[str, Any],
    cases: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Make the whole report, of JSON types only."""
    return {
        "format": FORMAT,
        "workload": workload,
        "label": label,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["ramify", *without_tokens(sys.argv[1:])]),
        "machine": machine(),
        "engine": dict(engine),
        "options": dict(options),
        "cases": list(cases),
    }


def without_tokens(flags: Sequence[str]) -> list[str]:
    """Make bearer tokens in flags unreadable: reports are passed on."""
    shown: list[str] = []
    for flag in flags:
        name, sep, _ = flag.partition("=")
        if shown and shown[-1] in TOKEN_FLAGS:
            shown.append("***")
        else:
            shown.append(f"{name}=***" if sep and name in TOKEN_FLAGS else flag)
    return shown


def machine() -> dict[str, Any]:
    """Describe this machine, on which the load ran. `load`: of the last minute, ours included."""
    return {
        **local_info(),
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def cpu_model() -> str:
    """The processor's name where the system tells it (Linux), else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def write(report: Mapping[str, Any], path: Path) -> None:
    """Raises OSError."""
    path.write_text(json.dumps(report) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """Raises BadRequest that names the file, OSError."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadRequest(f"{path} is not JSON: {error}") from None
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise BadRequest(f"{path} is no report of `ramify bench` (format {FORMAT})")
    return report
