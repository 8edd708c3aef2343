"""Mailbox messages: one tagged union per actor.

Commands are imperative, events are past tense. No message asks: a reply is a message with an id.
Ids are integers, unique in the engine: a session's number is `session`; `branch` (a branch
handle in the radix tree) and `request` are `session << 32 | counter` and chosen by the session,
so nothing has to be awaited. Token arrays are int32 `bytes` (see `plan.pack`).

Order. Mailboxes are FIFO for each sender. Two rules make the whole causal: a session tells the
cache about a branch before it tells the scheduler about a request on it; the scheduler tells
the cache `Settle` before it tells sessions what was settled.

The tree holds the tokens of every live branch; KV is a property of its nodes ("tokens are
durable, KV is a cache"). A node is *resident* (has pages) or *cold* (not computed, or evicted).
A request makes the path to its branch's head resident, then appends what it samples.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from ramify.protocol.cluster import (
    CopiedIn,
    ListenKv,
    MoveAnswer,
    ReadBlocks,
    ReadOrPut,
    SeekBlocks,
    UnlistenKv,
)
from ramify.protocol.constraints import ConstraintSpec
from ramify.protocol.errors import Code
from ramify.protocol.pictures import PlacedPicture
from ramify.protocol.plan import (
    ExecutorDown,
    ExecutorInfo,
    MovedBlock,
    StepPlan,
    StepResult,
    StopExecutor,
)
from ramify.protocol.sampling import SamplingParams, TokenLogprobs
from ramify.protocol.saved import Changes
from ramify.protocol.wire import (
    MOST_PRIORITY,
    ClientMessage,
    Error,
    Open,
    ServerMessage,
)

SPARE = -100  # the priority of requests that nobody waits for: below that of every other one


def session_of(ident: int) -> int:
    """The session number that a branch handle or a request id belongs to."""
    return ident >> 32


class Base(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    """Base of mailbox messages: positional on the wire, tagged with the class name.

    They are trees of values, which no cycle goes through: the garbage collector need not look at them.
    """


# --- cache mailbox ----------------------------------------------------------------------------
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
    """

    commits: list[Commit]
    grows: list[Grow]
    acquires: list[Acquire]
    puts: list[bytes] = []
    reads: list[ReadBlocks] = []
    kept: list[bytes] = []
    refused: list[bytes] = []


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


