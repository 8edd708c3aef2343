"""What breaks inside: an executor that is killed, a session or a core actor that raises, a signal."""

import asyncio
import io
import math
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ramify.actors.cache.cache import RadixCache
from ramify.actors.engine import EngineFailed
from ramify.actors.executor.spec import FactorySpec
from ramify.actors.processes.messages import NotStarted
from ramify.actors.session.core import SessionCore
from ramify.protocol.messages import Frame
from ramify.protocol.pictures import MARK
from ramify.protocol.wire import Append

SLOW = {"step_seconds": 0.002}
PATIENCE = 30.0


class Running:
    """An engine in a task of its own, so that its failure does not cancel the test's clients."""

    def __init__(self, serving: Any, **settings: Any) -> None:
        self._serving = serving
        self._settings = settings

    async def __aenter__(self) -> Any:
        started: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._run(started))
        await asyncio.wait([self.task, started], return_when=asyncio.FIRST_COMPLETED)
        return await started

    async def _run(self, started: asyncio.Future[Any]) -> None:
        async with self._serving(**self._settings) as served:
            started.set_result(served)
            await asyncio.Event().wait()

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    async def failure(self) -> BaseException | None:
        """The engine's, which must come within seconds."""
        done, _ = await asyncio.wait([self.task], timeout=PATIENCE)
        assert done
        return self.task.exception()


def broken(*_: object) -> None:
    raise RuntimeError("injected")


def is_internal(end: dict[str, Any]) -> bool:
    """An end that says that it is the server's fault."""
    return end.get("error" if end["type"] == "done" else "code") == "internal"


@pytest.mark.parametrize("gateways", [0, 2])
async def test_a_killed_executor_ends_nothing(serving: Any, gateways: int) -> None:
    """Everything goes on from its last token in another one, and nobody sees more than a pause."""
    settings = {"executor": "process", "gateways": gateways, "fake": SLOW, "limits": {"running": 2}}
    async with serving(**settings) as served:
        async with served.connect() as peer, served.connect("msgpack") as other:
            names = [f"b{i}" for i in range(4)]  # of which two run and the rest wait in the session
            await other.open(other.user(1, "me too"), other.greedy(2, max_tokens=600), client="other")
            await peer.open(
                peer.user(1, "go"),
                {"type": "fork", "id": 2, "as": names},
                peer.greedy(3, branch=names, max_tokens=600),
                peer.user(4, "queued", branch="b0"),
            )
            for _ in range(2):
                await served.goes_on(10)
                os.kill(pid := served.engine.executor.pid, signal.SIGKILL)
                async with asyncio.timeout(PATIENCE):
                    while served.engine.executor.pid == pid or not served.engine.executor.alive:
                        await asyncio.sleep(0.01)
            ends = await peer.terminals(3, names)
            assert [end["reason"] for end in ends.values()] == ["length"] * 4
            assert (await other.terminal(2))["reason"] == "length"
            assert (await peer.terminal(4))["type"] == "ok"
            prompt = served.oracle.turn("go")
            text = served.oracle.text(served.oracle.output(prompt, 600))
            assert {peer.text(name) for name in names} == {text}
            assert "ramify_executor_deaths_total 2.0" in (await served.request("GET", "/metrics"))[1]


