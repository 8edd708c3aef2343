"""Lists of names merged into one order."""

from hypothesis import given
from hypothesis import strategies as st

from ramify.actors.grammar.schema.lower import lower
from ramify.actors.grammar.schema.order import merged

NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=5)


def test_names_that_no_list_compares_stand_as_they_appear() -> None:
    assert merged([]) == []
    assert merged([["b", "a"], ["c"], ["a", "d"]]) == ["b", "a", "c", "d"]


def test_the_order_of_each_list_is_kept() -> None:
    assert merged([["a", "c"], ["a", "b", "c", "d"]]) == ["a", "b", "c", "d"]
    assert merged([["c"], ["a", "d"], ["b", "c", "d"]]) == ["a", "b", "c", "d"]


def test_where_lists_contradict_each_other_the_first_to_appear_comes_first() -> None:
    assert merged([["a", "b"], ["b", "a"]]) == ["a", "b"]
    assert merged([["b", "c"], ["x", "c", "b", "y"]]) == ["x", "b", "c", "y"]


@given(st.permutations("abcdefgh"), st.lists(st.sets(st.integers(0, 7)), max_size=6))
def test_lists_out_of_one_order_keep_it(order: list[str], parts: list[set[int]]) -> None:
    lists = [[order[i] for i in sorted(part)] for part in parts]
    found = merged(lists)
    assert sorted(found) == sorted({name for each in lists for name in each})
    for each in lists:
        assert [name for name in found if name in each] == each


@given(st.lists(NAMES, max_size=6))
def test_every_name_comes_once(lists: list[list[str]]) -> None:
    found = merged(lists)
    assert sorted(found) == sorted({name for each in lists for name in each})


def test_branches_that_list_members_of_their_parent_follow_its_order() -> None:
    string = {"type": "string"}
    kinds = [{"properties": {"kind": {"const": kind}, "size": string}} for kind in ("a", "b")]
    parent = {"kind": string, "name": string, "size": string}
    schema = {"type": "object", "oneOf": kinds, "properties": parent, "additionalProperties": False}
    automaton = lower(schema).automaton
    assert automaton.accepts(b'{"kind":"b","name":"x","size":"y"}')
    assert not automaton.accepts(b'{"kind":"b","size":"y","name":"x"}')
    assert not automaton.accepts(b'{"kind":"c","name":"x","size":"y"}')


def test_unlisted_members_may_come_first_in_the_outermost_object() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schema = {**inner, "properties": {"a": {"type": "integer"}, "in": inner}}
    automaton = lower(schema).automaton
    assert automaton.accepts(b'{"$schema":"x","$id":"y","a":1,"in":{"a":1,"x":2},"z":3}')
    assert not automaton.accepts(b'{"in":{"x":2,"a":1}}')
    assert not automaton.accepts(b'{"a":1,"z":3,"in":{}}')
    assert not automaton.accepts(b'{"$schema":"x","in":{},"a":1}')


def test_unlisted_members_never_come_before_required_ones() -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]}
    automaton = lower(schema).automaton
    assert automaton.accepts(b'{"a":0,"b":1,"c":2}')
    assert not automaton.accepts(b'{"c":2,"a":0,"b":1}')
    assert not automaton.accepts(b'{"c":2,"b":1}')


def test_unlisted_members_in_front_are_counted() -> None:
    listed = {"a": {"const": 0}, "b": {"const": 0}}
    names = {"additionalProperties": {"const": 0}, "minProperties": 2, "maxProperties": 3}
    lowered = lower({"type": "object", "properties": listed, **names}, checked=True)
    accepts = lowered.automaton.accepts
    for text in (b'{"x":0,"a":0}', b'{"x":0,"y":0,"b":0}', b'{"x":0,"a":0,"y":0}'):
        assert accepts(text)
    for text in (b'{"x":0}', b'{"x":0,"y":0,"a":0,"b":0}'):
        assert not accepts(text)
