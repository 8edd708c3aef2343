"""Structures against a reader that searches with `find` and matches with `re`."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.grammar.structure import structure_automaton
from ramify.protocol.errors import ConstraintError
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
    UnlessPart,
    UntilPart,
    XmlPart,
    decode_structure,
    encode_structure,
)

CONTENTS = ["a*", "[ab]{1,2}", "(no|none)", "", "b<"]


def reads(part: TagsPart, text: str) -> bool:
    """Whether `text` is one of `part`'s, by searching it from the left."""
    triggers = part.triggers or [tag.begin for tag in part.tags]
    tags = [(tag, tag.content.regex) for tag in part.tags if isinstance(tag.content, RegexPart)]

    def free(at: int, seen: bool) -> bool:
        ends = [(text.find(each, at) + len(each), -len(each)) for each in triggers if each in text[at:]]
        if not ends:
            return seen or not part.at_least_one
        end, size = min(ends)
        begun = text[end + size : end]
        for tag, regex in tags:
            shortest = [t for t in triggers if begun.startswith(t) and tag.begin.startswith(t)]
            if not tag.begin.startswith(begun) and not shortest:
                continue
            start = end + size + len(tag.begin)
            if text[end + size : start] != tag.begin:
                continue
            for stop in range(start, len(text) + 1):
                if not re.fullmatch(regex, text[start:stop]) or not text.startswith(tag.end, stop):
                    continue
                behind = stop + len(tag.end)
                if behind == len(text) if part.stop_after_first else free(behind, True):
                    return True
        return False

    return free(0, False)


TAGS = st.builds(
    lambda begin, regex, end: StructureTag("<" + begin, RegexPart(regex), end),
    st.text("ab<", max_size=2),
    st.sampled_from(CONTENTS),
    st.sampled_from(["", ">", "b>"]),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(TAGS, min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.text("ab<>n", max_size=10), max_size=20),
)
def test_tags(tags: list[StructureTag], short: bool, least: bool, first: bool, texts: list[str]) -> None:
    part = TagsPart(tags, ["<"] if short else [], least, first)
    if not short and len({tag.begin for tag in tags}) < len(tags):
        part = TagsPart(tags, list({tag.begin: None for tag in tags}), least, first)
    triggers = part.triggers or [tag.begin for tag in tags]
    if any(a != b and b in a for a in triggers for b in triggers):
        return  # which of them begins is a matter of definition: see test_free_text
    made, *_ = structure_automaton(Structure(part))
    for text in [*texts, *(tag.begin + tag.end for tag in tags)]:
        assert made.accepts(text.encode()) == reads(part, text), (part, text)


def texts_of(root: Any, **fields: Any) -> Any:
    return structure_automaton(Structure(root, **fields))[0]


def test_parts() -> None:
    listed = ListPart(UnionPart([TextPart("a"), RegexPart("[0-9]")]), ", ")
    made = texts_of(SequencePart([TextPart("["), listed, TextPart("]")]))
    assert made.accepts(b"[a, 3, a]")
    assert not made.accepts(b"[]")
    assert not made.accepts(b"[a,3]")
    assert texts_of(ListPart(TextPart("ab"), "")).accepts(b"ababab")
    assert texts_of(UnlessPart(RegexPart("[a-z ]*"), ["no"])).accepts(b" nay")
    assert not texts_of(UnlessPart(RegexPart("[a-z ]*"), ["no"])).accepts(b"  none")
    assert texts_of(SequencePart([UntilPart(["|"]), TextPart("x")])).accepts(b"a\xffm\xfeb|x")


def test_a_thought_before_the_answer_is_free() -> None:
    part = ThoughtPart("<think>", "</think>", JsonPart({"enum": [1, 12]}))
    made = texts_of(part, marks=["<think>", "</think>"])
    begin, end = b"\xff<think>\xfe", b"\xff</think>\xfe"
    for text in (b"12", b"\n" + begin + b'{"so"' + end + b"\n\n1", begin + b"spelled</think>1"):
        assert made.accepts(text), text
    assert not made.accepts(begin + b"1")
    assert not made.accepts(b"x" + begin + end + b"1")
    inside = texts_of(part, marks=["<think>", "</think>"], after="<think>")
    assert inside.accepts(b"hm" + end + b"12")
    assert not inside.accepts(b"12")


