"""Where checked values begin, and that a structure has the same texts with marks of it and without."""

from typing import Any

import pytest

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.begins import begin, taken_out, without_begins
from ramify.actors.grammar.expression import Embedded, Literal, concat, literal, union
from ramify.actors.grammar.structure import Built, structure_automaton
from ramify.protocol.structure import (
    JsonPart,
    ListPart,
    RegexPart,
    SequencePart,
    Structure,
    StructureTag,
    TagsPart,
    TextPart,
    ThoughtPart,
    UnionPart,
)

DIFFERENT = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
ANY = {"type": "array", "items": {"type": "integer"}}
NAMES = {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2}


def built(root: Any, **fields: Any) -> Built:
    return structure_automaton(Structure(root, **fields))


def places_in(found: Built, text: str) -> list[int]:
    """Of each value that is checked in `text` the place, in its order."""
    begins, state, places = dict(found.checked.begins), 0, []
    for byte in text.encode():
        if state in begins and byte in b"[{":
            places.append(begins[state])
        state = found.automaton.walk(bytes([byte]), state)
        assert state >= 0, text
    return places


def test_equal_texts_of_other_places_stay_apart() -> None:
    """`f` takes a set, `g` a list: without begins one state would stand for both."""
    calls = [
        SequencePart([TextPart("f("), JsonPart(DIFFERENT), TextPart(")")]),
        SequencePart([TextPart("g("), JsonPart(ANY), TextPart(")")]),
        SequencePart([TextPart("h("), JsonPart(NAMES), TextPart(")")]),
        SequencePart([TextPart("i("), JsonPart(DIFFERENT, "elsewhere"), TextPart(")")]),
    ]
    found = built(ListPart(UnionPart(list(calls)), ", "))
    text = 'f([1, 2]), g([1]), h({"a": 1, "b": 2}), f([]), i([3])'
    assert places_in(found, text) == [0, found.checked.begins[-1][1], 0, 0]
    assert [place.unique for place in found.checked.places] == [True, False]
    assert found.checked.places[1].distinct
    assert found.automaton.accepts(text.encode())


@pytest.mark.parametrize(
    ("root", "good", "bad"),
    [
        (
            TagsPart([StructureTag("<n>", JsonPart(DIFFERENT), "</n>")]),
            [b"", b"a\xfcb<n>[1]</n>\xfc0\xfc", b"\xf5<n>[2, 1]</n>"],
            [b"<n>\xfc0\xfc[1]</n>", b"<n>[1]", b"<n>\xfc"],
        ),
        (
            ThoughtPart("<t>", "</t>", JsonPart(NAMES)),
            [b'{"a": 1, "b": 2}', b' <t>\xfc{"a": 1}</t>\n{"a": 1, "b": 2}'],
            [b'{"a": 1}', b'<t></t>\xfc0\xfc{"a": 1, "b": 2}', b'x{"a": 1, "b": 2}'],
        ),
        (
            SequencePart([TextPart("x"), JsonPart({"anyOf": [DIFFERENT, {"type": "string"}]})]),
            [b'x"[1, 1]"', b"x[1, 2]"],
            [b"x", b"x\xfc0\xfc[1]", b'\xfc"a"'],
        ),
    ],
)
def test_texts_know_nothing_of_begins(root: Any, good: list[bytes], bad: list[bytes]) -> None:
    found = built(root)
    assert found.checked.places
    assert [text for text in good if not found.automaton.accepts(text)] == []
    assert [text for text in bad if found.automaton.accepts(text)] == []


def test_what_cannot_be_told_apart_is_not_checked() -> None:
    one, other = JsonPart(DIFFERENT), JsonPart({"type": "array", "items": {"type": "string"}})
    checked = built(TagsPart([StructureTag("<n>", one, "</n>"), StructureTag("<m>", one, "</m>")]))
    assert [place for _, place in checked.checked.begins] == [0, 0]
    unsure = built(TagsPart([StructureTag("<n>", one, "</n>"), StructureTag("<n>", other, "</n>")]))
    assert unsure.checked.places == unsure.checked.begins == ()
    assert unsure.automaton.accepts(b'<n>[1]</n> <n>["a", "a"]</n>')
    assert not unsure.automaton.accepts(b"<n>[1, 2]</n>")  # as the automaton holds it alone
    regex = built(
        TagsPart([StructureTag("<n>", one, "</n>"), StructureTag("<n>", RegexPart(r"\[x\]"), "</n>")])
    )
    assert regex.checked.places == ()
    number = built(
        TagsPart([StructureTag("<n>", one, "</n>"), StructureTag("<n>", RegexPart("[a-z]"), "</n>")])
    )
    assert number.checked.places


def test_behind_what_stands_there_already() -> None:
    tags = TagsPart([StructureTag("<n>", JsonPart(DIFFERENT), "</n>")])
    assert places_in(built(tags, after="so <n>"), "[1, 2]</n> <n>[1]</n>") == [0, 0]
    inside = built(tags, after="so <n>[1]</n> <n>[1, ")
    assert inside.checked.begun == (0, b"[1, ")
    assert inside.automaton.accepts(b"2]</n>")
    assert built(tags, after="so <n>[1]</n>").checked.begun == (0, b"[1]</n>")


def test_bytes_of_begins_are_no_text_of_others() -> None:
    free = Automaton.from_regex("(?s:.*)")
    assert without_begins(free).equals(free)
    marked = Automaton.from_expression(
        union(
            concat(literal("a"), begin(12), literal("[]")),
            concat(literal("b"), begin(1), literal("[]")),
            literal("a1"),
        )
    )
    found = taken_out(marked)
    assert found is not None
    made, begins = found
    assert sorted(place for _, place in begins) == [1, 12]
    assert all(made.accepts(text) for text in (b"a[]", b"b[]", b"a1"))
    assert made.equals(Automaton.from_regex(r"[ab]\[\]|a1"))
    for twice in (begin(1), begin(13), Literal(b"[")):
        unsure = union(Embedded(marked), concat(literal("a"), twice, literal("[1]")))
        assert taken_out(Automaton.from_expression(unsure)) is None
