"""Ids of responses, with the key of their session and without."""

from ramify.protocol.stored_response import Stored, with_key


def test_a_key_is_taken_out_and_put_back() -> None:
    ident = Stored("s_1", "k_secret", "r1", 7, True).ident
    bare = with_key(ident, "")
    assert Stored.of(bare) == Stored("s_1", "", "r1", 7, True)
    assert with_key(bare, "k_secret") == ident
    for other in ("", "resp_", "resp_!", "hello", "resp_abc"):
        assert with_key(other, "k") == other
