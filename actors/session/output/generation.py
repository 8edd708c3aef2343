"""One generation of a session: its parameters, its output so far, its end. And those that wait.

Pure: tokens go in, released text and the decision to stop come out. The scheduler knows it as one
request, or as several in turn when it is paused.
"""

import os
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ramify.actors.kit.memory import LOGPROB
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.segments import OutputSegment
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.branches.tasks import Task
from ramify.actors.session.input.speech import Demand
from ramify.actors.tokenizer import GenerationDefaults
from ramify.actors.tokenizer.detokenizer import TextStream
from ramify.protocol.errors import RamifyError
from ramify.protocol.messages import SPARE, CancelRequest, Finished, Submit
from ramify.protocol.sampling import SamplingParams, TokenLogprobs
from ramify.protocol.saved import SavedRun
from ramify.protocol.wire import Generate, Hit, TokenLogprob, Usage

AT_ONCE = 64  # seeds that are made
_NUMBERS = struct.Struct(f"{AT_ONCE}Q")
PREFILL_PRIORITY = -8
RECALLED = 2  # branches whose KV is loaded when a client comes back
CLOSE = 60  # what it costs to end a generation (see `Work`)
CHUNKS, SEGMENTS = 5, 4  # that are read in a microsecond


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class GenerationState:
    """State of one `generate` on one branch."""

    op: Generate
    branch: SessionBranch
    segment: OutputSegment
    text: TextStream
    sampling: SamplingParams
    stops: frozenset[int]  # tokens
    max_tokens: int
    deadline: float | None
    chat: bool
    opened: int | None = None  # where what it was made to begin with stands, if anything
    arrived: float
    began: float  # later than it arrived, where an earlier server had begun it
    resumed: bool = False  # and its first tokens came from there
    request: int = 0
    before: int = 0  # output tokens of earlier requests (a pause)
    stopping: bool = False  # a stop string matched: the request is being cut there
    stop_token: int | None = None  # sampled: the last token of the segment, never text
    paced: bool = False  # its request ends with the budget of its thought, not with the output
    pausing: bool = False  # its client went away with `detach: pause`
    cancelled: bool = False
    expired: bool = False  # its deadline has passed
    exhausted: bool = False  # the session has no more memory: it is being cut here
    first: Finished | None = None  # of the first request: prompt, cached, computed
    first_token: float = 0.0  # when it came; 0: it has not, or nobody knows
    held: Demand | None = None  # what it has to be
    compiling: bool = False  # its request waits for its constraint
    notes: list[str] = field(default_factory=list)  # on its constraint
    accepted: int = 0  # drafts; the end of a request says exactly what `Progress` told till then
    forced: int = 0  # tokens that the constraint left no choice for
    refusal: RamifyError | None = None  # why its constraint cannot be had
    logprob_sum: float = 0.0
    logprob_count: int = 0
    _scheduled: bool = False  # `first_token` is the scheduler's time, not that of its message
    _counted: tuple[int, int] = 0, 0  # accepted and forced, of the requests before this one

    @property
    def decided(self) -> bool:
        """Whether its output is complete, so that the way it ended is certain."""
        return self.stopping or self.stop_token is not None

    @property
    def ending(self) -> bool:
        """Whether the session has decided its end and waits for the scheduler to confirm it."""
        return self.decided or self.cancelled or self.exhausted

    @property
    def counting(self) -> bool:
        """Whether counts of a `SavedRun` change with each token, beside the output."""
        return bool(self.accepted or self.forced or self.logprob_count)

    @property
    def remaining(self) -> int:
        return self.max_tokens - len(self.segment.tokens)

    @property
    def closing(self) -> int:
        """The cost of its end: its text is put together, and told."""
        spoken = len(self.branch.segments) // SEGMENTS if self.segment.reading is not None else 0
        return CLOSE + len(self.segment.chunks) // CHUNKS + spoken

    def thinks_too_long(self) -> bool:
        """Whether it is inside a thought that has used up its tokens."""
        most, reading = self.op.thought_tokens, self.segment.reading
        if most is None or reading is None or len(self.segment.tokens) < most:
            return False
        return reading.reader.place.part == "thought"

    def pace(self) -> int:
        """The most tokens of its next request: up to the bound of a thought that may be going on."""
        most, left = self.op.thought_tokens, self.remaining
        until = most - len(self.segment.tokens) if most is not None else 0
        self.paced = self.segment.reading is not None and 0 < until < left
        return until if self.paced else left

    def put(self, tokens: Sequence[int]) -> None:
        """Say `tokens` in the model's place, between two requests: nothing else was possible."""
        self.forced += len(tokens)
        self._counted = self.accepted, self.forced
        if self.op.logprobs:
            certain = [TokenLogprob(token=token, logprob=0.0, top=[(token, 0.0)]) for token in tokens]
            self.segment.logprobs = [*(self.segment.logprobs or ()), *certain]
            self.segment.grow(2 * LOGPROB * len(tokens))
        for token in tokens:  # one by one, as the model would: each has a label of its own
            self.push([token], ())

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> bool:
        """Add new tokens, in order. Returns whether they completed a stop string.

        After a stop, tokens that were under way are ignored. A stop token ends the output here,
        when it is seen: its request's end may be told much later, and must not be waited for.
        It becomes the last token of the segment, without text and without a mark.
        """
        if self.stopping or self.stop_token is not None:  # `decided`, which is asked for each token
            return False
        segment = self.segment
        if not self.stops.isdisjoint(tokens):
            at = next(i for i, token in enumerate(tokens) if token in self.stops)
            self.stop_token, tokens, logprobs = tokens[at], tokens[:at], logprobs[:at]
        segment.tokens.extend(tokens)
        if logprobs:
            self._add_logprobs(tokens, logprobs)
        released = self.text.push(tokens) if tokens else None
        if released is not None:
            segment.release(released.count, released.text)
        if self.text.stopped is not None:
            self.stopping, self.stop_token = True, None
            return True
        if self.stop_token is not None:
            segment.tokens.append(self.stop_token)
        return False

    def _add_logprobs(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> None:
        shown = self.op.logprobs > 0  # else only their mean is wanted
        if shown and self.segment.logprobs is None:
            self.segment.logprobs = []
        for token, entry in zip(tokens, logprobs, strict=True):
            if entry is None:
                raise ValueError(f"request {self.request} asked for log-probabilities and got none")
            self.logprob_sum += entry.logprob
            self.logprob_count += 1
            if shown and self.segment.logprobs is not None:
                self.segment.grow(LOGPROB * (1 + len(entry.top_ids)))
                top = list(zip(entry.top_ids, entry.top_logprobs, strict=True))
                self.segment.logprobs.append(TokenLogprob(token=token, logprob=entry.logprob, top=top))

    def keep(self, count: int) -> None:
        """Cut the output to its first `count` tokens."""
        del self.segment.tokens[count:]
        if self.segment.logprobs is not None:
            del self.segment.logprobs[count:]

    def usage(self, finished: Finished, output: int) -> Usage:
        """Make the usage. Times run from the op's arrival; `cached` is what the first request found.

        Of an answer that an earlier server or replica began, the time to the first token is what it was
        there, and the queue is that of the last one.
        """
        first = self.first or finished
        started = first.started or finished.ended
        prompt = min(first.prompt, self.segment.start)  # an earlier one may have made a part of the rest
        cached = min(first.cached, prompt)
        return Usage(
            prompt=prompt,
            cached=cached,
            computed=min(first.computed, prompt - cached),
            output=output,
            forced=min(self.forced, output),
            hit=self._hit(first, cached),
            queue_ms=round(max(0.0, started - self.began) * 1e3, 3),
            ttft_ms=None if (ttft := self.ttft) is None else round(ttft * 1e3, 3),
            total_ms=round((finished.ended - self.arrived) * 1e3, 3),
            accepted=min(self.accepted, output),
            thought=min(self.segment.thought, output),
        )

    def _hit(self, first: Finished, cached: int) -> Hit:
        """Tell where cached tokens were before the branch's last input, else before this op."""
        brought, self.branch.brought = self.branch.brought, (0, 0)
        disk = min(cached, first.disk + brought[1])
        host = min(cached - disk, first.host + brought[0])
        return Hit(gpu=cached - host - disk, host=host, disk=disk)

    def note(self, finished: Finished) -> None:
        """Remember the first request's figures across a pause, and what adds up."""
        accepted, forced = self._counted
        self.accepted, self.forced = accepted + finished.accepted, forced + finished.forced
        self._counted = self.accepted, self.forced
        if self.first is None or not self.first.computed:  # paused before it ran
            self.first = finished
        if not self.resumed and finished.first_token and not self._scheduled:
            self._scheduled = True
            self.first_token = finished.first_token

    @property
    def ttft(self) -> float | None:
        """Seconds from the op's arrival to its first token, if it has one."""
        return self.first_token - self.arrived if self.first_token else None

    def move(self, now: float) -> None:
        """Move to another engine: the one before tells no times any more."""
        self.began = now
        self._counted = self.accepted, self.forced
        if self.first_token:
            self._scheduled = True

    def resume(self, now: float, run: SavedRun, before: OutputSegment) -> None:
        """An earlier server has begun it, and had its first token. `before`: what it said."""
        for token in before.tokens:  # one by one: its marks are those that were, or more
            self.push([token], ())
        self.segment.logprobs = before.logprobs
        if before.logprobs is not None:
            self.segment.grow(LOGPROB * sum(1 + len(each.top) for each in before.logprobs))
        self.resumed, self.began = True, now
        if run.ttft is not None:
            self.first_token = self.arrived + run.ttft
        self.forced, self.accepted = run.forced, run.accepted
        self._counted = self.accepted, self.forced
        self.logprob_sum, self.logprob_count = run.logprob, run.scored


class Seeds:
    """Each call returns a number below 2**62: seeds of generations whose client gave none.

    The operating system's, many at a time: asking it for each costs as much as twenty calls of Python.
    All sessions share one. It is no generator, because an exception inside a generator ends it for all.
    """

    def __init__(self) -> None:
        self._left: list[int] = []

    def __call__(self) -> int:
        if not self._left:
            self._left = [number >> 2 for number in _NUMBERS.unpack(os.urandom(_NUMBERS.size))]
        return self._left.pop()


def sampling_of(op: Generate, usual: GenerationDefaults, seed: int, *, scored: bool) -> SamplingParams:
    """Make an op's sampling parameters. What it leaves out is as in `usual`."""
    repetition = op.repetition_penalty
    return SamplingParams(
        temperature=usual.temperature if op.temperature is None else op.temperature,
        top_k=usual.top_k if op.top_k is None else op.top_k,
        top_p=usual.top_p if op.top_p is None else op.top_p,
        min_p=usual.min_p if op.min_p is None else op.min_p,
        frequency_penalty=op.frequency_penalty,
        presence_penalty=op.presence_penalty,
        repetition_penalty=usual.repetition_penalty if repetition is None else repetition,
        seed=seed % 2**63,  # branches of one op differ
        logprobs=max(op.logprobs, int(scored)),
    )


Waits = tuple[GenerationState, Task]


class WaitingGenerations:
    """Generations that are not submitted, in order: those that are `ready`, and those of clients that
    are away. Any of them may be cancelled.
    """

    def __init__(self) -> None:
        self.ready: OrderedDict[int, Waits] = OrderedDict()  # by id() of their task
        self.paused: dict[str, OrderedDict[int, Waits]] = {}  # by client

    def add(self, generation: GenerationState, task: Task, *, pausing: bool = True) -> None:
        """Add a generation behind the others. If `pausing`, it waits for a client that is away."""
        away = self.paused.get(task.frame.client) if pausing else None
        (self.ready if away is None else away)[id(task)] = generation, task

    def put_first(self, entries: Iterable[Waits]) -> None:
        """Put entries before all that are ready."""
        first = OrderedDict((id(task), (generation, task)) for generation, task in entries)
        first.update(self.ready)
        self.ready = first

    def remove(self, task: Task) -> None:
        """Take out the generation of a task, if it waits."""
        for queue in (self.ready, *self.paused.values()):
            queue.pop(id(task), None)

    def clear(self) -> list[Waits]:
        """Take out all generations."""
        entries = list(self.ready.values())
        entries += [entry for away in self.paused.values() for entry in away.values()]
        self.ready.clear()
        self.paused.clear()
        return entries

    def pause(self, client: str) -> None:
        """Hold what is added for a client that is away, until it is back."""
        self.paused.setdefault(client, OrderedDict())

    def withdraw(self, client: str) -> None:
        """Hold what was ready for a client that is away."""
        for key in [key for key, (_, task) in self.ready.items() if task.frame.client == client]:
            self.paused[client][key] = self.ready.pop(key)

    def unpause(self, client: str) -> None:
        """Make ready what was held for a client that is back."""
        self.ready.update(self.paused.pop(client, ()))


class Prefills:
    """Requests without output, which compute appended tokens that no generation waits for yet."""

    def __init__(self, state: SessionState) -> None:
        self._state = state
        self.branches: dict[int, SessionBranch] = {}  # by request
        self._recalls: set[int] = set()  # requests that only load

    def recall(self, known: dict[SessionBranch, tuple[int, int]], now: float) -> None:
        """Load the KV of the newest branches from host memory and disk before a request needs it.

        It takes free pages, and steps that have nothing else. `known`: see `Inspected`.
        """
        away = [branch for branch, (_, tier) in known.items() if tier and branch.prefill is None]
        for branch in away[-RECALLED:]:
            self.start(branch, now, spare=True)

    def start(self, branch: SessionBranch, now: float, *, spare: bool = False) -> None:
        """Compute what was appended before a generation asks for it."""
        if branch.position == 0 or branch.position >= self._state.context:
            return
        self.cancel(branch)
        branch.prefill = self._state.next_id()
        self.branches[branch.prefill] = branch
        if spare:
            self._recalls.add(branch.prefill)
        self._state.out.scheduler.append(
            Submit(
                request=branch.prefill,
                branch=branch.handle,
                prompt=branch.position,
                max_tokens=0,
                sampling=SamplingParams(),
                priority=SPARE if spare else PREFILL_PRIORITY,
                arrived=now,
                owner=self._state.owner,
                expects=0 if spare else self._state.expects,
                spare=spare,
            )
        )

    def cancel(self, branch: SessionBranch) -> None:
        """Stop computing ahead: the branch is about to change under it."""
        if branch.prefill is not None:
            self._state.out.scheduler.append(CancelRequest(branch.prefill))
            branch.prefill = None

    def finished(self, finished: Finished) -> bool:
        """Note that a request ended. Returns whether it was one of these."""
        self._recalls.discard(finished.request)
        branch = self.branches.pop(finished.request, None)
        if branch is None:
            return False
        if branch.prefill == finished.request:
            branch.prefill = None
        host, disk = branch.brought
        branch.brought = host + finished.host, disk + finished.disk
        return True

    def again(self, now: float) -> None:
        """Compute ahead anew at another engine, which has the branches now."""
        branches = [branch for request, branch in self.branches.items() if branch.prefill == request]
        self.branches.clear()
        recalls, self._recalls = self._recalls, set()
        for branch in branches:
            request, branch.prefill = branch.prefill, None
            if request not in recalls:
                self.start(branch, now)

    def clear(self) -> None:
        """Forget all requests: the engine is broken."""
        self.branches.clear()
        self._recalls.clear()
