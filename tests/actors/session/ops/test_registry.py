"""Every op on the wire has one handler."""

import msgspec

from ramify.actors.session.ops.registry import AT_ONCE, HANDLERS
from ramify.protocol import wire


def kinds(of: type) -> set[type]:
    """The types that stand at the ends of the tree of classes below `of`."""
    below = of.__subclasses__()
    return set().union(*map(kinds, below)) if below else {of}


def test_each_op_has_one_handler() -> None:
    assert HANDLERS.keys() | AT_ONCE.keys() == kinds(wire.Op)
    assert not HANDLERS.keys() & AT_ONCE.keys()


def test_no_frame_names_an_op_that_is_none() -> None:
    client = msgspec.inspect.type_info(wire.ClientMessage)
    assert isinstance(client, msgspec.inspect.UnionType)
    types = {each.cls for each in client.types if isinstance(each, msgspec.inspect.StructType)}
    assert {each for each in types if issubclass(each, wire.Op)} == kinds(wire.Op)
