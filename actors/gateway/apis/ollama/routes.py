"""Which paths speak Ollama's API, and what becomes of a request there."""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from ramify.actors.gateway.apis.ollama.answers import OllamaAnswers, loaded, of_error
from ramify.actors.gateway.apis.ollama.requests import GenerateRequest, OllamaChatRequest, ShowRequest
from ramify.actors.gateway.apis.openai.errors import unknown_model
from ramify.actors.gateway.apis.openai.requests import decode
from ramify.actors.gateway.port.dialogues.api import Accepted, accept, credential_of, may_ask
from ramify.actors.gateway.port.http import HttpRequest, Response, error_in, json_response
from ramify.actors.gateway.port.hub import Hub
from ramify.protocol.errors import RamifyError

API_VERSION = "0.13.0"  # of Ollama, whose API this is as of then: clients look whether it is new enough
NDJSON = "application/x-ndjson"
_METHODS = {
    "/api/chat": "POST",
    "/api/generate": "POST",
    "/api/tags": "GET",
    "/api/ps": "GET",
    "/api/show": "POST",
    "/api/version": "GET",
}


def spoken_at(path: str, headers: Mapping[str, str]) -> bool:
    """Whether requests to `path` are for `respond`: all of /api/, missing paths included."""
    return path.startswith("/api/")


def refuse(request: HttpRequest, hub: Hub) -> Response | None:
    """Refuse a request by its head, where its path is `spoken_at`; None: its body is wanted."""
    refusal = hub.routes.refuse(request)
    if refusal is not None:
        return reshaped(refusal)
    method = _METHODS.get(request.path)
    if method is None:
        return _error(404, f"{request.path[:256]} is not served: there is one model, and no embeddings")
    if request.method != method and not (method == "GET" and request.method == "HEAD"):
        return _error(405, f"{request.path} answers {method}, not {request.method}")
    if hub.draining or not hub.status.ready:
        return _error(503, f"not ready: {'draining' if hub.draining else hub.status.phase}")
    return None if may_ask(request, hub) else _unauthorized()


def respond(request: HttpRequest, hub: Hub) -> Response | Accepted:
    """Answer, or accept a whole request that was not refused."""
    now = hub.clock.now()
    reads = request.method != "POST"
    credential = credential_of(request, hub, now, spends=not reads)
    if credential is None:
        return _unauthorized()
    if reads:
        return json_response(200, _seen(request.path, hub.status.info()))
    served = hub.status.model
    try:
        if request.path == "/api/show":
            asked = decode(request.body, ShowRequest)
            _check(asked.model or asked.name or served, served)
            return json_response(200, _shown(hub.status.info()))
        wanted: OllamaChatRequest | GenerateRequest
        if request.path == "/api/chat":
            wanted = decode(request.body, OllamaChatRequest)
        else:
            wanted = decode(request.body, GenerateRequest)
        _check(wanted.model or served, served)
        if not (wanted.messages if isinstance(wanted, OllamaChatRequest) else wanted.prompt):
            return loaded(wanted, served)
        dialogue = OllamaAnswers(wanted, wanted.model or served, hub.vocabulary, hub.served)
        return accept(hub, dialogue, credential, request, now, media=NDJSON)
    except RamifyError as error:
        return of_error(error)


def reshaped(response: Response) -> Response:
    """Bring an error of the gateway itself into this API's shape."""
    error = error_in(response)
    if error is None:
        return response
    body = msgspec.json.encode({"error": error.message})
    return msgspec.structs.replace(response, body=body)


def _check(asked: str, served: str) -> None:
    """Check the model's name, which may have a tag. Raises Refused."""
    if asked not in (served, f"{served}:latest"):
        raise unknown_model(asked, served)


def _unauthorized() -> Response:
    return _error(401, "the token is missing or wrong: send it as `Authorization: Bearer`")


def _error(status: int, message: str) -> Response:
    return json_response(status, {"error": message})


def _details(model: dict[str, Any]) -> dict[str, Any]:
    family = str(model["architecture"])
    weights = model["quantization"] if model["quantization"] != "none" else model["dtype"]
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _size(int(model["parameters"])),
        "quantization_level": weights,
    }


def _size(parameters: int) -> str:
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.1f}{letter}"
    return str(parameters)


def _seen(path: str, info: dict[str, Any]) -> dict[str, Any]:
    if path == "/api/version":
        return {"version": API_VERSION}
    model = info["model"]
    entry = {
        "name": model["model"],
        "model": model["model"],
        "modified_at": _date(info["started"]),
        "size": 0,  # of a file: there is none of Ollama's
        "digest": hashlib.sha256(f"{model['model']} {model['architecture']}".encode()).hexdigest(),
        "details": _details(model),
    }
    if path == "/api/ps":
        entry |= {"size_vram": 0, "context_length": model["context"]}
    return {"models": [entry]}


def _shown(info: dict[str, Any]) -> dict[str, Any]:
    model = info["model"]
    family = str(model["architecture"])
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(model),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": model["parameters"],
            f"{family}.context_length": model["context"],
        },
        "capabilities": ["completion", "tools"],
        "modified_at": _date(info["started"]),
    }


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
