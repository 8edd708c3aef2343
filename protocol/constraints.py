"""Constraints as they are asked for, and as they are compiled. Data only.

A `ConstraintSpec` goes from a session to the compile workers; from there a body, as bytes, goes to the
executor.
"""

from typing import Literal, NamedTuple

import msgspec

Kind = Literal["regex", "choices", "json_schema", "lark", "structure"]
Backend = Literal["automaton", "grammar"]
GrammarBackend = Literal[
    "auto", "outlines"
]  # what compiles regexes and choices: see `--grammar-backend`

WORDS_HEADER = 8  # of `AutomatonBody.words`, ahead of the classes
NO_STEP = -(1 << 31)  # a distance that ends below 0 from wherever it begins
_STATES = 1 << 30  # all states are below: where `NO_STEP` leads is below 0
POP_STEP = -9  # the step behind an array or object that no schema describes


class ConstraintSpec(msgspec.Struct, frozen=True, array_like=True):
    """A constraint, as a session asks for it.

    `text`, by `kind`: a regex, which must match the whole output; a JSON array of choices; a JSON Schema
    as JSON; a grammar in Lark's form; or a `structure.Structure` as JSON. `spaced`: JSON has a space
    behind each comma and colon.
    """

    kind: Kind
    text: str
    spaced: bool = False


class ForcedTexts(msgspec.Struct, frozen=True, array_like=True):
    """The texts that must follow in some states of an automaton, whatever the tokens are: each once, as
    a byte and the text behind that. All numbers are int32, little-endian, but for `heads`.

    `states`: where only one byte can follow, and the output cannot end; `texts`: the number of the text
    there, up to where that changes; `ends`: the state behind it. `heads`, `rests`: of each text the
    first byte, as a byte, and the number of what follows that, -1 for nothing. `entries`: the texts to
    whose beginning an output can come from where no text is forced.
    """

    states: bytes
    texts: bytes
    ends: bytes
    heads: bytes
    rests: bytes
    entries: bytes


class CheckedPlace(msgspec.Struct, frozen=True, array_like=True):
    """A place in a JSON value, as far as an automaton cannot hold it: see `JsonChecks`.

    `distinct`: no two members of an object here have the same name. `unique`: no two items of an array
    here are equal. Then the numbers of the places inside: of a member by its name, of members of
    other names (`others`), of the first items, and of those behind them (`rest`); -1: nothing is
    checked there.
    """

    distinct: bool = False
    unique: bool = False
    names: dict[str, int] = {}
    others: int = -1
    items: tuple[int, ...] = ()
    rest: int = -1

    def moved(self, by: int) -> "CheckedPlace":
        """This place in a list where all numbers are greater by `by`."""

        def number(place: int) -> int:
            return place + by if place >= 0 else -1

        return CheckedPlace(
            self.distinct,
            self.unique,
            {name: number(place) for name, place in self.names.items()},
            number(self.others),
            tuple(map(number, self.items)),
            number(self.rest),
        )


class JsonChecks(msgspec.Struct, frozen=True, array_like=True):
    """Checks of JSON in outputs against what the same output has written before.

    `places`: all checked places; empty: no checks. `begins`: states at which an array or object begins
    that is inside no other one, each with its place. `begun`: where a value was begun before the output,
    its place and its text so far; -1: there is none.
    """

    places: tuple[CheckedPlace, ...] = ()
    begins: tuple[tuple[int, int], ...] = ()
    begun: tuple[int, bytes] = (-1, b"")


UNCHECKED = JsonChecks()


class Layout(NamedTuple):
    """How states inside a value that no schema describes are numbered.

    An automaton has n states, and the end is n. From n + 1 on, the states of such values follow: n + 1 +
    (stack << `shift`) + (number of the return << `bits`) + inner state. The return is the state behind
    the value. The stack has a leading 1, then a bit for each open array or object inside another one,
    the innermost last: 1 for an array, 0 for an object.

    `returns`, `inner`: their numbers; `returns` is 0 where there are no such values. `depth`: the most
    bits of a stack, and so the deepest nesting.
    """

    states: int
    returns: int = 0
    inner: int = 0
    bits: int = 0
    shift: int = 0
    depth: int = 0

    @classmethod
    def of(cls, states: int, returns: int, inner: int) -> "Layout":
        """The layout with the greatest depth for which there are numbers."""
        bits = (inner - 1).bit_length()
        shift = bits + (returns - 1).bit_length()
        room = (_STATES - states - 1) >> shift
        return cls(states, returns, inner, bits, shift, room.bit_length() - 1)

    def entry(self, number: int, inner: int) -> int:
        """The state of a value that begins, behind its opening bracket. `number`: of its return."""
        return self.states + 1 + (1 << self.shift) + (number << self.bits) + inner


class AutomatonBody(msgspec.Struct, frozen=True, array_like=True, tag="automaton"):
    """A byte automaton, as the words that a device reads. All numbers are int32, little-endian.

    `words`, in this order:

    - a header of `WORDS_HEADER` numbers: k classes of bytes, n states, r different rows, then the rest
      of the `Layout`;
    - the class of each of the 256 bytes;
    - for each state, for the end behind them, and for each inner state: 1 where an output may end;
    - for each of these: where its row of steps begins;
    - the steps [r, k], one for each class: 2 * d leads d states ahead (or back), 2 * s + 1 leads to
      state s, and `NO_STEP` leads nowhere. So counted texts have few rows but many states;
    - the returns.

    Inner states have two more kinds of steps. -1 - 2 * (bit + 2 * i) begins an array or object: the
    stack gets the bit, and the inner state is i. `POP_STEP` ends one: the last bit of the stack is taken
    off, and the inner state is 2 + that bit; behind the last bit, the state is the return.

    `packed`: `words` are compressed by zlib. `likely`: texts that are likely where there is a choice,
    with what ends them, likelier ones first. `checked`: how JSON in outputs is checked besides.
    """

    words: bytes
    packed: bool
    forced: ForcedTexts
    likely: tuple[bytes, ...] = ()
    checked: JsonChecks = UNCHECKED


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
