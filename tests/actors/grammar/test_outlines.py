"""Regexes and choices by outlines-core: the same languages as ours where both read them, the same masks
over tokens, and Python's `re`.
"""

import json
import random
import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.grammar import outlines
from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.compile import compile_constraint
from ramify.actors.grammar.expression import literal, union
from ramify.actors.grammar.outlines import (
    outlines_automaton,
    regex_automaton,
    rewritten,
    search_automaton,
)
from ramify.actors.grammar.regex import UnknownSyntax
from ramify.actors.grammar.schema.errors import UnsupportedSchema
from ramify.actors.grammar.schema.lower import lower
from ramify.actors.grammar.values import json_value, parameters
from ramify.gpu.constraints.bodies import constraint_of
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.constraints import ConstraintSpec, GrammarBackend
from ramify.protocol.errors import ConstraintError
from ramify.protocol.structure import RegexPart, Structure, StructureTag, TagsPart, encode_structure
from tests.amount import examples

UNREAD = UnknownSyntax("not read", position=0)
ATOMS = st.sampled_from(
    [
        *("a", "b", "é", ".", r"\d", r"\w", r"\S", "[ab]", "[^a]", r"[\w-]", "[]a]", "[a&&b]", "{", "}"),
        *(r"[\D1]", "[[a]", r"\x41", r"\u00e9", r"\Z", "(?s:.)", r"\/", "#", "~~", r"[ \t]", r"\bb"),
        *("b$", r"\.", " ", "^a", ""),
    ]
)


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counts = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "+?"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, counts).map(lambda pair: f"({pair[0]}){pair[1]}"),
    )


@settings(max_examples=examples(120, 250), deadline=None)
@given(st.recursive(ATOMS, combined, max_leaves=5))
def test_both_compilers_have_the_same_language(pattern: str) -> None:
    try:
        ours = Automaton.from_regex(pattern)
    except ConstraintError:
        return
    try:
        theirs, _ = outlines_automaton(pattern, UNREAD)
    except ConstraintError:
        assert ours.is_empty() or re.search(r"[$^]|\\[bZ]", pattern)  # it does not take every anchor
        return
    assert ours.equals(theirs), pattern


PLAIN = st.sampled_from(
    [
        *(
            "a",
            "b",
            "é",
            "λ",
            ".",
            r"\d",
            r"\D",
            r"\w",
            r"\W",
            r"\s",
            "[ab]",
            "[^a]",
            "[a-c]",
            r"[^\w\s]",
        ),
        *(
            r"[\w-]",
            r"[\d.]",
            "[]a]",
            r"\x41",
            r"\u00e9",
            r"\.",
            r"\n",
            "-",
            "1",
            "[à-ÿ]",
            "(?s:.)",
            "(?i:aB)",
        ),
    ]
)
NEAR = st.text(st.sampled_from("abAB1.-é\u0661λ \n_]ü"), max_size=6)


@settings(max_examples=examples(250, 5_000), deadline=None)
@given(st.recursive(PLAIN, combined, max_leaves=5), st.lists(NEAR, min_size=10, max_size=30))
def test_both_compilers_say_what_python_says(pattern: str, texts: list[str]) -> None:
    ours = Automaton.from_regex(pattern)
    theirs, _ = outlines_automaton(pattern, UNREAD)
    wanted = [re.fullmatch(pattern, text, re.ASCII) is not None for text in texts]
    assert [ours.accepts(text.encode()) for text in texts] == wanted
    assert [theirs.accepts(text.encode()) for text in texts] == wanted


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        (r"\p{Lu}\p{Ll}+", ["Ärger", "Ok"], ["ok", "O1"]),
        (r"[\p{Greek}\d]+", ["αβγ1"], ["abc", "²"]),
        (r"\P{L}*", ["12 !"], ["1a"]),
        (r"\pN{2}", ["½²", "12"], ["1"]),
        ("[[:alpha:]_]+", ["ab_"], ["é", "1"]),
        (r"(?m)^a$\n^b$", ["a\nb"], ["ab"]),
        (r"(?x) a b [ ] # no", ["ab "], ["a b"]),
        (r"(no|none)\p{Nd}?", ["no", "none", "none1"], ["non"]),
        (r"\{\p{L}{1,2}\}", ["{é}"], ["{}"]),
        (r"(?i:ß)\p{L}", ["ßa"], [""]),
        (r"(?x: b )c", ["bc"], ["bc\n"]),
        (r"(?x)a(?-x: b)", ["a b"], ["ab", "a b\n"]),
    ],
)
def test_what_only_it_reads(pattern: str, valid: list[str], invalid: list[str]) -> None:
    with pytest.raises(UnknownSyntax):
        Automaton.from_regex(pattern)
    found, notes = regex_automaton(pattern)
    assert [text for text in valid if not found.accepts(text.encode())] == []
    assert [text for text in invalid if found.accepts(text.encode())] == []
    assert "outlines-core" in notes[0]


