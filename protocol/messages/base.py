"""What all mailbox messages share: their base, and the numbers of sessions."""

import msgspec

SPARE = -100  # the priority of requests that nobody waits for: below that of every other one


def session_of(ident: int) -> int:
    """The session number that a branch handle or a request id belongs to."""
    return ident >> 32


class Base(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    """Base of mailbox messages: positional on the wire, tagged with the class name.

    They are trees of values, which no cycle goes through: the garbage collector need not look at them.
    """
