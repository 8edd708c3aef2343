"""Numbers: how JSON spells those between bounds, multiples, and all but a few. Pure.

Integers have no fraction and no exponent. Other numbers have at most a fraction where anything is said
of their value, and an exponent of two digits where nothing is. Where a bound itself is left out, or a
value, digits are few enough that no text is read as that value when it is rounded to a double.
"""

from fractions import Fraction
from functools import lru_cache
from math import ceil, floor

import numpy as np
from numpy.typing import NDArray

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.schema.assembly import words
from ramify.actors.grammar.schema.errors import TooLarge, UnsupportedSchema
from ramify.actors.grammar.schema.limits import MAX_MULTIPLE
from ramify.actors.grammar.schema.shapes import Number
from ramify.actors.grammar.schema.strings import from_table
from ramify.protocol.errors import ConstraintError

_WHOLE = "(?:0|[1-9][0-9]*)"
_INTEGER = "(?:0|-?[1-9][0-9]*)"
# each value once, and no two that are equal when they are rounded to doubles
_ONCE = r"0|-?[1-9][0-9]*|-?(?:0|[1-9][0-9]{0,6})\.[0-9]{0,7}[1-9]"
# decimals of which few digits have a fraction: as doubles they are multiples of what they are
_ROUNDED = rf"-?(?:{_WHOLE}|(?:0|[1-9][0-9]{{0,6}})\.[0-9]{{1,8}}|[1-9][0-9]{{7,12}}\.[0-9]{{1,2}})"
NUMBER = rf"-?{_WHOLE}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{{1,2}})?"
_EXACT_DIGITS = 15  # decimals of so many digits that differ are different doubles


class Numbers:
    """The spelling of numbers; each language is made once."""

    def __init__(self) -> None:
        self._spelled: dict[Number, Automaton] = {}

    def spell(self, shape: Number, *, once: bool = False) -> Automaton | None:
        """The numbers of `shape` as JSON. None if there are none. Raises `UnsupportedSchema`.

        `once`: each in one spelling, without an exponent, with few digits around a point.
        """
        found = self._spell(shape)
        if not once or found is None or shape.integer or shape.only is not None:
            return found
        found = found.intersect(any_number(once=True))
        return None if found.is_empty() else found

    def _spell(self, shape: Number) -> Automaton | None:
        found = self._spelled.get(shape)
        if found is None:
            if shape.only is not None:
                texts = [number_text(v) for v in shape.only if shape.holds(v)]
                if not texts:
                    return None
                found = words(text.encode() for text in texts)
            elif shape == Number(integer=shape.integer) and shape.integer is not False:
                found = _plain(_INTEGER if shape.integer else NUMBER)
            else:
                try:
                    found = _language(shape)
                except ConstraintError as error:
                    raise TooLarge("", error.message) from None
                if found.is_empty():
                    return None
            self._spelled[shape] = found
        return found


@lru_cache(maxsize=3)
def _plain(pattern: str) -> Automaton:
    return Automaton.from_regex(pattern)


def any_number(once: bool = False) -> Automaton:
    """Any number as JSON; `once`: in one spelling."""
    return _plain(_ONCE if once else NUMBER)


def number_text(value: Fraction) -> str:
    """`value` (a decimal) as canonical JSON."""
    if value.denominator == 1:
        return str(value.numerator)
    short = repr(float(value))
    if "e" not in short and Fraction(short) == value:
        return short
    digits = 0
    while (value * 10**digits).denominator != 1:
        digits += 1
        if digits > 400:
            raise UnsupportedSchema("", f"{short} is no decimal")
    text = str(abs(int(value * 10**digits))).rjust(digits + 1, "0")
    return f"{'-' if value < 0 else ''}{text[:-digits]}.{text[-digits:]}"


def cut_digits(shape: Number) -> str:
    """The note about numbers of `shape` with too many digits to be written; "": there are none."""
    if shape.integer or shape.only is not None:
        return ""
    places = min((len(_parts(step)[1]) for step in shape.multiples), default=None)
    bounds = (shape.low, shape.high)
    most = None if None in bounds else max(abs(bound) for bound in bounds if bound is not None)

    def all_have(whole: int, fraction: int) -> bool:
        return places is not None and places <= fraction and most is not None and most < 10**whole

    if _is_strict(shape):
        whole, fraction = _digits(shape)
        if all_have(whole, fraction):
            return ""
        return (
            f"numbers have at most {whole} digits before the point and {fraction} behind it beside an"
            " exclusive bound, `not` and the like"
        )
    if not places or all_have(7, 8) or all_have(13, 2):
        return ""
    return (
        "beside multipleOf, numbers with a fraction have at most 7 digits before the point and 8 behind"
        " it, or 13 and 2"
    )