def test_what_stands_there_already_is_gone_on_with() -> None:
    tags = TagsPart([StructureTag("<f>", RegexPart("[0-9]{3}"), "</f>")])
    made = texts_of(tags, marks=["<f>", "</f>"], after="well <f>1")
    assert made.accepts(b"23\xff</f>\xfe and more")
    assert not made.accepts(b"2")
    with pytest.raises(ConstraintError, match="cannot be gone on with"):
        texts_of(tags, after="<f>x")


DEEP = '{"a": [[{"b": [[{"c": [[{}, [1]]]}]]}]]}'
FREE = JsonPart({"type": "object"})
UNIQUE = JsonPart({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})


def test_values_that_no_schema_describes() -> None:
    """At any depth: in calls, in lists, behind thoughts, beside values that are checked."""
    calls = TagsPart(
        [
            StructureTag("<f>", FREE, "</f>"),
            StructureTag("<g>", JsonPart({}), "</g>"),
            StructureTag("<h>", UNIQUE, "</h>"),
        ]
    )
    built = structure_automaton(Structure(calls))
    assert built.notes == ()
    assert built.automaton.accepts(
        f"so {{ \udcf8 <f>{DEEP}</f>, <g>[{DEEP}]</g><h>[1, 2]</h>}}]".encode("utf-8", "surrogateescape")
    )
    for wrong in (f"<f>{DEEP}]</f>", f"<f>{DEEP[:-1]}]</f>", "<f>\udcf8</f>", "<f>[]</f>"):
        assert not built.automaton.accepts(wrong.encode("utf-8", "surrogateescape")), wrong
    listed = texts_of(SequencePart([TextPart("["), ListPart(FREE, ", "), TextPart("]")]))
    assert listed.accepts(f"[{DEEP}, {DEEP}]".encode())
    for begin in ("<think>", "[THINK]"):
        thought = texts_of(ThoughtPart(begin, "/>", UnlessPart(JsonPart({}), ["<tool>"])))
        assert thought.accepts(f"{begin}[{{/>[{DEEP}]".encode())
    either = texts_of(UnionPart([FREE, JsonPart({"properties": {"a": {"const": [1]}}})]))
    assert either.accepts(DEEP.encode())


def test_where_values_of_any_depth_could_be_something_else() -> None:
    """They are written out, to a small depth."""
    unsure = [
        UnlessPart(JsonPart({}), ['{"a']),
        UnlessPart(JsonPart({}), ["[[2"]),
        UnionPart([JsonPart({}), SequencePart([UntilPart(["."]), TextPart("x")])]),
    ]
    for part in unsure:
        built = structure_automaton(Structure(part))
        assert built.notes == ("values that no schema describes nest at most 3 deep",)
        assert built.automaton.accepts(b"[[[1]]]")
        assert not built.automaton.accepts(DEEP.encode())
    assert not texts_of(unsure[0]).accepts(b'{"ab": 1}')
    assert not texts_of(unsure[1]).accepts(b"[[2]]")
    inside = texts_of(FREE, after='{"b": {"a": ')
    assert inside.accepts(b"[1]}}")


def test_schemas_that_cannot_be_kept() -> None:
    bad = {"type": "array", "unevaluatedItems": False}
    for part in (JsonPart(bad, "tools[0]"), XmlPart({"type": "object", "not": {}}, "tools[0]")):
        with pytest.raises(ConstraintError, match=r"tools\[0\]"):
            structure_automaton(Structure(part))
    made, notes, *_ = structure_automaton(Structure(JsonPart(bad, "tools[0]", strict=False)))
    assert made.accepts(b'{"any": ["x"]}')
    assert notes[0].startswith("tools[0]")
    assert "any object is allowed" in notes[0]
    made, notes, *_ = structure_automaton(Structure(XmlPart({"not": {}}, "tools[0]", strict=False)))
    assert made.accepts(b"<parameter=a>\nb\n</parameter>\n")
    assert len(notes) == 1


def test_triggers_and_tags_go_together() -> None:
    tag = StructureTag("<f>", RegexPart("a"), "")
    with pytest.raises(ConstraintError, match="none of the triggers"):
        structure_automaton(Structure(TagsPart([tag], ["<g"])))
    with pytest.raises(ConstraintError, match="no tag begins"):
        structure_automaton(Structure(TagsPart([tag], ["<f", "<g"])))


def test_as_json() -> None:
    tags = TagsPart([StructureTag("a", ListPart(XmlPart({"x": [1]}), ","), "b")], ["a"], True)
    structure = Structure(ThoughtPart("<", ">", tags), ["<"], "after")
    assert decode_structure(encode_structure(structure)) == structure
