"""Tiny random models with fixed states through the whole server, against `transformers`' generate.

Greedy tokens are equal after a fork, a rollback and in next turns, and these begin from kept
states: no earlier turn runs again.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.references import Reference, saved

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3_5": {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "Lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},
}


@pytest.fixture(params=FAMILIES)
def hybrid(request: Any, tokenizer_folder: Path, tmp_path: Path) -> tuple[dict[str, Any], Reference]:
    """Keywords of `serving`, and what `transformers` says after given tokens."""
    family = request.param
    config = "Qwen3_5TextConfig" if family == "Qwen3_5" else f"{family}Config"
    fields = {"max_position_embeddings": 512} | FAMILIES[family]
    reference = saved(config, f"{family}ForCausalLM", fields, tokenizer_folder, tmp_path)
    served = {"path": tmp_path, "device": "cpu", "threads": 1, "step_tokens": 64}
    if family == "Lfm2":  # guesses change nothing
        served["draft"] = "ngram"
    return {"real": True, "model": served}, reference


async def test_turns_of_sessions_at_once(serving: Any, hybrid: Any) -> None:
    settings, reference = hybrid

    async def chat(served: Any, contents: Sequence[str]) -> None:
        oracle = served.oracle
        async with served.connect() as peer:
            await peer.open(tokens=True)
            branch: list[int] = []
            for turn, content in enumerate(contents):
                prompt = oracle.next_turn(branch, content) if branch else oracle.turn(content)
                shown = len(peer.tokens.get("main", ()))
                done = await peer.say(2 * turn + 1, content, max_tokens=24)
                answer = await asyncio.to_thread(reference, prompt, 24)
                assert peer.tokens["main"][shown:] == answer
                if branch:  # the state behind the last turn is there
                    assert done["usage"]["cached"] >= len(branch) - 1
                branch = [*prompt, *answer]

    async with serving(**settings) as served:
        chats = (["Capital of France?", "And Spain?"], ["quick brown fox " * 20, "again", "hello"])
        await asyncio.gather(*(chat(served, contents) for contents in chats))
        await served.quiet()


async def test_fork_and_rollback_with_few_slots(serving: Any, hybrid: Any) -> None:
    settings, reference = hybrid
    settings["model"] |= {"state_slots": 16}
    async with serving(**settings) as served, served.connect() as peer:
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
        await peer.terminal(8)
        kept = [*prompt, *reference(prompt, 32)[:9], 50]
        assert peer.tokens["main"][shown:] == reference(kept, 32)
