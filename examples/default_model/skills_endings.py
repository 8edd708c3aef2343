"""Very short stories, and what people ask after a story: another end, a title, who it was about.

An end takes up the names and places of its story, also where the story was cut off in mid-sentence: the
first demonstration of the README forks such a story into endings. Plots are in `seed_short.txt`, ends in
`seed_ends.txt`. Does not know conversations beyond a story and what follows it.
"""

from __future__ import annotations

import re
from pathlib import Path

import skills_story
from words import Chooser, article

Turn = tuple[str, str]
Cast = dict[str, str]

SHORT = (
    "Tell me a very short story.", "Write a very short story.", "Tell me a tiny story.", "A very short story, please.",
    "Tell me a story in a few sentences.", "tell me a very short story", "A short story of a few sentences, please.",
)  # fmt: skip
SHORT_ABOUT = (
    "Tell me a very short story about {0}.", "Write a very short story about {0}.", "A tiny story about {0}, please.",
    "Tell me a story about {0} in a few sentences.",
)  # fmt: skip
MOODS: dict[str, tuple[str, ...]] = {
    "happy": ("happy", "good", "nice"),
    "sad": ("sad", "very sad"),
    "funny": ("funny", "silly"),
    "surprising": ("surprising", "strange", "unexpected"),
}
ASK_END = (
    "Give it {0} end.", "Give it {0} ending.", "Write {0} end.", "Now give the story {0} end.", "Tell me {0} ending.",
    "Finish it with {0} end.", "Make up {0} end for it.", "Can you give it {0} end?", "How about {0} end?",
)  # fmt: skip
ASK_TITLE = ("Give it a title.", "What is a good title for it?", "Find a title for the story.")
ASK_HERO = ("Who is the story about?", "Who is the hero of the story?", "What is the hero called?")
ASK_MORAL = ("What is the moral of the story?", "What do we learn from it?", "What did {n} learn?")


def _ends() -> dict[str, list[list[list[str]]]]:
    """The ends of each mood; an end is a list of steps, a step a list of wordings."""
    found: dict[str, list[list[list[str]]]] = {}
    text = (Path(__file__).parent / "seed_ends.txt").read_text(encoding="utf-8")
    for block in text.strip().split("\n\n"):
        mood, *lines = block.splitlines()
        found.setdefault(mood, []).append([line.split(" / ") for line in lines])
    return found


ENDS = _ends()
PLOTS = skills_story.load_plots("seed_short.txt")


def end(choose: Chooser, cast: Cast, story: str, mood: str) -> str:
    """An end of two to four sentences in a mood. It names the hero, and the friend if the story got that far."""
    first, *middle, last = choose.rng.choice(ENDS[mood])
    if choose.chance(0.4):
        middle = middle[: choose.number(0, 1)]
    known = cast["m"] in story
    wordings = [
        [each for each in step if known or "{m}" not in each] or step for step in (first, *middle, last)
    ]
    chosen = [choose.rng.choice(each) for each in wordings]
    named = [place for place, each in enumerate(wordings) if any("{n}" in one for one in each)]
    if named and not any(
        "{n}" in each for each in chosen
    ):  # an end without its hero could be any story's
        place = choose.rng.choice(named)
        chosen[place] = choose.rng.choice([each for each in wordings[place] if "{n}" in each])
    sentences = [each.format(**cast) for each in chosen]
    return skills_story.tidy(" ".join(each[0].upper() + each[1:] for each in sentences))


def cut(choose: Chooser, story: str) -> str:
    """The story as it is where its tokens ran out: somewhere in its second half."""
    words = re.split(r"(?<= )", story)
    return "".join(words[: choose.number(len(words) // 3, len(words) - 1)]).rstrip()


def told(choose: Chooser) -> tuple[str, str, Cast]:
    """A request for a story, the story, and its cast."""
    hero = choose.one(skills_story.HEROES) if choose.chance(0.5) else None
    short = choose.chance(0.65)
    story, cast = skills_story.told(choose, hero, plots=PLOTS if short else skills_story.PLOTS)
    asks = (
        (SHORT if short else skills_story.ASKS)
        if hero is None
        else SHORT_ABOUT
        if short
        else skills_story.ABOUT
    )
    return choose.one(asks).format(article(hero) if hero else ""), story, cast


def turns(choose: Chooser) -> list[Turn]:
    """A story, and one to three things asked about it; ends most of the time."""
    ask, story, cast = told(choose)
    whole = choose.chance(0.5)
    found: list[Turn] = [(ask, story if whole else cut(choose, story))]
    for _ in range(choose.number(1, 3)):
        kind = choose.rng.choices(("end", "title", "hero", "moral"), weights=(70, 10, 12, 8))[0]
        if kind == "end":
            mood = choose.one(list(MOODS))
            word = choose.one(MOODS[mood])
            found.append(
                (choose.one(ASK_END).format(article(word)), end(choose, cast, found[0][1], mood))
            )
        elif kind == "title":
            title = choose.one((f"{cast['n']} and {cast['m']}", f"{cast['n']} the {cast['hero'].capitalize()}",
                                f"The {cast['trait'].capitalize()} {cast['hero'].capitalize()}"))  # fmt: skip
            found.append((choose.one(ASK_TITLE), title))
        elif kind == "hero":
            found.append(
                (choose.one(ASK_HERO), f"It is about {cast['n']}, a {cast['trait']} {cast['hero']}.")
            )
        elif whole:
            moral = cast["moral"]
            found.append((choose.one(ASK_MORAL).format(**cast), f"{moral[0].upper()}{moral[1:]}."))
    return found
