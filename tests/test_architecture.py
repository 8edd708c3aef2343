"""docs/architecture.md and docs/internals name files and functions that there are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "docs/architecture.md", *sorted((ROOT / "docs/internals").glob("*.md"))]
FILE = re.compile(r"`([\w/]+\.py)`")


def rows() -> list[tuple[list[str], list[str]]]:
    """The table of one token's way: functions, and the files that they are in."""
    found = []
    for line in (ROOT / "docs/internals/token.md").read_text().splitlines():
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


@pytest.mark.parametrize(
    "path", sorted({path for page in PAGES for path in FILE.findall(page.read_text()) if "/" in path})
)
def test_files_that_are_named_exist(path: str) -> None:
    """Paths begin at the root, or in `actors/`."""
    assert (ROOT / path).is_file() or (ROOT / "actors" / path).is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_map_is_one_page() -> None:
    """And it names each page of the internals."""
    text = PAGES[0].read_text()
    assert len(text.splitlines()) <= 150
    assert [page.name for page in PAGES[1:] if f"internals/{page.name}" not in text] == []
