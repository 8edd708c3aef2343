"""What the scheduler knows of one request: data only, no policy.

`Tenant` is who shares with others: a credential with all its sessions, or one session where there
are no credentials. `Account` is a session as the scheduler sees it, `Request` lives from `Submit` to
`Finished`, `Run` from one grant of pages to the final commit that gives them back (a retracted
request runs several times). Results are bound to runs, so whatever is still in flight for a run that
has ended falls on an object that nobody reads.

Lengths of a run, in tokens of its branch (`prompt` counts the branch's head at the grant):

    [0 ... cached)[cached ... computed)[computed ... filled)[filled ... prompt) output
     resident      result has arrived   planned, in flight   not planned yet

A decode with drafts gives one token or several, so while one is in flight the end of the output has two
bounds. `planned` is the greater: what the run has if every draft is accepted.

Committed length, the one definition: a run with `a` accepted output tokens has KV for
[0, prompt + a - 1), because the last sampled token was not run yet; with none accepted, for
[0, kept): what is computed, and what other requests wait for and a step under way computes. A token
that was planned but not accepted has no place in either.
"""

from array import array
from enum import Enum
from typing import Literal

from ramify.actors.scheduler.speculation import DraftRecord
from ramify.actors.scheduler.states import StateSlots
from ramify.actors.scheduler.targets import Targets
from ramify.protocol.errors import Code
from ramify.protocol.messages import Commit, Finished, Progress, Submit
from ramify.protocol.plan import ExecutorInfo

Reason = Literal["stop", "length", "cancelled", "deadline", "error"]
Level = tuple[bool, int]  # whether somebody waits for its output, priority: the greater goes first


class SchedulerError(Exception):
    """The cache or the executor contradicted the plan: KV state cannot be trusted any more."""


class RequestState(Enum):
    """Where a request stands. Retraction leads from RUNNING back to WAITING."""

    WAITING = "in the queue"
    PARKED = "its prefix is being computed by another request"
    ACQUIRING = "its Acquire is on the way"
    RUNNING = "has pages and a row"
    ENDED = "Finished was made"


class Tenant:
    """The unit of fairness: a credential with all its sessions, or one session without a credential.

    `served` is its virtual time in tokens (start-time fair queueing, Goyal et al. 1996). `virtual` is
    the service of its session picked last, where its new sessions start.
    """

    __slots__ = (
        *("lacking", "output", "picked", "prefilling", "requests", "reserved", "rows"),
        *("served", "shares", "slots", "virtual"),
    )

    def __init__(self) -> None:
        self.served = 0
        self.virtual = 0
        self.shares: dict[tuple[object, Level], object] = {}  # its places in waiting queues
        self.requests = 0  # those that have not ended
        self.rows = 0  # that its requests have now
        self.slots = 0  # of the KV pool that they hold beside what was cached
        self.reserved = 0  # tokens of the pool, by its active sessions; see `active`
        self.output = 0.0  # tokens of its outputs, a mean that forgets; 0: none has ended
        self.prefilling = 0  # sessions whose prompts are being computed
        self.lacking = 0  # prompt tokens of its requests that wait for a first token; see `pace`
        self.picked = False  # in the pick under way

    @property
    def waiting(self) -> int:
        """Its requests that have no row."""
        return self.requests - self.rows


