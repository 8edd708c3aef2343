"""An agent with tools: calls are streamed, run side by side, and answered on the same branch.

Without arguments the bundled model answers a few questions with small tools of its own kind. `--data`:
agents_tools.jsonl, conversations with tools, expected calls and their results. Tools then answer from
the file, and it is counted which expected calls the model makes. After each turn the branch is moved
back and given the turn as the file has it, so that every turn stands on the right history.
"""

import argparse
import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress
from stage import Stage, stage

from ramify import RamifyError
from ramify.clients.agent import Agent, Answer, Called, Returned, Tool, tool
from ramify.clients.branch import Branch
from ramify.clients.stream import TextDelta
from ramify.protocol.wire import ChatMessage

QUESTIONS = [
    "What is 31 + 47?",
    "What is the weather in Lima?",
    "What time is it in Oslo?",
    "Who is Clara?",
]


@tool
def calculator(expression: str) -> str:
    """Work out a sum"""
    left, sign, right = expression.split()
    return str(int(left) + int(right) * (1 if sign == "+" else -1))


@tool
async def get_weather(city: str) -> dict[str, Any]:
    """The weather in a city"""
    return {"weather": "cloudy", "temperature": 9 + len(city)}


@tool
def get_time(city: str) -> str:
    """The time in a city"""
    return f"{8 + len(city):02d}:15"


@tool
def search(query: str) -> str:
    """Look something up"""
    return f"{query} is a baker in Lisbon."


async def show(shown: Stage) -> None:
    """The questions one after the other in one conversation each, all of it as it happens."""
    agent = Agent(
        [calculator, get_weather, get_time, search], max_steps=4, temperature=0.0, max_tokens=80
    )
    console: Console = shown.console
    async with agent.connect(shown.url) as session:
        for question in QUESTIONS:
            (branch,) = await session.root(f"q{len(session.branches)}")
            console.print(f"\n[bold]{question}[/]")
            async for event in agent.stream(branch, question):
                match event:
                    case TextDelta(parts=parts):
                        text = "".join(part.text for part in parts or () if part.kind == "text")
                        console.print(text, end="", markup=False)
                    case Called(call):
                        console.print(f"  {call.name}{call.arguments}", style="yellow", markup=False)
                    case Returned(_, text):
                        console.print(f"  -> {text}", style="cyan", markup=False)
                    case Answer(results=results):
                        shown.took(*results)
                        usage = results[-1].usage
                        cached = f"{usage.cached} of {usage.prompt} prompt tokens were cached"
                        console.print(f"\n  [dim]{len(results)} steps; at the last, {cached}[/]")


# --- conversations of a file -----------------------------------------------------------------------


class Call(msgspec.Struct):
    """A call that is expected, with what it returns."""

    name: str
    arguments: dict[str, Any]
    result: str


class Turn(msgspec.Struct):
    """What the user says, and the calls that are expected then."""

    messages: list[ChatMessage]
    expected_calls: list[Call]
    tools_added: list[str] = []


class Conversation(msgspec.Struct):
    """Its tools are those that are expected; what is missing at first is there from the beginning."""

    id: str
    turns: list[Turn]


class Count(msgspec.Struct):
    """What came of conversations."""

    turns: int = 0
    expected: int = 0
    made: int = 0
    right: int = 0
    prompt: int = 0
    computed: int = 0
    output: int = 0
    failed: int = 0


def read(rows: Iterable[dict[str, Any]], limit: int) -> tuple[dict[str, Any], list[Conversation]]:
    """The tools by name, and the first conversations."""
    tools: dict[str, Any] = {}
    found: list[Conversation] = []
    for each in rows:
        if each["kind"] == "toolset":
            tools |= {schema["function"]["name"]: schema for schema in each["tools"]}
        elif len(found) < limit:
            found.append(msgspec.convert(each, Conversation, strict=False))
    return tools, found


def brief(schema: dict[str, Any]) -> dict[str, Any]:
    """The tool without the words that all of its set begin with: small models have small contexts."""
    function = schema["function"]
    about = function.get("description", "").rpartition("Tool description: ")[2]
    return {"type": "function", "function": {**function, "description": about}}


