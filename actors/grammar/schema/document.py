"""A schema as a document: its draft, what its keywords mean in it, and where its references lead. Pure.

Every subschema is known by its JSON pointer. `keywords` gives one in the words of draft 2020-12,
whatever draft it was written in (4, 6, 7, 2019-09, 2020-12, as `$schema` says; without, 2020-12).
Nothing is fetched: references go to the document itself.
"""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from ramify.actors.grammar.limits import MAX_BYTES
from ramify.actors.grammar.schema.errors import TooLarge, UnsupportedSchema
from ramify.actors.grammar.schema.limits import MAX_DEPTH, MAX_NOTES

Schema = dict[str, Any] | bool

_DRAFTS = {"draft-03": 3, "draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019, "2020-12": 2020}
_SINCE = {  # the first draft that knows a keyword, where that is not draft 4
    "const": 6,
    "contains": 6,
    "propertyNames": 6,
    "if": 7,
    "then": 7,
    "else": 7,
    "minContains": 2019,
    "maxContains": 2019,
    "dependentRequired": 2019,
    "dependentSchemas": 2019,
    "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019,
    "prefixItems": 2020,
    "$dynamicRef": 2020,
}
_NO_SCHEMAS = frozenset({"enum", "const", "default", "example", "examples"})  # plain values


class Document:
    """One schema and its subschemas. Raises `UnsupportedSchema` if it is too large, or no schema."""

    def __init__(self, schema: Schema) -> None:
        if not isinstance(schema, dict | bool):
            raise UnsupportedSchema(
                "", f"a schema is an object or a boolean, not {type(schema).__name__}"
            )
        _check_depth(schema)
        try:
            size = len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode())
        except (TypeError, ValueError) as error:
            raise UnsupportedSchema("", f"the schema is not JSON: {error}") from None
        if size > MAX_BYTES:
            raise TooLarge("", f"the schema has {size} bytes: at most {MAX_BYTES}")
        self.root = schema
        self.notes: dict[str, None] = {}  # in order, each once
        self.draft = self._draft(schema)
        self._bases: dict[str, str] = {}  # pointer of a resource: its URI
        self._targets: dict[str, str] = {}  # URI, or URI#anchor: pointer
        self._index(schema, "", "")

    def note(self, text: str) -> None:
        """Tell the user of something that the spelled language leaves out."""
        if len(self.notes) < MAX_NOTES:
            self.notes.setdefault(text)

    def _draft(self, schema: Schema) -> int:
        uri = schema.get("$schema") if isinstance(schema, dict) else None
        if not isinstance(uri, str):
            return 2020
        for name, draft in _DRAFTS.items():
            if name in uri:
                if draft == 3:
                    raise UnsupportedSchema("/$schema", "draft 3 is not supported: use draft 4 or later")
                return draft
        return 2020

    def _index(self, value: object, pointer: str, base: str) -> None:
        """Remember where `$id`s and anchors are."""
        if isinstance(value, list):
            for i, item in enumerate(value):
                self._index(item, f"{pointer}/{i}", base)
        if not isinstance(value, dict):
            return
        own = value.get("id" if self.draft == 4 else "$id")
        if not pointer:  # what has no identifier of its own belongs to the root
            self._bases[""] = ""
            self._targets.setdefault("", "")
        if isinstance(own, str) and not (self.draft <= 7 and "$ref" in value):
            if own.startswith("#"):
                self._targets.setdefault(base + own, pointer)
            else:
                base = urljoin(base, urldefrag(own).url)
                self._bases[pointer] = base
                self._targets.setdefault(base, pointer)
        for word in ("$anchor", "$dynamicAnchor"):
            if self.draft >= 2019 and isinstance(value.get(word), str):
                self._targets.setdefault(f"{base}#{value[word]}", pointer)
        for key, inner in value.items():
            if key not in _NO_SCHEMAS or pointer.endswith("/properties"):
                self._index(inner, child(pointer, key), base)

    def at(self, pointer: str) -> Schema:
        """The subschema at `pointer`. Raises `UnsupportedSchema` if there is none."""
        value: Any = self.root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            try:
                value = value[int(key)] if isinstance(value, list) else value[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise UnsupportedSchema(
                    pointer, "there is nothing at the end of this reference"
                ) from None
        if not isinstance(value, dict | bool):
            raise UnsupportedSchema(pointer, "a schema must stand here: an object or a boolean")
        return value

    def resolve(self, pointer: str, reference: object) -> str:
        """The pointer of what `reference`, in the subschema at `pointer`, leads to."""
        if not isinstance(reference, str):
            raise UnsupportedSchema(f"{pointer}/$ref", "a reference is a string")
        base, at = "", pointer
        while True:
            if at in self._bases:
                base = self._bases[at]
                break
            at = at.rpartition("/")[0]
        inside = reference.startswith("#")
        uri, fragment = urldefrag(base + reference if inside else urljoin(base, reference))
        fragment = unquote(fragment)
        resource = self._targets.get(uri)
        if resource is None and uri == self._bases.get(""):
            resource = ""
        if resource is not None and (not fragment or fragment.startswith("/")):
            target = resource + fragment
        elif (found := self._targets.get(f"{uri}#{fragment}")) is not None:
            target = found
        else:
            raise UnsupportedSchema(
                f"{pointer}/$ref", f"{reference!r} is not in the schema: references are local"
            )
        self.at(target)
        return target

    def keywords(self, pointer: str) -> dict[str, Any]:
        """The subschema (an object) at `pointer` in the words of draft 2020-12.

        What its own draft does not know is left out.
        """
        schema = self.at(pointer)
        assert isinstance(schema, dict)
        if self.draft <= 7 and "$ref" in schema:  # what stands beside a reference says nothing there
            return {"$ref": schema["$ref"]}
        found = {k: v for k, v in schema.items() if self.draft >= _SINCE.get(k, 4)}
        if self.draft == 4:
            for name, strict in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
                if found.pop(strict, False) is True and name in found:
                    found[strict] = found.pop(name)
        return found

    def items(self, pointer: str) -> tuple[list[str], str | None]:
        """The pointers of the schemas of an array's first items, and of all others (or None)."""
        schema = self.at(pointer)
        assert isinstance(schema, dict)
        rest: str | None = "items"
        if self.draft >= 2020:
            first, word = schema.get("prefixItems", []), "prefixItems"
        else:
            items = schema.get("items")
            first, word = (items, "items") if isinstance(items, list) else ([], "items")
            if first or isinstance(items, list):
                rest = "additionalItems"
        if not isinstance(first, list):
            raise UnsupportedSchema(f"{pointer}/{word}", "a list of schemas must stand here")
        if rest not in schema:
            rest = None
        elif isinstance(schema[rest], list):
            raise UnsupportedSchema(
                f"{pointer}/{rest}", "a list here is draft 4 to 2019-09: use prefixItems"
            )
        prefix = [f"{pointer}/{word}/{i}" for i in range(len(first))]
        return prefix, None if rest is None else f"{pointer}/{rest}"


def child(pointer: str, key: str) -> str:
    """The pointer of what `key` names inside `pointer`."""
    return f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"


def _check_depth(value: object) -> None:
    layer: list[object] = [value]
    for _ in range(MAX_DEPTH):
        layer = [inner for at in layer for inner in _inside(at)]
        if not layer:
            return
    raise TooLarge("", f"the schema nests more than {MAX_DEPTH} deep")


def _inside(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value
