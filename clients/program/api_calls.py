"""OpenAI's forms of tools and errors, and ours."""

from typing import Any

from ramify.clients.errors import ConnectionLost, Internal
from ramify.protocol.errors import BadRequest, Forbidden, Overloaded, RamifyError, Unauthorized
from ramify.protocol.wire import JsonObject


def tool_choice(choice: str) -> Any:
    """Convert the choice of a tool to the form of OpenAI's API."""
    return (
        choice if choice in ("auto", "required") else {"type": "function", "function": {"name": choice}}
    )


def more_of(calls: dict[int, JsonObject], piece: Any) -> None:
    """Add a piece of a call: its id and name come first, then its arguments bit by bit."""
    call = calls.setdefault(
        piece.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
    )
    call["id"] = piece.id or call["id"]
    if piece.function is not None:
        function = call["function"]
        function["name"] += piece.function.name or ""
        function["arguments"] += piece.function.arguments or ""


def told(error: BaseException) -> BaseException:
    """Convert an error of the client package to ours, whose text says what the endpoint said."""
    status = getattr(error, "status_code", None)
    if isinstance(error, RamifyError) or not type(error).__module__.startswith(("openai", "httpx")):
        return error
    body = getattr(error, "body", None)
    said = body.get("message") if isinstance(body, dict) else None
    text = f"the endpoint answered {status}: {said or error}" if status else f"{error}"
    match status:
        case 401:
            made: RamifyError = Unauthorized(text)
        case 403:
            made = Forbidden(text)
        case 429:
            made = Overloaded(text)
        case int() if 400 <= status < 500:
            made = BadRequest(text)
        case _:
            made = Internal(text) if status else ConnectionLost(f"the endpoint was not reached: {text}")
    made.__cause__ = error
    return made
