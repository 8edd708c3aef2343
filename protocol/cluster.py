"""What fronts and replicas tell each other of KV: which blocks have some, load, blocks that move.

A *block* is `BLOCK` tokens of a branch, at positions that are multiples of it. Its hash stands for all
tokens from the branch's start to the block's end, and the namespace (`actors/kit/blocks.py`), so equal
hashes mean a shared prefix. Routers estimate from these messages where a session's tokens are computed
soonest; no answer to a session depends on them.

A session that goes from a replica (*source*) to another one (*target*) takes its KV along. Its front
asks the target which blocks of a branch it lacks, reads these from the source, and puts them there:

    SeekBlocks    to the target's cache           Lacking      its answer
    ReadBlocks    to the source's scheduler       BlocksRead   its answer
    PutBlocks     to the target's scheduler       BlocksPut    its answer

Of a model with fixed states or windows the target says, too, up to where it can begin. A `SeekBlocks` to
the source's cache asks for a snapshot behind that. Its parts are moved as blocks are, behind those.

Branches have the same handles at both. Blocks are named by the caches' own keys, which both make of the
tokens and the namespace (`actors/cache/stored.py`).
"""

from typing import Annotated

import msgspec

from ramify.protocol.plan import MovedBlock

BLOCK = 64  # tokens
LOT = 2048  # tokens of a prompt that a scheduler computes before it looks who is next
MOST_HASHES = 8192  # in one message: 64 KiB
MOST_LISTENERS = 256
KEY = 16  # bytes
MOST_SOUGHT = 1024  # blocks in one answer: 64k tokens

Hashes = Annotated[bytes, msgspec.Meta(max_length=8 * MOST_HASHES)]  # uint64, as they lie in memory
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
Listener = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Ident = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Keys = Annotated[bytes, msgspec.Meta(max_length=KEY * MOST_SOUGHT)]  # one behind the other


def split_keys(keys: bytes) -> list[bytes]:
    """The keys of `Keys`."""
    return [keys[at : at + KEY] for at in range(0, len(keys), KEY)]


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


class MoveMessage(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    """Base of what is said of blocks that move, about a branch of `session`."""

    session: Ident
    branch: Ident


class SeekBlocks(MoveMessage, frozen=True):
    """Which blocks of the branch have no KV here? Answered by `Lacking`. `behind`: which snapshot do you
    have behind that position?
    """

    behind: Count | None = None


class Lacking(MoveMessage, frozen=True):
    """These have none, without a gap, from block `first` of the branch on. No keys: it has all, or room
    for none. `resumes`: up to where a request can begin, if that takes a snapshot.

    Or of a snapshot: `first` is its position, and `keys` are those of its parts. No keys: there is none.
    `note`: what the target's cache has to know of it (`StoredSnapshots`).
    """

    first: Count = 0
    keys: Keys = b""
    resumes: Count | None = None
    note: Annotated[bytes, msgspec.Meta(max_length=2 * KEY + 4)] = b""


class ReadBlocks(MoveMessage, frozen=True):
    """Send the blocks of these keys, without a gap, from block `first` of the branch on.

    `shared`: the target reads this machine's memory, so where they are is enough.
    """

    first: Count
    keys: Keys
    shared: bool = False


class SentBlock(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A block of host memory, in `slot` of the source's. `seal`: see `gpu.kv.host_memory`. `body`: its
    bytes, or none where the memory is shared.
    """

    slot: Count
    key: bytes
    seal: int
    body: bytes = b""


class BlocksRead(MoveMessage, frozen=True):
    """Those that are here, up to the first that is not.

    `stamp`: what the KV comes from (`ExecutorInfo.kv_stamp`). `memory`, `slots`: where the source's host
    memory is, and its size in blocks.
    """

    blocks: list[SentBlock]
    stamp: str = ""
    memory: str = ""
    slots: Count = 0


class PutBlocks(MoveMessage, frozen=True):
    """Keep the blocks that the source has answered with. `note`: see `Lacking`."""

    read: BlocksRead
    note: Annotated[bytes, msgspec.Meta(max_length=2 * KEY + 4)] = b""


class BlocksPut(MoveMessage, frozen=True):
    """Those of a `PutBlocks` are kept that are whole, of the same model, and that there is room for."""


ReadOrPut = ReadBlocks | PutBlocks
MoveAnswer = Lacking | BlocksRead | BlocksPut

# Within a replica, between its scheduler and what copies blocks (`actors/executor/copier.py`).


class CopyOut(msgspec.Struct, array_like=True, frozen=True):
    """Answer `read` with these blocks: their slots and keys."""

    read: ReadBlocks
    blocks: list[MovedBlock]


class CopyIn(msgspec.Struct, array_like=True, frozen=True):
    """Write the blocks of `put` to `slots`; -1: that one is not wanted. Answered by `CopiedIn`."""

    put: PutBlocks
    slots: list[int]


class CopiedIn(MoveMessage, frozen=True):
    """To the scheduler. `kept`, `refused`: keys of blocks that are in their slots now, and that are
    not.
    """

    kept: Keys
    refused: Keys
