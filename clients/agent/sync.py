"""The loop without `await`: `SyncAgent`, beside `connect_sync`.

    agent = SyncAgent([add])
    with agent.connect("ws://127.0.0.1:8765/v1/ws") as session:
        print(agent.run(session.main, "What is 2 + 3?").text)

Every method runs its twin on the session's loop and waits for it; tools that are plain functions run
in threads of their own.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, Unpack, cast

from ramify.clients.agent.agent import Agent, Answer, Event, Listener
from ramify.clients.agent.tools import Tool
from ramify.clients.branch import Messages
from ramify.clients.connect import ConnectSettings
from ramify.clients.sync import SyncBranch, SyncSession, connect_sync


class SyncAgent:
    """See `Agent`: the same arguments. `agent`: the one that it runs."""

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]], **settings: Any) -> None:
        self.agent = Agent(tools, **settings)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools' schemas, for `connect_sync(tools=...)`."""
        return self.agent.schemas

    def connect(self, url: str, **settings: Unpack[ConnectSettings]) -> SyncSession:
        """Connect as `connect_sync` does, to a session that knows these tools."""
        given: ConnectSettings = {"tools": self.schemas, "parts": True}
        given.update(settings)
        return connect_sync(url, **given)

    def run(
        self,
        branch: SyncBranch,
        say: str | Messages | None = None,
        *,
        listener: Listener | None = None,
        tool_choice: str = "auto",
    ) -> Answer:
        """See `Agent.run`. `listener` is called on the session's loop and must not wait."""
        twin = branch.twin
        return branch.thread.run(self.agent.run(twin, say, listener=listener, tool_choice=tool_choice))

    def stream(
        self, branch: SyncBranch, say: str | Messages | None = None, *, tool_choice: str = "auto"
    ) -> Iterator[Event | Answer]:
        """See `Agent.stream`. Leaving the loop early cancels the run."""
        thread = branch.thread
        events = self.agent.stream(branch.twin, say, tool_choice=tool_choice)
        try:
            while (event := thread.run(_next(events))) is not None:
                yield event
        finally:
            thread.run(_close(events))

    def delegate(self, branch: SyncBranch, tasks: Sequence[str], *, keep: bool = False) -> list[Answer]:
        """See `Agent.delegate`."""
        return branch.thread.run(self.agent.delegate(branch.twin, tasks, keep=keep))


async def _next(events: AsyncIterator[Event | Answer]) -> Event | Answer | None:
    return await anext(events, None)


async def _close(events: AsyncIterator[Event | Answer]) -> None:
    await cast(Any, events).aclose()
