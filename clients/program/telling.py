"""The text of a branch, in parts, as the program that made it reads it. Pure."""

from collections.abc import AsyncIterator
from typing import NamedTuple

from ramify.clients.program.expressions import TurnRole
from ramify.protocol.wire import ChatMessage


class TurnPart(NamedTuple):
    """Text in a turn (`role` None: outside of turns); or a whole turn, as an agent leaves them.

    `turn`: its number, so that two turns of one role stay apart.
    """

    turn: int
    role: TurnRole | None
    said: str | ChatMessage


async def as_text(parts: AsyncIterator[TurnPart]) -> str:
    """Join the text, without marks of turns."""
    return "".join(
        [p.said if isinstance(p.said, str) else p.said.content async for p in parts],
    )


async def as_messages(parts: AsyncIterator[TurnPart]) -> list[ChatMessage]:
    """Make chat turns; text outside of turns counts as a user's."""
    turns: list[tuple[tuple[int, TurnRole | None], ChatMessage]] = []
    async for turn, role, said in parts:
        key = turn, role
        if isinstance(said, ChatMessage):
            turns.append((key, said))
        elif turns and turns[-1][0] == key:
            last = turns[-1][1]
            turns[-1] = key, ChatMessage(role=last.role, content=last.content + said)
        else:
            turns.append((key, ChatMessage(role=role or "user", content=said)))
    return [turn for _, turn in turns]
