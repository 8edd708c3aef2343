"""Pictures of reports: one figure for one workload, one colour for each report.

matplotlib is imported here only, when something is drawn.
"""

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
    panels = PANELS[workloads.pop()]
    plt = _pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), squeeze=False)
    names = [report["label"] for report in reports]
    if len(set(names)) < len(names):
        names = [f"{name} ({place + 1})" for place, name in enumerate(names)]
    for axis, (panel, *details) in zip(axes[0], panels, strict=True):
        panel(axis, reports, names, *details)
        axis.spines[["top", "right"]].set_visible(False)
    machines = sorted({_machine(report) for report in reports})
    figure.suptitle(f"ramify bench {reports[0]['workload']}", fontsize=11)
    figure.text(0.01, 0.005, "; ".join(machines), fontsize=6, color="0.4")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path)
    plt.close(figure)


def _pyplot() -> Any:
    try:
        import_module("matplotlib").use("agg")
    except ModuleNotFoundError:
        raise BadRequest("plots need matplotlib: pip install 'ramify[bench]'") from None
    return import_module("matplotlib.pyplot")


def _machine(report: Report) -> str:
    gpus = report["machine"]["gpus"]
    where = gpus[0].split(",")[0] if isinstance(gpus, list) else report["machine"]["cpu"]
    return f"{where}, {report['time'][:10]}"


def _bars(axis: Any, reports: Sequence[Report], names: Sequence[str], key: str, title: str) -> None:
    """The medians of every case, with the spread of its runs."""
    cases = _cases(reports, key)
    width = 0.8 / len(reports)
    for place, (report, name) in enumerate(zip(reports, names, strict=True)):
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
            [i + offset for i in at], middle, 0.92 * width, yerr=error, capsize=3, label=name
        )
        axis.bar_label(marks, labels=[_short(value) for value in middle], fontsize=7, padding=2)
    _case_ticks(axis, cases, title)
    axis.margins(y=0.15)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _case_ticks(axis: Any, cases: Sequence[str], title: str) -> None:
    axis.set_xticks(range(len(cases)))
    short = [case if len(case) < 28 else case.replace(", ", ",\n") for case in cases]
    axis.set_xticklabels(short, fontsize=7)
    axis.set_ylabel(title)
    axis.legend(fontsize=7)


def _cases(reports: Sequence[Report], key: str) -> list[str]:
    """The names of the cases that have this figure, in order."""
    seen = (case["name"] for r in reports for case in r["cases"] if key in case["figures"])
    return list(dict.fromkeys(seen))


def _ttft_distribution(axis: Any, reports: Sequence[Report], names: Sequence[str]) -> None:
    """Which share of requests had their first token after how long; all runs together."""
    for report, name in zip(reports, names, strict=True):
        values = sorted(
            value
            for case in report["cases"]
            for run in case["runs"]
            for value, extra in zip(run["requests"]["ttft_ms"], run["requests"]["extra"], strict=True)
            if not extra
        )
        axis.plot([percentile(values, p) for p in range(101)], [p / 100 for p in range(101)], label=name)
    _distribution(axis, "TTFT, ms")


def _itl_distribution(axis: Any, reports: Sequence[Report], names: Sequence[str]) -> None:
    """Which share of tokens came after how long; the median of the runs, quantile by quantile.

    The axis ends at the 99th percentile: the longest gap of all would leave no room for the rest.
    """
    for report, name in zip(reports, names, strict=True):
        runs = [run["itl_ms_quantiles"] for case in report["cases"] for run in case["runs"]]
        points = [percentile(column, 50) for column in zip(*(r for r in runs if r), strict=True)]
        if points:
            shares = [p / (len(points) - 1) for p in range(len(points))]
            axis.plot(points[:-1], shares[:-1], label=name)
    _distribution(axis, "time between tokens, ms (to p99)")


def _distribution(axis: Any, title: str) -> None:
    axis.set_xlabel(title)
    axis.set_ylabel("share at most")
    axis.set_ylim(0, 1)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def _phases(axis: Any, reports: Sequence[Report], names: Sequence[str]) -> None:
    """The mean time of a tree's levels, one on the other, and the whole load's as a mark."""
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
    axis.set_xticklabels(names, fontsize=7)
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
