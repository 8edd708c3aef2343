"""What a constraint is when it is asked for, and what it has been compiled to. Data only.

A `ConstraintSpec` goes from a session to the compile workers; from there a body, as bytes, goes to the
executor.
"""

from typing import Literal

import msgspec

Kind = Literal["regex", "choices", "json_schema", "lark", "structure"]
Backend = Literal["automaton", "grammar"]


class ConstraintSpec(msgspec.Struct, frozen=True, array_like=True):
    """What the output has to be.

    `text`: a regex, which must match the whole output; a JSON array of the texts to choose from; a JSON
    Schema as JSON; a grammar in Lark's form; or a `structure.Structure` as JSON. `spaced`: JSON has a
    space behind each comma and colon.
    """

    kind: Kind
    text: str
    spaced: bool = False


class AutomatonBody(msgspec.Struct, frozen=True, array_like=True, tag="automaton"):
    """A byte automaton of `states` states and `columns` classes of bytes.

    `next`: int32 little-endian [states, columns]; `final`: one byte a state; both compressed by zlib.
    `classes`: uint8 [256].
    """

    states: int
    columns: int
    next: bytes
    classes: bytes
    final: bytes


class GrammarBody(msgspec.Struct, frozen=True, array_like=True, tag="grammar"):
    """A grammar, as llguidance reads it."""

    text: str


class VocabularyBody(msgspec.Struct, frozen=True, array_like=True):
    """The vocabulary that constraints are followed with.

    `tokens`: the bytes of each id; b"": no constrained output has it. `stops`: ids that end an output.
    `tokenizer`: what spells text behind other tokens, as the JSON of `tokenizers`.
    """

    tokens: list[bytes]
    stops: list[int]
    tokenizer: str


Body = AutomatonBody | GrammarBody


class CompiledConstraint(msgspec.Struct, frozen=True, array_like=True):
    """A constraint that is ready. `body`: a `Body` as msgpack. `held`: bytes of memory that its tables
    take where it is followed, which can be a hundred times the body's; 0: it has none.

    `notes`: what the language leaves out of what was asked for, in sentences. It is never more.
    """

    body: bytes
    backend: Backend
    notes: tuple[str, ...] = ()
    held: int = 0


def encode_body(body: Body) -> bytes:
    """`body` as msgpack."""
    return msgspec.msgpack.encode(body)


def decode_body(data: bytes) -> Body:
    """The body that `data` holds. Raises msgspec.DecodeError."""
    body: Body = msgspec.msgpack.decode(data, type=Body)
    return body
