"""Requests of agents, in the shapes that they are documented to send, replayed turn by turn.

Three turns of each: a task, a call with its result, another task. All fields are those that the agent
sends; prompts and tools are short. What a prompt has in common with the one before it must be found.
"""

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

TASK, RESULT, MORE = (
    "Read the file notes.txt and say what it is about.",
    "It is about bees. " * 9,
    "Thanks.",
)
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "The file"}},
    "required": ["path"],
    "additionalProperties": False,
}
ARGUMENTS = {"path": "notes.txt"}
ABOUT = "You are an agent that works in a repository. Be brief, and use the tools that there are. " * 3


def claude_code(turn: int) -> tuple[str, dict[str, Any]]:
    mark = {"type": "ephemeral", "ttl": "1h"}
    reminder = {"type": "text", "text": "<system-reminder>\nToday is Friday.\n</system-reminder>"}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": [reminder, {"type": "text", "text": TASK, "cache_control": mark}]},
        {"role": "system", "content": "Agents that may be asked:\n- reviewer"},
    ]
    if turn > 0:
        call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": ARGUMENTS}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": RESULT}
        said.append({"role": "assistant", "content": [{"type": "text", "text": "I read it."}, call]})
        said.append({"role": "user", "content": [{**result, "is_error": False, "cache_control": mark}]})
    if turn > 1:
        said.append({"role": "assistant", "content": [{"type": "text", "text": "Bees."}]})
        said.append({"role": "user", "content": MORE})
    tool = {"name": "Read", "description": "Read a file", "input_schema": PARAMETERS}
    body = {
        "max_tokens": 32000,
        "messages": said,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch=fa69{turn};"},
            {"type": "text", "text": ABOUT, "cache_control": {**mark, "scope": "global"}},
        ],
        "tools": [{**tool, "type": "custom", "eager_input_streaming": True}],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": ("high", "medium", "low")[turn]},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "temperature": 1,
        "stream": True,
    }
    return "/v1/messages?beta=true", body


def codex(turn: int) -> tuple[str, dict[str, Any]]:
    def text(role: str, content: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": content}]}

    said: list[dict[str, Any]] = [text("developer", "Stay in the folder."), text("user", TASK)]
    if turn > 0:
        said.append({"type": "reasoning", "summary": [], "encrypted_content": None, "content": None})
        call = {"type": "function_call", "name": "read", "call_id": "call_1"}
        said.append({**call, "arguments": json.dumps(ARGUMENTS)})
        said.append({"type": "function_call_output", "call_id": "call_1", "output": RESULT})
    if turn > 1:
        said += [text("assistant", "Bees."), text("user", MORE)]
    tool = {"type": "function", "name": "read", "description": "Read a file", "strict": False}
    body = {
        "instructions": ABOUT,
        "input": said,
        "tools": [
            {**tool, "parameters": PARAMETERS},
            {"type": "namespace", "name": "mcp__git", "description": "", "tools": [
                {**tool, "name": "log", "parameters": PARAMETERS}]},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "1"},
    }  # fmt: skip
    return "/v1/responses", body


def _chat(turn: int, *, calls: bool, parts: bool = False, **fields: Any) -> tuple[str, dict[str, Any]]:
    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": text}] if parts else text}

    said: list[dict[str, Any]] = [{"role": "system", "content": ABOUT}, user(TASK)]
    if turn > 0 and calls:
        function = {"name": "read", "arguments": json.dumps(ARGUMENTS)}
        call = {"id": "call_1", "type": "function", "function": function}
        said.append({"role": "assistant", "content": "", "tool_calls": [call]})
        said.append({"role": "tool", "tool_call_id": "call_1", "content": RESULT})
    elif turn > 0:
        said.append({"role": "assistant", "content": "<read_file><path>notes.txt</path></read_file>"})
        said.append(user(f"[read_file for 'notes.txt'] Result:\n{RESULT}"))
    if turn > 1:
        said += [{"role": "assistant", "content": "Bees."}, user(MORE)]
    if calls:
        function = {"name": "read", "description": "Read a file", "parameters": PARAMETERS}
        fields["tools"] = [{"type": "function", "function": function}]
    body = {"messages": said, "stream": True, "stream_options": {"include_usage": True}, **fields}
    return "/v1/chat/completions", body


def opencode(turn: int) -> tuple[str, dict[str, Any]]:
    more = {"max_tokens": 32000, "tool_choice": "auto", "temperature": 0, "reasoning_effort": "medium"}
    return _chat(turn, calls=True, **more)


def cline(turn: int) -> tuple[str, dict[str, Any]]:
    return _chat(turn, calls=False, parts=True, temperature=0, reasoning_effort="high")


def aider(turn: int) -> tuple[str, dict[str, Any]]:
    return _chat(turn, calls=False, temperature=0)


def qwen_code(turn: int) -> tuple[str, dict[str, Any]]:
    labels = {"sessionId": "0199a213", "promptId": f"0199a213########{turn}"}
    return _chat(turn, calls=True, temperature=0.7, top_p=0.8, max_tokens=8000, metadata=labels)


def events(body: str) -> list[dict[str, Any]]:
    # not `splitlines`: a text may hold U+2028 and the like
    lines = [line.removeprefix("data: ") for line in body.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def counted(made: list[dict[str, Any]]) -> tuple[int, int]:
    """Tokens of the prompt, and those that were found, as each API says it at the end of a stream."""
    last = made[-1]
    if "response" in last:
        usage = last["response"]["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    if last["type" if "type" in last else "object"] == "message_stop":
        usage = made[-2]["usage"]
        found = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + usage["cache_creation_input_tokens"] + found, found
    return last["usage"]["prompt_tokens"], last["usage"]["prompt_tokens_details"]["cached_tokens"]


AGENTS: list[Callable[[int], tuple[str, dict[str, Any]]]] = [
    claude_code, codex, opencode, cline, aider, qwen_code,
]  # fmt: skip


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_an_agents_turns(serving: Any, agent: Callable[[int], tuple[str, dict[str, Any]]]) -> None:
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,effort-2025-11-24",
    }
    async with (
        serving(eos_every=20) as served,
        httpx2.AsyncClient(base_url=served.http, trust_env=False) as http,
    ):
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        before = 0
        for turn in range(3):
            path, body = agent(turn)
            shown = headers if path.startswith("/v1/messages") else {}
            answer = await http.post(path, json={"model": model, **body}, headers=shown)
            assert answer.status_code == 200, answer.text
            prompt, found = counted(events(answer.text))
            assert prompt > before
            assert found >= 0.8 * before  # all but the generation prompt, and what ended a turn
            before = prompt
        await served.until_alone(sessions=0)


@pytest.mark.parametrize(
    ("agent", "change", "named"),
    [
        (codex, {"tools": [{"type": "web_search"}]}, "web_search"),
        (codex, {"reasoning": {"effort": "vast"}}, "reasoning.effort"),
        (claude_code, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search"),
        (opencode, {"reasoning_effort": "vast"}, "reasoning_effort"),
        (qwen_code, {"vl_high_resolution_images": True}, "vl_high_resolution_images"),
    ],
)
async def test_what_is_not_served_is_named(serving: Any, agent: Any, change: Any, named: str) -> None:
    async with (
        serving() as served,
        httpx2.AsyncClient(base_url=served.http, trust_env=False) as http,
    ):
        path, body = agent(0)
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        shown = {"anthropic-version": "2023-06-01"} if "messages?" in path else {}
        answer = await http.post(path, json={"model": model, **body, **change}, headers=shown)
        assert answer.status_code == 400
        assert named in answer.json()["error"]["message"]
