"""The session state machine: frames in, ops in order, replies and deltas out.

Pure: times come as `now`, effects go into `state.out` and the attachments' `out`. This file holds
who comes and goes and which ops wait; what an op does is in `ops`, `turns` and `generations`, who
gets which reply in `audience`, and how a socket is served in `attachment`.
"""

from collections.abc import Callable, Iterable

import msgspec

from ramify.actors.session.attachment import Attachment
from ramify.actors.session.audience import Audience
from ramify.actors.session.branch import Branch
from ramify.actors.session.detokenizer import Detokenizer
from ramify.actors.session.generations import Generations
from ramify.actors.session.ledger import Ledger
from ramify.actors.session.ops import OpRunner
from ramify.actors.session.program import Program
from ramify.actors.session.replies import Cancelled, Skipped, error_message, refusals
from ramify.actors.session.state import SessionState
from ramify.actors.session.tasks import FrameRun, Task, check_static, expand
from ramify.actors.session.template import ChatTemplate
from ramify.actors.session.turns import Turns
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.errors import (
    Close,
    Code,
    Forbidden,
    LimitExceeded,
    NoBranch,
    RamifyError,
)
from ramify.protocol.messages import Attach, Inspect, Inspected, Tokens
from ramify.protocol.wire import (
    BranchState,
    Cancel,
    ClientMessage,
    CloseSession,
    Credit,
    Done,
    Ok,
    Op,
    ServerInfo,
    ServerMessage,
    State,
    Tree,
    names,
)

FAILED = "the engine failed"  # why a session may be over


