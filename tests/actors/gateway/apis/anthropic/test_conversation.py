"""What becomes of messages: turns of a template, in order, with a prefill at the end."""

import json
from typing import Any

import pytest

from ramify.actors.gateway.apis.anthropic.conversation import RequestConversation, conversation_of
from ramify.actors.gateway.apis.anthropic.requests import CountRequest
from ramify.actors.gateway.apis.anthropic.signatures import Signer
from ramify.actors.gateway.apis.openai.requests import decode
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import ChatMessage

OURS = Signer(b"secret", "ann")
CALL: dict[str, Any] = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "t1", "content": "3"}
ASKED: dict[str, Any] = {"role": "user", "content": "Add."}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def thought(value: str, signer: Signer = OURS) -> dict[str, Any]:
    return {"type": "thinking", "thinking": value, "signature": signer.sign(value)}


def told(*messages: Any, system: Any = None, joins: bool = False) -> RequestConversation:
    body = {"model": "m", "messages": messages, **({"system": system} if system else {})}
    request = decode(json.dumps(body).encode(), CountRequest)
    return conversation_of(request.system, request.messages, OURS, joins=joins)


def said(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def test_turns_in_order() -> None:
    made = told(
        ASKED,
        said(thought("hm"), text("So:"), CALL),
        user(text("Now?"), RESULT),
        system=[text("Be kind."), text("Be short.")],
    )
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert made.messages == [
        ChatMessage(role="system", content="Be kind.\nBe short."),
        ChatMessage(role="user", content="Add."),
        ChatMessage(role="assistant", content="So:", tool_calls=[call], reasoning="hm"),
        ChatMessage(role="tool", content="3", tool_call_id="t1", name="add"),
        ChatMessage(role="user", content="Now?"),
    ]
    assert (made.prefill, made.billed, made.forgot) == ("", False, False)


def test_turns_of_one_role_are_one_turn() -> None:
    made = told(ASKED, user(text("More.")), said(text("A")), said(text("B")), ASKED)
    assert [m.content for m in made.messages] == ["Add.\nMore.", "AB", "Add."]


def test_a_last_turn_of_the_assistant_is_a_prefill() -> None:
    made = told(ASKED, {"role": "assistant", "content": "The best is"})
    assert (len(made.messages), made.prefill) == (1, "The best is")


def test_results_of_parallel_calls() -> None:
    second = {**CALL, "id": "t2"}
    made = told(ASKED, said(CALL, second), user({**RESULT, "tool_use_id": "t2"}, RESULT))
    assert [m.tool_call_id for m in made.messages] == [None, None, "t2", "t1"]


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"content": "no file", "is_error": True}, "Error: no file"),
        ({"content": "Error: no file", "is_error": True}, "Error: no file"),
        ({"content": [text("a"), {"type": "tool_reference", "tool_name": "add"}]}, "a\nadd"),
        ({"content": None}, ""),
    ],
)
def test_what_a_result_says(result: dict[str, Any], shown: str) -> None:
    assert told(ASKED, said(CALL), user({**RESULT, **result})).messages[-1].content == shown


BILL = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"


@pytest.mark.parametrize("system", [[text(BILL), text("Be kind.")], f"{BILL}\nBe kind."])
def test_the_billing_header_is_no_part_of_the_prompt(system: Any) -> None:
    made = told(ASKED, system=system)
    assert made.billed
    assert made.messages[0] == ChatMessage(role="system", content="Be kind.")
    assert told(ASKED, system=BILL).messages[0].role == "user"
    assert told(user(text(BILL))).messages[0].content == BILL  # what users say stays


@pytest.mark.parametrize(
    "block",
    [
        thought("hm", Signer(b"another secret", "ann")),
        thought("hm", Signer(b"secret", "bob")),
        {"type": "thinking", "thinking": "hm", "signature": "of Claude's"},
        {"type": "redacted_thinking", "data": "xyz"},
    ],
)
def test_thoughts_of_others_are_left_out(block: dict[str, Any]) -> None:
    made = told(ASKED, said(block, text("A")), ASKED)
    assert made.forgot
    assert made.messages[1] == ChatMessage(role="assistant", content="A")


def test_a_thought_that_was_not_told_stands_for_none() -> None:
    made = told(ASKED, said(thought(""), text("A")), ASKED)
    assert (made.forgot, made.messages[1].reasoning) == (False, None)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([ASKED, said({**thought("hm"), "thinking": "ha"}), ASKED], "messages[1].content[0].signature"),
        ([ASKED, user(RESULT)], "messages[1].content[0].tool_use_id"),
        ([ASKED, said(CALL), user(RESULT, RESULT)], "messages[2].content[1].tool_use_id"),
        ([ASKED, said(CALL), ASKED], "t1 has no tool_result"),
        ([ASKED, said(CALL), ASKED, said(text("A")), ASKED], "t1 has no tool_result"),
        ([ASKED, said(CALL)], "t1 has no tool_result"),
        ([ASKED, said(thought("hm"), text("A"))], "`messages[1]` is a prefill"),
        ([user(CALL)], "tool_use block cannot stand in a user message"),
        ([said(RESULT), ASKED], "tool_result block cannot stand in a assistant"),
        ([user(thought("hm"))], "thinking block cannot stand"),
        ([ASKED, {"role": "system", "content": [CALL]}], "tool_use block cannot stand in a system"),
    ],
)
def test_what_cannot_stand_where_it_does(messages: list[Any], named: str) -> None:
    with pytest.raises(BadRequest) as raised:
        told(*messages)
    assert named in raised.value.message


def reminder(value: str) -> str:
    return f"<system-reminder>\n{value}\n</system-reminder>"


def test_a_systems_turn_is_told_where_all_templates_take_it() -> None:
    system = {"role": "system", "content": "Be brief."}
    told_first = told(system, ASKED, system="Be kind.").messages
    assert [(m.role, m.content) for m in told_first] == [
        ("system", "Be kind.\nBe brief."),
        ("user", "Add."),
    ]
    behind = told(ASKED, system, said(CALL), user(RESULT), {**system, "content": [text("Go on.")]})
    assert [(m.role, m.content) for m in behind.messages] == [
        ("user", f"Add.\n{reminder('Be brief.')}"),
        ("assistant", ""),
        ("tool", f"3\n{reminder('Go on.')}"),
    ]
    alone = told(ASKED, said(text("A")), system).messages
    assert (alone[-1].role, alone[-1].content) == ("user", reminder("Be brief."))


def test_what_a_user_says_behind_results_joins_them_where_it_must() -> None:
    second = {**CALL, "id": "t2"}
    results = [RESULT, text("Now?"), {**RESULT, "tool_use_id": "t2"}, text("Go on.")]
    turns = (ASKED, said(CALL, second), user(*results))
    apart, joined = told(*turns).messages, told(*turns, joins=True).messages
    assert [(m.role, m.content) for m in apart[2:]] == [
        ("tool", "3"),
        ("tool", "3"),
        ("user", "Now?\nGo on."),
    ]
    assert [(m.role, m.content) for m in joined[2:]] == [("tool", "3"), ("tool", "3\nNow?\nGo on.")]
    assert told(ASKED, joins=True).messages[0].content == "Add."
