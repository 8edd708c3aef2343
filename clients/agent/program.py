"""An agent's turn inside a program: on the program's branch, behind what was added so far."""

from collections.abc import Awaitable, Callable
from typing import cast, overload

import msgspec

from ramify.clients.agent.agent import Agent, Answer, Event, Ground, Tooled
from ramify.clients.branch import Branch
from ramify.clients.program.state import AsyncState
from ramify.clients.program.steps import NotOneFrame
from ramify.clients.program.sync import State
from ramify.clients.program.tracing import NeedsText
from ramify.clients.program.value import Piece
from ramify.clients.stream import TextDelta


@overload
def act(s: State, agent: Agent, say: str, *, name: str | None = None) -> Answer: ...
@overload
def act(s: AsyncState, agent: Agent, say: str, *, name: str | None = None) -> Awaitable[Answer]: ...
def act(
    s: State | AsyncState, agent: Agent, say: str, *, name: str | None = None
) -> Answer | Awaitable[Answer]:
    """Let `agent` take a turn on the state's branch; what the program adds next stands behind it.

    The program's session must know the agent's tools: `program.using(connect={"tools": agent.schemas,
    "parts": True})`, or `ApiSession(..., tools=agent.schemas)`. All of the turn is in `s.messages()`,
    and its words in `s.text()`. `name`: `s[name]` is the answer. What was held back is sent before it,
    so a frame ends here.

    Raises TypeError on a backend that knows no tools, NotOneFrame with `compiled=True`: what
    tools answer is known to the program alone.
    """
    if isinstance(s, State):
        return s.apply(lambda state: _act(state, agent, say, name))
    return _act(s, agent, say, name)


async def _act(s: AsyncState, agent: Agent, say: str, name: str | None) -> Answer:
    s.usable()
    if s.family.tracing:
        raise NeedsText("an agent's turn depends on what its tools answer")
    if s.family.sender.strict:
        where = s.family.where()
        raise NotOneFrame(f"an agent's turn {where} does not fit into one frame: its tools run here")
    await s.finish()
    session, branch = s.family.sender.session, s.place
    post = branch.session.link.submit if isinstance(branch, Branch) else getattr(session, "post", None)
    if post is None or not hasattr(session, "tool_names"):
        raise TypeError("an agent needs a session that knows tools: a Session, or an ApiSession")
    ground = Ground(cast(Tooled, session), s.branch, branch, post)
    answer = await agent.run_on(ground, say, listener=_listener(s, name))
    results = list(answer.results)
    if results:
        results[-1] = msgspec.structs.replace(results[-1], text=answer.text)
    s.note(answer.transcript.messages(), results, name)
    return answer


def _listener(s: AsyncState, name: str | None) -> Callable[[Event], None] | None:
    """Make a listener that passes the agent's text on to whoever listens to the program's gaps."""
    told = s.family.listener
    if told is None:
        return None

    def hear(event: Event) -> None:
        if isinstance(event, TextDelta):
            told(Piece(s.branch, name, event.text, event.cut))

    return hear
