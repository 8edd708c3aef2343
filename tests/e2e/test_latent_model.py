"""A tiny model with latent attention through the whole server, against `transformers`' generate."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from tests.e2e.references import EOS, greedy_of
from tests.e2e.test_real_model import CHATS, llama, turns


def saved(folder: Path, tokenizer: Path) -> Any:
    """DeepSeek V2's kinds of layers with random weights; returned as well."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    torch.manual_seed(0)
    shape = DeepseekV2Config(
        vocab_size=json.loads((tokenizer / "config.json").read_text())["vocab_size"],
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, initializer_range=0.1, bos_token_id=None, eos_token_id=EOS,
        pad_token_id=0, kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=16,
        v_head_dim=16, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        moe_intermediate_size=32, first_k_dense_replace=1,
    )  # fmt: skip
    model = DeepseekV2ForCausalLM(shape).eval()
    for name, weight in model.named_parameters():
        if "mlp.experts" in name or name.endswith("gate.weight"):
            torch.nn.init.normal_(weight, 0.0, 0.1)
    model.save_pretrained(folder)
    return model


async def test_after_eviction_and_a_restart(serving: Any, llama_folder: Path, tmp_path: Path) -> None:
    """A pool for one or two of four conversations, and a server that goes on with one of them."""
    model = saved(tmp_path / "deepseek", llama_folder)
    reference = greedy_of(model)
    settings = llama(tmp_path / "deepseek", kv_tokens=320)
    kept = {"store": tmp_path / "s.db", "grace_s": 0.0}
    async with serving(**settings, server=kept) as served:
        oracle = served.oracle
        async with served.connect() as peer:
            state = await peer.open(tokens=True)
            await peer.say(1, CHATS[0][0], max_tokens=24)
            first = oracle.turn(CHATS[0][0])
            answer = reference(first, 24)
            assert peer.tokens["main"] == answer
            await asyncio.gather(*(turns(served, reference, contents) for contents in CHATS[1:]))
        await served.quiet()
    async with serving(**settings, server=kept) as served, served.connect() as again:
        again.follow(peer)
        login = {"session": state["session"], "key": state["key"]}
        assert (await again.open(**login, **peer.seen, tokens=True))["resumed"]
        done = await again.say(3, CHATS[0][1], max_tokens=24)
        prompt = oracle.next_turn([*first, *answer], CHATS[0][1])
        assert again.tokens["main"][-done["usage"]["output"] :] == reference(prompt, 24)
