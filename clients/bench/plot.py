"""Pictures of reports: one figure for one workload, one colour for each report.

matplotlib is imported here only, when something is drawn.
"""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ramify.clients.bench.stats import percentile, spread
from ramify.protocol.errors import BadRequest

Report = Mapping[str, Any]
FORMATS = (".svg", ".png", ".pdf")


def check(path: Path) -> None:
    """Raises BadRequest where `path` could not be drawn: before anything is measured for it."""
    if path.suffix not in FORMATS:
        raise BadRequest(f"{path}: a plot is one of {', '.join(FORMATS)}")
    _pyplot()


def draw(reports: Sequence[Report], path: Path) -> None:
    """Write the plot. Raises BadRequest where the reports do not go together, OSError."""
    check(path)
    workloads = {report["workload"] for report in reports}
    if len(workloads) != 1:
        raise BadRequest(f"one plot, one workload; these are {', '.join(sorted(workloads))}")
    panels = [
        panel for panel in PANELS[workloads.pop()] if panel[0] is not _bars or _cases(reports, panel[1])
    ]
    if not panels:
        raise BadRequest("the reports hold nothing to draw")
    plt, patch = _pyplot(), import_module("matplotlib.patches").Patch
    widths = [_width(reports, panel) for panel in panels]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(sum(widths), 4), width_ratios=widths, squeeze=False
    )
    names = [report["label"] for report in reports]
    if len(set(names)) < len(names):
        names = [f"{name} ({place + 1})" for place, name in enumerate(names)]
    for axis, (panel, *details) in zip(axes[0], panels, strict=True):
        panel(axis, reports, names, *details)
        axis.spines[["top", "right"]].set_visible(False)
    machines = sorted({_machine(report) for report in reports})
    figure.suptitle(f"ramify bench {reports[0]['workload']}", fontsize=11)
    marks = [patch(color=f"C{place}", label=name) for place, name in enumerate(names)]
    columns = max(1, int(sum(widths) / 2.3))
    figure.legend(
        handles=marks, loc="upper center", bbox_to_anchor=(0.5, 0.95), ncols=columns, fontsize=7,
        frameon=False,
    )  # fmt: skip
    figure.text(0.01, 0.005, "; ".join(machines), fontsize=6, color="0.4")
    figure.tight_layout(rect=(0, 0.02, 1, 0.97 - 0.04 * -(-len(names) // columns)))
    figure.savefig(path)
    plt.close(figure)


def _pyplot() -> Any:
    try:
        import_module("matplotlib").use("agg")
    except ModuleNotFoundError:
        raise BadRequest(f"plots need matplotlib: {sys.executable} -m pip install matplotlib") from None
    return import_module("matplotlib.pyplot")


def _width(reports: Sequence[Report], panel: Sequence[Any]) -> float:
    """Work out the width in inches: room for the names of the cases, and the number above each bar."""
    if panel[0] is not _bars:
        return max(4.6, 1.2 * len(reports))
    cases = len(_cases(reports, panel[1]))
    return max(4.6, 0.7 + cases * max(1.15, 0.45 * len(reports)))


def _machine(report: Report) -> str:
    gpus = report["machine"]["gpus"]
    where = gpus[0].split(",")[0] if isinstance(gpus, list) else report["machine"]["cpu"]
    return f"{where}, {report['time'][:10]}"


def _bars(axis: Any, reports: Sequence[Report], names: Sequence[str], key: str, title: str) -> None:
    """Draw the medians of every case, with the spread of its runs."""
    cases = _cases(reports, key)
    width = 0.8 / len(reports)
    for place, report in enumerate(reports):
        found = {
            case["name"]: case["figures"][key] for case in report["cases"] if key in case["figures"]
        }
        at = [i for i, case in enumerate(cases) if case in found]
        values = [found[cases[i]] for i in at]
        middle = [value["median"] for value in values]
        error = [
            [value["median"] - value["min"] for value in values],
            [value["max"] - value["median"] for value in values],
        ]
        offset = (place - (len(reports) - 1) / 2) * width
        marks = axis.bar(
            [i + offset for i in at], middle, 0.92 * width, yerr=error, capsize=3, color=f"C{place}"
        )
        axis.bar_label(marks, labels=[_short(value) for value in middle], fontsize=7, padding=2)
    axis.set_xticks(range(len(cases)))
    axis.set_xticklabels([_wrapped(case) for case in cases], fontsize=7)
    axis.set_xlim(-0.75, len(cases) - 0.25)
    axis.set_ylabel(title)
    axis.margins(y=0.1)


def _wrapped(case: str) -> str:
    """Wrap a case's name into lines, none of which breaks inside `8 x 2048`."""
    return textwrap.fill(case.replace(" x ", "\N{NO-BREAK SPACE}x\N{NO-BREAK SPACE}"), 24)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _cases(reports: Sequence[Report], key: str) -> list[str]:
    """The names of the cases that have this figure, in order."""
    seen = (case["name"] for r in reports for case in r["cases"] if key in case["figures"])
    return list(dict.fromkeys(seen))


def _ttft_distribution(axis: Any, reports: Sequence[Report], names: Sequence[str]) -> None:
    """Draw the share of requests with a first token by time; all runs together."""
    for place, report in enumerate(reports):
        values = sorted(
            value
            for case in report["cases"]
            for run in case["runs"]
            for value, extra in zip(run["requests"]["ttft_ms"], run["requests"]["extra"], strict=True)
            if not extra
        )
        shares = [p / 100 for p in range(101)]
        axis.plot([percentile(values, p) for p in range(101)], shares, color=f"C{place}")
    _distribution(axis, "TTFT, ms")


def _itl_distribution(axis: Any, reports: Sequence[Report], names: Sequence[str]) -> None:
    """Draw the share of tokens by the time since the token before; the median of the runs by quantile.

    The axis ends at the 99th percentile: the longest gap of all would leave no room for the rest.
    """
    for place, report in enumerate(reports):
        runs = [run["itl_ms_quantiles"] for case in report["cases"] for run in case["runs"]]
        points = [percentile(column, 50) for column in zip(*(r for r in runs if r), strict=True)]
        if points:
            shares = [p / (len(points) - 1) for p in range(len(points))]
            axis.plot(points[:-1], shares[:-1], color=f"C{place}")
    _distribution(axis, "time between tokens, ms (to p99)")


def _distribution(axis: Any, title: str) -> None:
    axis.set_xlabel(title)
    axis.set_ylabel("share at most")
    axis.set_ylim(0, 1)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)


def _phases(axis: Any, reports: Sequence[Report], names: Sequence[str]) -> None:
    """Draw the mean times of a tree's levels, one on the other, and the whole load's as a mark."""
    for place, report in enumerate(reports):
        bottom = 0.0
        found = report["cases"][0]["figures"]
        for level in (1, 2):
            height = found[f"level_{level}_s"]["median"]
            bars = axis.bar(
                [place], [height], 0.6, bottom=bottom, color=f"C{place}", alpha=1.1 - 0.4 * level,
                edgecolor="white",
            )  # fmt: skip
            axis.bar_label(
                bars, labels=[f"level {level}: {height:.2f}"], label_type="center", fontsize=7
            )
            bottom += height
        whole = spread([run["figures"]["seconds"] for run in report["cases"][0]["runs"]])
        error = [[whole["median"] - whole["min"]], [whole["max"] - whole["median"]]]
        axis.errorbar([place], [whole["median"]], yerr=error, fmt="k_", markersize=24, capsize=3)
        axis.annotate(
            f"all {whole['median']:.2f}", (place, whole["median"]), fontsize=7,
            xytext=(6, 3), textcoords="offset points",
        )  # fmt: skip
    axis.set_xticks(range(len(names)))
    axis.set_xticklabels([textwrap.fill(name, 20) for name in names], fontsize=7)
    axis.set_ylabel("seconds")
    axis.margins(y=0.12)


PANELS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "throughput": (
        (_bars, "output_tok_s", "output tokens/s"),
        (_ttft_distribution,),
        (_itl_distribution,),
    ),
    "latency": ((_bars, "step_ms", "ms per decode step"), (_bars, "prefill_tok_s", "prefill tokens/s")),
    "chat": ((_bars, "output_tok_s", "output tokens/s"), (_ttft_distribution,), (_itl_distribution,)),
    "tree": ((_phases,), (_bars, "computed_ratio", "prompt tokens computed / optimum")),
    "prefix": ((_bars, "computed_ratio", "prompt tokens computed / optimum"),),
    "overhead": ((_bars, "wall_over_device", "wall time / device time"), (_bars, "seconds", "seconds")),
    "start": ((_bars, "ready_s", "seconds from process start to ready"),),
}
