"""Which paths speak Anthropic's API, and what becomes of a request there: a response, or a dialogue."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import msgspec

from ramify.actors.gateway.apis.anthropic.answers import CountAnswers, MessageAnswers
from ramify.actors.gateway.apis.anthropic.conversation import BILLING, conversation_of
from ramify.actors.gateway.apis.anthropic.diagnostics import RequestMarks
from ramify.actors.gateway.apis.anthropic.errors import (
    OVERLOADED,
    error_answer,
    named,
    new_id,
    of_error,
    reshaped,
)
from ramify.actors.gateway.apis.anthropic.requests import CountRequest, MessagesRequest
from ramify.actors.gateway.apis.anthropic.signatures import Signer
from ramify.actors.gateway.apis.openai.errors import unknown_model
from ramify.actors.gateway.apis.openai.requests import decode
from ramify.actors.gateway.port.dialogues.api import Accepted, accept, credential_of, may_ask
from ramify.actors.gateway.port.http import HttpRequest, Response, json_response
from ramify.actors.gateway.port.hub import Hub
from ramify.actors.kit.log import get_log
from ramify.protocol.credentials import Credential
from ramify.protocol.errors import RamifyError

_LOG = get_log("ramify.gateway")

MESSAGES, COUNT, MODELS = "/v1/messages", "/v1/messages/count_tokens", "/v1/models"
VERSION = "anthropic-version"
_DATE = re.compile(r"20\d\d-\d\d-\d\d", re.ASCII)  # a version; what is served is alike in all
_OURS = ("/v1/ai", "/v1/info", "/v1/tokens", "/v1/ws")
_MOST_TOLD = 64  # names of betas that are remembered, and so said once
_LONGEST = 100  # characters of one


class AnthropicApi:
    """Anthropic's API (see `Api`). It remembers what was logged, and what requests looked like."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._marks = RequestMarks()

    def spoken_at(self, path: str, headers: Mapping[str, str]) -> bool:
        """Whether a path is of this API: its own ones, and those under /v1/ that no other API has, where
        the client names a version of this API.
        """
        if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
            return True
        return VERSION in headers and path.startswith("/v1/") and path not in _OURS

    def refuse(self, request: HttpRequest, hub: Hub) -> Response | None:
        """Refuse a request by its head; None: its body is wanted."""
        refusal = hub.routes.refuse(request)
        if refusal is not None:
            return reshaped(refusal)
        ident, path = new_id("req"), request.path
        models = path == MODELS or path.startswith(f"{MODELS}/")
        if path not in (MESSAGES, COUNT) and not models:
            return error_answer(404, f"{path[:256]} is not served", ident)
        wanted = "GET" if models else "POST"
        if request.method != wanted:
            message = f"{path[:256]} answers {wanted}, not {request.method}"
            refusal = error_answer(405, message, ident)
            return msgspec.structs.replace(refusal, headers={**refusal.headers, "Allow": wanted})
        if hub.draining or not hub.status.ready:
            phase = "draining" if hub.draining else hub.status.phase
            return error_answer(OVERLOADED, f"not ready: {phase}", ident, retry_ms=1000)
        if not may_ask(request, hub):
            return _unauthorized(ident)
        if _DATE.fullmatch(request.headers.get(VERSION, "")) is None:
            message = f"the header `{VERSION}` must be a date: send 2023-06-01, or a later one"
            return error_answer(400, message, ident)
        return None

    def respond(self, request: HttpRequest, hub: Hub) -> Response | Accepted:
        """Answer, or accept a whole request that was not refused."""
        ident, now = new_id("req"), hub.clock.now()
        models = request.path.startswith(MODELS)
        credential = credential_of(request, hub, now, spends=not models)
        if credential is None:
            return _unauthorized(ident)
        if models:
            return _models(request, hub.status.info(), ident)
        self._say_betas(request.headers.get("anthropic-beta", ""))
        try:
            dialogue = self._dialogue(request, hub, credential, ident)
            return accept(hub, dialogue, credential, request, now, headers=named(ident))
        except RamifyError as error:
            return of_error(error, ident)

    def _dialogue(
        self, request: HttpRequest, hub: Hub, credential: Credential, ident: str
    ) -> MessageAnswers | CountAnswers:
        """Raises RamifyError."""
        kind = MessagesRequest if request.path == MESSAGES else CountRequest
        asked = decode(request.body, kind)
        model = hub.status.model
        if asked.model != model:
            raise unknown_model(asked.model, model)
        signer = Signer(hub.secret, credential.name)
        joins = not hub.served.users_follow_results
        told = conversation_of(
            asked.system,
            asked.messages,
            signer,
            joins=joins,
            reads=hub.served.pictures,
            fetches=hub.served.fetches,
        )
        if told.billed:
            self._say(BILLING, "a billing header that changes each time is left out of the prompt")
        if told.forgot:
            self._say("thinking", "thoughts that were not signed here are left out of prompts")
        if isinstance(asked, MessagesRequest):
            owner = credential.name
            return MessageAnswers(asked, told, signer, hub.served, ident, self._marks, owner)
        return CountAnswers(asked, told, hub.served, ident)

    def _say_betas(self, header: str) -> None:
        for name in header.split(",", _MOST_TOLD):
            beta = name.strip()[:_LONGEST]
            if beta and beta.isprintable() and len(self._told) < _MOST_TOLD:
                self._say(beta, "a beta of Anthropic's API is ignored", beta=beta)

    def _say(self, what: str, message: str, **fields: Any) -> None:
        """Log a message once."""
        if what not in self._told:
            self._told.add(what)
            _LOG.info(message, **fields)


def _unauthorized(ident: str) -> Response:
    message = "the API key is missing or wrong: send it as `x-api-key` or `Authorization: Bearer`"
    return error_answer(401, message, ident)


def _models(request: HttpRequest, info: dict[str, Any], ident: str) -> Response:
    model, started = info["model"], datetime.fromtimestamp(info["started"], UTC)
    entry = {
        "type": "model",
        "id": model["model"],
        "display_name": model["model"],
        "created_at": started.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model["context"],
        "max_tokens": model["context"],
    }
    if request.path != MODELS:
        name = unquote(request.path.removeprefix(f"{MODELS}/"))  # a name may hold a slash
        if name != entry["id"]:
            return of_error(unknown_model(name, entry["id"]), ident)
        return _told(entry, ident)
    asked = request.query.split("&", 16)
    beyond = any(each.startswith(("after_id=", "before_id=")) for each in asked)
    data = [] if beyond else [entry]  # there is one: nothing is on either side of it
    ends = {"first_id": entry["id"], "last_id": entry["id"]} if data else {}
    page_of = {"data": data, "has_more": False, "first_id": None, "last_id": None, **ends}
    return _told(page_of, ident)


def _told(value: object, ident: str) -> Response:
    return msgspec.structs.replace(json_response(200, value), headers=named(ident))
