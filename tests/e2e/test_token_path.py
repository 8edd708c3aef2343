"""`benchmarks/token_path.py`: a token's way through the server stays short."""

import asyncio
import importlib
import json
import os
import sys
from pathlib import Path

import pytest

MOST_CALLS = 722  # of a request of two tokens; it takes 718
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_moves_are_changes_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    tracer = importlib.import_module("call_tracer")
    calls = [tracer.EnteredCall(file, "f") for file in ("a", "a", "b", "a")]
    assert tracer.figures(tracer.Way(calls)) == tracer.Figures(4, 2, 2)


async def test_a_token_a_first_delta_and_a_request(tmp_path: Path) -> None:
    """Who makes a way longer finds it here: `token_path.py --list` shows it, or `--list request`.

    In a process of its own: what other tests have left to be collected would be counted here.
    """
    found = tmp_path / "found.json"
    script = [sys.executable, BENCHMARKS / "token_path.py", "--tokens", "60", "--json", found]
    path = os.pathsep.join(each for each in sys.path if each)
    process = await asyncio.create_subprocess_exec(*script, env=os.environ | {"PYTHONPATH": path})
    assert await process.wait() == 0
    ways = json.loads(found.read_text())
    token, request = ways["token"], ways["request"]
    assert token["files"] <= 23, token
    assert token["moves"] <= 40
    assert token["calls"] <= 53
    assert ways["first_delta"]["files"] <= 75
    assert ways["chat"]["files"] <= 103
    assert token["way"][0]["name"] == "ThreadExecutor._collect"
    assert token["way"][-1]["name"] == "WebSocketConnection.flush"
    assert request["calls"] <= MOST_CALLS
    assert request["way"][0]["name"] == "TcpConnection.data_received"
    assert request["way"][-1]["name"] == "WebSocketConnection.flush"