def test_properties_are_unicodes() -> None:
    found, _ = regex_automaton(r"\p{Lu}")
    for code in range(0x250):
        assert found.accepts(chr(code).encode()) == (unicodedata.category(chr(code)) == "Lu")


@pytest.mark.parametrize(
    "pattern", [r"\p{L}++", r"\p{L}(?=a)", r"\p{L}(?<=a)", r"(\p{L})\1", r"\p{No such}"]
)
def test_what_nobody_takes_is_refused(pattern: str) -> None:
    with pytest.raises(ConstraintError):
        regex_automaton(pattern)


def test_ours_goes_first_and_says_where() -> None:
    assert regex_automaton("a+")[1] == ()
    with pytest.raises(ConstraintError) as told:
        regex_automaton("ab(c")
    assert told.value.details == {"position": 2}


def test_without_it_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlines, "outlines_core", None)
    with pytest.raises(ConstraintError, match=r"write the ranges out.*install outlines-core") as told:
        regex_automaton(r"a\p{L}")
    assert told.value.details == {"position": 1}


def test_counts_are_bounded_and_notes_reach_the_client() -> None:
    with pytest.raises(ConstraintError, match="1000"):
        regex_automaton(r"\p{L}{5000}")
    made = compile_constraint(ConstraintSpec("regex", r"\p{Lu}\w*"))
    assert made.backend == "automaton"
    assert "outlines-core" in made.notes[0]


def test_rewritten() -> None:
    assert re.fullmatch(rewritten(r"[\w.]{2}"), "a.")
    assert rewritten(r"\d\b{") == r"[0-9](?-u:\b)\{"


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\p{Lu}\p{L}*$", ["Été", "Z"], ["été", "Ab c", ""]),
        (r"\p{Greek}", ["aλb", "λ", "\nλ\n"], ["ab", ""]),
        (r"^\p{L}", ["a1", "ü\n"], ["1a"]),
        (r"\p{L}\$$", ["1a$"], ["a", "a1$1"]),
        (r"(?xi)^ \p{Lu} $", ["a", "A"], ["A\n", " a"]),
        (r"^(?x) a [[:digit:]]$", ["a1"], ["a 1", "a1\n"]),
        (r"\p{Lu}$|b", ["xb1", "A"], ["A1", "a"]),
    ],
)
def test_patterns_of_schemas_that_we_do_not_read(pattern: str, good: list[str], bad: list[str]) -> None:
    found = search_automaton(pattern)
    assert all(found.accepts(text.encode()) for text in good)
    assert not any(found.accepts(text.encode()) for text in bad)


