"""Which paths speak OpenAI's API, and what becomes of a request there: a response, or a dialogue."""

import secrets
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from ramify.actors.gateway.apis.openai.chat import ChatAnswers, Heading
from ramify.actors.gateway.apis.openai.completions import CompletionAnswers
from ramify.actors.gateway.apis.openai.errors import error_answer, of_error, reshaped, unknown_model
from ramify.actors.gateway.apis.openai.requests import ChatRequest, CompletionRequest, decode
from ramify.actors.gateway.apis.openai.response_requests import ResponseRequest
from ramify.actors.gateway.apis.openai.responses import ResponseDialogue
from ramify.actors.gateway.apis.openai.stored_responses import (
    ItemPage,
    RetoldDialogue,
    StoredDialogue,
    not_found,
    streamed_after,
)
from ramify.actors.gateway.apis.openai.tokens import (
    DETOKENIZE,
    TOKENIZE,
    DetokenizeRequest,
    TokenizeAnswers,
    TokenizeRequest,
    detokenized,
)
from ramify.actors.gateway.port.dialogues.api import Accepted, accept, credential_of, may_ask
from ramify.actors.gateway.port.dialogues.dialogue import Dialogue
from ramify.actors.gateway.port.http import HttpRequest, Response, json_response
from ramify.actors.gateway.port.hub import Hub
from ramify.protocol.errors import RamifyError
from ramify.protocol.stored_response import Stored
from ramify.protocol.wire import Cancel, Drop

MODELS = "/v1/models"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, CANCEL, ITEMS = "/v1/responses", "/cancel", "/input_items"
_OURS = ("/v1/ai", "/v1/info", "/v1/tokens", "/v1/ws")  # all else below /v1/ is OpenAI's, or would be
_METHODS = {
    **dict.fromkeys((CHAT, COMPLETIONS, RESPONSES, *TOKENIZE, *DETOKENIZE), "POST"),
    MODELS: "GET",
}


def serves(path: str, headers: Mapping[str, str]) -> bool:
    """Whether `path` is one that no other API has."""
    return path in (CHAT, COMPLETIONS, RESPONSES, *TOKENIZE, *DETOKENIZE) or path.startswith(
        f"{RESPONSES}/"
    )


def spoken_at(path: str, headers: Mapping[str, str]) -> bool:
    """Whether requests to `path` are for `respond`, unless another API has it."""
    return path.startswith("/v1/") and path not in _OURS


def refuse(request: HttpRequest, hub: Hub) -> Response | None:
    """Refuse a request by its head, where its path is `spoken_at`; None: its body is wanted."""
    refusal = hub.routes.refuse(request)
    if refusal is not None:
        return reshaped(refusal)
    if request.path not in _METHODS and not request.path.startswith((f"{MODELS}/", f"{RESPONSES}/")):
        return error_answer(404, f"{request.path[:256]} is not served", code="unknown_url")
    wanted = _methods(request.path)
    if request.method not in wanted:
        message = f"{request.path[:256]} answers {' and '.join(wanted)}, not {request.method}"
        refusal = error_answer(405, message, code="method_not_allowed")
        return msgspec.structs.replace(refusal, headers={"Allow": ", ".join(wanted)})
    if hub.draining or not hub.status.ready:
        phase = "draining" if hub.draining else hub.status.phase
        return error_answer(503, f"not ready: {phase}", code="overloaded", retry_ms=1000)
    return None if may_ask(request, hub) else _unauthorized()


def respond(request: HttpRequest, hub: Hub) -> Response | Accepted:
    """Answer, or accept a whole request that was not refused."""
    now = hub.clock.now()
    credential = credential_of(request, hub, now, spends=not request.path.startswith(MODELS))
    if credential is None:
        return _unauthorized()
    if request.path.startswith(MODELS):
        info = hub.status.info()
        return _models(request.path, info["model"], info["started"])
    try:
        if request.path in DETOKENIZE:
            ids = decode(request.body, DetokenizeRequest)
            _heading("", ids.model, hub.status.model)
            return detokenized(ids, hub.vocabulary, hub.served)
        dialogue = _dialogue(request, hub.status.model, hub)
        return accept(hub, dialogue, credential, request, now)
    except RamifyError as error:
        return of_error(error)


def _unauthorized() -> Response:
    return error_answer(401, "the API key is missing or wrong", code="invalid_api_key")


def _methods(path: str) -> tuple[str, ...]:
    if path.startswith(f"{RESPONSES}/"):
        if path.endswith(ITEMS):
            return ("GET",)
        return ("POST",) if path.endswith(CANCEL) else ("GET", "DELETE")
    return (_METHODS.get(path, "GET"),)


def _models(path: str, model: dict[str, Any], started: float) -> Response:
    entry = {
        "id": model["model"],
        "object": "model",
        "created": int(started),
        "owned_by": "ramify",
        "max_model_len": model["context"],
    }
    if path == MODELS:
        return json_response(200, {"object": "list", "data": [entry]})
    name = unquote(path.removeprefix(f"{MODELS}/"))  # a name may hold a slash
    return (
        json_response(200, entry) if name == entry["id"] else of_error(unknown_model(name, entry["id"]))
    )


def _dialogue(request: HttpRequest, served: str, hub: Hub) -> Dialogue:
    """Raises RamifyError."""
    vocabulary = hub.vocabulary
    if request.path == CHAT:
        chat = decode(request.body, ChatRequest)
        return ChatAnswers(chat, _heading("chatcmpl", chat.model, served), vocabulary, hub.served)
    if request.path == RESPONSES:
        asked = decode(request.body, ResponseRequest)
        _heading("", asked.model, served)
        return ResponseDialogue(asked, served, int(time.time()), vocabulary, known=hub.served)
    if request.path.startswith(f"{RESPONSES}/"):
        return _stored(request, hub)
    if request.path in TOKENIZE:
        text = decode(request.body, TokenizeRequest)
        _heading("", text.model, served)
        return TokenizeAnswers(text, vocabulary, hub.served)
    completion = decode(request.body, CompletionRequest)
    return CompletionAnswers(completion, _heading("cmpl", completion.model, served), vocabulary)


def _stored(request: HttpRequest, hub: Hub) -> Dialogue:
    """Raises Refused."""
    ident = request.path.removeprefix(f"{RESPONSES}/").removesuffix(CANCEL).removesuffix(ITEMS)
    stored = Stored.of(ident)
    if stored is None:
        raise not_found(ident)
    ask: Cancel | Drop | None = None
    if request.path.endswith(CANCEL):
        ask = Cancel(id=1, branch=stored.branch)
    elif request.method == "DELETE":
        ask = Drop(id=1, branch=stored.branch)
    elif not request.path.endswith(ITEMS):
        return RetoldDialogue(stored, ident, hub.vocabulary, streamed_after(request.query, stored))
    page = ItemPage.of(request.query) if request.path.endswith(ITEMS) else None
    return StoredDialogue(stored, ident, ask, page)


def _heading(prefix: str, asked: str | None, served: str) -> Heading:
    """Raises Refused."""
    if asked is not None and asked != served:
        raise unknown_model(asked, served)
    return Heading(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), served)
