"""Whose paths are whose: all of /v1/ that is not ours is answered as OpenAI's API would."""

import pytest

from ramify.actors.gateway.apis.openai.routes import spoken_at


@pytest.mark.parametrize(
    ("path", "theirs"),
    [
        ("/v1/chat/completions", True),
        ("/v1/embeddings", True),
        ("/v1/nothing", True),
        ("/v1/ws", False),
        ("/v1/info", False),
        ("/v1/tokens", False),
        ("/v1/ai", False),
        ("/health", False),
        ("/api/chat", False),
    ],
)
def test_who_answers(path: str, theirs: bool) -> None:
    assert spoken_at(path, {}) is theirs
