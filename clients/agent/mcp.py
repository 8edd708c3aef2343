"""Tools of an MCP server (Model Context Protocol), through the package `mcp` (`ramify[mcp]`).

    async with mcp_tools("http://127.0.0.1:9000/mcp") as tools:
        agent = Agent(tools)

The connection lives as long as the block.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from ramify.clients.agent.tools import Context, Tool, as_text

MOST_TOOLS = 1024  # that a session takes


class ToolFailed(Exception):
    """The server says that the call failed; its words go to the model."""


@asynccontextmanager
async def mcp_tools(server: Any, *, prefix: str = "", **settings: Any) -> AsyncIterator[list[Tool]]:
    """Connect to a server, and give its tools.

    `server`: what `mcp.Client` takes: a URL, `StdioServerParameters`, a transport, or a server in this
    process; `settings` are its other arguments. `prefix`: before each tool's name, where several servers
    have tools of one name. Raises ImportError that says what to install.
    """
    try:
        client_of = import_module("mcp").Client
    except ImportError as error:
        raise ImportError(
            "tools of an MCP server need the package `mcp`: "
            f"{sys.executable} -m pip install 'ramify[mcp]'"
        ) from error
    async with client_of(server, **settings) as client:
        tools: list[Tool] = []
        cursor: str | None = None
        cursors: set[str] = set()
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += [_tool(client, each, prefix) for each in page.tools]
            if len(tools) > MOST_TOOLS:
                raise ToolFailed(f"the server offers more than {MOST_TOOLS} tools")
            cursor = page.next_cursor
            if cursor is None:
                break
            if cursor in cursors or len(cursors) == MOST_TOOLS:
                raise ToolFailed("the server's list of tools comes to no end")
            cursors.add(cursor)
        yield tools


def _tool(client: Any, offered: Any, prefix: str) -> Tool:
    async def run(arguments: dict[str, Any], context: Context) -> str:
        result = await client.call_tool(offered.name, arguments)
        text = "\n".join(_text(part) for part in result.content)
        if not text and result.structured_content is not None:
            text = as_text(result.structured_content)
        if result.is_error:
            raise ToolFailed(text)
        return text

    return Tool(prefix + offered.name, offered.description or "", offered.input_schema, run)


def _text(part: Any) -> str:
    """Return the text of a piece of a result. What is no text is named, as the model cannot see it."""
    text = getattr(part, "text", None)
    return (
        text if isinstance(text, str) else f"[{getattr(part, 'type', 'content')} that cannot be shown]"
    )
