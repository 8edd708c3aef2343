"""Replicas in processes of their own: sessions go to them, and move when one dies, hangs or drains.

What a client sees of an engine with replicas is tested with the conversations (`placement`); here is
what only such an engine can do.
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from ramify.actors.processes import child_process
from ramify.actors.routing import scaling

SLOW = {"step_seconds": 0.005}
WHERE = pytest.mark.parametrize("gateways", [0, 2])  # processes with the sessions
PATIENCE = 30.0


async def until(condition: Any, what: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


async def test_a_killed_replica_is_noticed_by_nobody(serving: Any) -> None:
    """Streams go on at the same position, on the same socket, with the text of an undisturbed run."""
    async with serving(replicas=2, fake=SLOW) as served, AsyncExitStack() as sockets:
        cluster = served.engine.core
        await until(lambda: len(cluster.pids) == 2, "two replicas")
        peers = [await sockets.enter_async_context(served.connect()) for _ in range(8)]
        for i, peer in enumerate(peers):
            await peer.open(
                peer.user(1, f"say {i}"), peer.greedy(2, max_tokens=300), client=f"c{i}", tokens=True
            )
        for peer in peers:
            await peer.next("delta")
        counts = [entry["sessions"] for entry in cluster.describe()]
        assert min(counts) >= 1, counts
        os.kill(cluster.pids[0], signal.SIGKILL)
        for i, peer in enumerate(peers):
            done = await peer.terminal(2)
            assert (done["reason"], done["usage"]["output"]) == ("length", 300)
            assert peer.tokens["main"] == served.oracle.output(served.oracle.turn(f"say {i}"), 300)
        await until(lambda: len(cluster.pids) == 2, "another one in its place")
        assert served.engine.metrics.deaths == 1
        for i, peer in enumerate(peers):
            assert (await peer.say(3, f"again {i}", max_tokens=5))["reason"] == "length"


async def test_gateway_processes_before_replicas(serving: Any) -> None:
    """Sessions are in one process, cores in others, and they talk past the engine's."""
    async with (
        serving(gateways=1, replicas=2, fake=SLOW) as served,
        served.connect() as peer,
        served.connect() as other,
    ):
        cluster = served.engine.core
        await until(lambda: len(cluster.pids) == 2, "two replicas")
        for each in (peer, other):
            await each.open(each.user(1, "far"), each.greedy(2, max_tokens=300), tokens=True)
        for each in (peer, other):
            await each.next("delta")
        assert not served.engine.core.cores.bindings
        await until(lambda: sum(each["sessions"] for each in cluster.describe()) == 2, "they say so")
        (at, *_) = [entry["replica"] for entry in cluster.describe() if entry["sessions"]]
        os.kill(cluster.pids[at], signal.SIGKILL)
        for each in (peer, other):
            assert (await each.terminal(2))["usage"]["output"] == 300
            assert each.tokens["main"] == served.oracle.output(served.oracle.turn("far"), 300)
        await until(lambda: len(cluster.pids) == 2, "another one in its place")
        await until(lambda: served.engine.metrics.moves > 0, "the process with the sessions says it")
        there = sorted(cluster.pids.values())
        async with asyncio.timeout(60):  # what an operator reads from a gateway process is what is
            while sorted(each["pid"] for each in await _replicas(served)) != there:
                await asyncio.sleep(0.1)


async def _replicas(served: Any) -> list[dict[str, Any]]:
    _, told = await served.request("GET", "/v1/info")
    return list(told["replicas"])


@WHERE
async def test_a_replica_that_stands_still_is_replaced(serving: Any, gateways: int) -> None:
    """It says nothing: its streams go on elsewhere."""
    async with (
        serving(gateways=gateways, replicas={"count": 2, "silence_s": 1.0}, fake=SLOW) as served,
        AsyncExitStack() as sockets,
    ):
        cluster = served.engine.core
        await until(lambda: len(cluster.pids) == 2, "two replicas")
        peers = [await sockets.enter_async_context(served.connect()) for _ in range(4)]
        for i, peer in enumerate(peers):
            await peer.open(peer.user(1, f"say {i}"), peer.greedy(2, max_tokens=200), tokens=True)
        for peer in peers:
            await peer.next("delta")
        os.kill(cluster.pids[1], signal.SIGSTOP)
        for i, peer in enumerate(peers):
            await peer.terminal(2)
            assert peer.tokens["main"] == served.oracle.output(served.oracle.turn(f"say {i}"), 200)
        await until(lambda: len(cluster.pids) == 2, "another one in its place")