@pytest.mark.parametrize("pattern", [r"^\p{L}|x$", r"^a|\p{L}", r"(?m)\p{L}$"])
def test_anchors_inside_a_pattern_that_we_do_not_read_are_refused(pattern: str) -> None:
    with pytest.raises(ConstraintError):
        search_automaton(pattern)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\p{Lu}+$", "É", "é"),
        (r"^[[:alpha:].]+$", "a.", "a!"),  # a point in brackets is one, behind a named class too
        (r"(?i)^[[:alpha:]]Z$", "az", "1z"),
    ],
)
def test_names_and_tools_parameters_by_such_patterns(pattern: str, good: str, bad: str) -> None:
    named = {"type": "object", "patternProperties": {pattern: {"const": 1}}}
    closed = named | {"additionalProperties": False}
    text = {"type": "string", "pattern": pattern}
    tool = {
        "type": "object",
        "properties": {"a": text, "b": closed},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for automaton, written in (
        (lower(closed).automaton, '{"%s":1}'),
        (json_value(tool)[0], f'{{"a": "{good}", "b": {{"%s": 1}}}}'),
        (json_value(tool)[0], '{"a": "%s", "b": {}}'),
        (parameters(tool)[0], "<parameter=a>\n%s\n</parameter>\n<parameter=b>\n{}\n</parameter>\n"),
    ):
        assert automaton.accepts((written % good).encode())
        assert not automaton.accepts((written % bad).encode())


def test_an_anchor_inside_a_tools_pattern_is_refused_by_pointer() -> None:
    closed = {"type": "object", "patternProperties": {r"^a|\p{L}$": {"const": 1}}}
    with pytest.raises(UnsupportedSchema) as told:
        json_value({"type": "object", "properties": {"b": closed | {"additionalProperties": False}}})
    assert told.value.pointer.startswith("/properties/b/patternProperties/")


# --- as the only compiler: --grammar-backend outlines ------------------------------------------------

SPANS = [*("ab", "aa", "b1", "é", "1.", "a-", "no", "none", " b", ".b", "\n"), *('"a', "}]", "éa")]
TOKENS = [*(bytes([i]) for i in range(256)), *(text.encode() for text in SPANS), b""]
STOP = len(TOKENS) - 1
WORDS = Vocabulary(TOKENS, [STOP], lambda text: list(text.encode()))


def same_masks(spec: ConstraintSpec, seed: int) -> None:
    """On one way through both automata, at random."""
    both = []
    backends: tuple[GrammarBackend, ...] = ("auto", "outlines")
    for backend in backends:
        body = compile_constraint(spec, backend).body
        both.append(constraint_of(body, WORDS, lambda: pytest.fail("a grammar")).matcher())
    ours, theirs = both
    rng = random.Random(seed)
    while not ours.has_ended() and len(ours) < 40:
        assert (ours.mask() == theirs.mask()).all()
        assert (ours.only(), ours.is_final()) == (theirs.only(), theirs.is_final())
        legal = np.flatnonzero(WORDS.unpack(ours.mask())).tolist()
        token = STOP if STOP in legal and rng.random() < 0.3 else rng.choice(legal)
        assert ours.advance(token)
        assert theirs.advance(token)


@settings(max_examples=examples(150, 3_000), deadline=None)
@given(st.recursive(PLAIN, combined, max_leaves=5), st.integers(0, 1 << 30))
def test_regexes_have_the_same_masks(pattern: str, seed: int) -> None:
    if not Automaton.from_regex(pattern).is_empty():
        same_masks(ConstraintSpec("regex", pattern), seed)


TEXTS = st.text(st.sampled_from('ab1.-é\\\n ()[]{}|*+?^$#&~"\x00\u0085λ\U0001f600'), max_size=6)


@settings(max_examples=examples(100, 2_000), deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=8), st.integers(0, 1 << 30))
def test_choices_are_the_same_texts_with_the_same_masks(choices: list[str], seed: int) -> None:
    found = outlines.choices_automaton(choices)
    assert all(found.accepts(choice.encode()) for choice in choices)
    assert found.equals(Automaton.from_expression(union(*map(literal, choices))))
    same_masks(ConstraintSpec("choices", json.dumps(choices)), seed)


def test_many_choices() -> None:
    choices = [f"option {i * 7919 % 10007}" for i in range(700)]
    found = outlines.choices_automaton(choices)
    assert found.equals(Automaton.from_expression(union(*map(literal, choices))))


@pytest.mark.parametrize(
    ("pattern", "says", "position"),
    [
        ("ab(c", "never closed", 2),
        ("(?=x)a", "not supported", 0),
        (r"a\bb", "outlines-core does not take.*--grammar-backend outlines", None),
        ("(?:^a|b$)", "outlines-core does not take.*anchors", None),
        (r"\p{No such}", "outlines-core does not take.*Unicode", None),
        ("[ab]*a[ab]{15}", "less ambiguous", None),
        ("a{5000}", "up to 1000", 1),
        ("[z-a]", "backwards", 1),
    ],
)
def test_what_it_cannot_compile_is_refused(pattern: str, says: str, position: int | None) -> None:
    """Neither our compiler nor llguidance steps in, though they could in most cases."""
    with pytest.raises(ConstraintError, match=says) as told:
        compile_constraint(ConstraintSpec("regex", pattern), "outlines")
    assert (told.value.details or {}).get("position") == position


def test_it_compiles_regexes_in_tags_too() -> None:
    def compiled(pattern: str, backend: GrammarBackend) -> tuple[str, ...]:
        tags = TagsPart(
            [StructureTag("<n>", RegexPart(pattern, "tags[0]"), "</n>")], stop_after_first=True
        )
        text = encode_structure(Structure(tags))
        return compile_constraint(ConstraintSpec("structure", text), backend).notes

    assert compiled("(?=x)[a-z]+", "auto") == ()
    assert compiled("(?i:x)[a-z]+", "outlines")[0].startswith("tags[0]: (?i) ignores the case of all")
    with pytest.raises(ConstraintError, match=r"tags\[0\]: regex, character 0"):
        compiled("(?=x)[a-z]+", "outlines")
