"""Grammars by llguidance: masks against a parser, and the same rules as automata."""

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from ramify.gpu.constraints import grammar as module
from ramify.gpu.constraints.grammar import Grammar, GrammarVocabulary
from ramify.gpu.constraints.matcher import Matcher
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.errors import ConstraintError

llguidance = pytest.importorskip("llguidance")

TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"enum": ["a", "bc", "né"]},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}
NESTED = r"""
start: "(" start ")" start | "" | "[quick brown]"
"""


@pytest.fixture(scope="module")
def shared(vocabulary: Vocabulary) -> GrammarVocabulary:
    return GrammarVocabulary(vocabulary)


def schema(shared: GrammarVocabulary, value: dict[str, Any]) -> Grammar:
    text = llguidance.LLMatcher.grammar_from_json_schema(value, overrides={"whitespace_flexible": False})
    return Grammar(shared, text)


def lark(shared: GrammarVocabulary, text: str) -> Grammar:
    return Grammar(shared, llguidance.LLMatcher.grammar_from_lark(text))


def legal(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    return [int(i) for i in np.flatnonzero(vocabulary.unpack(matcher.mask()))]


def text_of(vocabulary: Vocabulary, tokens: list[int]) -> str:
    return b"".join(vocabulary.tokens[i] for i in tokens).decode()


def balanced(text: str) -> bool:
    text = text.replace("[quick brown]", "")
    while "()" in text:
        text = text.replace("()", "")
    return not text


def sampled(grammar: Grammar, vocabulary: Vocabulary, seed: int, *, jump: bool) -> list[int] | None:
    """Tokens drawn by what was written so far; None if it did not end."""
    matcher = grammar.matcher()
    out: list[int] = []
    while len(out) < 150:
        if jump:
            for token in matcher.plan().forced:
                assert matcher.advance(token)
                out.append(token)
        allowed = legal(matcher, vocabulary)
        assert allowed
        rng = random.Random(f"{seed} {len(out)}")
        stops = [i for i in allowed if i in vocabulary.stop_ids]
        token = stops[0] if stops and rng.random() < 0.5 else rng.choice(allowed)
        assert matcher.advance(token)
        if matcher.has_ended():
            assert len(matcher) == len(out) + 1
            return out
        out.append(token)
    return None


def test_a_recursive_schema(shared: GrammarVocabulary, vocabulary: Vocabulary) -> None:
    grammar = schema(shared, TREE)
    ended = 0
    for seed in range(12):
        tokens = sampled(grammar, vocabulary, seed, jump=True)
        assert tokens == sampled(grammar, vocabulary, seed, jump=False)
        if tokens is not None:
            value = json.loads(text_of(vocabulary, tokens))
            assert set(value) <= {"name", "children"}
            assert value["name"] in ("a", "bc", "né")
            ended += 1
    assert ended > 3


def test_a_lark_grammar(shared: GrammarVocabulary, vocabulary: Vocabulary) -> None:
    grammar = lark(shared, NESTED)
    texts = set()
    for seed in range(20):
        tokens = sampled(grammar, vocabulary, seed, jump=True)
        assert tokens == sampled(grammar, vocabulary, seed, jump=False)
        if tokens is not None:
            texts.add(text_of(vocabulary, tokens))
    assert len(texts) > 3
    assert all(balanced(text) for text in texts)


def test_rollback_is_exact(shared: GrammarVocabulary, vocabulary: Vocabulary) -> None:
    grammar = schema(shared, TREE)
    rng = random.Random(5)
    matcher, masks, tokens = grammar.matcher(), [], list[int]()
    for _ in range(60):
        if tokens and rng.random() < 0.3:
            count = rng.randint(1, len(tokens))
            matcher.rollback(count)
            del tokens[-count:], masks[-count:]
        elif not matcher.has_ended():
            masks.append(matcher.mask().tobytes())
            matcher.plan()
            token = rng.choice(legal(matcher, vocabulary))
            assert matcher.advance(token)
            tokens.append(token)
        again = grammar.matcher()
        for token, mask in zip(tokens, masks, strict=True):
            assert again.mask().tobytes() == mask
            assert again.advance(token)
        assert again.mask().tobytes() == matcher.mask().tobytes()
        assert again.is_final() == matcher.is_final()
        assert len(matcher) == len(tokens)
    with pytest.raises(ValueError, match="take back"):
        matcher.rollback(len(tokens) + 1)


def test_forced_text_is_spelled_as_the_tokenizer_does(
    shared: GrammarVocabulary, vocabulary: Vocabulary
) -> None:
    matcher = lark(shared, 'start: "{\\"name\\": \\"the quick brown fox" /[0-9]/').matcher()
    plan = matcher.plan()
    assert len(matcher) == 0
    assert (*plan.forced, *plan.drafts) == tuple(vocabulary.encode('{"name": "the quick brown fox'))
    assert legal(matcher, vocabulary) == [plan.forced[0]]


def test_what_is_not_legal_changes_nothing(shared: GrammarVocabulary, vocabulary: Vocabulary) -> None:
    matcher = lark(shared, 'start: "ab" "c"?').matcher()
    before = matcher.mask().tobytes()
    for token in (*vocabulary.encode("x"), *vocabulary.stop_ids, -1, 10**6, vocabulary.size - 1):
        assert not matcher.advance(token)
    assert matcher.mask().tobytes() == before
    for token in vocabulary.encode("ab"):
        assert matcher.advance(token)
    assert matcher.is_final()
    assert set(legal(matcher, vocabulary)) >= set(vocabulary.stop_ids)
    assert matcher.advance(vocabulary.stop_ids[0])
    assert matcher.has_ended()
    assert not matcher.advance(vocabulary.encode("c")[0])
    assert legal(matcher, vocabulary) == list(vocabulary.stop_ids)
    matcher.rollback(1)
    assert not matcher.has_ended()


def test_control_tokens_are_never_legal(shared: GrammarVocabulary, vocabulary: Vocabulary) -> None:
    matcher = lark(shared, "start: /(.|\\n)*/").matcher()
    for i in legal(matcher, vocabulary):
        assert i in vocabulary.stop_ids or vocabulary.tokens[i]
    named = lark(shared, f"start: <[{vocabulary.stop_ids[0]}]> | /x/").matcher()
    assert set(legal(named, vocabulary)) == {
        i for i, data in enumerate(vocabulary.tokens) if re.fullmatch(b"x", data)
    }


def test_a_wrong_grammar(shared: GrammarVocabulary) -> None:
    with pytest.raises(ConstraintError, match="unknown name"):
        lark(shared, "start: other")


def test_without_llguidance(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "llguidance", None)
    with pytest.raises(ConstraintError, match="llguidance"):
        GrammarVocabulary(vocabulary)
