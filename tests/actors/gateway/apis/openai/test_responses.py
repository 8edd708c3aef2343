"""How a response fails in the background. All else: `e2e/test_openai_responses.py`."""

import json
from typing import Any

import pytest

from ramify.actors.gateway.apis.openai.requests import decode
from ramify.actors.gateway.apis.openai.response_requests import ResponseRequest
from ramify.actors.gateway.apis.openai.responses import APPEND, GENERATE, KEEP, META, ResponseDialogue
from ramify.actors.gateway.port.http import Response
from ramify.protocol.wire import Error, Ok, ServerMessage, Set, StateReply


def state() -> Any:
    """What a session says first, as far as the dialogue reads it."""
    given = {"session": "s_1", "key": "k"}
    others = {name: None for name in StateReply.__struct_fields__ if name not in given}
    return StateReply(**{**others, **given})


@pytest.mark.parametrize(
    "answer", [Ok(id=KEEP, branch="main"), Error(id=KEEP, code="no_branch", message="gone")]
)
def test_one_that_fails_in_the_background_is_kept_as_failed(answer: ServerMessage) -> None:
    body = {"model": "m", "input": "hi", "background": True}
    it = ResponseDialogue(decode(json.dumps(body).encode(), ResponseRequest), "m", 5)
    assert it.receive([state()]) is None
    assert isinstance(it.receive([Ok(id=APPEND, branch=it.branch, position=5)]), Response)
    it.take_ops()
    assert it.receive([Error(id=GENERATE, code="bad_constraint", message="too much")]) is None
    (kept,) = it.take_ops()
    assert isinstance(kept, Set)
    assert kept.meta is not None
    assert kept.meta[META]["status"] == "failed"
    assert not it.over
    assert it.receive([answer]) is None
    assert it.over
