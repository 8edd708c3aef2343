"""Masks and advance over real tokenizers, against Python's `re`."""

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.compile import compile_constraint
from ramify.actors.grammar.structure import structure_automaton
from ramify.gpu.constraints.bodies import constraint_of
from ramify.gpu.constraints.grammar import GrammarVocabulary
from ramify.gpu.constraints.masks import MaskStore
from ramify.gpu.constraints.matcher import AutomatonConstraint as Rule
from ramify.gpu.constraints.token_automaton import TokenAutomaton
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.constraints import ConstraintSpec
from ramify.protocol.errors import ConstraintError
from ramify.protocol.structure import RegexPart, Structure, StructureTag, TagsPart, TextPart
from tests.gpu.constraints.conftest import byte_level
from tests.gpu.constraints.machines import machine_of

STRING = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])*"'
PATTERNS = {
    "(no|none)": ["no", "none"],
    r"\[(?:1|12)\]": ["[1]", "[12]"],
    r"-?(?:0|[1-9]\d*)|-?(?:0|[1-9]\d*)\.\d+": ["1", "-12.5", "0.25"],
    rf'\{{"name":{STRING},"ok":(true|false)\}}': [
        '{"name":"Zoë 中国 \\" x","ok":true}',
        '{"name":"","ok":false}',
    ],
    "(?s:.*)": ["", "any text\n😀"],
    "😀+": ["😀", "😀😀"],
}


def compiled(pattern: str, vocabulary: Vocabulary) -> TokenAutomaton:
    a = Automaton.from_regex(pattern)
    return machine_of(vocabulary, a)


def legal(machine: TokenAutomaton, state: int) -> set[int]:
    return set(np.flatnonzero(machine.vocabulary.unpack(machine.mask(state))).tolist())


def can_be_spelled(machine: TokenAutomaton, data: bytes) -> bool:
    """Whether some tokens that the masks allow spell `data` and then stop."""
    tokens, stops = machine.vocabulary.tokens, set(machine.vocabulary.stop_ids)
    reached = {0: {machine.start}}  # by position
    for at in range(len(data) + 1):
        for state in reached.get(at, ()):
            allowed = legal(machine, state)
            if at == len(data) and allowed & stops:
                return True
            for token in allowed - stops:
                if data.startswith(tokens[token], at):
                    target = machine.advance(state, token)
                    assert target >= 0
                    reached.setdefault(at + len(tokens[token]), set()).add(target)
    return False


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_text_can_be_spelled(pattern: str, vocabulary: Vocabulary) -> None:
    machine = compiled(pattern, vocabulary)
    for text in PATTERNS[pattern]:
        assert can_be_spelled(machine, text.encode()), text
    assert not can_be_spelled(machine, b"\xff")


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ('{"enum": [1, 12]}', ["1", "12"]),
        ('{"anyOf": [{"type": "integer"}, {"type": "number"}]}', ["1", "-12", "0.5", "-3.25"]),
        ('{"oneOf": [{"const": "no"}, {"const": "none"}]}', ['"no"', '"none"']),
    ],
)
def test_every_alternative_of_a_schema_can_be_spelled(
    schema: str, texts: list[str], vocabulary: Vocabulary
) -> None:
    body = compile_constraint(ConstraintSpec("json_schema", schema, True)).body
    rule = constraint_of(body, vocabulary, lambda: GrammarVocabulary(vocabulary))
    assert isinstance(rule, Rule)
    for text in texts:
        assert can_be_spelled(rule.machine, text.encode()), text


ATOMS = st.sampled_from(
    ["a", "b", "n", "1", ".", "[ab]", "[^a]", r"\d", r"\w", "é", " ", "no", "name", '"']
)


def regexes() -> st.SearchStrategy[str]:
    return st.recursive(
        ATOMS,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda p: f"(?:{p[0]}|{p[1]})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}"])).map(
                lambda p: f"(?:{p[0]}){p[1]}"
            ),
        ),
        max_leaves=6,
    )


@settings(max_examples=60, deadline=None)
@given(regexes(), st.lists(st.text('abn1é "', max_size=6), max_size=8))
def test_what_masks_accept_is_what_re_matches(
    vocabulary: Vocabulary, pattern: str, texts: list[str]
) -> None:
    machine = compiled(pattern, vocabulary)
    expected = re.compile(pattern, re.ASCII)
    for text in texts:
        assert can_be_spelled(machine, text.encode()) == (expected.fullmatch(text) is not None), text


@settings(max_examples=60, deadline=None)
@given(regexes(), st.integers(0, 2**32))
def test_what_is_sampled_under_masks_matches(vocabulary: Vocabulary, pattern: str, seed: int) -> None:
    machine = compiled(pattern, vocabulary)
    rng = random.Random(seed)
    stops = set(vocabulary.stop_ids)
    state, out = machine.start, []
    for _ in range(40):
        allowed = legal(machine, state)
        assert allowed, "a state without a legal token"
        token = (
            min(allowed & stops)
            if allowed & stops and rng.random() < 0.3
            else rng.choice(sorted(allowed))
        )
        state = machine.advance(state, token)
        assert state >= 0
        if token in stops:
            break
        out.append(token)
    else:
        return
    text = b"".join(vocabulary.tokens[i] for i in out).decode()
    assert re.fullmatch(pattern, text, re.ASCII) is not None
    assert state == machine.end
    assert legal(machine, state) == stops


