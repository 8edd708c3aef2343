"""Runs `select`: tokenizes the choices, has them scored by requests, appends the best one. And has what
an `append` brings scored, where its log-probabilities are wanted. Pure.

A selection is scored by requests on temporary branches of the cache that no client sees, one for each
path of the choices' tree (`selection`). At most `limits.running` requests of a session are submitted at
once: its selections share them, and the rest of a large one waits here. A selection either appends a
choice or changes nothing: whatever stops it ends its op with an error, and what is left is cancelled.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from ramify.actors.kit.memory import SEGMENT, TOKEN
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.segments import OutputSegment, Tail
from ramify.actors.session.branches.state import EncodeText, Made, SessionState
from ramify.actors.session.branches.tasks import Task
from ramify.actors.session.input.branch_writer import BranchWriter
from ramify.actors.session.ops.scoring.selection import (
    Choices,
    ChoiceTree,
    Input,
    Measured,
    Scoring,
    Selection,
    join_texts,
)
from ramify.actors.session.output.endings import refusal
from ramify.actors.session.output.generations import Generations
from ramify.actors.session.sockets.publisher import Publisher, bare
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    LimitExceeded,
    RamifyError,
    TooLong,
    brief,
)
from ramify.protocol.messages import (
    CancelRequest,
    DropBranches,
    ExtendBranch,
    Finished,
    ForkBranch,
    OpenBranch,
    Submit,
)
from ramify.protocol.plan import pack
from ramify.protocol.sampling import SamplingParams
from ramify.protocol.wire import Done, JsonObject, Ok, Select

MOST_SCORED = 1 << 14  # numbers in the reply to one append: they are made in one turn of the loop
AROUND = 64  # characters of the branch's end, about, that each choice is tokenized with


class Selects:
    """The selections of one session. `on_end(task, end)`: its terminal reply, or why there is none."""

    def __init__(
        self,
        state: SessionState,
        writer: BranchWriter,
        generations: Generations,
        publisher: Publisher,
        *,
        on_end: Callable[[Task, Ok | Done | RamifyError], None],
    ) -> None:
        self._state = state
        self._writer = writer
        self._generations = generations
        self._publisher = publisher
        self._on_end = on_end
        self._by_task: dict[int, Measured] = {}
        self.requests: dict[int, Measured] = {}  # what is being scored, by the request's number
        self._encoding: dict[int, Selection] = {}
        self._paused: set[str] = set()  # clients
        self._ready: OrderedDict[int, Measured] = OrderedDict()  # have more to submit; by id(task)

    @property
    def busy(self) -> bool:
        """Whether any choice is being scored, or waits to be."""
        return bool(self._encoding or self.requests or self._ready)

    @property
    def measured(self) -> list[Measured]:
        """The selections and measured appends that have not ended."""
        return list(self._by_task.values())

    # --- start -----------------------------------------------------------------------------------

    def start(self, op: Select, task: Task, branch: SessionBranch) -> None:
        """Begin the selection of `task`. Raises RamifyError, and then nothing has changed."""
        if branch.position == 0:
            raise BadRequest(f"branch {branch.name!r} is empty: append something before `select`")
        size = size_of(op)
        self._state.meter.require(SEGMENT + TOKEN * size)
        self._generations.prefills.cancel(branch)
        chat, before = branch.tail is not Tail.RAW, branch.position
        self._writer.open_turn(branch, task.frame.opened, known=task.frame.prompts)
        selection = self._by_task[id(task)] = Selection(op, task, branch, chat=chat, before=before)
        prepare = partial(_prepare, self._writer.tokenizer, branch, op.choices)
        if not task.frame.spend(size, self._publisher.now):
            ticket = self._state.next_id()
            self._encoding[ticket] = selection
            self._state.out.encode.append(EncodeText(ticket, size, prepare))
            return
        try:
            self._tokenized(selection, prepare())
        except RamifyError:
            self._forget(selection)
            raise

    def measure(
        self,
        task: Task,
        branch: SessionBranch,
        at: int,
        tokens: "array[int]",
        tops: int,
        then: Callable[[list[JsonObject]], Ok],
    ) -> Ok | None:
        """Have `tokens` scored that an append puts at position `at`, then call `then`.

        The reply, or None if it comes later. Raises RamifyError, and then nothing has changed.
        """
        if len(tokens) * (1 + tops) > MOST_SCORED:
            raise LimitExceeded(
                f"{len(tokens)} tokens with `logprobs` {tops} are over {MOST_SCORED} numbers: "
                "append them in parts, or ask for fewer `logprobs`",
                details={"max": MOST_SCORED // (1 + tops), "field": "logprobs"},
            )
        measured = Input(task, branch, at, tokens, tops, then)
        if not measured.waiting:  # nothing stands behind a token
            return then(measured.entries())
        self._state.meter.require(measured.size)
        self._state.meter.add(measured.size)
        self._by_task[id(task)] = measured
        self._go_on(measured)
        return None

    def encoded(self, ticket: int, result: Made | None, error: BaseException | None) -> bool:
        """Go on with a selection whose choices were tokenized, or could not be. False: it is none."""
        selection = self._encoding.pop(ticket, None)
        if selection is None:
            return False
        if selection.ended:
            return True
        if not isinstance(result, Choices):
            refused = error if isinstance(error, RamifyError) else None
            why = f"the choices cannot be tokenized: {brief(str(error))}"
            self._fail(selection, refused or BadRequest(why))
            return True
        try:
            self._tokenized(selection, result)
        except RamifyError as failure:
            self._fail(selection, failure)
        return True

    def _tokenized(self, selection: Selection, choices: Choices) -> None:
        """Check the choices' tokens, then have them scored. Raises RamifyError."""
        state, joined = self._state, choices.joined
        for i, tokens in enumerate(joined.tokens):
            if not tokens:
                raise BadRequest(f"choices[{i}] has no tokens: leave it out")
            if joined.at + len(tokens) > state.context:
                raise TooLong(
                    f"choices[{i}] has {len(tokens)} tokens, which pass the context of {state.context} "
                    f"behind the {joined.at} of branch {selection.branch.name!r}: shorten it, or fork "
                    "from an earlier position",
                    details={"max": state.context, "position": joined.at, "tokens": len(tokens)},
                )
            self._writer.check(tokens)
        size = selection.tokenized(choices, len(self._writer.tokenizer.start_ids))
        state.meter.require(size)
        state.meter.add(size)
        selection.size = size
        self._go_on(selection)

    def _go_on(self, selection: Measured) -> None:
        """Have the rest of a selection scored, unless its client is away and wants it to wait."""
        if selection.waiting and selection.task.frame.client not in self._paused:
            self._ready[id(selection.task)] = selection
        self._submit_ready()

    def _submit_ready(self) -> None:
        """Submit what waits, as far as the session's limit allows. Selections share it equally."""
        while self._ready and (room := self._state.limits.running - len(self.requests)) > 0:
            key, selection = self._ready.popitem(last=False)
            self._submit(selection, -(-room // (len(self._ready) + 1)))
            if selection.waiting:
                self._ready[key] = selection

    def _submit(self, selection: Measured, most: int) -> None:
        """Submit at most `most` of its requests."""
        state, out, start = self._state, self._state.out, self._writer.tokenizer.start_ids
        lot = selection.take(most)
        handles = [state.next_id() for _ in lot]
        behind = [handle for scoring, handle in zip(lot, handles, strict=True) if scoring.behind]
        if behind:
            out.cache.append(ForkBranch(selection.branch.handle, behind, selection.at))
        for scoring, handle in zip(lot, handles, strict=True):
            if scoring.behind:
                self._ask(selection, scoring, handle, scoring.path.tokens)
            else:
                out.cache.append(OpenBranch(handle, state.namespace))
                self._ask(selection, scoring, handle, [*start, *scoring.path.tokens])

    def _ask(self, selection: Measured, scoring: Scoring, handle: int, tokens: Sequence[int]) -> None:
        """Submit a request on the new branch `handle`, which `tokens` complete."""
        state = self._state
        if tokens:
            state.out.cache.append(ExtendBranch(handle, pack(tokens)))
        request = state.next_id()
        selection.handles[request] = handle
        selection.pending[request] = scoring
        self.requests[request] = selection
        state.out.scheduler.append(
            Submit(
                request=request,
                branch=handle,
                prompt=scoring.length,
                max_tokens=0,
                sampling=SamplingParams(),
                priority=selection.priority,
                deadline=selection.deadline,
                arrived=selection.task.arrived,
                owner=state.owner,
                expects=state.expects,
                places=pack(scoring.places),
                targets=pack(scoring.path.targets),
                tops=selection.tops,
            )
        )

    def pause(self, client: str) -> None:
        """Pause the selections of a client that is gone and asked for it. Scores so far are kept."""
        self._paused.add(client)
        for key, selection in self._by_task.items():
            if selection.task.frame.client == client:
                self._ready.pop(key, None)
                self._withdraw(selection)
        self._submit_ready()

    def unpause(self, client: str) -> None:
        """Go on with the selections of a client that is back."""
        if client in self._paused:
            self._paused.remove(client)
            for selection in list(self._by_task.values()):
                if selection.task.frame.client == client:
                    self._go_on(selection)

    def _withdraw(self, selection: Measured) -> None:
        """Take back what is not scored yet, with its branches in the cache."""
        out, pending = self._state.out, selection.pending
        for request in pending:
            del self.requests[request]
            out.scheduler.append(CancelRequest(request))
        if pending:
            out.cache.append(DropBranches([selection.handles.pop(request) for request in pending]))
        selection.again()

    def change_core(self) -> None:
        """Ask another engine, which has the branches now, for the scores that are missing."""
        self.requests.clear()
        for selection in self._by_task.values():
            selection.again()
            selection.handles.clear()
        for selection in list(self._by_task.values()):
            self._go_on(selection)

    # --- the end ---------------------------------------------------------------------------------

    def finished(self, finished: Finished, now: float) -> bool:
        """Take the scores of a request that has ended. False if it was no request of a selection."""
        selection = self.requests.pop(finished.request, None)
        if selection is None:
            return False
        scoring = selection.pending.pop(finished.request)
        match finished.reason:
            case "length":
                selection.scored(scoring, finished)
                if not selection.pending and not selection.waiting:
                    self._complete(selection, now)
                else:
                    self._submit_ready()
            case "deadline":
                self._fail(selection, _late())
            case _:
                self._fail(selection, refusal(finished))
        return True

    def _complete(self, measured: Measured, now: float) -> None:
        """End an op all of whose tokens are scored."""
        if isinstance(measured, Selection):
            self._choose(measured, now)
            return
        assert isinstance(measured, Input)
        self._forget(measured, chosen=True)
        try:
            end: Ok | RamifyError = measured.then(measured.entries())
        except RamifyError as error:
            end = bare(error)
        self._on_end(measured.task, end)
        self._submit_ready()

    def _choose(self, selection: Selection, now: float) -> None:
        """Append the best choice as output, and reply."""
        state, branch, joined = self._state, selection.branch, selection.joined
        index, scores = selection.best()
        self._forget(selection, chosen=True)
        tokens, rebased = joined.tokens[index], None
        anew = _told_from(branch, joined.at)
        if tokens[: len(joined.own)] == joined.own:
            del tokens[: len(joined.own)]
        else:  # the branch's last tokens are others before this text
            rebased = joined.at
            state.truncate(branch, rebased)
        segment = OutputSegment(branch.position, op=selection.op.id, client=selection.task.frame.client)
        segment.charge(state.meter, SEGMENT)
        if not selection.chat:
            segment.tail, segment.role = Tail.RAW, None
        segment.lead = len(joined.tail) if rebased is not None else 0
        segment.tokens.extend(tokens)
        segment.release(len(tokens), self._writer.tokenizer.decode(tokens))
        segment.ended, segment.mean = True, selection.mean(index)
        branch.segments.append(segment)
        state.extend_handle(branch, tokens)
        branch.reason = "stop"
        revision = state.bump()
        if rebased is not None:
            branch.cut_back(revision, rebased)
            self._publisher.rewrite(branch, anew)
        self._publisher.flush((branch,))
        done = Done(
            id=selection.op.id,
            branch=branch.name,
            position=branch.position,
            revision=revision,
            reason="stop",
            usage=selection.usage(len(tokens), now),
            text=selection.op.choices[index],
            choice=index,
            scores=scores,
            mean_logprob=segment.mean,
            rebased=rebased,
        )
        self._on_end(selection.task, done)
        self._submit_ready()

    def cancel(self, task: Task) -> bool:
        """Stop the selection of `task` and end the task at once. False if it has none."""
        return self._stop(task, Cancelled("cancelled before it was scored"))

    def expire(self, task: Task) -> bool:
        """End the selection of `task`, whose deadline has passed. False if it has none."""
        return self._stop(task, _late())

    def fail(self, error: RamifyError) -> None:
        """End all selections with `error`: the engine is broken."""
        for selection in list(self._by_task.values()):
            self._fail(selection, error)

    def _stop(self, task: Task, error: RamifyError) -> bool:
        selection = self._by_task.get(id(task))
        if selection is None:
            return False
        self._fail(selection, error)
        return True

    def _fail(self, selection: Measured, error: RamifyError) -> None:
        """End the selection with an error. The branch is as it was, and its requests stop."""
        self._forget(selection)
        self._on_end(selection.task, bare(error))
        self._submit_ready()

    def _forget(self, selection: Measured, *, chosen: bool = False) -> None:
        """Release all that a selection holds; unless `chosen`, also an added generation prompt."""
        state = self._state
        selection.ended = True
        del self._by_task[id(selection.task)]
        self._ready.pop(id(selection.task), None)
        self._withdraw(selection)
        if selection.handles:
            state.out.cache.append(DropBranches([*selection.handles.values()]))
        state.meter.add(-selection.size)
        if not chosen and selection.before < selection.branch.position:
            state.truncate(selection.branch, selection.before)
            self._publisher.cut(selection.branch, selection.before)


def size_of(op: Select) -> int:
    """About how many characters are tokenized for a `select`."""
    return sum(map(len, op.choices)) + AROUND * len(op.choices)


def _prepare(tokenizer: Tokenizer, branch: SessionBranch, texts: Sequence[str]) -> Choices:
    """Tokenize the choices behind the branch. Another thread may run it while the branch is at rest."""
    joined = join_texts(tokenizer, branch, texts)
    return Choices(joined, ChoiceTree(joined.tokens))


def _told_from(branch: SessionBranch, at: int) -> int:
    """Find where clients can cut their text so that it ends at `at` or before.

    Output that was sent as one chunk cannot be cut inside it: it is sent again.
    """
    link = branch.segments.before(at)
    if link is None:
        return at
    segment = link.segment
    return segment.start if isinstance(segment, OutputSegment) and segment.end > at else at


def _late() -> RamifyError:
    return DeadlineExceeded("the deadline passed before the choices were scored")
