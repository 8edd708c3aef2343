"""The calls behind one mark: what is held, hidden and labelled while they come."""

from itertools import count

import pytest

from ramify.actors.calls import forms
from ramify.actors.calls.block import HELD_MOST, Block
from ramify.actors.calls.forms import NAME_MOST, Form
from ramify.actors.calls.toolbox import Toolbox
from ramify.protocol.wire import Part

LONG = "n" * NAME_MOST
TOOLS = Toolbox([{"name": "add"}, {"name": LONG}])


def block(form: Form = forms.tagged, mark: str = forms.TOOL_CALL) -> Block:
    numbers = count()
    return Block(mark, form, TOOLS, lambda: next(numbers))


def test_it_holds_each_character_three_times() -> None:
    each = block()
    assert each.held == 24 * len(forms.TOOL_CALL)
    each.feed('{"na')
    assert each.held == 24 * (len(forms.TOOL_CALL) + 4)
    assert each.text == forms.TOOL_CALL + '{"na'
    assert (each.broken, each.committed, each.calls) == (False, 0, [])


def test_without_a_tools_name_so_much_is_hidden() -> None:
    assert HELD_MOST == 512
    each = block()
    each.feed('{"x": "' + "y" * (HELD_MOST - len(forms.TOOL_CALL) - 7))
    assert each.hidden
    assert list(each.take()) == []
    each.feed("z")
    assert not each.hidden
    parts = list(each.take())
    assert {part.kind for part in parts} == {"text"}  # it may well be an answer
    assert "".join(part.text for part in parts) == each.text
    assert each.labelled == len(each.text)


def test_a_call_is_labelled_as_soon_as_its_tool_is_named() -> None:
    each = block()
    each.feed('{"name": "add"')
    assert each.hidden
    each.feed(",")
    assert list(each.take()) == [
        Part(kind="markup", text=forms.TOOL_CALL),
        Part(kind="call", text='{"name": "add",', call=0, name="add"),
    ]
    each.feed(' "arguments": {"a"')
    each.feed(": 1}")
    assert list(each.take()) == [
        Part(kind="call", text=' "arguments": {"a": 1}', call=0, arguments='{"a": 1}')
    ]
    assert each.feed("}\n</tool_call>!") == "!"
    assert each.committed == len(each.text)
    assert [(number, call.name, call.arguments) for number, call in each.calls] == [
        (0, "add", '{"a": 1}')
    ]
    assert [(part.kind, part.text) for part in each.take()] == [
        ("call", "}"),
        ("markup", "\n</tool_call>"),
    ]


@pytest.mark.parametrize(
    ("form", "mark", "begin", "end"),
    [
        (forms.tagged, forms.TOOL_CALL, '{"name": "add", "arguments": {"a": "', '"}}</tool_call>'),
        (forms.mistral, forms.TOOL_CALLS, 'add{"a": "', '"}'),
    ],
)
def test_a_form_does_not_see_the_inside_of_arguments_strings(
    form: Form, mark: str, begin: str, end: str
) -> None:
    """It takes a long string as long as a short one."""
    seen: list[str] = []

    def noting(sink: forms.Sink) -> forms.Reading[int]:
        inner = form(sink)
        next(inner)
        while True:
            c = yield
            seen.append(c)
            try:
                inner.send(c)
            except StopIteration as ended:
                return ended.value

    each = block(noting, mark)
    assert each.feed(begin + "x" * 1000 + end) in (None, "")
    each.end()
    assert [call.arguments for _, call in each.calls] == ['{"a": "' + "x" * 1000 + '"}']
    assert "".join(seen) == begin + end


def test_what_stood_before_the_output_has_no_labels() -> None:
    each = block()
    each.feed('{"name": "add", "arguments": {"a"')
    each.forget_labels()
    assert each.labelled == len(each.text)
    each.feed(": 1}")
    assert list(each.take()) == [
        Part(kind="call", text=": 1}", call=0, name="add", arguments='{"a": 1}')
    ]


def test_arguments_that_come_as_a_string_are_told_when_they_are_complete() -> None:
    each = block()
    each.feed('{"name": "add", "arguments": "{\\"a\\": 1}"')
    assert [part.arguments for part in each.take()] == [None, None]
    each.feed("}")
    assert [part.arguments for part in each.take()] == ['{"a": 1}']


@pytest.mark.parametrize(
    ("form", "mark", "begin", "end"),
    [
        (forms.function, forms.FUNCTION, "", "></function>"),
        (forms.mistral, forms.TOOL_CALLS, "", "{}"),
        (forms.deepseek, forms.CALLS_BEGIN, forms.CALL_BEGIN, forms.CALL_SEP + "{}" + forms.CALL_END),
        (forms.harmony, forms.RECIPIENT, "", forms.MESSAGE + "{}" + forms.CALL),
    ],
)
def test_the_longest_name_is_read_and_what_never_ends_is_not(
    form: Form, mark: str, begin: str, end: str
) -> None:
    each = block(form, mark)
    each.feed(begin + LONG + end)
    assert not each.broken
    each.end()
    assert [call.name for _, call in each.calls] == [LONG]
    endless = block(form, mark)
    endless.feed(begin + "n" * 300)
    assert endless.broken


