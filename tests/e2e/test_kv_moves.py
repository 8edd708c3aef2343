"""Sessions take their KV along: from a replica that drains, and from one that computes prompts."""

import asyncio
import os
import re
import signal
from contextlib import AsyncExitStack
from typing import Any

import pytest

from ramify.actors.cluster import cores
from ramify.actors.cluster.bindings import Bindings
from ramify.protocol.cluster import BLOCK

FAKE = {"host_blocks": 1024, "pages": 32_768}
LONG = "one two three four five six seven eight nine ten " * 12


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def from_peers(served: Any) -> int:
    """Blocks that replicas have from others."""
    _, text = await served.request("GET", "/metrics")
    found = re.findall(r'ramify_kv_blocks\{tier="peer",replica="\d"\} (\d+)', text)
    return sum(map(int, found))


@pytest.mark.parametrize(
    ("killed", "form"),
    [
        (False, {}),
        (False, {"state_slots": 400}),
        (False, {"window": 16, "window_pages": 4096}),
        (True, {}),
    ],
    ids=str,
)
async def test_a_drain_moves_sessions_with_their_kv(
    serving: Any, killed: bool, form: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill it in the midst: the rest is computed, and nobody notices."""
    count, fake = (12, FAKE | {"block_seconds": 0.02}) if killed else (4 if form else 24, FAKE | form)
    if killed:  # the bytes may go over links as well
        monkeypatch.setattr(cores, "Bindings", lambda *given, shared: Bindings(*given))
    async with serving(replicas=2, fake=fake) as served, AsyncExitStack() as sockets:
        cluster = served.engine.core
        await until(lambda: len(cluster.pids) == 2)
        peers = [await sockets.enter_async_context(served.connect()) for _ in range(count)]
        first: list[list[int]] = []
        for i, peer in enumerate(peers):
            await peer.open(client=f"c{i}", tokens=True)
            said = served.oracle.turn(f"say {i} {LONG}")
            assert (await peer.say(1, f"say {i} {LONG}", max_tokens=20))["usage"]["cached"] < BLOCK
            first.append([*said, *served.oracle.output(said, 20)])
        source = max(cluster.describe(), key=lambda each: each["sessions"])
        assert source["sessions"] >= count // 2
        os.kill(source["pid"], signal.SIGTERM)

        def now(what: str) -> int:
            """Of that process."""
            return sum(each[what] for each in cluster.describe() if each["pid"] == source["pid"])

        if killed:
            await until(lambda: 0 < now("leaving") < count // 3)
            os.kill(source["pid"], signal.SIGKILL)
        await until(lambda: not now("sessions") + now("leaving"))
        computed = 0
        for i, peer in enumerate(peers):
            prompt = served.oracle.next_turn(first[i], "and more")
            usage = (await peer.say(3, "and more", max_tokens=5))["usage"]
            assert peer.tokens["main"][-5:] == served.oracle.output(prompt, 5)
            computed += max(0, len(first[i]) - BLOCK - usage["cached"])
        assert (computed > 0) == killed
        assert await from_peers(served) > 0


async def test_long_prompts_are_computed_apart_and_go_on_elsewhere(serving: Any) -> None:
    """Forks too; short prompts never go there."""
    fake = FAKE | {"step_seconds": 0.05, "context": 16_384}
    replicas = {"count": 2, "roles": "prefill=1"}
    model = {"kv_host": 1 << 20}
    async with serving(replicas=replicas, model=model, fake=fake) as served, served.connect() as peer:
        cluster = served.engine.core
        await until(lambda: len(cluster.pids) == 2)

        def there() -> list[int]:
            return [each["sessions"] for each in cluster.describe()]

        assert [each["role"] for each in cluster.describe()] == ["prefill", "decode"]
        await peer.open(tokens=True)
        await peer.say(1, "short", max_tokens=2)
        assert there() == [0, 1]
        async with served.connect() as other:
            await other.open(tokens=True, client="other")
            said = served.oracle.turn(LONG * 30)
            assert len(said) > 5000
            await other.send(
                other.user(1, LONG * 30),
                {"type": "fork", "id": 2, "as": ["a", "b"]},
                *(other.greedy(3 + i, branch=name, max_tokens=60) for i, name in enumerate("ab")),
            )
            await until(lambda: there() == [1, 1])
            for i, name in enumerate("ab"):
                done = await other.terminal(3 + i, name)
                assert done["usage"]["output"] == 60
                assert other.tokens[name] == served.oracle.output(said, 60)
            assert there() == [0, 2]
        assert await from_peers(served) >= len(said) // BLOCK - 1
