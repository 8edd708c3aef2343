"""Replicas on a local Ray cluster. Skipped where Ray is not installed (the extra `ray`)."""

import asyncio
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'ramify[ray]'"
)
PATIENCE = 120.0  # Ray takes its time
TOKENS = 600


@pytest.mark.parametrize("gateways", ["0", "2"])
async def test_ray_starts_replicas_and_starts_a_dead_one_again(
    tmp_path: Path, peers: Any, gateways: str
) -> None:
    """The text of a stream is that of a server without replicas' own, whichever replica says it."""
    log = tmp_path / "log"
    program = [sys.executable, "-P", "-m", "ramify.clients.cli", "serve", "--device", "cpu"]
    program += ["--threads", "1", "--port", "0", "--store", "none", "--replicas", "2"]
    program += ["--gateways", gateways]
    server = start([*program, "--replicas-on", "ray"], log)
    try:
        url = await until(lambda: re.search(r"^ready: (\S+)$", log.read_text(), re.MULTILINE), server)
        url = url[1]
        info = url.replace("ws://", "http://").replace("/v1/ws", "/v1/info")
        await until(lambda: len(ready(info)) == 2, server)
        texts = []
        for killed in (False, True):
            async with peers(url) as peer:
                await peer.open(peer.user(1, "Tell me a story."))
                await peer.send(peer.greedy(2, max_tokens=TOKENS, ignore_eos=True))
                await peer.next("delta")
                if killed:
                    # a gateway process hears of the replicas four times a second
                    (busy,) = await until(lambda: busy_ones(info), server)
                    os.kill(busy, signal.SIGKILL)
                assert (await peer.terminal(2))["usage"]["output"] == TOKENS
                texts.append(peer.text())
                await peer.send({"type": "close", "id": 3})
        assert texts[0] == texts[1]
        await until(lambda: len(ready(info)) == 2, server)
        server.send_signal(signal.SIGTERM)
        await until(lambda: server.poll() is not None, None)
        assert server.returncode == 0, log.read_text()
    finally:
        server.kill()
        server.wait()


def start(program: list[str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as out:
        return subprocess.Popen(program, stdout=out, stderr=out, start_new_session=True)


def ready(info: str) -> list[dict[str, Any]]:
    """The replicas that are."""
    with urllib.request.urlopen(info, timeout=10) as answer:
        return [each for each in json.load(answer)["replicas"] if each["state"] == "ready"]


def busy_ones(info: str) -> list[int]:
    """The processes of the replicas with sessions."""
    return [each["pid"] for each in ready(info) if each["sessions"]]


async def until(condition: Any, server: Any) -> Any:
    async with asyncio.timeout(PATIENCE):
        while not (found := await asyncio.to_thread(condition)):
            assert server is None or server.poll() is None, "the server has ended"
            await asyncio.sleep(0.1)
    return found
