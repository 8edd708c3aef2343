"""Strings: the texts that tests, lengths and lists allow, and how JSON spells them. Pure.

Languages are automata over the text that a string means, so patterns, formats and lengths are combined
there, exactly. `escaped` turns one into the language of what stands between the quotes: each character
by itself, except quote, backslash and control characters, in the spelling of `json.dumps`.

A pattern is ECMA 262's, and searched for: `patterns.py`.
"""

import json
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.characters import ANY
from ramify.actors.grammar.expression import (
    ANY_TEXT,
    Chars,
    Concat,
    Embedded,
    Literal,
    Repeat,
    union,
)
from ramify.actors.grammar.outlines import search_automaton
from ramify.actors.grammar.schema.assembly import words
from ramify.actors.grammar.schema.errors import TooLarge, UnsupportedSchema
from ramify.actors.grammar.schema.formats import FORMATS
from ramify.actors.grammar.schema.limits import MAX_COUNT
from ramify.actors.grammar.schema.patterns import from_ecma
from ramify.actors.grammar.schema.shapes import Check, String
from ramify.protocol.errors import ConstraintError

_ONE = Chars(ANY)


class Strings:
    """The languages of strings of one schema; each is made once."""

    def __init__(self) -> None:
        self._tests: dict[tuple[str, str], Automaton] = {}
        self._matches: dict[tuple[Check, str], bool] = {}
        self._languages: dict[String, Automaton] = {}
        self._spelled: dict[String, Automaton] = {}

    def matches(self, test: Check, value: str) -> bool:
        """Whether `value` passes `test`."""
        key = (test, value)
        found = self._matches.get(key)
        if found is None:
            found = self._matches[key] = self._test(test).accepts(_utf8(value)) == test.positive
        return found

    def holds(self, shape: String, value: str) -> bool:
        """Whether `value` is one of `shape`."""
        if shape.only is not None and value not in shape.only:
            return False
        if value in shape.excluded or len(value) < shape.least:
            return False
        if shape.most is not None and len(value) > shape.most:
            return False
        return all(self.matches(test, value) for test in shape.tests)

    def is_empty(self, shape: String) -> tuple[bool, bool]:
        """Whether no string has the shape, and if so, whether that is certain.

        Formats make it uncertain: a validator that takes them as annotations allows more.
        """
        certain = all(test.kind != "format" for test in shape.tests)
        if shape.only is not None:
            return not any(self.holds(shape, value) for value in shape.only), certain
        if not shape.tests or (len(shape.tests) == 1 and (shape.least, shape.most) == (0, None)):
            return False, True
        return self.language(shape).is_empty(), certain

    def _test(self, test: Check) -> Automaton:
        """The strings that pass `test`, taken as positive."""
        key = (test.kind, test.text)
        found = self._tests.get(key)
        if found is None:
            try:
                if test.kind == "format":
                    found = _format(test.text)
                else:
                    found = search_automaton(from_ecma(test.text))
            except ConstraintError as error:
                raise UnsupportedSchema(test.pointer, error.message) from None
            self._tests[key] = found
        return found

    def language(self, shape: String) -> Automaton:
        """The texts that strings of `shape` mean. Raises `UnsupportedSchema`."""
        found = self._languages.get(shape)
        if found is None:
            found = self._languages[shape] = self._language(shape)
        return found

    def _language(self, shape: String) -> Automaton:
        if shape.only is not None:
            kept = [value for value in shape.only if self.holds(shape, value)]
            return words(map(_utf8, kept)) if kept else Automaton.from_expression(union())
        where = _checked(shape)
        try:
            found: Automaton | None = None
            for test in shape.tests:
                part = self._test(test)
                if test.positive:
                    found = part if found is None else found.intersect(part)
            for test in shape.tests:
                if not test.positive:
                    found = (found or any_text()).minus(self._test(test))
            if (shape.least, shape.most) != (0, None):
                part = _of_length(shape.least, shape.most)
                found = part if found is None else found.intersect(part)
            if shape.excluded:
                listed = words(map(_utf8, sorted(shape.excluded)))
                found = (found or any_text()).minus(listed)
        except ConstraintError as error:
            raise TooLarge(where, error.message) from None
        return found or any_text()

    def _quoted(self, shape: String) -> Automaton | None:
        if len(shape.tests) == 1 and shape == String(tests=shape.tests):
            (test,) = shape.tests
            if test.kind == "format" and test.positive:
                return _quoted_format(test.text)
        if shape == String(least=shape.least, most=shape.most):
            _checked(shape)
            empty = shape.most is not None and shape.most < shape.least
            return None if empty else _strings_of_length(shape.least, shape.most)
        language = self.language(shape)
        return None if language.is_empty() else quoted(language)

    def spell(self, shape: String) -> Automaton | None:
        """The strings of `shape` as JSON, quotes included. None if there are none."""
        found = self._spelled.get(shape)
        if found is None:
            if shape.only is not None:
                texts = [json_text(v).data for v in shape.only if self.holds(shape, v)]
                if not texts:
                    return None
                found = words(texts)
            elif shape == String():
                found = any_string()
            else:
                found = self._quoted(shape)
                if found is None:
                    return None
            self._spelled[shape] = found
        return found


def _checked(shape: String) -> str:
    """The pointer of the shape's first test. Raises TooLarge if it counts too many characters."""
    where = shape.tests[0].pointer if shape.tests else ""
    for bound in (shape.least, shape.most or 0):
        if bound > MAX_COUNT:
            raise TooLarge(where, f"a length of {bound}: at most {MAX_COUNT} characters are counted")
    return where