def _is_strict(shape: Number) -> bool:
    """Whether a bound or other values are left out, so that no text may be rounded to them."""
    is_open = shape.low_open or shape.high_open
    return is_open or shape.integer is False or bool(shape.excluded or shape.others)


def _language(shape: Number) -> Automaton:
    whole = shape.integer is True
    if whole:
        found = _plain(_INTEGER)
    elif _is_strict(shape):
        found = _few_digits(shape)
    elif shape.multiples:
        found = Automaton.from_regex(_ROUNDED)
    else:
        found = Automaton.from_regex(rf"-?{_WHOLE}(?:\.[0-9]+)?")
    if shape.low is not None or shape.high is not None:
        found = found.intersect(_between(shape, whole))
    for step in sorted(shape.multiples):
        found = found.intersect(_multiples(step))
    for step in sorted(shape.others):
        found = found.minus(_multiples(step))
    if shape.integer is False:
        found = found.intersect(Automaton.from_regex(r"-?[0-9]+\.[0-9]*[1-9][0-9]*"))
    for value in sorted(shape.excluded):
        text = number_text(value).replace(".", r"\.")
        if value == 0:
            text = "-?0"
        rest = "0*" if "." in text else r"(?:\.0+)?"
        found = found.minus(Automaton.from_regex(text + rest))
    return found


def _digits(shape: Number) -> tuple[int, int]:
    """Digits before and behind the point with which no decimal is rounded to an excluded value."""
    values = [v for v in (shape.low, shape.high, *shape.excluded) if v is not None]
    whole = max([7, *(len(str(int(abs(v)))) for v in values)])
    return whole, max(_EXACT_DIGITS - whole, 0)


def _few_digits(shape: Number) -> Automaton:
    whole, fraction = _digits(shape)
    text = f"-?(?:0|[1-9][0-9]{{0,{whole - 1}}})"
    return Automaton.from_regex(text + (rf"(?:\.[0-9]{{1,{fraction}}})?" if fraction else ""))


def _between(shape: Number, whole: bool) -> Automaton:
    """The texts between the bounds, of integers or of decimals."""
    found: Automaton | None = None
    low, low_open, high, high_open = shape.low, shape.low_open, shape.high, shape.high_open
    if whole:
        if low is not None:
            low, low_open = Fraction(floor(low) + 1 if low_open else ceil(low)), False
        if high is not None:
            high, high_open = Fraction(ceil(high) - 1 if high_open else floor(high)), False
    for bound, is_open, sign in ((low, low_open, 1), (high, high_open, -1)):
        if bound is None:
            continue
        part = _bounded(bound * sign, is_open, sign)
        found = part if found is None else found.intersect(part)
    assert found is not None
    return found


@lru_cache(maxsize=256)
def _bounded(low: Fraction, strictly: bool, sign: int) -> Automaton:
    """The decimals from `low` on; `sign` -1: up to `-low`. Kept: schemas have many bounds in common."""
    plus, minus = ("", "-") if sign == 1 else ("-", "")
    return Automaton.from_regex(_at_least(low, strictly, plus, minus))


def _at_least(low: Fraction, strictly: bool, plus: str, minus: str) -> str:
    """A regex of the decimals from `low`; `plus`, `minus`: what is written before those of each sign.

    With the signs exchanged it is the regex of those up to `-low`.
    """
    if low > 0 or (low == 0 and strictly):
        return plus + _over(low, strictly)
    if low == 0:
        return f"(?:{plus}{_WHOLE}(?:\\.[0-9]+)?|-?0(?:\\.0+)?)"
    return f"(?:{plus}{_WHOLE}(?:\\.[0-9]+)?|{minus}{_under(-low, strictly)})"


def _parts(value: Fraction) -> tuple[int, str]:
    """The whole part of a decimal, and the digits of its fraction."""
    text = number_text(value)
    whole, _, fraction = text.partition(".")
    return int(whole), fraction.rstrip("0")


