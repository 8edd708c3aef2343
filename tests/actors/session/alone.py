"""A session without an engine: its scheduler and cache are lists that a test reads and answers."""

from collections.abc import Mapping, Sequence
from typing import Any

from ramify.actors.kit.turns import Steps, Work
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.core import SessionCore
from ramify.actors.session.input.template import ChatTemplate
from ramify.actors.session.restore import restoring
from ramify.actors.session.sockets.clients import Identity
from ramify.actors.tokenizer import Tokenizer
from ramify.actors.tokenizer.detokenizer import Detokenizer
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.config import Limits
from ramify.protocol.plan import pack


class Alone:
    """A session whose scheduler and cache are lists. Times are given by hand."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context: int = 100,
        opened: dict[str, Any] | None = None,
        **limits: Any,
    ) -> None:
        state = SessionState(
            1,
            context=context,
            vocab=tokenizer.vocab_size,
            limits=Limits(**limits),
            decode=tokenizer.decode,
            owner="who",
        )
        self.core = SessionCore(
            Identity("s_1", "key"),
            state,
            tokenizer,
            ChatTemplate(tokenizer),
            Detokenizer(tokenizer.token_bytes),
            server=w.ServerInfo(version=1, epoch="e", model="fake"),
            ttl_s=600.0,
            random_seed=lambda: 7,
        )
        self.core.work = Work(1 << 40)
        self.state = state
        self.opened = opened or {}
        self.sockets = 0
        self.now = 10.0
        self.sent: list[Any] = []  # to sockets
        self.attach()
        self.asked()

    def attach(self, name: str = "c") -> int:
        self.sockets += 1
        again = {"session": "s_1", "key": "key", "have": {}} if self.sockets > 1 else {}
        opened = w.Open(client=name, **(again | self.opened))
        self.core.attach(m.Attach(self.sockets, opened, [], True), self.now)
        for question in [each for each in self.state.out.cache if isinstance(each, m.Inspect)]:
            self.state.out.cache.remove(question)
            self.core.inspected(m.Inspected(question.id, [0] * len(question.branches)), self.now)
        return self.sockets

    def detach(self, socket: int = 1) -> None:
        self.core.detached(socket, self.now)

    def send(self, *ops: Any, socket: int = 1) -> list[Any]:
        """A frame; what the scheduler was asked."""
        self.core.frame(socket, list(ops), self.now)
        return self.asked()

    def asked(self) -> list[Any]:
        """What the scheduler was told since the last call."""
        found = list(self.state.out.scheduler)
        self.state.out.scheduler.clear()
        return found

    def said(self, request: int, *tokens: int, logprobs: Sequence[Any] = ()) -> list[Any]:
        """Output of a request."""
        progress = m.Progress(request, pack(tokens), list(logprobs))
        self.core.tokens(m.Tokens([progress], []), self.now)
        return self.asked()

    def over(self, request: int, output: int, reason: Any = "length", **fields: Any) -> list[Any]:
        """The end of a request."""
        values = {"prompt": 3, "cached": 1, "computed": 2, "arrived": 10.0, "started": 10.5}
        values |= {"first_token": 11.0, "ended": self.now} | fields
        finished = m.Finished(request=request, reason=reason, output=output, **values)
        self.core.tokens(m.Tokens([], [finished]), self.now)
        return self.asked()

    def replies(self, ident: int) -> list[Any]:
        for subscriber in self.core.subscribers.values():
            self.sent += subscriber.out
            subscriber.out = []
        return [each for each in self.sent if getattr(each, "id", None) == ident]

    def reply(self, ident: int) -> Any:
        (reply,) = self.replies(ident)
        return reply

    def branch(self, name: str = "main") -> SessionBranch:
        return self.state.branches[name]


def restore(
    core: SessionCore, items: Mapping[str, bytes], now: float, wall: float, *, stored: bool = True
) -> bool:
    """`restoring`, all of it."""
    sound = True

    def steps() -> Steps[None]:
        nonlocal sound
        sound = yield from restoring(core, items, now, wall, stored=stored)

    for _ in steps():
        pass
    core.finish(now)
    return sound
