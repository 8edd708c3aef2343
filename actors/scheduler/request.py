"""What the scheduler knows of one request: data only, no policy.

`Tenant` is who shares with others: a credential with all its sessions, or one session where there
are no credentials. `Account` is a session as the scheduler sees it, `Request` lives from `Submit` to
`Finished`, `Run` from one grant of pages to the final commit that gives them back (a retracted
request runs several times). Results are bound to runs, so whatever is still in flight for a run that
has ended falls on an object that nobody reads.

Lengths of a run, in tokens of its branch (`prompt` counts the branch's head at the grant):

    [0 ... cached)[cached ... computed)[computed ... filled)[filled ... prompt) output
     resident      result has arrived   planned, in flight   not planned yet

While a run loads what it found in another tier, the last `loaded` tokens before `cached`, it has
`computed` and `filled` before them.

A decode with drafts gives one token or several, so while one is in flight the end of the output has two
bounds. `planned` is the greater: what the run has if every draft is accepted.

Committed length, the one definition: a run with `a` accepted output tokens has KV for
[0, prompt + a - 1), because the last sampled token was not run yet; with none accepted, for
[0, kept): what is computed, and what other requests wait for and a step under way computes. A token
that was planned but not accepted has no place in either.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum
from functools import partial
from itertools import repeat
from typing import Any, Literal

from ramify.actors.scheduler.speculation import DraftRecord
from ramify.actors.scheduler.states import StateSlots
from ramify.actors.scheduler.targets import Targets
from ramify.protocol.errors import Code
from ramify.protocol.messages import Commit, Finished, Progress, Submit
from ramify.protocol.pictures import PictureSettings, PlacedPicture, words
from ramify.protocol.plan import ExecutorInfo, MovedBlock, StepResult, unpack

Reason = Literal["stop", "length", "cancelled", "deadline", "error"]
Level = tuple[bool, int]  # whether somebody waits for its output, priority: the greater goes first
Lane = tuple[bool, Level]  # whether it waits for room; see `queue`


class SchedulerError(Exception):
    """The cache or the executor contradicted the plan: KV state cannot be trusted any more."""


class RequestState(Enum):
    """Where a request stands. Retraction leads from RUNNING back to WAITING."""

    WAITING = "in the queue"
    PARKED = "its prefix is being computed by another request, or comes from the disk"
    ACQUIRING = "its Acquire is on the way"
    RUNNING = "has pages and a row"
    ENDED = "Finished was made"


@dataclass(slots=True, eq=False, repr=False)
class Tenant:
    """The unit of fairness: a credential with all its sessions, or one session without a credential.

    `served` is its virtual time in tokens (start-time fair queueing, Goyal et al. 1996). `virtual` is
    the service of its session picked last, where its new sessions start.
    """

    served: int = 0
    virtual: int = 0
    shares: dict[Lane, Any] = field(default_factory=dict)  # its places in the queue
    requests: int = 0  # those that have not ended
    rows: int = 0  # that its requests have now
    slots: int = 0  # of the KV pool that they hold beside what was cached
    reserved: int = 0  # tokens of the pool, by its active sessions; see `active`
    output: float = 0.0  # tokens of its outputs, a mean that forgets; 0: none has ended
    prefilling: int = 0  # sessions whose prompts are being computed
    lacking: int = 0  # prompt tokens of its requests that wait for a first token; see `pace`
    looked: int = 0  # the turn in which the tower was last given a picture of its; see `looks`
    shown: int = 0  # bytes of what the tower made that its runs need

    @property
    def waiting(self) -> int:
        """Its requests that have no row."""
        return self.requests - self.rows


@dataclass(slots=True, eq=False, repr=False)
class Account:
    """One session: its requests, its service, and the messages it is about to get.

    `served` is its virtual time among the sessions of its tenant. `due` is the virtual time at which the
    prompts that it has brought so far have had their turn (see `prompt_queue`).
    """

    session: int
    tenant: Tenant = field(default_factory=Tenant)
    served: int = 0
    rows: int = 0
    due: int = 0
    prefilling: int = 0  # its requests whose prompts are being computed
    shares: dict[Lane, Any] = field(default_factory=dict)  # its places in the queue
    active: bool = False  # it has begun to use the pool; this and what follows: see `active`
    began: int = 0  # the step when its stay began
    given: int = 0  # output tokens in it
    rested: int = 0  # number of its last rest
    kept: int = 0  # tokens of KV that its requests have added to the pool since it began
    held: int = 0  # those of them that running requests hold
    foreseen: int = 0  # tokens that its requests may still add
    behind: bool = False  # its session has ops that wait for those that were submitted
    goal: int = 0  # what it is going to keep, as its session has said
    reserved: int = 0  # tokens
    requests: "dict[int, Request]" = field(default_factory=dict)
    progress: list[Progress] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    closed: bool = False  # the session is gone: nothing is told to it

    def charge(self, tokens: int) -> None:
        """Add `tokens` of service; less than 0: they were not used."""
        self.served += tokens
        self.tenant.served += tokens

    def hold(self, rows: int) -> None:
        """Count `rows` more rows, or -1 less. A request that asks for pages to use a row counts too."""
        self.rows += rows
        self.tenant.rows += rows


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A submitted request; `done` counts the output tokens that earlier runs committed."""

    submit: Submit
    account: Account
    seq: int  # order of arrival
    batch: int  # requests that were submitted together have the same
    mark: int  # tokens that the engine had processed when it arrived
    limit: int  # most output tokens: max_tokens, the context, the pool
    targets: Targets | None = None
    ahead: bool = field(init=False)  # it only computes a prompt, for a later generation
    level: Level = field(init=False)
    stops: frozenset[int] = field(init=False)
    state: RequestState = RequestState.WAITING
    run: "RequestRun | None" = None
    ending: Reason | None = None  # ACQUIRING: cancelled meanwhile
    resident: int = 0
    stored: int = 0  # tokens behind those that it would load
    fetched: bool = False  # it has waited for the disk
    repeated: bool = False  # it runs once more, because KV that it found was not finite
    done: int = 0  # this and the two that follow it: see `keep`
    prompt: int = field(init=False)  # tokens of the branch before the next output token
    remaining: int = field(init=False)
    accepted: int = 0  # of its output tokens, those that came as drafts
    record: DraftRecord | None = None  # how its drafts did; see `speculation`
    ticket: int = 0  # its valid entry in the waiting queue
    charge: int = 0  # tokens charged to the account when it was picked
    cached: int = 0  # of the first grant, for usage; of that, what was in other tiers
    host: int = 0
    disk: int = 0
    computed: int = 0
    replayed: int = 0  # of its prompt and its output, tokens run although their KV was there
    reached: int = 0  # tokens whose KV its retracted run had
    lacking: int = 0  # of its prompt, as `pace` counts
    need: int = 0  # pages that it asked for when it was denied for memory; 0: unknown
    promised: bool = False  # pages were made free for it
    foreseen: int = 0  # slots that it may still use, as `active` counts
    most: int = 0  # slots that it may need and be warm, where it asks before it waits; see `admission`
    leave: int = 0  # pages that its Acquire leaves for others
    in_memory_queue: bool = False  # it waits for its session to begin; see `queue`
    came: int = -1  # the step in which it first joined the memory queue
    ignores_reserve: bool = False  # it may take pages that are reserved for active sessions
    single_answer: bool = False  # granting it does not begin its session
    overtakes: bool = False  # it may go before requests that wait for more pages
    started: float = 0.0
    first_token: float = 0.0
    forced_tokens: int = 0  # of its output, those that its constraint left no choice for
    constrained: bool = field(init=False)
    stale: bool = False  # its constraint is not there
    losses: int = 0  # executors that died in a step of it; this and what follows: see `suspects`
    deaths: int = 0  # of these, the last ones between which it got no token
    died_at: int = -1  # its output tokens at the last one

    def __post_init__(self) -> None:
        submit = self.submit
        self.ahead = self.limit == 0 and self.targets is None
        self.level = not self.ahead, submit.priority
        self.stops = frozenset(submit.stop_token_ids)
        self.prompt = submit.prompt
        self.remaining = self.limit
        self.constrained = bool(submit.constraint)

    @property
    def reads_history(self) -> bool:
        """Whether the executor needs its branch's tokens: to penalise, or to replay a constraint."""
        submit = self.submit
        behind = bool(submit.constraint) and submit.obeyed + self.done > 0
        return self.limit > 0 and (submit.sampling.penalized or behind)

    def keep(self, tokens: int) -> None:
        """So many output tokens more are its branch's."""
        self.done += tokens
        self.prompt += tokens
        self.remaining -= tokens

    def extra(self, lookahead: int) -> int:
        """Slots to ask for beyond the prompt: the last output token never needs one."""
        return max(0, min(lookahead, self.remaining - 1))

    def finish(self, reason: Reason, now: float, error: Code | None, message: str) -> Finished:
        return Finished(
            request=self.submit.request,
            reason=reason,
            output=self.done,
            accepted=min(self.accepted, self.done),
            prompt=self.submit.prompt,
            cached=self.cached,
            computed=self.computed,
            arrived=self.submit.arrived,
            started=self.started or now,
            first_token=self.first_token,
            ended=now,
            error=error,
            message=message,
            scores=b"" if self.targets is None else self.targets.scores.tobytes(),
            forced=self.forced_tokens,
            stale=self.stale,
            spare=self.submit.spare,
            replayed=self.replayed,
            host=self.host,
            disk=self.disk,
        )


