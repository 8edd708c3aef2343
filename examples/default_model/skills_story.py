"""Short stories for the model to learn from: plots with interchangeable people, places and events.

A plot is a list of steps; each step offers several wordings. A told story picks one wording a step, so
one plot gives millions of texts. The plots are in `seed_plots.txt`. Does not know conversations beyond
the single request a story answers.
"""

from __future__ import annotations

import re
from pathlib import Path

from words import Chooser, article, held

Turn = tuple[str, str]

HEROES = (
    "girl, boy, rabbit, fox, bear, mouse, duck, cat, dog, owl, frog, hedgehog, squirrel, pony, lamb, turtle, "
    "monkey, elephant, penguin, bird, dragon, lion, tiger, wolf, horse, cow, pig, goat, sheep, hen, goose, swan, "
    "parrot, eagle, crow, robin, whale, dolphin, shark, fish, octopus, crab, seal, otter, beaver, badger, deer, "
    "moose, camel, giraffe, zebra, hippo, rhino, crocodile, snake, lizard, snail, bee, butterfly, ladybug, spider, "
    "ant, cricket, bat, mole, kangaroo, koala, panda, hamster, kitten, puppy, dinosaur, unicorn, robot, knight, "
    "princess, prince, king, queen, wizard, witch, fairy, giant, ghost, mermaid, pirate, sailor, astronaut, farmer, "
    "baker, teacher, gardener, fisherman, snowman, clown, grandmother, grandfather"
).split(", ")
# Who a hero meets: animals, so that "m the friend" always reads well.
FRIENDS = HEROES[2 : HEROES.index("robot")]
TRAITS = (
    "small, brave, shy, curious, kind, clever, cheerful, quiet, gentle, lively, young, friendly".split(
        ", "
    )
)
ENDINGS = (
    "From that day on, {n} and {m} were the best of friends.",
    "That night {n} fell asleep with a smile.",
    "And {n} never forgot that day.",
    "Everyone was happy, and {n} most of all.",
    "And so the day ended better than it had begun.",
    "{n} learned that {moral}.",
    "{n} had learned that {moral}, and so had {m}.",
    "Since then {n} always remembers that {moral}.",
)
GIRLS = (
    "Anna, Clara, Ella, Grace, Iris, Kate, Mia, Rosa, Tara, Nina, Lucy, Emma, Lily, Maya, Sara".split(
        ", "
    )
)
BOYS = "Ben, David, Finn, Henry, Jack, Leo, Noah, Paul, Sam, Tom, Max, Peter, Oscar, Hugo, Adam".split(
    ", "
)
SHE = ("girl", "princess", "queen", "witch", "fairy", "mermaid", "grandmother")
HE = ("boy", "prince", "king", "wizard", "grandfather")
AGAIN = (
    "A few days later, there was another adventure.",
    "But that was not the end.",
    "The next week, something else happened.",
    "Soon after that, a new day brought a new surprise.",
)
OPENINGS = (
    "Once upon a time there was a {trait} {hero} named {n}.",
    "Once there lived a {trait} {hero} called {n}.",
    "There was once a {hero} named {n}, who was very {trait}.",
    "{n} was a {trait} {hero}.",
    "Long ago, near a {place}, there lived a {trait} {hero} named {n}.",
    "In a small house by the {place} lived a {trait} {hero} called {n}.",
)
HOMES = (
    "{n} lived with {p} family near the {place}.",
    "{N} lived near the {place} and liked to play there.",
    "Every day {n} walked to the {place} to see what was new.",
    "{N} loved {food} and long walks by the {place}.",
    "More than anything {n} loved {p} {color} {thing}.",
    "{N} had a {color} {thing} and took it everywhere.",
    "Everyone at the {place} knew {n}.",
)


Plot = tuple[str, list[list[str]]]


def load_plots(name: str) -> list[Plot]:
    """(moral, steps) of every plot of a file; a step is a list of wordings."""
    plots: list[Plot] = []
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        plots.append((lines[0], [[part.strip() for part in line.split(" / ")] for line in lines[1:]]))
    return plots


PLOTS = load_plots("seed_plots.txt")


def _many(word: str) -> str:
    if word.endswith("y"):
        return word[:-1] + "ies"
    return word + ("es" if word.endswith("ch") else "s")


