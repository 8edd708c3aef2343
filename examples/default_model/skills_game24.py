"""The game of 24 as `examples/tree_of_thought.py` and the page's demo play it: steps and judgements.

A puzzle is four numbers; a step replaces two of them by their sum, difference, product or quotient. The
documents are the program's own text, in pieces of which only steps and marks are learnt from. A puzzle
is held out by the CRC-32 of its numbers (see `words.held`). Does not know how branches are searched.
"""

from __future__ import annotations

from functools import cache
from itertools import permutations

from words import Chooser, Split, held

Piece = tuple[str, bool]
State = tuple[int, ...]  # the numbers that are left, sorted

GOAL, LARGEST = 24, 200
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
JUDGE = "\nChance to reach 24, from 1 to 9:"
SURE, HOPELESS = 9, 1


@cache
def steps(state: State) -> tuple[tuple[str, State], ...]:
    """Each step that `state` allows, as the program writes it, and what it leaves. No negative numbers,
    no fractions, nothing above `LARGEST`.
    """
    found: dict[str, State] = {}
    for i, j in permutations(range(len(state)), 2):
        a, b = state[i], state[j]
        rest = [number for place, number in enumerate(state) if place not in (i, j)]
        for sign, value in (("+", a + b), ("-", a - b), ("*", a * b), ("/", a // b if b else -1)):
            wrong = value < 0 or value > LARGEST or (sign == "/" and (b == 0 or a % b))
            if wrong or (sign in "+*" and a > b):
                continue
            left = tuple(sorted([*rest, value]))
            found[f" {a} {sign} {b} = {value} (left: {' '.join(map(str, left))})"] = left
    return tuple(found.items())


@cache
def good_steps(state: State) -> tuple[tuple[str, State], ...]:
    """The steps of `state` after which 24 can still be reached."""
    return tuple((text, left) for text, left in steps(state) if reachable(left))


@cache
def reachable(state: State) -> bool:
    """Whether 24 alone can be left."""
    if len(state) == 1:
        return state[0] == GOAL
    return any(reachable(left) for _, left in steps(state))


def mark(state: State) -> int:
    """The judgement of a state, from 1 to 9: done, hopeless, or how many good steps it has (5 to 8)."""
    if state == (GOAL,):
        return SURE
    return min(8, 4 + len(good_steps(state))) if reachable(state) else HOPELESS


def ease(state: State) -> float:
    """The share of a puzzle's first steps that are good."""
    return len(good_steps(state)) / len(steps(state))


def puzzle(choose: Chooser, split: Split | None = None) -> State:
    """Four numbers of the split that can make 24."""
    while True:
        top = choose.rng.choice((13, 13, 13, 20, 30))
        state = tuple(sorted(choose.number(1, top) for _ in range(4)))
        if held("24 " + text_of(state)) == ((split or choose.split) == "held") and reachable(state):
            return state


def text_of(state: State) -> str:
    """`4 5 6 10`."""
    return " ".join(map(str, state))


def _shuffled(choose: Chooser, state: State) -> str:
    return text_of(tuple(choose.rng.sample(state, len(state))) if choose.chance(0.3) else state)


def solved(choose: Chooser) -> list[Piece]:
    """A puzzle with good steps to its end."""
    state = puzzle(choose)
    pieces: list[Piece] = [(f"Numbers: {_shuffled(choose, state)}\n", False)]
    while len(state) > 1:
        text, state = choose.rng.choice(good_steps(state))
        pieces += [("Step:", False), (text, True), ("\n", True)]
    return pieces


def judged(choose: Chooser) -> list[Piece]:
    """A puzzle with some steps, the last one good or not, and its mark."""
    state = puzzle(choose)
    pieces: list[Piece] = [(f"Numbers: {_shuffled(choose, state)}\n", False)]
    depth = choose.number(1, 3)
    for number in range(depth):
        last = number == depth - 1
        options = (choose.chance(0.5) if last else choose.chance(0.85)) and good_steps(state)
        text, state = choose.rng.choice(options or steps(state))
        pieces += [("Step:", False), (text, False), ("" if last else "\n", False)]
    return [*pieces, (JUDGE, False), (f" {mark(state)}", True), ("\n", False)]


def document(choose: Chooser) -> list[Piece]:
    """The rules, then a few puzzles, solved or judged."""
    pieces: list[Piece] = [(RULES, False)]
    for _ in range(choose.number(1, 12)):
        pieces += solved(choose) if choose.chance(0.5) else judged(choose)
    return pieces
