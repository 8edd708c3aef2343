"""An agent's turn in programs, against a server whose model says what a test wants."""

from typing import Any

import pytest

from ramify.clients.agent import Agent, act, tool
from ramify.clients.program import (
    AsyncState,
    NotOneFrame,
    Program,
    State,
    assistant,
    gen,
    program,
    user,
)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


AGENT = Agent([add])
SETTINGS: dict[str, Any] = {"tools": AGENT.schemas, "parts": True}


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def sums(line: Any) -> list[Any]:
    """What the model says in a turn with one call."""
    return [line("Let me see. ", [call("add", '{"a": 2, "b": 3}')], content="Let me see."), line("5")]


@program
def plain(s: State) -> tuple[str, str, str]:
    s += user("Before.")
    answer = act(s, AGENT, "What is 2 + 3?", name="sum")
    s += user("And?") + assistant(gen("more", max_tokens=5))
    return answer.text, s["sum"], s["more"]


@program
async def waiting(s: AsyncState) -> tuple[str, str, str]:
    s += user("Before.")
    answer = await act(s, AGENT, "What is 2 + 3?", name="sum")
    s += user("And?") + assistant(gen("more", max_tokens=5))
    return answer.text, await s["sum"], await s["more"]


@pytest.mark.parametrize("compiled", ["auto", False])
@pytest.mark.parametrize("written", [plain, waiting])
async def test_all_of_the_turn_is_told(
    server: Any, url: str, line: Any, written: Program[[], Any], compiled: Any
) -> None:
    server.script += [*sums(line), line("No.")]
    run = await written.using(url, connect=SETTINGS, compiled=compiled).arun()
    assert run.value == ("5", "5", "No. ")
    assert run["sum"] == "5"
    assert run.results["sum"].reason == "stop"
    told = [(each.role, each.content) for each in run.messages]
    assert told == [
        ("user", "Before."),
        ("user", "What is 2 + 3?"),
        ("assistant", "Let me see."),
        ("tool", "5"),
        ("assistant", "5"),
        ("user", "And?"),
        ("assistant", "No. "),
    ]
    calls = run.messages[2].tool_calls
    assert calls is not None
    assert calls[0]["function"]["name"] == "add"
    assert run.messages[3].tool_call_id == "c1"


async def test_forks_joins_and_marks_know_it(server: Any, url: str, line: Any) -> None:
    @program
    async def work(s: AsyncState) -> list[str]:
        s += user("Before.")
        mark = s.mark()
        forks = s.fork(2)
        server.script += [*sums(line), line("six")]
        for fork in forks:
            await act(fork, AGENT, "What is 2 + 3?")
        forks.join(each="<{text}>", role=None)
        texts = [await s.text()]
        server.script += [line("seven")]
        await act(s, AGENT, "Now?", name="last")
        texts.append(await s["last"])
        texts.append("".join([text async for text in s["last"]]))
        s.rollback(mark)
        texts.append(await s.text())
        assert "last" not in s
        return texts

    run = await work.using(url, connect=SETTINGS).arun()
    assert run.value == ["Before.<5><six>", "seven", "seven", "Before."]


async def test_whoever_listens_hears_the_agent(server: Any, url: str, line: Any) -> None:
    server.script += [*sums(line), line("No.")]
    pieces = [piece async for piece in plain.using(url, connect=SETTINGS).astream()]
    assert "".join(piece.text for piece in pieces if piece.name == "sum") == "Let me see. 5 "
    assert "".join(piece.text for piece in pieces if piece.name == "more") == "No. "


@pytest.mark.parametrize("written", [plain, waiting])
async def test_it_is_no_part_of_a_frame(url: str, written: Program[[], Any]) -> None:
    with pytest.raises(NotOneFrame, match=r"an agent's turn at .*test_program.py:\d+"):
        await written.using(url, connect=SETTINGS, compiled=True).arun()
    graph = await written.atrace()
    assert not graph.whole
    (why,) = graph.stops
    assert "test_program.py" in why
    assert "an agent's turn" in why
