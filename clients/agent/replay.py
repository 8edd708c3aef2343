"""A transcript, done again: the tools answer from it, and what differs is said.

To see whether another model, prompt or version does the same: no tool runs.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Literal

import msgspec

from ramify.clients.agent.agent import Agent, Answer
from ramify.clients.agent.calls import Called, Returned
from ramify.clients.agent.tools import Context, ToolCall
from ramify.clients.agent.transcript import Did, Entry, Said, Told, Transcript
from ramify.clients.branch import Branch

UNKNOWN = "Error: the transcript has no such call"


Aspect = Literal["text", "reason", "call"]


class Difference(msgspec.Struct, frozen=True):
    """A difference between a transcript and its replay. `turn`: of the transcript, from 0; `what`: the
    part of it that differs.

    `then`, `now`: the values; None where there is none.
    """

    turn: int
    what: Aspect
    then: str | None
    now: str | None


class Replay(Agent):
    """An agent whose tools answer from a transcript: each call as often as it is in there, in order."""

    def __init__(self, agent: Agent, transcript: Transcript) -> None:
        super().__init__(
            agent.tools.values(),
            max_steps=agent.max_steps,
            timeout_s=agent.timeout_s,
            retain_s=agent.retain_s,
            **agent.options,
        )
        self.transcript = transcript
        self.differences: list[Difference] = []
        self._known: dict[tuple[str, str], list[Did]] = defaultdict(list)
        for entry in transcript.entries:
            if isinstance(entry, Did):
                self._known[_key(entry.call)].append(entry)

    async def replay(self, branch: Branch) -> list[Answer]:
        """Say again what was said, turn by turn. `differences` then has what went otherwise."""
        answers: list[Answer] = []
        for number, turn in enumerate(_turns(self.transcript)):
            first = turn[0]
            answer = await self.run(branch, first.messages if isinstance(first, Told) else None)
            answers.append(answer)
            self._compare(number, turn, answer)
        return answers

    async def perform(
        self, calls: Sequence[Context], told: Callable[[Called | Returned], None], done: dict[str, Did]
    ) -> None:
        for context in calls:
            call = context.call
            told(Called(call))
            known = self._known[_key(call)]
            was = known.pop(0) if known else Did(call, UNKNOWN, False)
            did = done[call.id] = Did(call, was.text, was.ok)
            told(Returned(call, did.text, did.ok))
        await asyncio.sleep(0)

    def _compare(self, turn: int, then: list[Entry], answer: Answer) -> None:
        said = [entry for entry in then if isinstance(entry, Said)]
        now = [entry for entry in answer.transcript.entries if isinstance(entry, Said)]
        for before, after in zip_longest(said, now):
            was_text, is_text = before.text if before else None, after.text if after else None
            self._differ(turn, "text", was_text, is_text)
            was_end, is_end = before.reason if before else None, after.reason if after else None
            self._differ(turn, "reason", was_end, is_end)
            then_calls, now_calls = before.calls if before else [], after.calls if after else []
            for was, is_ in zip_longest(map(_shown, then_calls), map(_shown, now_calls)):
                self._differ(turn, "call", was, is_)

    def _differ(self, turn: int, what: Aspect, then: str | None, now: str | None) -> None:
        if then != now:
            self.differences.append(Difference(turn, what, then, now))


def _turns(transcript: Transcript) -> list[list[Entry]]:
    """Split the entries into turns: each begins with a `Told`."""
    turns: list[list[Entry]] = []
    for entry in transcript.entries:
        if isinstance(entry, Told) or not turns:
            turns.append([])
        turns[-1].append(entry)
    return turns


def _key(call: ToolCall) -> tuple[str, str]:
    """The key of a call: equal for equal arguments, however they are written."""
    try:
        value = msgspec.json.decode(call.arguments)
    except msgspec.DecodeError:
        return call.name, call.arguments
    return call.name, msgspec.json.encode(value, order="sorted").decode()


def _shown(call: ToolCall) -> str:
    name, arguments = _key(call)
    return f"{name}({arguments})"
