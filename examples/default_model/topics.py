"""The small knowledge base: topics of everyday life with a few true sentences each.

Read from `seed_topics.txt` (written for this project): `name|kind|fact|fact...` on each line. Does not
know which skills use a topic.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from words import Split, article, held

_NO_ARTICLE = frozenset(
    "rain snow wind water ice air fire gravity light sound electricity blood sleep bread cheese rice honey "
    "chocolate tea coffee salt pizza soup music football tennis chess swimming money friendship courage "
    "python spring summer autumn winter family".split()
)
_THE = frozenset("sun moon earth sea heart brain internet".split())
_PLURAL = {
    "sheep": "sheep", "mouse": "mice", "wolf": "wolves", "fox": "foxes", "butterfly": "butterflies",
    "tooth": "teeth", "fish": "fish", "deer": "deer", "goose": "geese", "octopus": "octopuses", "ostrich": "ostriches",
    "jellyfish": "jellyfish", "mosquito": "mosquitoes", "bus": "buses", "flamingo": "flamingos", "library": "libraries", "city": "cities", "family": "families", "compass": "compasses",
}  # fmt: skip


@dataclass(frozen=True)
class Topic:
    """One topic and what is known about it."""

    name: str
    kind: str
    facts: tuple[str, ...]

    @property
    def a_name(self) -> str:
        """The name with the article a sentence needs."""
        if self.name in _NO_ARTICLE:
            return self.name.capitalize() if self.name == "python" else self.name
        return "the " + self.name if self.name in _THE else article(self.name)

    @property
    def plural(self) -> str:
        """The name as a group of things, where there is one."""
        if self.name in _NO_ARTICLE or self.name in _THE:
            return self.a_name
        return _PLURAL.get(self.name, self.name + "s")


def _load() -> tuple[Topic, ...]:
    lines = (Path(__file__).parent / "seed_topics.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|") for line in lines if line.strip()]
    return tuple(Topic(row[0], row[1], tuple(row[2:])) for row in rows)


TOPICS = _load()


def topic_pool(split: Split) -> list[Topic]:
    """Topics for judging skills; facts themselves are taught for all topics."""
    return [topic for topic in TOPICS if held("judge" + topic.name) == (split == "held")]
