"""assistant-ui (React, in Node) over both transports. Needs `npm ci` in tests/e2e/assistant_ui."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

FOLDER = Path(__file__).parent / "assistant_ui"
SOCKETS = "--experimental-websocket"  # what Node 20 needs, and later ones ignore


def run(address: str, way: str) -> Any:
    command = ["node", SOCKETS, "--no-warnings", "suite.mjs", address, way]
    result = subprocess.run(command, cwd=FOLDER, capture_output=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr.decode()[-4000:]
    return json.loads(result.stdout)


@pytest.mark.skipif(
    shutil.which("node") is None or not (FOLDER / "node_modules").is_dir(),
    reason="needs node, and `npm ci` in tests/e2e/assistant_ui",
)
@pytest.mark.parametrize("way", ["websocket", "ramify"])
async def test_a_thread_of_assistant_ui(serving: Any, way: str) -> None:
    async with serving() as served:
        out = await anyio.to_thread.run_sync(run, f"ws://127.0.0.1:{served.engine.port}", way)
        oracle = served.oracle
        prompt = oracle.turn("Hello.")
        tokens = oracle.output(prompt, 8)
        hello = oracle.text(tokens).strip()
        then = oracle.text(oracle.output(oracle.next_turn([*prompt, *tokens], "And then?"), 8)).strip()
        other = oracle.text(oracle.output(oracle.turn("Something else."), 8)).strip()
    assert texts(out["first"]) == ["Hello.", hello]
    assert [each.get("status") for each in out["first"]] == [None, "complete"]
    assert texts(out["second"])[:3] == ["Hello.", hello, "And then?"]
    assert texts(out["edited"]) == ["Something else.", other]
    assert out["edited"][0]["branch"] == [2, 2]
    assert texts(out["back"])[:2] == ["Hello.", hello]  # nothing of it is lost
    assert texts(out["further"])[:2] == ["Hello.", hello]
    assert out["further"][-1]["role"] == "assistant"
    if way == "ramify":
        assert texts(out["second"])[3] == then
        assert len([each for each in out["branches"] if each["branch"] != "main"]) >= 2


def texts(messages: list[dict[str, Any]]) -> list[str]:
    return [each["text"].strip() for each in messages]
