"""The words of a JSON Schema that outputs are likely to have: names of members, listed values. Pure.

They are guesses for the executor (`gpu/constraints/literals.py`), and decide nothing.
"""

import json
from typing import Any

MOST = 256  # words
LONGEST = 64  # bytes of one
_MOST_LOOKED_AT = 4096  # parts of the schema


def likely_words(schema: Any) -> tuple[bytes, ...]:
    """In the schema's order: names up to their colons, strings with the quote that ends them."""
    found: dict[bytes, None] = {}
    left, looked_at = [schema], 0
    while left and looked_at < _MOST_LOOKED_AT and len(found) < MOST:
        looked_at += 1
        part = left.pop()
        if isinstance(part, list):
            left += reversed(part)
            continue
        if not isinstance(part, dict):
            continue
        members = part.get("properties")
        names = list(members) if isinstance(members, dict) else []
        for words in (names, _strings(part.get("required"))):
            for name in words:
                _add(found, _spelled(name) + b":")
        listed = part.get("enum")
        values = listed.copy() if isinstance(listed, list) else []
        if "const" in part:
            values.append(part["const"])
        for value in values:
            if not isinstance(value, list | dict):
                _add(found, _spelled(value))
        inner = list(members.values()) if isinstance(members, dict) else []
        others = [value for key, value in part.items() if key not in ("properties", "enum", "const")]
        left += reversed(inner + others)
    return tuple(found)


def _strings(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _spelled(value: Any) -> bytes:
    """The value as JSON; a string without its first quote."""
    text = json.dumps(value, ensure_ascii=False).encode()
    return text[1:] if isinstance(value, str) else text


def _add(found: dict[bytes, None], word: bytes) -> None:
    if len(word) <= LONGEST and len(found) < MOST:
        found.setdefault(word)
