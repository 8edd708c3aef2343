"""docs/log: the index names each experiment, and each name leads to one."""

import re
from pathlib import Path

LOG = Path(__file__).parent.parent / "docs/log"


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
