"""What the cache is told: branches by sessions, pages by the scheduler, blocks by the disk."""

import msgspec

from ramify.protocol.cluster import (
    ListenKv,
    ReadBlocks,
    SeekBlocks,
    UnlistenKv,
)
from ramify.protocol.messages.base import Base
from ramify.protocol.pictures import PlacedPicture

# From sessions: branch handles. None of these can fail; unknown handles are a bug (crash in tests).


class OpenBranch(Base, frozen=True):
    """A new handle at the root of `namespace` (model, LoRA, tenant salt), position 0."""

    branch: int
    namespace: str = ""


class ExtendBranch(Base, frozen=True):
    """Append `tokens` to the branch: match what the tree has, insert the rest as cold nodes.

    O(len(tokens)), independent of the branch's length. `pictures`: those among them.
    """

    branch: int
    tokens: bytes
    pictures: list[PlacedPicture] = []


class ForkBranch(Base, frozen=True):
    """New handles `children` at position `at` of `branch`."""

    branch: int
    children: list[int]
    at: int


class MoveBranch(Base, frozen=True):
    """Move the handle back to position `to` (rollback)."""

    branch: int
    to: int


class RetainBranches(Base, frozen=True):
    """Keep the KV of branches warm, each until its time (clock seconds; 0: no longer).

    A soft priority, which outlives the session: `DropBranches` ends it. One message for all that a
    session retains in a turn, however many they are. `owner`: whose share of the pool it takes.
    """

    until: dict[int, float]
    owner: str = ""


class DropBranches(Base, frozen=True):
    """Forget handles. Running requests on them keep their pages until their final `Commit`."""

    branches: list[int]


class DropSessions(Base, frozen=True):
    """Forget every handle of sessions that have ended, in whatever state. None is no error.

    It names no handle, because a session that crashed cannot say which of them the cache has heard of.
    """

    sessions: list[int]


class Reopen(Base, frozen=True):
    """Forget all handles of the session: it is going to open its branches anew."""

    session: int


class Inspect(Base, frozen=True):
    """Ask how much of each branch is resident. Answered by `Inspected` to the session.

    Before that, of the first branch: `leases`: keep the first tokens (None: all, and what follows), each
    until its time, in the share of `owner`; how many are kept follows in the answer. `demote`: evict it
    before all others.
    """

    session: int
    id: int
    branches: list[int]
    leases: list[tuple[int | None, float]] = []
    owner: str = ""
    demote: bool = False


# From the scheduler: one `Settle` per step at most.


class Acquire(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Let `request` run on `branch`.

    Pages are granted for every token from the cached prefix to the branch's head plus `extra` tokens.

    - `history`: also return the whole branch's tokens (penalties need them).
    - `prompt`: where the scheduler believes that the branch ends (0: wherever it does). It is denied as
      "gone" where the session has changed the branch meanwhile.
    - `rerun`: positions from there on are computed again even if they have KV, because their logits are
      wanted (None: the last one only).
    - `leave`: pages, free or evictable, that must be left when it has its own.
    - `spare`: nothing is evicted for it.
    - `slots`: state slots that it needs to run, beside those for snapshots (0: the model has no states).
      On a model with windows: tokens that it may add behind `extra`.
    - `most`: it is denied if it has to compute more, whatever is free (0: any number).
    - `load`: KV in host memory may be loaded: that takes less time than to compute it.
    - `cost`: tokens that could be computed while one block is loaded, at most `cluster.BLOCK`.
    - `rate`: prompt tokens a second that it would be computed with, if it may wait for KV on the disk
      (`Denied.reason` "disk"); 0: it may not.
    """

    request: int
    branch: int
    extra: int
    history: bool = False
    prompt: int = 0
    rerun: int | None = None
    leave: int = 0
    spare: bool = False
    slots: int = 0
    most: int = 0
    load: bool = False
    rate: float = 0.0
    cost: int = 0


class Grow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`tokens` more token slots for a running request."""

    request: int
    tokens: int


class Commit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a running request achieved.

    - `computed`: positions [0, computed) of the branch, counted with `tokens`, have KV in the request's
      pages, or will have it once the steps under way have run; they become resident.
    - `tokens`: the accepted output tokens (only with `final`), appended to the branch; its handle moves
      to the end.
    - `final`: the request gives everything back; pages past `computed` are free. Retraction is a final
      commit too.
    - `finite`: True: logits over [0, computed) were finite, which proves their KV. False: they were not,
      so nothing becomes resident, and unproven KV that the request found is dropped (only with `final`,
      without tokens). None: nothing was sampled.
    - `states`: int32 pairs, a position up to `computed` and that of the request's slots that holds the
      state there. It becomes a snapshot of the tree. The request may read it until it commits more than
      that position, and never writes it again. `final` gives all other slots back.
    - `lost`: keys of blocks that could not be loaded: they are forgotten.
    - `written`: with `final` on a model with windows, positions that the steps so far may have written.
    """

    request: int
    computed: int
    tokens: bytes = b""
    final: bool = False
    finite: bool | None = None
    states: bytes = b""
    written: int = 0
    lost: list[bytes] = []


class Settle(Base, frozen=True):
    """Commits, then grows, puts, acquires and reads, in list order. Answered by one `Settled`.

    `puts`: keys, one behind the other, of blocks that another replica sends. `kept`, `refused`: of
    these, earlier, those that are here now, and those that are not. `reads`: what another one wants.
    `notes`: of snapshots that are among `puts`.
    """

    commits: list[Commit]
    grows: list[Grow]
    acquires: list[Acquire]
    puts: list[bytes] = []
    reads: list[ReadBlocks] = []
    kept: list[bytes] = []
    refused: list[bytes] = []
    notes: list[bytes] = []


class RenewPool(Base, frozen=True):
    """Start over with an empty pool of that many pages: another executor has taken the old one's place.

    Comes when no request runs. Branches keep their tokens. `state_slots`, `window_pages`,
    `host_blocks`, `host_memory`: of the new executor.
    """

    pages: int
    state_slots: int = 0
    window_pages: int = 0
    host_blocks: int = 0
    host_memory: str = ""


class CompareOrder(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Compare block `key`, which is in slot `slot` of host memory, with block `twin` in `other`: the
    same tokens, computed again. They may not be there yet.
    """

    key: bytes
    slot: int
    twin: bytes
    other: int


class CompareResult(Base, frozen=True):
    """How an order ended: "equal", "differs", or "unknown": nothing could be compared.

    `difference`: the largest relative one. `bound`: above it, blocks differ.
    """

    order: CompareOrder
    verdict: str
    difference: float = 0.0
    bound: float = 0.0


ERASE = -1  # instead of a slot


class DiskOrder(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copy block `key` from a slot of host memory to a place on the disk; not `write`: back. `note`, of
    at most 20 bytes, is kept with it. From slot `ERASE`: empty the place.
    """

    write: bool
    key: bytes
    slot: int
    place: int
    note: bytes = b""


class DiskResult(Base, frozen=True):
    """`whole`: the block is where it was to go. `broken`: nothing can be written any more."""

    order: DiskOrder
    whole: bool
    seconds: float
    broken: bool = False


CacheMessage = (
    OpenBranch
    | ExtendBranch
    | ForkBranch
    | MoveBranch
    | RetainBranches
    | DropBranches
    | DropSessions
    | Reopen
    | Inspect
    | Settle
    | RenewPool
    | DiskResult
    | CompareResult
    | ListenKv
    | UnlistenKv
    | SeekBlocks
)
