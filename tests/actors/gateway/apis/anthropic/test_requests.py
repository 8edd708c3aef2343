"""Shapes and ranges of requests, and what is refused by name."""

import json
from typing import Any

import pytest

from ramify.actors.gateway.apis.anthropic.answers import MessageAnswers
from ramify.actors.gateway.apis.anthropic.conversation import conversation_of
from ramify.actors.gateway.apis.anthropic.requests import MessagesRequest
from ramify.actors.gateway.apis.anthropic.signatures import Signer
from ramify.actors.gateway.apis.openai.requests import decode
from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import Append, ClientMessage, Constraint, Generate, MessagePlace, Open, Set

SIGNER = Signer(b"secret", "ann")
TOOL: dict[str, Any] = {"name": "add", "description": "Add", "input_schema": {"type": "object"}}
FORMAT: dict[str, Any] = {"type": "json_schema", "schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
TEXT: dict[str, Any] = {"type": "text", "text": ""}
DEEP: dict[str, Any] = json.loads('{"a":' * 40 + "1" + "}" * 40)
HI: dict[str, Any] = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {"type": "tool_use", "id": "t", "name": "add", "input": DEEP}
MARK: dict[str, Any] = {"type": "ephemeral", "ttl": "1h"}


def ops(*, unthought: str | None = "", **fields: Any) -> list[ClientMessage]:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}
    request = decode(json.dumps(body).encode(), MessagesRequest)
    told = conversation_of(request.system, request.messages, SIGNER)
    return MessageAnswers(request, told, SIGNER, Served(2048, True, unthought), "req_1").ops


def test_a_request_is_a_session_of_its_own() -> None:
    fields = {"temperature": 0.5, "top_p": 0, "top_k": 3, "stop_sequences": ["x"]}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    opened, append, generate = ops(**fields, tools=[{**TOOL, "strict": True}], tool_choice=choice)
    assert isinstance(opened, Open)
    assert (opened.detach, opened.ttl_s, opened.parts, opened.usage) == ("cancel", 0.0, True, True)
    function = {"name": "add", "description": "Add", "parameters": {"type": "object"}, "strict": True}
    assert opened.tools == [{"type": "function", "function": function}]
    assert isinstance(append, Append)
    assert generate == Generate(
        id=4, max_tokens=9, temperature=0.5, top_p=1e-20, top_k=3, stop=["x"],
        tool_choice="required", parallel_tool_calls=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, "add"),
    ],
)
def test_which_tool_is_called(choice: dict[str, Any], said: str) -> None:
    generate = ops(tools=[TOOL], tool_choice=choice)[-1]
    assert isinstance(generate, Generate)
    assert generate.tool_choice == said


def test_no_tokens_only_compute_the_prompt() -> None:
    assert ops(max_tokens=0)[-1] == Generate(id=4, max_tokens=1, hidden=True)


@pytest.mark.parametrize("where", [{"output_config": {"format": FORMAT}}, {"output_format": FORMAT}])
def test_the_form_of_the_answer(where: dict[str, Any]) -> None:
    generate = ops(**where)[-1]
    assert isinstance(generate, Generate)
    assert generate.constraint == Constraint(json_schema={"type": "object"}, after_thought=True)


def test_a_prefill_is_said_before_the_answer() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
    assert ops(messages=messages)[2] == Append(id=3, text="So", special=False)


def test_a_model_is_kept_from_thinking() -> None:
    off = {"thinking": {"type": "disabled"}}
    assert ops(unthought="<think></think>", **off)[2] == Append(id=2, text="<think></think>")
    assert isinstance(ops(unthought="", **off)[2], Generate)
    assert isinstance(ops(unthought="<think></think>")[2], Generate)


CLAUDE_CODE: dict[str, Any] = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>"},
                {"type": "text", "text": "hey", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "Agents that may be asked:\n- reviewer"},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=fa690;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {**MARK, "scope": "global"}},
    ],
    "tools": [{**TOOL, "type": "custom", "eager_input_streaming": True, "defer_loading": True}],
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "diagnostics": {"previous_message_id": None},
    "max_tokens": 32000,
    "stream": True,
}


def test_what_agents_send_is_accepted() -> None:
    retained, append = ops(**CLAUDE_CODE, service_tier="auto", betas=["a-beta"])[1:3]
    assert retained == Set(id=0, retain_s=300.0)  # the user's mark; the system's is a lease of its own
    assert isinstance(append, Append)
    assert append.marks == [MessagePlace(1)]
    assert append.messages is not None
    assert [m.content for m in append.messages] == [
        "You are an agent.",
        "<system-reminder>\nToday.\n</system-reminder>\nhey\n"
        "<system-reminder>\nAgents that may be asked:\n- reviewer\n</system-reminder>",
    ]


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop": ["x"]}, "use `stop_sequences`"),
        ({"colour": 1}, "colour"),
        ({"container": "c"}, "there are no containers"),
        ({"mcp_servers": [{"type": "url"}]}, "MCP"),
        ({"inference_geo": "us"}, "inference_geo"),
        ({"speed": "fast"}, "speed"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "compact_20260112"),
        (
            {
                "context_management": {
                    "edits": [{"type": "clear_thinking_20251015", "keep": {"value": 1}}]
                }
            },
            "context_management",
        ),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 2000}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "less than `max_tokens`"),
        ({"thinking": {"type": "between_tools"}}, "between_tools"),
        ({"output_config": {"format": FORMAT}, "tools": [TOOL]}, "output_config.format"),
        ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, "output_format"),
        ({"output_config": {"effort": "huge"}}, "effort"),
        ({"unthought": None, "thinking": {"type": "disabled"}}, "cannot be kept from thinking"),
        ({"tool_choice": {"type": "any"}}, "goes with `tools`"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "none of the `tools`"),
        (
            {"tools": [{**TOOL, "name": "auto"}], "tool_choice": {"type": "tool", "name": "auto"}},
            "tool_choice.name",
        ),
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
        ({"tools": [{**TOOL, "input_schema": DEEP}]}, "tools[0].input_schema.a"),
        (
            {"messages": [HI, {"role": "assistant", "content": [CALL]}, HI]},
            "messages[1]: tool_use[0].input",
        ),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "custom", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "input_schema": {"properties": []}}]}, "tools[0].input_schema.properties"),
        ({"tools": [{"type": "web_search_20250305", "name": "w", "max_uses": 3}]}, "runs no tools"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tools": [{**TOOL, "max_uses": 1}]}, "max_uses"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "input_examples"),
        ({"tools": [{**TOOL, "name": f"f{i}"} for i in range(1025)]}, "tools"),
        ({"tools": [{**TOOL, "input_schema": {"a": nested(40)}}]}, "nested"),
        ({"system": [{"type": "text", "text": "s", "cache_control": MARK}] * 5}, "cache_control"),
        (
            {
                "system": [{"type": "text", "text": "s", "cache_control": MARK}] * 4,
                "cache_control": MARK,
            },
            "cache_control",
        ),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"messages": [{"role": "assistant", "content": "So"}]}, "no user's turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0].source"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "reads no images"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "no files are read"),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "runs no tools"),
        ({"messages": [{"role": "user", "content": [{"type": "wing"}]}]}, "wing"),
        ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [TEXT] * 4096}] * 4},
            "and their blocks are over 16384",
        ),
        ({"metadata": {"user_id": "u" * 4097}}, "metadata.user_id"),
    ],
)
def test_what_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest) as raised:
        ops(**change)
    assert named in raised.value.message, raised.value.message
