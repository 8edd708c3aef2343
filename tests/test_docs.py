"""README.md, CONTRIBUTING.md, docs/ without the log: no long sentence, no wide line."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GENERATED = "settings.md"  # its rows are as long as a setting's help
PAGES = [
    page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "log" not in page.parts and page.name != GENERATED
]
MOST_WORDS = 35
MOST_COLUMNS = 160
WORD = re.compile(r"\S*\w\S*")
# A paragraph ends where a line is empty, or a list item, a table's row, a heading or a quote begins.
_BREAK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*+] |\d+\. |\||#|>))")
_END = re.compile(r"(?<=[.?!|])\s+|(?<=[.?!][)\"`*])\s+")  # cells of a table are read by themselves


def prose(text: str) -> str:
    """`text` without code: lists of names are looked through, not read."""
    text = re.sub(r"^(\s*)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^#.*$", r"\g<0>\n", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`", "``", re.sub(r"\]\([^)]*\)", "]", text))


def sentences(text: str) -> list[str]:
    paragraphs = _BREAK.split(prose(text))
    return [part for each in paragraphs for part in _END.split(" ".join(each.split())) if part]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_is_too_long(page: Path) -> None:
    long = [each for each in sentences(page.read_text()) if len(WORD.findall(each)) > MOST_WORDS]
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_is_too_wide(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert [line for line in lines if len(line) > MOST_COLUMNS] == []


def test_sentences() -> None:
    text = (
        "One `a b c` is\nfirst. Two (see [x](y z)).\n\n- a: b\n- c; d\n\n```sh\nno no\n```\n| e f | g |"
    )
    assert sentences(text) == [
        "One `` is first.",
        "Two (see [x]).",
        "- a: b",
        "- c; d",
        "|",
        "e f |",
        "g |",
    ]
