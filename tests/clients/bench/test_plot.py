"""Plots, where matplotlib is installed; and what is said where it is not."""

import sys
from pathlib import Path
from typing import Any

import pytest

from ramify.clients.bench import plot
from ramify.protocol.errors import BadRequest

KEYS = ("output_tok_s", "step_ms", "prefill_tok_s", "level_1_s", "level_2_s", "seconds",
        "computed_ratio", "wall_over_device", "ready_s")  # fmt: skip


def made(workload: str, label: str, factor: float) -> dict[str, Any]:
    figures = {key: {"median": factor, "min": 0.9 * factor, "max": 1.2 * factor} for key in KEYS}
    run = {
        "figures": {"seconds": factor},
        "requests": {"ttft_ms": [1.0 * factor, 2.0, 3.0], "extra": [False, False, True]},
        "itl_ms_quantiles": [factor * i for i in range(101)],
    }
    case = {"name": "a case, with sizes, and a name too long", "figures": figures, "runs": [run, run]}
    machine = {"gpus": "none found", "cpu": "x"}
    return {"workload": workload, "label": label, "time": "2026-01-01T00:00", "machine": machine,
            "cases": [case]}  # fmt: skip


@pytest.mark.parametrize("workload", plot.PANELS)
def test_every_workload_can_be_compared(workload: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    reports = [made(workload, "same", 1.0), made(workload, "same", 2.0)]
    path = tmp_path / "a.svg"
    plot.draw(reports, path)
    assert "<svg" in path.read_text()


def test_different_workloads_are_not_compared(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(BadRequest, match="chat, tree"):
        plot.draw([made("chat", "a", 1), made("tree", "b", 1)], tmp_path / "a.png")


def test_faults_show_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match=r"\.svg, \.png, \.pdf"):
        plot.check(Path("a.txt"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BadRequest, match=f"{sys.executable} -m pip install matplotlib"):
        plot.check(Path("a.svg"))
