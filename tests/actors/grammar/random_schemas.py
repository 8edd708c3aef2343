"""Random schemas against jsonschema: what is served is valid, and something can be written.

Schemas combine the keywords of docs/schemas.md by chance. Each is compiled as the server does it, and
followed over a small vocabulary: every byte, and tokens that span what JSON keeps apart. Two things are
held against `jsonschema`:

    outputs     random ways through the masks (a temperature of 1), each token of the mask legal
    instances   changed outputs and random values, some with doubled names, spelled as constraints do

Not a test module: `test_route.py` tries a few, `benchmarks/random_schemas.py` thousands.
"""

import collections
import json
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import jsonschema
import numpy as np

from ramify.actors.grammar.compile import compile_constraint
from ramify.gpu.constraints.bodies import constraint_of
from ramify.gpu.constraints.byte_automaton import ENTER_CODE, POP_CODE
from ramify.gpu.constraints.checked import CheckedAutomaton, CheckedMatcher
from ramify.gpu.constraints.grammar import GrammarVocabulary
from ramify.gpu.constraints.matcher import (
    AutomatonConstraint,
    AutomatonMatcher,
    Matcher,
    OutputConstraint,
)
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.constraints import ConstraintSpec
from ramify.protocol.errors import ConstraintError

NAMES = ("a", "b", "ab", "c", "")
WORDS = ("", "a", "b", "ab", "aa", "x1", "Zoë", 'q"')
PATTERNS = ("^a", "b$", "^[ab]+$", "^x", "[0-9]", "^(a|b)$", "^[^b]{2}$")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
SPANS = (
    ', ', '", "', '": ', '": "', '"}', '"]', '}, {"', '], [', '["', '{"', '[1', '[1, 1', '1, ', '1, 1',
    '11', '12', '"a"', '"a', 'a"', 'a": ', '"a": 1', ', "a": 1', 'true, true', 'true', 'false', 'null',
    '1]', '1}', '[]', '{}', '{}, {}', '[[', ']]', '}}', 'ab', 'ab"', '"ab", "', '.5', '-1', '0, 0',
    'b", "b',
)  # fmt: skip
MOST_TOKENS = 400
FAULTS = ("invalid written", "invalid accepted", "nothing written", "stuck", "refused in its mask")


# ---- what is drawn ----


