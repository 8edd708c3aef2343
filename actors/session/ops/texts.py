"""Tokenizes and renders text for branches: at once if it is short, else off the event loop. Pure.

Branches that end alike get the same tokens from one op. They are made once.
"""

from array import array
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgspec

from ramify.actors.kit.turns import Steps, at_once
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.state import EncodeText, SessionState
from ramify.actors.session.branches.tasks import ON_THE_LOOP, FrameRun, Prepared, Task
from ramify.actors.session.input.branch_writer import LOT, PART, BranchWriter
from ramify.actors.session.ops.scoring.selects import Selects
from ramify.actors.session.output.generations import Generations
from ramify.actors.session.sockets.publisher import Publisher, bare
from ramify.actors.tokenizer.encoder import Queue
from ramify.protocol.errors import BadRequest, RamifyError, brief
from ramify.protocol.pictures import is_remote
from ramify.protocol.wire import Append, JsonObject, Ok

TOKENS = 50  # that are appended, in the session and in the cache, in a microsecond

Finish = Callable[[int | None], Ok | Steps[Ok]]
Applied = tuple[Task, Ok | Steps[Ok] | RamifyError | None]


class _WaitingText(NamedTuple):
    """A branch that waits for its tokens. `finish`: see `Texts.put`."""

    task: Task
    branch: SessionBranch
    finish: Finish
    held: int


class Texts:
    """The texts that are tokenized for one session."""

    def __init__(
        self,
        state: SessionState,
        writer: BranchWriter,
        generations: Generations,
        selects: Selects,
        publisher: Publisher,
    ) -> None:
        self._state = state
        self._writer = writer
        self._generations = generations
        self._selects = selects
        self._publisher = publisher
        self._encoding: dict[int, tuple[Hashable, list[_WaitingText]]] = {}

    def put(
        self,
        task: Task,
        branch: SessionBranch,
        op: Append,
        targets: Iterable[str],
        finish: Finish,
        *,
        held: int = 0,
    ) -> Ok | Steps[Ok] | None:
        """Append what `op` says to `branch`: the reply, or None if it ends later, with `encoded`.

        `targets`: all branches that get it. `finish(cut)` is called when it is done and makes the reply;
        `cut`: where the branch was moved back to first, if it was. `held`: bytes of `op` that nobody
        counts yet. Raises RamifyError.
        """
        shared, writer = task.shared, self._writer
        assert shared is not None
        waiting = _WaitingText(task, branch, finish, held)
        strict = task.frame.opened.template == "strict"
        situation = writer.situation(branch, op, strict=strict)
        known = shared.prepared.get(situation)
        if known is not None:
            return self._apply(waiting, known)
        if situation in shared.tickets:  # for another branch of this op
            self._encoding[shared.tickets[situation]][1].append(waiting)
            return None
        prepare = partial(
            writer.prepare,
            branch,
            op,
            strict=strict,
            tools=task.frame.opened.tools,
            effort=task.frame.opened.effort,
            room=self._state.context if strict else writer.room(targets),
        )
        tools = task.frame.tools.size if op.messages is not None else 0
        size = writer.size(branch, op, strict=strict, tools=tools)
        if op.images or writer.turns.waits(op) or not task.frame.spend(size, self._publisher.now):
            ticket = shared.tickets[situation] = self._state.next_id()
            self._encoding[ticket] = (situation, [waiting])
            self._state.meter.add(held)
            self._state.out.encode.append(EncodeText(ticket, size, prepare, _queue(op)))
            return None
        try:
            prepared: Prepared | RamifyError = prepare()
        except RamifyError as error:
            prepared = bare(error)
        shared.prepared[situation] = prepared
        if isinstance(prepared, Prepared):
            writer.turns.prepared(prepared)
        return self._apply(waiting, prepared)

    def encoded(
        self, ticket: int, prepared: Prepared | None, error: BaseException | None
    ) -> Iterator[tuple[int, Callable[[], Applied]]]:
        """Go on with the tasks that waited for a long text, which was tokenized.

        Yields for each what appending costs, and the function that appends and returns the task's end.
        """
        situation, entries = self._encoding[ticket]
        result = _cannot_encode(error) if prepared is None else prepared
        shared = entries[0].task.shared
        assert shared is not None
        del shared.tickets[situation]
        shared.prepared[situation] = result
        if isinstance(result, Prepared):
            self._writer.turns.prepared(result)
        self._state.meter.add(-entries[0].held)
        cost = applying(result)
        while entries:
            yield cost, partial(self._try, entries.pop(0), result)
        del self._encoding[ticket]

    def _try(self, waiting: _WaitingText, result: Prepared | RamifyError) -> Applied:
        try:
            return waiting.task, self._apply(waiting, result)
        except RamifyError as failure:
            return waiting.task, bare(failure)

    def cost(self, task: Task, branch: SessionBranch, op: Append) -> int:
        """About what `put` costs."""
        shared, writer = task.shared, self._writer
        assert shared is not None
        strict = task.frame.opened.template == "strict"
        known = shared.prepared.get(writer.situation(branch, op, strict=strict))
        if known is not None:
            return applying(known)
        tools = task.frame.tools.size if op.messages is not None else 0
        return min(writer.size(branch, op, strict=strict, tools=tools), ON_THE_LOOP) // 2

    def waiting(self) -> list[Task]:
        """The tasks whose text is being tokenized."""
        return [each.task for _, entries in self._encoding.values() for each in entries]

    def _apply(self, waiting: _WaitingText, prepared: Prepared | RamifyError) -> Ok | Steps[Ok] | None:
        """Append, and return the reply; None if what is appended has to be scored first."""
        if isinstance(prepared, RamifyError):
            raise prepared
        op, encoded = waiting.task.op, prepared.encoded
        if not isinstance(op, Append) or not op.logprobs or encoded is None:
            return self._append(waiting, prepared)
        at = self._writer.begins(waiting.branch, prepared)
        tokens = array("i", chain.from_iterable(part.tokens for part in encoded))
        self._state.room(waiting.branch, at + len(tokens) - waiting.branch.position)

        def then(entries: list[JsonObject]) -> Ok:
            ok = at_once(self._append(waiting, prepared))
            return msgspec.structs.replace(ok, result={**(ok.result or {}), "logprobs": entries})

        return self._selects.measure(waiting.task, waiting.branch, at, tokens, op.logprobs, then)

    def _append(self, waiting: _WaitingText, prepared: Prepared) -> Steps[Ok]:
        task, branch = waiting.task, waiting.branch
        if prepared.pending.over_prompt or prepared.pending.cut is not None:
            self._generations.prefills.cancel(branch)
        at = self._writer.begins(branch, prepared)
        cut = yield from self._writer.apply(branch, prepared, task.op.id)
        revision = self._state.bump()
        if cut is not None:
            branch.cut_back(revision, cut)
            self._publisher.cut(branch, cut)
        ok = waiting.finish(cut)
        if isinstance(ok, Generator):
            return (yield from ok)
        if not prepared.marks:
            return ok
        marks = [None if each is None else at + each for each in prepared.marks]
        return msgspec.structs.replace(ok, result={**(ok.result or {}), "marks": marks})


