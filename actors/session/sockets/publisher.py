"""Sends replies, errors, events and deltas to the sockets of a session.

Pure. It holds the subscribers and, for each client, the ids that it used with their replies. How one
socket is served is in `subscriber`.
"""

from collections.abc import Callable, Iterable, Sequence

from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.branches.tasks import Task
from ramify.actors.session.sockets.clients import Declared, ReplyLog, in_force
from ramify.actors.session.sockets.subscriber import Subscriber
from ramify.protocol.errors import (
    RamifyError,
    Skipped,
)
from ramify.protocol.saved import SavedError
from ramify.protocol.wire import (
    ClientMessage,
    Done,
    Error,
    Event,
    JsonObject,
    Ok,
    Op,
    Open,
    ServerMessage,
)

TOLD = frozenset({"rebased", "dropped", "kept"})  # of a reply's result, to those who did not ask
REPLY_LOGS_KEPT = 64  # clients of one session whose op ids are remembered
TOOLS_KEPT = 4 << 20  # bytes of JSON of the tools that they have declared


# By code; of several with one, the first.
_KINDS: dict[str, type[RamifyError]] = {
    kind.code: kind
    for kind in reversed(RamifyError.__subclasses__())
    if kind.__module__ == RamifyError.__module__
}


def error_of(saved: SavedError) -> RamifyError:
    """Make the error that was saved; `internal` where this version does not know its code."""
    error = _KINDS.get(saved.code, RamifyError)(saved.message)
    error.details, error.retry_ms = saved.details, saved.retry_ms
    return error


