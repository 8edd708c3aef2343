"""A signature fits one thought, one credential and one secret."""

import pytest

from ramify.actors.gateway.apis.anthropic.signatures import Signer

OURS = Signer(b"s" * 32, "ann")


def test_whose_it_is() -> None:
    signature = OURS.sign("hm")
    assert OURS.verify("hm", signature) == "ours"
    assert OURS.verify("ha", signature) == "altered"
    assert Signer(b"s" * 32, "ann").verify("hm", signature) == "ours"  # after a restart
    for other in (Signer(b"t" * 32, "ann"), Signer(b"s" * 32, "bob")):
        assert other.verify("hm", signature) == "foreign"


@pytest.mark.parametrize("signature", ["", "x", "é" * 56, "=" * 56, "A" * 10**6, "A" * 56, "!" * 56])
def test_what_is_no_signature_of_ours(signature: str) -> None:
    assert OURS.verify("hm", signature) == "foreign"
