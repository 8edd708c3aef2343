"""Tree of thought for the game of 24: propose steps, judge them, keep the best, three levels deep.

One frame, one round trip: the server forks the states that are left into proposals, has each one judged
on a fork of its own (`select` a number), and prunes: the best proposals take the places of the states,
and the next level goes on from there. The program lists the steps of each level whose sums are right, as
`choices`; which of them goes on from its own numbers, and to 24, is the model's part. The client only
watches; what all of them say streams into a tree.

--data: the puzzles of the method's authors (`game24.jsonl`), --size: proposals for each state.
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

from rich.live import Live
from rich.tree import Tree
from stage import Stage, brief, stage

import ramify
from ramify.clients.generation import Generation

DEPTH, KEPT = 3, 2
LARGEST = 200  # a step makes no larger number, nor a negative one or a fraction
MARKS = [f" {mark}" for mark in range(1, 10)]
RULES = """Use two of the numbers and + - * / in each step, until 24 is left.
Numbers: 2 8 8 14
Step: 2 + 8 = 10 (left: 8 10 14)
Step: 14 - 10 = 4 (left: 4 8)
Step: 4 * 8 = 32 (left: 32)
Numbers: 4 9 10 13
Step: 13 - 10 = 3 (left: 3 4 9)
Step: 9 - 3 = 6 (left: 4 6)
Step: 4 * 6 = 24 (left: 24)
"""
MADE_UP = [{"Puzzles": "4 5 6 10"}]
Ops = list[dict[str, Any]]


def states(level: int) -> list[str]:
    """The branches that a level starts from."""
    return ["main"] if level == 0 else [f"state-{place}" for place in range(KEPT)]


def proposals(level: int, width: int) -> dict[str, str]:
    """The branches of a level's proposals, and the state that each one goes on from."""
    return {f"{level}.{state}.{i}": state for state in states(level) for i in range(width)}


def steps(numbers: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each step that the numbers allow, and what it leaves."""
    for i, j in permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = [number for place, number in enumerate(numbers) if place not in (i, j)]
        quotient = a // b if b and a % b == 0 else -1
        for sign, value in (("+", a + b), ("-", a - b), ("*", a * b), ("/", quotient)):
            if 0 <= value <= LARGEST and (sign in "-/" or a <= b):
                left = tuple(sorted([*rest, value]))
                yield f" {a} {sign} {b} = {value} (left: {' '.join(map(str, left))})", left


def choices(numbers: str) -> list[list[str]]:
    """The steps of each level, of all states that the level before can leave."""
    left, found = {tuple(sorted(map(int, numbers.split())))}, []
    for _ in range(DEPTH):
        made = dict(step for state in sorted(left) for step in steps(state))
        found.append(list(made))
        left = set(made.values())
    return found


def frame(numbers: str, width: int) -> Ops:
    """The whole program."""
    ops: Ops = [{"type": "append", "text": f"{RULES}Numbers: {numbers}\n"}]
    for level, listed in enumerate(choices(numbers)):
        found = proposals(level, width)
        for state in states(level):
            children = [name for name in found if found[name] == state]
            ops.append({"type": "fork", "branch": state, "as": children})
        names = list(found)
        judges = [f"{name}.judge" for name in names]
        ops.append({"type": "append", "branch": names, "text": "Step:"})
        ops.append(
            {"type": "generate", "branch": names, "max_tokens": 40, "constraint": {"choices": listed},
             "temperature": 0.9, "seed": 100 * level}
        )  # fmt: skip
        ops += [{"type": "fork", "branch": a, "as": [b]} for a, b in zip(names, judges, strict=True)]
        ops.append({"type": "append", "branch": judges, "text": "\nChance to reach 24, from 1 to 9:"})
        ops += [{"type": "select", "branch": judge, "choices": MARKS} for judge in judges]
        ops.append(
            {
                "type": "prune",
                "from": names,
                "into": states(level + 1),
                "by": "number",
                "score_from": judges,
            }
        )
        ops.append({"type": "append", "branch": states(level + 1), "text": "\n"})
    return ops


class View:
    """The tree as it grows. Nodes are known by the names of branches."""

    def __init__(self, numbers: str) -> None:
        self.tree = Tree(f"[bold]24 from {numbers}[/]")
        self._at = {"main": self.tree}  # where each state stands
        self._leaves: dict[str, Tree] = {}
        self._texts: dict[str, str] = {}

    async def follow(self, generation: Generation, name: str, state: str) -> None:
        """Show a proposal while it is written."""
        self._texts[name] = ""
        async for delta in generation:
            self._texts[name] += delta.text
            self._leaf(name, state).label = brief(self._texts[name], 60)

    def judged(self, result: dict[str, Any], found: dict[str, str]) -> None:
        """Mark who was kept: the next level goes on from there."""
        kept = {one["from"]: one["into"] for one in result["kept"]}
        for name, state in found.items():
            leaf = self._leaf(name, state)
            score = result["scores"][name] or 0
            style = "green" if name in kept else "dim"
            leaf.label = f"[{style}]{score:.0f}  {brief(self._texts.get(name, ''), 60)}[/]"
        self._at = {into: self._leaves[name] for name, into in kept.items()}

    def _leaf(self, name: str, state: str) -> Tree:
        if name not in self._leaves:
            self._leaves[name] = self._at[state].add("")
        return self._leaves[name]


async def think(shown: Stage, numbers: str) -> None:
    view, ops = View(numbers), frame(numbers, shown.size)
    async with ramify.connect(shown.url) as session:
        handles = await session.send(ops)
        sent = list(zip(ops, handles, strict=True))
        steps: list[Any] = [handle for op, handle in sent if op["type"] == "generate"]
        prunes: list[Any] = [handle for op, handle in sent if op["type"] == "prune"]
        marks: list[Any] = [handle for op, handle in sent if op["type"] == "select"]
        with Live(view.tree, console=shown.console, refresh_per_second=12):
            for level, (running, pruned) in enumerate(zip(steps, prunes, strict=True)):
                found = proposals(level, shown.size)
                running = running if isinstance(running, list) else [running]
                pairs = zip(running, found.items(), strict=True)
                await asyncio.gather(*(view.follow(g, name, state) for g, (name, state) in pairs))
                shown.took(*await asyncio.gather(*running))
                (outcome,) = await pruned
                view.judged(outcome.result, found)
        shown.console.print()
        shown.took(*await asyncio.gather(*marks))


def main(arguments: Sequence[str] | None = None) -> None:
    with stage(__doc__, arguments, size=5, what="proposals for each state", least=KEPT) as shown:
        asyncio.run(think(shown, shown.rows("game24", MADE_UP)[0]["Puzzles"]))


if __name__ == "__main__":
    main()
