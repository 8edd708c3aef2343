"""Spelled numbers against fractions."""

import json
import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.grammar.schema.errors import TooLarge, UnsupportedSchema
from ramify.actors.grammar.schema.lower import lower
from ramify.actors.grammar.schema.numbers import Numbers, number_text
from ramify.actors.grammar.schema.shapes import Number

DECIMALS = st.builds(Fraction, st.integers(-3000, 3000), st.sampled_from([1, 2, 10, 100, 1000]))
NUMBERS = st.builds(
    Number,
    integer=st.sampled_from([None, True, False]),
    low=st.none() | DECIMALS,
    low_open=st.booleans(),
    high=st.none() | DECIMALS,
    high_open=st.booleans(),
    multiples=st.frozensets(
        st.sampled_from([Fraction(3), Fraction(1, 4), Fraction(7, 100)]), max_size=1
    ),
    excluded=st.frozensets(DECIMALS, max_size=2),
)


@settings(max_examples=80, deadline=None)
@given(NUMBERS, st.randoms(use_true_random=False))
def test_written_numbers_hold(walker: Any, shape: Number, rng: random.Random) -> None:
    automaton = Numbers().spell(shape)
    if automaton is None:
        return
    walk = walker(automaton)
    for _ in range(10):
        text = walk.text(rng, 8)
        assert shape.holds(Fraction(text.decode())), text
        json.loads(text)


@settings(max_examples=80, deadline=None)
@given(NUMBERS, DECIMALS)
def test_numbers_are_written_if_and_only_if_they_hold(shape: Number, value: Fraction) -> None:
    automaton = Numbers().spell(shape)
    text = number_text(value).encode()
    assert (automaton is not None and automaton.accepts(text)) == shape.holds(value)


def test_no_text_is_rounded_to_a_bound_that_is_left_out() -> None:
    automaton = Numbers().spell(Number(high=Fraction(1), high_open=True))
    assert automaton is not None
    assert automaton.accepts(b"0.99999")
    assert not automaton.accepts(b"0.99999999999999999999")  # 1.0 as a double


def test_lists_of_numbers() -> None:
    automaton = Numbers().spell(Number(only=(Fraction(1), Fraction(12), Fraction(-5, 2))))
    assert automaton is not None
    assert [automaton.accepts(t) for t in (b"1", b"12", b"-2.5", b"2", b"-2", b"121")] == [True] * 3 + [
        False
    ] * 3


def test_steps_of_many_digits_are_refused() -> None:
    with pytest.raises(TooLarge, match="multipleOf"):
        Numbers().spell(Number(multiples=frozenset({Fraction(99991)})))


def test_multiples_are_multiples_when_they_are_rounded() -> None:
    """Readers make doubles of decimals: 46904875112116086.0 is none of 3 then."""
    found = Numbers().spell(Number(multiples=frozenset({Fraction(3)})))
    assert found is not None
    assert not found.accepts(b"46904875112116086.0")
    for text in (b"46904875112116086", b"9.0", b"-3", b"12345678.0"):
        assert found.accepts(text) == (Fraction(text.decode()) % 3 == 0)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"maximum": 1e308}, [b"0", b"-1.5", b"1" + b"0" * 39], [b"1" + b"0" * 40]),
        ({"minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, [b"-1.5"], []),
        ({"type": "integer", "minimum": 10**60 * -1, "maximum": 3}, [b"-12345", b"3"], [b"4"]),
    ],
)
def test_bounds_of_hundreds_of_digits(schema: Any, good: list[bytes], bad: list[bytes]) -> None:
    found = lower({"type": "number"} | schema)
    assert found.notes
    assert len(found.automaton) < 500
    assert all(map(found.automaton.accepts, good))
    assert not any(map(found.automaton.accepts, bad))


@pytest.mark.parametrize("key", ["minimum", "exclusiveMinimum", "multipleOf"])
def test_numbers_of_hundreds_of_digits_only_are_refused(key: str) -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        lower({"type": "number", key: 1e308})
    assert caught.value.pointer == f"/{key}"


def number(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": {"type": "number", **keywords}}}


@pytest.mark.parametrize(
    ("keywords", "says", "lost"),
    [
        ({"multipleOf": 0.01}, "beside multipleOf", "123456789012345.25"),
        ({"multipleOf": 0.001, "minimum": 0, "maximum": 1e9}, "beside multipleOf", "99999999.125"),
        ({"exclusiveMinimum": 0}, "at most 7 digits before the point and 8 behind", "12345678"),
        ({"exclusiveMaximum": 123456789}, "at most 9 digits before the point and 6", "0.1234567"),
        ({"not": {"multipleOf": 2}}, "at most 7 digits", "12345679"),
        ({"multipleOf": 5, "exclusiveMinimum": 0}, "at most 7 digits", "12345670"),
        ({"multipleOf": 0.01, "minimum": 0, "maximum": 100}, "", ""),
        ({"multipleOf": 0.01, "minimum": 0, "maximum": 1e12}, "", ""),
        ({"multipleOf": 0.5, "exclusiveMinimum": 0, "maximum": 99}, "", ""),
        ({"multipleOf": 5}, "", ""),
        ({"minimum": 0.5}, "", ""),
        ({"type": "integer", "exclusiveMinimum": 0}, "", ""),
    ],
)
def test_a_note_tells_of_numbers_with_too_many_digits(
    keywords: dict[str, Any], says: str, lost: str
) -> None:
    """And of these only: a value that the schema allows is either written, or there is a note."""
    found = lower(number(**keywords))
    notes = [note for note in found.notes if "digits" in note]
    assert len(notes) == bool(says)
    if says:
        assert notes[0].startswith("/properties/x: ")
        assert says in notes[0]
        assert not found.automaton.accepts(f'{{"x":{lost}}}'.encode())
