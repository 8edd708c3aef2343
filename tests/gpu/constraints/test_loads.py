"""What plans bring. Whole constraints: `session/test_constraints.py`, `e2e/test_constrained.py`."""

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from ramify.actors.grammar.compile import compile_constraint
from ramify.gpu.constraints.loads import Loads
from ramify.protocol.constraints import ConstraintSpec, VocabularyBody

BODY = compile_constraint(ConstraintSpec("regex", "ab?")).body


def test_stop_tokens_that_the_model_does_not_have_are_left_out() -> None:
    speller = Tokenizer(models.WordLevel({"a": ord("a"), "?": 0}, unk_token="?")).to_str()
    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    loads = Loads(257)
    loads.vocabulary(msgspec.msgpack.encode(VocabularyBody([*tokens, b"x"], [256, 300], speller)))
    matcher = loads.constraint(BODY).matcher()
    assert matcher.advance(ord("a"))
    legal = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    assert np.flatnonzero(legal).tolist() == [ord("b"), 256]


def test_a_constraint_needs_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="before the vocabulary"):
        Loads(257).constraint(BODY)
