"""Gateways in processes of their own: neighbours, deaths, replacements, the stop.

What a client sees of an engine with gateway processes is tested with the conversations
(`placement`); here is what only such an engine can do.
"""

import asyncio
import importlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import websockets

from ramify.actors.engine import EngineFailed
from ramify.actors.front.processes import DEATHS
from ramify.actors.front.worker import GatewayProcess
from ramify.actors.kit.working import Working, cell_of
from ramify.actors.processes.messages import NotStarted
from tests.actors.cache.integrity import check
from tests.e2e.conftest import pause

SLOW = {"step_seconds": 0.002}
PATIENCE = 30.0
STRICT = ("turns", "histories")  # of `worst_frames`' sessions, those that are conversations


def login(state: dict[str, Any]) -> dict[str, Any]:
    return {"session": state["session"], "key": state["key"]}


def slot(state: dict[str, Any]) -> int:
    """The process that a session lives in."""
    return int(state["session"].split("_")[1])


@asynccontextmanager
async def socket_in(served: Any, wanted: int, codec: str | None = None) -> AsyncIterator[Any]:
    """A socket that the kernel gave to process `wanted`; others are tried and closed."""
    for _ in range(64):
        async with served.connect(codec) as peer:
            if holder(served, peer) == wanted:
                yield peer
                return
    raise AssertionError(f"the kernel gave process {wanted} none of 64 connections")


def holder(served: Any, peer: Any) -> int:
    """The slot of the process that holds the other end of a connection."""
    address, port = peer.ws.local_address[:2]
    assert address == "127.0.0.1"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        ports = [int(field.split(":")[1], 16) for field in fields[1:3]]
        if ports == [served.engine.port, port]:
            wanted = f"socket:[{fields[9]}]"
            for slot, pid in enumerate(served.engine.front.pids):
                for fd in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(FileNotFoundError):  # closed meanwhile
                        if os.readlink(fd) == wanted:
                            return slot
    raise AssertionError("nobody holds the connection")


