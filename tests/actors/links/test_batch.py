"""A batch: the same bytes as the list at once; a message that cannot be encoded leaves no trace."""

import msgspec
import pytest

from ramify.actors.links.bundle import CannotEncode, EncodedBatch

ENCODER = msgspec.msgpack.Encoder()


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65_535, 65_536])
def test_it_is_the_array_of_its_messages(count: int) -> None:
    batch = EncodedBatch(ENCODER)
    messages = [[i, "x"] for i in range(count)]
    batch.add(messages)
    assert batch.count == count
    assert ENCODER.encode({"all": batch.array()}) == ENCODER.encode({"all": messages})


@pytest.mark.parametrize(
    "bad", [2**64, {"k": [1, 2**70]}, ["a", "\ud800"], object(), [b"", {"k": object()}]]
)
def test_what_cannot_be_encoded_fails_alone(bad: object) -> None:
    batch = EncodedBatch(ENCODER)
    batch.add(["before"])
    size = batch.size
    with pytest.raises(CannotEncode, match=f"a {type(bad).__name__} cannot be encoded"):
        batch.add(["with it", bad])
    assert (batch.count, batch.size) == (1, size)
    batch.add(["after"])
    assert msgspec.msgpack.decode(bytes(batch.array())) == ["before", "after"]


def test_nesting_without_end_is_such_a_message() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    batch = EncodedBatch(ENCODER)
    with pytest.raises(CannotEncode):
        batch.add([deep])
    assert (batch.count, batch.size) == (0, 0)


def test_one_message_has_a_largest_size() -> None:
    batch = EncodedBatch(ENCODER, largest=100)
    batch.add([b"x" * 90])
    with pytest.raises(CannotEncode, match="at most 100"):
        batch.add([b"x" * 110])
    batch.add([b"y" * 90])
    assert msgspec.msgpack.decode(bytes(batch.array())) == [b"x" * 90, b"y" * 90]
