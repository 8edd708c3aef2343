"""Tiny random models with fixed states and with windows, over a restart with `--kv-disk`.

The next server says what `transformers` says, and computes next to nothing of what the last one did.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.references import EOS, saved
from tests.e2e.test_real_hybrids import FAMILIES as HYBRIDS
from tests.e2e.test_real_windows import FAMILIES as WINDOWS
from tests.e2e.test_real_windows import WINDOW

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen3_5": ("Qwen3_5Text", HYBRIDS["Qwen3_5"], {"state_slots": 16}),
    "Gemma3": (*WINDOWS["gemma3"], {"window_tokens": 1024}),
}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("family", MODELS)
async def test_what_the_last_server_computed_is_not_again(
    family: str, serving: Any, tokenizer_folder: Path, tmp_path: Path
) -> None:
    config, fields, sizes = MODELS[family]
    fields = {"num_hidden_layers": 3, "max_position_embeddings": 512, "sliding_window": WINDOW} | fields
    model = f"{family}ForCausalLM"
    reference = saved(f"{config}Config", model, fields, tokenizer_folder, tmp_path)
    served = {"path": tmp_path, "device": "cpu", "threads": 1, "step_tokens": 64}
    kept = {"kv_tokens": 2048, "kv_host": 8 << 20, "kv_disk": tmp_path / "kv", "quantization": "none"}
    settings = {"real": True, "model": served | kept | sizes}
    prompt = [10 + (7 * i + i * i) % 400 for i in range(190)]
    answer = [token for token in reference(prompt, 12) if token != EOS]
    for found in ({}, {"disk": len(prompt) - 1}):
        async with serving(**settings) as server:
            async with server.connect() as peer:
                append = {"type": "append", "id": 1, "tokens": prompt}
                await peer.open(append, peer.greedy(2, max_tokens=12), tokens=True)
                done = await peer.terminal(2)
                assert (peer.tokens["main"], done["usage"]["hit"]) == (answer, found)
            await server.quiet()
            residency = server.engine.cache.residency
            while residency.unsaved or residency.stored.disk.backlog:
                await asyncio.sleep(0.01)