@lru_cache(maxsize=len(FORMATS))
def _format(name: str) -> Automaton:
    return Automaton.from_regex(FORMATS[name])


@lru_cache(maxsize=len(FORMATS))
def _quoted_format(name: str) -> Automaton:
    return quoted(_format(name))


@lru_cache(maxsize=1)
def any_text() -> Automaton:
    """Any text."""
    return Automaton.from_expression(ANY_TEXT)


@lru_cache(maxsize=1)
def any_string() -> Automaton:
    """Any string as JSON."""
    return quoted(any_text())


def quoted(language: Automaton) -> Automaton:
    """Strings that mean the texts of `language`, as JSON."""
    quote = Literal(b'"')
    return Automaton.from_expression(Concat((quote, Embedded(escaped(language)), quote)))


@lru_cache(maxsize=8)
def _of_length(least: int, most: int | None) -> Automaton:
    """Texts of `least` to `most` characters. Kept, because most long bounds of schemas are a few round
    numbers.
    """
    return Automaton.from_expression(Repeat(_ONE, least, most))


@lru_cache(maxsize=8)
def _strings_of_length(least: int, most: int | None) -> Automaton:
    """As `_of_length`, spelled as JSON: each character by itself."""
    quote, character = Literal(b'"'), Embedded(_character())
    return Automaton.from_expression(Concat((quote, Repeat(character, least, most), quote)))


@lru_cache(maxsize=1)
def _character() -> Automaton:
    """A character between the quotes of a JSON string."""
    return Automaton.from_expression(Embedded(escaped(Automaton.from_expression(_ONE))))


def _utf8(value: str) -> bytes:
    """`value` in UTF-8; half a surrogate pair, which has none, as bytes that no text has."""
    return value.encode("utf-8", "surrogatepass")


def json_text(value: object) -> Literal:
    """`value` as canonical JSON, without white space. Raises `UnsupportedSchema`."""
    try:
        return Literal(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())
    except UnicodeEncodeError:
        raise UnsupportedSchema("", "a string with half a surrogate pair has no UTF-8") from None


_SHORT = {8: b"b", 9: b"t", 10: b"n", 12: b"f", 13: b"r", 34: b'"', 92: b"\\"}
_SPECIAL = [*range(32), 34, 92]
_HEX = b"0123456789abcdef"
_SPELLING = sorted({*_SPECIAL, *_HEX, *b"btnfru"})  # bytes that escapes are about, or made of


def escaped(language: Automaton) -> Automaton:
    r"""The texts of `language` as they stand between the quotes of a JSON string.

    Where `language` takes a character that JSON escapes, six states more spell \n or \u00XX. States
    that take such characters alike share them.
    """
    codes = language.classes.astype(np.int64)
    codes[_SPELLING] += 256 * (1 + np.arange(len(_SPELLING)))  # each by itself
    _, first, classes = np.unique(codes, return_index=True, return_inverse=True)
    symbol = classes.ravel().tolist()
    special = [symbol[code] for code in _SPECIAL]
    table = language.next[:, language.classes[first]]
    taken = table[:, special]
    affected = np.flatnonzero((taken >= 0).any(axis=1))
    kinds, kind_of = np.unique(taken[affected], axis=0, return_inverse=True)
    size = len(table)
    spelled = np.full((size + 6 * len(kinds), len(first)), -1, np.int32)
    spelled[:size] = table
    spelled[:size, special] = -1
    spelled[affected, symbol[92]] = size + 6 * kind_of.ravel()
    for kind, row in enumerate(kinds.tolist()):
        slash = size + 6 * kind
        u, zero, second, low, high = range(slash + 1, slash + 6)
        target = dict(zip(_SPECIAL, row, strict=True))
        for code, letter in _SHORT.items():
            spelled[slash, symbol[letter[0]]] = target[code]
        for code in range(32):
            if code not in _SHORT:
                spelled[low if code < 16 else high, symbol[_HEX[code % 16]]] = target[code]
        spelled[second, symbol[ord("0")]] = low
        spelled[second, symbol[ord("1")]] = high
        spelled[zero, symbol[ord("0")]] = second
        spelled[u, symbol[ord("0")]] = zero
        spelled[slash, symbol[ord("u")]] = u
    final = np.zeros(len(spelled), np.bool_)
    final[:size] = language.final
    return from_table(spelled, final, classes.ravel())


def from_table(
    table: NDArray[np.int32], final: NDArray[np.bool_], classes: NDArray[np.integer] | None = None
) -> Automaton:
    """An automaton of `table` [states, columns], equal columns merged; useless states stay.

    `classes` [256]: the column of each byte; None: each has one of its own.
    """
    # sorting whole columns takes a hundred times as long as sorting a hash of each
    factors = _factors(len(table).bit_length())[: len(table)]
    hashes = (table.astype(np.uint64) * factors).sum(axis=0, dtype=np.uint64)
    _, first, merged = np.unique(hashes, return_index=True, return_inverse=True)
    columns = np.ascontiguousarray(table[:, first])
    if (columns[:, merged.ravel()] != table).any():  # two hashes of 64 bits were equal
        columns, merged = np.unique(table, axis=1, return_inverse=True)
    own = merged.ravel() if classes is None else merged.ravel()[classes]
    return Automaton(np.ascontiguousarray(columns), own.astype(np.uint8), final)


@lru_cache(maxsize=32)
def _factors(bits: int) -> NDArray[np.uint64]:
    """A column of random factors."""
    return np.random.default_rng(0xB5297A4D3F84D5B5).integers(0, 1 << 64, (1 << bits, 1), np.uint64)
