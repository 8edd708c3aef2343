"""docs/architecture.md names files and functions that there are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/architecture.md").read_text()
FILE = re.compile(r"`([\w/]+\.py)`")


def rows() -> list[tuple[list[str], list[str]]]:
    """The table of one token's way: functions, and the files that they are in."""
    table = TEXT.split("### One token, by file and function")[1].split("\n## ")[0]
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[2].startswith("`"):
            found.append((re.findall(r"`([^`]+)`", cells[1]), files_of(cells[2])))
    return found


def files_of(cell: str) -> list[str]:
    """Paths; one without a folder is beside the one before it."""
    paths: list[str] = []
    for name in FILE.findall(cell):
        paths.append(name if "/" in name else f"{Path(paths[-1]).parent}/{name}")
    return paths


@pytest.mark.parametrize(("functions", "files"), rows())
def test_a_tokens_way(functions: list[str], files: list[str]) -> None:
    text = "\n".join((ROOT / file).read_text() for file in files)
    for function in functions:
        owner, _, name = function.rpartition(".")
        assert f"class {owner}" in text or not owner, function
        assert f"def {name}(" in text, function


def test_there_is_a_way() -> None:
    assert len(rows()) > 10


@pytest.mark.parametrize("path", sorted({p for p in FILE.findall(TEXT) if "/" in p}))
def test_files_that_are_named_exist(path: str) -> None:
    """Paths begin at the root, or in `actors/`."""
    assert (ROOT / path).is_file() or (ROOT / "actors" / path).is_file()
