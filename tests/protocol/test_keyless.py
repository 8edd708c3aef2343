"""What older versions saved with keys, without them."""

import msgspec

from ramify.protocol.keyless import keyless
from ramify.protocol.saved import SavedFrame, SavedOp
from ramify.protocol.stored_response import Stored
from ramify.protocol.wire import Append, Open, Set

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
KEY = "k_secret"


def test_a_frame_keeps_what_its_ops_need() -> None:
    opened = Open(
        client="c",
        session="s_1",
        key=KEY,
        token="t",
        have={"main": 5},
        revision=3,
        detach="pause",
        template="strict",
        parts=True,
        tools=[{"name": "f"}],
    )
    clean = keyless("f7", encode(SavedFrame("c", opened)))
    assert clean is not None
    assert KEY.encode() not in clean
    kept = decode(clean, type=SavedFrame).opened
    assert (kept.who, kept.detach, kept.template, kept.parts) == ("c", "pause", "strict", True)
    assert kept.tools == [{"name": "f"}]
    assert keyless("f7", clean) is None


def test_a_response_keeps_where_it_is() -> None:
    ident = Stored("s_1", KEY, "r1", 7).ident
    op = Set(id=1, branch="main", meta={"response": {"id": ident, "n": 1.5}, "x": "resp_other"})
    clean = keyless("o3", encode(SavedOp(1, 2.0, op)))
    assert clean is not None
    assert ident.encode() not in clean
    meta = decode(clean, type=SavedOp).op.meta
    assert Stored.of(meta["response"]["id"]) == Stored("s_1", "", "r1", 7)
    assert (meta["response"]["n"], meta["x"]) == (1.5, "resp_other")


def test_the_rest_stays_as_it_is() -> None:
    for key, body in (
        ("o1", encode(SavedOp(1, 2.0, Append(id=1, text="hi")))),
        ("s1", encode(Stored("s_1", KEY, "r1", 7).ident)),  # a text that a client has written
        ("f1", b"\xc1 sealed"),
        ("head", b"\xc1 resp_ damaged"),
    ):
        assert keyless(key, body) is None
