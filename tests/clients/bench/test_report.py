"""Tables, and files that survive a round trip."""

import json
from pathlib import Path
from typing import Any

import pytest

from ramify.clients.bench import report
from ramify.clients.bench.workloads import LATENCY, PREFIX, Case, tree
from ramify.protocol.errors import BadRequest


def case(name: str, shown: list[str], **figures: tuple[float, float, float]) -> dict[str, Any]:
    spreads = {k: dict(zip(("median", "min", "max"), v, strict=True)) for k, v in figures.items()}
    return {"name": name, "shown": shown, "figures": spreads, "runs": []}


def test_a_table_for_each_set_of_columns() -> None:
    cases = [
        case("one", ["output_tok_s", "itl_mean_ms"], output_tok_s=(12345.6, 12000, 13000)),
        case("two", ["output_tok_s", "itl_mean_ms"], output_tok_s=(1, 1, 1), itl_mean_ms=(2, 2, 2)),
        case("three", ["step_ms"], step_ms=(1.23456, 1.2, 1.3)),
    ]
    text = report.text({"cases": cases, "ready_s": 4.5})
    first, second, ready = text.split("\n\n")
    assert "12,346 (12,000-13,000)" in first
    assert first.splitlines()[1].split()[-1] == "-"  # not measured
    assert first.splitlines()[2].split() == ["two", "1", "2.00"]
    assert second.splitlines()[1].split() == ["three", "1.235", "(1.200-1.300)"]
    assert ready.startswith("ready 4.50 s")


def test_every_figure_that_is_shown_has_a_column() -> None:
    trees: Case = tree(1, 1, 1, 1, 1)
    assert {*LATENCY, *PREFIX, *trees.figures} <= report.COLUMNS.keys()


def test_tokens_stay_secret() -> None:
    flags = ["bench", "--token", "secret", "--auth-token=secret", "--json", "x"]
    shown = report.without_tokens(flags)
    assert shown == ["bench", "--token", "***", "--auth-token=***", "--json", "x"]


def test_files(tmp_path: Path) -> None:
    made = report.assemble("chat", "us", {"kind": "ramify"}, {"repeats": 3}, [case("x", [])])
    assert "ramify bench chat" in report.headline(made)
    path = tmp_path / "a.json"
    report.write(made, path)
    assert report.read(path) == json.loads(json.dumps(made))
    for text, message in (("{", "not JSON"), ("{}", "no report"), ("[]", "no report")):
        path.write_text(text)
        with pytest.raises(BadRequest, match=message):
            report.read(path)
