"""Agents with tools, on recorded conversations: calls are written by the model, read, run, answered.

The engine is the real one; the model is faked, and says what the record wants: for each history that it
may be asked to go on from, a script (`agent_script.py`) has its next token. The histories of the script
are what `transformers` renders of the conversation so far, tokenized whole; the call is written as the
chat template writes it. So the model makes a call only if the prompt is that of `transformers`, token by
token, and the tools run only if the call is found in what it says. Of every second turn with several
calls, all are made at once; elsewhere one after the other, as some templates allow no other way.

Checked are the reason of each generation, the calls and their arguments, the answer's text, and at the
end the tokens of the whole branch. A conversation that is otherwise ends there, and counts as an error.

Not a test module: `test_agent_turns.py` plays two conversations on each template at hand.
"""

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest import mock

from ramify.actors.calls.toolbox import call_id
from ramify.actors.engine import Engine, running_engine
from ramify.actors.executor.spec import FactorySpec
from ramify.clients.agent import Agent, Tool
from ramify.clients.branch import Branch
from ramify.protocol.config import EngineConfig, Limits, ModelConfig, ServerConfig
from ramify.protocol.errors import RamifyError
from tests.e2e.agent_records import RecordedConversation, RecordedStep, RecordedTurn, steps_of
from tests.e2e.agent_script import Rendering, ScriptedModel, TokenHistory, Unfit, model_folder

MODEL = Path(str(files("ramify.gpu") / "default_model"))
CONTEXT = 1 << 16
FAST = 1_000_000  # ops a second: a replay is no flood


class Otherwise(Exception):
    """The engine did something else than the record says."""


class ConversationReplay:
    """One conversation, as an agent has it. Its tools answer from the calls of the present step."""

    def __init__(
        self, conversation: RecordedConversation, rendering: Rendering, model: ScriptedModel, number: int
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._turns = conversation.turns
        self._said = rendering.of(conversation.tools)
        self._history = TokenHistory(model)
        self._number = number
        self._expected: list[Any] = []
        tools = [self._tool(schema) for schema in conversation.tools]
        self.agent = Agent(
            tools, max_steps=12, retain_s=None, temperature=0.0, max_tokens=4096,
            stop_token_ids=rendering.stops,
        )  # fmt: skip

    async def run(self, url: str) -> None:
        """All turns. Raises Otherwise, and what went wrong on the server."""
        async with self.agent.connect(url, template="strict") as session:
            for place, turn in enumerate(self._turns):
                together = self._said.parallel and (self._number + place) % 2 == 0
                await self._turn(session.main, turn, steps_of(turn, together=together))
                self.counts["turns"] += 1
            held = (await session.main.tree(tokens=True)).turns or []
        tokens = [token for each in held for token in each.tokens or ()]
        whole = self._said.tokens[:-1]  # but the stop token: not every template shows it as it was
        if tokens[: len(whole)] != whole:
            raise Otherwise("the branch does not hold what `transformers` renders")
        self.counts["tokens compared"] += len(whole)

    async def _turn(self, branch: Branch, turn: RecordedTurn, steps: Sequence[RecordedStep]) -> None:
        """The script of the turn, then the turn."""
        self._expected = [call for step in steps for call in step.calls]
        self._said.say(turn.said)
        for step in steps:
            self._history.script(*self._said.speak(step))
        answer = await self.agent.run(branch, turn.said)
        reasons = [result.reason for result in answer.results]
        wanted = ["tool" if step.calls else "stop" for step in steps]
        if reasons != wanted:
            said = answer.results[len(reasons) - 1].text[-80:]
            raise Otherwise(f"generations ended by {reasons}, not {wanted}: ...{said!r}")
        for result, step in zip(answer.results, steps, strict=True):
            self.check(step, result.tool_calls or [], result.content, result.text)
        if self._expected:
            raise Otherwise(f"{len(self._expected)} calls did not run")
        for result in answer.results:
            self.counts["generations"] += 1
            self.counts["prompt tokens"] += result.usage.prompt
            self.counts["computed"] += result.usage.computed
            self.counts["output tokens"] += result.usage.output

    def check(
        self, step: RecordedStep, calls: list[dict[str, Any]], content: str | None, text: str
    ) -> None:
        found = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
        if found != [(call.name, call.arguments) for call in step.calls]:
            raise Otherwise(f"{text[-200:]!r} was read as {found}")
        if content is not None and content.strip() != step.text:
            raise Otherwise(f"the answer is {content!r}, not {step.text!r}")
        self.counts["calls"] += len(calls)
        self.counts["outputs with several calls"] += len(calls) > 1

    def _tool(self, schema: dict[str, Any]) -> Tool:
        name = schema["function"]["name"]

        async def run(**arguments: Any) -> str:
            for call in self._expected:
                if (call.name, call.arguments) == (name, arguments):
                    self._expected.remove(call)
                    return str(call.result)
            raise LookupError("the record has no such call here")

        return Tool.declared(schema, run)


async def replay(
    engine: Engine,
    conversations: Sequence[RecordedConversation],
    rendering: Rendering,
    model: ScriptedModel,
    places: int,
) -> tuple[Counter[str], list[str]]:
    """All of them, some at once: what was counted, and what went wrong."""
    total: Counter[str] = Counter()
    errors: list[str] = []
    free = asyncio.Semaphore(places)

    async def one(number: int, conversation: RecordedConversation) -> None:
        async with free:
            replay = ConversationReplay(conversation, rendering, model, number)
            try:
                await replay.run(engine.url)
            except (Otherwise, Unfit, RamifyError) as error:
                errors.append(f"{conversation.id}: {error}")
            else:
                total["conversations"] += 1
        total.update(replay.counts)

    await asyncio.gather(*(one(i, each) for i, each in enumerate(conversations)))
    return total, errors


async def run(
    conversations: Sequence[RecordedConversation], template: Path | None, places: int
) -> tuple[Counter[str], list[str]]:
    """On an engine of their own, with the bundled model's template or a published one."""
    # the script writes the ids of calls before the server makes them
    known = mock.patch("ramify.actors.calls.reader.call_id", lambda _, *place: call_id("", *place))
    with tempfile.TemporaryDirectory() as folder, known:
        path = MODEL if template is None else model_folder(Path(folder), MODEL, template)
        rendering = Rendering(path)
        settings = {"context": CONTEXT, "pages": 1 << 21, "verify": False, "step_tokens": 1 << 14}
        model = ScriptedModel(rendering.vocab, eos=rendering.eos)
        config = EngineConfig(
            model=ModelConfig(path=path),
            server=ServerConfig(port=0, allowed_hosts=("127.0.0.1",)),
            limits=Limits(ops_per_second=FAST, ops_burst=FAST),
            executor="thread",
            gateways=0,
        )
        spec = FactorySpec("ramify.gpu.executors.fake:FakeExecutor", {"model": model, **settings})
        async with running_engine(config, spec=spec) as engine:
            return await replay(engine, conversations, rendering, model, places)
