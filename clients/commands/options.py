"""Generation options as a user types them: `/set temperature 0.5`, `--set max_tokens=100`. Pure."""

import json
from typing import Any

import msgspec

from ramify.clients.handles import GenerateOptions
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import Constraint, Generate

_SHAPES = ("regex", "json_schema", "choices", "grammar")  # of a constraint


def set_option(options: GenerateOptions, name: str, value: str) -> None:
    """Set a generation option from text (JSON, or a plain string); no text takes it out.

    Raises BadRequest that names the option.
    """
    table: dict[str, Any] = options  # type: ignore[assignment]  # checked right here
    if name in _SHAPES:
        _set_shape(table, name, value)
        return
    if name not in GenerateOptions.__annotations__:
        known = ", ".join([*_SHAPES, *GenerateOptions.__annotations__])
        raise BadRequest(f"{name!r} is no generation option: {known}")
    if not value:
        table.pop(name, None)
        return
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    try:
        msgspec.convert({"type": "generate", "id": 0, name: parsed}, Generate)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{name}: {error}") from None
    table[name] = parsed


def _set_shape(table: dict[str, Any], name: str, value: str) -> None:
    """`/set regex [0-9]+`, `/set choices ["yes", "no"]`: a constraint in short."""
    if not value:
        table.pop("constraint", None)
        return
    given: Any = value
    if name in ("json_schema", "choices"):
        try:
            given = json.loads(value)
        except ValueError as error:
            raise BadRequest(f"{name}: not JSON ({error})") from None
    try:
        table["constraint"] = msgspec.convert({name: given}, Constraint)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{name}: {error}") from None
