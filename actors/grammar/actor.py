"""The grammar actor: what clients constrain their outputs to, compiled off the event loop.

A session asks with `Compile` and gets one answer, unless it says meanwhile that nobody waits for that
(`Abandon`). The scheduler hears of a constraint before the session does, so a request can name it at
once. Compiling is the pool's business; this file knows neither regexes nor schemas, nor what is in a
body.
"""

from collections.abc import Awaitable, Callable, Iterable

import anyio
from anyio.abc import TaskStatus

from ramify.actors.grammar.constraint_registry import ConstraintRegistry, RegisteredConstraint
from ramify.actors.grammar.job_queue import Owner
from ramify.actors.grammar.pool import CompilePool
from ramify.actors.kit.fanout import Spread
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address, Mailbox, MailboxClosed
from ramify.actors.kit.metric_families import ConstraintCounts
from ramify.protocol.constraints import CompiledConstraint, ConstraintSpec
from ramify.protocol.errors import RamifyError
from ramify.protocol.messages import (
    Abandon,
    AbandonSession,
    Compile,
    Compiled,
    Constrain,
    GrammarMessage,
    NotCompiled,
    SchedulerEvent,
    SessionMessage,
    Unconstrain,
    session_of,
)

UNABLE = "this server does not decode under a `constraint`: {}"

log = get_log(__name__)


class GrammarActor:
    """`vocabulary`: makes the body of constraint 0, which every other needs; called until it succeeds.
    `ahead`: at once, not when the first constraint comes. `unable`: why constraints cannot be served;
    None: they can.
    """

    def __init__(
        self,
        mailbox: Mailbox[GrammarMessage],
        compiler: CompilePool,
        vocabulary: Callable[[], Awaitable[bytes]],
        scheduler: Address[SchedulerEvent],
        sessions: Spread[SessionMessage],
        *,
        ahead: bool = False,
        unable: str | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._compiler = compiler
        self._vocabulary = vocabulary
        self._scheduler = scheduler
        self._sessions = sessions
        self._ahead = ahead and unable is None
        self._unable = unable
        self.registry = ConstraintRegistry()
        self._waiting: dict[int, anyio.CancelScope] = {}  # by request
        self._reading = anyio.Lock()
        self._read = False  # the vocabulary

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until the mailbox is closed."""
        async with anyio.create_task_group() as tasks:
            task_status.started()
            if self._ahead:
                tasks.start_soon(self._prepare)
            while True:
                try:
                    messages = await self._mailbox.drain()
                except MailboxClosed:
                    break
                for message in messages:
                    match message:
                        case Compile(request):
                            self._waiting[request] = scope = anyio.CancelScope()
                            tasks.start_soon(self._compile, message, scope)
                        case Abandon(request):
                            self._abandon([request])
                        case AbandonSession(session):
                            self._abandon(
                                [each for each in self._waiting if session_of(each) == session]
                            )
            tasks.cancel_scope.cancel()

    async def _prepare(self) -> None:
        try:
            await self._vocabulary_read()
        except Exception:
            log.exception("the vocabulary is not there yet: the first constraint tries again")

    def _abandon(self, requests: Iterable[int]) -> None:
        for request in requests:
            scope = self._waiting.get(request)
            if scope is not None:
                scope.cancel()

    async def _compile(self, message: Compile, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                await self._answer(message)
            finally:
                del self._waiting[message.request]

    async def _answer(self, message: Compile) -> None:
        answer: Compiled | NotCompiled
        try:
            answer = await self._compiled(message)
        except RamifyError as error:
            answer = NotCompiled(message.request, error.code, error.message, error.details)
        except Exception:
            log.exception("a constraint was not compiled")
            answer = NotCompiled(message.request, "internal", "the constraint could not be compiled")
        self._sessions.put([(session_of(message.request), answer)])
        self._sessions.start()

    async def _compiled(self, message: Compile) -> Compiled | NotCompiled:
        if self._unable is not None:
            return NotCompiled(message.request, "unsupported", UNABLE.format(self._unable))
        await self._vocabulary_read()
        owner = Owner(message.owner, session_of(message.request))
        found = self.registry.find(message.spec, owner)
        if found is None:
            compiled = await self._compiler.compile(message.spec, owner)
            found = self._registered(message.spec, compiled, owner)
        return Compiled(message.request, found.number, list(found.notes))

    def _registered(
        self, spec: ConstraintSpec, compiled: CompiledConstraint, owner: Owner
    ) -> RegisteredConstraint:
        """Register `compiled` if it is new, and tell the scheduler."""
        found = self.registry.peek(spec, owner)
        if found is None:
            found, retired = self.registry.put(spec, compiled, owner)
            self._scheduler.tell(Constrain(found.number, compiled.body))
            for each in retired:
                self._scheduler.tell(Unconstrain(each))
        return found

    async def _vocabulary_read(self) -> None:
        async with self._reading:
            if not self._read:
                body = await self._vocabulary()
                self._scheduler.tell(Constrain(0, body))
                self._read = True


def counts_of(pool: CompilePool, registry: ConstraintRegistry) -> ConstraintCounts:
    """Since the start. "hit": it was known already, "joined": another request had just asked for it,
    "killed": its worker took too long or too much, "retired": it had to give way later.
    """
    counters = pool.counters
    return ConstraintCounts(
        {
            "compiled": counters.compiled,
            "failed": counters.failed,
            "killed": counters.killed,
            "refused": counters.refused,
            "abandoned": counters.abandoned,
            "joined": counters.joined,
            "hit": counters.hits + registry.hits,
            "retired": registry.retired,
        },
        counters.seconds,
        pool.waiting,
        len(registry),
        registry.bytes,
    )
