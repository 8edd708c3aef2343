"""Arithmetic turns: sums, differences, comparisons, short word problems, counting.

A pair of numbers is held out by the CRC-32 of its sum as text (see `words.held`), so the evaluation
asks only for sums that no training conversation contains in that order.
"""

from __future__ import annotations

from words import Chooser, held, listed

Turn = tuple[str, str]

ASK_PLUS = (
    "What is {a} + {b}?", "{a} + {b} =", "{a} + {b}", "What is {a} plus {b}?", "Add {a} and {b}.",
    "How much is {a} + {b}?", "Calculate {a} + {b}.", "Can you add {a} and {b}?", "{a}+{b}=?",
    "What do you get when you add {b} to {a}?", "What's {a} plus {b}?", "Please work out {a} + {b}.",
    "Compute {a} + {b}", "what is {a} plus {b}", "Tell me the sum of {a} and {b}.", "{a} plus {b}?",
)  # fmt: skip
ASK_MINUS = (
    "What is {a} - {b}?", "{a} - {b} =", "{a} - {b}", "What is {a} minus {b}?", "Subtract {b} from {a}.",
    "How much is {a} - {b}?", "Calculate {a} - {b}.", "Take {b} away from {a}.", "{a}-{b}=?",
    "What's {a} minus {b}?", "Please work out {a} - {b}.", "Compute {a} - {b}", "{a} minus {b}?",
    "what is {a} minus {b}", "What is the difference between {a} and {b}?", "What is {a} take away {b}?",
)  # fmt: skip
SAY_PLUS = (
    "{a} + {b} = {c}", "{a} + {b} = {c}.", "{a} plus {b} is {c}.", "The answer is {c}.", "{c}",
    "The sum of {a} and {b} is {c}.", "That is {c}.",
)  # fmt: skip
SAY_MINUS = (
    "{a} - {b} = {c}", "{a} - {b} = {c}.", "{a} minus {b} is {c}.", "The answer is {c}.", "{c}",
    "The difference is {c}.", "That is {c}.",
)  # fmt: skip
MORE = (
    ("{n} has {a} {t}s. {m} gives {n} {b} more. How many {t}s does {n} have now?", "+",
     "{a} + {b} = {c}, so {n} has {c} {t}s."),
    ("There are {a} {t}s in one box and {b} {t}s in another. How many {t}s are there in all?", "+",
     "{a} + {b} = {c}, so there are {c} {t}s in all."),
    ("{n} read {a} pages on {d} and {b} pages the next day. How many pages is that?", "+",
     "{a} + {b} = {c}. {n} read {c} pages."),
    ("{n} has {a} {t}s and gives {b} of them to {m}. How many {t}s are left?", "-",
     "{a} - {b} = {c}, so {n} has {c} {t}s left."),
    ("A shop had {a} {t}s and sold {b}. How many does it still have?", "-",
     "{a} - {b} = {c}, so the shop still has {c} {t}s."),
    ("{n} is {a} years old and {m} is {b} years old. How many years older is {n}?", "-",
     "{a} - {b} = {c}, so {n} is {c} years older."),
    ("A bus has {a} people in it. At the next stop {b} people get off. How many stay on the bus?", "-",
     "{a} - {b} = {c}, so {c} people stay on the bus."),
    ("I had {a} dollars and spent {b} dollars. How much money do I have left?", "-",
     "{a} - {b} = {c}, so you have {c} dollars left."),
    ("I saved {a} dollars last month and {b} dollars this month. How much did I save?", "+",
     "{a} + {b} = {c}, so you saved {c} dollars."),
)  # fmt: skip


def pair(choose: Chooser, op: str, low: int = 10, high: int = 99) -> tuple[int, int]:
    """Two numbers of the split for `op`; a difference is never negative."""
    while True:
        a, b = choose.number(low, high), choose.number(low, high)
        if op == "-" and b > a:
            a, b = b, a
        if held(f"{a}{op}{b}") == (choose.split == "held"):
            return a, b


