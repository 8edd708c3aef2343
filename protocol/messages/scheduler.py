"""What the scheduler is told: requests by sessions, verdicts by the cache, constraints."""

from typing import Literal

import msgspec

from ramify.protocol.cluster import (
    CopiedIn,
    ReadOrPut,
)
from ramify.protocol.messages.base import Base
from ramify.protocol.pictures import PlacedPicture
from ramify.protocol.plan import (
    ExecutorDown,
    ExecutorInfo,
    MovedBlock,
    PicturesSeen,
    StepResult,
)
from ramify.protocol.sampling import SamplingParams


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
    `host`, `disk`: of `cached`, those that were in host memory, and on the disk until they came there.
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
    host: int = 0
    disk: int = 0


class Denied(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """`request` cannot run now.

    `reason` "memory": not enough free and evictable pages (`short`: how many are missing), or state
    slots or window pages (`slots`);
    "shared": a part of its prefix is being computed by request `on`; acquire again when that
    one commits; "gone": the branch does not exist, or not as the request knew it; "disk": a part of its
    prefix comes from the disk, and `Brought` says when.
    `resident`: tokens of the branch that are resident now, for the order of the queue. `stored`: tokens
    behind them that it would load.
    """

    request: int
    reason: Literal["memory", "shared", "gone", "disk"]
    resident: int = 0
    short: int = 0
    on: int = 0
    slots: int = 0
    stored: int = 0


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
SchedulerEvent = SchedulerMessage | StepResult | PicturesSeen | ExecutorDown | ExecutorInfo
