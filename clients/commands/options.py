"""Generation options as a user types them: `/set temperature 0.5`, `--set max_tokens=100`. Pure."""

import json
from typing import Any

import msgspec

from ramify.clients.handles import GenerateOptions
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import CONSTRAINTS, Constraint, Generate


def set_option(options: GenerateOptions, name: str, value: str) -> None:
    """Set a generation option from text (JSON, or a plain string); no text takes it out.

    Raises BadRequest that names the option.
    """
    table: dict[str, Any] = options  # type: ignore[assignment]  # checked right here
    if name in CONSTRAINTS:
        _set_shape(table, name, value)
        return
    if name == "after_thought":
        _set_after_thought(table, value)
        return
    if name not in GenerateOptions.__annotations__:
        known = ", ".join([*CONSTRAINTS, "after_thought", *GenerateOptions.__annotations__])
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
    if name not in ("regex", "grammar"):
        try:
            given = json.loads(value)
        except ValueError as error:
            raise BadRequest(f"{name}: not JSON ({error})") from None
    try:
        table["constraint"] = msgspec.convert({name: given}, Constraint)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{name}: {error}") from None


def _set_after_thought(table: dict[str, Any], value: str) -> None:
    """`/set after_thought true`: what the model thinks before a constrained answer is free."""
    constraint = table.get("constraint")
    if not isinstance(constraint, Constraint):
        raise BadRequest("after_thought goes with a constraint: set that first, /set json_schema ...")
    if value not in ("true", "false", ""):
        raise BadRequest("after_thought: say true or false")
    table["constraint"] = msgspec.structs.replace(constraint, after_thought=value == "true")
