"""Conversations of agents: what users say, and the calls that are expected, with their results."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from ramify.protocol.wire import ChatMessage

NO_CALL = "I need more information for that."
DONE = "Done."


class ExpectedCall(msgspec.Struct, frozen=True):
    """A call that is expected, with what it returns."""

    name: str
    arguments: dict[str, Any]
    result: str


class RecordedTurn(msgspec.Struct, frozen=True):
    """What the user says, and the calls that are expected then."""

    messages: list[ChatMessage]
    expected_calls: list[ExpectedCall]
    tools_added: list[str] = []

    @property
    def said(self) -> list[ChatMessage]:
        """Its messages; a turn without any adds tools, which the user then tells."""
        told = f"There are new tools: {', '.join(self.tools_added)}."
        return self.messages or [ChatMessage(role="user", content=told)]


class RecordedConversation(NamedTuple):
    """`tools`: of OpenAI's shape; those that a later turn adds are there from the beginning."""

    id: str
    tools: list[dict[str, Any]]
    turns: list[RecordedTurn]


class RecordedStep(NamedTuple):
    """One generation: calls, or an answer."""

    calls: Sequence[ExpectedCall]
    text: str


def steps_of(turn: RecordedTurn, *, together: bool) -> list[RecordedStep]:
    """The generations of a turn: its calls, all at once or one after the other, then the answer."""
    calls = turn.expected_calls
    if not calls:
        return [RecordedStep((), NO_CALL)]
    groups = [calls] if together else [[call] for call in calls]
    return [*(RecordedStep(group, "") for group in groups), RecordedStep((), DONE)]
