"""The way of an output through an automaton, back and forth."""

import pytest

from ramify.actors.grammar.automaton import Automaton as Bytes
from ramify.gpu.constraints.matcher import AutomatonConstraint, OutputConstraint
from ramify.gpu.constraints.vocabulary import Vocabulary
from tests.gpu.constraints.machines import machine_of


def constraint(pattern: str, vocabulary: Vocabulary) -> AutomatonConstraint:
    a = Bytes.from_regex(pattern)
    return AutomatonConstraint(machine_of(vocabulary, a))


def test_forward_and_back(vocabulary: Vocabulary) -> None:
    shared: OutputConstraint = constraint("name(?:s|[0-9]{3})", vocabulary)
    one, other = shared.matcher(), shared.matcher()
    masks = []
    tokens = [*vocabulary.encode("name"), *(vocabulary.encode(digit)[0] for digit in "123")]
    for token in tokens:
        masks.append(one.mask())
        assert one.advance(token)
    assert len(one) == len(tokens)
    assert one.is_final()
    assert not one.advance(tokens[-1])
    assert one.advance(vocabulary.stop_ids[0])
    assert one.has_ended()
    one.rollback(1)
    assert not one.has_ended()
    for mask in reversed(masks):
        one.rollback(1)
        assert one.mask() is mask
    assert len(one) == len(other) == 0
    assert one.plan() == other.plan()
    with pytest.raises(ValueError, match="take back"):
        one.rollback(1)
    with pytest.raises(ValueError, match="take back"):
        one.rollback(-1)