def test_a_tool_that_there_is_not_breaks_it_and_so_does_a_second_name() -> None:
    unknown, twice = block(), block()
    assert unknown.feed('{"name": "sub", "x"') == ' "x"'
    assert unknown.broken
    twice.feed('{"name": "add", "name": "add",')
    assert twice.broken


def test_an_end_before_the_call_is_complete_breaks_it() -> None:
    each = block()
    each.feed('{"name": "add", "arguments": {}')
    each.end()
    assert each.broken
    whole = block()
    assert whole.feed('{"name": "add", "arguments": {}} ') is None
    whole.end()
    assert not whole.broken
    assert [call.name for _, call in whole.calls] == ["add"]


@pytest.mark.parametrize(
    ("form", "mark", "written", "calls", "rest"),
    [
        (
            forms.function,
            forms.FUNCTION,
            "add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>x</parameter></function>!",
            ['{"a": 1, "b": "x"}'],
            "!",
        ),
        (forms.function, forms.FUNCTION, " add ></function>", ["{}"], ""),
        (forms.tagged, forms.TOOL_CALL, "<function=add></function></tool_call> ", ["{}"], " "),
        (forms.mistral, forms.TOOL_CALLS, ' {"name": "add"} x', ["{}"], " x"),
        (
            forms.mistral,
            forms.TOOL_CALLS,
            '[{"name": "add"}, {"name": "add", "arguments": {"a": 1}}]x',
            ["{}", '{"a": 1}'],
            "x",
        ),
        (forms.mistral, forms.TOOL_CALLS, 'add[CALL_ID]7[ARGS]{"a": 1}x', ['{"a": 1}'], "x"),
        (forms.mistral, forms.TOOL_CALLS, 'add{"a": 1}', ['{"a": 1}'], ""),
        (forms.python_tag, forms.PYTHON_TAG, '{"name": "add"}; x', ["{}"], "; x"),
        (
            forms.python_tag,
            forms.PYTHON_TAG,
            '{"name": "add"} ; {"name": "add"}x',
            ["{}", "{}"],
            "x",
        ),
        (
            forms.harmony,
            forms.RECIPIENT,
            'add<|constrain|>json<|message|> {"a": 1}<|call|>x',
            ['{"a": 1}'],
            "x",
        ),
        (forms.harmony, forms.RECIPIENT, "add json<|message|>{}<|call|>", ["{}"], ""),
        (
            forms.deepseek,
            forms.CALLS_BEGIN,
            f"{forms.CALL_BEGIN}function{forms.CALL_SEP}add\n```json\n{{}}\n```{forms.CALL_END}"
            f"{forms.CALLS_END}x",
            ["{}"],
            "x",
        ),
    ],
)
def test_each_form_ends_where_its_calls_do(
    form: Form, mark: str, written: str, calls: list[str], rest: str
) -> None:
    """At once or character by character: the same calls, labels for all of them, the same rest."""
    for size in (len(written), 1):
        each = block(form, mark)
        left: str | None = None
        for at in range(0, len(written), size):
            left = each.feed(written[at : at + size])
            if left is not None:
                left += written[at + size :]
                break
        assert not each.broken
        assert (left or "") == rest
        assert each.text == mark + written[: len(written) - len(rest)]
        assert each.committed > len(mark)
        assert [(n, call.name, call.arguments) for n, call in each.calls] == [
            (n, "add", arguments) for n, arguments in enumerate(calls)
        ]
        parts = list(each.take())
        told = ["".join(p.arguments or "" for p in parts if p.call == n) for n in range(len(calls))]
        assert told == calls
        assert [p.name for p in parts if p.name] == ["add"] * len(calls)


@pytest.mark.parametrize(
    ("form", "mark", "written"),
    [
        (forms.function, forms.FUNCTION, "sub>"),
        (forms.function, forms.FUNCTION, "add>x"),
        (forms.mistral, forms.TOOL_CALLS, '[{"name": "add"};'),
        (forms.mistral, forms.TOOL_CALLS, "add[CALL_ID][ARGS]{"),
        (forms.mistral, forms.TOOL_CALLS, "sub{"),
        (forms.deepseek, forms.CALLS_BEGIN, "x"),
        (forms.harmony, forms.RECIPIENT, "sub<|message|>"),
        (forms.python_tag, forms.PYTHON_TAG, "p"),
        (forms.bare, "", '[{"name": "add"}; '),
        (forms.bare, "", '{"name": "add"}, '),
        (forms.bare, "", '{"name": "add"} x'),
    ],
)
def test_what_is_no_call_breaks_as_soon_as_that_is_seen(form: Form, mark: str, written: str) -> None:
    each = block(form, mark)
    assert (each.feed(written) or "").strip() == ""
    assert each.broken
    assert each.calls == []