async def test_a_replica_that_is_told_to_end_loses_nothing(serving: Any) -> None:
    """Its generations end where they are, other sessions move at once, another process follows."""
    async with serving(replicas=2, fake=SLOW) as served, AsyncExitStack() as sockets:
        cluster = served.engine.core
        await until(lambda: len(cluster.pids) == 2, "two replicas")
        peers = [await sockets.enter_async_context(served.connect()) for _ in range(4)]
        states = [await peer.open(peer.user(1, f"say {i}")) for i, peer in enumerate(peers)]
        assert len(states) == 4
        for peer in peers:
            await peer.terminal(1)
        busy = peers[:2]
        for peer in busy:
            await peer.send(peer.greedy(2, max_tokens=400))
            await peer.next("delta")
        await until(lambda: sum(each["running"] for each in cluster.describe()) == 2, "both run")
        chosen = max(cluster.describe(), key=lambda each: each["running"])
        number, old = chosen["replica"], chosen["pid"]

        def draining() -> list[dict[str, Any]]:
            """It; or nothing, if all that runs on it has ended before we looked."""
            return [e for e in cluster.describe() if (e["replica"], e["pid"]) == (number, old)]

        os.kill(old, signal.SIGTERM)
        await until(lambda: all(e["state"] == "draining" for e in draining()), "it drains")
        await until(lambda: all(e["sessions"] <= e["running"] for e in draining()), "others have moved")
        for i, peer in enumerate(busy):
            assert (await peer.terminal(2))["usage"]["output"] == 400
            prompt = served.oracle.turn(f"say {i}")
            assert peer.text() == served.oracle.text(served.oracle.output(prompt, 400))
        await until(lambda: cluster.pids.get(number) not in (None, old), "another one in its place")
        assert served.engine.metrics.deaths == 0
        for peer in peers:
            assert (await peer.say(5, "go on", max_tokens=5))["reason"] == "length"