async def vanished(pid: int) -> None:
    """Wait until no such process runs (a zombie of ours does not)."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except FileNotFoundError:
                return
            if state == "Z":
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("codec", ["json", "msgpack"])
async def test_a_session_is_resumed_from_another_process(serving: Any, codec: str) -> None:
    """In mid-stream, from the other process and back; then a turn through both."""
    async with serving(gateways=2, fake=SLOW) as served:
        oracle = served.oracle
        prompt = oracle.turn("far away")
        expected = oracle.output(prompt, 400)
        async with socket_in(served, 0) as peer:
            generate = peer.greedy(2, max_tokens=400)
            state = await peer.open(peer.user(1, "far away"), generate, tokens=True)
            assert slot(state) == 0
            await peer.next("delta")
            peer.abort()
        async with socket_in(served, 1, codec) as abroad:
            abroad.follow(peer)
            assert (await abroad.open(**login(state), **peer.seen, tokens=True))["resumed"]
            for _ in range(5):
                await abroad.next("delta")
            abroad.abort()
        async with socket_in(served, 1, codec) as again:
            again.follow(abroad)
            await again.open(**login(state), **abroad.seen, tokens=True)
            assert (await again.terminal(2))["reason"] == "length"
            assert again.tokens["main"] == expected
            await again.say(3, "and now?", max_tokens=5)
            await again.send({"type": "tree", "id": 5, "tokens": True}, {"type": "ping", "n": 7})
            assert (await again.next("pong"))["n"] == 7
            await again.send({"type": "close", "id": 6})
            assert await again.closed() == 1000
        await served.deserted()


async def test_refusals_come_back_from_another_process(serving: Any) -> None:
    async with serving(gateways=2) as served:
        async with socket_in(served, 0) as peer, socket_in(served, 1) as stranger:
            state = await peer.open()
            await stranger.send({"type": "open", "client": "x", "session": state["session"]})
            assert (await stranger.next("error"))["code"] == "forbidden"
            await stranger.send({"type": "open", "client": "x", "session": "s_0_nothing"})
            assert (await stranger.next("error"))["code"] == "no_session"
            await stranger.send({"type": "open", "client": "x", "session": "s_7_nobody"})
            assert (await stranger.next("error"))["code"] == "no_session"
            own = await stranger.open(client="x")  # the same socket, a session of its own
            assert slot(own) == 1
            assert (await stranger.say(1, "hi", max_tokens=3))["reason"] == "length"


async def test_a_slow_reader_abroad_is_held_back(serving: Any) -> None:
    """Throttling works across processes: few deltas, nothing lost."""
    limits = {"queued_bytes": 16384}
    async with serving(gateways=2, limits=limits, fake={"context": 4096}) as served:
        async with socket_in(served, 0) as peer, socket_in(served, 1) as reader:
            state = await peer.open(
                peer.user(1, "much"), peer.greedy(2, max_tokens=3000, logprobs=20), client="writer"
            )
            await reader.open(client="reader", **login(state))
            await peer.terminal(2)
            await reader.until(lambda m: m["type"] == "delta" and m["position"] >= peer.position["main"])
            assert peer.text().endswith(reader.text())
            assert len(reader.text()) > 1000


async def test_a_process_that_stands_still_for_a_while_loses_nothing(serving: Any) -> None:
    """What its neighbour sends it meanwhile waits, far beyond the frames that a link takes."""
    async with serving(gateways=2, fake={"context": 4096} | SLOW) as served:
        async with socket_in(served, 0) as peer, socket_in(served, 1) as reader:
            state = await peer.open(client="writer")
            await reader.open(client="reader", **login(state))
            pids = served.engine.front.pids
            os.kill(pids[1], signal.SIGSTOP)
            try:
                await peer.say(1, "on and on", max_tokens=1500)
            finally:
                os.kill(pids[1], signal.SIGCONT)
            await reader.until(lambda m: m["type"] == "delta" and m["position"] >= peer.position["main"])
            assert reader.text() == peer.text()
            assert served.engine.front.pids == pids


async def test_a_killed_process_takes_only_its_own_along(serving: Any) -> None:
    """Requests end, pages come back, neighbours go on, and another process takes its place."""
    async with serving(gateways=2, fake=SLOW) as served:
        pid = served.engine.front.pids[0]
        async with (
            socket_in(served, 0) as victim,
            socket_in(served, 1) as abroad,
            socket_in(served, 1) as bystander,
            socket_in(served, 0) as guest,
        ):
            names = ["a", "b", "c"]
            state = await victim.open(
                victim.user(1, "doomed"),
                {"type": "fork", "id": 2, "as": names},
                victim.greedy(3, branch=names, max_tokens=3000),
            )
            await abroad.open(client="abroad", **login(state))
            await abroad.next("delta")
            own = await bystander.open(
                bystander.user(1, "safe"), bystander.greedy(2, max_tokens=600), client="by"
            )
            await guest.open(client="guest", **login(own))
            await bystander.next("delta")
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(websockets.ConnectionClosed):
                while True:
                    await victim.receive()
            assert await abroad.closed() == 1012
            done = await bystander.terminal(2)
            assert (done["reason"], done["usage"]["output"]) == ("length", 600)
            prompt = served.oracle.turn("safe")
            assert bystander.text() == served.oracle.text(served.oracle.output(prompt, 600))
        await served.quiet()
        check(served.engine.cache)
        assert len(served.engine.cache.branches) == 1  # the bystander's
        async with socket_in(served, 0) as late:  # the new process has the port
            await late.send({"type": "open", "client": "peer", **login(state)})
            assert (await late.next("error"))["code"] == "no_session"
            fresh = await late.open()
            assert fresh["server"]["epoch"] != state["server"]["epoch"]
            assert (await late.say(1, "hello", max_tokens=5))["reason"] == "length"
        assert served.engine.front.pids[0] != pid
        async with socket_in(served, 0) as back:  # a session of the survivor, by way of the new one
            back.follow(bystander)
            await back.open(client="by", **login(own), **bystander.seen)
            assert (await back.say(3, "still there?", max_tokens=4))["reason"] == "length"


async def test_a_process_that_hangs_is_replaced(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.actors.front.processes.HUNG_SECONDS", 1.0)
    async with serving(gateways=1, fake=SLOW) as served:
        (pid,) = served.engine.front.pids
        async with served.connect() as peer:
            await peer.open(peer.user(1, "stuck"), peer.greedy(2, max_tokens=3000))
            await peer.next("delta")
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(websockets.ConnectionClosed):
                while True:
                    await peer.receive()
        async with served.connect() as again:  # waits in the backlog until somebody is there
            await again.open()


async def test_a_session_that_hangs_its_process_ends_and_not_the_engine(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more death in the same minute would be the engine's end, whoever caused it."""
    monkeypatch.setattr("ramify.actors.front.processes.HUNG_SECONDS", 1.0)
    async with serving(gateways=1) as served:
        front = served.engine.front
        (pid,) = front.pids
        front._deaths.times.extend([served.engine.clock.now()] * DEATHS)
        async with served.connect() as peer:
            state = await peer.open()
            os.kill(pid, signal.SIGSTOP)
            Working(front._working, 0).on(cell_of(state["session"]))  # as if it were at that
            with pytest.raises(websockets.ConnectionClosed):
                while True:
                    await peer.receive()
        async with served.connect() as again:
            await again.open()
        assert front._barred == [state["session"]]
        assert len(front._deaths.times) == DEATHS


