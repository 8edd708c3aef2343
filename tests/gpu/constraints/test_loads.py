"""What plans bring. Whole constraints: `session/test_constraints.py`, `e2e/test_constrained.py`."""

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from ramify.actors.grammar.compile import compile_constraint
from ramify.gpu.constraints.loads import Loads
from ramify.gpu.constraints.matcher import OutputConstraint
from ramify.protocol.constraints import ConstraintSpec, VocabularyBody
from ramify.protocol.errors import ConstraintError

BODY = compile_constraint(ConstraintSpec("regex", "ab?")).body


def test_stop_tokens_that_the_model_does_not_have_are_left_out() -> None:
    speller = Tokenizer(models.WordLevel({"a": ord("a"), "?": 0}, unk_token="?")).to_str()
    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    loads = Loads(257)
    loads.vocabulary(msgspec.msgpack.encode(VocabularyBody([*tokens, b"x"], [256, 300], speller)))
    constraint = loads.constraint(1, BODY).result()
    assert not isinstance(constraint, ConstraintError)
    matcher = constraint.matcher()
    assert matcher.advance(ord("a"))
    legal = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    assert np.flatnonzero(legal).tolist() == [ord("b"), 256]


def test_a_constraint_needs_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="before the vocabulary"):
        Loads(257).constraint(1, BODY)


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_first_constraint_needs_is_made_with_the_vocabulary(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """And a vocabulary without it is still one."""
    speller = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str()
    asked: list[int] = []

    def prepare(ident: int, constraint: OutputConstraint) -> None:
        asked.append(ident)
        if fails and not ident:
            raise RuntimeError("no memory")

    loads = Loads(2, prepare=prepare)
    loads.vocabulary(msgspec.msgpack.encode(VocabularyBody([b"a", b"b"], [], speller)))
    assert not isinstance(loads.constraint(1, BODY).result(), ConstraintError)
    assert asked == [0, 1]
    assert ("no memory" in caplog.text) == fails
    loads.close()


def test_what_cannot_be_loaded_is_counted_and_told_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    speller = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str()
    asked: list[int] = []

    def prepare(ident: int, constraint: OutputConstraint) -> None:
        asked.append(ident)
        if ident == 3:
            raise ConstraintError("no room for it")

    loads = Loads(2, prepare=prepare)
    loads.vocabulary(msgspec.msgpack.encode(VocabularyBody([b"a", b"b"], [], speller)))
    made = [loads.constraint(ident, body) for ident, body in ((1, BODY), (2, b"nonsense"), (3, BODY))]
    assert [isinstance(future.result(), ConstraintError) for future in made] == [False, True, True]
    assert (sorted(asked), loads.counters.loaded, loads.counters.failed) == ([0, 1, 3], 1, 2)
    assert "no room for it" in caplog.text
    loads.close()


def test_a_vocabulary_that_cannot_be_read_fails_each_constraint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loads = Loads(2)
    loads.vocabulary(b"nonsense")
    assert isinstance(loads.constraint(1, BODY).result(), ConstraintError)
    assert loads.counters.failed == 1
    assert "could not be loaded" in caplog.text
    loads.close()
