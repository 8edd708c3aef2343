"""Where the KV of a node is, and which state may follow which.

    GONE        nowhere: never computed, or evicted
    COMPUTING   a running request computes it: `Node.owner`
    DEVICE      in the node's pages, for every request
    SUSPECT     in the node's pages, but logits over them were not finite: only the requests that
                already use them keep them

A tier behind the device (host memory, disk, another replica) needs a line here, its row in `FOLLOWS`,
the method of `Node` that enters it, and its line in the integrity check. Knows no nodes.
"""

from enum import IntEnum


class KvState(IntEnum):
    """An integer, because it is looked up by each change: an `Enum` is hashed in Python."""

    GONE = 0
    COMPUTING = 1
    DEVICE = 2
    SUSPECT = 3


GONE, COMPUTING, DEVICE, SUSPECT = KvState

FOLLOWS: dict[KvState, frozenset[KvState]] = {
    # straight to DEVICE: output, and what another request was to compute
    GONE: frozenset({COMPUTING, DEVICE}),
    COMPUTING: frozenset({COMPUTING, GONE, DEVICE}),  # COMPUTING: by another request
    DEVICE: frozenset({SUSPECT, GONE}),
    SUSPECT: frozenset({DEVICE, GONE}),  # DEVICE: a later request's logits were finite
}
"""The states that may follow each state."""

ON_DEVICE = frozenset({DEVICE, SUSPECT})
"""The states in which a node has pages."""
