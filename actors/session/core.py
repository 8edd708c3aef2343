"""The session state machine: frames in, ops in order, replies and deltas out.

Pure: times come as `now`, effects go into `state.out` and the attachments' `out`. The way of a frame:

    presence     sockets come and go; a frame of one that has its `state` goes on
    core         checked as a whole (`intake`); `tree`, `cancel`, `close`, `credit` are done here
    execution    the other ops wait in the queues of their branches (`program`) and run (`ops/`)
    generations  ask the scheduler; its tokens come back as text
    audience     replies, events and deltas, to each socket what it has not seen (`attachment`)
"""

import math
from collections.abc import Callable

from ramify.actors.session.attachment import Attachment
from ramify.actors.session.audience import Audience
from ramify.actors.session.detokenizer import Detokenizer
from ramify.actors.session.drafts import Joined, Prepared
from ramify.actors.session.execution import Execution
from ramify.actors.session.inspections import Inspections
from ramify.actors.session.intake import take_apart
from ramify.actors.session.ledger import Ledger
from ramify.actors.session.presence import Presence
from ramify.actors.session.replies import error_message, refusals
from ramify.actors.session.state import SessionState
from ramify.actors.session.tasks import Task
from ramify.actors.session.template import ChatTemplate
from ramify.actors.session.trees import Trees
from ramify.actors.session.turns import Turns
from ramify.actors.session.view import Identity, View
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.errors import Close, NoBranch, RamifyError
from ramify.protocol.messages import Attach, Inspected, Tokens
from ramify.protocol.wire import (
    Cancel,
    ClientMessage,
    CloseSession,
    Credit,
    Ok,
    Op,
    ServerInfo,
    Tree,
    names,
)

FAILED = "the engine failed"  # why a session may be over


