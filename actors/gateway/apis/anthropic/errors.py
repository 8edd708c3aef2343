"""Errors in the shape of Anthropic's API, with the HTTP status from which clients make exceptions."""

import secrets
from http import HTTPStatus
from typing import Any

import msgspec

from ramify.actors.gateway.apis.openai.errors import STATUS, Refused
from ramify.actors.gateway.port.http import Response, error_in
from ramify.protocol.errors import Code, RamifyError
from ramify.protocol.wire import Error

OVERLOADED = 529
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "invalid_request_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
_UNAVAILABLE: dict[Code, int] = {"overloaded": OVERLOADED, "cancelled": OVERLOADED}


def new_id(kind: str) -> str:
    """Make an id of this API: of a message ("msg") or a request ("req")."""
    return f"{kind}_{secrets.token_hex(12)}"


def named(ident: str) -> dict[str, str]:
    """Make the header with a request's id."""
    return {"request-id": ident}


def error_body(status: int, message: str, ident: str) -> dict[str, Any]:
    """Make the JSON object of an error."""
    told = {"type": _TYPES.get(status, "api_error"), "message": message}
    return {"type": "error", "error": told, "request_id": ident}


def error_answer(status: int, message: str, ident: str, *, retry_ms: int | None = None) -> Response:
    """Make the response for an error."""
    headers = named(ident)
    if retry_ms is not None:
        headers["Retry-After"] = str(-(-retry_ms // 1000))
    body = msgspec.json.encode(error_body(status, message, ident))
    return Response(status, body, headers=headers)


def of_error(error: Error | RamifyError, ident: str) -> Response:
    """Make the response for an error of a session, or one that was raised here."""
    return error_answer(_status(error), told(error), ident, retry_ms=error.retry_ms)


def fields_of_error(error: Error | RamifyError, ident: str) -> dict[str, Any]:
    """Make the fields of the event that ends a stream with an error, beside its type."""
    body = error_body(_status(error), told(error), ident)
    return {"error": body["error"], "request_id": ident}


def reshaped(response: Response) -> Response:
    """Bring an error of the gateway itself into this API's shape; return other responses as they are."""
    error = error_in(response)
    if error is None:
        return response
    status = response.status
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        status = OVERLOADED
    ident = new_id("req")
    body = msgspec.json.encode(error_body(status, error.message, ident))
    return Response(status, body, headers={**response.headers, **named(ident)})


def told(error: Error | RamifyError) -> str:
    """Write the message in words of this API, where clients look for them."""
    details = error.details or {}
    if error.code != "too_long" or not (most := details.get("max")):
        return error.message
    tokens = details.get("tokens", 0) + details.get("position", 0)
    if "tokens" not in details:
        return f"prompt is too long: {tokens} tokens > {most - 1} maximum"  # an answer needs one
    return f"prompt is too long: at least {tokens} tokens > {most} maximum"


def _status(error: Error | RamifyError) -> int:
    if isinstance(error, Refused):
        return error.status
    return _UNAVAILABLE.get(error.code, STATUS[error.code])
