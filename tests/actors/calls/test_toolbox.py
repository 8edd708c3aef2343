"""The tools of a client, and calls of them as values."""

import pytest

from ramify.actors.calls.toolbox import MAX_CALLS, Call, Toolbox, call_id, decode, shaped


@pytest.mark.parametrize(
    ("position", "index", "ident"),
    [
        (0, 0, "c00000000"),
        (35, 35, "c00000z0z"),
        (36, 1, "c00001001"),
        (36**6 - 1, 36**2 - 1, "czzzzzzzz"),
    ],
)
def test_an_id_says_where_a_call_is(position: int, index: int, ident: str) -> None:
    assert call_id(position, index) == ident


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
