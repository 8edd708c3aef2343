"""Generation options as a user types them: `/set temperature 0.5`, `--set max_tokens=100`. Pure."""

import difflib
import json
from typing import Any

import msgspec
from msgspec import inspect

from ramify.clients.options import GenerateOptions
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import CONSTRAINTS, Constraint, Generate

NAMES = (*CONSTRAINTS, "after_thought", *GenerateOptions.__annotations__)
USUAL = "max_tokens, temperature, top_p, top_k, seed, stop, regex, choices, json_schema"
LEAST_SHOWN = 1e-6  # a bound below stands for "above 0"
JSON_FORMS = {
    "choices": 'a list of texts, such as ["yes", "no"]',
    "json_schema": 'a JSON Schema, such as {"type": "object"}',
    "structural_tag": "an object, as in docs/protocol.md",
}


def set_option(options: GenerateOptions, name: str, value: str) -> None:
    """Set a generation option from text (JSON, or a plain string); no text takes it out.

    Raises BadRequest that names the option and what it may be.
    """
    table: dict[str, Any] = options  # type: ignore[assignment]  # checked right here
    if name in CONSTRAINTS:
        _set_shape(table, name, value)
        return
    if name == "after_thought":
        _set_after_thought(table, value)
        return
    if name not in GenerateOptions.__annotations__:
        near = difflib.get_close_matches(name, NAMES, n=1)
        meant = f"did you mean {near[0]}?" if near else f"the usual ones are {USUAL}"
        raise BadRequest(f"{name!r} is no generation option: {meant}")
    if not value:
        table.pop(name, None)
        return
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = [value] if name == "stop" else value  # /set stop END
    try:
        msgspec.convert({"type": "generate", "id": 0, name: parsed}, Generate)
    except msgspec.ValidationError:
        raise BadRequest(f"{name} is {_brief(value)}: must be {form_of(name)}") from None
    table[name] = parsed


def form_of(name: str) -> str:
    """Say in words what a field of `generate` may be: "a number from 0 to 100"."""
    (field,) = (each for each in inspect.type_info(Generate).fields if each.name == name)  # type: ignore[attr-defined]
    return _in_words(field.type)


def _in_words(kind: inspect.Type) -> str:
    match kind:
        case inspect.UnionType(types=types):
            return _in_words(next(each for each in types if not isinstance(each, inspect.NoneType)))
        case inspect.IntType(ge=low, le=high):
            return f"a whole number from {low} to {high}"
        case inspect.FloatType(ge=low, le=high):
            if low is not None and 0 < low < LEAST_SHOWN:
                return f"a number above 0, at most {high:g}"
            return f"a number from {low:g} to {high:g}"
        case inspect.BoolType():
            return "true or false"
        case inspect.ListType(item_type=inspect.StrType()):
            return 'a list of texts, such as ["END"]'
        case inspect.ListType():
            return "a list of whole numbers, such as [1, 2]"
        case inspect.StrType():
            return "a text"
    return "an object, as in docs/protocol.md"


def _set_shape(table: dict[str, Any], name: str, value: str) -> None:
    """Set a constraint in short: `/set regex [0-9]+`, `/set choices ["yes", "no"]`."""
    if not value:
        table.pop("constraint", None)
        return
    given: Any = value
    try:
        if name in JSON_FORMS:
            given = json.loads(value)
        table["constraint"] = msgspec.convert({name: given}, Constraint)
    except (ValueError, RecursionError):  # msgspec's error is a ValueError, too
        form = JSON_FORMS.get(name, "a text that is not too long")
        raise BadRequest(f"{name} is {_brief(value)}: must be {form}") from None


def _brief(value: str) -> str:
    return value if len(value) <= 40 else value[:40] + "..."


def _set_after_thought(table: dict[str, Any], value: str) -> None:
    """Set `/set after_thought true`: the thought before a constrained answer is free."""
    constraint = table.get("constraint")
    if not isinstance(constraint, Constraint):
        raise BadRequest("after_thought goes with a constraint: set that first, /set json_schema ...")
    if value not in ("true", "false", ""):
        raise BadRequest(f"after_thought is {value}: must be true or false")
    table["constraint"] = msgspec.structs.replace(constraint, after_thought=value == "true")
