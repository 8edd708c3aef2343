"""An agent's turn inside a program: on the program's branch, behind what was added so far."""

from collections.abc import Awaitable
from typing import overload

from ramify.clients.agent.agent import Agent, Answer
from ramify.clients.handles import Branch
from ramify.clients.program.state import AsyncState
from ramify.clients.program.sync import State


@overload
def act(s: State, agent: Agent, say: str) -> Answer: ...
@overload
def act(s: AsyncState, agent: Agent, say: str) -> Awaitable[Answer]: ...
def act(s: State | AsyncState, agent: Agent, say: str) -> Answer | Awaitable[Answer]:
    """Let `agent` take a turn on the state's branch; what the program adds next stands behind it.

    The program's session must know the agent's tools: `program.using(connect={"tools": agent.schemas,
    "parts": True})`. The turn is on the branch, but not in `s.text()`: the answer is what this returns.
    Raises TypeError on a backend without branches that live on.
    """
    return (
        s.apply(lambda state: _act(state, agent, say)) if isinstance(s, State) else _act(s, agent, say)
    )


async def _act(s: AsyncState, agent: Agent, say: str) -> Answer:
    await s.finish()
    branch = s.place
    if not isinstance(branch, Branch):
        raise TypeError("an agent needs a Ramify session: this program runs on another backend")
    return await agent.run(branch, say)
