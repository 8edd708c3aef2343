"""Check what a newcomer meets first, through a server at its defaults: tiles, README prompts, the game of 24.

Counts, of `--samples` answers to each prompt, those that read as meant by rules that need no reader: the
answer ended, names what it was asked for, uses words that exist, does not repeat itself, does not refuse.
`--show` prints some, for a reader. The games are puzzles that were held out from training, the easiest
ones first; a game counts as won only if all of its sums are right. `ramify serve` must run (`--url`).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import re
import sys
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import probes
import skills_game24
import skills_page
import skills_story
from words import held

import ramify

EXAMPLES = Path(__file__).parents[1]
REFUSES = re.compile(r"\b(I am (sorry|not sure)|I do not know|too hard|I cannot|not want to tell you)\b")
STEP = re.compile(r" (\d+) ([-+*/]) (\d+) = (\d+) \(left: ([\d ]+)\)")
STORY_TOKENS = 400
Judge = Callable[[str], bool]


def lexicon() -> set[str]:
    """Every word, in lower case, that stories are made of."""
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("seed_*.txt")]
    code = [
        Path(name).read_text(encoding="utf-8") for name in map(str, Path(__file__).parent.glob("*.py"))
    ]
    return set(re.findall(r"[a-z']+", " ".join([*texts, *code]).lower()))


def reads_well(words: set[str], text: str) -> bool:
    """Sentences of known words (names apart), without loops and without a refusal."""
    unknown = [
        one
        for one in re.findall(r"\b[a-z]+\b", text)
        if one.removesuffix("s") not in words and one not in words
    ]
    return (
        text.strip().endswith((".", "!", "?", '"'))
        and len(unknown) <= len(text.split()) // 60
        and probes.repetition(text) < 0.08
        and not REFUSES.search(text[:60])
    )  # fmt: skip


def story_about(words: set[str], hero: str) -> Judge:
    """A story that begins with its hero."""
    return lambda text: reads_well(words, text) and bool(re.search(rf"\b{hero}\b", text[:250].lower()))


def ending(words: set[str], story: str, mood: str) -> Judge:
    """An end in a mood that takes up somebody of the story."""
    marks = {
        "happy": r"happ|laugh|smile|joy|feast|friend|sun|wonderful|good|best|danc",
        "sad": r"sad|cried|cry|tear|alone|lost|never|goodbye|rain|too late|quiet|away|empty|\bill\b|nobody",
    }[mood]
    names = set(re.findall(r"\b[A-Z][a-z]+\b", story)) - {
        "Once",
        "There",
        "One",
        "The",
        "Every",
        "In",
        "Long",
        "But",
    }
    return lambda text: (
        reads_well(words, text)
        and bool(re.search(marks, text.lower()))
        and any(name in text for name in names)
    )


async def ask(session: Any, prompt: str, count: int, seed: int, tokens: int) -> list[Any]:
    """`count` answers to one prompt, each on a branch of its own."""
    branches = await session.root(*(f"{seed}-{place}" for place in range(count)))
    return list(
        await asyncio.gather(
            *(branch.chat(prompt, max_tokens=tokens, seed=seed + i) for i, branch in enumerate(branches))
        )
    )


def told(name: str, marks: list[bool], target: float, texts: list[str], show: int) -> bool:
    """Print one line; whether the target is met."""
    met = sum(marks) >= target * len(marks)
    print(
        f"{'ok  ' if met else 'MISS'} {name}: {sum(marks)} of {len(marks)} (target {target:.0%})",
        flush=True,
    )
    wrong = [text for text, mark in zip(texts, marks, strict=True) if not mark]
    right = [text for text, mark in zip(texts, marks, strict=True) if mark]
    for mark, some in (("    no:  ", wrong[:show]), ("    yes: ", right[: show // 2])):
        for text in some:
            print(mark + text[:400].replace("\n", " / "))
    return met


async def answers(url: str, samples: int, show: int) -> list[bool]:
    """The tiles of the page and the prompts of the README."""
    words = lexicon()
    met: list[bool] = []
    tiles: list[tuple[str, Judge]] = [
        ("Tell me a short story about a fox.", story_about(words, "fox")),
        ("Tell me a story about a dragon.", story_about(words, "dragon")),
        ("Tell me a very short story.", lambda text: reads_well(words, text)),
        ("What is 27 + 48?", lambda text: probes.last_number(text) == "75"),
        (
            "What is a good name for a small boat?",
            lambda text: 0 < len(text) < 80 and not REFUSES.search(text[:60]),
        ),
        ("Where is Lima?", lambda text: "Peru" in text),
        ("Hello.", lambda text: len(text) > 3 and not REFUSES.search(text[:60])),
    ]
    animals = [name for name in skills_story.FRIENDS if held("hero" + name)]
    tiles += [
        (f"Tell me a story about {skills_page.article(name)}.", story_about(words, name))
        for name in animals[:4]
    ]
    async with ramify.connect(url) as session:
        for place, (prompt, judge) in enumerate(tiles):
            results = await ask(session, prompt, samples, 1000 * place, STORY_TOKENS)
            texts = [result.text for result in results]
            ended = [result.reason == "stop" for result in results]
            marks = [end and judge(text) for end, text in zip(ended, texts, strict=True)]
            met.append(told(prompt, marks, 30 / 32, texts, show))
        for mood in ("happy", "sad"):
            marks, texts = [], []
            branches = await session.root(*(f"{mood}-{place}" for place in range(samples)))
            stories = await asyncio.gather(
                *(
                    b.chat("Tell me a very short story.", max_tokens=80, seed=i)
                    for i, b in enumerate(branches)
                )
            )
            ends = await asyncio.gather(
                *(
                    b.chat(f"Give it a {mood} end.", max_tokens=60, seed=i)
                    for i, b in enumerate(branches)
                )
            )
            for story, end in zip(stories, ends, strict=True):
                whole = end.text.rsplit(".", 1)[0] + "." if end.reason == "length" else end.text
                marks.append(ending(words, story.text, mood)(whole))
                texts.append(f"{story.text} -> {end.text}")
            met.append(
                told(f"a very short story, then: Give it a {mood} end.", marks, 30 / 32, texts, show)
            )
    return met


def wins(numbers: str, steps: list[str]) -> bool:
    """Whether these steps, one after the other, make 24 of the numbers."""
    state = tuple(sorted(map(int, numbers.split())))
    for step in steps:
        state_after = dict(skills_game24.steps(state)).get(normal(step))
        if state_after is None:
            return False
        state = state_after
    return state == (skills_game24.GOAL,)


def normal(step: str) -> str:
    """The step with sums and products sorted, and what is left sorted."""
    found = STEP.fullmatch(step)
    if found is None:
        return step
    a, sign, b, value, left = found.groups()
    if sign in "+*" and int(a) > int(b):
        a, b = b, a
    return f" {a} {sign} {b} = {value} (left: {' '.join(sorted(left.split(), key=int))})"


async def game(url: str, example: Any, numbers: str, width: int) -> bool:
    """Play one puzzle with the example's own program; whether a branch of it won."""
    async with ramify.connect(url) as session:
        ops = example.frame(numbers, width)
        handles = await session.send(ops)
        texts: dict[str, list[str]] = {"main": []}
        for op, handle in zip(ops, handles, strict=True):
            if op["type"] == "fork" and not op["as"][0].endswith(".judge"):
                texts |= {child: list(texts[op.get("branch", "main")]) for child in op["as"]}
            elif op["type"] == "generate":
                for name, result in zip(op["branch"], await asyncio.gather(*handle), strict=True):
                    texts[name].append(result.text)
            elif op["type"] == "prune":
                (outcome,) = await handle
                kept = {one["into"]: list(texts[one["from"]]) for one in outcome.result["kept"]}
                if any(wins(numbers, steps) for steps in texts.values() if len(steps) == example.DEPTH):
                    return True
                texts = kept
    return False


