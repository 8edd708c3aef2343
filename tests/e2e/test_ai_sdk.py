"""The real package `ai` (Vercel AI SDK v7) in Node: its own WebSocket transport, and ours.

Needs `npm ci` in clients/web.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

WEB = Path(__file__).resolve().parents[2] / "clients/web"
SOCKETS = "--experimental-websocket"  # what Node 20 needs, and later ones ignore
needs_package = pytest.mark.skipif(
    shutil.which("node") is None or not (WEB / "node_modules/ai").is_dir(),
    reason="needs node, and `npm ci` in clients/web",
)


def run(address: str, way: str) -> Any:
    command = ["node", SOCKETS, "--no-warnings", "test/ai.js", address, way]
    result = subprocess.run(command, cwd=WEB, capture_output=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr.decode()
    return json.loads(result.stdout)


@needs_package
@pytest.mark.parametrize("way", ["websocket", "ramify"])
async def test_the_sdks_chat(serving: Any, way: str) -> None:
    async with serving(fake={"step_seconds": 0.002}) as served:
        address = f"ws://127.0.0.1:{served.engine.port}"
        out = await anyio.to_thread.run_sync(run, address, way)
        oracle = served.oracle
        prompt = oracle.turn("Hello.")
        tokens = oracle.output(prompt, 8)
        hello = oracle.text(tokens).strip()
        then = oracle.text(oracle.output(oracle.next_turn([*prompt, *tokens], "And then?"), 8)).strip()
        other = oracle.text(oracle.output(oracle.turn("Something else."), 8)).strip()
        sides = [oracle.text(oracle.output(oracle.turn(f"Question {i}?"), 6)).strip() for i in range(6)]
        whole = oracle.text(oracle.output(oracle.turn("Tell me."), 200)).strip()
    turns = out["turns"]
    assert said(turns["first"]) == ["Hello.", hello]
    assert (turns["first"]["status"], turns["first"].get("error")) == ("ready", None)
    assert turns["first"]["usage"]["outputTokens"] == 8
    if way == "ramify":  # the branch has the very tokens; a history that comes as text is tokenized anew
        assert said(turns["second"]) == ["Hello.", hello, "And then?", then]
        assert turns["again"]["texts"] == turns["second"]["texts"]
        assert turns["second"]["usage"]["cachedInputTokens"] >= len(prompt) + 7
    assert turns["second"]["usage"]["cachedInputTokens"] > len(prompt) - 2
    assert said(turns["edited"]) == ["Something else.", other]
    assert said(turns["back"]) == ["Hello.", hello]
    assert turns["back"]["usage"]["cachedInputTokens"] == len(prompt) - 1
    reasons = [end["finishReason"] for end in turns["ends"]]
    assert reasons == ["length"] * 5
    stopped = out["stopped"]
    assert [end["isAbort"] for end in stopped["ends"]] == [True, False]
    assert (stopped["roles"], stopped["status"]) == (["user", "assistant"] * 2, "ready")
    assert len(stopped["texts"][1]) > 20
    wrong = out["wrong"]
    assert wrong["wrong"]["status"] == "error"
    assert "temprature" in wrong["wrong"]["error"]
    assert (wrong["mended"]["status"], wrong["mended"]["roles"]) == ("ready", ["user", "assistant"])
    assert [texts[1].strip() for texts in out["side"]] == sides
    assert said(out["resumed"]) == ["Tell me.", whole]
    assert out["resumed"]["same"] is True
    assert (out["resumed"]["nothing"]["status"], out["resumed"]["nothing"]["roles"]) == ("ready", [])
    if way == "ramify":
        branches = {each["branch"]: each for each in out["branches"]}
        chats = [name for name in branches if name != "main"]
        assert len(chats) == 4  # the first one; its retry, the edit, and the way back
        assert sum(each.get("parent") in chats for each in branches.values()) == 2


def said(chat: dict[str, Any]) -> list[str]:
    return [text.strip() for text in chat["texts"]]
