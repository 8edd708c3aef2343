"""A child process: its link, its end however it comes, and what is left of it."""

import asyncio
import os
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from ramify.actors.processes.child_process import ChildProcess

CHILD = """
import socket
import sys
import time

import msgspec

from ramify.actors.links.blocking import BlockingLink

fd, begin = int(sys.argv[1]), int(sys.argv[4])
link = BlockingLink(socket.socket(fileno=fd), msgspec.msgpack.Decoder(int), msgspec.msgpack.Encoder())
while True:
    number = link.receive(None)
    if number < 0:
        time.sleep(100)
    link.send(begin + number)
    if not number:
        link.finish(1.0)
        sys.exit(3)
"""


class Started:
    def __init__(self) -> None:
        self.heard: list[int] = []
        self.news = asyncio.Event()
        self.process: ChildProcess[int, int]

    def receive(self, message: int) -> None:
        self.heard.append(message)
        self.process.link.consumed()
        self.news.set()


@pytest.fixture
async def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "echo_child.py").write_text(CHILD)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    each = Started()
    each.process = await ChildProcess.start(
        "echo",
        "echo_child",
        msgspec.msgpack.Decoder(int),
        msgspec.msgpack.Encoder(),
        each.receive,
        arguments=["40"],
    )
    yield each
    each.process.kill()
    await each.process.ended()


async def test_what_it_sent_before_its_end_is_received(started: Started) -> None:
    with anyio.fail_after(60):
        started.process.link.tell(2)
        started.process.link.tell(0)
        code = await started.process.ended()
    assert code == started.process.exit_code == 3
    assert started.heard == [42, 40]
    assert not started.process.killed
    text = started.process.explain(code)
    assert text == f"its process {started.process.pid} ended with exit code 3; see its log"


async def test_one_that_hangs_is_killed(started: Started) -> None:
    with anyio.fail_after(60):
        started.process.link.tell(-1)
        started.process.kill()
        code = await started.process.ended()
    assert started.process.killed
    assert "was killed by SIGKILL" in started.process.explain(code)


async def test_one_that_nobody_waits_for_is_killed(started: Started) -> None:
    with anyio.fail_after(60):
        started.process.link.tell(1)
        await started.news.wait()
        with anyio.move_on_after(0):
            await started.process.ended()
    assert started.process.exit_code == -9
    assert started.process.link.closed


async def test_one_that_nobody_waits_for_is_dismissed_first(started: Started) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(started.process.ended, lambda: started.process.link.tell(0))
        await asyncio.sleep(0)
        group.cancel_scope.cancel()
    assert started.process.exit_code == 3
    assert not started.process.killed


async def test_a_module_that_does_not_exist_ends_at_once(tmp_path: Path) -> None:
    with anyio.fail_after(60):
        process: ChildProcess[int, int] = await ChildProcess.start(
            "nobody",
            "ramify_no_such_module",
            msgspec.msgpack.Decoder(int),
            msgspec.msgpack.Encoder(),
            lambda message: None,
        )
        assert await process.ended() == 1
