"""The loop against a server whose model says what a test wants."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from ramify.clients.agent import (
    Agent,
    Called,
    Context,
    Difference,
    Replay,
    Returned,
    SyncAgent,
    Transcript,
    tool,
)
from ramify.clients.agent.transcript import Did, Said, Told
from ramify.clients.connect import connect
from ramify.clients.stream import TextDelta
from ramify.protocol.wire import Append, Drop, Generate, Set


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def call(name: str, arguments: str = "{}", ident: str = "c1") -> dict[str, Any]:
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


def messages(server: Any, op: int) -> list[tuple[str, str]]:
    """Role and content of what the op appended."""
    found = server.ops[op]
    assert isinstance(found, Append)
    return [(each.role, each.content) for each in found.messages or ()]


async def test_a_question_with_a_call(server: Any, url: str, line: Any) -> None:
    server.script += [line("Let me see", [call("add", '{"a": 2, "b": 3}')]), line("It is 5.")]
    agent = Agent([add], temperature=0.0)
    async with agent.connect(url) as session:
        answer = await agent.run(session.main, "What is 2 + 3?")
    assert (answer.text, answer.reason) == ("It is 5.", "stop")
    assert [(did.call.name, did.text, did.ok) for did in answer.calls] == [("add", "5", True)]
    kinds = [type(op) for op in server.ops[:5]]
    assert kinds == [Append, Generate, Set, Append, Generate]  # a step is a frame
    assert messages(server, 0) == [("user", "What is 2 + 3?")]
    assert messages(server, 3) == [("tool", "5")]
    assert server.ops[2].retain_s == 300.0
    assert server.opens[0].parts
    assert server.opens[0].tools == agent.schemas
    assert [type(entry) for entry in answer.transcript.entries] == [Told, Said, Did, Said]


async def test_parallel_calls_come_back_in_their_order(server: Any, url: str, line: Any) -> None:
    second = asyncio.Event()

    @tool
    async def first_one() -> str:
        await second.wait()
        return "one"

    @tool
    async def second_one() -> str:
        second.set()
        return "two"

    server.script += [line("", [call("first_one"), call("second_one", ident="c2")]), line("Done.")]
    agent = Agent([first_one, second_one])
    async with agent.connect(url) as session:
        events = [event async for event in agent.stream(session.main, "Go")]
    assert messages(server, 3) == [("tool", "one"), ("tool", "two")]
    done = [event.text for event in events if isinstance(event, Returned)]
    assert done == ["two", "one"]  # as they happen
    assert sum(isinstance(event, Called) for event in events) == 2
    assert "".join(e.text for e in events if isinstance(e, TextDelta)).strip() == "Done."
    assert events[-1].text == "Done."  # type: ignore[union-attr]


async def test_the_last_step_answers_its_calls(server: Any, url: str, line: Any) -> None:
    server.script += [line("", [call("add", '{"a": 1, "b": 1}')]) for _ in range(3)]
    agent = Agent([add], max_steps=3)
    async with agent.connect(url) as session:
        answer = await agent.run(session.main, "Go")
    assert answer.reason == "steps"
    assert len(answer.results) == 3
    assert answer.calls[-1].text == "Error: not run: this was the last of 3 steps"
    appended = [op for op in server.ops if isinstance(op, Append)]
    assert appended[-1].messages[0].role == "tool"  # type: ignore[index]


async def test_a_run_that_takes_too_long(server: Any, url: str, line: Any) -> None:
    stopped = []

    @tool
    async def hang() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(True)
        return ""

    server.script += [line("", [call("hang"), call("add", '{"a": 1, "b": 2}', "c2")]), line("Fine.")]
    agent = Agent([add, hang], timeout_s=0.3)
    async with agent.connect(url) as session:
        answer = await agent.run(session.main, "Go")
        assert answer.reason == "timeout"
        assert stopped == [True]
        assert [did.text for did in answer.calls] == ["Error: cancelled", "3"]
        again = await agent.run(session.main, "And now?")  # usable at once
        assert again.text == "Fine."
    appended = [op for op in server.ops if isinstance(op, Append)]
    assert [m.role for op in appended for m in op.messages or ()] == ["user", "tool", "tool", "user"]


async def test_cancelling_in_mid_call(server: Any, url: str, line: Any) -> None:
    began = asyncio.Event()

    @tool
    async def hang() -> str:
        began.set()
        await asyncio.Event().wait()
        return ""

    server.script += [line("", [call("hang")]), line("Fine.")]
    agent = Agent([hang])
    async with agent.connect(url) as session:
        task = asyncio.create_task(agent.run(session.main, "Go"))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await agent.run(session.main, "And now?")).text == "Fine."
    assert [m.content for op in server.ops if isinstance(op, Append) for m in op.messages or ()] == [
        "Go",
        "Error: cancelled",
        "And now?",
    ]


async def test_leaving_the_events_early_cancels(server: Any, url: str, line: Any) -> None:
    server.script.append(line("word " * 5000))
    agent = Agent([add])
    async with agent.connect(url) as session:
        events = agent.stream(session.main, "Go")
        async for _ in events:
            break
        await events.aclose()  # type: ignore[attr-defined]
        state = await session.main.tree()
        while state.running is not None:
            state = await session.main.tree()


async def test_tool_choice_is_for_the_first_step(server: Any, url: str, line: Any) -> None:
    server.script += [line("", [call("add", '{"a": 1, "b": 1}')]), line("2")]
    agent = Agent([add])
    async with agent.connect(url) as session:
        await agent.run(session.main, "Go", tool_choice="add")
    assert [op.tool_choice for op in server.ops if isinstance(op, Generate)] == ["add", "auto"]


async def test_a_session_that_does_not_know_the_tools(server: Any, url: str) -> None:
    async with connect(url) as session:
        with pytest.raises(ValueError, match="does not know the tool 'add'"):
            await Agent([add]).run(session.main, "Go")
    with pytest.raises(ValueError, match="two tools are called 'add'"):
        Agent([add, add])


async def test_sub_agents_are_forks(server: Any, url: str, line: Any) -> None:
    server.line_of = lambda text: line("even") if text.endswith("4") else line("odd")
    agent = Agent([add])
    async with agent.connect(url) as session:
        await session.main.say("Numbers.")
        answers = await agent.delegate(session.main, ["Is it 3", "Is it 4"])
        assert [answer.text for answer in answers] == ["odd", "even"]
        await session.main.tree()
    assert isinstance(server.ops[-3], Drop)
    assert server.branches.keys() == {"main"}


async def test_a_tool_that_is_a_sub_agent(server: Any, url: str, line: Any) -> None:
    helper = Agent([add])

    @tool
    async def ask(question: str, at: Context) -> str:
        """Ask a colleague."""
        (answer,) = await helper.delegate(at.branch, [question])
        return answer.text

    script = {
        "Go": line("", [call("ask", '{"question": "Sub?"}')]),
        "Sub?": line("Sub."),
        "Sub.": line("Done."),
    }
    server.line_of = lambda text: next((v for k, v in script.items() if text.endswith(k)), None)
    agent = Agent([ask, add])
    async with agent.connect(url) as session:
        answer = await agent.run(session.main, "Go")
    assert answer.text == "Done."
    assert answer.calls[0].text == "Sub."


# --- transcripts ------------------------------------------------------------------------------------


async def test_a_transcript_is_saved_and_done_again(
    server: Any, url: str, line: Any, tmp_path: Path
) -> None:
    ran = []

    @tool
    def look(word: str) -> str:
        ran.append(word)
        return f"about {word}"

    agent = Agent([look])
    ask = [call("look", '{"word": "sea"}'), call("look", '{"word":"sky"}', "c2")]
    server.script += [line("", ask), line("Blue.")]
    async with agent.connect(url) as session:
        answer = await agent.run(session.main, "Which colour?")
    file = tmp_path / "run.jsonl"
    answer.transcript.save(file)
    loaded = Transcript.load(file)
    assert loaded == answer.transcript
    assert [m.role for m in loaded.messages()] == ["user", "assistant", "tool", "tool", "assistant"]
    assert loaded.messages()[1].tool_calls == ask

    assert sorted(ran) == ["sea", "sky"]
    same = Replay(agent, loaded)
    server.script += [line("", ask), line("Blue.")]
    async with same.connect(url) as session:
        (again,) = await same.replay(session.main)
    assert same.differences == []
    assert again.text == "Blue."
    assert len(ran) == 2  # no tool ran

    other = Replay(agent, loaded)
    server.script += [line("", [call("look", '{"word": "fog"}')]), line("Grey.")]
    async with other.connect(url) as session:
        await other.replay(session.main)
    assert other.differences == [
        Difference(0, "call", 'look({"word":"sea"})', 'look({"word":"fog"})'),
        Difference(0, "call", 'look({"word":"sky"})', None),
        Difference(0, "text", "Blue. ", "Grey. "),
    ]
    assert len(ran) == 2

    file.write_text("{}\n")
    with pytest.raises(ValueError, match=r"run.jsonl, line 1"):
        Transcript.load(file)


# --- without await, and in programs -----------------------------------------------------------------


def test_the_loop_without_await(server: Any, url: str, line: Any) -> None:
    threads = []

    @tool
    def where() -> str:
        threads.append(threading.current_thread())
        return "here"

    agent = SyncAgent([where], max_steps=4)
    server.script += [line("", [call("where")]), line("Here."), line("So?")]
    with agent.connect(url) as session:
        assert agent.run(session.main, "Where?").text == "Here."
        events = list(agent.stream(session.main, "And?"))
        assert events[-1].text == "So?"
        server.line_of = lambda text: line("x")
        assert [a.text for a in agent.delegate(session.main, ["1", "2"])] == ["x", "x"]
    assert threads[0] is not threading.main_thread()