class DiskOrder(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copy block `key` from a slot of host memory to a place on the disk; not `write`: back."""

    write: bool
    key: bytes
    slot: int
    place: int


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
    | ListenKv
    | UnlistenKv
    | SeekBlocks
)

# --- scheduler mailbox ------------------------------------------------------------------------


class Granted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """`request` may run. Positions [0, cached) have KV; `tokens` are [cached, prompt).

    `pages`: the page table (int32) for [0, prompt + extra), rounded up to pages. The pages of
    [cached, ...) belong to the request until it commits them; if `cached` is inside of a page, the
    positions before it are copied there (`Settled.copies`). `cached <= prompt - 1`, and at most what
    `Acquire.rerun` says.
    `history`: all tokens [0, prompt) if asked for. `proven`: see `Commit.finite`; False: some of the
    cached KV was only computed, nothing has been sampled over it yet.

    With states `cached` is where both KV and a snapshot are:

    - `state`: the slot with the state at `cached` (0 at position 0). The request only reads it.
    - `slots`: int32, the slots that it may write: `Acquire.slots`, and one for each of `marks`.
    - `marks`: int32, ascending, in (cached, prompt): positions where a snapshot is wanted, so a chunk of
      the prefill ends there.
    - `replayed`: of `tokens`, the first so many have KV in the tree; they run because no state is there.

    With windows `cached` is where the KV of the window before it is, too, and `replayed` as above.
    `windows`: see `OpenRow`.

    `loads`: blocks that fill the request's first pages, [cached - `loaded`, cached), from host memory,
    before it runs. Until its commit says that they are there, the slots keep them.

    `pictures`: of the prompt, with pixels where `tokens` has a part of them.
    """

    request: int
    cached: int
    tokens: bytes
    pages: bytes
    history: bytes = b""
    proven: bool = True
    state: int = 0
    slots: bytes = b""
    marks: bytes = b""
    replayed: int = 0
    windows: bytes = b""
    loads: list[MovedBlock] = []
    loaded: int = 0
    pictures: list[PlacedPicture] = []


class Denied(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """`request` cannot run now.

    `reason` "memory": not enough free and evictable pages (`short`: how many are missing), or state
    slots or window pages (`slots`);
    "shared": a part of its prefix is being computed by request `on`; acquire again when that
    one commits; "gone": the branch does not exist, or not as the request knew it; "disk": a part of its
    prefix comes from the disk, and `Brought` says when.
    `resident`: tokens of the branch that are resident now, for the order of the queue.
    """

    request: int
    reason: Literal["memory", "shared", "gone", "disk"]
    resident: int = 0
    short: int = 0
    on: int = 0
    slots: int = 0


class Grown(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Pages for a `Grow`; empty `pages`: there is no memory, so the scheduler has to retract a run.

    `windows`: as many window pages.
    """

    request: int
    pages: bytes
    windows: bytes = b""


class Settled(Base, frozen=True):
    """The answer to one `Settle`: verdicts in the order of its acquires, grown in its grows'.

    Page counts after it: `free`, `evictable`, `referenced` add up to the pool. `copies`: see `StepPlan`;
    they belong into the next plan, before a page of this answer is used. So do `saves`. `more`: there is
    more to save, for the disk: settle again when that is free.

    `slots`: int32, for each of `puts` those of its keys, in order; -1: not to be put. `reads`: for each
    of the reads, the blocks that are here, or will be when the saves are done.
    """

    verdicts: list[Granted | Denied]
    grown: list[Grown]
    free: int
    evictable: int
    referenced: int
    copies: bytes = b""
    saves: list[MovedBlock] = []
    slots: list[bytes] = []
    reads: list[list[MovedBlock]] = []
    more: bool = False


class Brought(Base, frozen=True):
    """What these requests were denied for came from the disk, or takes too long: acquire again."""

    requests: list[int]


class Submit(Base, frozen=True):
    """Run a request: make `branch` resident up to its head (`prompt` tokens), then generate.

    - `max_tokens` 0: prefill only, nothing is sampled.
    - `sampled`: output tokens that an earlier part of the same generation sampled (a pause); they count
      for the random stream and for penalties, not for `max_tokens`.
    - `deadline`, `arrived`: clock seconds.
    - `owner`: the credential that the session belongs to; all its sessions share one turn.
    - `expects`: tokens that the session's ops, those behind this one included, will still add to its
      branches, about. An output counts as a few only, because most end early.
    - `places`, `targets`: tokens to score, as in `ExtendRow`, by positions of the branch; not with
      `max_tokens`. Their log-probabilities come with `Finished`. The request is scheduled as a
      generation is, because a client waits. `tops`: see `ExtendRow`.
    - `constraint`: the `ident` of a `Compiled` that its outputs obey; 0: none. `obeyed`: tokens at the
      branch's end that the constraint has taken already: sampled before, or of an output that this one
      continues.
    - `spare`: no client waits for it, perhaps none ever will. It has no output, `SPARE` as its priority,
      and runs in steps with nothing else to do, in free pages. Where there are none, it ends
      ("cancelled").
    - `history`: the fingerprint of a stateless request's messages. `follows`: that of the request whose
      answer they go on from; the service of that one counts for this one.
    """

    request: int
    branch: int
    prompt: int
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: list[int] = []  # end of sequence included, unless the client ignores it
    priority: int = 0
    deadline: float | None = None
    arrived: float = 0.0
    sampled: int = 0
    owner: str = ""
    places: bytes = b""
    targets: bytes = b""
    expects: int = 0
    constraint: int = 0
    spare: bool = False
    obeyed: int = 0
    tops: int = 0
    history: bytes = b""
    follows: bytes = b""


class CancelRequest(Base, frozen=True):
    """End a request within one step; answered by `Finished` like every other end."""

    request: int
    keep: int | None = None
    reason: Literal["stop", "cancelled", "deadline"] = "cancelled"


class CancelSession(Base, frozen=True):
    """End every request of a session that is gone; no `Finished` is sent."""

    session: int


class Constrain(Base, frozen=True):
    """From the grammar actor, before it tells a session: requests may name the constraint `ident` from
    now on.

    `body`: see `plan.LoadConstraint`. Ident 0 is the vocabulary, which every constraint needs.
    """

    ident: int
    body: bytes


class Unconstrain(Base, frozen=True):
    """From the grammar actor: no new request will name the constraint; those that do already keep it."""

    ident: int


RequestMessage = Submit | CancelRequest | CancelSession | ReadOrPut  # what sessions and fronts tell it
SchedulerMessage = RequestMessage | Settled | Brought | Constrain | Unconstrain | CopiedIn

# What the scheduler's mailbox holds: messages of sessions and the cache, results of the executor.
SchedulerEvent = SchedulerMessage | StepResult | ExecutorDown | ExecutorInfo

# --- grammar mailbox --------------------------------------------------------------------------


class Compile(Base, frozen=True):
    """Compile `spec`, for `request`. Answered by `Compiled` or `NotCompiled` to its session.

    `owner`: as in `Submit`: owners take turns.
    """

    request: int
    spec: ConstraintSpec
    owner: str = ""


class Abandon(Base, frozen=True):
    """Do not answer `request`'s `Compile`: no client waits for the constraint any more."""

    request: int


class AbandonSession(Base, frozen=True):
    """The session has ended, and all its requests with it."""

    session: int


GrammarMessage = Compile | Abandon | AbandonSession

# --- session mailbox --------------------------------------------------------------------------


class Progress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New output tokens of one request, in order. `logprobs`: empty, or one for each token.

    `forced`, `accepted`: of them, as in `Finished`: the engine may be gone before it tells the end.
    `cached`: with a request's first tokens, as in `Finished`; -1 with all others.
    """

    request: int
    tokens: bytes
    logprobs: list[TokenLogprobs | None] = []
    forced: int = 0
    accepted: int = 0
    cached: int = -1


class Finished(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The one end of a request.

    `output`: tokens of this request that are in the branch now; `accepted` of them came as drafts (at
    most: where the output was cut, some of those may have gone). `reason` "length": max_tokens
    or the context is used up; "error": `error` says what happened.
    Times in seconds on the engine's clock; `first_token` 0.0: there was none.
    `scores`: float32, one for each of `Submit.targets`, or with `tops` as in `StepResult`;
    all of them with reason "length" only.
    `forced`: tokens of `output` that the constraint left no choice for. `stale`: nothing has run, for
    the constraint is not there (any more): compile it again and submit anew. `spare`: as submitted.
    `replayed`: see `Granted`, over all grants.
    """

    request: int
    reason: Literal["stop", "length", "cancelled", "deadline", "error"]
    output: int
    prompt: int
    cached: int
    computed: int
    arrived: float
    started: float
    first_token: float
    ended: float
    error: Code | None = None
    message: str = ""
    scores: bytes = b""
    forced: int = 0
    stale: bool = False
    accepted: int = 0
    spare: bool = False
    replayed: int = 0


class Tokens(Base, frozen=True):
    """One message per session and step: the tokens that its requests sampled, then their ends."""

    progress: list[Progress]
    finished: list[Finished]


class Compiled(Base, frozen=True):
    """Answer to `Compile`. `notes`: what the constraint says in other words than the client's."""

    request: int
    constraint: int
    notes: list[str] = []


class NotCompiled(Base, frozen=True):
    """The other answer to `Compile`. `details`: see `errors.ConstraintError`."""

    request: int
    code: Code
    message: str
    details: dict[str, int | str] | None = None


class Inspected(Base, frozen=True):
    """Answer to `Inspect`: resident tokens of each branch, in the order asked (-1: unknown), and those
    that each lease keeps."""

    id: int
    resident: list[int]


class ChangeCore(Base, frozen=True):
    """Continue this session with another engine: see `Reopen`. No text is lost.

    `quietly`: once nothing runs.
    """

    quietly: bool = False


class Lost(Base, frozen=True):
    """A message to this session could not be brought to it: it cannot go on. `reason`: for the log."""

    reason: str


class Attach(Base, frozen=True):
    """A client's `open` that reached this session. `ops`: the rest of the same frame.

    `place`: see `Frame`.
    """

    socket: int
    open: Open
    ops: list[ClientMessage]
    write: bool  # False: attached with the view key
    size: int = 0  # bytes of the frame
    place: int = 1


class Frame(Base, frozen=True):
    """One frame from an attached socket, decoded and validated. The first error wins.

    `ops` may hold pings, which the gateway has answered. `place`: where `ops` begin in the array that
    the client sent; None: it sent the one op alone. Errors name JSON paths of that frame.

    `limit`: the gateway found it too much, so none of its ops runs. The session answers it, because an
    op that a client sends again after a resume may have run: it has its own reply, and gets no second.
    """

    socket: int
    ops: list[ClientMessage]
    size: int = 0  # bytes, as it came
    place: int | None = 0
    limit: Error | None = None


class Detached(Base, frozen=True):
    """The socket is gone (for whatever reason)."""

    socket: int


class Throttled(Base, frozen=True):
    """The socket has over its limit of bytes queued: hold its deltas back until `Drained`."""

    socket: int


class Drained(Base, frozen=True):
    """The socket's queue is short again: deltas may flow."""

    socket: int


class Tick(Base, frozen=True):
    """Time has passed: expiry, tick_ms flushes, deadlines. Sent by the session's own timer."""


class Shutdown(Base, frozen=True):
    """The server drains: refuse new sessions, with `reason` and when to come back."""

    reason: str
    after_ms: int


class Saved(Base, frozen=True):
    """The store has all that the session's `Save` with this ticket brought."""

    ticket: int


class NotSaved(Base, frozen=True):
    """The store cannot be written. The session's `Save` with this ticket is tried again until it can."""

    ticket: int


class Unsaved(Base, frozen=True):
    """The store has lost some of what it had of the session, up to the `Save` with this ticket: it is to
    be saved whole.
    """

    ticket: int


class Moved(Base, frozen=True):
    """Another server has the session, or wants it: it leaves this server's memory, and clients
    reconnect.

    `taken`: the other server has it, and nothing can be saved any more; otherwise it waits for the last
    save.
    """

    taken: bool


SessionMessage = (
    Attach
    | Frame
    | Detached
    | Throttled
    | Drained
    | Tokens
    | Inspected
    | Compiled
    | NotCompiled
    | Lost
    | ChangeCore
    | MoveAnswer  # for its front, where a session has several replicas
    | Saved
    | NotSaved
    | Unsaved
    | Moved
    | Tick
)

# --- directory mailbox (creates, finds and ends sessions) ---------------------------------------


class OpenSession(Base, frozen=True):
    """The first frame of a socket: `open`, and the ops that came with it.

    `owner`: the name of the credential that the socket came with; "" where the server asks for none.
    `namespace`: which radix tree a new session's branches live in. `priority`: the highest that its
    generations may have. `place`: of `open` in the frame, as in `Frame`. `displaceable`: a new session
    makes room for later ones of the same kind when its owner has too many of them.
    """

    socket: int
    open: Open
    ops: list[ClientMessage]
    owner: str = ""
    namespace: str = ""
    priority: int = MOST_PRIORITY
    size: int = 0  # bytes of the frame
    place: int | None = 0
    displaceable: bool = False
    saves: bool = True  # False: nobody comes back to a new session, so no store needs it
    fetched: bool = False  # the store was asked for the session
    binds: bool = False  # a new one is for a request that brings its history as text: see `Histories`


class Fetched(Base, frozen=True):
    """The answer to `Fetch`. `items`: empty if the store has no such session.

    `error`: why it could not be read; ask again, unless it is `damaged`. `fence`: the session is this
    server's from now on, and saves carry it; 0: it was only looked at. `held`: another server has it,
    and keeps it.
    """

    session: str
    items: dict[str, bytes]
    error: str | None = None
    fence: int = 0
    held: bool = False
    damaged: bool = False


class Waiting(Base, frozen=True):
    """The store's sessions in which ops wait or run: their servers ended before they were done."""

    sessions: list[str]


class Saving(Base, frozen=True):
    """Whether the store can be written. `error`: why not, since now; None: it can be again."""

    error: str | None


class Wanted(Base, frozen=True):
    """Other servers wait for these sessions, which the store says this one has."""

    sessions: list[str]


DirectoryMessage = OpenSession | Shutdown | Fetched | Waiting | Saving | Wanted

# --- store mailbox ------------------------------------------------------------------------------


class Save(Base, frozen=True, gc=True):
    """Write `changes`. With `session` not 0, answered by

    - `Saved`, once they are on the disk;
    - `Moved`, if another server has taken the session: nothing was written;
    - `NotSaved`, before one of these, when they could not be written yet;
    - `Unsaved`, if the store has lost earlier saves. A session that is over hears nothing; `again()`
      makes what to save then.

    `awaited`: an op waits for the save; otherwise it is written soon, with others, and the session is
    not woken to hear `Saved`.
    """

    session: int
    ticket: int
    changes: Changes
    awaited: bool = False
    again: "Callable[[], Save | None] | None" = None


class Fetch(Base, frozen=True):
    """Read a session. Answered by `Fetched` to the directory.

    `how`: "look": its head only, and it stays whose it is. Else it becomes this server's: "free": unless
    a server that lives has it; "ask": such a one is asked to save it first, and has a second for that.
    """

    session: str
    how: Literal["look", "free", "ask"] = "look"


class Forget(Base, frozen=True):
    """The session is over, or not to be saved any more. `fence`: of the server that says so."""

    session: str
    fence: int


class Release(Base, frozen=True):
    """The session is not in this server's memory: others need not wait for it."""

    session: str


StoreMessage = Save | Fetch | Forget | Release

# --- gateway mailbox ----------------------------------------------------------------------------


class Opened(Base, frozen=True):
    """The socket belongs to `session` now: its further frames go there."""

    socket: int
    session: int


class OpenRefused(Base, frozen=True):
    """The other answer to `OpenSession`: `error` is sent, and the client may `open` anew.

    It may follow `Opened`: the session cannot have the socket. Its sender has detached it.
    """

    socket: int
    error: Error


class Deliver(Base, frozen=True):
    """Send `messages` as one frame."""

    socket: int
    messages: list[ServerMessage]


class CloseSocket(Base, frozen=True):
    """Close the socket after what was delivered before."""

    socket: int
    code: int
    reason: str


GatewayMessage = Opened | OpenRefused | Deliver | CloseSocket

# --- executor mailbox ---------------------------------------------------------------------------

ExecutorMessage = StepPlan | StopExecutor