def _queue(op: Append) -> Queue:
    """The queue in which the text of `op` waits."""
    if not op.images:
        return "text"
    return "remote" if any(map(is_remote, op.images)) else "pictures"


def applying(prepared: Prepared | RamifyError) -> int:
    """What it costs to append this to a branch (see `Work`)."""
    if isinstance(prepared, RamifyError) or prepared.encoded is None:
        return 0
    tokens = sum(len(each.tokens) for each in prepared.encoded)
    return PART * min(len(prepared.encoded), LOT) + tokens // TOKENS


def _cannot_encode(error: BaseException | None) -> RamifyError:
    if isinstance(error, RamifyError):
        return bare(error)
    return BadRequest(f"the text cannot be tokenized: {brief(str(error))}")


class _Rendering(NamedTuple):
    """A prompt, and the tasks that wait for it: all of one frame."""

    frame: FrameRun
    key: Hashable
    tasks: list[Task]


class Prompts:
    """Long generation prompts of one session, rendered before their ops begin.

    A strict template renders the whole conversation for the prompt behind its last turn. An op that
    needs that stays first in its queues, as one that waits, so it can be cancelled and may be late.
    `bool`: whether any is being rendered.
    """

    def __init__(self, state: SessionState, writer: BranchWriter, publisher: Publisher) -> None:
        self._state = state
        self._writer = writer
        self._publisher = publisher
        self._under_way: dict[int, _Rendering] = {}  # by ticket

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def hold(self, task: Task) -> bool:
        """Hold back a task that is about to begin, if its prompt is long: `encoded` gives it back."""
        branch, frame = self._state.branches.get(task.branch or ""), task.frame
        if branch is None or not task.kind.generates:
            return False
        missing = self._writer.strict.unrendered(branch, frame.opened, frame.prompts)
        if missing is None:
            return False
        for each in self._under_way.values():
            if each.frame is frame and each.key == missing.key:
                each.tasks.append(task)
                return True
        if frame.spend(missing.size, self._publisher.now):
            return False
        ticket = self._state.next_id()
        self._under_way[ticket] = _Rendering(frame, missing.key, [task])
        self._state.out.encode.append(EncodeText(ticket, missing.size, missing.run))
        return True

    def encoded(self, ticket: int, prompt: object, error: BaseException | None) -> list[Task] | None:
        """Take the tasks that waited for a prompt, which is rendered or cannot be. None: no prompt."""
        rendering = self._under_way.pop(ticket, None)
        if rendering is None:
            return None
        known = rendering.frame.prompts
        if isinstance(prompt, str):
            known[rendering.key] = prompt
        elif isinstance(error, RamifyError):
            known[rendering.key] = bare(error)
        else:
            known[rendering.key] = BadRequest(f"the conversation cannot be rendered: {error}")
        return rendering.tasks

    def give_up(self) -> list[Task]:
        """Take all tasks that wait: the engine is broken."""
        tasks = [task for each in self._under_way.values() for task in each.tasks]
        self._under_way.clear()
        return tasks
