"""The objects that users hold: `Session`, `Branch`, `Generation`, `Reply`. Thin views of the client
core.

Every method queues one frame and waits for the replies of its own ops. Nothing here knows sockets:
`session_link.SessionLink` sends frames and wakes waiting tasks.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

import msgspec

from ramify.clients.constraints import constrained
from ramify.clients.errors import Internal
from ramify.clients.generation import Generation, Reply, TypedGeneration
from ramify.clients.stream import UNSENT, Ticket
from ramify.clients.trees import whole
from ramify.protocol.errors import BadRequest, Conflict, RamifyError
from ramify.protocol.wire import (
    Append,
    BranchState,
    Bye,
    Cancel,
    ChatMessage,
    ClientMessage,
    CloseSession,
    Constraint,
    Delta,
    Drop,
    Error,
    Event,
    Export,
    Fork,
    Generate,
    Join,
    JsonObject,
    Method,
    Ok,
    Op,
    Persist,
    Place,
    Prune,
    Role,
    Rollback,
    Select,
    Set,
    State,
    StructuralTag,
    Tree,
)

if TYPE_CHECKING:
    from ramify.clients.session_link import SessionLink

_CLOSE_S = 5.0  # how long `close` waits for the server's answer
Messages = Sequence[ChatMessage | Mapping[str, Any]]

PruneBy = Literal["first", "logprob", "number", "vote"]
B = TypeVar("B")
Parsed = TypeVar("Parsed")

MOST_PAGES = 1 << 14  # of one tree: more than a session's memory has at a quarter of a MiB each
TREE_TRIES = 5  # a tree that does not fit into one answer may change between two


class _Options(TypedDict, total=False):
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int
    stop_token_ids: list[int]
    ignore_eos: bool
    constraint: Constraint
    logprobs: int
    priority: int
    deadline_ms: int
    quiet: bool
    hidden: bool
    keep_open: bool
    expect: int
    tool_choice: str
    parallel_tool_calls: bool
    thought_tokens: int


class _Said(TypedDict, total=False):
    """A constraint in short: one of these. `type`: whose JSON the output is to be.

    `after_thought` goes with each of them: what the model thinks first is free. `continue_constraint`
    stands alone: True goes on with the constrained output that the branch ends in (as no constraint
    does), or it is an error; False leaves the output free.
    """

    regex: str
    json_schema: JsonObject | str
    choices: Sequence[str]
    grammar: str
    structural_tag: StructuralTag | JsonObject
    type: Any
    after_thought: bool
    continue_constraint: bool


class GenerateOptions(_Options, total=False):
    """The fields of `generate` (docs/protocol.md). What is left out is the server's default."""

    stop: list[str]


class TypedOptions(GenerateOptions, _Said, total=False):
    """Options of `generate`, with short forms for a constraint: `regex`, `json_schema`, `choices`,
    `grammar`, `structural_tag`, or `type`, a Python type whose JSON the output becomes
    (`Generation.parsed` gives the object).
    """


class GapOptions(_Options, _Said, total=False):
    """Options of a gap of a program, where `stop` may be one text."""

    stop: str | list[str]


class JoinOptions(TypedDict, total=False):
    """How a join combines the last outputs of its sources, once these have ended.

    The text is `prefix` (none), `each` (the text and a line break) for each source, where {i}, {name}
    and {text} are the source's, and `suffix` (none). `role`: of the turn ("user"), None: raw text.
    `keep`: the sources live on.
    """

    prefix: str
    each: str
    suffix: str
    role: Role | None
    keep: bool


class Pruned(NamedTuple, Generic[B]):
    """The result of a prune. `branches`: the winners where they are now, the best first.

    `kept`: the sources that they were; `scores`: of each source, None without one (by "first": empty).
    """

    branches: list[B]
    kept: list[str]
    dropped: list[str]
    scores: dict[str, float | None]


class SelectOptions(TypedDict, total=False):
    """Fields of `select` beside its choices."""

    method: Method
    priority: int
    deadline_ms: int
    expect: int


