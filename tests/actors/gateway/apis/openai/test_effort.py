"""How much to think, as each door is told it, becomes `thought_tokens` or what the template tells."""

import json
from typing import Any

import msgspec
import pytest

from ramify.actors.gateway.apis.ai.chunks import ChatDialogue
from ramify.actors.gateway.apis.ai.requests import SendRequest
from ramify.actors.gateway.apis.anthropic.answers import MessageAnswers
from ramify.actors.gateway.apis.anthropic.conversation import conversation_of
from ramify.actors.gateway.apis.anthropic.requests import MessagesRequest
from ramify.actors.gateway.apis.anthropic.signatures import Signer
from ramify.actors.gateway.apis.ollama.answers import OllamaAnswers
from ramify.actors.gateway.apis.ollama.requests import OllamaChatRequest as OllamaRequest
from ramify.actors.gateway.apis.openai.chat import ChatAnswers, Heading
from ramify.actors.gateway.apis.openai.effort import (
    BUDGETS,
    ThinkingEffort,
    described,
    switched,
    thinking,
)
from ramify.actors.gateway.apis.openai.requests import ChatRequest, decode
from ramify.actors.gateway.apis.openai.response_requests import ResponseRequest
from ramify.actors.gateway.apis.openai.responses import ResponseDialogue
from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.errors import BadRequest, InvalidField
from ramify.protocol.wire import ClientMessage, Generate, Open

QWEN = Served(4096, thinks=True, unthought="<think>\n\n</think>\n\n")
HARMONY = Served(4096, thinks=True, unthought=None, tells_effort=True)
SIGNER = Signer(b"secret", "ann")
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("asked", "most", "served", "found"),
    [
        (None, 100, QWEN, (None, None)),
        ("none", 100, QWEN, (None, 0)),
        ("minimal", 100, QWEN, (None, 0)),
        ("low", None, QWEN, (None, 1024)),
        ("low", 100, QWEN, (None, 25)),
        ("low", 1, QWEN, (None, 1)),
        ("medium", 100_000, QWEN, (None, 4096)),
        ("high", 1000, QWEN, (None, 750)),
        ("xhigh", 1 << 20, QWEN, (None, 32768)),
        ("max", 1000, QWEN, (None, None)),
        ("low", 100, Served(), (None, None)),
        ("none", 100, Served(), (None, None)),
        ("minimal", 100, HARMONY, ("low", None)),
        ("medium", 100, HARMONY, ("medium", None)),
        ("max", 100, HARMONY, ("high", None)),
        ("minimal", 100, HARMONY._replace(tells_effort=False), (None, 1024)),
    ],
)
def test_an_effort_is_told_or_bounds_the_thought(
    asked: Any, most: int | None, served: Served, found: tuple[str | None, int | None]
) -> None:
    assert thinking(asked, most, served, "f") == found
    assert all(0 < part < 1 for _, part in BUDGETS.values())


def test_what_the_model_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(InvalidField, match=r"`f`: this model cannot be kept from thinking"):
        thinking("none", 5, HARMONY, "f")
    with pytest.raises(InvalidField, match=r"`f`: this model does not think"):
        switched(True, Served(), "f")
    assert switched(True, QWEN, "f") is None
    assert switched(False, QWEN, "f") == "none"


def chat(served: Served, **fields: Any) -> list[ClientMessage]:
    request = decode(json.dumps({"messages": HELLO, **fields}).encode(), ChatRequest)
    return ChatAnswers(request, Heading("c", 1, "m"), (), served).ops


def response(served: Served, **fields: Any) -> list[ClientMessage]:
    request = decode(json.dumps({"input": "hi", **fields}).encode(), ResponseRequest)
    return ResponseDialogue(request, "m", 1, known=served).ops


def ollama(served: Served, **fields: Any) -> list[ClientMessage]:
    request = decode(json.dumps({"messages": HELLO, **fields}).encode(), OllamaRequest)
    return OllamaAnswers(request, "m", (), served).ops


def message(served: Served, **fields: Any) -> list[ClientMessage]:
    body = {"model": "m", "max_tokens": 2000, "messages": HELLO, **fields}
    request = decode(json.dumps(body).encode(), MessagesRequest)
    told = conversation_of(request.system, request.messages, SIGNER)
    return MessageAnswers(request, told, SIGNER, served, "req_1").ops


