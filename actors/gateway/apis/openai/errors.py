"""Errors in the shape of OpenAI's API, with the HTTP status from which clients make their exceptions."""

import re
from collections.abc import Container
from http import HTTPStatus
from typing import Any

import msgspec

from ramify.actors.gateway.port.http import Response, error_in
from ramify.protocol.errors import BadRequest, Code, InvalidField, RamifyError
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
    405: "invalid_request_error",
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
    """Make the JSON object of an error."""
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
    """Make the response for an error."""
    return _answer(status, error_body(status, message, param=param, code=code), retry_ms)


def _answer(status: int, body: dict[str, Any], retry_ms: int | None) -> Response:
    headers = {} if retry_ms is None else {"Retry-After": str(-(-retry_ms // 1000))}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(status, msgspec.json.encode(body), headers=headers)


class Refused(BadRequest):
    """A request that OpenAI's API refuses with a status and a code of its own."""

    def __init__(self, status: int, message: str, *, param: str | None, named: str) -> None:
        super().__init__(message, details={"field": param})
        self.status = status
        self.named = named


def unknown_model(asked: str, served: str) -> Refused:
    """Make the error for a model that is not served."""
    message = f"the model {asked[:256]!r} is not served here: this server has {served!r}"
    return Refused(404, message, param="model", named="model_not_found")


def told(error: Error | RamifyError) -> str:
    """Write the message in words that clients of these APIs know."""
    return _too_long(error) if error.code == "too_long" else error.message


def status_and_body(error: Error | RamifyError) -> tuple[int, dict[str, Any]]:
    """Find HTTP status and JSON object for an error of a session, or one that was raised here."""
    if isinstance(error, Refused):
        status, code = error.status, error.named
    else:
        status, code = STATUS[error.code], _NAMED.get(error.code, error.code)
    return status, error_body(status, told(error), param=param_of(error.details or {}), code=code)


def _too_long(error: Error | RamifyError) -> str:
    """Write the message as OpenAI does, whose clients know no branches."""
    details = error.details or {}
    most, tokens = details.get("max"), details.get("tokens", 0) + details.get("position", 0)
    if most is None or not tokens:
        return f"{error.message}: shorten the input or the output"
    if "tokens" not in details:  # all fits, but nothing could be said
        return (
            f"This model's maximum context length is {most} tokens, and the input has {tokens}: "
            "there is no room for an answer. Shorten the input."
        )
    return (
        f"This model's maximum context length is {most} tokens. However, the input results in at least "
        f"{tokens} tokens. Shorten the input; `max_tokens` of the answer come on top."
    )


def check_result(where: str, ident: str, known: Container[str | None]) -> None:
    """Raises InvalidField for a result of a call that is not `known`."""
    if ident not in known:
        raise InvalidField(
            f"`{where}` {ident[:64]!r} is the id of no call before it: send the call, too",
            details={"field": where},
        )


def of_error(error: Error | RamifyError) -> Response:
    """Make the response for an error."""
    status, body = status_and_body(error)
    return _answer(status, body, error.retry_ms)


def reshaped(response: Response) -> Response:
    """Bring an error of the gateway itself into this API's shape; return other responses as they are."""
    error = error_in(response)
    if error is None:
        return response
    code = "invalid_api_key" if response.status == HTTPStatus.UNAUTHORIZED else error.code
    body = msgspec.json.encode(error_body(response.status, error.message, code=code))
    return msgspec.structs.replace(response, body=body)


def param_of(details: dict[str, Any]) -> str | None:
    """Find the field of the request that an error's details name."""
    if isinstance(field := details.get("field"), str):
        return field
    if isinstance(path := details.get("path"), str):
        return _PATH.sub("", path) or None
    return None


def event_of_error(error: Error | RamifyError) -> dict[str, Any]:
    """Make the event that ends a stream with an error."""
    return status_and_body(error)[1]
