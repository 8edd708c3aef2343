"""Agents on the bundled model, which was taught to call tools, and the examples as they are."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ramify.clients.agent import Agent, Returned, tool
from ramify.clients.connect import connect

ROOT = Path(__file__).resolve().parents[2]


@tool
def calculator(expression: str) -> str:
    """Work out a sum"""
    left, sign, right = expression.split()
    return str(int(left) + int(right) * (1 if sign == "+" else -1))


@tool
def search(query: str) -> str:
    """Look something up"""
    return f"{query} is a baker in Lisbon."


async def test_an_agent_on_the_bundled_model(bundled: str) -> None:
    agent = Agent([calculator, search], temperature=0.0, max_tokens=80)
    async with agent.connect(bundled) as session:
        (sums,) = await session.root("sums")
        events = [event async for event in agent.stream(sums, "What is 31 + 47?")]
        (returned,) = [event for event in events if isinstance(event, Returned)]
        assert (returned.call.name, returned.text) == ("calculator", "78")
        answer: Any = events[-1]
        assert (answer.text, answer.reason) == ("31 + 47 = 78", "stop")
        first, last = answer.results
        assert last.usage.cached >= first.position - 1  # a step computes what is new
        state = await sums.tree()
        assert state.retain_s == agent.retain_s

        (forced,) = await session.root("forced")
        answer = await agent.run(forced, "Hello", tool_choice="search")
        assert answer.calls[0].call.name == "search"
        assert answer.results[0].reason == "tool"
        (fresh,) = await session.root("fresh")
        answers = await agent.delegate(fresh, ["What is 90 - 34?", "Who is Clara?"])
        assert [a.calls[0].call.name for a in answers] == ["calculator", "search"]
        assert {branch.name for branch in session.branches} >= {"sums", "forced"}


async def test_a_result_is_computed_before_it_is_asked_for(bundled: str) -> None:
    agent = Agent([search])
    async with agent.connect(bundled) as session:
        main = session.main
        await main.say("Who is Clara?")
        call = await main.generate(temperature=0.0, max_tokens=80)
        assert call.reason == "tool"
        assert call.tool_calls is not None
        result = {"role": "tool", "tool_call_id": call.tool_calls[0]["id"], "content": "word " * 200}
        await main.append(messages=[result])
        while (await main.tree()).resident != main.position:
            await asyncio.sleep(0.02)
        answer = await main.generate(temperature=0.0, max_tokens=4)
        assert answer.usage.computed == 1


@pytest.mark.parametrize(
    ("name", "seen"), [("agent.py", "Action: finish[78]"), ("tools.py", "31 + 47 = 78")]
)
async def test_the_examples_on_the_bundled_model(bundled: str, name: str, seen: str) -> None:
    code, output = await run(name, "--url", bundled)
    assert code == 0, output
    assert seen in output


async def test_the_examples_read_files(bundled: str, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "cd", "description": "Tool description: Go"}}]
    call = {"name": "cd", "arguments": {"folder": "a"}, "result": "in a"}
    turns = [
        {"messages": [{"role": "user", "content": "Go to a"}], "expected_calls": [call]},
        {"messages": [], "expected_calls": [], "tools_added": ["cd"]},
    ]
    lines = [
        {"kind": "toolset", "name": "files", "tools": tools},
        {"kind": "conversation", "id": "1", "toolsets": ["files"], "turns": turns},
    ]
    conversations = tmp_path / "conversations.jsonl"
    conversations.write_text("".join(json.dumps(each) + "\n" for each in lines))
    steps = [
        {"thought": "T", "action": "Search[Clara]", "observation": "Clara is a baker."},
        {"thought": "T", "action": "Finish[baker]"},
    ]
    traces = tmp_path / "traces.jsonl"
    traces.write_text(json.dumps({"question": "What is the job of Clara?", "steps": steps}))
    code, output = await run("tools.py", "--url", bundled, "--data", str(conversations), "--force")
    assert code == 0, output
    assert "1 conversations, 2 turns (0 ended with an error)" in output
    code, output = await run("agent.py", "--url", bundled, "--data", str(traces))
    assert code == 0, output
    assert "1 answers are those of the traces" in output


async def run(name: str, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "examples" / name),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_tools_are_told_once(serving: Any) -> None:
    """A session opened without them cannot run the agent; the server is not asked."""
    async with serving() as served, connect(served.engine.url) as session:
        with pytest.raises(ValueError, match="does not know the tool 'calculator'"):
            await Agent([calculator]).run(session.main, "Go")
