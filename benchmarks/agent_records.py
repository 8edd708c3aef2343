"""Recorded conversations of agents: what users say, and the calls that are expected, with their results.

A file has JSON lines: `toolset` (a name, and tools of OpenAI's shape) and `conversation`. Pure.
"""

import json
from collections.abc import Sequence
from pathlib import Path
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
    """`tools`: of all its toolsets; those that are missing at first are there from the beginning."""

    id: str
    tools: list[dict[str, Any]]
    turns: list[RecordedTurn]


class RecordedStep(NamedTuple):
    """One generation: calls, or an answer."""

    calls: Sequence[ExpectedCall]
    text: str


def read(path: Path) -> list[RecordedConversation]:
    """All conversations of a file. Raises ValueError for a line that is none."""
    toolsets: dict[str, list[dict[str, Any]]] = {}
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        each = json.loads(line)
        if each["kind"] == "toolset":
            toolsets[each["name"]] = list(map(_free, each["tools"]))
            continue
        try:
            turns = msgspec.convert(each["turns"], list[RecordedTurn], strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        tools = [tool for name in each["toolsets"] for tool in toolsets[name]]
        excluded = each["excluded_tools"]
        kept = [tool for tool in tools if tool["function"]["name"] not in excluded]
        found.append(RecordedConversation(each["id"], kept, turns))
    return found


def _free(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool whose calls no server holds to anything: a scripted model says what it is told to."""
    return {**tool, "function": {**tool["function"], "strict": False}}


def steps_of(turn: RecordedTurn, *, together: bool) -> list[RecordedStep]:
    """The generations of a turn: its calls, all at once or one after the other, then the answer."""
    calls = turn.expected_calls
    if not calls:
        return [RecordedStep((), NO_CALL)]
    groups = [calls] if together else [[call] for call in calls]
    return [*(RecordedStep(group, "") for group in groups), RecordedStep((), DONE)]
