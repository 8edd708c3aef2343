"""Values of keywords, checked as they are read. Pure."""

from fractions import Fraction
from typing import Any

from ramify.actors.grammar.schema.document import child
from ramify.actors.grammar.schema.errors import TooLarge, UnsupportedSchema
from ramify.actors.grammar.schema.limits import MAX_NUMBER_DIGITS

_HUGE = 1 << 31  # a count over this one is the same as none


def count(pointer: str, keywords: dict[str, Any], key: str) -> int | None:
    """A length or a count; None if it is not there."""
    value = keywords.get(key)
    if value is None and key not in keywords:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UnsupportedSchema(f"{pointer}/{key}", "a whole number from 0 must stand here")
    if value > _HUGE:
        if key.startswith("max"):
            return None
        raise TooLarge(f"{pointer}/{key}", f"at most {_HUGE}")
    return value


def fraction(pointer: str, keywords: dict[str, Any], key: str) -> Fraction:
    """A number, as it is written in the schema."""
    value = keywords[key]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UnsupportedSchema(f"{pointer}/{key}", "a number must stand here")
    if isinstance(value, int) and value.bit_length() > 4 * MAX_NUMBER_DIGITS:
        raise TooLarge(f"{pointer}/{key}", f"a number of more than {MAX_NUMBER_DIGITS} digits")
    found = Fraction(repr(value))
    if max(abs(found.numerator), found.denominator) >= 10**MAX_NUMBER_DIGITS:
        raise TooLarge(f"{pointer}/{key}", f"a number of more than {MAX_NUMBER_DIGITS} digits")
    return found


def names(pointer: str, keywords: dict[str, Any], key: str) -> list[str]:
    """A list of names, each once."""
    value = keywords.get(key, [])
    if isinstance(value, bool):  # `required` of draft 3, in a property: it says nothing in later drafts
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UnsupportedSchema(f"{pointer}/{key}", "a list of names must stand here")
    return list(dict.fromkeys(value))


def lists_of_names(pointer: str, keywords: dict[str, Any], key: str) -> dict[str, list[str]]:
    """Names that have a list of names each; those that have something else are left out."""
    value = keywords.get(key, {})
    if not isinstance(value, dict):
        raise UnsupportedSchema(f"{pointer}/{key}", "an object must stand here")
    found = {}
    for name, inner in value.items():
        if isinstance(inner, str):  # draft 3
            inner = [inner]
        if isinstance(inner, list):
            found[name] = names(child(pointer, key), {name: inner}, name)
    return found


def schema_map(pointer: str, keywords: dict[str, Any], key: str, lists: bool = False) -> dict[str, str]:
    """The pointers of the schemas by name. `lists`: what has a list in place of a schema is left out."""
    value = keywords.get(key, {})
    if not isinstance(value, dict):
        raise UnsupportedSchema(f"{pointer}/{key}", "an object of schemas must stand here")
    at = child(pointer, key)
    return {
        name: child(at, name)
        for name, inner in value.items()
        if not (lists and isinstance(inner, list | str))
    }