async def test_the_only_replica_is_replaced_while_it_serves(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rolling upgrade of one: its successor is there before it goes, and nobody waits."""
    spawn = child_process.spawn

    async def stopped(*given: Any) -> Any:
        """A process that starts no sooner than it is told to go on."""
        process = await spawn(*given)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    async with (
        serving(replicas=1, fake=SLOW) as served,
        served.connect() as peer,
        served.connect() as other,
    ):
        cluster = served.engine.core
        await peer.open(peer.user(1, "first"), peer.greedy(2, max_tokens=300), tokens=True)
        await peer.next("delta")
        (old,) = cluster.pids.values()
        monkeypatch.setattr(child_process, "spawn", stopped)
        os.kill(old, signal.SIGTERM)
        await until(lambda: len(cluster.describe()) == 2, "a second one is started")
        assert [each["state"] for each in cluster.describe()] == ["ready", "starting"]
        await other.open(client="other")
        await other.say(1, "meanwhile", max_tokens=5)
        assert cluster.describe()[1]["state"] == "starting", "it did not wait for that"
        os.kill(cluster.describe()[1]["pid"], signal.SIGCONT)
        assert (await peer.terminal(2))["usage"]["output"] == 300
        assert peer.tokens["main"] == served.oracle.output(served.oracle.turn("first"), 300)
        await until(lambda: old not in [each["pid"] for each in cluster.describe()], "it has left")
        assert [each["state"] for each in cluster.describe()] == ["ready"]
        assert (await other.say(3, "again", max_tokens=5))["reason"] == "length"
        assert served.engine.metrics.deaths == 0


async def test_sessions_leave_a_replica_whose_executor_stands_still(serving: Any) -> None:
    """Its process lives and reports; what it computes with does not, and ends only much later."""
    settings = {"executor": "process", "step_timeout_s": 20.0}
    async with serving(replicas=2, fake=SLOW, **settings) as served, served.connect() as peer:
        cluster = served.engine.core
        await until(lambda: len(cluster.pids) == 2, "two replicas")
        await peer.open(peer.user(1, "first"), peer.greedy(2, max_tokens=300), tokens=True)
        await peer.next("delta")
        (at,) = [each["replica"] for each in cluster.describe() if each["sessions"]]
        children = Path(f"/proc/{cluster.pids[at]}/task/{cluster.pids[at]}/children").read_text()
        # each leads a session of its own, but for the one that they are forked from
        stopped = [pid for pid in map(int, children.split()) if os.getsid(pid) == pid]
        assert stopped
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert (await peer.terminal(2))["usage"]["output"] == 300
            assert peer.tokens["main"] == served.oracle.output(served.oracle.turn("first"), 300)
            assert cluster.describe()[at]["state"] == "stalled"
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        await until(lambda: cluster.describe()[at]["state"] == "ready", "it takes sessions again")


async def test_without_a_replica_ops_wait(serving: Any) -> None:
    """All have died: /readyz says so, and what clients send is done when one is there again."""
    async with serving(replicas=1, fake=SLOW) as served, served.connect() as peer:
        cluster = served.engine.core
        await peer.open(peer.user(1, "first"), peer.greedy(2, max_tokens=100), tokens=True)
        await peer.next("delta")
        os.kill(cluster.pids[0], signal.SIGKILL)
        await until(lambda: not cluster.pids, "none is there")
        status, body = await served.request("GET", "/readyz")
        assert (status, "no replica" in str(body)) == (503, True)
        async with served.connect() as other:
            await other.open(other.user(1, "later"), other.greedy(2, max_tokens=9), tokens=True)
            assert (await other.terminal(2))["usage"]["output"] == 9
        await peer.terminal(2)
        assert peer.tokens["main"] == served.oracle.output(served.oracle.turn("first"), 100)
        assert (await served.request("GET", "/readyz"))[0] == 200


async def test_metrics_and_info_show_the_replicas(serving: Any) -> None:
    async with serving(replicas=2) as served, served.connect() as peer:
        await until(lambda: len(served.engine.core.pids) == 2, "two replicas")
        await peer.open(client="one")
        await peer.say(1, "hi", max_tokens=5)
        _, text = await served.request("GET", "/metrics")
        assert 'ramify_replica_state{replica="1",state="ready"} 1.0' in text
        assert "ramify_sockets 1.0" in text
        sessions = dict(re.findall(r'ramify_replica_sessions\{replica="(.)"\} (\S+)', text))
        assert sorted(sessions.values()) == ["0.0", "1.0"]
        (at,) = [replica for replica, count in sessions.items() if count == "1.0"]
        assert f'ramify_requests_total{{reason="length",replica="{at}"}} 1.0' in text
        assert f'ramify_ttft_seconds_bucket{{le="+Inf",replica="{at}"}} 1.0' in text
        assert len(text.splitlines()) == len(set(text.splitlines()))
        _, info = await served.request("GET", "/v1/info")
        assert [entry["state"] for entry in info["replicas"]] == ["ready", "ready"]


async def test_constraints_and_choices_go_on_elsewhere(serving: Any) -> None:
    """What the old replica had compiled is compiled again; what it had not scored is scored."""
    async with serving(replicas=2, fake=SLOW) as served, served.connect() as peer:
        cluster = served.engine.core
        await until(lambda: len(cluster.pids) == 2, "two replicas")
        await peer.open(
            peer.user(1, "digits"),
            peer.greedy(2, max_tokens=200, constraint={"regex": "[0-9]{1,200}"}),
            {"type": "select", "id": 3, "choices": ["yes", "no"]},
            tokens=True,
        )
        await peer.next("delta")
        (at,) = [e["replica"] for e in cluster.describe() if e["sessions"]]
        os.kill(cluster.pids[at], signal.SIGKILL)
        done = await peer.terminal(2)
        text = peer.text()
        assert text.isdigit(), (done, text)
        assert (await peer.terminal(3))["choice"] in (0, 1)


# --- replicas that join ------------------------------------------------------------------------------


class Joining:
    """`ramify replica` processes."""

    def __init__(self, port: int, secret: Path) -> None:
        self._flags = ["--join", f"127.0.0.1:{port}", "--secret-file", str(secret)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._told: set[int] = set()

    def tell(self, pid: int) -> None:
        """Have one end. It is told once: a second signal may come when nobody listens to it any more."""
        self._told.add(pid)
        os.kill(pid, signal.SIGTERM)

    def start(self) -> subprocess.Popen[bytes]:
        program = (sys.executable, "-P", "-m", "ramify.clients.cli", "replica", *self._flags)
        self.processes.append(subprocess.Popen(program, stderr=subprocess.DEVNULL))
        return self.processes[-1]

    def end(self) -> list[int]:
        """Their exit codes, when they were told to end."""
        for process in self.processes:
            if process.poll() is None and process.pid not in self._told:
                process.terminate()
        try:
            return [process.wait(PATIENCE) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@WHERE
async def test_replicas_join_over_the_network(serving: Any, tmp_path: Path, gateways: int) -> None:
    """They wait for their front, and for the next one; one that is killed is missed by nobody."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of this test")
    port = free_port()
    joining = Joining(port, secret)
    settings = {"count": 2, "on": "join", "listen_port": port, "secret_file": secret}
    first, _ = (joining.start() for _ in range(2))
    try:
        async with serving(gateways=gateways, replicas=settings, fake=SLOW) as served:
            await _streams(served, lambda cluster: (first.kill(), joining.start()))
        async with serving(gateways=gateways, replicas=settings, fake=SLOW) as served:
            await _streams(served, lambda cluster: joining.tell(cluster.pids[0]))
    finally:
        codes = await asyncio.to_thread(joining.end)
    assert sorted(codes) == [-9, 0, 0]


