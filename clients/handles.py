"""A session as an object: a thin view of the client core. Its branches: `branch.py`.

Every method queues one frame and waits for the replies of its own ops. Nothing here knows sockets:
`session_link.SessionLink` sends frames and wakes waiting tasks.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
)

from ramify.clients.errors import Internal
from ramify.clients.generation import Generation, Reply, TypedGeneration
from ramify.clients.stream import UNSENT, Ticket
from ramify.clients.trees import whole
from ramify.protocol.errors import Conflict, RamifyError
from ramify.protocol.wire import (
    Bye,
    Cancel,
    CloseSession,
    Delta,
    Error,
    Event,
    Export,
    Fork,
    Ok,
    Op,
    Persist,
    Place,
    Prune,
    Set,
    StateReply,
    Tree,
)

if TYPE_CHECKING:
    from ramify.clients.session_link import SessionLink
from ramify.clients.branch import Branch, branch_names, check_names, op_of, pruned
from ramify.clients.options import (
    PruneBy,
    Pruned,
)

_CLOSE_S = 5.0  # how long `close` waits for the server's answer


MOST_PAGES = 1 << 14  # of one tree: more than a session's memory has at a quarter of a MiB each
TREE_TRIES = 5  # a tree that does not fit into one answer may change between two


class Session:
    """An attached session. Made by `connect`; ends with `close`, or with the block of `async with`.

    `keep`: leave it on the server at its end, so that it can be resumed.
    """

    frames = True  # ops of several branches may come in one frame (for programs)

    def __init__(self, link: "SessionLink", *, keep: bool = False) -> None:
        self.link = link
        self.core = link.core
        self.main = Branch(self, "main")
        self._keep = keep
        self._forks = 0

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def id(self) -> str:
        """The session's id; with `key`, another `connect` can attach to this session."""
        assert self.core.session is not None
        return self.core.session

    @property
    def key(self) -> str | None:
        return self.core.key

    @property
    def error(self) -> RamifyError | None:
        """Why the session is over; None while it lives."""
        return self.core.error

    @property
    def connected(self) -> bool:
        """Whether there is a connection right now; a lost one is made again by itself."""
        return self.link.attached

    @property
    def view_key(self) -> str | None:
        return self.core.view_key

    @property
    def model(self) -> str | None:
        """The served model's name."""
        return self.core.server.model if self.core.server is not None else None

    @property
    def limits(self) -> dict[str, int]:
        return self.core.limits

    @property
    def keeping(self) -> tuple[float | None, str | None]:
        """Seconds that the session lives without clients; how it is saved, None: it is not."""
        return self.core.keeping

    @property
    def tool_names(self) -> list[str]:
        """The tools in force: those that it was opened with, by this client or before it."""
        return self.core.tool_names

    @property
    def notes(self) -> list[str]:
        """The server's notes on how it was opened: for example, a chat template that rewrites earlier
        turns.
        """
        return self.core.notes

    @property
    def branches(self) -> list[Branch]:
        """The branches this client knows of."""
        return [Branch(self, name) for name in self.core.heads.by_name]

    def branch(self, name: str) -> Branch:
        return Branch(self, name)

    async def fork(self, *names: str, at: int | None = None) -> list[Branch]:
        """Fork `main`."""
        return await self.main.fork(*names, at=at)

    async def root(self, *names: str) -> list[Branch]:
        """Make new empty branches. Raises TypeError for what is no name."""
        check_names(names)
        await self.ok(Fork(id=UNSENT, branch=None, as_=list(names)))
        return [Branch(self, name) for name in names]

    async def tree(
        self, *, branch: str | None = None, text: bool = False, tokens: bool = False
    ) -> StateReply:
        """Ask for all branches, or one, as the server sees them, with all turns of each."""
        for _ in range(TREE_TRIES):
            pages: list[StateReply] = []
            places: set[Place] = set()
            while not pages or (pages[-1].next is not None and pages[-1].revision == pages[0].revision):
                after = pages[-1].next if pages else None
                op = Tree(id=UNSENT, branch=branch, text=text, tokens=tokens, after=after)
                (state,) = await Reply(self.link, self._one(op))
                assert isinstance(state, StateReply)
                pages.append(state)
                if state.next is not None and state.revision == pages[0].revision:
                    if state.next in places or len(places) == MOST_PAGES:
                        raise Internal("the server's answers to `tree` come to no end")
                    places.add(state.next)
            if pages[-1].revision == pages[0].revision:
                return whole(pages)
        raise Conflict("the tree changes faster than it can be shown: ask for one branch of it")

    async def prune(
        self,
        sources: "Sequence[Branch | str]",
        *,
        into: "Sequence[Branch | str] | None" = None,
        by: PruneBy = "logprob",
        k: int | None = None,
        score_from: "Sequence[Branch | str] | None" = None,
        keep: bool = False,
    ) -> "Pruned[Branch]":
        """Keep the best `k` (1) of the sources, once their generations have ended, and drop the others.

        By: the `first` to end, the mean `logprob`, the last `number` in the text, or `vote`. `into`:
        names for the winners, the best first; branches that exist are moved there. `score_from`: the
        branches that are compared instead, one for each source. `keep`: drop none.
        """
        op = Prune(
            id=UNSENT,
            from_=branch_names(sources),
            into=None if into is None else branch_names(into),
            by=by,
            k=k,
            score_from=None if score_from is None else branch_names(score_from),
            keep=keep,
        )
        return pruned((await self.ok(op)).result or {}, self.branch)

    async def cancel(self, *, subtree: bool = False) -> Ok:
        """Stop every generation that this session runs or waits for; `subtree`: every op."""
        return await self.ok(Cancel(id=UNSENT, subtree=subtree))

    async def set(
        self,
        *,
        retain_s: float | None = None,
        persist: Persist | None = None,
        meta: dict[str, Any] | None = None,
    ) -> Ok:
        """Change settings of the session itself."""
        return await self.ok(Set(id=UNSENT, retain_s=retain_s, persist=persist, meta=meta))

    async def export(self) -> bytes:
        """Ask for the session as one file, with all its branches.

        `connect(url, imports=...)` makes a new session of it. Raises Conflict while ops run,
        LimitExceeded if it does not fit into a frame.
        """
        result = (await self.ok(Export(id=UNSENT))).result or {}
        return base64.b64decode(str(result["file"]))

    async def send(
        self, ops: Sequence[Op | Mapping[str, Any]]
    ) -> "list[Reply | Generation | list[Generation]]":
        """Send a program: one frame of ops. Ids are filled in; an op may be a dict as on the wire.

        For each op: a `Generation` (a list of them for several branches), or a `Reply` to await.
        """
        handles: list[Reply | Generation | list[Generation]] = []
        for ticket in self.link.submit([op_of(op) for op in ops]):
            running = [Generation(self.link, ticket, stream) for stream in ticket.streams.values()]
            handles.append(
                Reply(self.link, ticket) if not running else running[0] if len(running) == 1 else running
            )
        return handles

    async def events(self) -> AsyncIterator[Event | Bye | Error | Delta]:
        """Yield changes of the session by others, with their text. The last 1024 wait for the reader."""
        while True:
            while self.link.notes:
                yield self.link.notes.popleft()
            if self.core.error is not None:
                return
            await self.link.changed(self.link.notes_key)

    async def close(self, *, keep: bool | None = None) -> None:
        """End the session; `keep` (default: as `connect` was told): only detach. Never raises."""
        self.link.unwatch()
        if self.core.error is None and self.link.attached:
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self.ok(CloseSession(id=UNSENT, keep=self._keep if keep is None else keep))
            except (RamifyError, TimeoutError):
                pass  # the connection is gone: the session's TTL ends it
        await self.link.stop()

    # --- for handles --------------------------------------------------------------------------

    async def ok(self, op: Op) -> Ok:
        """Run an op that is answered by one `ok`."""
        (reply,) = await Reply(self.link, self._one(op))
        assert isinstance(reply, Ok)
        return reply

    def _one(self, op: Op) -> Ticket:
        (ticket,) = self.link.submit([op])
        return ticket

    def start(self, ops: Sequence[Op], kind: Any = None) -> list[Generation]:
        """Send a frame whose last op generates. `kind`: the type whose JSON the output is."""
        ticket = self.link.submit(ops)[-1]
        made = Generation if kind is None else TypedGeneration
        return [made(self.link, ticket, stream, kind) for stream in ticket.streams.values()]

    def fresh_names(self, parent: str, count: int) -> list[str]:
        """Make names for children. The client's name is in them: others may fork the same branch."""
        tag = "".join(c for c in self.core.client[-6:] if c.isalnum())
        names: list[str] = []
        while len(names) < count:
            self._forks += 1
            name = f"{parent[-40:]}.{tag}{self._forks}"
            if name not in self.core.heads.by_name:
                names.append(name)
        return names
