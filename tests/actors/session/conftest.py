"""A whole engine without a loop: sessions, scheduler, cache and a fake executor, stepped by hand.

Every mailbox is a list; `pump` picks the next mailbox to work off with a random generator, so a
test can see every order in which the real actors may run. Clients live here too: they keep what
they received, lose their socket, and resume as docs/protocol.md says.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Container
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio.abc import TaskGroup

from ramify.actors.cache.actor import CacheActor
from ramify.actors.cache.cache import RadixCache
from ramify.actors.cache.windows import windows_of
from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.compile import compile_constraint
from ramify.actors.grammar.constraint_registry import ConstraintRegistry
from ramify.actors.grammar.vocabulary import packed
from ramify.actors.kit.fanout import FanOut, Router
from ramify.actors.kit.mailbox import LimitedAddress, Mailbox
from ramify.actors.kit.metrics import Metrics
from ramify.actors.kit.turns import Work
from ramify.actors.scheduler.actor import SchedulerActor
from ramify.actors.scheduler.core import Scheduler
from ramify.actors.session.branches.state import SessionState, ToCache, ToGrammar, ToScheduler
from ramify.actors.session.core import SessionCore
from ramify.actors.session.directory import Directory
from ramify.actors.session.input.template import ChatTemplate
from ramify.actors.session.making import SessionMaker
from ramify.actors.session.sockets.clients import Identity
from ramify.actors.tokenizer import Tokenizer
from ramify.actors.tokenizer.detokenizer import Detokenizer
from ramify.gpu.executors.base import BadLogits, PendingStep
from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.executors.fake_model import FakeModel
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.config import Limits, ScheduleConfig
from ramify.protocol.errors import ConstraintError, RamifyError
from ramify.protocol.plan import StepPlan
from tests.actors.cache.integrity import check
from tests.actors.session.alone import Alone, restore
from tests.manual_clock import ManualClock

compiled_once = cache(compile_constraint)  # for all engines: the same constraint comes in many tests


class SimClient:
    """A client of one session: sends frames, applies replies, reconnects."""

    def __init__(self, engine: "SimEngine", number: int, name: str = "c", **opened: Any) -> None:
        self.engine = engine
        self.number = number
        self.name = name
        self.opened = opened
        self.socket: int | None = None
        self.next_id = 1
        self.key: str | None = None
        self.session: str | None = None
        self.revision = 0
        self.lost = False  # a server ended without what it has seen
        self.notes: list[str] | None = None  # on the chat template
        self.have: dict[str, int] = {}
        self.chunks: dict[str, list[tuple[int, str]]] = {}  # branch -> (position, text)
        self.said: dict[str, str] = {}  # the text of branches that are gone
        self.replies: dict[int, list[w.ServerMessage]] = {}
        self.unanswered: dict[int, tuple[w.Op, int]] = {}
        self.frames = 0
        self.events: list[w.ServerMessage] = []
        self.chosen: set[tuple[str, int]] = set()  # its name and the ids of its `select`s
        self.deltas: list[w.Delta] = []
        self.tools: list[str] | None = None  # in force, as the last `state` says

    def connect(self) -> None:
        """Attach, resuming if there was a session; ops without a reply are sent again."""
        self.engine.sockets += 1
        self.socket = self.engine.sockets
        self.engine.clients[self.socket] = self
        again = [op for op, _ in self.unanswered.values()]
        opened = w.Open(
            client=self.name,
            session=self.session,
            key=self.key,
            have=dict(self.have) if self.session else {},
            revision=self.revision if self.session else None,
            **self.opened,
        )
        self.engine.post_session(self.number, m.Attach(self.socket, opened, list(again), True))

    def drop(self) -> None:
        """Lose the socket: what is under way to it is lost."""
        if self.socket is not None:
            del self.engine.clients[self.socket]
            self.engine.post_session(self.number, m.Detached(self.socket))
            self.socket = None

    def send(self, *ops: w.ClientMessage, replies: dict[int, int] | None = None) -> None:
        for op in ops:
            if isinstance(op, w.Select):
                self.chosen.add((self.name, op.id))
            if isinstance(op, w.Op):
                count = (replies or {}).get(op.id) or _targets(op)
                self.unanswered[op.id] = (op, count)
        if self.socket is not None:
            self.engine.post_session(self.number, m.Frame(self.socket, list(ops)))

    def id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def receive(self, messages: list[w.ServerMessage]) -> None:
        self.frames += 1
        for message in messages:
            self.revision = max(self.revision, getattr(message, "revision", None) or 0)
            match message:
                case w.StateReply():
                    self.session, self.key = message.session, message.key or self.key
                    self.lost = self.lost or message.lost
                    if message.id is None:
                        self.tools, self.notes = message.tools, message.notes
                    if self.engine.stored:  # a branch that was made after the last save is gone
                        for name in self.have.keys() - {known.branch for known in message.branches}:
                            del self.have[name]
                            self.chunks.pop(name, None)
                    for known in message.branches:
                        start = known.position if known.started_at is None else known.started_at
                        self.have.setdefault(known.branch, start)
                    self._answer(message)
                case w.Delta():
                    self._delta(message)
                case w.Ok() | w.Done() | w.Error():
                    self._answer(message)
                case _:
                    self.events.append(message)

    def text(self, branch: str) -> str:
        return "".join(text for _, text in self.chunks.get(branch, ()))

    def _delta(self, delta: w.Delta) -> None:
        self.deltas.append(delta)
        if self.opened.get("parts"):
            assert "".join(part.text for part in delta.parts or ()) == delta.text
        chunks = self.chunks.setdefault(delta.branch, [])
        if delta.truncate is not None:
            chunks[:] = [chunk for chunk in chunks if chunk[0] <= delta.truncate]
        elif not self.lost:  # else a rollback whose reply it had may have run again
            assert delta.position > self.have.get(delta.branch, 0), "a delta goes back"
        if delta.text or delta.truncate is None:
            chunks.append((delta.position, delta.text))
        self.have[delta.branch] = delta.position

    def _answer(self, message: Any) -> None:
        if message.id is None:
            if isinstance(message, w.Error):
                self.events.append(message)
            return
        if message.id not in self.unanswered:
            return  # a reply that was sent again
        known = self.replies.setdefault(message.id, [])
        if any(r.branch == message.branch for r in known if not isinstance(r, w.StateReply)):
            return
        known.append(message)
        op, count = self.unanswered[message.id]
        if isinstance(message, w.Ok) and isinstance(op, w.Rollback) and message.position is not None:
            self._cut(op.branch, message.position)
        result = message.result or {} if isinstance(message, w.Ok) else {}
        if "rebased" in result:
            self._cut(message.branch or "", result["rebased"])
        for kept in result.get("kept", ()):
            self._cut(kept["into"], kept.get("rebased", kept["position"]))
            self.have[kept["into"]] = kept["position"]
        for name in result.get("dropped", ()):
            self.said[name] = self.text(name)
            self.have.pop(name, None)
            self.chunks.pop(name, None)
        if isinstance(message, w.Ok) and isinstance(op, w.Drop):
            self.have.pop(message.branch or "", None)
            self.chunks.pop(message.branch or "", None)
        if isinstance(message, w.Ok) and isinstance(op, w.Fork) and message.position is not None:
            for name in op.as_:
                self.have.setdefault(name, message.position)
        if len(known) >= count:
            del self.unanswered[message.id]

    def _cut(self, branch: str, to: int) -> None:
        if self.have.get(branch, 0) > to:
            self.have[branch] = to
            self.chunks[branch] = [c for c in self.chunks.get(branch, ()) if c[0] <= to]


def _targets(op: w.Op) -> int:
    if isinstance(op, w.Generate) and (op.n > 1 or op.as_):
        return op.n
    branch = getattr(op, "branch", None)
    if isinstance(branch, list) and not isinstance(op, w.Cancel):
        return len(branch)
    return 1


_TOLD = msgspec.msgpack.Decoder(ToCache | ToScheduler | ToGrammar)


def carried(message: Any) -> Any:
    """A session's message as it arrives from a gateway process: one of a wrong type would end that."""
    return _TOLD.decode(msgspec.msgpack.encode(message))


