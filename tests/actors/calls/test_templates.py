"""Published chat templates: what they render, how their calls begin, and which family they are.

They are tried where they are at hand (`../shared/data/templates`, or the folder that RAMIFY_TEMPLATES
names), with `renderings.json`: what `transformers` renders of some conversations.
"""

import json
import os
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from ramify.actors.calls.dialects import dialect_of
from ramify.actors.calls.reader import Reader
from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.grammar.structure import structure_automaton
from ramify.actors.kit.turns import at_once
from ramify.actors.session.branches.segments import OutputSegment
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.input.branch_writer import BranchWriter
from ramify.actors.session.input.template import ChatTemplate
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest
from ramify.protocol.structure import Structure
from ramify.protocol.wire import Append, ChatMessage, Open

SHARED = Path(__file__).parents[3].parent / "shared" / "data" / "templates"
FOLDER = Path(os.environ.get("RAMIFY_TEMPLATES", SHARED))
FILE = FOLDER / "renderings.json"
PUBLISHED: dict[str, Any] = json.loads(FILE.read_text()) if FILE.is_file() else {"templates": {}}
NAMES = sorted(PUBLISHED["templates"])
FAMILIES = {
    "Hermes": "hermes",
    "Llama": "llama3",
    "Qwen2.5": "hermes",
    "Qwen3-0": "hermes",
    "Qwen3-Coder": "qwen3-coder",
    "Qwen3.5": "qwen3-coder",
    "istral": "mistral",
    "DeepSeek": "deepseek",
    "gpt-oss": "harmony",
}


@cache
def tokenizer_of(name: str, control: tuple[str, ...] = ()) -> Tokenizer:
    """One token for each byte, and for each of the template's marks that are control tokens."""
    source = (FOLDER / name).read_text()
    known = PUBLISHED["templates"][name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = [known[key] for key in ("bos_token", "eos_token") if known[key]]
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in [*marks, *control]])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=known["eos_token"], bos_token=known["bos_token"]
    )
    fast.chat_template = source
    return Tokenizer.of(fast)


def template_of(name: str) -> ChatTemplate:
    tokenizer = tokenizer_of(name)
    return ChatTemplate(tokenizer, dialect_of(tokenizer.template_source))


def message_of(given: dict[str, Any]) -> ChatMessage:
    """As a client sends it: no null, one field for what was thought."""
    fields = {key: value for key, value in given.items() if key not in ("reasoning_content", "thinking")}
    fields["content"] = given.get("content") or ""
    return ChatMessage(**fields, reasoning=given.get("reasoning_content"))


