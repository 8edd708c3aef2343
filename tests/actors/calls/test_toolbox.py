"""The tools of a client, and calls of them as values."""

import pytest

from ramify.actors.calls.toolbox import MAX_CALLS, Call, Toolbox, call_id, decode, shaped


def test_ids_of_calls_differ_by_output_place_and_number() -> None:
    where = [(f"c{name}", at, i) for name in range(20) for at in (0, 35, 2**31) for i in range(100)]
    ids = [call_id(*each) for each in where]
    assert len(set(ids)) == len(where)
    assert ids == [call_id(*each) for each in where]  # a replay gives the same
    assert all(len(ident) == 9 and ident.isascii() and ident.isalnum() for ident in ids)


@pytest.mark.parametrize(
    ("text", "value"),
    [(' {"a": 1}\n', {"a": 1}), ("1", 1), ("", None), ("{", None), ('{"a": 1} x', None), ("  ", None)],
)
def test_a_text_is_one_value_with_blanks_around_it(text: str, value: object) -> None:
    assert decode(text) == value


def test_a_call_as_clients_know_it() -> None:
    assert shaped(Call("f", "{}"), "c1") == {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
    }


def test_tools_are_known_by_name() -> None:
    box = Toolbox([{"name": "f"}, {"type": "function", "function": {"name": "g"}}])
    assert "f" in box
    assert "g" in box
    assert "h" not in box
    assert box
    assert not Toolbox(None)
    assert list(box.names) == ["f", "g"]
    assert box.as_call({"name": "f", "arguments": {"ä": 1}}) == Call("f", '{"ä": 1}')
    assert box.as_call({"name": "f", "arguments": '{"a": 1}'}) == Call("f", '{"a": 1}')
    for broken in (
        {"name": "h", "arguments": {}},
        {"name": "f", "arguments": []},
        {"name": "f", "arguments": "[]"},
        {"name": 1, "arguments": {}},
        [],
    ):
        assert box.as_call(broken) is None


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("s", "1", "1"),
        ("n", "1", 1),
        ("n", "one", "one"),
        ("b", "True", True),
        ("b", "False", False),
        ("b", "None", None),
        ("b", "true", True),
        ("s", "True", "True"),
        ("odd", "True", "True"),  # nothing is known of it
        ("unknown", "[1]", [1]),
        ("unknown", "None", "None"),
    ],
)
def test_text_is_read_by_the_type_that_is_declared(parameter: str, text: str, value: object) -> None:
    properties = {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "b": {"type": "boolean"},
        "odd": True,
    }
    box = Toolbox([{"name": "f", "parameters": {"type": "object", "properties": properties}}])
    assert box.typed("f", parameter, text) == value
    assert Toolbox([{"name": "f", "parameters": {}}]).typed("f", "s", "1") == 1


def test_a_toolbox_weighs_its_json() -> None:
    assert Toolbox(None).size == 0
    assert Toolbox([{"name": "f"}]).size == len('[{"name":"f"}]')
    assert MAX_CALLS == 1024
