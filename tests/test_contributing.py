"""CONTRIBUTING.md names files that there are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
MADE = {  # by who walks
    "actors/session/ops/measure.py",
    "tests/actors/session/ops/test_measure.py",
}
FILES = sorted(set(re.findall(r"`([\w.]+(?:/[\w.]+)+\.(?:py|md))`", TEXT)))


@pytest.mark.parametrize("path", FILES)
def test_a_file_on_a_walk_is_there(path: str) -> None:
    assert (ROOT / path).is_file() != (path in MADE)


def test_there_are_walks() -> None:
    assert len(FILES) > 20
    assert TEXT.count("## Walk ") == 3
