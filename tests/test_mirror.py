"""Tests mirror the tree by folders: each folder of sources has a folder of tests."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
TOPS = ("actors", "protocol", "clients", "gpu")
FOLDERS = sorted(
    {
        path.parent.relative_to(ROOT)
        for top in TOPS
        for path in (ROOT / top).rglob("*.py")
        if path.name != "__init__.py" and "node_modules" not in path.parts
    }
)


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_a_folder_of_sources_has_tests(folder: Path) -> None:
    assert any((TESTS / folder).rglob("test_*.py")), f"write tests/{folder}/test_*.py"


def test_no_folder_of_tests_outlives_its_sources() -> None:
    tested = {
        path.parent.relative_to(TESTS) for top in TOPS for path in (TESTS / top).rglob("test_*.py")
    }
    assert sorted(tested - set(FOLDERS)) == []
