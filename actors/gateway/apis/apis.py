"""The APIs over HTTP whose requests a session may answer: which paths are theirs, what they say."""

from collections.abc import Callable

import msgspec

from ramify.actors.gateway.apis.ollama import routes as ollama
from ramify.actors.gateway.apis.openai import errors as openai_errors
from ramify.actors.gateway.apis.openai import routes as openai
from ramify.actors.gateway.port.dialogues.accepted import Accepted
from ramify.actors.gateway.port.http import HttpRequest, Response
from ramify.actors.gateway.port.hub import Hub


class Api(msgspec.Struct, frozen=True):
    """`refuse`: what can be said by the head of a request, before its body is read; `respond`: the rest.
    `reshaped`: an error of the gateway itself as this API has it.
    """

    spoken_at: Callable[[str], bool]
    refuse: Callable[[HttpRequest, Hub], Response | None]
    respond: Callable[[HttpRequest, Hub], Response | Accepted]
    reshaped: Callable[[Response], Response]


APIS = (
    Api(openai.spoken_at, openai.refuse, openai.respond, openai_errors.reshaped),
    Api(ollama.spoken_at, ollama.refuse, ollama.respond, ollama.reshaped),
)


def api_at(path: str) -> Api | None:
    """The API that is spoken there; None: the path is none of theirs."""
    for api in APIS:
        if api.spoken_at(path):
            return api
    return None
