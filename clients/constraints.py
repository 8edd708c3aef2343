"""What an output must be, as users say it: a regex, a schema, a Python type, texts, a grammar, tags.

A type may be what `msgspec` knows (structs, dataclasses, TypedDicts, and what is made of them) or a
pydantic model; pydantic is used where it is installed, never needed. Its schema becomes the constraint,
with objects closed: members that the type does not name cannot be written.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import CONSTRAINTS, Constraint, JsonObject, StructuralTag

T = TypeVar("T")


def constrained(options: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """The fields of `generate` for `options`, and the type of the output (None: text).

    Raises BadRequest if more than one constraint is given, and for types without a schema.
    """
    fields = dict(options)
    given = {kind: fields.pop(kind) for kind in CONSTRAINTS if kind in fields}
    wanted = fields.pop("type", None)
    after_thought = fields.pop("after_thought", False)
    goes_on = fields.pop("continue_constraint", None)
    if wanted is not None:
        given["type"] = wanted
    if not given and after_thought:
        raise BadRequest("`after_thought` says where a constraint begins: give one")
    if goes_on is not None:
        given["continue_"] = goes_on
    if not given:
        return fields, None
    if len(given) > 1 or "constraint" in fields:
        names = ", ".join([*given, *(["constraint"] if "constraint" in fields else [])])
        names = names.replace("continue_", "continue_constraint")
        raise BadRequest(f"give one constraint, not {names}")
    if wanted is not None:
        given = {"json_schema": schema_of(wanted)}
    elif "choices" in given:
        given["choices"] = list(given["choices"])
    elif "structural_tag" in given:
        try:
            given["structural_tag"] = msgspec.convert(given["structural_tag"], StructuralTag)
        except msgspec.ValidationError as error:
            raise BadRequest(f"structural_tag: {error}") from None
    fields["constraint"] = Constraint(**given, after_thought=after_thought)
    return fields, wanted


def schema_of(kind: Any) -> JsonObject:
    """The JSON Schema of a type. Raises BadRequest if it has none."""
    schema: JsonObject
    if hasattr(kind, "model_json_schema"):
        schema = kind.model_json_schema()
    else:
        try:
            schema = msgspec.json.schema(kind)
        except (TypeError, RuntimeError) as error:
            raise BadRequest(
                f"{kind!r} has no JSON Schema ({error}): give a msgspec Struct, a dataclass, a "
                "TypedDict or a pydantic model"
            ) from None
    closed: JsonObject = _closed(schema)
    return closed


def read(kind: type[T], text: str, reason: str) -> T:
    """The object that `text` is the JSON of.

    Raises ValueError if it is none; it says so if the output was cut (`reason`: why it ended).
    """
    validate: Callable[[str], T] | None = getattr(kind, "model_validate_json", None)
    try:
        return msgspec.json.decode(text, type=kind) if validate is None else validate(text)
    except ValueError as error:
        if reason == "stop":
            raise
        mend = ": give a higher max_tokens" if reason == "length" else ""
        raise ValueError(f"the output ended before its JSON did (reason {reason!r}){mend}") from error


def _closed(schema: Any) -> Any:
    """With `additionalProperties` false wherever properties are named and it is not said."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed: JsonObject = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            closed[key] = {name: _closed(each) for name, each in value.items()}
        else:
            closed[key] = value if key in _DATA else _closed(value)
    if closed.get("type") == "object" and isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_DATA = frozenset({"const", "default", "enum", "examples", "title", "description"})
