"""Only who knows the secret gets through, on either side."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.actors.links.handshake import (
    FROM_FRONT,
    FROM_REPLICA,
    NONCE,
    PROOF,
    FrontHandshake,
    ReplicaHandshake,
    Stranger,
)

SECRET = b"sixteen bytes or more"


def test_two_who_know_the_secret() -> None:
    front, replica = FrontHandshake(SECRET), ReplicaHandshake(SECRET)
    assert len(front.greeting) == FROM_FRONT
    answer = replica.answer(front.greeting)
    assert len(answer) == FROM_REPLICA
    proof = front.check(answer)
    assert len(proof) == PROOF
    replica.check(proof)
    assert SECRET not in front.greeting + answer + proof


def test_the_secret_is_known_or_not() -> None:
    front, replica = FrontHandshake(SECRET), ReplicaHandshake(SECRET + b"!")
    with pytest.raises(Stranger, match="secret"):
        front.check(replica.answer(front.greeting))
    replica = ReplicaHandshake(SECRET)
    replica.answer(front.greeting)
    with pytest.raises(Stranger, match="front"):
        replica.check(bytes(PROOF))
    with pytest.raises(Stranger, match="no port"):
        ReplicaHandshake(SECRET).answer(b"HTTP/1.1 400 Bad Request".ljust(FROM_FRONT))


def test_an_answer_is_good_for_one_connection() -> None:
    """What was heard on another connection, or is sent back as it came, opens nothing."""
    front, replica = FrontHandshake(SECRET), ReplicaHandshake(SECRET)
    answer = replica.answer(front.greeting)
    with pytest.raises(Stranger):
        FrontHandshake(SECRET).check(answer)
    proof = front.check(answer)
    again = ReplicaHandshake(SECRET)
    again.answer(front.greeting)
    with pytest.raises(Stranger):
        again.check(proof)
    with pytest.raises(Stranger):
        again.check(answer[NONCE:])  # the replica's own proof is not the front's


@given(answer=st.binary(min_size=FROM_REPLICA, max_size=FROM_REPLICA))
def test_no_bytes_are_an_answer_by_chance(answer: bytes) -> None:
    with pytest.raises(Stranger):
        FrontHandshake(SECRET).check(answer)