def renderings(name: str) -> list[Any]:
    """One expectation for each conversation: in the shape that shows the call, if only one does."""
    text = "DeepSeek-V3.jinja" in name
    null = text or "R1" in name
    return [
        each
        for each in PUBLISHED["templates"][name]["renderings"]
        if not each["kwargs"]
        and each.get("arguments_as") in (None, "string" if text else "object")
        and each.get("empty_content_as") in (None, "null" if null else "empty string")
    ]


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some templates write the date."""

    class Pinned(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.fromisoformat(PUBLISHED["now"])

    monkeypatch.setattr("ramify.actors.tokenizer.chat_jinja.datetime", Pinned)


@pytest.mark.parametrize("name", NAMES)
def test_conversations_are_rendered_as_expected(name: str) -> None:
    template = template_of(name)
    expected = renderings(name)
    assert {each["conversation"] for each in expected} == PUBLISHED["conversations"].keys()
    for each in expected:
        conversation = PUBLISHED["conversations"][each["conversation"]]
        messages = [message_of(given) for given in conversation["messages"]]
        arguments = (messages, conversation.get("tools"), each["add_generation_prompt"])
        if "error" in each:
            with pytest.raises(BadRequest):
                template.strict(*arguments)
        else:
            assert Tokenizer.unguarded(template.strict(*arguments)) == each["text"]


@pytest.mark.parametrize("name", NAMES)
def test_the_family_is_read_off_the_template(name: str) -> None:
    dialect = template_of(name).speech.dialect
    assert dialect.name == next(family for part, family in FAMILIES.items() if part in name)
    thinks = any(part in name for part in ("Qwen3-0", "Qwen3.5", "R1", "V3.1", "gpt-oss"))
    assert (dialect.thought is not None) == thinks


@pytest.mark.parametrize("name", NAMES)
def test_calls_that_the_template_renders_are_read(name: str) -> None:
    """The text of an assistant's turn with calls, as the model would have generated it."""
    template = template_of(name)
    for key in ("tool_call_result", "tool_calls_parallel"):
        conversation = PUBLISHED["conversations"][key]
        messages = [message_of(given) for given in conversation["messages"]]
        turn = next(i for i, each in enumerate(messages) if each.tool_calls)
        tools, calls = conversation["tools"], messages[turn].tool_calls
        assert calls is not None
        try:
            prompt = template.strict(messages[:turn], tools, True)
            shown = template.strict(messages[: turn + 1], tools, False)
        except BadRequest:  # Llama's templates take one call only
            assert key == "tool_calls_parallel"
            assert "Llama" in name
            continue
        if "gpt-oss" in name:  # it shows the first call of a turn alone
            calls = calls[:1]
        reader = Reader(template.speech.dialect, Toolbox(tools), 3)
        output = shown[len(prompt) :]
        if shown.startswith(prompt):
            reader.prime(prompt[-40:], "")
        else:  # R1 takes the thought of its prompt back, Nemo moves the system's words
            assert any(part in name for part in ("R1", "Nemo"))
            output = shown[min(shown.rfind(mark) for mark in template.speech.dialect.openings) :]
        for mark in (template.closing(), "<｜end▁of▁sentence｜>", "</s>"):  # stop tokens have no text
            output = output.removesuffix(mark)
        reader.feed(output)
        reader.finish()
        assert [
            (each["function"]["name"], json.loads(each["function"]["arguments"]))
            for each in reader.calls
        ] == [(each["function"]["name"], each["function"]["arguments"]) for each in calls]
        assert reader.content == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_forced_call_begins_as_the_template_writes_it(name: str) -> None:
    template = template_of(name)
    conversation = PUBLISHED["conversations"]["tool_call_result"]
    messages = [message_of(given) for given in conversation["messages"]]
    turn = next(i for i, each in enumerate(messages) if each.tool_calls)
    tools, calls = conversation["tools"], messages[turn].tool_calls
    assert calls is not None
    prompt = template.strict(messages[:turn], tools, True)
    shown = template.strict(messages[: turn + 1], tools, False)
    toolbox = Toolbox(tools)
    wanted = calls[0]["function"]["name"]
    for choice in ("required", wanted):
        opening = template.speech.opening(choice, toolbox, chat=True)
        if shown.startswith(prompt):
            assert shown[len(prompt) :].startswith(opening)
            rest = shown[len(prompt) + len(opening) :]
        else:
            assert any(part in name for part in ("R1", "Nemo"))
            rest = shown[shown.rindex(opening) + len(opening) :]
        for mark in (template.closing(), "<｜end▁of▁sentence｜>", "<｜Assistant｜>"):
            rest = rest.replace(mark, "") if mark else rest
        reader = Reader(template.speech.dialect, toolbox, 3)
        reader.prime(prompt[-40:], opening)
        reader.feed(rest)
        reader.finish()
        assert [each["function"]["name"] for each in reader.calls] == [wanted]
        assert "ramify" not in opening


def test_what_cannot_be_forced() -> None:
    speech = template_of(NAMES[0]).speech if NAMES else None
    if speech is None:
        pytest.skip("the published templates are not at hand")
    tools = Toolbox([{"name": "add"}])
    assert speech.opening("auto", tools, chat=True) == speech.opening("none", tools, chat=False) == ""
    for choice, box, chat, why in (
        ("required", Toolbox(None), True, "needs tools"),
        ("required", tools, False, "needs a chat"),
        ("nobody", tools, True, r"none of auto, none, required, and the session's tools \(add\)"),
    ):
        with pytest.raises(BadRequest, match=why):
            speech.opening(choice, box, chat=chat)


