"""Whose paths are whose, by the header that Anthropic's clients send."""

import pytest

from ramify.actors.gateway.apis.registry import apis

THEIRS = {"anthropic-version": "2023-06-01"}
FOUND = apis()


def speaks(path: str, headers: dict[str, str]) -> str:
    api = FOUND.at(path, headers)
    return type(getattr(api.respond, "__self__", api)).__name__ if api is not None else ""


@pytest.mark.parametrize(
    ("path", "plain", "versioned"),
    [
        ("/v1/messages", "AnthropicApi", "AnthropicApi"),
        ("/v1/messages/count_tokens", "AnthropicApi", "AnthropicApi"),
        ("/v1/messages/batches", "AnthropicApi", "AnthropicApi"),
        ("/v1/models", "Api", "AnthropicApi"),
        ("/v1/models/a/b", "Api", "AnthropicApi"),
        ("/v1/files", "Api", "AnthropicApi"),
        ("/v1/chat/completions", "Api", "Api"),
        ("/v1/completions", "Api", "Api"),
        ("/v1/responses/r", "Api", "Api"),
        ("/api/chat", "Api", "Api"),
        ("/v1/ws", "", ""),
        ("/v1/info", "", ""),
        ("/metrics", "", ""),
    ],
)
def test_who_answers(path: str, plain: str, versioned: str) -> None:
    assert (speaks(path, {}), speaks(path, THEIRS)) == (plain, versioned)