async def _streams(served: Any, meanwhile: Any) -> None:
    """Four generations go on whatever happens."""
    cluster = served.engine.core
    await until(lambda: len(cluster.pids) == 2, "two replicas")
    async with AsyncExitStack() as sockets:
        peers = [await sockets.enter_async_context(served.connect()) for _ in range(4)]
        for i, peer in enumerate(peers):
            await peer.open(peer.user(1, f"say {i}"), peer.greedy(2, max_tokens=200), tokens=True)
        for peer in peers:
            await peer.next("delta")
        meanwhile(cluster)
        for i, peer in enumerate(peers):
            await peer.terminal(2)
            prompt = served.oracle.turn(f"say {i}")
            assert peer.tokens["main"] == served.oracle.output(prompt, 200)


async def test_sessions_go_where_their_prefix_is(serving: Any) -> None:
    """Two long prompts, five sessions of each, one after the other: each prompt is computed once."""
    async with serving(replicas=2, fake={"context": 4096}) as served:
        cluster = served.engine.core
        await until(lambda: len(cluster.pids) == 2, "two replicas")
        words = [" ".join(f"{name}{i}" for i in range(150)) for name in ("red", "blue")]
        computed = []
        for turn in range(5):
            for text in words:
                async with served.connect() as peer:
                    await peer.open(client="c")
                    done = await peer.say(1, f"{text} {turn}", max_tokens=2)
                    computed.append(done["usage"]["computed"])
                    await peer.send({"type": "close", "id": 9})
            await asyncio.sleep(0.05)  # the caches' news are on their way
        assert min(computed[:2]) > 500
        assert max(computed[2:]) < 100, computed


@WHERE
async def test_more_replicas_while_first_tokens_are_late(
    serving: Any, monkeypatch: Any, gateways: int
) -> None:
    """And fewer when nothing is asked for: what is at the one that goes is kept."""
    monkeypatch.setattr(scaling, "UP_S", 0.5)
    monkeypatch.setattr(scaling, "DOWN_S", 2.0)
    monkeypatch.setattr(scaling, "RECENT_S", 2.0)
    settings = {"count": 1, "most": 2, "ttft_s": 0.01}
    layout = {"gateways": gateways, "replicas": settings}
    async with serving(**layout, fake=SLOW) as served, AsyncExitStack() as sockets:
        cluster = served.engine.core
        assert len(cluster.pids) == 1
        peers = [await sockets.enter_async_context(served.connect()) for _ in range(12)]
        turn = 0
        for peer in peers:
            await peer.open(client="c")
        async with asyncio.timeout(PATIENCE):
            while len(cluster.pids) < 2:
                turn += 1
                await asyncio.gather(*(p.say(3 * turn, "quick", max_tokens=2) for p in peers))
        await until(lambda: len(cluster.describe()) == 1, "one has left")
        for peer in peers:
            assert (await peer.say(3 * turn + 3, "still there?", max_tokens=5))["reason"] == "length"
