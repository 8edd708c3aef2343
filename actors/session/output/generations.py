"""The generations of one session: submitted, streamed, stopped, paused, ended. Pure.

A generation is one request to the scheduler (several in turn when it is paused). At most
`limits.running` are submitted at once; the rest wait here in order. The request of a generation under a
constraint goes by way of the grammar actor: it names the request, and is submitted when it has answered.
"""

import logging
from collections.abc import Callable, Iterable

import msgspec

from ramify.actors.calls.reader import TurnPlace
from ramify.actors.kit.memory import SEGMENT
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.segments import OutputSegment, Rule, Tail
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.branches.tasks import Resumed, Task
from ramify.actors.session.input.branch_writer import BranchWriter
from ramify.actors.session.input.speech import Constraints, Demand, continued
from ramify.actors.session.output.endings import (
    FULL,
    EndedHere,
    Endings,
    ended_here,
    reason_here,
    refusal,
    refused_constraint,
)
from ramify.actors.session.output.generation import (
    GenerationState,
    Prefills,
    WaitingGenerations,
    Waits,
    sampling_of,
)
from ramify.actors.tokenizer.detokenizer import Detokenizer
from ramify.protocol.errors import BadRequest, RamifyError, TooLong
from ramify.protocol.messages import (
    Abandon,
    CancelRequest,
    Compile,
    Compiled,
    Finished,
    NotCompiled,
    Progress,
    Submit,
)
from ramify.protocol.plan import unpack
from ramify.protocol.saved import SavedRule
from ramify.protocol.wire import Done, Generate

log = logging.getLogger(__name__)


