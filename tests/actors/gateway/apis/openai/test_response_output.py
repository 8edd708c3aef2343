"""Events of a response: those of calls side by side, and the ones that are written by hand."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseFunctionToolCall

from ramify.actors.gateway.apis.openai.chat import ChatAnswers, Heading
from ramify.actors.gateway.apis.openai.requests import ChatRequest, decode
from ramify.actors.gateway.apis.openai.response_output import Events, MessageOutput, OutputWriter
from ramify.actors.gateway.apis.openai.response_requests import ResponseRequest
from ramify.actors.gateway.apis.openai.responses import ResponseDialogue
from ramify.protocol.wire import Delta, Done, Ok, Part, StateReply
from tests.messages import usage

USAGE = usage(prompt=5, computed=5, output=9, ttft_ms=1.0, total_ms=2.0)
CALLS = [("c1", "search", '{"query": "a"}'), ("c2", "calculator", '{"expression": "1 + 2"}')]


def parts() -> list[Part]:
    """Two calls, the arguments in pieces, as a session tells them."""
    made = [Part(kind="text", text="Let me see.")]
    for i, (ident, name, arguments) in enumerate(CALLS):
        made += [
            Part(kind="call", text="", call=i, id=ident, name=name),
            Part(kind="call", text="", call=i, arguments=arguments[:6]),
            Part(kind="call", text="", call=i, arguments=arguments[6:]),
        ]
    return made


def done(branch: str) -> Done:
    calls = [
        {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}
        for ident, name, arguments in CALLS
    ]
    return Done(id=4, branch=branch, position=14, reason="tool", usage=USAGE, tool_calls=calls)


@pytest.mark.parametrize("fields", [{}, {"stream_id": 'a "lane"'}])
@pytest.mark.parametrize("text", ["word", 'é "quoted" \\ \x00 😀', "%d %b"])
def test_the_event_of_text_is_the_one_that_is_made_field_by_field(
    text: str, fields: dict[str, str]
) -> None:
    quick, whole = Events(fields=fields), Events(fields=fields)
    item = MessageOutput(3, "msg_%b")
    for _ in range(2):
        where: dict[str, Any] = {"item_id": "msg_%b", "output_index": 3, "content_index": 0}
        wanted = whole.of("response.output_text.delta", **where, delta=text, logprobs=[])
        made = item.says(quick, text, [])
        assert made.partition(b"\n")[0] == wanted.partition(b"\n")[0]
        data = [each.partition(b"data: ")[2] for each in (made, wanted)]
        assert json.loads(data[0]) == json.loads(data[1])


@pytest.mark.parametrize("text", ["word", 'é "quoted" \\ \x00 😀', "%d %b"])
def test_the_chunk_of_text_is_the_one_that_is_made_field_by_field(text: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "n": 2}
    request = decode(json.dumps(body).encode(), ChatRequest)
    answers = ChatAnswers(request, Heading("chatcmpl-%b", 1, "m"), ())
    delta = Delta(branch="choice1", position=5, text=text, parts=[Part(kind="text", text=text)])
    first = json.loads(answers.said(1, delta)[6:])
    assert first["choices"][0]["delta"]["role"] == "assistant"
    for _ in range(2):
        assert answers.said(1, delta) == answers._chunk(1, {"content": text}, logprobs=[])


def test_calls_side_by_side_are_items_of_their_own() -> None:
    body = {"model": "m", "input": "hi", "stream": True, "store": False}
    it = ResponseDialogue(decode(json.dumps(body).encode(), ResponseRequest), "m", 5)
    said = it.receive([StateReply(session="s_1", key="k", op=0, revision=0, branches=[])])
    assert said is None
    said = it.receive(
        [
            Delta(branch=it.branch, position=9, text="", parts=parts()[:4]),
            Delta(branch=it.branch, position=14, text="", parts=parts()[4:]),
            done(it.branch),
            Ok(id=7),
        ]
    )
    assert isinstance(said, bytes)
    events = [json.loads(line[6:]) for line in said.split(b"\n") if line.startswith(b"data: ")]
    final = Response.model_validate(events[-1]["response"])
    calls = [item for item in final.output if isinstance(item, ResponseFunctionToolCall)]
    assert [(call.call_id, call.name, call.arguments) for call in calls] == CALLS
    assert final.output[0].type == "message"
    indices = [event["output_index"] for event in events if event["type"].endswith("item.added")]
    assert indices == [0, 1, 2]
    for i, (_, _, arguments) in enumerate(CALLS):
        pieces = [
            event["delta"]
            for event in events
            if event["type"] == "response.function_call_arguments.delta"
            and event["output_index"] == i + 1
        ]
        assert pieces == [arguments[:6], arguments[6:]]


def test_calls_side_by_side_have_their_index_in_chunks() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    answers = ChatAnswers(decode(json.dumps(body).encode(), ChatRequest), Heading("c", 1, "m"), ())
    said = answers.receive([Delta(branch="main", position=9, text="", parts=parts()), done("main")])
    assert isinstance(said, bytes)
    chunks = [json.loads(line[6:]) for line in said.split(b"\n\n") if line.startswith(b"data: {")]
    found: dict[int, list[Any]] = {}
    for chunk in chunks:
        for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
            made = found.setdefault(call["index"], [None, None, ""])
            made[0] = call.get("id") or made[0]
            made[1] = call["function"].get("name") or made[1]
            made[2] += call["function"]["arguments"]
    assert [tuple(found[i]) for i in sorted(found)] == CALLS
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_says_the_namespace_of_its_tool() -> None:
    tool = {"type": "function", "name": "close", "parameters": {}}
    space = {"type": "namespace", "name": "agents", "description": "", "tools": [tool]}
    body = {"model": "m", "input": "hi", "store": False, "tools": [space]}
    it = ResponseDialogue(decode(json.dumps(body).encode(), ResponseRequest), "m", 5)
    it.receive([StateReply(session="s_1", key="k", op=0, revision=0, branches=[])])
    said = Part(kind="call", text="", call=0, id="c1", name="agents__close", arguments="{}")
    answer = it.receive(
        [Delta(branch=it.branch, position=9, text="", parts=[said]), done(it.branch), Ok(id=7)]
    )
    (call,) = json.loads(answer.body)["output"]  # type: ignore[union-attr]
    assert (call["namespace"], call["name"]) == ("agents", "close")


PIECES = st.lists(
    st.tuples(
        st.sampled_from(["reasoning", "text", "markup", "call"]),
        st.one_of(st.text(max_size=40), st.sampled_from([" ", "\n\n", " x", "\n" * 17])),
    ),
    max_size=6,
)


@given(PIECES, st.data())
def test_an_even_stream_is_the_same_however_its_text_came(
    pieces: list[tuple[Any, str]], data: st.DataObject
) -> None:
    """And whoever has the events up to any number is told the others."""

    def call(number: int) -> Part:
        return Part(kind="call", text="", call=number, id=f"c{number}", name="f")

    def told(cut: bool, after: int = -1) -> list[dict[str, Any]]:
        events = Events(after=after)
        writer = OutputWriter("u", events, even=True)
        made = b""
        for number, (kind, text) in enumerate(pieces):
            run = [call(number)] if kind == "call" else []
            while text or not run:
                size = data.draw(st.integers(1, max(1, len(text)))) if cut else max(1, len(text))
                piece, text = text[:size], text[size:]
                if kind == "call":
                    run.append(Part(kind=kind, text="", call=number, arguments=piece))
                else:
                    run.append(Part(kind=kind, text=piece))
            for part in run:
                made += writer.say(Delta(branch="b", position=1, text=part.text, parts=[part]))
        made += writer.end(completed=True)
        return [json.loads(line[6:]) for line in made.split(b"\n") if line.startswith(b"data: ")]

    whole = told(False)
    assert [each["sequence_number"] for each in whole] == list(range(len(whole)))
    assert told(True) == whole
    after = data.draw(st.integers(-1, len(whole)))
    assert told(True, after) == whole[after + 1 :]