class SessionCore:
    """One session. `ended`: why it is over, once it is."""

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
    ) -> None:
        self.state = state
        self.ended: str | None = None
        self.turns = Turns(state, tokenizer, template)
        self.audience = Audience(state, on_forget=lambda client: self._presence.forget(client))
        self._execution = Execution(state, self.audience, self.turns, detokenizer, random_seed)
        self.generations = self._execution.generations
        self._inspections = Inspections(state)
        self._view = View(identity, state, self.generations, server)
        self._trees = Trees(state, self.audience, self._inspections, self._view)
        self._presence = Presence(
            state,
            self.audience,
            self._execution,
            self._inspections,
            self._view,
            ttl_s=ttl_s,
            ttl_max_s=ttl_max_s,
            on_frame=self._frame,
            on_gone=self._trees.forget,
        )
        state.root("main")
        state.bump()

    @property
    def attachments(self) -> dict[int, Attachment]:
        """The sockets that have their `state`."""
        return self.audience.attachments

    @property
    def sockets(self) -> list[int]:
        """Attached ones and those that wait for their `state`."""
        return self._presence.sockets

    # --- what the mailbox brings -----------------------------------------------------------------

    def attach(self, message: Attach, now: float) -> None:
        """A client opened this session."""
        self.audience.now = now
        self._presence.attach(message)
        self._execution.judge()

    def detached(self, socket: int, now: float) -> None:
        """The socket is gone."""
        self.audience.now = now
        self._presence.detach(socket)
        self._execution.judge()

    def throttled(self, socket: int, held: bool, now: float) -> None:
        """The socket's queue is full (`held`), or short again."""
        self.audience.now = now
        self._presence.throttle(socket, held)
        attachment = self.attachments.get(socket)
        if attachment is not None:
            self._trees.go_on(attachment)

    def tick(self, now: float) -> None:
        """The time has come that was asked for with `state.out.wake`."""
        self.audience.now = now
        self._execution.expire()
        self._execution.judge()
        if self._presence.tick():
            self.ended = "expired"

    def frame(self, socket: int, ops: list[ClientMessage], now: float) -> None:
        """Ops of one frame from a socket."""
        self.audience.now = now
        self._presence.frame(socket, ops)
        self._execution.judge()

    def encoded(
        self,
        ticket: int,
        prepared: Prepared | Joined | None,
        error: BaseException | None,
        now: float,
    ) -> None:
        """Long text was tokenized (or could not be)."""
        self.audience.now = now
        self._execution.encoded(ticket, prepared, error)
        self._execution.judge()

    def tokens(self, message: Tokens, now: float) -> None:
        """What this session's requests sampled in one step, and which of them ended."""
        self.audience.now = now
        for item in message.progress:
            self.generations.progress(item)
        for finished in message.finished:
            if not self._execution.selects.finished(finished, now):
                self.generations.finished(finished)
        self._execution.judge()
        if message.finished:
            self.generations.submit_ready()

    def inspected(self, message: Inspected, now: float) -> None:
        """The cache has said what is warm."""
        self.audience.now = now
        self._inspections.answered(message)  # a socket that has its `state` now may bring ops
        self._execution.judge()

    def fail(self, error: RamifyError, now: float) -> None:
        """The engine is broken: every op that has no terminal reply gets one; the session is over."""
        self.audience.now = now
        self._execution.refuse(error)
        self._trees.hurry()
        self._inspections.give_up()  # who waits for a `state` gets it, and hears what follows
        self._execution.fail(error)
        for attachment in self.attachments.values():
            for branch in self.state.branches.values():
                attachment.settle(branch)
        self.state.out.forget()
        self.ended = FAILED

    # --- frames ----------------------------------------------------------------------------------

    def _frame(self, attachment: Attachment, ops: list[ClientMessage]) -> None:
        """The whole frame is checked before any op of it runs."""
        if not ops:
            return
        ledger = self.audience.ledger(attachment.client, attachment.write)
        try:
            taken = take_apart(
                ops,
                attachment.opened,
                ledger,
                self.state.limits,
                write=attachment.write,
                # Who does not read must stop.
                in_flight=len(self._execution) + attachment.held + len(attachment.trees),
                queued=self._execution.queued,
            )
        except RamifyError as error:
            attachment.out.extend(refusals(error, ops))
            return
        queued: list[Task] = []  # started together: an append sees whether a generation follows
        for op, tasks in taken:
            match op:
                case Credit():
                    self._credit(attachment, op)
                case Tree() | Cancel() | CloseSession():
                    self._execution.start(queued)
                    queued = []
                    if self._admit(attachment, ledger, op, tasks):
                        self._run_now(attachment, op)
                case Op():
                    if self._admit(attachment, ledger, op, tasks):
                        self._execution.add(tasks)
                        queued.extend(tasks)
                case _:
                    pass
        self._execution.start(queued)

    def _admit(self, attachment: Attachment, ledger: Ledger, op: Op, tasks: list[Task]) -> bool:
        """Whether `op` is to be run. One that was seen gets its replies again, as far as there are any.

        A `tree` looks again: its reply, perhaps the whole history, is not kept.
        """
        if isinstance(op, Tree) and op.id <= ledger.last:
            return not ledger.waits(op.id)
        try:
            stored = ledger.seen(op.id)
        except RamifyError as error:
            attachment.out.append(error_message(error, ident=op.id))
            return False
        if stored is not None:
            for reply in stored:
                branch = self.state.branches.get(getattr(reply, "branch", None) or "")
                attachment.reply(branch, reply)
            return False
        ledger.begin(op.id, sum(task.kind != "spawn" for task in tasks) or 1)
        return True

    # --- ops that do not queue -------------------------------------------------------------------

    def _run_now(self, attachment: Attachment, op: Tree | Cancel | CloseSession) -> None:
        match op:
            case Tree():
                self._trees.ask(attachment, op)
            case Cancel():
                self._cancel(attachment.client, op)
            case CloseSession():
                self._close(attachment, op)

    def _credit(self, attachment: Attachment, op: Credit) -> None:
        if not self._execution.expects(op.branch):
            return  # nobody may come of that name, and who sends names at random must not fill memory
        attachment.credit(op.branch, op.upto, most=self.state.limits.ops_in_flight)
        branch = self.state.branches.get(op.branch)
        if branch is not None:
            self.audience.stream(attachment, branch)

    def _cancel(self, client: str, op: Cancel) -> None:
        """By id: those ops. By branch (or all): generations that run or wait there."""
        if op.ops is not None:
            tasks = self._execution.cancel(client, set(op.ops))
        else:
            where = dict.fromkeys(names(op.branch)).keys() if op.branch is not None else None
            for name in where or ():
                if not self._execution.expects(name):
                    self._refuse(client, op, NoBranch(f"there is no branch {name!r}"), name)
                    return
            cancel = self._execution.cancel_subtree if op.subtree else self._execution.cancel_generations
            tasks = cancel(where)
        cancelled = sorted({task.op.id for task in tasks})
        reply = Ok(id=op.id, revision=self.state.revision, result={"cancelled": cancelled})
        self.audience.reply(client, op.id, reply, None)

    def _close(self, attachment: Attachment, op: CloseSession) -> None:
        closes = self.state.out.closes
        reply = Ok(id=op.id, revision=self.state.revision)
        self.audience.reply(attachment.client, op.id, reply, None, write=attachment.write)
        closes.append((attachment.socket, Close.DONE, "closed by the client"))
        if not op.keep and attachment.write:
            self.ended = "closed"
            for other in self.attachments.values():
                if other is not attachment:
                    closes.append((other.socket, Close.DONE, "the session was closed"))

    def _refuse(self, client: str, op: Op, error: RamifyError, branch: str | None) -> None:
        self.audience.reply(client, op.id, error_message(error, ident=op.id, branch=branch), None)
