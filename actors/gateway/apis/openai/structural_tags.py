"""`response_format` of the type `structural_tag`, in the two forms that servers of the field know.

    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}
    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [...],
        "tags": [{"begin", "content": {"type": "json_schema", "json_schema": {...}}, "end"}],
        "at_least_one"?, "stop_after_first"?}}

A content may also be {"type": "regex", "pattern"} or {"type": "const_string", "value"}.
"""

from typing import Any, Literal

import msgspec

from ramify.protocol.errors import InvalidField
from ramify.protocol.wire import Constraint, JsonObject, StructuralTag


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class _Structure(_Struct, frozen=True):
    begin: str
    schema: JsonObject | bool
    end: str


class _Schema(_Struct, frozen=True, tag_field="type", tag="json_schema"):
    json_schema: JsonObject | bool


class _Regex(_Struct, frozen=True, tag_field="type", tag="regex"):
    pattern: str


class _Text(_Struct, frozen=True, tag_field="type", tag="const_string"):
    value: str


class _Tag(_Struct, frozen=True):
    begin: str
    content: _Schema | _Regex | _Text
    end: str
    type: Literal["tag"] = "tag"


class _Triggered(_Struct, frozen=True):
    type: Literal["triggered_tags"]
    triggers: list[str]
    tags: list[_Tag]
    at_least_one: bool = False
    stop_after_first: bool = False


def structural_constraint(
    structures: list[Any] | None, triggers: list[str] | None, form: JsonObject | None
) -> Constraint:
    """Make the constraint of a `structural_tag`. Raises InvalidField."""
    if (structures is None) == (form is None):
        raise InvalidField("`response_format` of a structural tag has `structures` or a `format`")
    try:
        if form is not None:
            given = msgspec.convert(form, _Triggered)
            fields = {
                "tags": [_tag(each.begin, each.end, each.content) for each in given.tags],
                "triggers": given.triggers,
                "at_least_one": given.at_least_one,
                "stop_after_first": given.stop_after_first,
            }
        else:
            old = msgspec.convert(structures, list[_Structure])
            fields = {
                "tags": [_tag(each.begin, each.end, _Schema(json_schema=each.schema)) for each in old],
                "triggers": triggers or [],
            }
        tag = msgspec.convert(fields, StructuralTag)
    except msgspec.ValidationError as error:
        raise InvalidField(f"`response_format`: {error}") from None
    return Constraint(structural_tag=tag, after_thought=True)


def _tag(begin: str, end: str, content: _Schema | _Regex | _Text) -> JsonObject:
    match content:
        case _Schema(json_schema=bool(schema)):
            said: JsonObject = {"json_schema": "true" if schema else "false"}
        case _Schema(json_schema=schema):
            said = {"json_schema": schema}
        case _Regex(pattern=pattern):
            said = {"regex": pattern}
        case _Text(value=value):
            said = {"choices": [value]}
    return {"begin": begin, "end": end, **said}
