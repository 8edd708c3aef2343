"""The text that a `join` appends. Pure: the server uses it, and clients that show or make the text
themselves.
"""

import re
from collections.abc import Sequence

from ramify.protocol.errors import LimitExceeded
from ramify.protocol.wire import Join

MOST = 1 << 22  # characters that a join makes: `each` may name a long text many times
FIELDS = 64  # how often it may

_FIELD = re.compile(r"\{(i|name|text)\}")


def fields(each: str) -> int:
    """The number of fields that `each` names."""
    return len(_FIELD.findall(each))


def too_long() -> LimitExceeded:
    """The error of a join that would make more than `MOST` characters."""
    return LimitExceeded(
        f"the join would make more than {MOST} characters: join fewer or shorter texts",
        details={"max": MOST},
    )


def join_texts(op: Join, texts: Sequence[str]) -> str:
    """The text that the join appends. Raises LimitExceeded before making one that is too long."""
    pattern = _FIELD.split(op.each)  # text, field, text, field, ..., text
    parts, size = [op.prefix], len(op.prefix) + len(op.suffix)
    for i, (name, text) in enumerate(zip(op.from_, texts, strict=True), 1):
        values = {"i": str(i), "name": name, "text": text}
        each = [values[part] if at % 2 else part for at, part in enumerate(pattern)]
        size += sum(map(len, each))
        if size > MOST:
            raise too_long()
        parts += each
    return "".join([*parts, op.suffix])
