"""Jump-forward: appending what is forced and sampling it token by token give the same output."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.grammar.automaton import Automaton
from ramify.gpu.constraints.forced import MOST_DRAFTS, MOST_FORCED
from ramify.gpu.constraints.token_automaton import TokenAutomaton
from ramify.gpu.constraints.vocabulary import Vocabulary
from tests.gpu.constraints.machines import machine_of

STRING = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]){0,30}"'
HOUSE = '"(?:Gryffindor|Slytherin)"'
CHARACTER = rf'\{{"name":{STRING},"age":[1-9]\d?,"house":{HOUSE},"tags":\[(?:{STRING},?)*\]\}}'
PATTERNS = [
    CHARACTER,
    "the quick (?:brown|black) fox",
    "(?:é|è)中国 😀x",
    "(?:abc){3}d?",
    "[a-c]{4}-item",
    "no(?:ne)?",
]

Chooser = Callable[[list[int], list[int]], int]  # (tokens so far, legal ones) -> one of them


def compiled(pattern: str, vocabulary: Vocabulary) -> TokenAutomaton:
    a = Automaton.from_regex(pattern)
    return machine_of(vocabulary, a)


def toy_model(seed: int, temperature: float) -> Chooser:
    """Logits and draws that depend on the whole text so far and on the position."""

    def choose(text: list[int], legal: list[int]) -> int:
        logits = [random.Random(f"{seed} {text[-3:]} {token}").gauss(0, 1) for token in legal]
        if not temperature:
            return legal[int(np.argmax(logits))]
        weights = np.exp(np.array(logits) / temperature)
        return random.Random(f"{seed} {len(text)}").choices(legal, weights.tolist())[0]

    return choose


def generate(
    machine: TokenAutomaton, choose: Chooser, *, jump: bool, most: int = 60
) -> tuple[list[int], int]:
    """The output, and how often the model was asked. Drafts are verified as a scheduler would."""
    out: list[int] = []
    state, asked = machine.start, 0
    while len(out) < most:
        drafts: tuple[int, ...] = ()
        if jump:
            plan = machine.plan(state)
            for token in plan.forced[: most - len(out)]:
                state = machine.advance(state, token)
                assert state >= 0
                out.append(token)
            drafts = plan.drafts
            if len(out) >= most:
                break
        asked += 1
        for draft in (*drafts, None):
            legal = np.flatnonzero(machine.vocabulary.unpack(machine.mask(state))).tolist()
            token = choose(out, legal)
            state = machine.advance(state, token)
            assert state >= 0
            out.append(token)
            if state == machine.end or token != draft or len(out) >= most:
                break
        if state == machine.end:
            break
    return out, asked


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_jump_on_is_jump_off(pattern: str, temperature: float, vocabulary: Vocabulary) -> None:
    machine = compiled(pattern, vocabulary)
    saved = 0
    for seed in range(10):
        model = toy_model(seed, temperature)
        on, asked_on = generate(machine, model, jump=True)
        off, asked_off = generate(machine, model, jump=False)
        assert on == off
        saved += asked_off - asked_on
    assert saved > 0 or pattern.startswith("no")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(["name", '":"', "[ab]", "é", "中", "😀", "a?", "\\d", " the", "no", '"}, {"']),
        max_size=8,
    ),
    st.integers(0, 10**6),
)
def test_jump_on_is_jump_off_for_any_pattern(
    vocabulary: Vocabulary, parts: list[str], seed: int
) -> None:
    machine = compiled("".join(part.replace("{", r"\{") for part in parts), vocabulary)
    model = toy_model(seed, 1.0)
    assert generate(machine, model, jump=True)[0] == generate(machine, model, jump=False)[0]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_agree_with_plans_token_by_token(pattern: str, vocabulary: Vocabulary) -> None:
    machine = compiled(pattern, vocabulary)
    for state in range(machine.end + 1):
        plan = machine.plan(state)
        assert len(plan.forced) <= MOST_FORCED
        assert len(plan.drafts) <= MOST_DRAFTS
        at = state
        for token in plan.forced:
            assert np.flatnonzero(vocabulary.unpack(machine.mask(at))).tolist() == [token]
            at = machine.advance(at, token)
        for token in plan.drafts:
            at = machine.advance(at, token)
            assert at >= 0


def test_the_spelling_is_the_tokenizers(vocabulary: Vocabulary) -> None:
    text = '{"name": "Zoë", "tags": ["a", "b"]}'
    machine = compiled("".join("\\" + c if c in '{}[]."' else c for c in text) + "(?:X|Y)", vocabulary)
    plan = machine.plan(0)
    assert (*plan.forced, *plan.drafts) == tuple(vocabulary.encode(text))


def test_a_text_is_spelled_once_for_all_states_and_constraints(vocabulary: Vocabulary) -> None:
    """What follows it is looked at in each: here a token may span the border, or none."""
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return vocabulary.encode(text)

    own = Vocabulary(vocabulary.tokens, vocabulary.stop_ids, encode)
    text = '{"name": "'
    for pattern in (r'\{"name": "[ -~]', r'\{"name": "\n', r'[xy]\{"name": "[a-z]'):
        machine, fresh = compiled(pattern, own), compiled(pattern, vocabulary)
        for state in range(machine.end):
            vocabulary.spelled.cache_clear()
            assert machine.plan(state) == fresh.plan(state)
    assert sorted(asked) == sorted(set(asked))
    assert asked.count(text) == 1


def test_a_border_that_a_token_may_span_is_not_forced() -> None:
    tokens = [b'"', b"a", b"b", b'"a', b":", b'":', b'":"', b""]
    spellings = {'":"': [6], '"': [0], ':"': [4, 0], '"a': [3]}
    vocabulary = Vocabulary(tokens, [7], lambda text: spellings.get(text, []))
    assert compiled('":"a', vocabulary).plan(0).forced == ()  # no spelling of the whole is known
    may_span = compiled('":"[ab]', vocabulary)
    assert may_span.plan(0) == ((), (6,))  # "a may follow ":
    sure = compiled('":"b?', vocabulary)
    assert sure.plan(0) == ((6,), ())


def test_a_normal_form_that_the_tokenizer_does_not_keep() -> None:
    vocabulary = Vocabulary([b"e", b"\xcc", b"\x81", b"\xc3", b"\xa9", b""], [5], lambda text: [3, 4])
    machine = compiled("e\u0301", vocabulary)
    assert machine.plan(0) == ((), ())
    assert vocabulary.unpack(machine.mask(0)).tolist() == [True, False, False, False, False, False]


def test_long_forced_texts_come_in_parts(vocabulary: Vocabulary) -> None:
    machine = compiled("x1y2" * 200, vocabulary)
    state, count = 0, 0
    while not machine.is_final(state):
        forced = machine.plan(state).forced
        assert 0 < len(forced) <= MOST_FORCED
        for token in forced:
            state = machine.advance(state, token)
        count += 1
    assert count > 2


def reached(machine: TokenAutomaton) -> set[int]:
    """All states in which an output can stand: from the start over what masks allow."""
    found, todo = {machine.start}, [machine.start]
    for state in todo:  # grows
        for token in np.flatnonzero(machine.vocabulary.unpack(machine.mask(state))).tolist():
            target = machine.advance(state, token)
            if target not in found:
                found.add(target)
                todo.append(target)
    return found - {machine.end}


def check_tokens(pattern: str, vocabulary: Vocabulary) -> None:
    """`forced_tokens` says of all states that can be reached what is said of each, and nothing wrong."""
    machine, fresh = compiled(pattern, vocabulary), compiled(pattern, vocabulary)
    states, tokens = machine.forced_tokens()
    said = dict(zip(states.tolist(), tokens.tolist(), strict=True))
    assert len(said) == len(states)
    assert {state: fresh.forced_token(state) for state in said} == said
    lacking = reached(machine) - said.keys()
    assert all(fresh.forced_token(state) is None for state in lacking)


@pytest.mark.parametrize(
    "pattern",
    [
        *PATTERNS,
        r'\{"a":"(?:[a-f]|\\u00[0-9a-f]{2}){0,40}","a":"(?:[a-f]|\\u00[0-9a-f]{2}){3,9}x"\}',
        "(?:é|中)(?:国国|國)[xy]",
        "x{300}y?",
        "(?:xy){130}z|no",
    ],
)
def test_all_forced_tokens_at_once(pattern: str, vocabulary: Vocabulary) -> None:
    """With counts, parts of characters, and very long texts."""
    check_tokens(pattern, vocabulary)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.sampled_from(["ab", "na", "(a|b)", '"', "é", "中", "[ax]", "b?", "(ab){3}", "a{0,9}", '":"'])
    )
)
def test_all_forced_tokens_of_any_pattern(vocabulary: Vocabulary, parts: list[str]) -> None:
    check_tokens("".join(parts), vocabulary)


def test_few_states_of_forced_text_are_spelled(vocabulary: Vocabulary) -> None:
    """A text is spelled where a token of what is before it can end, and where its own tokens end."""
    machine = compiled('(x|y)"value":"(?:[ab]{9}z)?"', vocabulary)
    states, _ = machine.forced_tokens()
    assert 1 < len(states) < len(machine.forced_states())