# --- strict sessions: marks that are control tokens --------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_generated_call_is_a_call_when_it_is_rendered_again(name: str) -> None:
    """A message's text cannot hold a control token, so a strict template is told of calls as calls."""
    source = (FOLDER / name).read_text()
    dialect = dialect_of(source)
    marks = [
        mark for mark in dialect.marks if not mark.startswith(("<tool", "</tool", "<think", "</think"))
    ]
    tokenizer = tokenizer_of(name, tuple(marks))
    shown = tokenizer.showing(dialect.marks)
    assert (shown is tokenizer) == (not marks)
    template = ChatTemplate(shown, dialect, control=shown is not tokenizer)
    conversation = PUBLISHED["conversations"]["tool_call_result"]
    messages = [message_of(given) for given in conversation["messages"]]
    turn = next(i for i, each in enumerate(messages) if each.tool_calls)
    tools, calls = conversation["tools"], messages[turn].tool_calls
    assert calls is not None
    state = SessionState(1, context=1 << 20, vocab=1 << 20, limits=Limits(), decode=shown.decode)
    writer, branch = BranchWriter(state, shown, template), state.root("main")

    def say(*new: ChatMessage) -> None:
        op = Append(id=1, messages=list(new))
        prepared = writer.prepare(branch, op, strict=True, tools=tools, room=1 << 20)
        at_once(writer.apply(branch, prepared, 1))

    say(*messages[:turn])
    wanted = calls[0]["function"]["name"]
    opening = template.speech.opening(wanted, Toolbox(tools), chat=True)
    writer.open_turn(branch, Open(client="c", template="strict", tools=tools), opening)
    segment = OutputSegment(branch.position)
    reading = template.speech.labels(branch, "auto", Toolbox(tools), "")
    assert reading is not None
    segment.read(reading)
    text = rest_of(template, messages[: turn + 1], tools, opening)
    ids = shown.encode(text)
    segment.tokens.extend(ids)
    segment.release(len(ids), shown.decode(ids))
    assert segment.text == text
    segment.ends()
    branch.segments.append(segment)
    assert [call["function"]["name"] for call in reading.reader.calls] == [wanted]
    segment.spoken = template.speech.spoken(reading.reader, branch, segment)
    assert (segment.spoken is not None) == bool(marks)
    writer.close_turn(branch)
    call = reading.reader.calls[0]
    result = ChatMessage(role="tool", content="19.5", tool_call_id=call["id"], name=wanted)
    say(result)
    if segment.spoken is not None:
        expected = template.strict([*messages[:turn], segment.spoken, result], tools, True)
        assert branch.text() == Tokenizer.unguarded(expected)


def rest_of(template: ChatTemplate, messages: list[ChatMessage], tools: Any, opening: str) -> str:
    """What the model says behind a call's opening, in the form of its template."""
    shown = template.strict(messages, tools, False)
    rest = shown[shown.rindex(opening) + len(opening) :]
    for mark in (template.closing(), "<｜end▁of▁sentence｜>", "</s>"):
        rest = rest.removesuffix(mark)
    return rest


@pytest.mark.parametrize("name", NAMES)
def test_what_a_template_writes_is_exact(name: str) -> None:
    """A call as the template renders it is one that the structure of its family allows."""
    source = (FOLDER / name).read_text()
    dialect = dialect_of(source)
    template = ChatTemplate(tokenizer_of(name), dialect)
    conversation = PUBLISHED["conversations"]["tool_call_result"]
    messages = [message_of(given) for given in conversation["messages"]]
    turn = next(i for i, each in enumerate(messages) if each.tool_calls)
    tools = Toolbox(conversation["tools"])
    wanted = (messages[turn].tool_calls or [])[0]["function"]["name"]
    opening = template.speech.opening(wanted, tools, chat=True)
    rest = rest_of(template, messages[: turn + 1], conversation["tools"], opening)
    ended = rest.removesuffix("<|call|>").removesuffix("<|eom_id|>").rstrip("\n")
    said = opening
    if dialect.thought is not None and dialect.thought.end in opening:
        said = opening.rpartition(dialect.thought.end)[2].lstrip()
    for choice in ("auto", "required", wanted):
        calls = template.speech.calls(
            choice, tools, parallel=True, ends_output=lambda mark: mark == "<|call|>"
        )
        assert calls is not None
        if choice != "auto":
            automaton = structure_automaton(Structure(calls.forced, after=said))[0]
            assert automaton.accepts(ended.encode()), ended
        elif calls.free is not None:
            assert structure_automaton(Structure(calls.free))[0].accepts((said + ended).encode())


@pytest.mark.parametrize("name", NAMES)
def test_the_generation_prompt_stands_there_once(name: str) -> None:
    """Also behind a tool's result, where some templates have none."""
    tokenizer = tokenizer_of(name)
    template = ChatTemplate(tokenizer, dialect_of(tokenizer.template_source))
    conversation = PUBLISHED["conversations"]["tool_call_result"]
    messages = [message_of(given) for given in conversation["messages"]]
    tools = conversation["tools"]
    state = SessionState(1, context=1 << 20, vocab=1 << 20, limits=Limits(), decode=tokenizer.decode)
    writer, branch = BranchWriter(state, tokenizer, template), state.root("main")
    end = 1 + next(i for i, each in enumerate(messages) if each.role == "tool")
    op = Append(id=1, messages=messages[:end])
    at_once(writer.apply(branch, writer.prepare(branch, op, strict=True, tools=tools, room=1 << 20), 1))
    writer.open_turn(branch, Open(client="c", template="strict", tools=tools))
    whole = template.strict(messages[:end], tools, True)
    assert "".join(segment.raw for segment in branch.segments) == whole


