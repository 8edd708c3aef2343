"""Every example runs on the bundled model, on one server for all."""

import importlib
import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
DATA = Path(os.environ.get("RAMIFY_WORKLOADS", Path(__file__).parents[3] / "shared/data/workloads"))
SAYS = {  # what stands in its output, beside its head and its costs; its --size
    "agent": ("questions came to an answer", 4),
    "chat": ("Model:", 1),
    "classify": ("5 right", 9),
    "hellaswag": ("2 right", 2),
    "json_extraction": ("Country(name=", 2),
    "judge": ("verdict", 1),
    "mmlu": ("3 right", 3),
    "rag": ("What colour is the boat?", 1),
    "skeleton_of_thought": ("How can I sleep better?", 1),
    "tools": ("steps; at the last,", 1),
    "town": ("9 o'clock", 2),
    "tree_of_thought": ("24 from 4 5 6 10", 2),
    "vote": ("right is 12", 2),
}
OLDER = ("best_of", "raw_client", "two_endings")  # they take a server that runs


@pytest.fixture
def url(bundled: str) -> str:
    return bundled


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Import an example as if its folder were the working one."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)

    def take(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield take
    for name in set(sys.modules) - before:
        if (
            getattr(sys.modules[name], "__file__", None)
            and Path(sys.modules[name].__file__ or "").parent == FOLDER
        ):
            del sys.modules[name]


@pytest.mark.parametrize("name", ["vote", *OLDER])
def test_without_a_server_it_says_so_in_a_line(
    name: str, load: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No traceback: whoever tries it reads what to do."""
    monkeypatch.setattr(sys, "argv", [name, "--url", "ws://127.0.0.1:9/v1/ws"])
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert "127.0.0.1" in str(left.value)
    assert left.value.__suppress_context__


@pytest.mark.parametrize("name", sorted(SAYS))
def test_it_runs(name: str, url: str, load: object, capsys: pytest.CaptureFixture[str]) -> None:
    expected, size = SAYS[name]
    load(name).main(["--url", url, "--size", str(size)])  # type: ignore[operator]
    output = " ".join(capsys.readouterr().out.split())
    assert expected in output
    assert " prompt tokens: " in output
    assert "Traceback" not in output


@pytest.mark.skipif(not DATA.exists(), reason="needs the data sets")
@pytest.mark.parametrize("name", sorted(SAYS))
def test_it_runs_on_real_data(
    name: str, url: str, load: object, capsys: pytest.CaptureFixture[str]
) -> None:
    load(name).main(["--url", url, "--size", str(SAYS[name][1]), "--data", str(DATA)])  # type: ignore[operator]
    assert " prompt tokens: " in " ".join(capsys.readouterr().out.split())


def test_every_program_on_the_stage_is_run() -> None:
    sources = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
    assert {name for name, source in sources.items() if "from stage import" in source} == set(SAYS)


def test_the_table_counts_lines() -> None:
    rows = re.findall(r"\| `(\w+)\.py` \|.*\| (\d+) \| [^|]+ \|", (FOLDER / "README.md").read_text())
    assert {name for name, _ in rows} == set(SAYS)
    for name, lines in rows:
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) == int(lines), name