def _cast(choose: Chooser, hero: str | None, thing: str | None) -> dict[str, str]:
    first = hero or choose.one(HEROES)
    n, m = Chooser(choose.rng, choose.split, 0.03).several("name", 2)
    he = choose.one(("he", "she"))
    if first in SHE or first in HE:
        he, names = ("she", GIRLS) if first in SHE else ("he", BOYS)
        n = choose.one([name for name in names if name != m])
    friend = choose.one([one for one in FRIENDS if one != first])
    return {
        "n": n, "m": m, "hero": first, "friend": friend, "he": he, "he_": he.capitalize(),
        "him": "him" if he == "he" else "her", "p": "his" if he == "he" else "her",
        "P": "His" if he == "he" else "Her", "trait": choose.one(TRAITS), "trait2": choose.one(TRAITS),
        "place": choose.word("place"), "place2": choose.word("place"), "thing": thing or choose.word("thing"),
        "color": choose.word("color"), "food": choose.word("food"), "day": choose.word("day"),
        "weather": choose.word("weather"), "fruits": _many(choose.word("fruit")), "N": n,
    }  # fmt: skip


def told(
    choose: Chooser,
    hero: str | None = None,
    thing: str | None = None,
    long: bool = False,
    plots: list[Plot] = PLOTS,
) -> tuple[str, dict[str, str]]:
    """A story and its cast; a long one (about 250 words) has two episodes."""
    moral, steps = choose.rng.choice(plots)
    if long:
        moral, more = choose.rng.choice([plot for plot in PLOTS if plot[0] != moral])
        steps = [*steps, list(AGAIN), *more]
    cast = _cast(choose, hero, thing)
    cast["moral"] = moral
    opening = choose.one(OPENINGS).format(**cast)
    cast["N"] = cast["he_"] if choose.chance(0.6) else cast["n"]
    sentences = [opening]
    if choose.chance(0.7):
        sentences.append(choose.one(HOMES).format(**cast))
    if thing and not any("{thing}" in part for step in steps for part in step):
        sentences.append(f"{cast['he_']} had {article(thing)} and was very proud of it.")
    breaks = {len(steps) // 3, 2 * len(steps) // 3}
    paragraphs: list[list[str]] = [sentences]
    for place, step in enumerate(steps):
        if place in breaks and choose.chance(0.8):
            paragraphs.append([])
        sentence = choose.one(step).format(**cast)
        paragraphs[-1].append(sentence[0].upper() + sentence[1:])
    paragraphs[-1].append(choose.one(ENDINGS).format(**cast))
    text = "\n\n".join(" ".join(part) for part in paragraphs if part)
    return tidy(text), cast


def tidy(text: str) -> str:
    """The text with `an` before vowels."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


ASKS = (
    "Tell me a story.", "Tell me a short story.", "Can you tell me a story?", "Write a short story.",
    "I want to hear a story.", "tell me a story", "Please tell me a bedtime story.", "Write a story for children.",
    "Make up a story.", "Tell me another story.",
)  # fmt: skip
LONG = (
    "Tell me a long story.", "Write a story of about 200 words.", "Write a long story.", "Tell me a longer story.",
    "Write a 200 word story.", "I want to hear a long story.", "Write a story with about two hundred words.",
)  # fmt: skip
ABOUT = (
    "Tell me a story about {0}.", "Write a short story about {0}.", "Can you tell me a story about {0}?",
    "Write a story about {0}.", "Tell me a short story about {0}.", "tell me a story about {0}",
    "Make up a story about {0}.", "I would like a story about {0}.",
)  # fmt: skip


def turn(choose: Chooser) -> Turn:
    """A request for a story and the story."""
    shape = choose.number(0, 4)
    if shape == 0:
        return choose.one(ASKS), told(choose)[0]
    if choose.chance(0.2):
        return choose.one(LONG), told(choose, long=True)[0]
    hero = choose.one([one for one in HEROES if choose.split == "held" or not held("hero" + one)])
    if shape <= 2:
        return choose.one(ABOUT).format(article(hero)), told(choose, hero)[0]
    thing = choose.word("thing")
    if shape == 3:
        return choose.one(ABOUT).format(f"{article(hero)} and {article(thing)}"), told(
            choose, hero, thing
        )[0]
    text, cast = told(choose, hero)
    return choose.one(ABOUT).format(f"{article(hero)} named {cast['n']}"), text