# --- turn by turn ------------------------------------------------------------------------------------


def told(role: Any, content: str, **fields: Any) -> ChatMessage:
    return ChatMessage(role=role, content=content, **fields)


def calls_add(*numbers: int) -> ChatMessage:
    calls: list[Any] = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": "add", "arguments": {"a": i}}}
        for i in numbers
    ]
    return told("assistant", "", tool_calls=calls)


def results(*numbers: int) -> list[ChatMessage]:
    return [told("tool", f"{i}", tool_call_id=f"call0000{i}", name="add") for i in numbers]


ADD: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
            },
        },
    }
]
SYSTEM, ASK, SAY = told("system", "Be brief."), told("user", "Hi"), told("assistant", "Hello.")
AGAIN, OVER = told("user", "How are you?"), told("user", "Good bye")
CALLED = [[ASK], [calls_add(1)], results(1)]
KINDS: dict[str, list[list[ChatMessage]]] = {
    "one turn": [[ASK]],
    "system": [[SYSTEM, ASK]],
    "turns": [[ASK], [SAY], [AGAIN]],
    "system, turns": [[SYSTEM, ASK], [SAY], [AGAIN], [SAY], [OVER]],
    "tools": [[ASK]],
    "a call": CALLED,
    "system, a call": [[SYSTEM, ASK], *CALLED[1:]],
    "a call, an answer": [*CALLED, [SAY], [AGAIN]],
    "calls": [[ASK], [calls_add(1, 2)], results(1, 2)],
    "calls, an answer": [[ASK], [calls_add(1, 2)], results(1, 2), [SAY], [AGAIN]],
    "a call after a call": [*CALLED, [calls_add(2)], results(2)],
}
# Templates that write earlier turns otherwise when turns follow: append mode never does, and says so.
REWRITTEN = {
    "Qwen3-0": set(KINDS) - {"one turn", "system", "tools"},
    "Qwen3.5": {"turns", "system, turns", "a call, an answer", "calls, an answer"},
    "Mistral-Small": {"a call, an answer", "calls, an answer"},
    "Mistral-Nemo": {"system, turns", "system, a call", "a call, an answer", "calls, an answer"},
}


@pytest.mark.parametrize("way", ["turns", "messages"])
@pytest.mark.parametrize("mode", ["append", "strict"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_turns_that_are_appended_are_the_whole(name: str, kind: str, mode: str, way: str) -> None:
    """The ends of turns too, which some templates write otherwise behind the last turn."""
    turns, tokenizer = KINDS[kind], tokenizer_of(name)
    if way == "messages" and turns[0][0] is not SYSTEM:  # which some show with a user turn only
        turns = [[message] for turn in turns for message in turn]
    template = ChatTemplate(tokenizer, dialect_of(tokenizer.template_source))
    tools = ADD if "tools" in kind or "call" in kind or "Hermes" in name else None
    try:
        whole = template.strict([message for turn in turns for message in turn], tools, True)
    except BadRequest:  # Llama's templates take one call only
        assert "calls" in kind
        assert "Llama" in name
        return
    state = SessionState(1, context=1 << 20, vocab=1 << 20, limits=Limits(), decode=tokenizer.decode)
    writer, branch = BranchWriter(state, tokenizer, template), state.root("main")
    for turn in turns:
        op = Append(id=1, messages=turn)
        strict = mode == "strict"
        at_once(
            writer.apply(branch, writer.prepare(branch, op, strict=strict, tools=tools, room=1 << 20), 1)
        )
    equal = "".join(segment.raw for segment in branch.segments) == whole
    rewritten = any(part in name and kind in kinds for part, kinds in REWRITTEN.items())
    assert equal == (mode == "strict" or not rewritten)
    if not equal:
        assert "template 'strict'" in (writer.rewritten(tools=bool(tools)) or "")


@pytest.mark.parametrize("name", NAMES)
def test_an_effort_is_told_where_the_template_reads_it(name: str) -> None:
    template = template_of(name)
    assert template.tells_effort() == ("gpt-oss" in name)
    for each in PUBLISHED["templates"][name]["renderings"]:
        if each["kwargs"].keys() == {"reasoning_effort"} and "text" in each:
            conversation = PUBLISHED["conversations"][each["conversation"]]
            messages = [message_of(given) for given in conversation["messages"]]
            arguments = (messages, conversation.get("tools"), each["add_generation_prompt"])
            told = template.strict(*arguments, each["kwargs"]["reasoning_effort"])
            if each.get("arguments_as") in (None, "object"):
                assert Tokenizer.unguarded(told) == each["text"]
