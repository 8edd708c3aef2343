"""Tools of an MCP server in this process, where the package is installed."""

import sys
import warnings
from typing import Any

import pytest

from ramify.clients.agent import Agent, mcp_tools
from ramify.clients.agent.calls import Runner
from ramify.clients.agent.tools import Context, ToolCall
from ramify.clients.agent.transcript import Did


def offered() -> Any:
    from mcp.server import MCPServer

    server = MCPServer("shop")

    @server.tool()
    def price(item: str, count: int = 1) -> str:
        """The price of an item."""
        if item == "moon":
            raise ValueError("not for sale")
        return f"{count} {item}: {3 * count} euros"

    @server.tool()
    def stock() -> dict[str, int]:
        """What there is."""
        return {"apple": 3}

    return server


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        # not where the file is read: that is in each of the processes that share the tests
        pytest.importorskip("mcp", reason="the package mcp is not installed: pip install ramify[mcp]")
        yield


async def test_the_tools_of_a_server_are_tools() -> None:
    async with mcp_tools(offered(), prefix="shop_") as tools:
        agent = Agent(tools)
        assert sorted(agent.tools) == ["shop_price", "shop_stock"]
        schema = agent.tools["shop_price"].schema["function"]
        assert schema["description"] == "The price of an item."
        assert schema["parameters"]["required"] == ["item"]
        runner = Runner(agent.tools, timeout_s=10, approve=None, parallel=2)
        done: dict[str, Did] = {}
        asked = [
            ("shop_price", '{"item": "apple", "count": 2}'),
            ("shop_price", '{"item": "moon"}'),
            ("shop_stock", "{}"),
        ]
        branch: Any = None
        calls = [Context(branch, ToolCall(str(i), *each)) for i, each in enumerate(asked)]
        await runner.run(calls, lambda event: None, done)
    assert done["0"].text == "2 apple: 6 euros"
    assert done["1"].text.startswith("Error: ToolFailed: ")
    assert not done["1"].ok
    assert '"apple"' in done["2"].text


async def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("ramify.clients.agent.mcp.import_module", missing)
    with pytest.raises(ImportError, match=rf"{sys.executable} -m pip install 'ramify\[mcp\]'"):
        async with mcp_tools("http://127.0.0.1:1/mcp"):
            pass
