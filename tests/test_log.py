"""docs/log: the index names each experiment, and each name leads to one; so do the names of scripts."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOG = ROOT / "docs/log"


def anchor(heading: str) -> str:
    """What a heading is called in links, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_index_is_complete() -> None:
    index = (LOG / "README.md").read_text()
    linked = re.findall(r"\]\((\w+\.md)#([^)]+)\)", index)
    there = [
        (path.name, anchor(heading))
        for path in sorted(LOG.glob("*.md"))
        if path.name != "README.md"
        for heading in re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE)
    ]
    assert sorted(linked) == sorted(there)


def test_scripts_are_there_or_say_where_they_were() -> None:
    """`NAME.py`, or `NAME.py at COMMIT` where it has left the tree."""
    rows = re.findall(r"^\| 20.*\|([^|]*)\|$", (LOG / "README.md").read_text(), re.MULTILINE)
    named = {script.strip() for row in rows for script in row.split(";") if script.strip()}
    there = {path.name for path in [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/**/test_*.py")]}
    gone = {script for script in named - there if not re.fullmatch(r"\w+\.py at [0-9a-f]{7,}", script)}
    assert gone == set(), "say `at COMMIT`, where the script was last in the tree"
    still = {script for script in named if script.partition(" at ")[0] in there and " at " in script}
    assert still == set(), "these are in the tree"