class SimEngine:
    """See the module's top."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        pages: int = 4096,
        page_size: int = 1,
        context: int = 512,
        step_tokens: int = 64,
        max_rows: int = 16,
        eos_every: int = 30,
        seed: int = 0,
        limits: Limits | None = None,
        in_flight: int = 2,
        vocab: int | None = None,
        constraints: int = 512,
        drafts: int = 0,
        acceptance: float = 0.8,
        stored: bool = False,
        turn: int = 1 << 40,
        state_slots: int = 0,
        window: int = 0,
        window_pages: int = 0,
    ) -> None:
        self.stored = stored
        self.turn = turn  # what a session may do in one turn of the loop
        self.saved: dict[int, dict[str, bytes]] = {}  # what a store has of each session
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)
        self.detokenizer = Detokenizer(tokenizer.token_bytes)
        self.model = FakeModel(tokenizer.vocab_size, eos=2, eos_every=eos_every, first=3)
        self._make_executor = partial(
            FakeExecutor,
            self.model,
            pages=pages,
            page_size=page_size,
            context=context,
            step_tokens=step_tokens,
            max_rows=max_rows,
            verify=True,
            drafts=drafts,
            acceptance=acceptance,
            generous=0.9,
            step_seconds=1e-6,  # so that drafts pay
            state_slots=state_slots,
            window=window,
            window_pages=window_pages,
        )
        self._schedules = ScheduleConfig(in_flight=in_flight, lookahead=4)
        self._constraints = constraints
        self.context = context
        self.vocab = tokenizer.vocab_size if vocab is None else vocab
        self.limits = limits or Limits()
        self.random = random.Random(seed)
        self.now = 100.0
        self.cores: dict[int, SessionCore] = {}
        self.clients: dict[int, SimClient] = {}
        self.sockets = 0
        self.computed = 0
        self.deltas = 0
        self.integrity = True
        self._lost: set[int] = set()  # sessions whose engine is gone: nobody hears them
        # (session, client, op id) of generations that call nothing
        self.unheld: set[tuple[int, str, int]] = set()
        self.calls: Automaton | None = None  # free text with calls, where the sessions have tools
        self._start()

    def _start(self) -> None:
        """An engine in which no session is."""
        self.executor = self._make_executor()
        info = self.executor.info
        windows = windows_of(info, self._schedules.in_flight)
        states = info.state_slots
        self.cache = RadixCache(info.pages, info.page_size, state_slots=states, windows=windows)
        self.scheduler = Scheduler(info, self._schedules)
        core = ("scheduler", "cache", "executor", "grammar")
        self._mail: dict[Any, deque[Any]] = {name: deque() for name in core}
        self.registry = ConstraintRegistry(most=self._constraints)
        self._mail["scheduler"].append(m.Constrain(0, packed(self.tokenizer)))
        self._pending: deque[PendingStep] = deque()

    # --- building ------------------------------------------------------------------------------

    def session(self, name: str = "c", **opened: Any) -> SimClient:
        number = len(self.cores) + 1
        self.cores[number] = self.make_core(number)
        self._mail[number] = deque()
        client = SimClient(self, number, name, **opened)
        client.connect()
        return client

    def make_core(self, number: int, *, saved: bool = False) -> SessionCore:
        core = SessionCore(
            Identity(f"s_{number}", "key"),
            SessionState(
                number,
                context=self.context,
                vocab=self.vocab,
                limits=self.limits,
                decode=self.tokenizer.decode,
            ),
            self.tokenizer,
            self.template,
            self.detokenizer,
            server=w.ServerInfo(version=1, epoch="e", model="fake"),
            ttl_s=600.0,
            random_seed=lambda: 7,
            saved=saved,
            kept_s=1e6 if self.stored else None,
        )
        core.work = Work(self.turn)
        if self.stored:
            core.record(model="fake", priority=8, created=1e9)
        return core

    # --- a store -------------------------------------------------------------------------------

    def save(self, number: int) -> None:
        """The store has all of the session from now on: a look at everything finds nothing more."""
        core, now = self.cores[number], 1e9 + self.now
        changes = core.changes(now)
        if changes is not None:
            items = self.saved.setdefault(number, {})
            for key in changes.drop:
                items.pop(key, None)
            items.update(changes.put)
            assert changes.size == sum(map(len, items.values()))
        core.state.changed = True
        assert core.changes(now) is None

    def crash(self) -> None:
        """The process dies, and another one takes up what the store has. Clients lose their sockets."""
        for client in self.clients.values():
            client.socket = None
        self.clients.clear()
        self._start()
        for number in list(self.cores):
            core = self.cores[number] = self.make_core(number, saved=number in self.saved)
            self._mail[number] = deque()
            if number in self.saved:
                restore(core, self.saved[number], self.now, 1e9 + self.now)
                self.save(number)  # as `Saver`: before anybody hears of this life
                self.flush(number)

    def move(self) -> None:
        """The engine dies, and another one takes its place; sockets stay."""
        mail = {number: self._mail[number] for number in self.cores}
        self._start()
        self._mail.update(mail)
        for number in self.cores:
            self._lost.add(number)
            self._mail[number].append(m.ChangeCore())

    def post_session(self, number: int, message: Any) -> None:
        self._mail[number].append(message)

    def fail(self, number: int) -> None:
        """The engine breaks: the session reads what waits, and says how it all ends."""
        core = self.cores[number]
        for message in self._mail.pop(number):
            self._session(number, message)
        core.fail(RamifyError("broken"), self.now)
        out = core.state.out
        assert [*out.cache, *out.scheduler, *out.grammar, *out.encode] == []
        self.flush(number)

    # --- running -------------------------------------------------------------------------------

    def pump(self, steps: int | None = None) -> None:
        """Work mailboxes off in random order, until all are empty or `steps` are done."""
        done = 0
        while steps is None or done < steps:
            ready = [key for key, mail in self._mail.items() if mail]
            if self._pending:
                ready.append("results")
            for number, core in self.cores.items():
                if core.state.out.wake_at is not None:
                    core.state.out.wake_at = None
                self.flush(number)
            if not ready:
                ready = [key for key, mail in self._mail.items() if mail]
                if not ready:
                    return
            key = self.random.choice(ready)
            self._work(key)
            done += 1
            if self.integrity and key == "cache":  # nothing else changes it
                check(self.cache)
                total = self.cache.free + self.cache.evictable + self.cache.referenced
                assert total == self.cache.total

    def _work(self, key: Any) -> None:
        self.now += 0.001
        if key == "results":
            try:
                result = self._pending.popleft().result()
            except BadLogits as error:  # as `runner`
                result = error.result
            self.computed += result.computed
            self._mail["scheduler"].append(result)
            return
        mail = self._mail[key]
        count = 1 if self.random.random() < 0.5 else len(mail)
        batch = [mail.popleft() for _ in range(min(count, len(mail)))]
        if key == "scheduler":
            self._schedule(batch)
        elif key == "cache":
            for message in batch:
                self._cached(message)
        elif key == "grammar":
            for message in batch:
                self._compile(message)
        elif key == "executor":
            for plan in batch:
                assert isinstance(plan, StepPlan)
                self._pending.append(self.executor.launch(plan))
        else:
            for message in batch:
                self._session(key, message)
            self.flush(key)

    def _schedule(self, batch: list[Any]) -> None:
        for event in batch:
            self.scheduler.handle(event, self.now)
        self.scheduler.expire(self.now)
        while (plan := self.scheduler.plan()) is not None:
            self._mail["executor"].append(plan)
        if (settle := self.scheduler.settle(self.now)) is not None:
            self._mail["cache"].append(settle)
        for number, tokens in self.scheduler.deliver():
            self._mail[number].append(tokens)

    def _compile(self, message: Any) -> None:
        """As the grammar actor and its pool, who answer at once: nobody can leave before."""
        if not isinstance(message, m.Compile):
            return
        try:
            compiled = compiled_once(message.spec)
        except ConstraintError as error:
            answer: Any = m.NotCompiled(message.request, error.code, error.message, error.details)
        else:
            entry = self.registry.find(message.spec)
            if entry is None:
                entry, retired = self.registry.put(message.spec, compiled)
                self._mail["scheduler"].append(m.Constrain(entry.number, compiled.body))
                self._mail["scheduler"].extend(map(m.Unconstrain, retired))
            answer = m.Compiled(message.request, entry.number, list(compiled.notes))
        self._mail[m.session_of(message.request)].append(answer)

    def _cached(self, message: Any) -> None:
        cache = self.cache
        match message:
            case m.Settle():
                self._mail["scheduler"].append(cache.settle(message, self.now))
            case m.OpenBranch():
                cache.open_branch(message)
            case m.ExtendBranch():
                cache.extend_branch(message)
            case m.ForkBranch():
                cache.fork_branch(message)
            case m.MoveBranch():
                cache.move_branch(message)
            case m.RetainBranches():
                cache.retain_branches(message)
            case m.DropBranches():
                cache.drop_branches(message)
            case m.Reopen(session):
                cache.drop_sessions(m.DropSessions([session]), keep=False)
            case m.Inspect():
                self._mail[message.session].append(cache.inspect(message))

    def _session(self, number: int, message: Any) -> None:
        core = self.cores[number]
        handlers: dict[type, Callable[[], None]] = {
            m.Tokens: lambda: core.tokens(message, self.now),
            m.Frame: lambda: core.framed(message, self.now),
            m.Attach: lambda: core.attach(message, self.now),
            m.Detached: lambda: core.detached(message.socket, self.now),
            m.Throttled: lambda: core.throttled(message.socket, True, self.now),
            m.Drained: lambda: core.throttled(message.socket, False, self.now),
            m.Inspected: lambda: core.inspected(message, self.now),
            m.Compiled: lambda: core.compiled(message, self.now),
            m.NotCompiled: lambda: core.compiled(message, self.now),
            m.Tick: lambda: core.tick(self.now),
            m.ChangeCore: lambda: core.change_core(self.now),
        }
        handlers[type(message)]()
        while core.unfinished:
            if not core.inside:
                self.flush(number)
            core.go_on(self.now)

    def flush(self, number: int) -> None:
        core = self.cores[number]
        out = core.state.out
        out.seal()
        if number in self._lost:
            if out.cache and isinstance(out.cache[0], m.Reopen):
                self._lost.remove(number)
            else:
                out.forget_engine()
        self._mail["cache"].extend(map(carried, out.cache))
        out.cache.clear()
        self._mail["grammar"].extend(map(carried, out.grammar))
        out.grammar.clear()
        self._mail["scheduler"].extend(map(carried, out.scheduler))
        out.scheduler.clear()
        for subscriber in list(core.subscribers.values()):
            if subscriber.out:
                frame, subscriber.out = subscriber.out, []
                client = self.clients.get(subscriber.socket)
                if client is not None:
                    client.receive(frame)
        for socket, note in out.notes:
            if socket in self.clients:
                self.clients[socket].receive([note])
        out.notes.clear()
        out.closes.clear()
        for job in out.encode:
            try:
                core.encoded(job.ticket, job.run(), None, self.now)
            except RamifyError as error:
                core.encoded(job.ticket, None, error, self.now)
        out.encode.clear()

    # --- checking ------------------------------------------------------------------------------

    def in_call(self, turn: bytes) -> bool:
        """Whether a turn ends in a call, as far as it goes, of the tools in `calls`.

        The last one counts: an op that forces a call begins one behind another that was cut off.
        """
        begun = turn.rfind(b"<tool_call>")
        return begun >= 0 and self.calls is not None and self.calls.walk(turn[begun:]) >= 0

    def check_outputs(self, number: int, chosen: Container[tuple[str | None, int | None]] = ()) -> None:
        """Every complete greedy output is what the model says, whatever happened around it.

        `chosen`: (client, op id) of each `select`, whose output is a client's text.
        """
        from ramify.actors.session.branches.segments import OutputSegment, Tail

        table = self.tokenizer.token_bytes
        for branch in self.cores[number].state.branches.values():
            tokens: list[int] = []
            turn = b""  # what the assistant has said in its turn
            for segment in branch.segments:
                said = b"".join(table[token] for token in segment.tokens)
                before, output = turn, isinstance(segment, OutputSegment)
                turn = turn + said if output or segment.tail is Tail.OPEN else b""
                if not output or (segment.client, segment.op) in chosen:
                    pass
                elif self.in_call(before) and (number, segment.client, segment.op) not in self.unheld:
                    assert self.in_call(turn), (branch.name, turn)
                elif segment.ended:
                    out = list(segment.tokens)
                    expected = self.model.expected(tokens, len(out) + 4)
                    if out != expected[: len(out)]:  # cut inside a token by a stop string
                        text = self.tokenizer.decode(expected)
                        assert text.startswith(segment.text), (branch.name, segment.start)
                tokens.extend(segment.tokens)


QUIET_TURNS = 8  # turns of the loop in which nothing is told, after which nothing will be


class LoopExecutor:
    """Runs each step in the next turn of the loop."""

    def __init__(self, executor: FakeExecutor) -> None:
        self.executor = executor
        self.scheduler: Any = None

    def tell(self, plan: Any, /) -> None:
        step = self.executor.launch(plan)
        asyncio.get_running_loop().call_soon(lambda: self.scheduler.tell(step.result()))


class World:
    """The engine's real actors on one event loop, without sockets, threads and time.

    Directory, sessions, scheduler and cache; the executor is the fake one, called from the loop; the
    test is the gateway. Use it with `async with`. `room`: what sessions may have waiting at cache and
    scheduler; `settings`: of the directory.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        limits: Limits | None = None,
        room: int = 4096,
        context: int = 2048,
        pages: int = 8192,
        **settings: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.model = FakeModel(tokenizer.vocab_size, eos=2, eos_every=40, first=3)
        executor = FakeExecutor(
            self.model, pages=pages, page_size=1, context=context, step_tokens=256, max_rows=64
        )
        self.clock = ManualClock()
        self.limits = limits or Limits()
        self.settings = settings
        self.sockets: dict[int, list[w.ServerMessage]] = {}
        self.closed: dict[int, int] = {}
        self.session_of: dict[int, int] = {}
        self.events = 0  # what was told to sockets
        self.room = room
        self._executor = LoopExecutor(executor)
        self._info = executor.info
        self.cache = RadixCache(executor.info.pages, executor.info.page_size)
        self.to_cache: Mailbox[Any] = Mailbox("cache", 1 << 20)
        self.to_scheduler: Mailbox[Any] = Mailbox("scheduler", 1 << 20)
        self.to_directory: Mailbox[Any] = Mailbox("directory", 4096)
        self.router: Router[Any] = Router("sessions")
        self.metrics = Metrics()

    async def __aenter__(self) -> "World":
        asyncio.get_running_loop().run_in_executor = self._at_once  # type: ignore[method-assign,assignment]
        spread = FanOut(self.router)
        cache = CacheActor(self.to_cache, self.cache, self.to_scheduler, spread, clock=self.clock)
        self.scheduler = SchedulerActor(
            self.to_scheduler,
            self._info,
            ScheduleConfig(lookahead=4),
            self.to_cache,
            self._executor,
            spread,
            self.clock,
            self.metrics,
        )
        self._executor.scheduler = self.scheduler
        settings = {"ttl_s": 600.0} | self.settings
        of_all = {key: settings.pop(key) for key in ("holdings", "barred") if key in settings}
        maker = SessionMaker(
            self.tokenizer,
            server=w.ServerInfo(version=1, epoch="e", model="fake"),
            context=self._info.context,
            limits=self.limits,
            vocab=self._info.vocab_size,
            clock=self.clock,
            **settings,
        )
        self.directory = Directory(
            self.to_directory,
            maker,
            cache=LimitedAddress(self.to_cache, self.room),
            scheduler=LimitedAddress(self.to_scheduler, self.room),
            grammar=LimitedAddress(Mailbox("grammar", 1 << 20), self.room),
            gateway=self,
            sessions=self.router,
            metrics=self.metrics,
            **of_all,
        )
        self._group: TaskGroup = anyio.create_task_group()
        await self._group.__aenter__()
        for actor in (cache, self.scheduler, self.directory):
            await self._group.start(actor.run)
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(*error)

    def _at_once(self, executor: Any, function: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        """As `run_in_executor`, without a thread: in the next turn of the loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def run(future: "asyncio.Future[Any]") -> None:
            try:
                future.set_result(function(*args))
            except Exception as error:
                future.set_exception(error)
            finally:
                del future  # else its exception's traceback has it

        loop.call_soon(run, future)
        return future

    # --- the gateway -----------------------------------------------------------------------------

    def tell(self, message: m.GatewayMessage, /) -> None:
        """What sessions and the directory say to sockets."""
        self.events += 1
        match message:
            case m.Opened(socket, session):
                if socket in self.closed:
                    self.router.tell(session, m.Detached(socket))
                else:
                    self.session_of[socket] = session
            case m.OpenRefused(socket, error):
                self.sockets[socket].append(error)
            case m.Deliver(socket, messages):
                self.sockets[socket].extend(messages)
            case m.CloseSocket(socket, code):
                self.closed[socket] = code

    def open(self, *ops: w.ClientMessage, **fields: Any) -> int:
        """A socket whose first frame is `open` and `ops`. `owner`: its credential."""
        socket = len(self.sockets) + 1
        self.sockets[socket] = []
        owner = fields.pop("owner", "")
        self.to_directory.tell(m.OpenSession(socket, w.Open(**fields), list(ops), owner))
        return socket

    def send(self, socket: int, *ops: w.ClientMessage, size: int = 0) -> bool:
        """A frame. False if its session is gone."""
        session = self.session_of.get(socket)
        return session is not None and self.router.tell(session, m.Frame(socket, list(ops), size))

    def notice(self, notice: Any) -> None:
        """Tell the session of a socket about it."""
        session = self.session_of.get(notice.socket)
        if session is not None:
            self.router.tell(session, notice)

    def state(self, socket: int) -> w.StateReply:
        """The `state` that answered the `open`."""
        return next(each for each in self.sockets[socket] if isinstance(each, w.StateReply))

    def replies(self, socket: int, ident: int) -> list[Any]:
        return [each for each in self.sockets[socket] if getattr(each, "id", None) == ident]

    async def settle(self) -> None:
        """Return when nothing happens any more."""
        quiet, before = 0, None
        while quiet < QUIET_TURNS:
            await asyncio.sleep(0)
            now = (self.events, self.cache.free, self._executor.executor.counters.steps)
            waiting = len(self.to_cache) + len(self.to_scheduler) + len(self.to_directory)
            quiet = quiet + 1 if now == before and not waiting else 0
            before = now


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture
def sim(tokenizer: Tokenizer) -> Callable[..., SimEngine]:
    """Makes engines: `sim(pages=..., seed=...)`."""
    return lambda **settings: SimEngine(tokenizer, **settings)


@pytest.fixture(scope="session")
def sim_class() -> type[SimEngine]:
    """For hypothesis tests, which make an engine for each example."""
    return SimEngine


@pytest.fixture
def world(tokenizer: Tokenizer) -> Callable[..., World]:
    """Makes worlds: `async with world(room=...) as each`."""
    return lambda **settings: World(tokenizer, **settings)


@pytest.fixture
def alone(tokenizer: Tokenizer) -> Callable[..., Alone]:
    """Makes sessions without an engine: `alone(context=...)`."""
    return lambda **settings: Alone(tokenizer, **settings)