async def games(url: str, count: int, width: int, show: int) -> bool:
    """The easiest held-out puzzles."""
    sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module("tree_of_thought")
    every = (s for s in combinations_with_replacement(range(1, 14), 4) if skills_game24.reachable(s))
    unseen = [s for s in every if held("24 " + skills_game24.text_of(s))]
    easy = [
        skills_game24.text_of(s) for s in sorted(unseen, key=skills_game24.ease, reverse=True)[:count]
    ]
    places = asyncio.Semaphore(4)

    async def one(numbers: str) -> bool:
        async with places:
            return await game(url, example, numbers, width)

    marks = list(await asyncio.gather(*map(one, easy)))
    return told(f"the game of 24, {width} proposals a state", marks, 0.6, easy, show)


def main() -> None:
    """Command line; exits with 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="ws://127.0.0.1:8765/v1/ws")
    parser.add_argument("--samples", type=int, default=32, help="answers to each prompt")
    parser.add_argument("--games", type=int, default=100, help="puzzles")
    parser.add_argument(
        "--width", type=int, default=5, help="proposals for each state, as the example has"
    )
    parser.add_argument("--show", type=int, default=2, help="answers to print for each prompt")
    args = parser.parse_args()
    met = asyncio.run(answers(args.url, args.samples, args.show))
    if args.games:
        met.append(asyncio.run(games(args.url, args.games, args.width, args.show)))
    raise SystemExit(not all(met))


if __name__ == "__main__":
    main()