@dataclass(slots=True, eq=False, repr=False)
class RequestRun:
    """A request that has pages: its row, its lengths, its output since the grant."""

    request: Request
    row: int
    cached: int
    tokens: bytes
    pages: bytes
    history: bytes
    proven: bool  # the KV that it found
    page_size: InitVar[int]
    since: int = 0  # the step before its first
    ident: int = field(init=False)
    account: Account = field(init=False)
    stops: frozenset[int] = field(init=False)
    priority: int = field(init=False)  # its own, or that of a request that waits for its prompt
    prompt: int = field(init=False)
    limit: int = field(init=False)  # most output tokens of this run
    ahead: bool = field(init=False)  # nobody waits for it
    cap: int = field(init=False)  # most slots it can ever use
    computed: int = field(init=False)
    filled: int = field(init=False)
    cut: int = field(init=False)  # where its next chunk must end at the latest
    states: StateSlots | None = None  # of a model with fixed states
    windows: bytes = b""  # of the table of window pages, see `OpenRow`
    pictures: list[PlacedPicture] = field(default_factory=list)
    whole: Sequence[PlacedPicture] = ()  # that no chunk of its prompt may end inside of
    shows: frozenset[bytes] = frozenset()  # pictures of which the executor keeps what it needs
    replayed: int = 0  # tokens whose KV it has twice
    loaded: int = 0  # of `cached`, the last so many come from another tier
    lost: list[bytes] = field(default_factory=list)  # keys of blocks that could not be loaded
    offered: int = field(init=False)  # of `filled`: the cache may hand it out before the result is here
    slots: int = field(init=False)
    out: "array[int]" = field(default_factory=partial(array, "i"))  # accepted
    jumps: bool = field(init=False)  # its constraint may say what must follow
    jump: int = 0  # drafts that it is asked for then; 0: the executor asks none
    forced: bytearray = field(default_factory=bytearray)  # of each token: 1: it had no choice
    target: int = field(init=False)  # the next to plan
    planned: int = 0  # output tokens planned, drafts included; while decoding: tick + offset
    offset: int = 0
    stop_at: int = 0  # it cannot decode further once this many are planned
    due: int = 0  # the tick of its next review, if it has no drafts until then
    live: bool = True
    bad: bool = False  # its first logits were not finite: none of its KV is to be trusted
    opened: bool = False
    decoding: bool = False
    growing: bool = False  # a Grow is asked for
    waiters: list[Request] = field(default_factory=list)  # PARKED on this run
    place: int = 0  # its valid entry among the prompts
    turn: int = 0  # virtual time at which its lot may begin
    lot: int = 0  # prompt tokens that it may have planned in this turn

    def __post_init__(self, page_size: int) -> None:
        request = self.request
        self.ident = request.submit.request
        self.account = request.account
        self.stops = request.stops
        self.priority = request.submit.priority
        self.prompt = self.cut = request.prompt
        self.limit = request.remaining
        self.ahead = request.ahead
        self.cap = self.prompt + max(0, self.limit - 1)
        self.computed = self.filled = self.offered = self.cached - self.loaded
        self.slots = len(self.pages) // 4 * page_size
        self.jumps = request.constrained
        self.target = request.targets.done if request.targets else 0

    @property
    def level(self) -> Level:
        return not self.ahead, self.priority

    def show(self, pictures: list[PlacedPicture], settings: PictureSettings | None) -> None:
        """Its prompt has pictures: the executor is told of them, and of words only."""
        assert settings is not None
        self.pictures = pictures
        if settings.whole:
            self.whole = [each.without_pixels() for each in pictures]
        self.tokens, self.history = words(self.tokens, settings), words(self.history, settings)

    @property
    def held(self) -> int:
        """Slots of the pool that it has for itself, until it publishes them."""
        return self.slots - self.cached + self.loaded

    @property
    def kept(self) -> int:
        """Tokens of its prompt that the tree keeps whatever becomes of the run: computed, or offered."""
        return max(self.computed, self.offered)

    @property
    def complete(self) -> bool:
        """Every token it may ever compute is planned already: its pages come back by themselves."""
        return not self.decoding and self.filled == self.prompt and self.planned >= self.limit

    @property
    def seen(self) -> bool:
        """Finite logits were seen behind its prompt, once that is computed: of a sample, or a target."""
        targets = self.request.targets
        sees = self.limit > 0 or (targets is not None and targets.end == self.prompt)
        return sees and self.computed == self.prompt

    def final(self, keep: int | None) -> tuple[Commit, int]:
        """The final commit if `keep` output tokens of this run are kept, and how many are."""
        if self.bad:
            return Commit(self.ident, 0, b"", True, False), 0
        accepted = len(self.out)
        kept = accepted if keep is None else max(0, min(keep, accepted))
        computed = self.prompt + min(kept, accepted - 1) if accepted else self.kept
        finite = True if accepted or (not self.limit and self.seen) else None
        return Commit(self.ident, computed, self.out[:kept].tobytes(), True, finite), kept