class Draw:
    """Random schemas and values."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def schema(self) -> Any:
        rng = self._rng
        whole = self._schema(3)
        if isinstance(whole, dict) and rng.random() < 0.3:
            whole["$defs"] = {"d": self._schema(1), "e": self._schema(1)}
        elif "#/$defs/" in json.dumps(whole):
            whole["$defs"] = {"d": self._schema(0), "e": self._schema(0)}
        return whole

    def _schema(self, depth: int) -> Any:
        rng = self._rng
        if rng.random() < 0.04:
            return rng.choice((True, False, {}))
        if depth and rng.random() < 0.05:
            return {"$ref": rng.choice(("#/$defs/d", "#/$defs/e"))}
        found: dict[str, Any] = {}
        kinds = rng.sample(TYPES if depth else TYPES[:5], rng.choice((1, 1, 1, 1, 2)))
        if rng.random() < 0.85:
            found["type"] = kinds[0] if len(kinds) == 1 else kinds
        if rng.random() < 0.12:
            found["enum"] = [self.value(1) for _ in range(rng.randint(1, 5))]
        elif rng.random() < 0.04:
            found["const"] = self.value(1)
        for kind in kinds:
            getattr(self, f"_{kind}", lambda *_: None)(found, depth)
        if depth and rng.random() < 0.3:
            self._combined(found, depth - 1)
        keys = list(found)
        rng.shuffle(keys)
        return {key: found[key] for key in keys}

    def _some(self, found: dict[str, Any], **keywords: Any) -> None:
        for name, (chance, make) in keywords.items():
            if self._rng.random() < chance:
                found[name] = make()

    def _number(self, found: dict[str, Any], _: int) -> None:
        rng = self._rng
        self._some(
            found,
            minimum=(0.3, lambda: rng.choice((-3, 0, 1, 0.5))),
            maximum=(0.3, lambda: rng.choice((2, 5, 11, 2.5))),
            exclusiveMinimum=(0.1, lambda: rng.choice((-2, 0))),
            exclusiveMaximum=(0.1, lambda: rng.choice((4, 3.5))),
            multipleOf=(0.15, lambda: rng.choice((2, 3, 0.5, 0.25))),
        )

    _integer = _number

    def _string(self, found: dict[str, Any], _: int) -> None:
        rng = self._rng
        self._some(
            found,
            minLength=(0.2, lambda: rng.randint(0, 2)),
            maxLength=(0.25, lambda: rng.randint(1, 4)),
            pattern=(0.2, lambda: rng.choice(PATTERNS)),
            format=(0.05, lambda: rng.choice(("date", "uuid", "ipv4", "unknown"))),
        )

    def _array(self, found: dict[str, Any], depth: int) -> None:
        rng = self._rng
        self._some(
            found,
            items=(0.75, lambda: self._schema(depth - 1)),
            prefixItems=(0.15, lambda: [self._schema(depth - 1) for _ in range(rng.randint(1, 2))]),
            minItems=(0.3, lambda: rng.randint(0, 3)),
            maxItems=(0.3, lambda: rng.randint(1, 4)),
            uniqueItems=(0.45, lambda: rng.random() < 0.9),
            contains=(0.12, lambda: self._schema(0)),
        )
        if "contains" in found:
            self._some(found, minContains=(0.2, lambda: rng.randint(0, 2)), maxContains=(0.1, lambda: 2))

    def _object(self, found: dict[str, Any], depth: int) -> None:
        rng = self._rng

        def names(most: int) -> list[str]:
            return rng.sample(NAMES, rng.randint(1, most))

        def inner() -> Any:
            return self._schema(depth - 1)

        self._some(
            found,
            properties=(0.7, lambda: {name: inner() for name in names(3)}),
            required=(0.4, lambda: names(2)),
            additionalProperties=(0.5, lambda: rng.choice((False, False, True, inner()))),
            patternProperties=(0.25, lambda: {rng.choice(PATTERNS): inner()}),
            propertyNames=(0.15, lambda: self._names_of()),
            minProperties=(0.35, lambda: rng.randint(0, 4)),
            maxProperties=(0.25, lambda: rng.randint(1, 4)),
            dependentRequired=(0.08, lambda: {name: names(2) for name in names(1)}),
            dependentSchemas=(0.05, lambda: {name: inner() for name in names(1)}),
        )
        if "additionalProperties" not in found and rng.random() < 0.05:
            found["unevaluatedProperties"] = rng.choice((False, inner()))

    def _names_of(self) -> Any:
        rng = self._rng
        ways = ({"pattern": rng.choice(PATTERNS)}, {"maxLength": 2}, {"enum": list(NAMES[:3])})
        return rng.choice(ways)

    def _combined(self, found: dict[str, Any], depth: int) -> None:
        rng = self._rng
        key = rng.choice(("anyOf", "anyOf", "allOf", "oneOf", "not", "if"))
        if key == "not":
            found[key] = self._schema(min(depth, 1))
        elif key == "if":
            found |= {key: self._schema(0), "then": self._schema(depth), "else": self._schema(depth)}
        else:
            found[key] = [self._schema(depth) for _ in range(rng.randint(1, 3))]

    def value(self, depth: int) -> Any:
        rng = self._rng
        kind = rng.choice(TYPES if depth else TYPES[:5])
        match kind:
            case "null":
                return None
            case "boolean":
                return rng.random() < 0.5
            case "integer":
                return rng.choice((-1, 0, 1, 2, 3, 4, 6, 11, 12))
            case "number":
                return rng.choice((0.5, 1.0, 1.5, -2.25, 2.0, 0.75))
            case "string":
                return rng.choice(WORDS)
            case "array":
                return [self.value(depth - 1) for _ in range(rng.choice((0, 1, 2, 2, 3, 4)))]
        return {name: self.value(depth - 1) for name in rng.sample(NAMES, rng.randint(0, 4))}

    def changed(self, value: Any) -> Any:
        """`value` with a change somewhere."""
        rng = self._rng
        if isinstance(value, list) and value and rng.random() < 0.85:
            found = list(value)
            at = rng.randrange(len(found))
            match rng.randrange(4):
                case 0:
                    del found[at]
                case 1:
                    found.insert(rng.randint(0, len(found)), found[at])
                case 2:
                    found.append(self.value(1))
                case _:
                    found[at] = self.changed(found[at])
            return found
        if isinstance(value, dict) and value and rng.random() < 0.85:
            name = rng.choice(list(value))
            match rng.randrange(3):
                case 0:
                    return {key: inner for key, inner in value.items() if key != name}
                case 1:
                    return {**value, rng.choice(NAMES): self.value(1)}
            return {**value, name: self.changed(value[name])}
        if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.6:
            return value + rng.choice((-1, 1))
        return self.value(1)

    def text(self, value: Any, doubling: float) -> str:
        """`value` as JSON; with that chance, each object has a name twice."""
        if isinstance(value, list):
            return f"[{', '.join(self.text(inner, doubling) for inner in value)}]"
        if not isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False)
        members = [(name, inner) for name, inner in value.items()]
        if members and self._rng.random() < doubling:
            name, inner = self._rng.choice(members)
            members.insert(self._rng.randint(0, len(members)), (name, inner))
        spelled = (
            f"{json.dumps(name, ensure_ascii=False)}: {self.text(inner, doubling)}"
            for name, inner in members
        )
        return f"{{{', '.join(spelled)}}}"


# ---- what is held against it ----


@cache
def vocabulary() -> Vocabulary:
    tokens = [*(bytes((i,)) for i in range(256)), *(text.encode() for text in SPANS), b""]
    return Vocabulary(tokens, [len(tokens) - 1], lambda text: list(text.encode()))


@cache
def grammars() -> GrammarVocabulary:
    return GrammarVocabulary(vocabulary())


def takes(constraint: OutputConstraint, data: bytes) -> bool:
    """Whether an output may be `data`."""
    matcher = constraint.matcher()
    return all(map(matcher.advance, data)) and matcher.is_final()


def legal(matcher: Matcher) -> list[int]:
    found: list[int] = np.flatnonzero(vocabulary().unpack(matcher.mask())).tolist()
    return found


Distance = Callable[[int], int]


def distances(constraint: OutputConstraint) -> Distance | None:
    """How many bytes are missing to an end from a state of an automaton."""
    if not isinstance(constraint, AutomatonConstraint | CheckedAutomaton):
        return None
    automaton = constraint.machine.automaton
    layout = automaton.layout
    returns = np.zeros(0, np.int64) if automaton.nesting is None else automaton.nesting.returns
    inside = layout.states + 1  # of inner states, as if they were the only ones
    edges, costs = automaton.table.astype(np.int64), np.ones(automaton.table.shape, np.int64)
    begun, entered = -2 - edges, ENTER_CODE - edges
    entering, popping = edges <= ENTER_CODE, edges == POP_CODE
    pushing = (edges < -1) & ~entering & ~popping
    size = layout.states + layout.inner
    if len(returns):
        edges[entering] = returns[entered[entering] >> 1]
    edges[pushing] = layout.states + 2 + (begun[pushing] & 1)
    costs[entering | pushing] = 2  # it ends at once
    edges[popping] = size
    edges[edges < 0] = size + 1
    far = np.append(np.where(automaton.final, 0, 1 << 30), np.full(layout.inner, 1 << 30))
    while True:
        nearer = np.minimum(far, (np.append(far, (0, 1 << 30))[edges] + costs).min(axis=1))
        if (nearer == far).all():
            break
        far = nearer
    known = far.tolist()

    def distance(state: int) -> int:
        if state < inside:
            return known[state] if state < layout.states else 0
        inner = (state - inside) & (1 << layout.bits) - 1
        number = (state - inside & (1 << layout.shift) - 1) >> layout.bits
        open_around = (state - inside >> layout.shift).bit_length() - 1
        return known[layout.states + inner] + open_around + known[int(returns[number])]

    return distance


def nearest(matcher: Matcher, tokens: list[int], far: Distance | None) -> int:
    """The token behind which an output is soonest at its end; of a grammar a closing one."""
    if far is None:
        ends = b'"]}0ba'
        return next((end for end in ends if end in tokens), tokens[0])

    def distance(token: int) -> int:
        if not matcher.advance(token):
            return 1 << 31
        assert isinstance(matcher, AutomatonMatcher | CheckedMatcher)
        found = far(matcher.state)
        matcher.rollback(1)
        return found

    return min(tokens, key=distance)


def written(constraint: OutputConstraint, far: Distance | None, rng: random.Random) -> tuple[bytes, str]:
    """A random output, and how it ended. It is led to an end when it gets long. `far`: `distances`."""
    matcher, found = constraint.matcher(), bytearray()
    (stop,) = vocabulary().stop_ids
    for count in range(MOST_TOKENS):
        if count % 16 == 15:  # as a draft that is refused
            mask = matcher.mask().copy()
            draft = rng.choice(legal(matcher) or [stop])
            matcher.rollback(int(matcher.advance(draft)))
            assert (matcher.mask() == mask).all()
        tokens = legal(matcher)
        if not tokens:
            return bytes(found), "stuck"
        token = rng.choice(tokens)
        if stop in tokens and rng.random() < 0.4:
            token = stop
        elif count > 40:
            if rng.random() < 0.9:
                token = stop if stop in tokens else nearest(matcher, tokens, far)
        elif any(ord('"') == each for each in tokens) and rng.random() < 0.3:
            token = ord('"')
        if not matcher.advance(token):
            return bytes(found), "refused in its mask"
        if token == stop:
            return bytes(found), "ended"
        found += vocabulary().tokens[token]
    return bytes(found), "long"


def doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is doubled")
    return found


def has_doubled(text: str) -> bool:
    try:
        json.loads(text, object_pairs_hook=doubles)
    except ValueError:
        return True
    return False


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Of the processor's time. Raises TimeoutError."""

    def late(_: int, __: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class SchemaCampaign:
    """Counts, and the first examples of what must not be."""

    def __init__(self, show: int) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._show = show

    def wrong(self, kind: str, seed: int, schema: Any, text: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= self._show:
            print(f"{kind}: seed {seed}\n  {json.dumps(schema)}\n  {text}", flush=True)

    def one(self, seed: int) -> None:
        """The schema of `seed`."""
        rng = random.Random(seed)
        draw, counts = Draw(rng), self.counts
        schema = draw.schema()
        counts["schemas"] += 1
        spec = ConstraintSpec("json_schema", json.dumps(schema), True)
        try:
            with limit(15):
                ready = compile_constraint(spec)
        except ConstraintError:
            counts["refused"] += 1
            return
        except TimeoutError:
            counts["slow"] += 1
            return
        constraint = constraint_of(ready.body, vocabulary(), grammars)
        counts[f"served: {type(constraint).__name__}"] += 1
        validator = jsonschema.Draft202012Validator(schema)
        values = self._outputs(seed, schema, constraint, validator, rng)
        for number in range(24):
            if values and number % 3:
                value = draw.changed(rng.choice(values))
            else:
                value = draw.value(2)
            text = draw.text(value, 0.3 if number % 2 else 0.0)
            self._instance(seed, schema, constraint, validator, text)

    def _outputs(
        self, seed: int, schema: Any, constraint: OutputConstraint, validator: Any, rng: random.Random
    ) -> list[Any]:
        values, far = [], distances(constraint)
        for _ in range(6):
            try:
                data, how = written(constraint, far, rng)
            except ConstraintError as error:  # a grammar past its limits, or at a dead end
                data, how = str(error).encode(), "stuck"
            self.counts[f"outputs: {how}"] += 1
            if how in ("stuck", "refused in its mask"):
                self.wrong(how, seed, schema, repr(data))
            if how != "ended":
                continue
            text = data.decode()
            value = json.loads(text)
            self.counts["doubled names"] += has_doubled(text)
            if not validator.is_valid(value):
                self.wrong("invalid written", seed, schema, text)
            values.append(value)
        if not values:
            self.wrong("nothing written", seed, schema, "")
        return values

    def _instance(
        self, seed: int, schema: Any, constraint: OutputConstraint, validator: Any, text: str
    ) -> None:
        taken = takes(constraint, text.encode())
        if validator.is_valid(json.loads(text)):
            if not has_doubled(text):
                self.counts["valid instances"] += 1
                self.counts["valid accepted"] += taken
            return
        self.counts["invalid instances"] += 1
        if taken:
            self.wrong("invalid accepted", seed, schema, text)
