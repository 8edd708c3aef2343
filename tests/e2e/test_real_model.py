"""A real (tiny, random, float32) Llama through the whole server, against `transformers`' generate.

Greedy tokens must be equal however the server came to them: alone, batched with other sessions,
in chunks, after a fork, after a rollback, and after its KV was evicted and computed again.
"""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.e2e.references import Reference, greedy_of


@pytest.fixture(scope="module")
def reference(llama_folder: Path) -> Reference:
    """What `transformers` says after given tokens, greedily; EOS, if it comes, is the last one."""
    model = LlamaForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).eval()
    return greedy_of(model)


def llama(folder: Path, **settings: Any) -> dict[str, Any]:
    """Keywords of `serving`."""
    model = {"path": folder, "device": "cpu", "dtype": "float32", "threads": 1, "step_tokens": 64}
    return {"real": True, "model": model | settings}


async def turns(
    served: Any, reference: Reference, contents: Sequence[str], n: int = 24
) -> list[dict[str, Any]]:
    """A chat on a socket of its own, each answer compared; returns the `usage` of each turn."""
    oracle, usage = served.oracle, []
    async with served.connect() as peer:
        await peer.open(tokens=True)
        branch: list[int] = []
        for turn, content in enumerate(contents):
            prompt = oracle.next_turn(branch, content) if branch else oracle.turn(content)
            shown, said = len(peer.tokens.get("main", ())), len(peer.text())
            done = await peer.say(2 * turn + 1, content, max_tokens=n)
            answer = await asyncio.to_thread(reference, prompt, n)
            assert peer.tokens["main"][shown:] == answer
            assert peer.text()[said:] == oracle.text(answer)
            assert done["usage"]["prompt"] == len(prompt)
            usage.append(done["usage"])
            branch = [*prompt, *answer]
    return usage


CHATS = [
    ["Capital of France?", "And Spain?", "Plan a 1-day trip."],
    ["The quick brown fox jumps over the lazy dog. " * 8, "again", "Äpfel, 東京, 🙂"],
    ["one two three", "four five six", "seven"],
    ["hello", "hello", "hello"],
]


async def test_four_sessions_of_three_turns(
    serving: Any, executor: str, llama_folder: Path, reference: Reference
) -> None:
    """At once, with prompts longer than a step. A turn computes what is new and one more."""
    async with serving(executor=executor, **llama(llama_folder)) as served:
        chats = await asyncio.gather(*(turns(served, reference, contents) for contents in CHATS))
        for usage in chats:
            for before, after in itertools.pairwise(usage):
                assert after["cached"] == before["prompt"] + before["output"] - 1


async def test_after_fork_and_rollback(serving: Any, llama_folder: Path, reference: Reference) -> None:
    async with serving(**llama(llama_folder)) as served, served.connect() as peer:
        oracle = served.oracle
        prompt = oracle.tokenizer.encode("The quick brown fox jumps over the lazy dog. And Spain?")
        middle = len(prompt) // 2
        await peer.open(
            {"type": "append", "id": 1, "tokens": prompt},
            {"type": "fork", "id": 2, "as": ["end"]},
            {"type": "fork", "id": 3, "as": ["middle"], "at": middle},
            {"type": "append", "id": 4, "branch": "middle", "tokens": [40, 41, 42]},
            peer.greedy(5, branch=["main", "end", "middle"]),
            tokens=True,
        )
        await peer.terminals(5, ["main", "end", "middle"])
        assert peer.tokens["main"] == peer.tokens["end"] == reference(prompt, 32)
        assert peer.tokens["middle"] == reference([*prompt[:middle], 40, 41, 42], 32)
        where = len(prompt) + 9
        await peer.send({"type": "rollback", "id": 6, "to": where})
        await peer.terminal(6)
        peer.truncate("main", where)
        shown = len(peer.tokens["main"])
        await peer.send({"type": "append", "id": 7, "tokens": [50]}, peer.greedy(8))
        done = await peer.terminal(8)
        kept = [*prompt, *reference(prompt, 32)[:9], 50]
        assert peer.tokens["main"][shown:] == reference(kept, 32)
        assert done["usage"]["cached"] == len(kept) - 1 - (done["usage"]["computed"] - 1)
        assert done["usage"]["computed"] <= 2


async def test_after_eviction(serving: Any, llama_folder: Path, reference: Reference) -> None:
    """A pool for one or two of the four conversations: evicted, computed again, the same tokens."""
    settings = llama(llama_folder, kv_tokens=320)
    async with serving(**settings) as served:
        oracle = served.oracle
        async with served.connect() as peer:
            await peer.open()
            first = await peer.say(1, CHATS[0][0], max_tokens=24)
            text = peer.text()
            await asyncio.gather(*(turns(served, reference, contents) for contents in CHATS[1:]))
            await peer.send({"type": "rollback", "id": 3, "turns": 1})
            peer.truncate("main", (await peer.terminal(3))["position"])
            again = await peer.say(4, CHATS[0][0], max_tokens=24)
            assert peer.text() == text == oracle.text(reference(oracle.turn(CHATS[0][0]), 24))
            assert again["position"] == first["position"]
            assert again["usage"]["cached"] < again["usage"]["prompt"] - 1  # it had been evicted
        await served.quiet()


async def test_kv_comes_back_from_host_memory(
    serving: Any, llama_folder: Path, reference: Reference
) -> None:
    """Conversations take turns in a pool for one: what left is loaded, and the tokens are equal."""
    settings = llama(llama_folder, kv_tokens=512, kv_host=8 << 20)
    async with serving(**settings) as served:
        for found in (0, 128):
            for name in ("Ada", "Bob", "Cleo"):
                asked = f"{name} says: " + "the quick brown fox " * 48
                (usage,) = await turns(served, reference, [asked], 8)
                assert usage["cached"] >= found
        _, info = await served.request("GET", "/v1/info")
        assert info["model"]["host_blocks"] > 8
        _, text = await served.request("GET", "/metrics")
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        assert float(values['ramify_kv_hit_tokens_total{tier="host"}']) >= 3 * 128
        assert float(values['ramify_kv_bytes{tier="host"}']) > 0


async def test_warm_is_cold(serving: Any, llama_folder: Path) -> None:
    """The same question by many sessions, in whole, in parts and cached: one answer."""
    async with serving(**llama(llama_folder)) as served:
        question = "The quick brown fox jumps over the lazy dog. " * 3

        async def ask(number: int) -> str:
            async with served.connect() as peer:
                await peer.open(client=f"c{number}")
                await peer.say(1, question)
                return str(peer.text())

        cold = await ask(0)
        warm = await asyncio.gather(*(ask(number) for number in range(1, 6)))
        assert set(warm) == {cold}