def result(a: int, op: str, b: int) -> int:
    """The value of `a op b`."""
    return a + b if op == "+" else a - b


def sum_turn(choose: Chooser) -> Turn:
    """A sum or a difference, mostly of two-digit numbers."""
    op = choose.one(["+", "-"])
    low, high = choose.rng.choices(((10, 99), (0, 20), (100, 999)), weights=(70, 14, 16))[0]
    a, b = pair(choose, op, low, high)
    values = {"a": a, "b": b, "c": result(a, op, b)}
    ask, say = (ASK_PLUS, SAY_PLUS) if op == "+" else (ASK_MINUS, SAY_MINUS)
    return choose.one(ask).format(**values), choose.one(say[:2] if choose.chance(0.6) else say).format(
        **values
    )


def word_problem(choose: Chooser) -> Turn:
    """One sentence of story around a sum."""
    ask, op, say = choose.rng.choice(MORE)
    a, b = pair(choose, op)
    n, m = choose.several("name", 2)
    values = {
        "a": a,
        "b": b,
        "c": result(a, op, b),
        "n": n,
        "m": m,
        "t": choose.word("thing"),
        "d": choose.word("day"),
    }
    values["t"] = str(values["t"]).removesuffix("s") if not str(values["t"]).endswith("x") else "coin"
    return ask.format(**values), say.format(**values)


def compare(choose: Chooser) -> Turn:
    """Which of two or more numbers is larger or smaller; sorting."""
    count = choose.number(2, 5)
    numbers = choose.rng.sample(range(1, 100), count)
    texts = [str(number) for number in numbers]
    kind = choose.number(0, 3)
    if kind == 0:
        return (
            f"Which is bigger, {listed(texts).replace(' and ', ' or ')}?",
            f"{max(numbers)} is the biggest number.",
        )
    if kind == 1:
        return f"Which is the smallest: {', '.join(texts)}?", f"The smallest is {min(numbers)}."
    if kind == 2:
        ordered = ", ".join(str(number) for number in sorted(numbers))
        return choose.one(("Sort these numbers: {}", "Put these numbers in order: {}")).format(
            ", ".join(texts)
        ), ordered
    a, b = sorted(numbers[:2])
    if choose.chance(0.5):
        a, b = b, a
    return (
        f"Is {a} bigger than {b}?",
        f"Yes, {a} is bigger than {b}." if a > b else f"No, {a} is smaller than {b}.",
    )


def counting(choose: Chooser) -> Turn:
    """Counting up, down or in steps."""
    kind = choose.number(0, 3)
    start = choose.number(1, 40)
    if kind == 0:
        end = start + choose.number(3, 12)
        return f"Count from {start} to {end}.", ", ".join(map(str, range(start, end + 1)))
    if kind == 1:
        top = choose.number(3, 15)
        return f"Count down from {top}.", ", ".join(map(str, range(top, 0, -1)))
    if kind == 2:
        return f"What number comes after {start}?", f"{start + 1} comes after {start}."
    return f"What number comes before {start + 1}?", f"{start} comes before {start + 1}."


def times(choose: Chooser) -> Turn:
    """The times tables, doubling and halving."""
    a, b = choose.number(1, 12), choose.number(1, 12)
    kind = choose.number(0, 3)
    if kind == 0:
        return f"What is half of {2 * a}?", f"Half of {2 * a} is {a}."
    if kind == 1:
        return f"What is double {a}?", f"Double {a} is {2 * a}."
    if kind == 2:
        return f"What is {a * b} divided by {b}?", f"{a * b} divided by {b} is {a}."
    return choose.one(
        ("What is {} times {}?", "What is {} x {}?", "Multiply {} by {}.", "{} * {} =")
    ).format(a, b), (f"{a} x {b} = {a * b}")


def turn(choose: Chooser) -> Turn:
    """Any arithmetic turn, sums most of the time."""
    make = choose.rng.choices(
        (sum_turn, word_problem, compare, counting, times), weights=(60, 14, 9, 6, 8)
    )[0]
    return make(choose)