# blocks that a plan loads, and whether they are the run's last
Load = tuple[RequestRun, list[MovedBlock], bool]
# of a prefill: the run, its length after it, how many scores it brings
Chunk = tuple[RequestRun, int, int]


@dataclass(slots=True, eq=False, repr=False)
class SentStep:
    """A plan that was sent, without what goes to the executor only."""

    step: int
    bound: list[RequestRun]  # whose tokens come back, in the result's order
    rows: bytes  # theirs
    chunks: list[Chunk]
    firsts: int  # so many leading entries of `bound` completed their prompt
    work: int  # of all chunks, in prompt tokens: see `Pace.work`
    asked: list[int] | None = None  # drafts for each decode; None: no draft for any
    guesses: list[int] | None = None  # of those for a run with a constraint, how many may be guessed
    loads: "list[Load]" = field(default_factory=list)
    moved: int = 0  # blocks that it loads and saves
    exchanges: bool = False  # some of what it saves goes to other replicas
    missing: int = 0  # tokens that the drafter has to compute first, of rows that it begins
    counts: "array[int] | None" = None  # tokens of each, from its result; None: one each


def scored(
    chunks: Iterable[Chunk], scores: "array[float]"
) -> Iterator[tuple[RequestRun, int, "array[float]"]]:
    """Yield each chunk's run, its length after the chunk, and the chunk's part of the step's scores."""
    at = 0
    for run, end, count in chunks:
        yield run, end, scores[at : at + count]
        at += count


def output_limit(submit: Submit, info: ExecutorInfo) -> int:
    """Most output tokens of a request: what it asked for, what the context and the pool hold.

    The last output token is never run, so it needs no slot. Since the limit accounts for the
    pool, a request that runs alone always gets the pages it asks for.
    """
    pool = info.pages * info.page_size
    return max(0, min(submit.max_tokens, info.context - submit.prompt, pool - submit.prompt + 1))


def note_forced(step: SentStep, result: StepResult) -> None:
    """Note which new tokens were forced by their rows' constraints."""
    flags, at = result.forced, 0
    counts = unpack(result.counts) if result.counts else repeat(1, len(step.bound))
    for run, count in zip(step.bound, counts, strict=True):
        if run.live and run.request.constrained:
            run.forced += b"\0" * (len(run.out) - len(run.forced))  # of results that had none forced
            run.forced += flags[at : at + count]
        at += count