class Replayed:
    """One conversation. Its tools answer from the calls that the present turn expects."""

    def __init__(
        self, conversation: Conversation, tools: dict[str, Any], *, full: bool, force: bool
    ) -> None:
        self.count = Count()
        self.why = ""
        self._force = force
        self._turns = conversation.turns
        self._expected: list[Call] = []
        names = {call.name for turn in conversation.turns for call in turn.expected_calls}
        schemas = [tools[name] if full else brief(tools[name]) for name in sorted(names)]
        self._agent = Agent(
            [self._tool(schema) for schema in schemas], max_steps=8, temperature=0.0, max_tokens=200
        )

    async def run(self, url: str) -> Count:
        """All turns. An error ends the conversation, and is counted."""
        try:
            async with self._agent.connect(url) as session:
                for turn in self._turns:
                    await self._turn(session.main, turn)
        except RamifyError as error:
            self.count.failed += 1
            self.why = str(error)
        return self.count

    async def _turn(self, branch: Branch, turn: Turn) -> None:
        count, start = self.count, branch.position or 0
        self._expected = list(turn.expected_calls)
        count.turns += 1
        count.expected += len(self._expected)
        said: Sequence[ChatMessage] = turn.messages or [
            ChatMessage(role="user", content=f"There are new tools: {', '.join(turn.tools_added)}.")
        ]
        forced = self._expected[0].name if self._force and self._expected else "auto"
        answer = await self._agent.run(branch, said, tool_choice=forced)
        for result in answer.results:
            count.prompt += result.usage.prompt
            count.computed += result.usage.computed
            count.output += result.usage.output
        count.made += len(answer.calls)
        await branch.rollback(to=start)
        await branch.append(messages=[*said, *as_it_was(turn)])

    def _tool(self, schema: dict[str, Any]) -> Tool:
        name = schema["function"]["name"]

        def run(**arguments: Any) -> str:
            for call in self._expected:
                if (call.name, call.arguments) == (name, arguments):
                    self._expected.remove(call)
                    self.count.right += 1
                    return call.result
            raise LookupError("the data has no such call here")

        return Tool.declared(schema, run)


def as_it_was(turn: Turn) -> list[ChatMessage]:
    """The calls of the file with their results, one after the other."""
    out: list[ChatMessage] = []
    for number, call in enumerate(turn.expected_calls):
        ident = f"call{number:05d}"
        function = {"name": call.name, "arguments": call.arguments}
        calls = [{"id": ident, "type": "function", "function": function}]
        out.append(ChatMessage(role="assistant", tool_calls=calls))
        out.append(ChatMessage(role="tool", content=call.result, name=call.name, tool_call_id=ident))
    return out


async def replay(shown: Stage) -> None:
    """Several conversations at once, and what came of them."""
    options, console = shown.options, shown.console
    tools, conversations = read(shown.rows("agents_tools", []), shown.size)
    places = asyncio.Semaphore(options.concurrency)
    total = Count()
    errors: list[str] = []
    with Progress(console=console, transient=True) as progress:
        done = progress.add_task("conversations", total=len(conversations))

        async def one(conversation: Conversation) -> None:
            async with places:
                replayed = Replayed(conversation, tools, full=options.full, force=options.force)
                count = await replayed.run(shown.url)
            errors.extend([replayed.why] if replayed.why else [])
            for field in Count.__struct_fields__:
                setattr(total, field, getattr(total, field) + getattr(count, field))
            progress.advance(done)

        await asyncio.gather(*map(one, conversations))
    for error in errors[:3]:
        console.print(error, style="red", markup=False)
    console.print(
        f"{len(conversations)} conversations, {total.turns} turns ({total.failed} ended with an error)\n"
        f"{total.right} of {total.expected} expected calls were made, of {total.made} calls in all\n"
        f"{total.prompt} prompt tokens: {total.computed} computed; {total.output} output tokens"
    )


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", type=int, default=8, help="conversations at once (default 8)")
    parser.add_argument("--full", action="store_true", help="tools with their whole descriptions")
    parser.add_argument("--force", action="store_true", help="each turn begins with its first tool")


def main(arguments: Sequence[str] | None = None) -> None:
    with stage(__doc__, arguments, size=20, what="conversations, of --data", flags=flags) as shown:
        asyncio.run(show(shown) if shown.data is None else replay(shown))


if __name__ == "__main__":
    main()
