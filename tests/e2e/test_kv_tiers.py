"""KV that leaves the device: host memory and a disk behind it, across a restart and beside others."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ramify.gpu.kv.host_memory import HostMemory

FAKE = {"pages": 1024, "host_blocks": 48, "context": 1024}
TIERS = "device", "disk"
TEXT = "the quick brown fox jumps over the lazy dog " * 16


async def values(served: Any) -> dict[str, float]:
    _, text = await served.request("GET", "/metrics")
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    return {name: float(value) for name, value in lines}


async def until(served: Any, name: str, least: float) -> None:
    while (await values(served))[name] < least:
        await asyncio.sleep(0.02)


async def ask(served: Any, name: str, token: str = "") -> dict[str, Any]:
    options = {"additional_headers": {"Authorization": f"Bearer {token}"}} if token else {}
    async with served.connect(**options) as peer:
        await peer.open(client=name)
        done = await peer.say(1, f"{name} says: {TEXT}", max_tokens=8)
        return done["usage"]  # type: ignore[no-any-return]


@pytest.mark.usefixtures("patient")
async def test_a_restart_finds_on_disk_what_was_computed(serving: Any, tmp_path: Path) -> None:
    model = {"kv_host": 1, "kv_disk": tmp_path / "kv"}
    async with serving(fake=FAKE, model=model) as served:
        first = [await ask(served, name) for name in ("ann", "bob", "cat")]
        assert all(usage["cached"] < 64 for usage in first)
        await until(served, 'ramify_kv_blocks{tier="disk"}', 12)
    async with serving(fake=FAKE, model=model) as served:
        again = [await ask(served, name) for name in ("ann", "bob", "cat")]
        for usage in again:
            assert usage["cached"] == (usage["prompt"] - 1) // 64 * 64 >= 128
        found = await values(served)
        for tier, name in {"device": "gpu", "disk": "disk"}.items():
            hits = found[f'ramify_kv_hit_tokens_total{{tier="{tier}"}}']
            assert hits == sum(usage["hit"].get(name, 0) for usage in again)
        assert hits > 3 * 128
        for usage in again:
            assert sum(usage["hit"].values()) == usage["cached"]


@pytest.mark.parametrize("form", [{"state_slots": 12}, {"window": 16, "window_pages": 4096}], ids=str)
async def test_states_and_windows_come_back_from_host_memory(serving: Any, form: dict[str, int]) -> None:
    """Conversations take turns in a pool for one; the fake executor checks what each step reads."""
    small = {"pages": 700, "host_blocks": 200, "context": 640, "max_rows": 2, "step_tokens": 256}
    async with serving(fake=small | form, model={"kv_host": 1}) as served:
        for least in (0, 128):
            for name in ("ann", "bob", "cat", "dan"):
                assert (await ask(served, name))["cached"] >= least
        assert (await values(served))['ramify_kv_hit_tokens_total{tier="host"}'] >= 3 * 128


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("form", [{"state_slots": 12}, {"window": 16, "window_pages": 4096}], ids=str)
async def test_a_restart_finds_states_and_windows(
    serving: Any, tmp_path: Path, form: dict[str, int]
) -> None:
    settings = {"fake": FAKE | form, "model": {"kv_host": 1, "kv_disk": tmp_path}}
    async with serving(**settings) as served:
        first = [await ask(served, name) for name in ("ann", "bob")]
        residency = served.engine.cache.residency
        while residency.unsaved or residency.stored.disk.backlog:
            await asyncio.sleep(0.01)
    async with serving(**settings) as served:
        again = [await ask(served, name) for name in ("ann", "bob")]
        for before, usage in zip(first, again, strict=True):
            assert before["cached"] < 64
            assert usage["cached"] > usage["prompt"] - 16
        assert (await values(served))['ramify_kv_hit_tokens_total{tier="disk"}'] > 2 * 128


@pytest.mark.usefixtures("patient")
async def test_no_tenant_gets_the_other_s_blocks(serving: Any, tmp_path: Path) -> None:
    """Neither from host memory nor, after a restart, from the disk."""
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f'{{"name": "{name}", "token": "{name}"}}\n' for name in ("ann", "bob")))
    settings = {
        "fake": FAKE | {"pages": 320},  # one conversation's
        "model": {"kv_host": 1, "kv_disk": tmp_path / "kv"},
        "server": {"credentials_file": tokens},
    }
    async with serving(**settings) as served:
        assert (await ask(served, "same", "ann"))["cached"] == 0
        assert (await ask(served, "same", "bob"))["cached"] == 0
        assert (await ask(served, "same", "ann"))["cached"] >= 128
        await until(served, 'ramify_kv_blocks{tier="disk"}', 8)
    async with serving(**settings) as served:
        assert (await ask(served, "same", "ann"))["cached"] >= 128
        assert (await ask(served, "other", "bob"))["cached"] == 0
        assert (await ask(served, "same", "bob"))["cached"] >= 128


async def test_flipped_bits_on_the_disk_are_computed(serving: Any, tmp_path: Path) -> None:
    model = {"kv_host": 1, "kv_disk": tmp_path}
    async with serving(fake=FAKE, model=model) as served:
        first = await ask(served, "ann")
        await until(served, 'ramify_kv_blocks{tier="disk"}', 4)
    blocks = bytearray((tmp_path / "kv-0.blocks").read_bytes())
    for at in range(100, len(blocks), 500):
        blocks[at] ^= 8
    (tmp_path / "kv-0.blocks").write_bytes(blocks)
    async with serving(fake=FAKE, model=model) as served:
        again = await ask(served, "ann")
        assert (again["cached"], again["prompt"]) == (0, first["prompt"])
        assert (await values(served))['ramify_kv_hit_tokens_total{tier="disk"}'] == 0


async def test_a_block_that_was_wrong_when_it_was_saved_is_found_by_computing(
    serving: Any, tmp_path: Path
) -> None:
    """Its seal is right: it was damaged before that. Others are equal to what is computed."""
    small = FAKE | {"pages": 320}  # one conversation's
    model = {"kv_host": 1, "kv_disk": tmp_path, "kv_canary": 1.0}
    count = 'ramify_kv_canary_total{{result="{}"}}'.format
    async with serving(fake=small, model=model) as served:
        while (await values(served))[count("equal")] < 4:
            for name in ("ann", "bob"):
                assert (await ask(served, name))["cached"] < 64
        assert (await values(served))[count("differs")] == 0
        info, stored = served.engine.core.info, served.engine.cache.residency.stored
        host = HostMemory(info.host_blocks, info.block_bytes, info.host_memory)
        for key, slot, _ in stored.held():
            host.blocks[slot, 100] ^= 8
            host.seals[slot] = host.seal(key, host.blocks[slot])
        host.close()
        while (await values(served))[count("differs")] < 2:
            for name in ("ann", "bob"):
                await ask(served, name)
        _, told = await served.request("GET", "/v1/info")
        assert told["kv_canary"]["differs"] >= 2


@pytest.mark.parametrize("free", [True, False], ids=["free", "full"])
async def test_who_comes_back_finds_on_the_device_what_host_memory_had(serving: Any, free: bool) -> None:
    """Nothing is loaded for its next turn: that was done when it opened the session, in free pages.
    Where none are free, nothing is evicted for that.
    """
    host = 'ramify_kv_hit_tokens_total{tier="host"}'
    result = "computed" if free else "given up"
    async with serving(fake=FAKE | {"pages": 320}, model={"kv_host": 1}) as served:
        async with served.connect() as peer:
            state = await peer.open(client="ann")
            await peer.say(1, f"ann says: {TEXT}", max_tokens=8)
        await ask(served, "bob")
        residency = served.engine.cache.residency
        if free:  # as where bob had left another replica
            residency.give_back(residency.take(residency.free + residency.evictable))
        async with served.connect() as peer:
            await peer.open(client="ann", session=state["session"], key=state["key"])
            await until(served, f'ramify_spare_requests_total{{result="{result}"}}', 1)
            loaded = (await values(served))[host]
            usage = (await peer.say(3, "and then?", max_tokens=8))["usage"]
        after = (await values(served))[host]
        assert usage["hit"]["host"] >= 128
        assert (loaded == after) == free