async def test_a_silent_process_gets_no_connections_until_it_speaks(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sessions live on: a process that was only slow loses nothing."""
    monkeypatch.setattr("ramify.actors.front.processes.DEAF_SECONDS", 1.0)
    async with (
        serving(gateways=2) as served,
        socket_in(served, 0) as peer,
        socket_in(served, 1) as other,
    ):
        await peer.open()
        await other.open(client="other")
        front = served.engine.front
        pid = front.pids[0]
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(PATIENCE):
                while not front.workers[0].shut:
                    await asyncio.sleep(0.01)
            for _ in range(16):
                async with served.connect() as fresh:
                    assert holder(served, fresh) == 1
                    await fresh.open(client="fresh")
        finally:
            os.kill(pid, signal.SIGCONT)
        async with asyncio.timeout(PATIENCE):
            while front.workers[0].shut:
                await asyncio.sleep(0.01)
        assert front.pids[0] == pid
        async with socket_in(served, 0) as fresh:
            await fresh.open(client="fresh")
        assert (await peer.say(1, "still here?", max_tokens=4))["reason"] == "length"


async def test_a_silent_process_that_is_killed_leaves_its_door_to_the_next(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(gateways=1) as served:
        (pid,) = served.engine.front.pids
        os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as impatient:  # but not with the next one, on a busy machine
            impatient.setattr("ramify.actors.front.processes.DEAF_SECONDS", 0.5)
            impatient.setattr("ramify.actors.front.processes.HUNG_SECONDS", 1.5)
            await vanished(pid)
        async with asyncio.timeout(PATIENCE):
            while served.engine.front.workers[0].shut:
                await asyncio.sleep(0.01)
        async with served.connect() as peer:  # waits in the backlog until somebody is there
            await peer.open()


@pytest.mark.parametrize("kind", ["empty", "segments", "outputs", "turns", "histories"])
async def test_files_and_frames_that_once_hung_every_process(
    serving: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A file of 8,000 segments in each process, then one frame of prunes: the engine ended with them.

    Without tokens ("empty") it is refused; of the largest histories that are allowed nobody dies, and
    others get the right answers meanwhile.
    """
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    worst = importlib.import_module("worst_frames")
    fake = {"context": 1 << 17, "pages": 1 << 14, "verify": False}
    async with serving(gateways=2, fake=fake) as served, served.connect() as control:
        await control.open()
        info, pids = served.engine.core.info, list(served.engine.front.pids)
        sessions = worst.sessions(f"{info.model} ({info.vocab_size} tokens)")
        file = next(file for name, file in sessions if name == kind)
        frame = dict(worst.frames())["rollback turns" if kind in STRICT else "prune number"]

        async def attack(slot: int) -> None:
            async with socket_in(served, slot, "msgpack") as peer:
                template = "strict" if kind in STRICT else "append"
                await peer.send({"type": "open", "import": file, "template": template})
                opened = await peer.next("state", "error")
                assert (opened["type"] == "error") == (kind == "empty"), opened
                if kind != "empty":
                    await peer.send(*frame)
                    for op in frame:
                        await peer.terminal(op["id"])

        async def answer(number: int) -> str:
            name, ident = f"b{number}", 3 * number
            await control.send(
                {"type": "fork", "id": ident + 1, "as": [name]},
                {"type": "append", "id": ident + 2, "branch": name, "tokens": [5, 6, 7]},
                control.greedy(ident + 3, branch=name),
            )
            await control.terminal(ident + 3, name)
            return control.text(name)

        known, asked = await answer(0), 1
        attacks = asyncio.gather(attack(0), attack(1))
        while not attacks.done():
            assert await answer(asked) == known
            asked += 1
            await asyncio.sleep(pause(asked))
        await attacks
        assert served.engine.front.pids == pids


def stopped_at_their_start(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """The next `most` processes are stopped (SIGSTOP) before they are told to listen. Their ids."""
    attach = GatewayProcess.attach
    stopped: list[int] = []

    def stopping(self: GatewayProcess, link: Any) -> None:
        attach(self, link)
        if len(stopped) < most:
            os.kill(self.child.pid, signal.SIGSTOP)
            stopped.append(self.child.pid)

    monkeypatch.setattr(GatewayProcess, "attach", stopping)
    return stopped


async def test_a_replacement_that_hangs_at_its_start_is_replaced(
    serving: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ramify.actors.front.worker.START_SECONDS", 3.0)
    async with serving(gateways=1) as served:
        front = served.engine.front
        (pid,) = front.pids
        stopped = stopped_at_their_start(monkeypatch, 1)
        os.kill(pid, signal.SIGKILL)
        async with served.connect() as peer:  # waits in the backlog meanwhile
            await peer.open()
        (hung,) = stopped
        assert front.pids[0] not in (pid, hung)
        await vanished(hung)
    fields: list[dict[str, Any]] = [getattr(r, "ramify_fields", {}) for r in caplog.records]
    assert any("did not listen within 3 s" in f.get("reason", "") for f in fields)
    assert any(f.get("attempt") == "2 of 4" for f in fields)


async def test_a_replacement_that_cannot_be_started_is_tried_again(
    serving: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, failures = GatewayProcess.start, 2

    async def start(*args: Any) -> GatewayProcess:
        nonlocal failures
        if failures:
            failures -= 1
            raise BlockingIOError("no process is left")
        return await real(*args)

    async with serving(gateways=1) as served:
        monkeypatch.setattr(GatewayProcess, "start", start)
        os.kill(served.engine.front.pids[0], signal.SIGKILL)
        async with served.connect() as peer:
            await peer.open()
    assert failures == 0
    fields: list[dict[str, Any]] = [getattr(r, "ramify_fields", {}) for r in caplog.records]
    assert any(f.get("reason") == "no process is left" for f in fields)
    assert any(f.get("attempt") == "3 of 4" for f in fields)


async def test_a_first_process_that_hangs_at_its_start_ends_the_start(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ramify.actors.front.worker.START_SECONDS", 0.0)
    with pytest.raises(NotStarted, match=r"gateway 0 did not start: it hung: it did not listen"):
        async with serving(gateways=1):
            pass


async def test_replacements_that_all_hang_end_the_engine(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is given up after its time; they are not tried for ever."""
    monkeypatch.setattr("ramify.actors.front.processes.WITHIN_SECONDS", 0.0)  # rarely enough
    stopped: list[int] = []
    with pytest.raises(EngineFailed, match=r"4 times in a row.*did not listen within"):
        async with serving(gateways=1, idle_at_end=False) as served:
            (pid,) = served.engine.front.pids
            stopped = stopped_at_their_start(monkeypatch, sys.maxsize)
            monkeypatch.setattr("ramify.actors.front.worker.START_SECONDS", 0.2)
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(PATIENCE)
    assert len(stopped) == 4
    for pid in stopped:
        await vanished(pid)


@pytest.mark.parametrize("young", [False, True])
async def test_processes_that_keep_dying_end_the_engine(serving: Any, young: bool) -> None:
    """Also if they do not live to listen: one such death is no reason, four are."""
    with pytest.raises(EngineFailed, match="gateway processes failed in a minute"):
        async with serving(gateways=1, idle_at_end=False) as served:
            front = served.engine.front
            killed: set[int] = set()
            async with asyncio.timeout(PATIENCE):
                while True:
                    fresh = [pid for pid in front.pids if pid not in killed]
                    if fresh and (young or front.workers[0].serving.is_set()):
                        os.kill(fresh[0], signal.SIGKILL)
                        killed.add(fresh[0])
                    await asyncio.sleep(0.01)


async def test_all_processes_answer_alike(serving: Any) -> None:
    async with serving(gateways=2) as served, socket_in(served, 0) as one, socket_in(served, 1) as two:
        await one.open()
        await two.open()
        await one.say(1, "count", max_tokens=7)
        seen = set()
        for _ in range(12):  # each a connection of its own, in either process
            assert (await served.request("GET", "/readyz"))[1] == {"ready": True, "phase": "ready"}
            info = (await served.request("GET", "/v1/info"))[1]
            assert info["epoch"] == served.engine.epoch
            text = (await served.request("GET", "/metrics"))[1]
            metrics = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
            seen.add(
                tuple(
                    float(metrics[name])
                    for name in (
                        "ramify_sockets",
                        "ramify_sessions",
                        "ramify_output_tokens_total",
                        'ramify_gateway_sessions{gateway="0"}',
                        'ramify_gateway_sessions{gateway="1"}',
                    )
                )
            )
        assert seen == {(2.0, 2.0, 7.0, 1.0, 1.0)}


@asynccontextmanager
async def command(folder: Path, *flags: str) -> AsyncIterator[tuple[Any, str, list[int]]]:
    """`ramify serve --gateways 2` in a process, once it is ready; its URL, its gateways' pids."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ramify.clients.cli", "serve", "--model", str(folder)),
        *("--device", "cpu", "--threads", "1", "--gateways", "2", *flags),
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
        pids = [int(pid) for pid in re.findall(r"gateway process started gateway=\d pid=(\d+)", said)]
        assert len(pids) == 2
        yield process, ready[1], pids
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_killed_core_leaves_no_process(peers: Any, llama_folder: Path) -> None:
    async with command(llama_folder, "--port", "0") as (process, url, pids):
        async with peers(url) as peer, peers(url) as idle:
            await idle.open(client="idle")
            await peer.open(peer.user(1, "go"), peer.greedy(2, max_tokens=400, ignore_eos=True))
            await peer.next("delta")
            process.send_signal(signal.SIGKILL)
            end = await peer.terminal(2)  # the process that has the session says it
            assert (end["reason"], end["error"]) == ("error", "internal")
            assert await peer.closed() == 1012
            assert await idle.closed() == 1012
        for pid in pids:
            await vanished(pid)


async def test_sigterm_drains_all_processes(peers: Any, llama_folder: Path) -> None:
    """A running answer is finished; nothing of the engine is left, and the port is free at once."""
    async with command(llama_folder, "--port", "0", "--grace", "20") as (process, url, pids):
        async with peers(url) as peer:
            await peer.open(peer.user(1, "last words"), peer.greedy(2, max_tokens=300, ignore_eos=True))
            await peer.next("delta")
            for pid in (process.pid, *pids):  # as a supervisor may signal all of a service
                os.kill(pid, signal.SIGTERM)
            assert (await peer.next("bye"))["after_ms"] > 0
            done = await peer.terminal(2)
            assert (done["reason"], done["usage"]["output"]) == ("length", 300)
            assert await peer.closed() == 1001
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
        for pid in pids:
            await vanished(pid)
    port = url.rsplit(":", 1)[1].split("/")[0]
    async with command(llama_folder, "--port", port) as (process, again, _):
        assert again == url
        async with peers(url) as peer:
            await peer.open()
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0


async def test_a_taken_port_is_refused(starting: Any, serving: Any) -> None:
    """Also by sockets that would share it: two engines must not answer at one port."""
    from ramify.protocol.errors import ConfigError

    async with serving(gateways=2) as served:
        for gateways in (0, 1, 2):
            error = await starting(ConfigError, port=served.engine.port, gateways=gateways)
            assert str(served.engine.port) in error.message
