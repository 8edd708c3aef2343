"""The session state machine: frames in, ops in order, replies and deltas out.

Pure: times come in as `now`, and effects go into `state.out` and the subscribers' `out`. What is too
much for a turn of the event loop is done in steps (`work`). While the core is `unfinished` it gets no
message, but is told to `go_on` in later turns, so all happens in the order in which it came. The way of
a frame:

    attachments  sockets come and go; a frame of one that has its `state` goes on
    queues       checked as a whole; ops that wait for no branch run `AtOnce`
    op_runner    the other ops wait in the queues of their branches (`queues`) and run (`ops/`)
    generations  ask the scheduler; its tokens come back as text
    publisher    replies, events and deltas, to each socket what it has not seen (`subscriber`)
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Unpack

from ramify.actors.kit.turns import OP, Steps, Work
from ramify.actors.session.attachments import Attachments
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.state import Made, SessionState, retell
from ramify.actors.session.branches.tasks import Task
from ramify.actors.session.durable.recorder import Recorder, SaveTerms
from ramify.actors.session.input.branch_writer import BranchWriter
from ramify.actors.session.input.template import ChatTemplate
from ramify.actors.session.ops.handler import Hands
from ramify.actors.session.ops.running.op_runner import OpRunner
from ramify.actors.session.ops.running.queues import FrameRunner
from ramify.actors.session.ops.tree import Trees
from ramify.actors.session.sockets.clients import Identity
from ramify.actors.session.sockets.publisher import Publisher
from ramify.actors.session.sockets.subscriber import Subscriber
from ramify.actors.session.sockets.view import View
from ramify.actors.tokenizer import Tokenizer
from ramify.actors.tokenizer.detokenizer import Detokenizer
from ramify.protocol.errors import RamifyError
from ramify.protocol.messages import (
    Attach,
    Compiled,
    Finished,
    Frame,
    Inspected,
    NotCompiled,
    Reopen,
    Tokens,
)
from ramify.protocol.saved import Changes
from ramify.protocol.wire import (
    ClientMessage,
    Persist,
    ServerInfo,
)

FAILED = "the engine failed"  # why a session may be over
MOVED = "the session is at another server"
LEFT = "expired", "displaced"  # it left the memory; a store may still have it


class SessionCore:
    """One session. `ended`: why it is over, once it is. `saved`: `restoring` will fill it.

    `kept_s`: how long the server's store keeps sessions; None: it has none.
    """

    def __init__(
        self,
        identity: Identity,
        state: SessionState,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        detokenizer: Detokenizer,
        *,
        server: ServerInfo,
        ttl_s: float,
        ttl_max_s: float = math.inf,
        random_seed: Callable[[], int],
        saved: bool = False,
        kept_s: float | None = None,
    ) -> None:
        self.identity = identity
        self.state = state
        self.ended: str | None = None
        self.work = Work()
        self._steps: deque[Steps[None]] = deque()  # the first one is under way
        self._owed: int | None = None  # what its next step costs; None: it has not begun
        self._cost = -1  # of the next part of `_recording`
        self._recording: Steps[None] | None = None  # what is to be saved is encoded
        self._to_submit = False  # generations may have room now
        self.writer = BranchWriter(state, tokenizer, template)
        self.publisher = Publisher(state, on_forget=lambda client: self._attachments.forget(client))
        self.runner = OpRunner(state, self.publisher, self.writer, detokenizer, random_seed)
        self.generations = self.runner.generations
        self._inspections = self.runner.inspections
        rewritten, kept = self.writer.rewritten, kept_s is not None
        self._view = View(identity, state, server, rewritten=rewritten, stored=kept)
        self._trees = Trees(state, self.publisher, self._inspections, self._view)
        hands = Hands(state, self.publisher, self.runner, self._trees, self._over)
        self._frames = FrameRunner(state, self.publisher, self.runner, hands)
        self._attachments = Attachments(
            state,
            self.publisher,
            self.runner,
            self._inspections,
            self._view,
            ttl_s=ttl_s,
            ttl_max_s=ttl_max_s,
            kept_s=kept_s,
            on_frame=lambda subscriber, frame: self._steps.append(self._frames.run(subscriber, frame)),
            on_gone=self._trees.forget,
            on_join=self._steps.append,
        )
        self.recorder: Recorder | None = None
        state.stored = kept_s is not None
        if not saved:
            state.root("main")
            state.bump()

    def record(
        self, *, model: str, priority: int, created: float, displaceable: bool = False
    ) -> Recorder:
        """Have a recorder from now on, for a store."""
        self.recorder = Recorder(
            self.identity,
            self.state,
            self.publisher,
            self.generations,
            tasks=self.runner.tasks,
            model=model,
            priority=priority,
            created=created,
            displaceable=displaceable,
        )
        return self.recorder

    def save_from_now(self, persist: Persist, kept_s: float | None) -> None:
        """Begin to save a session that was not to be saved; what it holds already is not saved.

        Call `record` as well.
        """
        self.state.persist, self.state.stored, self.state.changed = persist, True, True
        self._view.stored, self._attachments.kept_s = True, kept_s
        for branch in self.state.branches.values():
            branch.persist = branch.persist or "none"
        for log in self.publisher.reply_logs.values():
            log.changed = set()

    def changes(
        self, wall: float, *, live: bool = True, force: bool = False, **how: Unpack[SaveTerms]
    ) -> Changes | None:
        """Collect what the store lacks; None: nothing, or there is no store. `force`: even nothing."""
        if self.recorder is None:
            return None
        times, now = self._attachments, self.publisher.now
        away = times.away or not live
        ttl = times.asked_ttl
        return self.recorder.collect(now, wall, ttl_s=ttl, away=away, live=live, force=force, **how)

    def resume(self, tasks: list[Task], arrived: float) -> None:
        """Queue tasks that an earlier server had not done. Call `resumed` after the last."""
        for task in tasks:
            self.runner.add(task, arrived)

    def resumed(self, tasks: list[Task]) -> None:
        """Run them. Their clients are away, and `open.detach` said what becomes of their generations."""
        policies = {task.frame.client: task.frame.opened.detach for task in tasks}
        for client, policy in policies.items():
            if policy == "pause":
                self.runner.pause(client)
        self.runner.start(tasks)
        self._attachments.leave()

        def cancel() -> Steps[None]:
            yield from self.runner.steps()
            for client, policy in policies.items():
                if policy == "cancel":
                    self.runner.cancel_generations_of(client)

        self._steps.append(cancel())
        self._advance()

    @property
    def subscribers(self) -> dict[int, Subscriber]:
        """The sockets that have their `state`."""
        return self.publisher.subscribers

    @property
    def sockets(self) -> list[int]:
        """The sockets that are attached, and those that wait for their `state`."""
        return self._attachments.sockets

    def part(self) -> None:
        """Take an ended session apart: its parts forget each other.

        So all that it held goes at once. The garbage collector, which would have to find it, walks old
        objects only when there is time (`kit/collector.py`).
        """
        runner = self.runner
        parts = (
            self.publisher,
            self.generations,
            runner.selects,
            runner,
            runner.context,
            self._inspections,
            self._trees,
            self._attachments,
            self._frames,
        )
        for part in parts:
            vars(part).clear()
        self._steps.clear()

    # --- turns -----------------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        """Whether the last message is not done yet: call `go_on` before the next one is brought."""
        return bool(self._steps) or self.runner.due or (self.recorder is not None and self._behind)

    @property
    def inside(self) -> bool:
        """Whether an op is half done, or a save, so that this is no moment to save or show anything."""
        return self.runner.inside or self._behind

    @property
    def _behind(self) -> bool:
        recorder = self.recorder
        return self._recording is not None or (recorder is not None and recorder.behind)

    def go_on(self, now: float) -> None:
        """Do more of what is unfinished, in a new turn of the loop."""
        self.work.renew()
        self._begin(now)
        self._advance()

    def finish(self, now: float) -> None:
        """Do all that is unfinished."""
        while self.unfinished:
            self.go_on(now)

    def _advance(self) -> None:
        """Do what is due, as far as the turn's budget goes."""
        steps, records = self._steps, self.recorder is not None
        while True:
            if records and not self._record():
                return
            if not steps:
                if not self.runner.due:
                    break
                steps.append(self.runner.more())
            first = steps[0]
            if self._owed is None:
                self._owed = next(first, -1)
            while self._owed >= 0:
                if not self.work.take(self._owed):
                    return
                self._owed = next(first, -1)
                if records and not self._record():
                    return
            steps.popleft()
            self._owed = None
        if self._to_submit:
            self._to_submit = False
            self.generations.submit_ready()

    def _record(self) -> bool:
        """Encode what is to be saved, where that is much. False: the turn's budget is spent."""
        if self._recording is None:
            if self.recorder is None or not self.recorder.behind or self.runner.inside:
                return True
            self._recording = self.recorder.ahead()
            self._cost = next(self._recording, -1)
        while self._cost >= 0:
            if not self.work.take(self._cost):
                return False
            self._cost = next(self._recording, -1)
        self._recording = None
        return True

    # --- what the mailbox brings -----------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """Note that a message comes which may change more than outputs that grow."""
        self.publisher.now = now
        self.state.changed = True

    def attach(self, message: Attach, now: float) -> None:
        """Attach the socket of a client that opened this session."""
        self._begin(now)
        self._attachments.attach(message)
        self._advance()

    def detached(self, socket: int, now: float) -> None:
        """Detach a socket that is gone."""
        self._begin(now)
        self._attachments.detach(socket)
        self._advance()

    def throttled(self, socket: int, held: bool, now: float) -> None:
        """Note that the socket's queue is full (`held`), or short again."""
        self._begin(now)
        self._attachments.throttle(socket, held)
        subscriber = self.subscribers.get(socket)
        if subscriber is not None:
            self._trees.go_on(subscriber)
        self._advance()

    def tick(self, now: float, *, stays: bool = False) -> None:
        """Do what is due now: the time has come that `state.out.wake` asked for.

        `stays`: a socket is about to be attached, so the session does not expire.
        """
        self.publisher.now = now
        self.runner.expire()
        self._attachments.catch_up()
        self._advance()
        if self._attachments.tick(stays=stays):
            self.ended = "expired"

    def displace(self, now: float, *, stays: bool = False) -> None:
        """End, if no socket is here or about to come (`stays`), and nothing runs."""
        self._begin(now)
        if self._attachments.deserted and not stays:
            self.ended = "displaced"

    def frame(self, socket: int, ops: list[ClientMessage], now: float, place: int | None = 0) -> None:
        """Run all ops of one frame of a socket. `place`: see `messages.Frame`."""
        self.framed(Frame(socket, ops, place=place), now)
        self.finish(now)

    def framed(self, frame: Frame, now: float) -> None:
        """Run a frame of a socket."""
        self._begin(now)
        self._attachments.frame(frame)
        self._advance()

    def encoded(
        self,
        ticket: int,
        prepared: Made | None,
        error: BaseException | None,
        now: float,
    ) -> None:
        """Go on with ops whose long text was tokenized, or could not be."""
        self._begin(now)
        self._steps.append(self.runner.encoded(ticket, prepared, error))
        self._advance()

    def tokens(self, message: Tokens, now: float) -> None:
        """Stream the tokens of one step, or of several that have waited together; end the requests that
        ended with the last one. A branch sends one delta for all of them.
        """
        self.publisher.now = now
        progress = self.generations.progress
        ended = {each.request for each in message.finished} if message.finished else ()
        grown: dict[SessionBranch, None] = {}
        for item in message.progress:
            branch = progress(item, now)
            if branch is not None and item.request not in ended:  # else its end tells of them
                grown[branch] = None
        self.publisher.flush(grown)
        if message.finished:  # tokens alone decide no race
            self.state.changed = self._to_submit = True
            self._steps.append(self._finished(message.finished, now))
            self._advance()

    def _finished(self, ended: list[Finished], now: float) -> Steps[None]:
        for finished in ended:
            yield self.generations.closing(finished.request) + OP
            if not self.runner.selects.finished(finished, now):
                self.generations.finished(finished)
        yield from self.runner.steps()

    def compiled(self, message: Compiled | NotCompiled, now: float) -> None:
        """Go on with a generation whose constraint is ready, or will never be."""
        self._begin(now)
        if isinstance(message, Compiled):
            self.generations.compiled(message)
        else:
            self.generations.not_compiled(message, now)
            self._to_submit = True
            self._advance()

    def inspected(self, message: Inspected, now: float) -> None:
        """Go on with what waited for the cache to say which tokens are resident."""
        self._begin(now)
        self._inspections.answered(message)  # a socket that has its `state` now may bring ops
        self._advance()

    @property
    def busy(self) -> bool:
        """Whether an engine computes anything for the session that a client waits for."""
        return self.runner.busy

    def change_core(self, now: float) -> None:
        """Go on with another engine: this one has gone, or gives the session up.

        Nothing of the text is lost and no socket notices: keys and values move, or are computed again.
        """
        self._begin(now)
        out = self.state.out
        out.forget_engine()
        out.cache.append(Reopen(self.state.number))
        self._steps.append(self._to_another_core(now))
        self._advance()

    def _to_another_core(self, now: float) -> Steps[None]:
        yield from retell(self.state, now)
        self._inspections.ask_again()
        self.runner.change_core(now)

    def fail(self, error: RamifyError, now: float) -> None:
        """End the session because the engine is broken: every op that has no terminal reply gets one."""
        self.finish(now)
        self._begin(now)
        self.runner.refuse(error)
        self._trees.hurry()
        self._inspections.give_up()  # who waits for a `state` gets it, and hears what follows
        self.runner.fail(error)
        self.finish(now)
        for subscriber in self.subscribers.values():
            for branch in self.state.branches.values():
                subscriber.settle(branch)
        self.state.out.forget()
        self.ended = FAILED

    def _over(self, why: str) -> None:
        self.ended = why