class Account:
    """One session: its requests, its service, and the messages it is about to get.

    `served` is its virtual time among the sessions of its tenant. `due` is the virtual time at which the
    prompts that it has brought so far have had their turn (see `prompt_queue`).
    """

    __slots__ = (
        *("active", "began", "behind", "closed", "due", "finished", "foreseen", "given"),
        *("goal", "held", "kept", "prefilling", "progress", "requests", "reserved", "rested"),
        *("rows", "served", "session", "shares", "tenant"),
    )

    def __init__(self, session: int, tenant: Tenant | None = None) -> None:
        self.session = session
        self.tenant = tenant or Tenant()
        self.served = 0
        self.rows = 0
        self.due = 0
        self.prefilling = 0  # its requests whose prompts are being computed
        self.shares: dict[tuple[object, Level], object] = {}  # its places in waiting queues
        self.active = False  # it has begun to use the pool; this and what follows: see `active`
        self.began = 0  # the step when its stay began
        self.given = 0  # output tokens in it
        self.rested = 0  # number of its last rest
        self.kept = 0  # tokens of KV that its requests have added to the pool since it began
        self.held = 0  # those of them that running requests hold
        self.foreseen = 0  # tokens that its requests may still add
        self.behind = False  # its session has ops that wait for those that were submitted
        self.goal = 0  # what it is going to keep, as its session has said
        self.reserved = 0  # tokens
        self.requests: dict[int, Request] = {}
        self.progress: list[Progress] = []
        self.finished: list[Finished] = []
        self.closed = False  # the session is gone: nothing is told to it

    def charge(self, tokens: int) -> None:
        """Add `tokens` of service; less than 0: they were not used."""
        self.served += tokens
        self.tenant.served += tokens

    def hold(self, rows: int) -> None:
        """Count `rows` more rows, or -1 less. A request that asks for pages to use a row counts too."""
        self.rows += rows
        self.tenant.rows += rows


class Request:
    """A submitted request; `done` counts the output tokens that earlier runs committed."""

    __slots__ = (
        *("accepted", "account", "ahead", "batch", "cached", "came", "charge", "computed"),
        *("constrained", "deaths", "died_at", "done", "ending", "first_token"),
        *("forced_tokens", "foreseen", "ignores_reserve", "in_memory_queue", "lacking"),
        *("leave", "level", "limit", "losses", "mark", "most", "need", "overtakes"),
        *("promised", "prompt", "reached", "record", "remaining", "repeated", "replayed"),
        *("resident", "run", "seq", "single_answer", "stale", "started", "state", "stops"),
        *("submit", "targets", "ticket"),
    )

    def __init__(
        self,
        submit: Submit,
        account: Account,
        seq: int,
        batch: int,
        mark: int,
        limit: int,
        targets: Targets | None = None,
    ):
        self.submit = submit
        self.targets = targets
        self.account = account
        self.seq = seq  # order of arrival
        self.batch = batch  # requests that were submitted together have the same
        self.mark = mark  # tokens that the engine had processed when it arrived
        self.limit = limit  # most output tokens: max_tokens, the context, the pool
        self.ahead = limit == 0 and targets is None  # it only computes a prompt, for a later generation
        self.level: Level = not self.ahead, submit.priority
        self.stops = frozenset(submit.stop_token_ids)
        self.state = RequestState.WAITING
        self.run: Run | None = None
        self.ending: Reason | None = None  # ACQUIRING: cancelled meanwhile
        self.resident = 0
        self.repeated = False  # it runs once more, because KV that it found was not finite
        self.done = 0  # this and the two that follow it: see `keep`
        self.prompt = submit.prompt  # tokens of the branch before the next output token
        self.remaining = limit
        self.accepted = 0  # of its output tokens, those that came as drafts
        self.record: DraftRecord | None = None  # how its drafts did; see `speculation`
        self.ticket = 0  # its valid entry in the waiting queue
        self.charge = 0  # tokens charged to the account when it was picked
        self.cached = 0  # of the first grant, for usage
        self.computed = 0
        self.replayed = 0  # of its prompt and its output, tokens run although their KV was there
        self.reached = 0  # tokens whose KV its retracted run had
        self.lacking = 0  # of its prompt, as `pace` counts
        self.need = 0  # pages that it asked for when it was denied for memory; 0: unknown
        self.promised = False  # pages were made free for it
        self.foreseen = 0  # slots that it may still use, as `active` counts
        self.most = 0  # slots that it may need and be warm, where it asks before it waits; see `cold`
        self.leave = 0  # pages that its Acquire leaves for others
        self.in_memory_queue = False  # it waits for its session to begin; see `memory_queue`
        self.came = -1  # the step in which it first joined the memory queue
        self.ignores_reserve = False  # it may take pages that are reserved for active sessions
        self.single_answer = False  # granting it does not begin its session
        self.overtakes = False  # it may go before requests that wait for more pages
        self.started = 0.0
        self.first_token = 0.0
        self.forced_tokens = 0  # of its output, those that its constraint left no choice for
        self.constrained = bool(submit.constraint)
        self.stale = False  # its constraint is not there
        self.losses = 0  # executors that died in a step of it; this and what follows: see `suspects`
        self.deaths = 0  # of these, the last ones between which it got no token
        self.died_at = -1  # its output tokens at the last one

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
        )


