"""Tests mirror the tree: a source file has its test file, or its folder's README says what covers it."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
ROW = re.compile(r"^\| `(\w+\.py)` \| (.+) \|$", re.MULTILINE)
SOURCES = sorted(
    path.relative_to(ROOT)
    for top in ("actors", "protocol", "clients", "gpu")
    for path in (ROOT / top).rglob("*.py")
    if path.name != "__init__.py" and "node_modules" not in path.parts
)


def listed(folder: Path) -> dict[str, list[str]]:
    """The files of a folder without a test file of their own, and the tests that cover them."""
    readme = TESTS / folder / "README.md"
    if not readme.exists():
        return {}
    return {name: re.findall(r"`([^`]+)`", tests) for name, tests in ROW.findall(readme.read_text())}


def test_each_source_file_has_tests() -> None:
    """A file that is not covered: write its test file, or say in the folder's README what covers it."""
    lacking = [
        str(source)
        for source in SOURCES
        if not (TESTS / source.parent / f"test_{source.name}").exists()
        and not listed(source.parent).get(source.name)
    ]
    assert lacking == []


@pytest.mark.parametrize("folder", sorted({source.parent for source in SOURCES}), ids=str)
def test_what_a_readme_lists_is_there(folder: Path) -> None:
    for name, tests in listed(folder).items():
        assert (ROOT / folder / name).is_file(), f"tests/{folder}/README.md names {name}, which is gone"
        assert not (TESTS / folder / f"test_{name}").exists(), f"{name} has tests of its own"
        assert [test for test in tests if not (TESTS / test).is_file()] == []
