"""What an output is made of, chunk by chunk and as a whole."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.calls import forms
from ramify.actors.calls import reader as reader_module
from ramify.actors.calls.dialects import DIALECTS, THOUGHTS, Dialect, dialect_of
from ramify.actors.calls.reader import PRIMED_MOST, Reader
from ramify.actors.calls.toolbox import MAX_CALLS, Toolbox, call_id
from ramify.protocol.wire import Part
from tests.amount import examples

TOOLS = Toolbox([{"name": "weather"}, {"type": "function", "function": {"name": "add"}}])
ANY = dialect_of("")
THINKS = ANY._replace(thought=THOUGHTS[0])
CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'


def read(text: str, dialect: Dialect = ANY, tools: Toolbox = TOOLS, cut: int = 0) -> Reader:
    """All of it, in chunks of `cut` characters (0: at once)."""
    reader = Reader(dialect, tools, 40)
    cut = cut or len(text) or 1
    for at in range(0, len(text), cut):
        reader.feed(text[at : at + cut])
    reader.finish()
    assert "".join(part.text for part in reader.take()) == text
    return reader


def called(text: str) -> list[tuple[str, Any]] | None:
    calls = read(text).calls
    found = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
    return found or None


WEATHER = ("weather", {"city": "Köln"})
ADD = ("add", {"a": 1})


@pytest.mark.parametrize(
    ("text", "calls", "left"),
    [
        (f"<tool_call>{CALL}</tool_call>", [WEATHER], ""),
        (f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", [WEATHER], "Let me see."),
        (f"<tool_call>\n{CALL}\n", [WEATHER], ""),
        (
            f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name":"add","arguments":{{"a":1}}}}</tool_call>!',
            [WEATHER, ADD],
            "!",
        ),
        ('{"name": "add", "parameters": {"a": 1}}', [ADD], ""),
        (
            '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}',
            [ADD, ADD],
            "",
        ),
        (f"Sure. [TOOL_CALLS] [{CALL}]", [WEATHER], "Sure."),
        (f" [{CALL}, {CALL}]\n", [WEATHER, WEATHER], ""),
        ('{"name": "add"}', [("add", {})], ""),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', [ADD], ""),
    ],
)
def test_shapes(text: str, calls: list[tuple[str, Any]], left: str) -> None:
    assert called(text) == calls
    assert read(text).content == left


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The answer is 4.",
        '{"answer": 4}',
        '{"name": "unknown", "parameters": {}}',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "<tool_call>weather(Köln)</tool_call>",
        f"<tool_call>{CALL} and more</tool_call>",
        f"{CALL} is how you would call it",
        f"[{CALL}, 4]",
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": {"a": 1}',
        "[]",
        "[" * 100_000,
    ],
)
def test_what_is_no_call(text: str) -> None:
    reader = read(text)
    assert reader.calls == []
    assert reader.content == text.strip()


def test_an_invalid_block_stays_in_the_text() -> None:
    reader = read(f"<tool_call>oops</tool_call><tool_call>{CALL}</tool_call>")
    assert len(reader.calls) == 1
    assert reader.content == "<tool_call>oops</tool_call>"


def test_tags_inside_a_string_are_a_string() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": "</tool_call><tool_call>"}}</tool_call>'
    assert called(text) == [("add", {"a": "</tool_call><tool_call>"})]


def test_line_breaks_inside_a_string() -> None:
    assert called('{"name": "add", "arguments": {"a": "1\n2"}}') == [("add", {"a": "1\n2"})]


def test_the_shape_is_openais() -> None:
    assert read(f"<tool_call>{CALL}</tool_call>").calls == [
        {
            "id": call_id("", 40, 0),
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
        }
    ]


def test_ids_are_unique_and_nine_alphanumeric_characters() -> None:
    ids = [call_id("c", position, index) for position in (0, 40, 2**31 - 1) for index in (0, 1, 99)]
    assert len(set(ids)) == len(ids)
    assert all(len(i) == 9 and i.isalnum() for i in ids)


def test_no_tools_no_calls() -> None:
    assert read(CALL, tools=Toolbox(None)).calls == []


PIECES = [
    '{"name": "add"',
    "}",
    "[",
    "]",
    ",",
    ";",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "x",
    '"',
    " ",
]


@settings(derandomize=True, deadline=None, max_examples=examples(150, 300))
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.integers(1, 9))
def test_any_mixture_is_read_whatever_the_chunks(text: str, cut: int) -> None:
    whole, segments = read(text, THINKS), read(text, THINKS, cut=cut)
    assert segments.calls == whole.calls
    assert (segments.content, segments.reasoning) == (whole.content, whole.reasoning)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": ' + "[" * 900 + "]" * 900 + "}",  # the template would exhaust the stack
        '{"x": NaN}',
        r'{"x": "\ud800"}',  # half a surrogate pair: no frame can carry it
        '{"x": ' + "9" * 500 + "}",
    ],
)
def test_a_call_that_nobody_could_read_is_text(arguments: str) -> None:
    call = f'{{"name": "add", "arguments": {arguments}}}'
    quoted = json.dumps({"name": "add", "arguments": arguments})
    for text in (f"<tool_call>{call}</tool_call>", call, quoted):
        assert read(text).calls == []


def test_a_name_that_comes_twice_is_no_call() -> None:
    assert called('{"name": "add", "name": "weather", "arguments": {}}') is None


# --- thoughts --------------------------------------------------------------------------------------


def test_a_thought_is_told_apart() -> None:
    reader = read(f"\n<think>\nHm, <tool_call> is a tag.\n</think>\n\nWell. <tool_call>{CALL}", THINKS)
    assert reader.reasoning == "Hm, <tool_call> is a tag."
    assert reader.content == "Well."
    assert len(reader.calls) == 1


@pytest.mark.parametrize("cut", [0, 1, 3, 7])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("marks", THOUGHTS)
@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "harmony"])
def test_a_thought_behind_a_thought_is_one(name: Any, marks: Any, begun: bool, cut: int) -> None:
    """Some models think twice: the second thought was a part of the answer."""
    begin, end = marks
    dialect = DIALECTS[name]._replace(thought=marks)
    text = f"one{end}\n\n{begin}two{end}{begin}three{end}\n<th answer {begin}text{end}"
    reader = Reader(dialect, TOOLS, 40)
    if begun:
        reader.prime(f"<a>{begin}\n", "")
    else:
        text = begin + text
    for at in range(0, len(text), cut or len(text)):
        reader.feed(text[at : at + (cut or len(text))])
    reader.finish()
    assert reader.reasoning == "onetwothree"
    assert reader.content == f"<th answer {begin}text{end}"
    parts = list(reader.take())
    assert "".join(part.text for part in parts) == text
    assert "".join(part.text for part in parts if part.kind == "reasoning") == "onetwothree"


def test_calls_behind_a_second_thought_are_read() -> None:
    call = f"<tool_call>{CALL}</tool_call>"
    reader = read(f"<think>a</think>\n<think>{call}</think>\n{call}", THINKS)
    assert [each["function"]["name"] for each in reader.calls] == ["weather"]
    assert reader.reasoning == f"a{call}"
    bare = read(f"<think>a</think><think>b</think>{CALL}", THINKS)
    assert [each["function"]["name"] for each in bare.calls] == ["weather"]


@pytest.mark.parametrize("behind", ["", "<think>c"])
def test_a_long_turn_with_several_thoughts_goes_on(behind: str) -> None:
    reader = Reader(THINKS, TOOLS, 40)
    reader.prime("", f"<think>{'a' * PRIMED_MOST}</think>\n<think>b</think>\n{behind}")
    reader.feed("x")
    reader.finish()
    assert (reader.reasoning, reader.content) == (("x", "") if behind else ("", "x"))


def test_a_thought_without_an_end_is_a_thought() -> None:
    reader = read("<think>Hm, wait </thi", THINKS)
    assert (reader.reasoning, reader.content) == ("Hm, wait </thi", "")


def test_tags_later_on_are_text() -> None:
    reader = read("Write <think>x</think> then.", THINKS)
    assert (reader.reasoning, reader.content) == ("", "Write <think>x</think> then.")


def test_a_prompt_may_have_begun_the_thought() -> None:
    for prompt, said in (
        ("<|im_start|>assistant\n<think>\n", "Hm"),
        ("<|im_start|>assistant\n", "<think>Hm"),
    ):
        reader = Reader(THINKS, TOOLS, 40)
        reader.prime(prompt, said)
        reader.feed("so</think>Yes")
        reader.finish()
        assert (reader.reasoning, reader.content) == ("so", "Yes")
        assert "".join(part.text for part in reader.take()) == "so</think>Yes"


def test_a_prompt_may_have_ended_it() -> None:
    reader = Reader(THINKS, TOOLS, 40)
    reader.prime("<|Assistant|><think>\n</think>", "")
    reader.feed("Yes")
    reader.finish()
    assert (reader.reasoning, reader.content) == ("", "Yes")


# --- labels ----------------------------------------------------------------------------------------


def test_a_call_that_began_before_the_output_is_a_call_of_it() -> None:
    reader = Reader(ANY, TOOLS, 40)
    reader.prime(
        "", '<tool_call>{"name": "add", "arguments": {}}</tool_call> <tool_call>\n{"name": "wea'
    )
    reader.feed('ther", "arguments": {"city": ')
    reader.feed('"Rom"}}</tool_call>')
    reader.finish()
    assert [call["function"]["name"] for call in reader.calls] == ["weather"]
    parts = list(reader.take())
    (named,) = [part for part in parts if part.name]
    assert (named.name, named.id) == ("weather", reader.calls[0]["id"])
    told = "".join(part.arguments or "" for part in parts)
    assert json.loads(told) == {"city": "Rom"}


def test_arguments_come_as_they_are_written() -> None:
    reader = Reader(ANY, TOOLS, 40)
    seen: list[Part] = []
    for c in f"Hm <tool_call>{CALL}</tool_call>":
        reader.feed(c)
        seen += reader.take()
    reader.finish()
    kinds = "".join({"text": "t", "markup": "m", "call": "c"}[p.kind] for p in seen for _ in p.text)
    assert kinds.startswith("ttt" + "m" * len("<tool_call>") + "c")
    assert sum(part.arguments is not None for part in seen) > 10


def test_what_names_no_tool_is_never_labelled_a_call() -> None:
    for text in ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', '{"answer": [1, 2]}'):
        reader = Reader(ANY, TOOLS, 40)
        for c in text:
            reader.feed(c)
        reader.finish()
        assert {part.kind for part in reader.take()} == {"text"}


def test_an_answer_that_begins_like_a_call_does_not_wait_for_ever() -> None:
    reader = Reader(ANY, TOOLS, 40)
    reader.feed('{"essay": "' + "word " * 200)
    assert sum(len(part.text) for part in reader.take()) > 900


# --- bounds ----------------------------------------------------------------------------------------


def test_calls_are_bounded() -> None:
    text = f"<tool_call>{CALL}</tool_call>" * (MAX_CALLS + 5)
    reader = read(text)
    assert len(reader.calls) == MAX_CALLS
    assert reader.content.count("<tool_call>") == 5


def test_reading_again_is_bounded() -> None:
    """Each opening is a call that swallows the rest, up to the end, where all of them break."""
    text = "<tool_call><function=add><parameter=a>" * 3000
    characters = 0

    def counted(sink: forms.Sink) -> forms.Reading[int]:
        nonlocal characters
        inner = forms.tagged(sink)
        next(inner)
        while True:
            c = yield
            characters += 1
            try:
                inner.send(c)
            except StopIteration as end:
                return end.value

    reader = read(text, DIALECTS["qwen3-coder"]._replace(openings={forms.TOOL_CALL: counted}))
    assert reader.calls == []
    assert reader.content == text
    assert characters < 4 * len(text) + (1 << 16)


@pytest.mark.parametrize(("size", "calls"), [(160, 1), (161, 0)])
def test_so_many_characters_are_read_again_and_the_rest_is_text(
    monkeypatch: pytest.MonkeyPatch, size: int, calls: int
) -> None:
    """Two openings that swallow the rest: size - 11, then size - 49 characters are read again."""
    assert reader_module.AGAIN_LEAST == 1 << 14
    monkeypatch.setattr(reader_module, "AGAIN_LEAST", 100)
    good = '<tool_call>{"name": "add"}</tool_call>'
    text = ("<tool_call><function=add><parameter=a>" * 2 + good).ljust(size, "x")
    only = DIALECTS["qwen3-coder"]._replace(openings={forms.TOOL_CALL: forms.tagged})
    reader = read(text, only)
    assert len(reader.calls) == calls
    assert reader.content == (text.replace(good, "") if calls else text)


def test_what_was_said_long_before_is_not_read_as_calls() -> None:
    begun = '<tool_call>{"name": "add", "arguments": {"a": "'
    for filler, called in ((100, 1), (PRIMED_MOST, 0)):
        reader = Reader(THINKS, TOOLS, 40)
        reader.prime("", f"<think>{'Hm. ' * 5000}</think>" + begun + "x" * filler)
        reader.feed('"}}</tool_call>')
        reader.finish()
        assert len(reader.calls) == called
        assert reader.reasoning == ""
    reader = Reader(THINKS, TOOLS, 40)
    reader.prime("", f"<think>{'Hm. ' * 5000}")
    reader.feed("So.</think>Yes")
    reader.finish()
    assert (reader.reasoning, reader.content) == ("So.", "Yes")


@pytest.mark.parametrize(("size", "calls"), [(4096, 1), (4097, 0)])
def test_so_much_of_what_was_said_is_read_as_calls(size: int, calls: int) -> None:
    begun = '<tool_call>{"name": "add", "arguments": {"a": "'
    reader = Reader(ANY, TOOLS, 40)
    reader.prime("", begun.ljust(size, "x"))
    reader.feed('"}}</tool_call>')
    reader.finish()
    assert len(reader.calls) == calls


def test_a_long_call_in_small_chunks() -> None:
    words = " ".join(random.Random(1).choices(["a", "bb", "\\"], k=20_000))
    text = "<tool_call>" + json.dumps({"name": "add", "arguments": {"a": words}}) + "</tool_call>"
    reader = read(text, cut=4)
    assert json.loads(reader.calls[0]["function"]["arguments"]) == {"a": words}


@pytest.mark.parametrize("begin", ["[TOOL_CALLS]", "[TOOL_CALLS]add[CALL_ID]", "<function="])
def test_a_name_that_does_not_end_is_soon_no_call(begin: str) -> None:
    reader = Reader(ANY, TOOLS, 40)
    reader.feed(begin + "word " * 200)
    assert sum(len(part.text) for part in reader.take()) > 900


@pytest.mark.parametrize(
    ("name", "prompt", "text", "said"),
    [
        ("glm45", "<|assistant|>", "\n<think>Sun?</think>\nLook. ", "Look."),
        ("glm47", "<|assistant|><think>", "Sun?</think>", ""),
        ("minimax", "]~b]ai\n<think>\n", "Sun?\n</think>\n\n", ""),
        ("kimi_k2", "<|im_assistant|>assistant<|im_middle|>", "<think>Sun?</think>Look. ", "Look."),
        ("nemotron", "<SPECIAL_11>Assistant\n<think>\n\n", "Sun?\n</think>\n\n", ""),
        ("glm47", "<|assistant|></think>", "Look.", "Look."),
    ],
)
def test_calls_behind_thoughts_token_by_token(name: str, prompt: str, text: str, said: str) -> None:
    written = {
        "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "glm47": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        "minimax": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        "kimi_k2": f"{forms.SECTION}{forms.KIMI}functions.add:3{forms.KIMI_ARGUMENT}"
        f'{{"a": 1}}{forms.KIMI_END}{forms.SECTION_END}',
        "nemotron": '<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}]</TOOLCALL>',
    }[name]
    reader = Reader(dialect_of("</think>", name), TOOLS, 40)
    reader.prime(prompt, "")
    for c in text + written:
        reader.feed(c)
    reader.finish()
    (call,) = reader.calls
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    assert (reader.content, reader.reasoning) == (said, "Sun?" if "Sun" in text else "")
    assert (call["id"] == "functions.add:3") == (name == "kimi_k2")
    assert [part.id for part in reader.take() if part.name] == [call["id"]]


def test_an_id_that_the_model_gives_twice_counts_once() -> None:
    one = f"{forms.KIMI}functions.add:0{forms.KIMI_ARGUMENT}{{}}{forms.KIMI_END}"
    first, second = read(f"{forms.SECTION}{one}{one}", DIALECTS["kimi_k2"]).calls
    assert (first["id"], len(second["id"])) == ("functions.add:0", 9)