def test_control_tokens_and_padding_are_never_legal(vocabulary: Vocabulary) -> None:
    machine = compiled("(?s:.*)", vocabulary)
    no_text = {i for i in range(vocabulary.size) if not vocabulary.is_text(i)}
    assert set(vocabulary.stop_ids) < no_text
    assert legal(machine, 0) & no_text == set(vocabulary.stop_ids)
    for i in no_text - set(vocabulary.stop_ids) | {-1, 10**6}:
        assert machine.advance(0, i) == -1


def test_stop_ids_are_legal_in_final_states_only(vocabulary: Vocabulary) -> None:
    machine = compiled("ab?", vocabulary)
    stops = set(vocabulary.stop_ids)
    assert not legal(machine, 0) & stops
    assert machine.advance(0, min(stops)) == -1
    (token,) = vocabulary.encode("a")
    behind = machine.advance(0, token)
    assert machine.is_final(behind)
    assert not machine.is_final(0)
    assert legal(machine, behind) >= stops
    assert machine.advance(behind, min(stops)) == machine.end
    assert machine.advance(machine.end, token) == -1


def test_masks_are_kept_and_equal_ones_kept_once(vocabulary: Vocabulary) -> None:
    machine = compiled("[ab]{80}c", vocabulary)
    states = [machine.advance(0, vocabulary.encode("a")[0])]
    for _ in range(5):
        states.append(machine.advance(states[-1], vocabulary.encode("b")[0]))
    assert len(set(states)) == 6
    assert machine.mask(states[0]) is machine.mask(states[0])
    assert machine.mask(states[0]) is machine.mask(states[4])
    with pytest.raises(ValueError, match="read-only"):
        machine.mask(states[0])[0] = 1


def test_masks_are_forgotten_when_they_grow(vocabulary: Vocabulary) -> None:
    store = MaskStore(4 * vocabulary.words * 6)
    a = Automaton.from_regex("abc|de|(f|g){5}x?y?z?")
    machine = machine_of(vocabulary, a, store)
    before = [machine.mask(state).tobytes() for state in range(machine.end + 1)]
    assert [machine.mask(state).tobytes() for state in range(machine.end + 1)] == before
    assert 0 < store.bytes <= 4 * vocabulary.words * 6
    assert store.dropped > 0
    machine.close()
    assert store.bytes == 0


@pytest.mark.parametrize("pattern", [*PATTERNS, "x", "(ab|cd)e?"])
def test_the_only_token_is_the_one_of_the_mask(pattern: str, vocabulary: Vocabulary) -> None:
    machine = compiled(pattern, vocabulary)
    for state in range(machine.end + 1):
        allowed = legal(machine, state)
        assert machine.only(state) == (min(allowed) if len(allowed) == 1 else -1)


def test_what_is_known_without_work(vocabulary: Vocabulary) -> None:
    machine = compiled("name[ab]{3}", vocabulary)
    assert machine.knows(0)  # of a small vocabulary all is made quickly
    machine._quick = False
    assert [machine.knows(0), machine.knows(machine.end)] == [False, True]
    machine.plan(0)
    assert not machine.knows(0)
    machine.only(0)
    assert machine.knows(0)
    free = machine.advance(0, machine.plan(0).forced[0])
    for token in machine.plan(0).forced[1:]:
        free = machine.advance(free, token)
    assert not machine.knows(free)
    machine.mask(free)
    machine.only(free)
    assert machine.knows(free)


def test_a_vocabulary_that_cannot_spell_the_constraint() -> None:
    small = Vocabulary([b"a", b"b", b""], [2], lambda text: [])
    with pytest.raises(ConstraintError, match="0x63"):
        compiled("abc", small)
    assert compiled("[ab]*", small).mask(0)[0] == 0b111


def test_free_text_needs_no_mask_and_marks_are_tokens() -> None:
    """Free text is every id; a trigger is a token or spelled; what closes a tag must be the token."""
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer.words[0], tokenizer.eos_ids, tokenizer.encode, size=450)
    tags = TagsPart([StructureTag("<tool_call>", RegexPart('"(a|b)"'), "\n<tool_call>")])
    automaton, *_ = structure_automaton(Structure(tags, ["<tool_call>"]))
    machine = machine_of(vocabulary, automaton)
    assert machine.mask(0) is vocabulary.everything
    (mark,) = (i for i, data in enumerate(vocabulary.tokens) if data == b"\xff<tool_call>\xfe")
    for token in (*vocabulary.encode("well <tool"), 449, mark - 2):
        assert machine.mask(machine.advance(0, token)) is vocabulary.everything
    inside = machine.advance(0, mark)
    state = 0
    for byte in b"<tool_call>":  # spelled
        (token,) = vocabulary.encode(chr(byte))
        state = machine.advance(state, token)
    assert legal(machine, inside) == legal(machine, state) != set(range(450))
    for text in ('"', "a", '"'):
        (token,) = vocabulary.encode(text)
        inside = machine.advance(inside, token)
    plan = machine.plan(inside)
    assert [vocabulary.tokens[i] for i in plan.forced] == [b"\n", b"\xff<tool_call>\xfe"]
    for token in plan.forced:
        assert legal(machine, inside) == {token}
        inside = machine.advance(inside, token)
    assert machine.mask(inside) is vocabulary.everything


def test_a_mark_that_the_model_has_not_is_refused() -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer.words[0], tokenizer.eos_ids, tokenizer.encode)
    automaton, *_ = structure_automaton(Structure(TextPart("<mark>"), ["<mark>"]))
    with pytest.raises(ConstraintError, match="no token for a mark"):
        machine_of(vocabulary, automaton)
