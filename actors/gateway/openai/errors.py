"""Errors in the shape of OpenAI's API, with the HTTP status from which clients make their exceptions."""

import re
from http import HTTPStatus
from typing import Any

import msgspec

from ramify.actors.gateway.http import Response
from ramify.protocol.errors import Code, RamifyError
from ramify.protocol.wire import Error

# The status of each code of ours: clients try 408, 409, 429 and 5xx again, the others never.
STATUS: dict[Code, int] = {
    "bad_request": 400,
    "bad_constraint": 400,
    "too_long": 400,
    "unsupported": 400,
    "skipped": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "no_session": 404,
    "no_branch": 404,
    "exists": 409,
    "conflict": 409,
    "limit": 429,
    "internal": 500,
    "cancelled": 503,
    "overloaded": 503,
    "deadline": 504,
}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_NAMED = {"too_long": "context_length_exceeded"}  # as OpenAI calls it; the others have our names
# Where a field of the request went: the frame is [open, append ..., generate].
_PATH = re.compile(r"^\$\[\d+\]\.?")


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON object of an error."""
    kind = _TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_answer(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    retry_ms: int | None = None,
) -> Response:
    """A whole response."""
    headers = {} if retry_ms is None else {"Retry-After": str(-(-retry_ms // 1000))}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    body = msgspec.json.encode(error_body(status, message, param=param, code=code))
    return Response(status, body, headers=headers)


def of_error(error: Error | RamifyError) -> Response:
    """The response for an error of a session, or one that was raised here."""
    details = error.details or {}
    return error_answer(
        STATUS[error.code],
        error.message,
        param=param_of(details),
        code=_NAMED.get(error.code, error.code),
        retry_ms=error.retry_ms,
    )


def param_of(details: dict[str, Any]) -> str | None:
    """The field of the request that an error's details name."""
    if isinstance(field := details.get("field"), str):
        return field
    if isinstance(path := details.get("path"), str):
        return _PATH.sub("", path) or None
    return None


def event_of_error(error: Error | RamifyError) -> dict[str, Any]:
    """What a stream that has begun sends instead of its end."""
    details = error.details or {}
    code = _NAMED.get(error.code, error.code)
    return error_body(STATUS[error.code], error.message, param=param_of(details), code=code)
