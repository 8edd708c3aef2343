"""Tiny random models with sliding windows through the whole server, against `transformers`' generate.

Their window layers keep the last tokens of a sequence alone. Greedy tokens are equal over several
windows, in next turns, after a fork, a rollback, an edit, eviction and a restart of the executor.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.references import EOS, Reference, saved

WINDOW = 24
LAYERS = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3Text", LAYERS | {"head_dim": 32, "query_pre_attn_scalar": 32}),
    "gemma4": (
        "Gemma4Text",
        {
            "num_hidden_layers": 4,
            "layer_types": [*LAYERS["layer_types"][:2], "sliding_attention", "full_attention"],
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 512,
        },
    ),
    "mistral": ("Mistral", {"head_dim": 32}),  # a window in all layers
}


@pytest.fixture(scope="module")
def made(tokenizer_folder: Path, tmp_path_factory: Any) -> Callable[[str], tuple[Path, Reference]]:
    """The folder of a family's model, and what `transformers` says after given tokens."""

    @cache
    def make(case: str) -> tuple[Path, Reference]:
        family, changes = FAMILIES[case]
        fields = {"num_hidden_layers": 3, "max_position_embeddings": 1024, "sliding_window": WINDOW}
        folder = tmp_path_factory.mktemp(case)
        model = f"{family.removesuffix('Text')}ForCausalLM"
        return folder, saved(f"{family}Config", model, fields | changes, tokenizer_folder, folder)

    return make


@pytest.fixture(params=FAMILIES)
def windowed(request: Any, made: Any) -> tuple[dict[str, Any], Reference]:
    """Keywords of `serving`, and the reference."""
    folder, reference = made(request.param)
    served = {
        "path": folder, "device": "cpu", "threads": 1, "step_tokens": 64, "quantization": "none",
        "window_tokens": 1024, "kv_tokens": 4096,
    }  # fmt: skip
    return {"real": True, "model": served}, reference


async def chat(served: Any, reference: Reference, contents: Sequence[str], cached: bool = True) -> None:
    """Turns of one session, each equal to the reference. `cached`: the last turn is found."""
    oracle = served.oracle
    async with served.connect() as peer:
        await peer.open(tokens=True)
        branch: list[int] = []
        for turn, content in enumerate(contents):
            prompt = oracle.next_turn(branch, content) if branch else oracle.turn(content)
            shown = len(peer.tokens.get("main", ()))
            done = await peer.say(2 * turn + 1, content, max_tokens=40)
            answer = await asyncio.to_thread(reference, prompt, 40)
            assert peer.tokens["main"][shown:] == answer
            if branch and cached:
                assert done["usage"]["cached"] >= len(branch) - 1
            branch = [*prompt, *answer]


CHATS = (["Capital of France?", "And Spain?", "So?"], ["quick brown fox " * 24, "again", "hello"])


async def test_turns_of_sessions_at_once_and_a_killed_executor(serving: Any, windowed: Any) -> None:
    settings, reference = windowed
    async with serving(**settings, executor="process") as served:
        await asyncio.gather(*(chat(served, reference, contents) for contents in CHATS))
        await served.quiet()
        _, info = await served.request("GET", "/v1/info")
        assert (info["model"]["window"], info["model"]["window_pages"]) == (WINDOW, 1024)
        os.kill(pid := served.engine.executor.pid, signal.SIGKILL)
        while served.engine.executor.pid == pid or not served.engine.executor.alive:
            await asyncio.sleep(0.01)
        await chat(served, reference, CHATS[1])


async def test_sessions_crowded_in_a_small_pool(serving: Any, windowed: Any) -> None:
    settings, reference = windowed
    settings["model"] |= {"window_tokens": 300, "kv_tokens": 700}
    async with serving(**settings) as served:
        for _ in range(2):
            await asyncio.gather(*(chat(served, reference, contents, False) for contents in CHATS))
        await served.quiet()


async def test_fork_rollback_and_edit(serving: Any, windowed: Any) -> None:
    settings, reference = windowed
    async with serving(**settings) as served, served.connect() as peer:
        prompt = served.oracle.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 8)
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

        def said(tokens: Sequence[int]) -> list[int]:
            return [token for token in reference(tokens, 32) if token != EOS]

        assert peer.tokens["main"] == peer.tokens["end"] == said(prompt)
        assert peer.tokens["middle"] == said([*prompt[:middle], 40, 41, 42])
        for where, request in (
            (len(prompt) + 9, 6),
            (len(prompt) - 30, 16),
        ):  # the answer's, the prompt's
            answer = said(prompt)
            await peer.send({"type": "rollback", "id": request, "to": where})
            await peer.terminal(request)
            peer.truncate("main", where)
            shown = len(peer.tokens["main"])
            await peer.send(
                {"type": "append", "id": request + 1, "tokens": [50]}, peer.greedy(request + 2)
            )
            await peer.terminal(request + 2)
            kept = [*prompt, *answer][:where]
            assert peer.tokens["main"][shown:] == said([*kept, 50])


@pytest.mark.parametrize("windowed", ["gemma3", "mistral"], indirect=True)
async def test_in_8_bits_as_with_all_keys_and_values(serving: Any, windowed: Any) -> None:
    settings, _ = windowed
    settings["model"] |= {"quantization": "int8"}
    said: list[list[list[int]]] = []

    async def talk(served: Any, contents: Sequence[str]) -> list[int]:
        async with served.connect() as peer:
            await peer.open(tokens=True)
            for turn, content in enumerate(contents):
                await peer.say(2 * turn + 1, content, max_tokens=40)
            return list(peer.tokens["main"])

    for window_tokens, kv_tokens, draft in (
        (0, 4096, "none"),
        (1024, 4096, "ngram"),
        (300, 700, "none"),
    ):
        settings["model"] |= {"window_tokens": window_tokens, "kv_tokens": kv_tokens, "draft": draft}
        async with serving(**settings) as served:
            _, info = await served.request("GET", "/v1/info")
            assert info["model"]["window_pages"] == window_tokens
            assert info["model"]["quantization"] == "int8"
            said.append(await asyncio.gather(*(talk(served, contents) for contents in CHATS)))
            await served.quiet()
    assert said[0] == said[1] == said[2]