def _over(low: Fraction, strictly: bool) -> str:
    """Decimals without sign from `low` (not negative) on; `strictly`: `low` itself left out."""
    whole, digits = _parts(low)
    cases = [f"{_whole_from(whole + 1)}(?:\\.[0-9]+)?"]
    if not digits:
        cases.append(f"{whole}\\.[0-9]*[1-9][0-9]*" if strictly else f"{whole}(?:\\.[0-9]+)?")
    else:
        same = f"{whole}\\."
        for i, digit in enumerate(digits):
            if digit < "9":
                cases.append(f"{same}{digits[:i]}[{int(digit) + 1}-9][0-9]*")
        cases.append(f"{same}{digits}" + ("[0-9]*[1-9][0-9]*" if strictly else "[0-9]*"))
    return f"(?:{'|'.join(cases)})"


def _under(high: Fraction, strictly: bool) -> str:
    """Decimals without sign up to `high` (over 0); `strictly`: `high` itself left out."""
    whole, digits = _parts(high)
    cases = []
    if whole:
        cases.append(f"{_whole_to(whole - 1)}(?:\\.[0-9]+)?")
    if not digits:
        if not strictly:
            cases.append(f"{whole}(?:\\.0+)?")
    else:
        cases.append(str(whole))
        same = f"{whole}\\."
        for i, digit in enumerate(digits):
            if i:
                cases.append(same + digits[:i])
            if digit > "0":
                cases.append(f"{same}{digits[:i]}[0-{int(digit) - 1}][0-9]*")
        if not strictly:
            cases.append(f"{same}{digits}0*")
    return f"(?:{'|'.join(cases)})"


def _whole_from(low: int) -> str:
    """Whole numbers from `low` (not negative) on."""
    if low == 0:
        return _WHOLE
    text = str(low)
    size = len(text)
    cases = [text]
    for i, digit in enumerate(text):
        if digit < "9":
            cases.append(f"{text[:i]}[{int(digit) + 1}-9][0-9]{{{size - i - 1}}}")
    cases.append(f"[1-9][0-9]{{{size},}}")
    return f"(?:{'|'.join(cases)})"


def _whole_to(high: int) -> str:
    """Whole numbers from 0 to `high`."""
    text = str(high)
    size = len(text)
    cases = ["0"]
    if size > 1:
        cases.append(f"[1-9][0-9]{{0,{size - 2}}}")
    for i, digit in enumerate(text):
        first = 0 if i else 1
        if int(digit) > first:
            cases.append(f"{text[:i]}[{first}-{int(digit) - 1}][0-9]{{{size - i - 1}}}")
    if high:
        cases.append(text)
    return f"(?:{'|'.join(cases)})"


def _multiples(step: Fraction) -> Automaton:
    """Decimals that are a multiple of `step`: remainders, digit by digit.

    A state is how many digits behind the point were read (-1: no point yet) and the remainder so far.
    """
    places = len(_parts(step)[1])
    modulus = int(step * 10**places)
    if modulus > MAX_MULTIPLE or places > 20:
        raise TooLarge("", f"multipleOf {step}: its digits may be a number of at most {MAX_MULTIPLE}")
    count = 2 + modulus * (places + 2)  # the start, behind the sign, then the states
    table = np.full((count + 1, 256), -1, np.int32)  # the last one: zeros behind the last place
    final = np.zeros(count + 1, np.bool_)
    remainders = np.arange(modulus)

    def state(read: int, remainder: NDArray[np.int64] | int) -> NDArray[np.int64] | int:
        return 2 + (read + 1) * modulus + remainder

    table[0, ord("-")] = 1
    for digit in range(10):
        key = ord("0") + digit
        behind = (remainders * 10 + digit) % modulus
        table[:2, key] = state(-1, digit % modulus)
        table[state(-1, remainders), key] = state(-1, behind)
        for read in range(places):
            table[state(read, remainders), key] = state(read + 1, behind)
    table[state(-1, remainders), ord(".")] = state(0, remainders)
    for read in range(-1, places + 1):
        final[state(read, remainders)] = (
            remainders * pow(10, places - max(read, 0), modulus) % modulus == 0
        )
    final[state(0, remainders)] = False  # a point needs a digit
    table[state(places, 0), ord("0")] = count
    table[count, ord("0")] = count
    final[count] = True
    return from_table(table, final)
