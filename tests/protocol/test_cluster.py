"""What replicas tell routers: round trips, and bounds that are declared."""

from typing import Any

import msgspec
import pytest

from ramify.protocol.cluster import MOST_HASHES, KvEvents, ListenKv, ReplicaLoad, UnlistenKv

News = KvEvents | ReplicaLoad | ListenKv | UnlistenKv
decoder = msgspec.msgpack.Decoder(News)


@pytest.mark.parametrize(
    "message",
    [
        KvEvents(1, b"12345678", b"87654321"),
        KvEvents(1, listener=2, reset=True),
        ListenKv(1),
        UnlistenKv(1),
        ReplicaLoad(heard=1, queued=2, prefill_rate=1e4, hold_s=0.01),
    ],
)
def test_round_trip(message: Any) -> None:
    assert decoder.decode(msgspec.msgpack.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        KvEvents(-1),
        KvEvents(1, bytes(8 * MOST_HASHES + 1)),
        KvEvents(1, b"", bytes(8 * MOST_HASHES + 1)),
        ListenKv(0),
        ListenKv(1 << 40),
        ReplicaLoad(queued=1 << 60),
        ReplicaLoad(prefill_rate=float("inf")),
        ReplicaLoad(hold_s=-1.0),
    ],
)
def test_out_of_bounds(message: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(msgspec.msgpack.encode(message))