def sdk(served: Served, **fields: Any) -> list[ClientMessage]:
    said = {"role": "user", "parts": [{"type": "text", "text": "hi"}]}
    sent = {"requestId": "1", "id": "c", "trigger": "submit-message", "messages": [said], "body": fields}
    return ChatDialogue(msgspec.convert(sent, SendRequest), "m", served).ops


@pytest.mark.parametrize(
    ("door", "fields", "tokens", "effort"),
    [
        (chat, {"reasoning_effort": "low"}, 1024, "low"),
        (chat, {"reasoning_effort": "medium", "max_completion_tokens": 10}, 5, "medium"),
        (chat, {"chat_template_kwargs": {"reasoning_effort": "high"}}, 16384, "high"),
        (chat, {"thought_tokens": 7}, 7, None),
        (response, {"reasoning": {"effort": "low", "summary": "auto"}}, 1024, "low"),
        (response, {"reasoning": {"effort": "low"}, "max_output_tokens": 8}, 2, "low"),
        (ollama, {"think": "high"}, 16384, "high"),
        (ollama, {"think": "low", "options": {"num_predict": 40}}, 10, "low"),
        (ollama, {"think": True}, None, None),
        (message, {"output_config": {"effort": "low"}}, 500, "low"),
        (message, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024, None),
        (message, {"thinking": {"type": "adaptive"}}, None, None),
        (sdk, {"reasoning": "low", "maxOutputTokens": 40}, 10, "low"),
        (sdk, {"reasoning": "provider-default"}, None, None),
    ],
)
def test_each_door_has_it(door: Any, fields: dict[str, Any], tokens: int | None, effort: Any) -> None:
    for served, wanted, told in ((QWEN, tokens, None), (HARMONY, None, effort)):
        if effort is None:
            wanted = tokens
        ops = door(served, **fields)
        (generate,) = [op for op in ops if isinstance(op, Generate)]
        assert generate.thought_tokens == wanted
        assert isinstance(ops[0], Open)
        assert ops[0].effort == told


@pytest.mark.parametrize(
    ("door", "fields", "name"),
    [
        (chat, {"reasoning_effort": "none"}, "reasoning_effort"),
        (chat, {"chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
        (chat, {"chat_template_kwargs": {"thinking": False}}, "enable_thinking"),
        (response, {"reasoning": {"effort": "none"}}, "reasoning.effort"),
        (ollama, {"think": False}, "think"),
        (sdk, {"reasoning": "none"}, "reasoning"),
    ],
)
def test_no_thought_where_the_model_can(door: Any, fields: dict[str, Any], name: str) -> None:
    (generate,) = [op for op in door(QWEN, **fields) if isinstance(op, Generate)]
    assert generate.thought_tokens == 0
    with pytest.raises(InvalidField, match=name):
        door(HARMONY, **fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": "low", "thought_tokens": 3}, "give one"),
        ({"chat_template_kwargs": {"custom": 1}}, "only `enable_thinking`"),
        ({"store": True}, "chats are not kept"),
        ({"service_tier": "flex"}, "`priority`"),
        ({"verbosity": "low"}, "only `medium`"),
    ],
)
def test_what_a_chat_refuses_has_a_way_to_go(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        chat(QWEN, **fields)


def test_what_changes_nothing_is_accepted() -> None:
    same = {
        "user": "u", "safety_identifier": "s", "metadata": {"a": "b"}, "store": False,
        "service_tier": "auto", "verbosity": "medium", "logit_bias": {}, "modalities": ["text"],
    }  # fmt: skip
    assert chat(QWEN, **same) == chat(QWEN)
    assert thinking(None, None, QWEN, "f") == ThinkingEffort()


def test_clients_of_our_protocol_are_told_what_they_can_ask_for() -> None:
    assert described(QWEN) == {
        "told": False,
        "efforts": {
            "none": {"tokens": 0, "part": 0.0},
            "low": {"tokens": 1024, "part": 0.25},
            "medium": {"tokens": 4096, "part": 0.5},
            "high": {"tokens": 16384, "part": 0.75},
        },
    }
    assert described(HARMONY)["told"]
    assert list(described(HARMONY)["efforts"]) == ["low", "medium", "high"]
    assert described(Served(4096)) == {"told": False, "efforts": {}}
    assert described(Served(4096, thinks=True, unthought=""))["efforts"] == {}
