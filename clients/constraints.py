"""Constraints in the forms that users write: a regex, a schema, a Python type, texts, a grammar, tags.

A type may be one that `msgspec` knows (structs, dataclasses, TypedDicts, and compositions of them), a
pydantic model, or a composition of models (`list[Model]`, `Model | Other`); pydantic is used where it is
installed, never needed. Its schema becomes the constraint, with objects closed: members that the type
does not name cannot be written.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar, get_args

import msgspec

from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import CONSTRAINTS, Constraint, JsonObject, StructuralTag

T = TypeVar("T")


def constrained(options: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Make the fields of `generate` for `options`. Returns also the type of the output (None: text).

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
        del given["type"]
        given["json_schema"] = schema_of(wanted)
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
    """Make the JSON Schema of a type. Raises BadRequest if it has none."""
    schema: JsonObject
    adapter = _adapter(kind)
    if adapter is not None:
        schema = adapter.json_schema(schema_generator=_generator())
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
    """Read the object whose JSON `text` is.

    Raises ValueError if it is none; it says so if the output was cut (`reason`: why it ended).
    """
    adapter = _adapter(kind)
    validate: Callable[[str], T] | None = None if adapter is None else adapter.validate_json
    try:
        return msgspec.json.decode(text, type=kind) if validate is None else validate(text)
    except ValueError as error:
        if reason == "stop":
            raise
        mend = ": give a higher max_tokens" if reason == "length" else ""
        raise ValueError(f"the output ended before its JSON did (reason {reason!r}){mend}") from error


def _adapter(kind: Any) -> Any:
    """Make pydantic's `TypeAdapter` of a type that only pydantic knows; None for others."""
    if any(hasattr(part, "__pydantic_core_schema__") or _is_pydantics(part) for part in _parts(kind)):
        return import_module("pydantic").TypeAdapter(kind)
    return None


def _generator() -> Any:
    """Pydantic's generator of schemas, but Decimals are numbers: of their strings it says too little."""
    base = import_module("pydantic.json_schema").GenerateJsonSchema
    return type("Generator", (base,), {"decimal_schema": lambda _, schema: _decimal(schema)})


def _decimal(said: Mapping[str, Any]) -> JsonObject:
    bounds = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    schema: JsonObject = {"type": "number"}
    schema |= {word: float(said[key]) for key, word in bounds.items() if said.get(key) is not None}
    if said.get("multiple_of") is not None:
        schema["multipleOf"] = float(said["multiple_of"])
    places, digits = said.get("decimal_places"), said.get("max_digits")
    if places is None and digits is None:
        return schema
    most = 10.0 ** max(0, (digits or 15) - (places or 0))
    fits = {"multipleOf": 10.0 ** -(places or 0), "exclusiveMinimum": -most, "exclusiveMaximum": most}
    return {"allOf": [schema, fits]}


def _is_pydantics(part: Any) -> bool:
    """Whether pydantic adds `part` to types: constr(...) is Annotated[str, StringConstraints(...)]."""
    home = part.__module__ if isinstance(part, type) else type(part).__module__
    return home.partition(".")[0] in ("pydantic", "annotated_types")


def _parts(kind: Any) -> Iterator[Any]:
    """Yield a type and all that it is made of."""
    yield kind
    for part in get_args(kind):
        yield from _parts(part)


def _closed(schema: Any) -> Any:
    """Set `additionalProperties` false on each object schema that does not set it."""
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
    if closed.get("contentEncoding") == "base64":  # bytes of msgspec
        closed.setdefault("pattern", _BASE64)
    named = ("properties", "patternProperties")
    if closed.get("type") == "object" and any(isinstance(closed.get(key), dict) for key in named):
        closed.setdefault("additionalProperties", False)
    return closed


_BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_DATA = frozenset({"const", "default", "enum", "examples", "title", "description"})
