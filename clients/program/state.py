"""A program's state: one branch that is written to, and the values that its gaps get.

A prompt is a stream: `+=` returns at once, and `Sender` sends what was added, in order. Reading a
value waits for it. Nothing of a branch runs behind an error.

Knows branches and ops through `Session.send`; it does not know connections.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar, Unpack, cast, overload

import msgspec

from ramify.clients.generation import Result
from ramify.clients.options import GenerateOptions
from ramify.clients.program.expressions import Expression, flatten
from ramify.clients.program.forks import Forks, JoinedText, Past
from ramify.clients.program.run_states import Mark, RunStates
from ramify.clients.program.steps import BackendBranch, Step, all_of, wait
from ramify.clients.program.telling import TurnPart, as_messages, as_text
from ramify.clients.program.tracing import Hole, NeedsText
from ramify.clients.program.value import Inherited, Value, named
from ramify.clients.program.writer import Writer
from ramify.protocol.wire import ChatMessage, Fork, Generate, Op, Prune, Rollback

T = TypeVar("T")


class AsyncState:
    """One branch of a running program, for programs that are `async def`.

    `s += ...` adds text, turns and gaps; `await s["name"]` reads; `s.fork(3)` makes children that
    share everything so far.
    """

    def __init__(
        self,
        family: RunStates,
        writer: Writer,
        *,
        gaps: Sequence[Value | JoinedText] = (),
        past: Past | None = None,
        forked: bool = False,
    ) -> None:
        self.family = family
        self.writer = writer
        self.last: Step | None = None
        self.error: BaseException | None = None
        self.birth: Step | None = None  # makes its branch
        self.gone: Step | None = None  # joins or prunes it
        self.past = past
        self.filled = list(gaps)  # in the order in which the record has them
        self.kept = False  # a join left it
        self._inherited = len(self.filled) if forked else 0
        self._forked = past if forked else None  # the past is that of the parent
        family.states.append(self)

    # --- writing ------------------------------------------------------------------------------

    def __iadd__(self, expression: Expression) -> "AsyncState":
        self.usable()
        for ops, gap in self.writer.write(flatten(expression)):
            op = ops[-1]
            value = Value(gap, self.family)
            if isinstance(op, Generate):
                value.hidden, value.scored = op.hidden, op.logprobs > 0
            self.filled.append(value)
            if self.error is not None:
                value.fail(self.error)
            else:
                value.step = self._step(ops, partial(self._fill, value), value)
        return self

    def flush(self) -> None:
        """Send what was held back, so that it is computed while the program does something else."""
        self.settle()
        if not self.family.tracing:
            self.family.sender.flush()

    def settle(self) -> None:
        """Make a step of what was written."""
        ops = self.writer.flush()
        if ops:
            self._step(ops, all_of)

    def mark(self) -> Mark:
        """Mark this place, for `rollback`."""
        self.usable()
        self.settle()
        mark = Mark(self, len(self.writer.record), len(self.filled), self.past)
        if self.family.sender.session.frames:
            mark.keeper, fork = self._child(self)
            mark.keeper.birth = Step(lambda: [fork], all_of, writes=[self, mark.keeper])
            self.add(mark.keeper.birth)
        else:

            async def note(_: Sequence[Any]) -> None:
                mark.position = self.family.sender.session.branch(self.branch).position or 0

            self.add(Step(list, note, writes=[self]))
        return mark

    def rollback(self, mark: Mark) -> None:
        """Forget what was added since `mark`; values that were read stay as they are."""
        self.usable()
        if mark.state is not self or mark.past is not self.past:
            raise ValueError("this mark is of another state, or of the time before adopt()")
        self.writer.rewind(mark.record)
        del self.filled[mark.gaps :]
        if mark.keeper is None:

            def ops() -> list[Op]:
                return [Rollback(id=0, branch=self.branch, to=mark.position)]

            self.add(Step(ops, all_of, writes=[self]))
        else:  # the server alone knows where that is, in tokens: a fork of the place becomes the branch
            again, fork = self._child(mark.keeper)
            move = Prune(id=0, from_=[again.branch], into=self.branch, by="first")
            step = Step(lambda: [fork, move], all_of, writes=[self], reads=[mark.keeper])
            again.birth = again.gone = step
            self.add(step)

    def _child(self, parent: "AsyncState") -> "tuple[AsyncState, Fork]":
        """Fork `parent`, for marks."""
        (name,) = self.family.sender.session.fresh_names(parent.branch, 1)
        child = AsyncState(self.family, parent.writer.fork(name), past=parent.past, forked=True)
        return child, Fork(id=0, branch=parent.branch, as_=[name])

    def _step(
        self,
        ops: Sequence[Op],
        settle: Callable[[Sequence[Any]], Any],
        value: Value | None = None,
    ) -> Step:
        fail, name = (None, None) if value is None else (value.fail, value.name)
        step = Step(lambda: ops, settle, writes=[self], fail=fail, name=name)
        self.add(step)
        return step

    def add(self, step: Step) -> None:
        """Take a step, unless this has failed: nothing runs behind a failure."""
        if self.error is not None:
            step.end(self.error)
        else:
            self.family.sender.add(step, self.family.where)

    async def _fill(self, value: Value, handles: Sequence[Any]) -> None:
        *before, last = handles
        for handle in before:
            await handle
        await value.run(last, self.branch, self.family.listener)

    # --- reading ------------------------------------------------------------------------------

    def _values(self) -> Iterator[Value]:
        return (each for each in self.filled if isinstance(each, Value))

    def __getitem__(self, name: str) -> Value:
        for value in reversed(list(self._values())):
            if value.name == name:
                return value
        if self.past is not None and name in self.past.names():
            return Inherited(named(name), self.family, partial(self.past.value, name))
        known = ", ".join(self.names()) or "nothing yet"
        raise KeyError(f"nothing is called {name!r} here; there is {known}")

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def names(self) -> list[str]:
        """List the gaps so far, each once. Of what a prune kept: those that every source has."""
        before = self.past.names() if self.past is not None else []
        return list(dict.fromkeys([*before, *(v.name for v in self._values() if v.name is not None)]))

    @overload
    async def read(self, name: str, kind: type[T]) -> T: ...
    @overload
    async def read(self, name: str, kind: Any) -> Any: ...  # a `Literal`, a union: no type for checkers
    async def read(self, name: str, kind: Any) -> Any:
        """Read the text of a gap as a value: a number, a truth value, an enum, or what its JSON says.

        Raises ValueError for a text that is none.
        """
        text = await self[name]
        if self.family.tracing:
            return text
        plain = text.strip()
        try:
            return msgspec.json.decode(plain, type=kind, strict=False)
        except msgspec.DecodeError:
            pass  # no JSON, or not of that kind: a word may still be one
        try:
            return msgspec.convert(plain, kind, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"the gap {name!r} got {text!r}: {error}") from None

    async def text(self) -> str:
        """Read everything so far, without the chat template's marks. Waits for what is generated."""
        if self.family.tracing:
            return cast(str, Hole("text()"))
        return await as_text(self.told())

    async def messages(self) -> list[ChatMessage]:
        """Read everything so far as chat turns; text outside of turns counts as a user's.

        The text of a hidden gap is not known here, and left out.
        """
        if self.family.tracing:
            return cast(list[ChatMessage], Hole("messages()"))
        return await as_messages(self.told())

    async def told(self) -> AsyncIterator[TurnPart]:
        """Yield the parts of the text, each with the turn it is in."""
        values = iter([gap for gap in self.filled if not (isinstance(gap, Value) and gap.noted)])
        record = list(self.writer.record)
        if self.past is not None:
            async for part in self.past.told():
                yield part
        for turn, role, item in record:
            if isinstance(item, str | ChatMessage):
                yield TurnPart(turn, role, item)
            else:
                value = next(values)
                text = (
                    await value.text() if isinstance(value, JoinedText) else (await value.result()).text
                )
                yield TurnPart(turn, role, text)

    def note(self, messages: Sequence[ChatMessage], results: Sequence[Result], name: str | None) -> None:
        """Note `messages` that something else (an agent) has put onto the branch.

        `results`: of the generations there; the last one gets `name`.
        """
        self.writer.note(messages)
        for i, result in enumerate(results, 1):
            value = Value(named(name if i == len(results) else None), self.family)
            value.settle(result)
            self.filled.append(value)

    # --- children -----------------------------------------------------------------------------

    def fork(self, count: int = 2, **options: Unpack[GenerateOptions]) -> Forks:
        """Fork children that share this state up to here. What is computed of it is computed once.

        `options`: for their gaps that do not say otherwise. With `hidden=True` their text stays on the
        server, for a join or a prune.
        """
        if count < 1:
            raise ValueError(f"fork({count}): at least 1")
        self.usable()
        self.settle()
        names = self.family.sender.session.fresh_names(self.branch, count)
        children = [
            AsyncState(
                self.family,
                self.writer.fork(name, options),
                gaps=self.filled,
                past=self.past,
                forked=True,
            )
            for name in names
        ]
        fork = [Fork(id=0, branch=self.branch, as_=names)]
        step = Step(lambda: fork, all_of, writes=[self, *children])
        for child in children:
            child.birth = step
        self.add(step)
        return Forks(children, self)

    def gap_before(self) -> Value | None:
        """Find the last gap that was filled here, or before the fork."""
        return next((v for v in reversed(list(self._values()))), None)

    def answer(self) -> Callable[[], Awaitable[str]]:
        """Make a function for the text that it generated last since it was forked: what a join takes."""
        own = [v for v in self.filled[self._inherited :] if isinstance(v, Value)]
        past = self.past if self.past is not self._forked else None

        async def text() -> str:
            if own:
                result = await own[-1].result()
                thought = result.reasoning is not None and result.content is not None
                return (result.content or "").lstrip() if thought else result.text
            return await past.answer() if past is not None else ""

        return text

    def follow(self, past: Past) -> None:
        """Follow a prune, which moves the branch to where a winner is."""
        self.writer.follow(past.like.writer)
        self.filled.clear()
        self.past, self._inherited = past, 0

    # --- life ---------------------------------------------------------------------------------

    @property
    def born(self) -> bool:
        """Whether its branch was made, or may have been."""
        made = self.birth is not None and self.birth.sent
        return made and (self.gone is None or not self.gone.ok or self.kept)

    @property
    def branch(self) -> str:
        """The name of its branch, for ops that the language has no word for."""
        return self.writer.branch

    def usable(self) -> None:
        """Raises TypeError if the state went into a join or a prune."""
        if self.gone is not None and not self.kept:
            raise TypeError("this state went into a join or a prune: go on with what that gave")

    def failed(self, error: BaseException) -> None:
        """Note that a step here has failed."""
        self.error = self.error or error

    @property
    def place(self) -> BackendBranch:
        """Its branch in the session, for what the language has no word for."""
        if self.family.tracing:
            raise NeedsText("what it does with its branch is not traced")
        return self.family.sender.session.branch(self.branch)

    async def finish(self) -> None:
        """Wait until everything added here is done. Raises what went wrong."""
        if self.gone is None:
            self.settle()
        if self.family.tracing:
            return
        while self.last is not None and not self.last.over.done():
            self.family.reads()
            await wait(self.last)
        if self.error is not None and self.gone is None:
            raise self.error
