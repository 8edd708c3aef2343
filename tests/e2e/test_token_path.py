"""`benchmarks/token_path.py`: a token's way through the server stays short."""

import importlib
import logging
from pathlib import Path
from types import ModuleType

import pytest

MOST_CALLS = 725  # of a request of two tokens; it takes 715, or some more where steps wait
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def token_path(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("token_path")


def test_moves_are_changes_of_the_file(token_path: ModuleType) -> None:
    tracer = importlib.import_module("call_tracer")
    calls = [tracer.EnteredCall(file, "f") for file in ("a", "a", "b", "a")]
    assert tracer.figures(tracer.Way(calls)) == token_path.Figures(4, 2, 2)


async def test_a_token_a_first_delta_and_a_request(
    token_path: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who makes a way longer finds it here: `token_path.py --list` shows it, or `--list request`."""
    caplog.set_level(logging.WARNING, "ramify")  # as it is without the tests before this one
    token, delta, request, chat = await token_path.measure(tmp_path, 60)
    found = token_path.figures(token)
    assert found.files <= 23, token.files
    assert found.moves <= 40
    assert found.calls <= 54
    assert len(delta.files) <= 75
    assert len(chat.files) <= 103
    assert token.calls[0].name == "ThreadExecutor._collect"
    assert token.calls[-1].name == "WebSocketConnection.flush"
    assert token_path.figures(request).calls <= MOST_CALLS
    assert request.calls[0].name == "TcpConnection.data_received"
    assert request.calls[-1].name == "WebSocketConnection.flush"