class Branch:
    """A branch by name. Cheap: make as many as you like; the server has the branch itself."""

    def __init__(self, session: "Session", name: str) -> None:
        self.session = session
        self.name = name

    def __repr__(self) -> str:
        return f"Branch({self.name!r}, position={self.position})"

    @property
    def position(self) -> int | None:
        """Its length in tokens as far as this client has heard; None: no such branch is known."""
        head = self.session.core.heads.by_name.get(self.name)
        return None if head is None else head.position

    async def append(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        tokens: Sequence[int] | None = None,
        expect: int | None = None,
        logprobs: int = 0,
    ) -> Ok:
        """Add input: raw text, chat messages (through the model's template), or token ids.

        `expect`: only if the branch is exactly this long (Conflict otherwise). `logprobs`: True, or how
        many likely tokens to tell beside each; `result["logprobs"]` has an entry for each token.
        """
        return await self.session.ok(self._append(text, messages, tokens, expect, int(logprobs)))

    def _append(
        self,
        text: str | None,
        messages: Messages | None,
        tokens: Sequence[int] | None,
        expect: int | None,
        logprobs: int = 0,
    ) -> Append:
        turns = None if messages is None else chat_messages(messages)
        ids = None if tokens is None else list(tokens)
        return Append(
            id=UNSENT, branch=self.name, text=text, messages=turns, tokens=ids, expect=expect,
            logprobs=logprobs,
        )  # fmt: skip

    async def say(self, text: str, *, role: Role = "user") -> Ok:
        """Append one chat turn."""
        return await self.append(messages=[ChatMessage(role=role, content=text)])

    @overload
    def generate(
        self, *, type: "type[Parsed]", n: None = None, **options: Unpack[GenerateOptions]
    ) -> TypedGeneration[Parsed]: ...
    @overload  # a list of typed ones is no list of the others
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self,
        *,
        type: "type[Parsed]",
        n: int,
        names: Sequence[str] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[TypedGeneration[Parsed]]: ...
    @overload
    def generate(self, *, n: None = None, **options: Unpack[TypedOptions]) -> Generation: ...
    @overload
    def generate(
        self, *, n: int, names: Sequence[str] | None = None, **options: Unpack[TypedOptions]
    ) -> list[Generation]: ...
    def generate(
        self, *, n: int | None = None, names: Sequence[str] | None = None, **options: Any
    ) -> Any:
        """Generate. With `n`, fork `n` children (called `names`) and generate on each."""
        fields, kind = constrained(options)
        if n is None:
            op = Generate(id=UNSENT, branch=self.name, **fields)
            (generation,) = self.session.start([op], kind)
            return generation
        children = list(names) if names is not None else self.session.fresh_names(self.name, n)
        many = Generate(id=UNSENT, branch=self.name, n=n, as_=children, **fields)
        return self.session.start([many], kind)

    def select(self, choices: Sequence[str], **options: Unpack[SelectOptions]) -> Generation:
        """Append the one of `choices` that the model finds most likely.

        The result's `text` is that choice, `choice` its index, `scores` are those of all. `method`: see
        docs/protocol.md. The assistant's turn, if there is one, stays open.
        """
        op = Select(id=UNSENT, branch=self.name, choices=list(choices), **options)
        (selection,) = self.session.start([op])
        return selection

    @overload
    def chat(
        self, text: str, *, type: "type[Parsed]", role: Role = "user", **options: Unpack[GenerateOptions]
    ) -> TypedGeneration[Parsed]: ...
    @overload
    def chat(self, text: str, *, role: Role = "user", **options: Unpack[TypedOptions]) -> Generation: ...
    def chat(self, text: str, *, role: Role = "user", **options: Any) -> Any:
        """Append a chat turn and generate the answer, in one frame."""
        turn = self._append(None, [ChatMessage(role=role, content=text)], None, None)
        fields, kind = constrained(options)
        op = Generate(id=UNSENT, branch=self.name, **fields)
        (generation,) = self.session.start([turn, op], kind)
        return generation

    async def fork(self, *names: str, at: int | None = None) -> "list[Branch]":
        """Children that share this branch up to its head, or up to position `at`."""
        await self.session.ok(Fork(id=UNSENT, branch=self.name, as_=list(names), at=at))
        return [Branch(self.session, name) for name in names]

    async def rollback(self, *, to: int | None = None, turns: int | None = None) -> Ok:
        """Move the head back to a position, or by a number of appended turns."""
        return await self.session.ok(Rollback(id=UNSENT, branch=self.name, to=to, turns=turns))

    async def set(
        self,
        *,
        name: str | None = None,
        retain_s: float | None = None,
        persist: Persist | None = None,
        meta: dict[str, Any] | None = None,
        hints: dict[str, Any] | None = None,
    ) -> Ok:
        """Rename, keep its KV warm for a while, save it, or attach facts of your own.

        `hints`: as `kv_hints`; what became of each action is `result["kv_hints"]` of the reply.
        """
        op = Set(id=UNSENT, branch=self.name, name=name, retain_s=retain_s, persist=persist, meta=meta)
        if hints is not None:
            given = cast(Set, _op({"type": "set", "hints": hints})).hints
            op = msgspec.structs.replace(op, hints=given)
        reply = await self.session.ok(op)
        if name is not None:
            self.name = name
        return reply

    async def drop(self) -> Ok:
        """Release the branch."""
        return await self.session.ok(Drop(id=UNSENT, branch=self.name))

    async def join(self, *sources: "Branch | str", **options: Unpack[JoinOptions]) -> Ok:
        """Append what each source generated last, once it has; then the sources are dropped.

        `options`: see `JoinOptions`.
        """
        names = branch_names(sources)
        return await self.session.ok(Join(id=UNSENT, from_=names, branch=self.name, **options))

    async def prune(
        self,
        *sources: "Branch | str",
        by: PruneBy = "logprob",
        score_from: "Sequence[Branch | str] | None" = None,
        keep: bool = False,
    ) -> "Pruned[Branch]":
        """The best source takes this branch's place; all sources go. See `Session.prune`."""
        return await self.session.prune(sources, into=[self], by=by, score_from=score_from, keep=keep)

    async def cancel(self, *, subtree: bool = False) -> Ok:
        """Stop the generations of this branch, which end with what they have.

        `subtree`: and all that runs or waits on it and on what was forked off it.
        """
        return await self.session.ok(Cancel(id=UNSENT, branch=self.name, subtree=subtree))

    async def tree(self, *, text: bool = False, tokens: bool = False) -> BranchState:
        """The branch as the server sees it; `text` and `tokens` add its turns."""
        state = await self.session.tree(branch=self.name, text=text, tokens=tokens)
        for branch in state.branches:
            if branch.branch == self.name:
                return branch
        raise Internal(f"the server's answer lacks branch {self.name!r}, which it was asked for")

    def credit(self, upto: int) -> None:
        """Flow control: let the server deliver up to this position."""
        self.session.link.credit(self.name, upto)


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
        """New empty branches."""
        await self.ok(Fork(id=UNSENT, branch=None, as_=list(names)))
        return [Branch(self, name) for name in names]

    async def tree(
        self, *, branch: str | None = None, text: bool = False, tokens: bool = False
    ) -> State:
        """All branches, or one, as the server sees them, with all turns of each."""
        for _ in range(TREE_TRIES):
            pages: list[State] = []
            places: set[Place] = set()
            while not pages or (pages[-1].next is not None and pages[-1].revision == pages[0].revision):
                after = pages[-1].next if pages else None
                op = Tree(id=UNSENT, branch=branch, text=text, tokens=tokens, after=after)
                (state,) = await Reply(self.link, self._one(op))
                assert isinstance(state, State)
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
        """Settings of the session itself."""
        return await self.ok(Set(id=UNSENT, retain_s=retain_s, persist=persist, meta=meta))

    async def export(self) -> bytes:
        """The session as one file, with all its branches: `connect(url, imports=...)` makes a new one of
        it. Raises Conflict while ops run, LimitExceeded if it does not fit into a frame.
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
        for ticket in self.link.submit([_op(op) for op in ops]):
            running = [Generation(self.link, ticket, stream) for stream in ticket.streams.values()]
            handles.append(
                Reply(self.link, ticket) if not running else running[0] if len(running) == 1 else running
            )
        return handles

    async def events(self) -> AsyncIterator[Event | Bye | Error | Delta]:
        """Changes of the session by others, with their text. The last 1024 wait for the reader."""
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
        """Names for children. The client's name is in them: others may fork the same branch."""
        tag = "".join(c for c in self.core.client[-6:] if c.isalnum())
        names: list[str] = []
        while len(names) < count:
            self._forks += 1
            name = f"{parent[-40:]}.{tag}{self._forks}"
            if name not in self.core.heads.by_name:
                names.append(name)
        return names


