"""Write conversations that teach the default model its skills.

Combines the turns of the `skills_*` files into conversations of several turns: facts are told early and
asked for later, with other skills in between, so that remembering works across topics. Deterministic
for a seed. Does not know tokens; `prepare.py` encodes what this file makes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import skills_game24
import skills_json
import skills_math
import skills_open
import skills_page
import skills_recall
import skills_story
import skills_talk
import skills_tools
from corpus import Message
from words import Chooser, Split

Turn = tuple[str, str]


def _messages(turns: list[Turn]) -> list[Message]:
    found: list[Message] = []
    for ask, say in turns:
        found += [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]
    return found


def filler(choose: Chooser) -> Turn:
    """One turn of any skill but stories and tools."""
    make = choose.rng.choices(
        (skills_talk.turn, skills_math.turn, skills_json.turn, skills_open.turn), weights=(58, 17, 9, 16)
    )[0]
    return make(choose)


def recall(choose: Chooser, facts: int, between: int) -> list[Turn]:
    """`facts` facts told, `between` other turns, and then questions about the facts.

    The last turn asks for a fact told at least `between` + 1 turns before.
    """
    turns: list[Turn] = []
    known: list[skills_recall.Fact] = []
    while len(known) < facts:
        fact = skills_recall.draw(choose)
        taken = {other.kind for other in known}
        if fact.kind in taken or {"number", "age"} <= taken | {fact.kind}:
            continue
        if fact.second and fact.second in {other.second for other in known}:
            continue
        known.append(fact)
        turns.append(skills_recall.tell(choose, fact))
        if choose.chance(0.2):
            turns.append(filler(choose))
    if choose.chance(0.15):
        place = choose.number(0, len(known) - 1)
        turn, known[place] = skills_recall.correct(choose, known[place])
        turns.append(turn)
    turns += [filler(choose) for _ in range(between)]
    order = choose.rng.sample(known, choose.number(1, len(known)))
    for place, fact in enumerate(order):
        if place and choose.chance(0.3):
            turns.append(filler(choose))
        turns.append(skills_recall.ask(choose, fact))
    if choose.chance(0.2):
        turns.append(skills_recall.unknown(choose, known))
    return turns


def compressed(choose: Chooser) -> list[Turn]:
    """Several facts told in one turn, then asked for."""
    facts: list[skills_recall.Fact] = []
    for kind in choose.rng.sample(
        ["name", "city", "color", "food", "job", "hobby", "pet", "sport"], choose.number(2, 3)
    ):
        facts.append(skills_recall.draw(choose, kind))
    told = " ".join(skills_recall.tell(choose, fact)[0].rstrip(".!") + "." for fact in facts)
    turns: list[Turn] = [(told, choose.one(skills_recall.NODS))]
    turns += [filler(choose) for _ in range(choose.number(0, 4))]
    return turns + [
        skills_recall.ask(choose, fact)
        for fact in choose.rng.sample(facts, choose.number(1, len(facts)))
    ]


def mixed(choose: Chooser) -> list[Turn]:
    """A few turns of any skills."""
    turns = [filler(choose) for _ in range(choose.number(1, 6))]
    if choose.chance(0.15):
        turns.insert(choose.number(0, len(turns)), skills_story.turn(choose))
    if choose.chance(0.1):
        turns += skills_talk.skeleton(choose)
    if choose.chance(0.12):
        turns += skills_open.more(choose)
    return turns


def conversation(choose: Chooser) -> list[Message]:
    """One conversation of a random make-up."""
    kind = choose.rng.choices(
        ("mixed", "recall", "compressed", "tools", "story", "json", "math", "talk"),
        weights=(20, 24, 6, 14, 9, 10, 12, 10),
    )[0]
    if kind == "tools":
        dialogue = skills_tools.dialogue(choose)
        if dialogue[0]["role"] == "user" and choose.chance(0.3):
            return _messages([filler(choose)]) + dialogue
        return dialogue
    if kind == "mixed":
        turns = mixed(choose)
    elif kind == "recall":
        turns = recall(choose, choose.number(1, 4), choose.number(0, 6))
    elif kind == "compressed":
        turns = compressed(choose)
    elif kind == "story":
        turns = [skills_story.turn(choose)]
        if choose.chance(0.2):
            turns.append(skills_story.turn(choose))
    elif kind == "json":
        turns = [skills_json.turn(choose) for _ in range(choose.number(1, 3))]
    elif kind == "math":
        turns = [skills_math.turn(choose) for _ in range(choose.number(1, 6))]
    else:
        make = skills_open.turn if choose.chance(0.35) else skills_talk.turn
        turns = [make(choose) for _ in range(choose.number(1, 4))]
    messages = _messages(turns)
    if choose.chance(0.12):
        messages.insert(0, {"role": "system", "content": choose.one(skills_talk.SYSTEMS)})
    return messages


def conversations(count: int, seed: int, split: Split = "train") -> Iterator[list[Message]]:
    """`count` conversations of one split."""
    rng = random.Random(seed)
    for _ in range(count):
        yield conversation(Chooser(rng, split))


def shown(count: int, seed: int) -> Iterator[list[skills_page.Piece]]:
    """`count` documents in pieces: games of 24, what the page shows, and facts asked for long after."""
    choose = Chooser(random.Random(seed))
    for _ in range(count):
        kind = choose.rng.choices(("game24", "page", "long"), weights=(33, 62, 5))[0]
        if kind == "game24":
            yield skills_game24.document(choose)
        elif kind == "page":
            yield skills_page.document(choose)
        else:
            yield skills_page.chat(recall(choose, choose.number(1, 4), choose.number(20, 70)))


def _part(job: tuple[Callable[[int, int], Iterator[Any]], int, int]) -> list[Any]:
    make, count, seed = job
    return list(make(count, seed))


def parallel(
    make: Callable[[int, int], Iterator[Any]], count: int, seed: int, workers: int, step: int = 2000
) -> Iterator[Any]:
    """What `make(count, seed)` gives, by several processes; the same for any number of workers."""
    jobs = [
        (make, min(step, count - start), seed * 1_000_003 + start) for start in range(0, count, step)
    ]
    with multiprocessing.Pool(workers) as pool:
        for part in pool.imap(_part, jobs):
            yield from part


def main() -> None:
    """Write conversations as JSON lines, to look at or to train on elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with args.out.open("w", encoding="utf-8") as file:
        for messages in conversations(args.count, args.seed):
            file.write(json.dumps({"messages": messages, "source": "synthesize"}) + "\n")


if __name__ == "__main__":
    main()