class Run:
    """A request that has pages: its row, its lengths, its output since the grant."""

    __slots__ = (
        *("account", "ahead", "bad", "cached", "cap", "computed", "cut", "decoding", "due"),
        *("filled", "forced", "growing", "history", "ident", "jump", "jumps", "limit"),
        *("live", "lot", "offered", "offset", "opened", "out", "pages", "place", "planned"),
        *("priority", "prompt", "proven", "replayed", "request", "row", "since", "slots"),
        *("states", "stop_at", "stops", "target", "tokens", "turn", "waiters", "windows"),
    )

    def __init__(
        self,
        request: Request,
        row: int,
        cached: int,
        tokens: bytes,
        pages: bytes,
        history: bytes,
        proven: bool,
        page_size: int,
        since: int = 0,
    ) -> None:
        prompt = request.prompt
        self.request = request
        self.ident = request.submit.request
        self.account = request.account
        self.stops = request.stops
        self.row = row
        self.since = since  # the step before its first
        self.priority = request.submit.priority  # or that of a request that waits for its prompt
        self.prompt = prompt
        self.limit = request.remaining  # most output tokens of this run
        self.ahead = request.ahead  # nobody waits for it
        self.cap = prompt + max(0, self.limit - 1)  # most slots it can ever use
        self.cached = self.computed = self.filled = cached
        self.cut = prompt  # where its next chunk must end at the latest
        self.states: StateSlots | None = None  # of a model with fixed states
        self.windows = b""  # of the table of window pages, see `OpenRow`
        self.replayed = 0  # tokens whose KV it has twice
        self.offered = cached  # of what is filled, what the cache may hand out before the result is here
        self.tokens = tokens
        self.pages = pages
        self.history = history
        self.proven = proven  # the KV that it found
        self.slots = len(pages) // 4 * page_size
        self.out = array("i")  # accepted
        self.jumps = request.constrained  # its constraint may say what must follow
        self.jump = 0  # drafts that it is asked for then; 0: the executor asks none
        self.forced = bytearray()  # of each, under a constraint: 1 if there was no choice
        self.target = request.targets.done if request.targets else 0  # the next to plan
        self.planned = 0  # output tokens planned, drafts included; while decoding: tick + offset
        self.offset = 0
        self.stop_at = 0  # it cannot decode further once this many are planned
        self.due = 0  # the tick of its next review, if it has no drafts until then
        self.live = True
        self.bad = False  # its first logits were not finite: none of its KV is to be trusted
        self.opened = False
        self.decoding = False
        self.growing = False  # a Grow is asked for
        self.waiters: list[Request] = []  # PARKED on this run
        self.place = 0  # its valid entry among the prompts
        self.turn = 0  # virtual time at which its lot may begin
        self.lot = 0  # prompt tokens that it may have planned in this turn

    @property
    def level(self) -> Level:
        return not self.ahead, self.priority

    @property
    def held(self) -> int:
        """Slots of the pool that it has for itself, until it publishes them."""
        return self.slots - self.cached

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


def output_limit(submit: Submit, info: ExecutorInfo) -> int:
    """Most output tokens of a request: what it asked for, what the context and the pool hold.

    The last output token is never run, so it needs no slot. Since the limit accounts for the
    pool, a request that runs alone always gets the pages it asks for.
    """
    pool = info.pages * info.page_size
    return max(0, min(submit.max_tokens, info.context - submit.prompt, pool - submit.prompt + 1))