def bare(error: RamifyError) -> RamifyError:
    """Make a copy of `error` without its traceback, so that it can be kept.

    The frames of a traceback hold what was worked on, often the error itself. They would count against
    the session until Python's garbage collector runs.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def error_message(error: RamifyError, *, ident: int | None = None, branch: str | None = None) -> Error:
    """Make the reply to op `ident` of an error."""
    return Error(
        code=error.code,
        message=error.message,
        id=ident,
        branch=branch,
        retry_ms=error.retry_ms,
        details=error.details,
    )


def refusals(error: RamifyError, ops: list[ClientMessage]) -> list[Error]:
    """Make the replies to a refused frame: the faulty op gets the error, the others `skipped`."""
    faulty = (error.details or {}).get("id")
    idents = [op.id for op in ops if isinstance(op, Op)]
    skipped = Skipped(f"the frame was refused because of op {faulty}")
    return [
        error_message(error if faulty in (None, ident) else skipped, ident=ident) for ident in idents
    ] or [error_message(error)]


class Publisher:
    """Sends to a session's sockets. `now`: set first. `on_forget(client)`: its ids are forgotten."""

    def __init__(self, state: SessionState, *, on_forget: Callable[[str], None]) -> None:
        self.subscribers: dict[int, Subscriber] = {}
        self.reply_logs: dict[str, ReplyLog] = {}
        self._viewers: dict[str, ReplyLog] = {}  # a viewer's ids are its own, whatever it calls itself
        self.declared: Declared | None = None  # the tools of the client that opened the session last
        self.now = 0.0
        self._state = state
        self._on_forget = on_forget

    def reply(
        self,
        client: str,
        ident: int,
        message: ServerMessage,
        branch: SessionBranch | None,
        *,
        again: ServerMessage | None = None,
        keep: bool = True,
        write: bool = True,
        children: Sequence[SessionBranch] = (),
    ) -> None:
        """Send a terminal reply. `again`: what is kept for a repeated request; not `keep`: nothing is.

        `write`: False where a viewer asked. `children`: the branches that the op made.
        """
        self.reply_log(client, write).record(
            ident,
            message if again is None else again,
            keep=keep,
            saved=branch is None or branch.persist != "none",
        )
        for subscriber in self.subscribers.values():
            if subscriber.client == client and subscriber.write == write:
                subscriber.reply(branch, message, children)

    def announce(self, task: Task, reply: Ok | Done) -> None:
        """Tell the other clients that the tree changed. The author's own socket may be gone."""
        client = task.frame.client
        others: list[Subscriber] = []
        for subscriber in self.subscribers.values():
            if subscriber.client != client or not subscriber.write:
                others.append(subscriber)
        if not others:
            return
        details: JsonObject = {"position": reply.position}
        if isinstance(reply, Done):
            details["reason"] = reply.reason
        else:
            details.update((key, value) for key, value in (reply.result or {}).items() if key in TOLD)
        if task.children and task.kind.forks:
            details["as"] = list(task.children)
        if task.kind.renames and reply.branch != task.branch:
            details["from"] = task.branch  # the name that it had
        event = Event(
            revision=self._state.revision,
            op=task.kind.name,
            branch=reply.branch,
            by=client,
            details=details,
        )
        branches = self._state.branches
        branch = branches.get(reply.branch or "")
        children = [branches[name] for name in task.children]
        for subscriber in others:
            # Who reads nothing for so long misses events: the next one's `revision` shows it.
            if subscriber.held < self._state.limits.ops_in_flight:
                subscriber.reply(branch, event, children)
            elif branch is not None:
                subscriber.flush(branch)

    def flush(self, branches: Iterable[SessionBranch]) -> None:
        """Send what the branches have released to each socket that may have it now."""
        for subscriber in self.subscribers.values():
            if (later := subscriber.stream(branches, self.now)) is not None:
                self._state.out.wake(later)

    def stream(self, subscriber: Subscriber, branches: Iterable[SessionBranch]) -> None:
        """Send what the branches have released to one socket, now or at its next tick."""
        if (later := subscriber.stream(branches, self.now)) is not None:
            self._state.out.wake(later)

    def tick(self) -> None:
        """Send what waited for `tick_ms`."""
        for subscriber in self.subscribers.values():
            later = subscriber.tick(self._state.branches.values(), self.now)
            if later is not None:
                self._state.out.wake(later)

    def begin(self, branch: SessionBranch) -> None:
        """Note a new branch, whose text so far sockets know."""
        for subscriber in self.subscribers.values():
            subscriber.begin(branch, branch.position)

    def cut(self, branch: SessionBranch, to: int) -> None:
        """Note that the branch was moved back to `to`."""
        for subscriber in self.subscribers.values():
            subscriber.cut(branch, to)

    def settle(self, branch: SessionBranch) -> None:
        """Send what is due of the branch: it is about to hold something else."""
        for subscriber in self.subscribers.values():
            subscriber.settle(branch)

    def place(self, branch: SessionBranch) -> None:
        """Note that the branch was moved to where another one is, whose text sockets know."""
        for subscriber in self.subscribers.values():
            subscriber.place(branch)

    def rewrite(self, branch: SessionBranch, to: int) -> None:
        """Send the text of the branch from `to` on again: it has changed."""
        for subscriber in self.subscribers.values():
            subscriber.rewrite(branch, to)

    def rename(self, branch: SessionBranch, name: str) -> None:
        """Note that the branch is about to get another name."""
        for subscriber in self.subscribers.values():
            subscriber.rename(branch, name)

    def drop(self, branch: SessionBranch) -> None:
        """Note that the branch is about to go."""
        for subscriber in self.subscribers.values():
            subscriber.drop(branch)

    def declare(self, opened: Open, write: bool) -> Declared:
        """Find the tools in force for a client that opens the session. A viewer's are of no use."""
        if not write:
            return Declared(None, self._state.meter)
        reply_log = self.reply_log(opened.who)
        declared = in_force(opened, reply_log.declared, self.declared, self._state.meter)
        reply_log.declared = self.declared = declared
        self._bound_tools()
        return declared

    def _bound_tools(self) -> None:
        """Forget tools of clients that are gone, the oldest first, while all together are too long."""
        attached = {a.client for a in self.subscribers.values() if a.write}
        kept = {id(log.declared): log.declared.size for log in self.reply_logs.values() if log.declared}
        for client, log in self.reply_logs.items():
            if sum(kept.values()) <= TOOLS_KEPT:
                return
            if log.declared is not None and log.declared is not self.declared and client not in attached:
                kept.pop(id(log.declared), None)
                log.declared = None

    def reply_log(self, client: str, write: bool = True) -> ReplyLog:
        """Find or make the ids of `client`. Forgets clients that are gone when there are too many.

        A viewer displaces only viewers, never a client that has the session's key.
        """
        reply_logs = self.reply_logs if write else self._viewers
        reply_log = reply_logs.get(client)
        if reply_log is None:
            attached = {a.client for a in self.subscribers.values() if a.write == write}
            for other in list(reply_logs):
                if len(reply_logs) < REPLY_LOGS_KEPT:
                    break
                if other not in attached and reply_logs[other].idle:
                    reply_logs.pop(other).forget()
                    if write:
                        self._on_forget(other)
            reply_log = reply_logs[client] = ReplyLog(self._state.limits, self._state.meter)
        return reply_log