async def test_an_executor_that_does_not_start_again_ends_the_engine(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request gets its end, each socket 1012, the engine EngineFailed; nothing stays."""
    monkeypatch.setattr("ramify.actors.keeper.BACK_OFF_SECONDS", 0.01)
    engine = Running(serving, executor="process", fake=SLOW)
    async with engine as served:

        async def broken(progress: object) -> None:
            raise NotStarted("no memory is left")

        monkeypatch.setattr(served.engine.core._keeper, "_start", broken)
        async with served.connect() as peer:
            await peer.open(peer.user(1, "go"), peer.greedy(2, max_tokens=3000))
            await peer.send(peer.greedy(3))
            await peer.next("delta")
            os.kill(served.engine.executor.pid, signal.SIGKILL)
            assert is_internal(await peer.terminal(2))
            assert is_internal(await peer.terminal(3))
            assert await peer.closed() == 1012
        failure = str(await engine.failure())
        assert "SIGKILL" in failure
        assert "no memory is left" in failure


async def test_a_gateway_without_credits_tells_every_end(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still while the core failed: the ends, and what waits behind them, are not lost."""
    engine = Running(serving, gateways=1, fake=SLOW, limits={"running": 2})
    async with engine as served:
        (worker,) = served.engine.front.workers
        async with served.connect() as peer:
            names = [f"b{i}" for i in range(5)]  # three wait in the session for the end of the others
            await peer.open(
                peer.user(1, "go"),
                {"type": "fork", "id": 2, "as": names},
                peer.greedy(3, branch=names, max_tokens=3000),
                peer.user(4, "queued", branch="b4"),
            )
            await peer.next("delta")
            os.kill(worker.process.child.pid, signal.SIGSTOP)
            try:
                async with asyncio.timeout(PATIENCE):
                    while worker.process.child.link.credits:
                        await asyncio.sleep(0.01)
                    monkeypatch.setattr(RadixCache, "settle", broken)
                    while served.engine.status.phase != "failed":
                        await asyncio.sleep(0.01)
            finally:
                os.kill(worker.process.child.pid, signal.SIGCONT)
            ends = await peer.terminals(3, names)
            assert all(map(is_internal, ends.values()))
            assert (await peer.terminal(4))["code"] == "skipped"
            assert await peer.closed() == 1012
            seen = [(m["id"], m.get("branch")) for m in peer.log if m["type"] in ("done", "error")]
            assert len(seen) == len(set(seen)) == 6
        assert isinstance(await engine.failure(), EngineFailed)


async def test_ends_reach_sockets_in_other_processes_than_their_session(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of eight sockets are in the other process, whichever has the session."""
    engine = Running(serving, gateways=2, fake=SLOW, limits={"attachments": 9})
    async with engine as served, AsyncExitStack() as sockets:
        owner = await sockets.enter_async_context(served.connect())
        names = [f"b{i}" for i in range(8)]
        state = await owner.open(owner.user(1, "go"), {"type": "fork", "id": 2, "as": names})
        login = {"session": state["session"], "key": state["key"]}
        peers = [await sockets.enter_async_context(served.connect()) for _ in names]
        for name, peer in zip(names, peers, strict=True):
            await peer.open(peer.greedy(1, branch=name, max_tokens=3000), client=name, **login)
        for peer in peers:
            await peer.next("delta")
        monkeypatch.setattr(RadixCache, "settle", broken)
        for peer in peers:
            assert is_internal(await peer.terminal(1))
            assert await peer.closed() == 1012
        assert await owner.closed() == 1012
        assert isinstance(await engine.failure(), EngineFailed)


@pytest.mark.parametrize("gateways", [0, 2])
async def test_a_core_actor_that_raises_ends_the_engine(
    serving: Any, monkeypatch: pytest.MonkeyPatch, gateways: int
) -> None:
    engine = Running(serving, gateways=gateways, fake=SLOW)
    async with engine as served:
        async with served.connect() as peer:
            await peer.open(peer.user(1, "go"), peer.greedy(2, max_tokens=3000))
            await peer.send(peer.greedy(3), {"type": "rollback", "id": 4, "to": 0})
            await peer.next("delta")
            monkeypatch.setattr(RadixCache, "settle", broken)
            assert is_internal(await peer.terminal(2))
            assert is_internal(await peer.terminal(3))
            assert (await peer.terminal(4))["code"] == "skipped"
            assert await peer.closed() == 1012
        failure = await engine.failure()
        assert isinstance(failure, EngineFailed)
        assert "the cache failed: injected" in str(failure)


async def test_a_session_that_raises_takes_nobody_along(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SessionCore.framed

    def framed(core: SessionCore, frame: Frame, now: float) -> None:
        if any(isinstance(op, Append) and op.text == "crash" for op in frame.ops):
            raise RuntimeError("injected")
        real(core, frame, now)

    monkeypatch.setattr(SessionCore, "framed", framed)
    async with serving(fake=SLOW) as served, served.undisturbed():
        async with served.connect() as peer, served.connect() as other:
            state = await peer.open(peer.user(1, "go"), peer.greedy(2, max_tokens=3000))
            login = {"session": state["session"], "key": state["key"]}
            await other.open(client="other", **login)
            await peer.next("delta")
            await peer.send({"type": "append", "id": 3, "text": "crash"})
            assert await peer.closed() == 1011
            assert await other.closed() == 1011
        async with served.connect() as late:
            await late.send({"type": "open", "client": "peer", **login})
            assert (await late.next("error"))["code"] == "no_session"


@asynccontextmanager
async def command(folder: Path, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`ramify serve` in a process, once it is ready; and its URL."""
    arguments = ("-m", "ramify.clients.cli", "serve", "--model", str(folder), "--device", "cpu")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments, "--threads", "1", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said = ""
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            while (ready := re.search(r"ready: (ws://\S+)", said)) is None:
                line = await process.stdout.readline()
                assert line, said
                said += line.decode()
        yield process, ready[1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_sigterm_drains_and_the_port_can_be_used_again(peers: Any, llama_folder: Path) -> None:
    async with command(llama_folder, "--port", "0", "--grace", "20") as (process, url):
        async with peers(url) as peer:
            await peer.open(peer.user(1, "last words"), peer.greedy(2, max_tokens=300, ignore_eos=True))
            await peer.next("delta")
            process.send_signal(signal.SIGTERM)
            assert (await peer.next("bye"))["after_ms"] > 0
            done = await peer.terminal(2)
            assert (done["reason"], done["usage"]["output"]) == ("length", 300)
            assert await peer.closed() == 1001
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
        assert process.stdout is not None
        assert b"running answers get up to 20 s" in await process.stdout.read()
    port = url.rsplit(":", 1)[1].split("/")[0]
    async with command(llama_folder, "--port", port) as (process, again):
        assert again == url
        async with peers(url) as peer:
            assert (await peer.open())["branches"] == [{"branch": "main", "position": 0, "resident": 0}]
            process.send_signal(signal.SIGINT)
            assert (await peer.next("bye"))["type"] == "bye"
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
        assert process.stdout is not None
        assert b"running answers" not in await process.stdout.read()  # there are none


async def test_the_first_ctrl_c_says_what_a_second_does(peers: Any, llama_folder: Path) -> None:
    async with command(llama_folder, "--port", "0", "--grace", "300") as (process, url):
        async with peers(url) as peer:
            await peer.open(peer.user(1, "long"), peer.greedy(2, max_tokens=2000, ignore_eos=True))
            await peer.next("delta")
            process.send_signal(signal.SIGINT)
            assert (await peer.next("bye"))["after_ms"] == 300_000
            said = b""
            async with asyncio.timeout(PATIENCE):
                while b"Ctrl-C again stops at once" not in said:
                    line = await process.stdout.readline()
                    assert line, said
                    said += line
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), PATIENCE) in (130, 0)  # 0: it was done by then


async def test_a_stopped_executor_is_told_and_replaced(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle or in a step: /readyz says why, and says so no more when it goes on, or another one does."""
    monkeypatch.setattr("ramify.actors.watchdog.OVERDUE_SECONDS", 1.5)
    monkeypatch.setattr("ramify.actors.watchdog.LONGEST_STEPS", 0.0)

    async def readiness(served: Any, wanted: int) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE):
            while (answer := await served.request("GET", "/readyz"))[0] != wanted:
                await asyncio.sleep(0.05)
        body: dict[str, Any] = answer[1]
        return body

    async with serving(executor="process", gateways=1, fake=SLOW, step_timeout_s=4.0) as served:
        pid = served.engine.executor.pid
        assert await readiness(served, 200) == {"ready": True, "phase": "ready"}
        os.kill(pid, signal.SIGSTOP)
        assert "the executor's process says nothing for" in (await readiness(served, 503))["fault"]
        os.kill(pid, signal.SIGCONT)
        await readiness(served, 200)
        async with served.connect() as peer:
            await peer.open(peer.user(1, "go"), peer.greedy(2, max_tokens=600))
            await peer.next("delta")
            os.kill(pid, signal.SIGSTOP)
            body = await readiness(served, 503)
            assert (body["ready"], body["phase"]) == (False, "ready")
            assert "the executor has not finished its step for" in body["fault"]
            async with served.connect() as late:  # clients may come, and wait like the others
                await late.open(late.user(1, "me"), late.greedy(2, max_tokens=5), client="late")
                assert (await peer.terminal(2))["reason"] == "length"
                assert (await late.terminal(2))["reason"] == "length"
            await readiness(served, 200)


HANGS = '''
import pathlib
import time

from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.executors.fake_model import FakeModel


class Hangs(FakeExecutor):
    """Hangs in its 20th step, in Python, unless one has hung before."""

    def __init__(self, mark, model):
        super().__init__(FakeModel(**model), step_seconds=0.002)
        self.mark, self.steps = pathlib.Path(mark), 0

    def launch(self, plan):
        self.steps += 1
        if self.steps == 20 and not self.mark.exists():
            self.mark.touch()
            time.sleep(3600)
        return super().launch(plan)
'''


async def test_a_step_that_hangs_ends_nothing(
    serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, on a CPU as well: another executor goes on from the last token."""
    monkeypatch.setattr("ramify.actors.watchdog.LOOK_SECONDS", 0.1)
    (tmp_path / "hangs.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    model = {"vocab_size": 384, "eos": 2, "first": 3}  # the oracle's
    spec = FactorySpec("hangs:Hangs", {"mark": str(tmp_path / "hung"), "model": model})
    settings = {"executor": "auto", "gateways": 0, "step_timeout_s": 1.0, "model": {"device": "cpu"}}
    async with serving(spec=spec, **settings) as served, served.connect() as peer:
        await peer.open(peer.user(1, "go"), peer.greedy(2, max_tokens=60))
        assert (await peer.terminal(2))["reason"] == "length"
        assert peer.text() == served.oracle.text(served.oracle.output(served.oracle.turn("go"), 60))
        assert "ramify_executor_deaths_total 1.0" in (await served.request("GET", "/metrics"))[1]


async def test_a_tower_that_hangs_ends_its_request_alone(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text beside it goes on in the next executor; the request with the picture is told why it ends."""
    monkeypatch.setattr("ramify.actors.watchdog.LOOK_SECONDS", 0.05)
    fake = {"step_seconds": 0.02, "sees": True, "look_seconds": math.inf}
    picture = io.BytesIO()
    Image.new("RGB", (128, 96)).save(picture, "PNG")
    settings = {"executor": "process", "gateways": 0, "step_timeout_s": 1.0, "fake": fake}
    async with serving(**settings) as served, served.connect("msgpack") as peer:
        seeing = {"type": "append", "id": 4, "branch": "b", "text": MARK, "images": [picture.getvalue()]}
        await peer.open(
            {"type": "fork", "id": 1, "as": ["b"]},
            peer.user(2, "go"),
            peer.greedy(3, max_tokens=120, ignore_eos=True),
            seeing,
            peer.greedy(5, branch="b", max_tokens=3),
        )
        failed = await peer.terminal(5)
        assert is_internal(failed)
        assert "the tower has not run a layer of a picture for 1 s" in failed["message"]
        assert (await peer.terminal(3))["usage"]["output"] == 120


def executor_of(server: int) -> int | None:
    """The process of a server in which its model runs."""
    for task in Path(f"/proc/{server}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            if b"executor_program" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return None


async def test_a_server_on_a_cpu_outlives_its_model(peers: Any, llama_folder: Path) -> None:
    """As it is started without flags: one that hangs is replaced, and so is one that is killed."""
    async with command(llama_folder, "--port", "0", "--step-timeout", "3") as (process, url):
        async with peers(url) as peer:
            await peer.open()
            for ident, fate in ((2, signal.SIGSTOP), (4, signal.SIGKILL)):
                await peer.send(
                    peer.user(ident - 1, "go"), peer.greedy(ident, max_tokens=200, ignore_eos=True)
                )
                await peer.next("delta")
                executor = executor_of(process.pid)
                assert executor is not None
                os.kill(executor, fate)
                done = await peer.terminal(ident)
                assert (done["reason"], done["usage"]["output"]) == ("length", 200)
                assert executor_of(process.pid) not in (None, executor)
        assert process.returncode is None


async def test_a_step_that_hangs_in_a_thread_ends_the_engine(
    serving: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With `--executor thread`: it cannot be ended. What is known needs no traceback."""
    monkeypatch.setattr("ramify.actors.watchdog.LOOK_SECONDS", 0.1)
    monkeypatch.setattr("ramify.actors.keeper.GRACE_SECONDS", 0.1)
    engine = Running(serving, executor="thread", fake={"step_seconds": 2.0}, step_timeout_s=1.0)
    async with engine as served:
        async with served.connect() as peer:
            await peer.open(peer.user(1, "go"), peer.greedy(2))
            assert is_internal(await peer.terminal(2))
            assert await peer.closed() == 1012
        assert "--step-timeout" in str(await engine.failure())
    assert not [record for record in caplog.records if record.exc_info and record.exc_info[0]]
