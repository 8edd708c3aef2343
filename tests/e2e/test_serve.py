"""`ramify serve` as an operator runs it: signals, files of tokens, logs in JSON."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import websockets

PATIENCE = 60.0


class Lines:
    """What a process writes, line by line."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self.all: list[str] = []
        self.came = asyncio.Event()
        self.task = asyncio.create_task(self._read(stream))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            self.all.append(line.decode())
            self.came.set()

    async def record(self, message: str) -> dict[str, Any]:
        """The first record whose message begins like this; every line is one."""
        async with asyncio.timeout(PATIENCE):
            while True:
                self.came.clear()
                for line in self.all:
                    record: dict[str, Any] = json.loads(line)
                    if record["message"].startswith(message):
                        return record
                await self.came.wait()


def write(path: Path, *names: str) -> None:
    path.write_text("".join(json.dumps({"name": n, "token": f"{n}-secret"}) + "\n" for n in names))
    path.chmod(0o600)


@pytest.mark.parametrize(
    "layout", [("--executor", "thread", "--gateways", "0"), ("--executor", "process", "--gateways", "1")]
)
async def test_tokens_signals_and_logs(
    peers: Any, llama_folder: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    """Each line of the log is JSON, whatever happens; no secret is in it."""
    tokens = tmp_path / "tokens"
    write(tokens, "alice", "bob")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ramify.clients.cli", "serve", "--model", str(llama_folder)),
        *("--device", "cpu", "--threads", "1", "--port", "0", "--log-format", "json", *layout),
        *("--auth-tokens", str(tokens), "--log-level", "debug"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = Lines(process.stdout), Lines(process.stderr)
    try:
        url = (await out.record("ready: "))["message"].removeprefix("ready: ")

        def connect(name: str) -> Any:
            return peers(url, additional_headers={"Authorization": f"Bearer {name}-secret"})

        async with connect("alice") as alice, connect("bob") as bob:
            await bob.open()
            tokens.write_text("{")
            process.send_signal(signal.SIGHUP)
            assert "line 1: not a JSON object" in (await err.record("the old tokens stay"))["reason"]
            write(tokens, "alice", "carol")
            process.send_signal(signal.SIGHUP)
            assert await bob.closed() == 4401
            assert (await err.record("tokens were read again"))["names"] == 2
            await alice.open(alice.user(1, "go"), alice.greedy(2, max_tokens=4, ignore_eos=True))
            assert (await alice.terminal(2))["reason"] == "length"
            assert (await err.record("session opened"))["owner"] in ("alice", "bob")
            if "process" in layout:
                os.kill((await err.record("gateway process started"))["pid"], signal.SIGKILL)
                assert "SIGKILL" in (await err.record("a gateway process failed"))["reason"]
                with pytest.raises(websockets.ConnectionClosed):
                    await alice.ws.recv()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
        await asyncio.gather(out.task, err.task)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    for line in [*out.all, *err.all]:
        assert json.loads(line)["level"] in ("debug", "info", "warning", "error"), line
        assert "Traceback" not in line, line
        assert "-secret" not in line


async def test_errors_of_the_start_are_json_too(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ramify.clients.cli", "serve", "--log-format", "json", "--auth-token="),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert (process.returncode, out) == (2, b"")
    (record,) = map(json.loads, err.splitlines())
    assert "--auth-token is empty" in record["message"]
