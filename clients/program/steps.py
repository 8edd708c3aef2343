"""Steps: the ops of a program in order, and when they are sent.

A step is a few ops that belong together. It stands behind the last step of every branch it touches, and
runs when those have succeeded. `Sender` sends each step by itself as soon as those before it are done
(the interpreter), or all that have come together as one frame, in which the server keeps the order
(compiled).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from ramify.protocol.errors import BadRequest, Cancelled, LimitExceeded, RamifyError
from ramify.protocol.wire import Cancel, Op

Compiled: TypeAlias = Literal["auto"] | bool


class BackendBranch(Protocol):
    """A branch of a backend."""

    @property
    def position(self) -> int | None: ...


class Backend(Protocol):
    """The session of a program: a `Session`, or an `ApiSession`."""

    @property
    def frames(self) -> bool:
        """Whether ops of several branches may come in one frame, which keeps their order."""
        ...

    def fresh_names(self, parent: str, count: int, /) -> list[str]: ...
    async def send(self, ops: Sequence[Op], /) -> Sequence[Any]:
        """Send ops in one frame. Returns for each op something to await; for a gap a `Running`."""
        ...

    def branch(self, name: str, /) -> BackendBranch: ...


class NotOneFrame(BadRequest):
    """The program does not fit into one frame, and it was to run only so."""


class Member(Protocol):
    """A state: it fails with the first step that fails on it."""

    last: "Step | None"
    error: BaseException | None

    def failed(self, error: BaseException) -> None: ...


class Step:
    """Ops that are sent together.

    `writes`: the states that fail with it. `reads`: states whose steps it waits for besides; their
    failure does not stop it if they are `spared`. `ops` is called when all steps before it are done or
    in the same frame. `settle` waits for the replies; `fail` tells waiting tasks that there will be
    none.
    """

    def __init__(
        self,
        ops: Callable[[], Sequence[Op]],
        settle: Callable[[Sequence[Any]], Awaitable[None]],
        *,
        writes: Iterable[Member],
        reads: Iterable[Member] = (),
        spared: bool = False,
        fail: Callable[[BaseException], None] | None = None,
        name: str | None = None,
    ) -> None:
        self.ops = ops
        self.settle = settle
        self.writes = list(writes)
        self.reads = list(reads)
        self.name = name  # of its gap
        self.flushed = False
        self.sent = False
        self.error: BaseException | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fail = fail
        ahead = {m.last for m in self.writes if m.last is not None}
        self.after: set[Step] = ahead | {m.last for m in self.reads if m.last is not None}
        self.must = ahead if spared else self.after

    @property
    def ok(self) -> bool:
        """Whether the step has run, and succeeded."""
        return self.over.done() and self.error is None

    def end(self, error: BaseException | None = None) -> None:
        """End the step."""
        if self.over.done():
            return
        self.error = error
        self.over.set_result(None)
        if error is not None:
            for state in self.writes:
                state.failed(error)
            if self._fail is not None:
                self._fail(error)


class Sender:
    """Sends the steps of one run. `compiled`: see `Program.using`. `frames`: how many it has sent.

    `yields`: the program is asynchronous, so what it holds back is sent when it waits for anything, a
    text or not.
    """

    def __init__(self, session: Backend, compiled: Compiled, *, yields: bool = False) -> None:
        if compiled is True and not session.frames:
            raise NotOneFrame("this endpoint has no frames of several ops: run with compiled=False")
        self.session = session
        self.strict = compiled is True
        self.eager = compiled is False or not session.frames
        self.yields = yields and not self.strict
        self.frames = 0
        self.read = ""  # where text was read first
        self._held: list[Step] = []
        self._tasks: dict[asyncio.Task[None], list[Step]] = {}

    def add(self, step: Step, where: Callable[[], str]) -> None:
        """Take a step. Raises NotOneFrame if it would be in a second frame and may not."""
        if self.strict and self.frames:
            why = f"text was read {self.read} before that"
            raise NotOneFrame(f"what is added {where()} does not fit into one frame: {why}")
        for state in (*step.writes, *step.reads):
            state.last = step
        if self.yields and not self._held:
            asyncio.get_running_loop().call_soon(self.flush)
        self._held.append(step)
        if self.eager:
            self.flush()

    def barrier(self, where: Callable[[], str]) -> None:
        """Send what was held back: the program is about to wait."""
        if self.strict and not self.read:
            self.read = where()
        self.flush()

    def flush(self) -> None:
        """Send what is held back as one frame; what stands behind steps that run goes after them."""
        held, self._held = self._held, []
        if not held:
            return
        self.frames += 1
        ready: list[Step] = []
        for group in _groups(held):
            waits = any(not step.over.done() for each in group for step in each.after.difference(group))
            if waits:
                self._start(group)
            else:
                ready += group
        if ready:
            order = {step: i for i, step in enumerate(held)}
            self._start(sorted(ready, key=order.__getitem__))

    async def stop(self, root: str) -> bool:
        """Stop all that runs: on the server the subtree of `root`. Returns whether anything ran."""
        held, self._held = self._held, []
        for step in held:
            step.end(Cancelled("the program was stopped"))
        tasks = list(self._tasks)
        if all(step.over.done() for steps in self._tasks.values() for step in steps):
            await asyncio.gather(*tasks, return_exceptions=True)
            return False
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            for reply in await self.session.send([Cancel(id=0, branch=root, subtree=True)]):
                await reply
        except RamifyError:
            pass  # the session is over, or the frame never reached the server
        return True

    # --- one frame ------------------------------------------------------------------------------

    def _start(self, steps: list[Step]) -> None:
        for step in steps:
            step.flushed = True
        task = asyncio.create_task(self._send(steps), name="program frame")
        self._tasks[task] = steps
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _send(self, steps: list[Step]) -> None:
        try:
            for step in {before for each in steps for before in each.after}.difference(steps):
                await wait(step)
            await self._frame(steps)
        except asyncio.CancelledError:
            for step in steps:
                step.end(Cancelled("the program was stopped"))
            raise

    async def _frame(self, steps: list[Step]) -> None:
        given: list[tuple[Step, Sequence[Op]]] = []
        for step in steps:
            error = next((before.error for before in step.must if before.error is not None), None)
            try:
                if error is not None:
                    raise error
                given.append((step, step.ops()))
            except Exception as raised:
                step.end(raised)
        ops = [op for _, part in given for op in part]
        limits: dict[str, int] = getattr(self.session, "limits", {})
        try:
            if len(ops) > limits.get("ops_per_frame", len(ops)):
                raise LimitExceeded(f"{len(ops)} ops do not fit into one frame")
            handles = list(await self.session.send(ops)) if ops else []
        except RamifyError as error:
            if isinstance(error, LimitExceeded) and len(given) > 1 and not self.strict:
                for step, _ in given:  # one by one, each when those before it are done
                    self._start([step])
                return
            for step, _ in given:
                step.end(error)
            return
        async with asyncio.TaskGroup() as group:
            for step, part in given:
                step.sent = True
                mine, handles = handles[: len(part)], handles[len(part) :]
                group.create_task(_settle(step, mine))


async def _settle(step: Step, handles: Sequence[Any]) -> None:
    try:
        await step.settle(handles)
    except asyncio.CancelledError:
        step.end(Cancelled("the program was stopped"))
        raise
    except Exception as error:
        cause = error.__cause__ if getattr(error, "code", None) == "skipped" else None
        step.end(cause if isinstance(cause, RamifyError) else error)
    else:
        step.end()


async def all_of(handles: Sequence[Any]) -> None:
    """Wait for the replies."""
    for handle in handles:
        await handle


async def wait(step: Step) -> None:
    """Wait until a step has ended, well or not."""
    await asyncio.shield(step.over)


def _groups(steps: Sequence[Step]) -> list[list[Step]]:
    """Group the steps that depend on each other; each group keeps their order."""
    groups: list[list[Step]] = []
    of: dict[Step, list[Step]] = {}
    for step in steps:
        joined: list[Step] = []
        for before in step.after:
            other = of.get(before)
            if other is None or other is joined:
                continue
            joined += other
            groups.remove(other)
            of.update(dict.fromkeys(other, joined))
        joined.append(step)
        of[step] = joined
        groups.append(joined)
    order = {step: i for i, step in enumerate(steps)}
    return [sorted(group, key=order.__getitem__) for group in groups]