def branch_names(branches: Sequence[Branch | str]) -> list[str]:
    """The names of branches, or of branches that an op of the same frame makes."""
    return [branch if isinstance(branch, str) else branch.name for branch in branches]


def pruned(result: JsonObject, branch: Callable[[str], B]) -> Pruned[B]:
    """The result of a `prune`, with handles that `branch` makes."""
    kept = result.get("kept", ())
    return Pruned(
        [branch(one["into"]) for one in kept],
        [one["from"] for one in kept],
        list(result.get("dropped", ())),
        dict(result.get("scores", {})),
    )


def chat_messages(messages: Messages) -> list[ChatMessage]:
    """Chat turns from structs or plain dicts. Raises BadRequest that names the field."""
    try:
        return [
            turn if isinstance(turn, ChatMessage) else msgspec.convert(turn, ChatMessage)
            for turn in messages
        ]
    except msgspec.ValidationError as error:
        raise BadRequest(f"messages: {error}") from None


def _op(op: Op | Mapping[str, Any]) -> Op:
    if isinstance(op, Op):
        return op
    if op.get("type") in ("open", "credit", "ping"):
        raise BadRequest(f"{op['type']!r} is not an op that can be part of a program")
    try:
        return cast(Op, msgspec.convert({"id": UNSENT, **op}, ClientMessage))
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None