class Identity:
    """What a session is called: its public id and the keys that grant access."""

    def __init__(self, session: str, key: str, view_key: str) -> None:
        self.session = session
        self.key = key
        self.view_key = view_key


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
        random_seed: Callable[[], int],
    ) -> None:
        self.identity = identity
        self.state = state
        self.audience = Audience(state, on_forget=self._forget)
        self.ended: str | None = None
        self._server = server
        self._default_ttl = self._ttl = ttl_s
        self._expires: float | None = None
        self._policies: dict[str, str] = {}  # client -> what its disconnect does
        self._program: Program[Task] = Program()
        self._joining: dict[int, Attach] = {}  # waiting for the cache's Inspected
        self._backlog: dict[int, list[list[ClientMessage]]] = {}
        self._inspections: dict[int, tuple[int, Callable[[list[int]], None]]] = {}
        self._broken: RamifyError | None = None  # the engine; nothing is begun any more
        turns = Turns(state, tokenizer, template)
        self.turns = turns
        self.generations = Generations(
            state,
            turns,
            detokenizer,
            random_seed=random_seed,
            on_output=self.audience.flush,
            on_done=self._generation_done,
            on_refused=self._generation_refused,
        )
        self._ops = OpRunner(
            state,
            turns,
            self.generations,
            on_cut=self.audience.cut,
            on_rename=self.audience.rename,
            on_drop=self.audience.drop,
            on_new=self.audience.begin,
        )
        state.root("main")
        state.bump()

    @property
    def attachments(self) -> dict[int, Attachment]:
        """The sockets that have their `state`."""
        return self.audience.attachments

    @property
    def _now(self) -> float:
        return self.audience.now

    @_now.setter
    def _now(self, now: float) -> None:
        self.audience.now = now

    # --- sockets -------------------------------------------------------------------------------

    @property
    def sockets(self) -> list[int]:
        """Attached ones and those that wait for their `state`."""
        return [*self.attachments, *self._joining]

    def _clients(self) -> list[tuple[int, str]]:
        """(socket, client) of `sockets`."""
        attached = [(socket, a.client) for socket, a in self.attachments.items()]
        return attached + [(socket, m.open.client) for socket, m in self._joining.items()]

    def attach(self, message: Attach, now: float) -> None:
        """A client opened this session. Its `state` follows once the cache has said what is warm."""
        self._now = now
        opened = message.open
        others = [socket for socket, client in self._clients() if client == opened.client]
        count = len(self.sockets) - len(others)
        if count >= self.state.limits.attachments:
            error = LimitExceeded(
                f"{count} clients are attached to this session already: close one first",
                details={"max": self.state.limits.attachments},
            )
            self.state.out.notes.append((message.socket, error_message(error)))
            self.state.out.closes.append((message.socket, Close.FORBIDDEN, "too many attachments"))
            return
        self._expires = None
        if message.write:
            self._policies[opened.client] = opened.detach
        self._joining[message.socket] = message  # before the others leave: the client is not away
        for other in others:
            self._detach(other)
            self.state.out.closes.append((other, Close.REPLACED, "the same client attached again"))
        handles = self.state.handles()
        if opened.session is None or not handles:
            self._join(message.socket, [0] * len(handles))
        else:
            self._inspect(handles, lambda resident: self._join(message.socket, resident))

    def _join(self, socket: int, resident: list[int]) -> None:
        message = self._joining.pop(socket, None)
        if message is None:  # gone in the meantime
            return
        opened = message.open
        attachment = Attachment(socket, opened, write=message.write)
        self.attachments[socket] = attachment
        ledger = self.audience.ledger(opened.client)
        branches = list(self.state.branches.values())
        known = dict(zip(branches, resident, strict=False))
        resumed = opened.session is not None
        attachment.out.append(
            State(
                session=self.identity.session,
                op=ledger.highest,
                revision=self.state.revision,
                branches=[self._branch_state(b, known.get(b, -1)) for b in branches],
                key=self.identity.key if message.write else None,
                view_key=self.identity.view_key,
                resumed=resumed,
                cold=resumed and any(self._is_cold(b, known.get(b, -1)) for b in branches),
                limits=self.state.limits.wire(),
                server=self._server,
                meta=self.state.meta,
            )
        )
        if message.write:
            self._ttl = opened.ttl_s if opened.ttl_s is not None else self._default_ttl
        for branch in branches:
            self._catch_up(attachment, branch, ledger)
        self.generations.unpause(opened.client)
        self._frame(attachment, message.ops)
        for ops in self._backlog.pop(socket, ()):
            self._frame(attachment, ops)

    def _catch_up(self, attachment: Attachment, branch: Branch, ledger: Ledger) -> None:
        have = attachment.opened.have.get(branch.name)
        if have is not None:
            attachment.resume(branch, have, attachment.opened.revision)
            attachment.replay(branch, ledger.replies, self._now)
            return
        running = self.generations.running_piece(branch)
        attachment.begin(branch, running.start if running is not None else branch.released)
        attachment.flush(branch, self._now, force=True)

    def detached(self, socket: int, now: float) -> None:
        """The socket is gone; what its generations do was said in `open.detach`."""
        self._now = now
        self._detach(socket)

    def _forget(self, client: str) -> None:
        """Too many clients were here: this one's ids and policy are gone, and so is that it is away."""
        self._policies.pop(client, None)
        self.generations.unpause(client)

    def _detach(self, socket: int) -> None:
        self._backlog.pop(socket, None)
        joining = self._joining.pop(socket, None)
        attachment = self.attachments.pop(socket, None)
        gone = attachment or joining
        if gone is None:
            return
        client = gone.open.client if isinstance(gone, Attach) else gone.client
        if gone.write and all(other != client for _, other in self._clients()):
            policy = self._policies.get(client, "run")
            if policy == "pause":
                self.generations.pause(client)
            elif policy == "cancel":
                mine = [t for t in self._program.on() if t.frame.client == client]
                self._cancel_tasks([t for t in mine if t.kind in ("generate", "spawn")])
        if not self.sockets:
            self._expires = self._now + self._ttl
            self.state.out.wake(self._expires)

    def throttled(self, socket: int, held: bool, now: float) -> None:
        """The socket's queue is full (`held`), or short again."""
        self._now = now
        attachment = self.attachments.get(socket)
        if attachment is None:
            return
        attachment.throttled = held
        if not held:
            for branch in self.state.branches.values():
                attachment.flush(branch, now)

    def tick(self, now: float) -> None:
        """Time has passed: flush what waited for `tick_ms`; expire.

        There is one timer, for the earliest time that was asked for: what is later asks again.
        """
        self._now = now
        for attachment in self.attachments.values():
            if not attachment.opened.tick_ms:
                continue
            if now < attachment.next_tick:
                self.state.out.wake(attachment.next_tick)
                continue
            for branch in self.state.branches.values():
                attachment.flush(branch, now)
        if self._expires is None:
            return
        if now >= self._expires and not self.generations.busy:
            self.ended = "expired"
            return
        if now >= self._expires:  # a detached generation may finish
            self._expires = now + self._ttl
        self.state.out.wake(self._expires)

    # --- frames --------------------------------------------------------------------------------

    def frame(self, socket: int, ops: list[ClientMessage], now: float) -> None:
        """Ops of one frame from a socket."""
        self._now = now
        attachment = self.attachments.get(socket)
        if attachment is not None:
            self._frame(attachment, ops)
        elif socket in self._joining:
            self._backlog.setdefault(socket, []).append(ops)

    def _frame(self, attachment: Attachment, ops: list[ClientMessage]) -> None:
        """The whole frame is checked before any op of it runs."""
        if not ops:
            return
        ledger = self.audience.ledger(attachment.client)
        frame = FrameRun(attachment.opened)
        try:
            fresh = self._check_frame(attachment, ledger, ops, frame)
        except RamifyError as error:
            attachment.out.extend(refusals(error, ops))
            return
        queued: list[Task] = []  # started together: an append sees whether a generation follows
        for op, tasks in fresh:
            match op:
                case Credit():
                    branch = self.state.branches.get(op.branch)
                    attachment.credit(op.branch, op.upto)
                    if branch is not None:
                        attachment.flush(branch, self._now)
                case Tree() | Cancel() | CloseSession():
                    self._start(queued)
                    queued = []
                    if self._admit(attachment, ledger, op, tasks):
                        self._run_now(attachment, op)
                case Op():
                    if self._admit(attachment, ledger, op, tasks):
                        for task in tasks:
                            task.arrived = self._now
                            self._program.add(task)
                        queued.extend(tasks)
                case _:
                    pass
        self._start(queued)

    def _check_frame(
        self, attachment: Attachment, ledger: Ledger, ops: list[ClientMessage], frame: FrameRun
    ) -> list[tuple[ClientMessage, list[Task]]]:
        out: list[tuple[ClientMessage, list[Task]]] = []
        before = count = len(self._program) + attachment.held  # who does not read must stop
        ids: list[int] = []
        for i, op in enumerate(ops):
            tasks: list[Task] = []
            if isinstance(op, Op):
                if not attachment.write and not isinstance(op, Tree | CloseSession):
                    what = type(op).__name__.lower()
                    raise Forbidden(
                        f"the view key does not allow `{what}`: open with the session's key",
                        details={"id": op.id},
                    )
                check_static(op, self.state.limits, f"$[{i}]" if len(ops) > 1 else "$")
                ids.append(op.id)
                if op.id > ledger.last:
                    tasks = expand(op, frame)
                    count += len(tasks)
            out.append((op, tasks))
        ledger.admit(ids)
        if before < count > self.state.limits.ops_in_flight:  # `cancel` and `credit` pass always
            raise LimitExceeded(
                f"{count} ops would be in flight: wait for replies, then send the frame again",
                details={"max": self.state.limits.ops_in_flight},
            )
        return out

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
                attachment.reply(branch, reply, self._now)
            return False
        ledger.begin(op.id, sum(task.kind != "spawn" for task in tasks) or 1)
        return True

    def _run_now(self, attachment: Attachment, op: Tree | Cancel | CloseSession) -> None:
        match op:
            case Tree():
                self._tree(attachment, op)
            case Cancel():
                self._cancel_op(attachment, op)
            case CloseSession():
                self._close(attachment, op)

    # --- tasks ---------------------------------------------------------------------------------

    def _start(self, tasks: Iterable[Task]) -> None:
        """Run the tasks that are first in their queues, then those that this frees."""
        ready = list(tasks)
        while ready:
            task = ready.pop(0)
            if not self._program.start(task):
                continue
            try:
                reply = self._run(task)
            except RamifyError as error:
                self._fail(task, error)
                ready = self._program.finish(task) + ready
                continue
            if reply is not None:
                if task.kind != "spawn":
                    self._complete(task, reply)
                heads = self._program.finish(task)
                ready = heads + ready
                if task.kind == "append" and not any(task.branch in head.touched for head in heads):
                    self._prefill(task)

    def _run(self, task: Task) -> Ok | None:
        failed = [name for name in task.touched if name in task.frame.failed]
        if failed:
            cause = task.frame.failed[failed[0]]
            if cause is not None and task.kind == "generate":  # of the spawn that was to make its branch
                raise cause
            raise Skipped(
                f"an earlier op of this frame failed on branch {failed[0]!r}",
                details={"branch": failed[0]},
            )
        if self._broken is not None:
            raise self._broken
        return self._ops.run(task, self._now)

    def _prefill(self, task: Task) -> None:
        branch = self.state.branches.get(task.branch or "")
        if branch is not None:
            self.generations.prefill(branch, self._now)

    def _complete(self, task: Task, reply: Ok | Done, *, again: ServerMessage | None = None) -> None:
        """`again`: what is sent instead of `reply` if it has to be sent once more."""
        client = task.frame.client
        branch = self.state.branches.get(reply.branch or "")
        self.audience.reply(client, task.op.id, reply, branch, again=again)
        self.audience.announce(task, reply)

    def _fail(self, task: Task, error: RamifyError) -> None:
        failed = task.frame.failed
        if task.kind == "spawn":  # the generations report it
            failed.update(dict.fromkeys(task.children, error))
            return
        failed.update(dict.fromkeys(task.touched))  # reported now: what follows is skipped
        branch = self.state.branches.get(task.branch or "")
        code: Code | None = "skipped" if isinstance(error, Skipped) else None
        self.audience.reply(
            task.frame.client,
            task.op.id,
            error_message(error, ident=task.op.id, branch=task.branch, code=code),
            branch,
        )

    def _generation_done(self, task: Task, done: Done, text: str) -> None:
        if done.reason == "error":
            for name in task.touched:
                task.frame.failed[name] = None
        # A client that was away may find the branch dropped: the repeated reply has the text.
        self._complete(task, done, again=msgspec.structs.replace(done, text=text))
        self._start(self._program.finish(task))

    def _generation_refused(self, task: Task, error: RamifyError) -> None:
        self._fail(task, error)
        self._start(self._program.finish(task))

    def encoded(
        self, ticket: int, tokens: list[list[int]], error: BaseException | None, now: float
    ) -> None:
        """Long text was tokenized (or could not be)."""
        self._now = now
        task = self._ops.task_of(ticket)
        try:
            reply = self._ops.encoded(ticket, tokens, error)
        except RamifyError as failure:
            self._fail(task, failure)
            self._start(self._program.finish(task))
            return
        self._complete(task, reply)
        heads = self._program.finish(task)
        self._start(heads)
        if not heads:
            self._prefill(task)

    # --- ops that do not queue -------------------------------------------------------------------

    def _tree(self, attachment: Attachment, op: Tree) -> None:
        try:
            chosen = (
                [self.state.branch(op.branch)]
                if op.branch is not None
                else list(self.state.branches.values())
            )
        except RamifyError as error:
            self.audience.reply(
                attachment.client, op.id, error_message(error, ident=op.id, branch=op.branch), None
            )
            return
        self._inspect(
            [b.handle for b in chosen], lambda resident: self._show(attachment, op, chosen, resident)
        )

    def _show(self, attachment: Attachment, op: Tree, chosen: list[Branch], resident: list[int]) -> None:
        ledger = self.audience.ledger(attachment.client)
        branches = [
            self._branch_state(branch, known, text=op.text, tokens=op.tokens)
            for branch, known in zip(chosen, resident, strict=True)
        ]
        state = State(
            session=self.identity.session,
            op=ledger.highest,
            revision=self.state.revision,
            branches=branches,
            meta=self.state.meta,
            id=op.id,
        )
        self.audience.reply(attachment.client, op.id, state, None, keep=False)

    def _cancel_op(self, attachment: Attachment, op: Cancel) -> None:
        """By id: those ops. By branch (or all): generations that run or wait there."""
        client = attachment.client
        if op.ops is not None:
            wanted = set(op.ops)
            tasks = [t for t in self._program.on() if t.frame.client == client and t.op.id in wanted]
        else:
            where = names(op.branch) if op.branch is not None else None
            unknown = [
                n for n in where or () if n not in self.state.branches and not self._program.behind(n)
            ]
            if unknown:
                error = error_message(
                    NoBranch(f"there is no branch {unknown[0]!r}"), ident=op.id, branch=unknown[0]
                )
                self.audience.reply(client, op.id, error, None)
                return
            tasks = [
                t
                for t in self._program.on(where)
                if t.kind == "generate" or (t.kind == "spawn" and (where is None or t.branch in where))
            ]
            spawned = {id(t.op) for t in tasks if t.kind == "spawn"}
            if spawned:  # the generations of a fork that will not be made
                tasks += [t for t in self._program.on() if id(t.op) in spawned and t not in tasks]
        cancelled = sorted({task.op.id for task in self._cancel_tasks(tasks)})
        reply = Ok(id=op.id, revision=self.state.revision, result={"cancelled": cancelled})
        self.audience.reply(client, op.id, reply, None)

    def _cancel_tasks(self, tasks: list[Task]) -> list[Task]:
        """Stop generations that run, answer tasks that wait. Returns those it ended or will end."""
        done: list[Task] = []
        for task in tasks:
            if self._program.running(task):
                if self.generations.cancel(task, self._now):
                    done.append(task)
                continue
            heads = self._program.finish(task)
            done.append(task)
            if task.kind != "spawn":
                error = error_message(
                    Cancelled("cancelled before it ran"), ident=task.op.id, branch=task.branch
                )
                self.audience.reply(
                    task.frame.client, task.op.id, error, self.state.branches.get(task.branch or "")
                )
            self._start(head for head in heads if head not in tasks)
        return done

    def _close(self, attachment: Attachment, op: CloseSession) -> None:
        self.audience.reply(attachment.client, op.id, Ok(id=op.id, revision=self.state.revision), None)
        self.state.out.closes.append((attachment.socket, Close.DONE, "closed by the client"))
        if not op.keep and attachment.write:
            self.ended = "closed"
            for other in self.attachments.values():
                if other is not attachment:
                    self.state.out.closes.append((other.socket, Close.DONE, "the session was closed"))

    # --- the engine's side -----------------------------------------------------------------------

    def tokens(self, message: Tokens, now: float) -> None:
        """What this session's requests sampled in one step, and which of them ended."""
        self._now = now
        ended = {item.request: item for item in message.finished} if message.finished else None
        # Two steps may arrive at once: only a request's last tokens are those that ended it.
        last = {item.request: item for item in message.progress} if ended else {}
        for item in message.progress:
            end = ended.get(item.request) if ended and last[item.request] is item else None
            self.generations.progress(item, end)
        for finished in message.finished:
            self.generations.finished(finished)
        if message.finished:
            self.generations.submit_ready()

    def inspected(self, message: Inspected, now: float) -> None:
        self._now = now
        _, then = self._inspections.pop(message.id, (0, None))
        if then is not None:
            then(message.resident)

    def fail(self, error: RamifyError, now: float) -> None:
        """The engine is broken: every op that has no terminal reply gets one; the session is over.

        What ran ends with `error`, and so does what waited, or it is skipped.
        """
        self._now = now
        self._broken = error
        while self._inspections:  # an `open` or a `tree` that waits for the cache
            _, (count, then) = self._inspections.popitem()
            then([-1] * count)
        self.generations.fail(error, now)
        for task in self._ops.encoding():
            self._fail(task, error)
            self._start(self._program.finish(task))
        for attachment in self.attachments.values():
            for branch in self.state.branches.values():
                attachment.settle(branch)
        self.state.out.forget()
        self.ended = FAILED

    def _inspect(self, handles: list[int], then: Callable[[list[int]], None]) -> None:
        ident = self.state.next_id()
        self._inspections[ident] = (len(handles), then)
        self.state.out.cache.append(Inspect(self.state.number, ident, handles))

    def _branch_state(
        self, branch: Branch, resident: int, *, text: bool = False, tokens: bool = False
    ) -> BranchState:
        running = self.generations.running_piece(branch)
        return branch.state(running, resident, text=text, tokens=tokens)

    def _is_cold(self, branch: Branch, resident: int) -> bool:
        """Whether the next turn prefills again. What a generation has computed so far is its own."""
        return self.generations.running_piece(branch) is None and resident < branch.released - 1
