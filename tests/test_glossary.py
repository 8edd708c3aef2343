"""docs/glossary.md: in alphabetical order, and each file that it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENTRY = re.compile(r"^\| ([a-z][a-z -]*) \| (.+) \| `([^`]+)` \|$")


def entries() -> list[tuple[str, str, str]]:
    lines = (ROOT / "docs/glossary.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| word")]
    found = [ENTRY.match(row) for row in rows]
    assert all(found), [row for row, match in zip(rows, found, strict=True) if match is None]
    return [(match[1], match[2], match[3]) for match in found if match is not None]


def test_the_words_are_in_order() -> None:
    words = [word for word, *_ in entries()]
    assert words == sorted(words)
    assert len(words) > 50


def test_each_owner_exists() -> None:
    assert [owner for *_, owner in entries() if not (ROOT / owner).is_file()] == []


def test_a_word_with_two_meanings_says_of_what() -> None:
    words = [word for word, *_ in entries()]
    twice = {word for word in words if words.count(word) > 1}
    assert [word for word, meaning, _ in entries() if word in twice and meaning[0] != "("] == []