class Generations:
    """The generations of one session.

    `on_output(branch)`: text was released; `on_done(task, done, text)`: a generation ended, and perhaps
    text was released; `on_cut(branch, to)`: the branch was moved back.
    """

    def __init__(
        self,
        state: SessionState,
        writer: BranchWriter,
        detokenizer: Detokenizer,
        *,
        random_seed: Callable[[], int],
        on_output: Callable[[SessionBranch], None],
        on_done: Callable[[Task, Done, str], None],
        on_cut: Callable[[SessionBranch, int], None],
        on_refused: Callable[[Task, RamifyError], None],
    ) -> None:
        self._state = state
        self._writer = writer
        self._detokenizer = detokenizer
        self._constraints = Constraints(writer.speech, writer.tokenizer)
        self._random_seed = random_seed
        self._on_output = on_output
        self._on_done = on_done
        self._on_refused = on_refused
        self._endings = Endings(state, writer, on_cut)
        self._by_request: dict[int, tuple[GenerationState, Task]] = {}
        self._by_task: dict[int, GenerationState] = {}
        self.waiting = WaitingGenerations()
        self.prefills = Prefills(state)

    @property
    def busy(self) -> bool:
        """Whether any generation is submitted or waits to be."""
        return bool(self._by_request or self.waiting.ready)

    @property
    def begun(self) -> Iterable[GenerationState]:
        """The generations that have begun and not ended."""
        return self._by_task.values()

    def of(self, task: Task) -> GenerationState | None:
        """The generation of `task`, if it has begun and not ended."""
        return self._by_task.get(id(task))

    # --- start -----------------------------------------------------------------------------

    def start(self, task: Task, branch: SessionBranch, now: float, *, scored: bool) -> None:
        """Begin the generation of `task`. Raises RamifyError, and then nothing has changed.

        `scored`: an op wants its mean log-probability.
        """
        op = task.op
        assert isinstance(op, Generate)
        tail = branch.tail
        chat, begun = tail is not Tail.RAW, tail is Tail.OPEN
        self._check(branch)
        if op.stop_token_ids:
            self._writer.check(op.stop_token_ids, "stop_token_ids")
        self._state.meter.require(SEGMENT)
        begun_output = continued(branch, op)
        speech, tools = self._writer.speech, task.frame.tools
        thinks = op.thought_tokens != 0
        opening = speech.opening(op.tool_choice, tools, chat=chat, begun=begun, thinks=thinks)
        opened = self._writer.open_turn(branch, task.frame.opened, opening, known=task.frame.prompts)
        position = branch.position
        segment = OutputSegment(position, op=op.id, client=task.frame.client)
        segment.quiet = op.quiet or op.hidden
        segment.charge(self._state.meter, SEGMENT)
        # Clients that give no name have one that nobody else has, so an HTTP request has its own.
        name = f"{task.frame.client} {op.id} {branch.name}"
        reading = speech.labels(branch, op.tool_choice, tools, name)
        if reading is not None:
            segment.read(reading)
        if not chat:
            segment.tail, segment.role = Tail.RAW, None
        usual = self._writer.tokenizer.generation_defaults
        eos = () if op.ignore_eos else self._writer.tokenizer.eos_ids
        seed = op.seed if op.seed is not None else self._random_seed()
        generation = GenerationState(
            op=op,
            branch=branch,
            segment=segment,
            text=self._detokenizer.stream(task.frame.stops(op)),
            sampling=sampling_of(op, usual, seed + task.index, scored=scored),
            stops=frozenset((*op.stop_token_ids, *eos)),
            max_tokens=min(op.max_tokens, self._state.context - position),
            deadline=task.arrived + op.deadline_ms / 1e3 if op.deadline_ms is not None else None,
            chat=chat,
            arrived=task.arrived,
            began=task.arrived,
            opened=opened,
        )
        place = reading.reader.place if reading is not None else TurnPlace("answer", "")
        if begun_output is not None:
            generation.held = Demand("constraint", place, "")
            segment.rule, segment.since = begun_output.rule, begun_output.since
        else:
            generation.held = self._constraints.held(op, tools, place, opening, chat=chat)
            segment.rule = self._rule(generation.held, task, op)
        if op.ignore_eos and tools and op.tool_choice != "none":
            generation.notes = ["with `ignore_eos`, calls are not held to the tools' schemas"]
        branch.segments.append(segment)
        self._by_task[id(task)] = generation
        if task.resumed is not None and self._resume(generation, task, task.resumed, now):
            return
        self.waiting.add(generation, task)
        self.submit_ready()

    def _resume(self, generation: GenerationState, task: Task, resumed: Resumed, now: float) -> bool:
        """Go on where an earlier server was. Returns whether it had come to its end, which is told now.

        Where the output would begin elsewhere (another template), it is made anew.
        """
        run, before, segment = resumed.run, resumed.segment, generation.segment
        generation.sampling = msgspec.structs.replace(generation.sampling, seed=run.seed)
        if before.start != segment.start or not before.tokens:
            return False
        self._state.extend_handle(generation.branch, before.tokens)
        generation.resume(now, run, before)
        if not generation.decided and generation.remaining > 0:
            return False
        reason: EndedHere = "stop" if generation.decided else "length"
        self._close(generation, task, ended_here(generation, now, reason=reason))
        return True

    def _rule(self, held: Demand | None, task: Task, op: Generate) -> Rule | None:
        """Find or make the rule of a client's constraint, once for all branches of `op`."""
        if held is None or op.constraint is None or held.by != "constraint":
            return None
        rules, key = task.frame.rules, (op.id, held)
        if key not in rules:
            spec = self._constraints.spec(held, op, task.frame.tools)
            assert spec is not None
            rules[key] = self._state.rule(SavedRule(spec, op.constraint.after_thought))
        return rules[key]

    def _check(self, branch: SessionBranch) -> None:
        position = branch.position
        if position >= self._state.context:
            raise TooLong(
                f"branch {branch.name!r} fills the context of {self._state.context} tokens: roll back "
                "or fork from an earlier position",
                details={"max": self._state.context, "position": position},
            )
        if position == 0:
            raise BadRequest(f"branch {branch.name!r} is empty: append something before `generate`")

    def submit_ready(self) -> None:
        """Submit waiting generations as far as the session's limit allows."""
        while self.waiting.ready and len(self._by_request) < self._state.limits.running:
            self._submit(*self.waiting.ready.popitem(last=False)[1])

    def _submit(self, generation: GenerationState, task: Task) -> None:
        if generation.thinks_too_long() and self._end_thought(generation, task):
            return
        generation.request = self._state.next_id()
        generation.before = len(generation.segment.tokens)
        self._by_request[generation.request] = (generation, task)
        held, rule = generation.held, generation.segment.rule
        spec = rule.what.spec if rule is not None else None
        if held is not None and rule is None:
            spec = self._constraints.spec(held, generation.op, task.frame.tools)
        if held is None or spec is None:
            self._tell_scheduler(generation)
            return
        generation.compiling = True
        self._state.out.grammar.append(Compile(generation.request, spec, self._state.owner))

    def _end_thought(self, generation: GenerationState, task: Task) -> bool:
        """End the thought, if there is room for an answer. True if that ends the output."""
        branch = generation.branch
        tokens = self._writer.end_of_thought(branch)
        if len(tokens) >= generation.remaining:
            return False
        self._state.extend_handle(branch, tokens)
        generation.put(tokens)
        self._on_output(branch)
        if not generation.decided:
            return False
        now = generation.first.ended if generation.first is not None else task.arrived
        self._close(generation, task, ended_here(generation, now, reason="stop"))
        return True

    def _tell_scheduler(self, generation: GenerationState, constraint: int = 0) -> None:
        bound = self._state.asked[1] if self._state.asked is not None else None
        self._state.out.scheduler.append(
            Submit(
                request=generation.request,
                branch=generation.branch.handle,
                prompt=generation.branch.position,
                max_tokens=generation.pace(),
                sampling=generation.sampling,
                stop_token_ids=sorted(generation.stops),
                priority=generation.op.priority,
                deadline=generation.deadline,
                arrived=generation.arrived,
                sampled=generation.before,
                owner=self._state.owner,
                expects=self._state.expects,
                constraint=constraint,
                obeyed=generation.before + generation.segment.start - generation.segment.since,
                history=bound.asked if bound is not None else b"",
                follows=(bound.found or b"") if bound is not None else b"",
            )
        )

    def compiled(self, message: Compiled) -> None:
        """Submit the request whose constraint is ready."""
        entry = self._by_request.get(message.request)
        if entry is not None:
            entry[0].compiling, entry[0].notes = False, message.notes
            self._tell_scheduler(entry[0], message.constraint)

    def not_compiled(self, message: NotCompiled, now: float) -> None:
        """End or submit a request whose constraint cannot be had. Call `submit_ready` afterwards."""
        entry = self._by_request.pop(message.request, None)
        if entry is None:
            return
        generation, task = entry
        if generation.held is not None and not generation.held.refuses(message.code):
            self._by_request[message.request] = entry
            generation.compiling = False
            generation.notes = [f"calls are not held to the tools' schemas: {message.message}"]
            self._tell_scheduler(generation)
            return
        generation.compiling, generation.refusal = False, refused_constraint(message)
        self._close(generation, task, ended_here(generation, now, generation.refusal))

    def _take_from_grammar(self, generation: GenerationState) -> None:
        """Tell the grammar actor that a request does not wait for its constraint any more."""
        if generation.compiling:
            generation.compiling = False
            del self._by_request[generation.request]
            self._state.out.grammar.append(Abandon(generation.request))

    # --- while it runs ---------------------------------------------------------------------

    def progress(self, item: Progress, now: float) -> SessionBranch | None:
        """Add new tokens of a request. Returns the branch that has grown; None: the request is gone."""
        entry = self._by_request.get(item.request)
        if entry is None:
            return None
        generation = entry[0]
        if not generation.first_token and not generation.resumed:
            generation.first_token = now
            if item.cached >= 0:
                generation.segment.cached = min(item.cached, generation.segment.start)
        generation.forced += item.forced
        generation.accepted += item.accepted
        if generation.push(unpack(item.tokens), item.logprobs):
            assert generation.text.stopped is not None
            keep = generation.text.stopped.keep_tokens - generation.before
            self._state.out.scheduler.append(
                CancelRequest(item.request, keep=max(0, keep), reason="stop")
            )
        elif self._state.meter.full and not generation.ending:
            generation.exhausted = True
            self._state.out.scheduler.append(CancelRequest(item.request))
        return generation.branch

    def cancel(self, task: Task, now: float) -> bool:
        """Stop the generation of `task`; its `done` follows. False if it has none."""
        generation = self._by_task.get(id(task))
        if generation is None or generation.cancelled:
            return False
        generation.cancelled = True
        self._take_from_grammar(generation)
        if generation.request in self._by_request:
            self._state.out.scheduler.append(CancelRequest(generation.request))
        else:
            self.waiting.remove(task)
            self._close(generation, task, ended_here(generation, now))
        return True

    def expire(self, task: Task, now: float) -> None:
        """End a generation whose deadline has passed, if the scheduler does not have it."""
        generation = self._by_task.get(id(task))
        if generation is None:
            return
        generation.expired = True  # should the scheduler just be pausing it
        self._take_from_grammar(generation)
        if generation.request not in self._by_request:
            self.waiting.remove(task)
            self._close(generation, task, ended_here(generation, now, reason="deadline"))

    def pause(self, client: str) -> None:
        """Stop the generations of a client that is gone and asked for a pause, until it is back."""
        self.waiting.pause(client)
        for generation, task in list(self._by_request.values()):
            if task.frame.client != client:
                continue
            if generation.compiling:
                self._take_from_grammar(generation)
                self.waiting.add(generation, task)
            elif not generation.decided and not generation.cancelled:
                generation.pausing = True
                self._state.out.scheduler.append(CancelRequest(generation.request))
        self.waiting.withdraw(client)

    def unpause(self, client: str) -> None:
        """Go on with the generations of a client that is back."""
        for generation, task in self._by_request.values():
            if task.frame.client == client:
                generation.pausing = False
        self.waiting.unpause(client)
        self.submit_ready()

    # --- the end ---------------------------------------------------------------------------

    def fail(self, error: RamifyError, now: float) -> None:
        """End every generation with `error`, wherever it stands: the engine is broken."""
        entries = [*self._by_request.values(), *self.waiting.clear()]
        self._by_request.clear()
        self.prefills.clear()
        for generation, task in entries:
            decided = generation.ending  # it was only to be confirmed
            self._close(generation, task, ended_here(generation, now, None if decided else error))

    def change_core(self, now: float) -> None:
        """Make the requests anew at another engine, which has the branches as they are here.

        What was only to be confirmed ends now. Call it when the cache has been told of the branches.
        """
        over: list[tuple[GenerationState, Task, EndedHere]] = []
        again: list[Waits] = []
        for generation, task in self._by_request.values():
            generation.compiling = False
            generation.move(now)
            reason = reason_here(generation)
            if reason is not None:
                over.append((generation, task, reason))
            elif generation.pausing:
                self.waiting.add(generation, task)
            else:
                again.append((generation, task))
        self._by_request.clear()
        self.waiting.put_first(again)
        self.prefills.again(now)
        for generation, task, reason in over:
            self._close(generation, task, ended_here(generation, now, reason=reason))
        self.submit_ready()

    def closing(self, request: int) -> int:
        """The cost of a request's end (see `Work`): its text is put together, and told."""
        entry = self._by_request.get(request)
        return entry[0].closing if entry is not None else 0

    def finished(self, finished: Finished) -> None:
        """End a request. Call `submit_ready` after the last one of a message."""
        if finished.request in self.prefills.branches and self.prefills.finished(finished):
            return
        entry = self._by_request.pop(finished.request, None)
        if entry is None:
            log.debug("end of an unknown request", extra={"request": finished.request})
            return
        generation, task = entry
        generation.note(finished)
        if finished.stale:  # it never began, since its constraint is not there any more
            reason = reason_here(generation)
            if reason is None:
                self._wait(generation, task)
                return
            finished = msgspec.structs.replace(finished, reason=reason, error=None, message="")
        why = finished.reason if not generation.ending else "stop"  # a stop may meet a pause
        goes_on = generation.paced if why == "length" else generation.remaining > 0
        if why == "cancelled" and generation.expired:
            finished = msgspec.structs.replace(finished, reason="deadline")
        elif why in ("length", "cancelled") and goes_on:
            self._wait(generation, task)
            return
        self._close(generation, task, finished)

    def _wait(self, generation: GenerationState, task: Task) -> None:
        """Put a generation back to wait: its request has ended, and another one goes on, perhaps later.

        Without `pausing` it was paused, and unpaused before the scheduler had stopped it.
        """
        self.waiting.add(generation, task, pausing=generation.pausing)
        self._on_output(generation.branch)

    def _close(self, generation: GenerationState, task: Task, finished: Finished) -> None:
        """Bring segment, handle and text to their final state, and reply."""
        if generation.exhausted and not generation.cancelled and finished.reason == "cancelled":
            finished = msgspec.structs.replace(finished, reason="error", error="limit", message=FULL)
        del self._by_task[id(task)]
        if finished.reason == "error" and not generation.segment.tokens:
            self._endings.unsaid(generation)
            self._on_refused(task, generation.refusal or refusal(finished))
            return
        done = self._endings.close(generation, task, finished)
        self._on_done(task, done, generation.segment.text)
