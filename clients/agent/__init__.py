"""Agents: a model that calls tools, in a loop, on a branch.

    from ramify.clients.agent import Agent, tool

    @tool
    def add(a: float, b: float) -> float:
        \"\"\"Add two numbers.\"\"\"
        return a + b

    agent = Agent([add])
    async with agent.connect("ws://127.0.0.1:8765/v1/ws") as session:
        answer = await agent.run(session.main, "What is 2 + 3?")
        print(answer.text)

`tools` makes tools of functions, `mcp` of what an MCP server offers; `agent` is the loop, `calls` runs
the tools of one step, `transcript` what was said and done, `replay` does it again; `sync` is the loop
without `await`, `program` an agent's turn inside a program.
"""

from ramify.clients.agent.agent import Agent, Answer, Event
from ramify.clients.agent.calls import Approve, Called, Returned
from ramify.clients.agent.mcp import mcp_tools
from ramify.clients.agent.program import act
from ramify.clients.agent.replay import Difference, Replay
from ramify.clients.agent.sync import SyncAgent
from ramify.clients.agent.tools import Context, Tool, ToolCall, tool
from ramify.clients.agent.transcript import Transcript
from ramify.clients.stream import TextDelta

__all__ = [
    "Agent",
    "Answer",
    "Approve",
    "Called",
    "Context",
    "Difference",
    "Event",
    "Replay",
    "Returned",
    "SyncAgent",
    "TextDelta",
    "Tool",
    "ToolCall",
    "Transcript",
    "act",
    "mcp_tools",
    "tool",
]
