"""A replica's reports to the routers of a cluster: which blocks have KV there, and its load.

A *block* is `BLOCK` tokens of a branch, at positions that are multiples of it. Its hash stands for all
tokens from the branch's start to the block's end, and the namespace (`actors/kit/blocks.py`), so equal
hashes mean a shared prefix. Routers estimate from these messages where a session's tokens are computed
soonest; no answer to a session depends on them.
"""

from typing import Annotated

import msgspec

BLOCK = 64  # tokens
LOT = 2048  # tokens of a prompt that a scheduler computes before it looks who is next
MOST_HASHES = 8192  # in one message: 64 KiB
MOST_LISTENERS = 256

Hashes = Annotated[bytes, msgspec.Meta(max_length=8 * MOST_HASHES)]  # uint64, as they lie in memory
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
Listener = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class KvEvents(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Blocks that lost their KV in a replica's cache, then blocks that got it.

    `listener` 0: for all listeners. These are numbered by `seq`, without gaps; a listener that misses
    one asks for a snapshot by `ListenKv`. Otherwise a part of the snapshot for that listener, as of
    `seq`: `stored` is added, and the first part (`reset`) replaces all that was known before.
    """

    seq: Count
    stored: Hashes = b""
    removed: Hashes = b""
    listener: Count = 0
    reset: bool = False


class ListenKv(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the cache: send `listener` `KvEvents` from now on, beginning with a snapshot."""

    listener: Listener


class UnlistenKv(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the cache: send `listener` no more. Unknown listeners are ignored."""

    listener: Listener


class ReplicaLoad(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """The load of a replica, reported some times a second.

    - `heard`: requests of this listener that it has taken so far (`ReplicaRouter.sent` counts them).
    - `queued`: prompt tokens of all its requests that are not computed yet; `excess` of them are beyond
      the first `LOT` of a prompt, and `long` prompts have such.
    - `waiting`: requests without KV slots; `wanted`: tokens of their prompts.
    - `decoding`: requests that decode; `context`: tokens that running requests attend to, shared ones as
      often as they are read.
    - `free`, `evictable`, `slots`: token slots of its KV pool.

    Measured, 0.0 while unknown: `prefill_rate`: prompt tokens a second, beside that many decodes;
    `step_s`: seconds of a step; `hold_s`: seconds for which a request holds its slots.
    """

    heard: Count = 0
    queued: Count = 0
    waiting: Count = 0
    wanted: Count = 0
    decoding: Count = 0
    context: Count = 0
    free: Count = 0
    evictable: Count = 0
    slots: Count = 0
    prefill_rate: Rate = 0.0
    step_s: Seconds = 0.0
    hold_s: Seconds = 0.0
    excess: Count = 0
    long: Count = 0
