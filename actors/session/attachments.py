"""Attaching and detaching sockets, and when a session without sockets expires. Pure.

A socket is attached once the cache has said which tokens are resident. Then it gets its `state` and what
it missed, and the frames that it sent meanwhile run. When the last socket goes, the session has its time
to live left.
"""

from collections.abc import Callable

from ramify.actors.kit.turns import OP, SOCKET, Steps
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.ops import op_bytes
from ramify.actors.session.ops.running.op_runner import OpRunner
from ramify.actors.session.sockets.clients import ReplyLog
from ramify.actors.session.sockets.publisher import Publisher, error_message, refusals
from ramify.actors.session.sockets.subscriber import Subscriber
from ramify.actors.session.sockets.view import Inspections, View
from ramify.protocol.errors import Close, LimitExceeded
from ramify.protocol.messages import Attach, Frame
from ramify.protocol.wire import ClientMessage, Op, Rollback, Tree

Ops = list[ClientMessage]
SHOWN = 4  # what it costs to show a branch in a `state` (see `Work`)
OUTPUTS = 10  # that are looked at in a microsecond
PAUSE = 0.005  # until a socket that catches up gets its next frame
LOOK_SECONDS = 1.0  # how often a session that is due is looked at, while it generates


class Attachments:
    """The sockets of one session.

    `on_frame(subscriber, frame)`: a frame of a socket that has its `state`;
    `on_gone(subscriber)`: one of those is detached. `ttl_s`: the default,
    `ttl_max_s`: what a client may ask for; `kept_s`: how long a store keeps a session whose client did
    not ask, which then only leaves the memory when its time to live is over."""

    def __init__(
        self,
        state: SessionState,
        publisher: Publisher,
        runner: OpRunner,
        inspections: Inspections,
        view: View,
        *,
        ttl_s: float,
        ttl_max_s: float,
        kept_s: float | None = None,
        on_frame: Callable[[Subscriber, Frame], None],
        on_gone: Callable[[Subscriber], None],
        on_join: Callable[[Steps[None]], None],
    ) -> None:
        self._state = state
        self._publisher = publisher
        self._runner = runner
        self._inspections = inspections
        self._view = view
        self._on_frame = on_frame
        self._on_gone = on_gone
        self._on_join = on_join
        self._default_ttl = self._ttl = ttl_s
        self._ttl_max = ttl_max_s
        self.kept_s = kept_s
        self.asked_ttl: float | None = None  # what a client has asked for
        self._expires: float | None = None
        self._joining: dict[int, Attach] = {}  # waiting for the cache
        self._backlog: dict[int, list[Frame]] = {}  # what they have sent meanwhile
        self._waiting = 0  # bytes of that

    @property
    def sockets(self) -> list[int]:
        """The sockets that are attached, and those that wait for their `state`."""
        return [*self._publisher.subscribers, *self._joining]

    def _clients(self, write: bool) -> list[tuple[int, str]]:
        """(socket, client) of the `sockets` that may change the session, or else of its viewers'."""
        attached = [(s, a.client) for s, a in self._publisher.subscribers.items() if a.write == write]
        return attached + [(s, m.open.who) for s, m in self._joining.items() if m.write == write]

    # --- coming ----------------------------------------------------------------------------------

    def attach(self, message: Attach) -> None:
        """Attach the socket of a client. Its `state` follows once the cache has said what is resident.

        A viewer changes nothing: it takes over from a viewer of its name only, is counted apart,
        so that it keeps nobody out, and does not lengthen the session's life.
        """
        opened, out = message.open, self._state.out
        present = self._clients(message.write)
        others = [socket for socket, client in present if client == opened.who]
        count = len(present) - len(others)
        if count >= self._state.limits.attachments:
            who = "clients" if message.write else "viewers"
            error = LimitExceeded(
                f"{count} {who} are attached to this session already: close one first",
                details={"max": self._state.limits.attachments},
            )
            out.notes.append((message.socket, error_message(error)))
            out.closes.append((message.socket, Close.FORBIDDEN, "too many attachments"))
            return
        if message.write:
            self._expires = None
        self._joining[message.socket] = message  # before the others leave: the client is not away
        for other in others:
            self.detach(other)
            out.closes.append((other, Close.REPLACED, "the same client attached again"))
        lengths = self._view.lengths()
        branches = list(lengths)

        def join(resident: list[int], tiers: list[int]) -> None:
            known = dict(zip(branches, zip(resident, tiers, strict=True), strict=True))
            self._on_join(self._join(message.socket, known, lengths))

        if opened.session is None or not branches:
            join([0] * len(branches), [0] * len(branches))
        else:
            self._inspections.ask(branches, join)

    def frame(self, frame: Frame) -> None:
        """Pass on a frame of a socket, or keep it until the socket has its `state`."""
        subscriber = self._publisher.subscribers.get(frame.socket)
        if subscriber is not None:
            self._on_frame(subscriber, frame)
        elif frame.socket in self._joining:
            self._keep(frame)

    def _keep(self, frame: Frame) -> None:
        """Keep a frame of a socket that has no `state` yet.

        A frame for which there is no room is refused: at once, or after the `state` if it has ops that
        were seen before, which get their replies again. Their ids alone are kept, in as much room again.
        """
        socket, ops = frame.socket, frame.ops
        size, most = sum(map(op_bytes, ops)), self._state.limits.queued_op_bytes
        if self._waiting and self._waiting + size > most:
            error = LimitExceeded(
                f"more than {most} bytes wait for the answer to `open`: wait for it, then send again",
                details={"max": most},
            )
            ids: Ops = [_stand_in(op) for op in ops if isinstance(op, Op)]
            size = sum(map(op_bytes, ids))
            if not self._knows(self._joining[socket], ids) or self._waiting + size > 2 * most:
                self._state.out.notes += [(socket, each) for each in refusals(error, ops)]
                return
            frame = Frame(socket, ids, limit=error_message(error))
        self._backlog.setdefault(socket, []).append(frame)
        self._hold(size)

    def _knows(self, joining: Attach, ops: Ops) -> bool:
        """Whether the joining client has sent any of these ops before."""
        reply_log = self._publisher.reply_log(joining.open.who, joining.write)
        return any(isinstance(op, Op) and op.id <= reply_log.last for op in ops)

    def _take(self, socket: int) -> list[Frame]:
        """Take the frames that were kept."""
        frames = self._backlog.pop(socket, [])
        self._hold(-sum(op_bytes(op) for frame in frames for op in frame.ops))
        return frames

    def _hold(self, count: int) -> None:
        self._waiting += count
        self._state.meter.add(count)

    def _join(
        self,
        socket: int,
        resident: dict[SessionBranch, tuple[int, int]],
        lengths: dict[SessionBranch, int],
    ) -> Steps[None]:
        yield OP + len(lengths) * SHOWN
        message = self._joining.pop(socket, None)
        if message is None:  # gone in the meantime
            return
        opened = message.open
        declared = self._publisher.declare(opened, message.write)
        subscriber = Subscriber(
            socket, opened, self._state.meter, write=message.write, declared=declared
        )
        self._publisher.subscribers[socket] = subscriber
        reply_log = self._publisher.reply_log(opened.who, message.write)
        if message.write and (message.saves or opened.session is None):
            ttl = opened.ttl_s if opened.ttl_s is not None else self._default_ttl
            self._ttl = min(ttl, self._ttl_max)
            self.asked_ttl = self._ttl if opened.ttl_s is not None else None
        kept = self.kept_s if self.kept_s is not None and self.asked_ttl is None else self._ttl
        state = self._view.opened(message, reply_log, resident, lengths, kept, declared.names)
        subscriber.out.append(state)
        for branch in list(self._state.branches.values()):
            yield SOCKET + len(branch.segments) // OUTPUTS
            self._catch_up(subscriber, branch, reply_log)
        yield from self._go_on(subscriber)
        if message.write:
            self._runner.unpause(opened.who)
            if not (message.ops or self._runner.busy):
                self._runner.generations.prefills.recall(resident, self._publisher.now)
        self._on_frame(subscriber, Frame(socket, message.ops, place=message.place))
        for frame in self._take(socket):
            self._on_frame(subscriber, frame)

    def _catch_up(self, subscriber: Subscriber, branch: SessionBranch, reply_log: ReplyLog) -> None:
        have = subscriber.opened.have.get(branch.name)
        if have is not None and self._state.lost(subscriber.opened.revision):
            subscriber.restart(branch, have)
            subscriber.fall_behind(branch, reply_log.replies)
            return
        if have is not None:
            subscriber.resume(branch, have, subscriber.opened.revision)
            subscriber.fall_behind(branch, reply_log.replies)
            return
        running = branch.running
        subscriber.begin(branch, running.start if running is not None else branch.released)
        subscriber.flush(branch)

    def _go_on(self, subscriber: Subscriber) -> Steps[None]:
        """Send one frame of what the socket has missed; the rest follows when that is on its way."""
        for name in subscriber.late:
            branch = self._state.branches.get(name)
            if branch is None:
                subscriber.forget_late(name)
                continue
            if subscriber.throttled or subscriber.socket not in self._publisher.subscribers:
                return
            if subscriber.full:
                self._state.out.wake(self._publisher.now + PAUSE)
                return
            yield SOCKET + len(branch.segments)
            subscriber.catch_up(branch)

    # --- going -----------------------------------------------------------------------------------

    def detach(self, socket: int) -> None:
        """Forget a socket that is gone. `open.detach` said what becomes of its generations."""
        self._take(socket)
        joining = self._joining.pop(socket, None)
        subscriber = self._publisher.subscribers.pop(socket, None)
        if subscriber is not None:
            self._on_gone(subscriber)
            subscriber.close()
        gone = subscriber or joining
        if gone is None or not gone.write:
            return
        client = gone.open.who if isinstance(gone, Attach) else gone.client
        present = self._clients(write=True)
        if all(other != client for _, other in present):
            policy = gone.open.detach if isinstance(gone, Attach) else gone.opened.detach
            if policy == "pause" and client in self._publisher.reply_logs:  # else it never had an op
                self._runner.pause(client)
            elif policy == "cancel":
                self._runner.cancel_generations_of(client)
        if not present:
            self.leave()

    @property
    def away(self) -> bool:
        """Whether no socket that may change the session is attached."""
        for subscriber in self._publisher.subscribers.values():
            if subscriber.write:
                return False
        return not any(message.write for message in self._joining.values())

    def leave(self) -> None:
        """Begin the time to live: no socket is attached."""
        self._expires = self._publisher.now + self._ttl
        self._state.out.wake(self._expires)

    def forget(self, client: str) -> None:
        """Forget a client: its ids, and that it is away."""
        self._runner.unpause(client)

    # --- staying ---------------------------------------------------------------------------------

    def throttle(self, socket: int, held: bool) -> None:
        """Note that the socket's queue is full (`held`), or short again."""
        subscriber = self._publisher.subscribers.get(socket)
        if subscriber is None:
            return
        subscriber.throttled = held
        if not held and not subscriber.opened.tick_ms:
            for branch in self._state.branches.values():
                subscriber.fall_behind(branch)
            self._on_join(self._go_on(subscriber))
        elif not held:
            self._state.out.wake(self._publisher.now)

    @property
    def deserted(self) -> bool:
        """Whether no socket is attached or on the way, and nothing runs."""
        return not (self._publisher.subscribers or self._joining or self._runner.busy)

    def catch_up(self) -> None:
        """Go on with sockets that have missed something: time has passed."""
        for subscriber in self._publisher.subscribers.values():
            if subscriber.late:
                self._on_join(self._go_on(subscriber))

    def tick(self, *, stays: bool = False) -> bool:
        """Flush what waited for `tick_ms`: time has passed. Returns whether the session has expired.

        `stays`: see `SessionCore.tick`.

        There is one timer. It is set for the earliest time asked for; later ones are asked for again.
        """
        now, out = self._publisher.now, self._state.out
        self._publisher.tick()
        if self._expires is None:
            return False
        if now >= self._expires:
            if not (self._runner.busy or stays):
                return True
            self._expires = now + max(self._ttl, LOOK_SECONDS)  # a detached generation may finish
        out.wake(self._expires)
        return False


def _stand_in(op: Op) -> Rollback | Tree:
    """Make a small op with the same id, for a frame of which nothing runs. A `tree` is small itself."""
    return op if isinstance(op, Tree) else Rollback(id=op.id, to=0)
