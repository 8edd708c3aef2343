"""A branch as an object: what a client does with one."""

from collections.abc import Callable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Unpack,
    cast,
    overload,
)

import msgspec

from ramify.clients.constraints import constrained
from ramify.clients.errors import Internal
from ramify.clients.generation import Generation, TypedGeneration
from ramify.clients.images import Images, image_bytes, marked
from ramify.clients.stream import UNSENT
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import (
    Append,
    BranchState,
    Cancel,
    ChatMessage,
    ClientMessage,
    Drop,
    Fork,
    Generate,
    Join,
    JsonObject,
    Ok,
    Op,
    Persist,
    Role,
    Rollback,
    Select,
    Set,
)

if TYPE_CHECKING:
    from ramify.clients.handles import Session

from ramify.clients.options import (
    B,
    GenerateOptions,
    JoinOptions,
    Parsed,
    PruneBy,
    Pruned,
    SelectOptions,
    TypedOptions,
)

Messages = Sequence[ChatMessage | Mapping[str, Any]]


class Branch:
    """A branch by name. Cheap: make as many as you like; the server has the branch itself."""

    def __init__(self, session: "Session", name: str) -> None:
        self.session = session
        self.name = name

    def __repr__(self) -> str:
        return f"Branch({self.name!r}, position={self.position})"

    @property
    def position(self) -> int | None:
        """The branch's length in tokens, as far as this client knows; None: it knows no such branch."""
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
        images: Images = (),
    ) -> Ok:
        """Add input: raw text, chat messages (through the model's template), or token ids.

        `images`: each stands where the text, or a message's content, has U+FFFC.

        `expect`: only if the branch is exactly this long (Conflict otherwise). `logprobs`: True, or how
        many likely tokens to tell beside each; `result["logprobs"]` has an entry for each token.
        """
        op = self._append(text, messages, tokens, expect, int(logprobs), images)
        return await self.session.ok(op)

    def _append(
        self,
        text: str | None,
        messages: Messages | None,
        tokens: Sequence[int] | None,
        expect: int | None,
        logprobs: int = 0,
        images: Images = (),
    ) -> Append:
        turns = None if messages is None else chat_messages(messages)
        ids = None if tokens is None else list(tokens)
        return Append(
            id=UNSENT, branch=self.name, text=text, messages=turns, tokens=ids, expect=expect,
            logprobs=logprobs, images=image_bytes(images),
        )  # fmt: skip

    async def say(self, text: str, *, role: Role = "user", images: Images = ()) -> Ok:
        """Append one chat turn. `images`: before the text, or where it has U+FFFC."""
        turn = ChatMessage(role=role, content=marked(text, images))
        return await self.append(messages=[turn], images=images)

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
        self, text: str, *, type: "type[Parsed]", role: Role = "user", images: Images = (),
        **options: Unpack[GenerateOptions],
    ) -> TypedGeneration[Parsed]: ...  # fmt: skip
    @overload
    def chat(
        self, text: str, *, role: Role = "user", images: Images = (), **options: Unpack[TypedOptions]
    ) -> Generation: ...
    def chat(self, text: str, *, role: Role = "user", images: Images = (), **options: Any) -> Any:
        """Append a chat turn and generate the answer, in one frame. `images`: as of `say`."""
        message = ChatMessage(role=role, content=marked(text, images))
        turn = self._append(None, [message], None, None, images=images)
        fields, kind = constrained(options)
        op = Generate(id=UNSENT, branch=self.name, **fields)
        (generation,) = self.session.start([turn, op], kind)
        return generation

    async def fork(self, *names: str, at: int | None = None) -> "list[Branch]":
        """Fork children that share this branch up to its head, or up to position `at`.

        Raises TypeError for what is no name.
        """
        check_names(names)
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
            given = cast(Set, op_of({"type": "set", "hints": hints})).hints
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
        """Have the best source take this branch's place; all sources go. See `Session.prune`."""
        return await self.session.prune(sources, into=[self], by=by, score_from=score_from, keep=keep)

    async def cancel(self, *, subtree: bool = False) -> Ok:
        """Stop the generations of this branch, which end with what they have.

        `subtree`: and all that runs or waits on it and on what was forked off it.
        """
        return await self.session.ok(Cancel(id=UNSENT, branch=self.name, subtree=subtree))

    async def tree(self, *, text: bool = False, tokens: bool = False) -> BranchState:
        """Ask for the branch as the server sees it. `text` and `tokens` add its turns."""
        state = await self.session.tree(branch=self.name, text=text, tokens=tokens)
        for branch in state.branches:
            if branch.branch == self.name:
                return branch
        raise Internal(f"the server's answer lacks branch {self.name!r}, which it was asked for")

    def credit(self, upto: int) -> None:
        """Flow control: let the server deliver up to this position."""
        self.session.link.credit(self.name, upto)


def check_names(names: Sequence[Any]) -> None:
    """Raises TypeError, which says which of `names` is no string."""
    for number, name in enumerate(names):
        if not isinstance(name, str):
            raise TypeError(
                f"`names[{number}]` is {name!r}, not a str: name each new branch, as in fork('a', 'b')"
            )


def branch_names(branches: Sequence[Branch | str]) -> list[str]:
    """Return the names of branches, or of branches that an op of the same frame makes."""
    return [branch if isinstance(branch, str) else branch.name for branch in branches]


def pruned(result: JsonObject, branch: Callable[[str], B]) -> Pruned[B]:
    """Make the result of a `prune`, with handles that `branch` makes."""
    kept = result.get("kept", ())
    return Pruned(
        [branch(one["into"]) for one in kept],
        [one["from"] for one in kept],
        list(result.get("dropped", ())),
        dict(result.get("scores", {})),
    )


def chat_messages(messages: Messages) -> list[ChatMessage]:
    """Make chat turns of structs or plain dicts. Raises BadRequest that names the field."""
    try:
        return [
            turn if isinstance(turn, ChatMessage) else msgspec.convert(turn, ChatMessage)
            for turn in messages
        ]
    except msgspec.ValidationError as error:
        raise BadRequest(f"messages: {error}") from None


def op_of(op: Op | Mapping[str, Any]) -> Op:
    """Make an op of an op, or of a dict as its JSON would be. Raises BadRequest."""
    if isinstance(op, Op):
        return op
    if op.get("type") in ("open", "credit", "ping"):
        raise BadRequest(f"{op['type']!r} is not an op that can be part of a program")
    try:
        return cast(Op, msgspec.convert({"id": UNSENT, **op}, ClientMessage))
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None
