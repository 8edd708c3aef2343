"""Which large packages the processes of a server import: each costs a second of CPU at its start."""

import json
import os
import signal
import sys
from pathlib import Path

import anyio
import pytest

from ramify.clients import connect

PATIENCE = 120.0
# Python runs this in each process: what is written down is the process, and what it imported at its end.
SITE = """
import atexit, json, os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("transformers", "torch", "huggingface_hub", "matplotlib", "rich"):
            with open(os.environ["IMPORTS"], "a") as file:
                file.write(json.dumps([name, os.getpid(), sys.argv, sys.orig_argv]) + "\\n")
sys.meta_path.insert(0, Watch())
with open(os.environ["IMPORTS"], "a") as file:
    file.write(json.dumps(["start", os.getpid(), sys.argv, sys.orig_argv]) + "\\n")
"""


async def test_only_the_executor_imports_torch_and_nobody_transformers(tmp_path: Path) -> None:
    """With the bundled model, its template and a constraint, in all processes of a server."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "IMPORTS": str(tmp_path / "imports")}
    process = await anyio.open_process(
        [
            *(sys.executable, "-m", "ramify.clients.cli", "serve", "--port", "0", "--threads", "1"),
            *("--executor", "process", "--gateways", "1", "--log-format", "json"),
        ],
        env=environment,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        with anyio.fail_after(PATIENCE):
            text = b""
            while b"ready: ws" not in text:
                text += await process.stdout.receive()
            url = "ws" + text.decode().partition("ready: ws")[2].split('"')[0].split("\\n")[0].split()[0]
            async with connect(url) as session:
                answer = session.main.chat("hi", max_tokens=4, constraint={"regex": "[ab]{4}"})
                assert set((await answer).text) <= {"a", "b"}
        process.send_signal(signal.SIGTERM)
        with anyio.fail_after(PATIENCE):
            async with process.stdout, process.stderr:
                async for _ in process.stdout:
                    pass
                await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.aclose()
    seen = [json.loads(line) for line in (tmp_path / "imports").read_text().splitlines()]
    pids = {pid for name, pid, *_ in seen if name == "start"}
    assert len(pids) >= 4  # the engine, the gateway, the executor, who compiles
    imported = {name: {pid for each, pid, *_ in seen if each == name} for name, *_ in seen}
    assert imported.keys() == {"start", "torch"}, seen
    (executor,) = imported["torch"]
    (arguments,) = (line[3] for line in seen if line[:2] == ["start", executor])
    assert any("executor" in each for each in arguments)


@pytest.mark.parametrize("command", [["--version"], ["serve", "--help"], ["chat", "--help"]])
async def test_a_command_line_that_serves_nothing(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "IMPORTS": str(tmp_path / "imports")}
    await anyio.run_process([sys.executable, "-m", "ramify.clients.cli", *command], env=environment)
    (line,) = (tmp_path / "imports").read_text().splitlines()
    assert json.loads(line)[0] == "start"
