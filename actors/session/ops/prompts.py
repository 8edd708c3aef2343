"""Renders long generation prompts off the event loop, before their ops begin. Pure.

A strict template renders the whole conversation for the prompt behind its last turn. An op that needs
that stays first in its queues, as one that waits, so it can be cancelled and may be late like any other.
"""

from collections.abc import Hashable
from typing import NamedTuple

from ramify.actors.session.branches.outbox import EncodeText
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.input.branch_writer import BranchWriter
from ramify.actors.session.queues.tasks import FrameRun, Task
from ramify.actors.session.sockets.publisher import Publisher
from ramify.actors.session.sockets.replies import bare
from ramify.protocol.errors import BadRequest, RamifyError


class _Rendering(NamedTuple):
    """A prompt, and the tasks that wait for it: all of one frame."""

    frame: FrameRun
    key: Hashable
    tasks: list[Task]


class Prompts:
    """Those of one session. `bool`: whether any is being rendered."""

    def __init__(self, state: SessionState, writer: BranchWriter, publisher: Publisher) -> None:
        self._state = state
        self._writer = writer
        self._publisher = publisher
        self._under_way: dict[int, _Rendering] = {}  # by ticket

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def hold(self, task: Task) -> bool:
        """Whether the task, which is about to begin, has to wait: `encoded` gives it back."""
        branch, frame = self._state.branches.get(task.branch or ""), task.frame
        if branch is None or not task.kind.generates:
            return False
        missing = self._writer.unrendered(branch, frame.opened, frame.prompts)
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
        """It was rendered, or could not be: the tasks that waited. None: the ticket is another's."""
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
        """The engine is broken: all tasks that wait."""
        tasks = [task for each in self._under_way.values() for task in each.tasks]
        self._under_way.clear()
        return tasks
