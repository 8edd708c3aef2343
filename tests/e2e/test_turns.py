"""What a turn of a chat computes: only what is new. Random weights, exact counts."""

import asyncio
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ramify.actors.engine import Engine, running_engine
from ramify.clients import connect
from ramify.clients.generation import Result
from ramify.protocol.config import EngineConfig, ModelConfig, ServerConfig

CHATS = [
    ["Capital of France?", "And Spain?", "Äpfel, 東京, 🙂"],
    ["Plan a 1-day trip.", "Merge the best parts."],
    ["one two three four five", "six", "seven eight", "nine ten"],
    ["The quick brown fox", "jumps over the lazy dog.", "naïve café"],
    ["hello world", "hello", "world"],
    ["Capital of France?", "Paris.", "And Spain? Madrid."],
]
LAST = ["(the last step)"]  # steps come back in order: once this one has, so have all others
OPTIONS: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0, "repetition_penalty": 1.0}


@pytest.fixture(scope="module")
def model(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama. Its end of sequence is sampled now and then: several ids count as one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=[2, *range(40, 60)],
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("model") / "llama"
    shutil.copytree(tokenizer_folder, folder)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


async def hold(model: Path, kv_tokens: int, at_once: int) -> tuple[list[list[Result]], int]:
    """All chats, `at_once` of them at any time, and the tokens that went through the model."""
    settings = ModelConfig(path=model, device="cpu", threads=1, kv_tokens=kv_tokens)
    config = EngineConfig(model=settings, server=ServerConfig(port=0))
    async with running_engine(config) as engine:
        before, places = executor_tokens(engine), asyncio.Semaphore(at_once)

        async def one(texts: Sequence[str]) -> list[Result]:
            async with places, connect(engine.url) as session:
                return [await session.main.chat(text, **OPTIONS) for text in texts]

        chats = [*await asyncio.gather(*map(one, CHATS)), await one(LAST)]
        return chats, executor_tokens(engine) - before


def executor_tokens(engine: Engine) -> int:
    """`ramify_executor_tokens_total`, as anybody can read it at /metrics."""
    found = re.search(rb"^ramify_executor_tokens_total (\d+)", engine.metrics.render(), re.MULTILINE)
    assert found
    return int(found[1])


def check(chats: list[list[Result]], *, evicting: bool) -> None:
    """Each turn finds what the turn before ran, all but its last token; `evicting`: at most that."""
    begins = [texts[0] for texts in [*CHATS, LAST]]
    for first, chat in zip(begins, chats, strict=True):
        kept = 0
        for turn in chat:
            usage = turn.usage
            assert usage.cached + usage.computed == usage.prompt
            assert usage.computed >= 1
            if kept:
                assert usage.cached >= kept or evicting
                assert (
                    usage.cached <= kept or begins.count(first) > 1
                )  # the other one's, which is longer
            kept = usage.prompt + usage.output - 1
            # a stop token that is not the template's own leaves the branch, and the template's end comes
            assert turn.position == kept + 1 or (turn.reason == "stop" and turn.position >= kept)


async def test_a_turn_computes_only_what_is_new(model: Path) -> None:
    chats, ran = await hold(model, 4096, 4)
    check(chats, evicting=False)
    turns = [turn for chat in chats for turn in chat]
    assert {turn.reason for turn in turns} == {"length", "stop"}  # both kinds of end were met
    surplus = ran - sum(turn.usage.computed + turn.usage.output - 1 for turn in turns)
    assert 0 <= surplus <= sum(turn.reason == "stop" for turn in turns)  # the step that was under way
    assert ran < sum(turn.usage.prompt + turn.usage.output - 1 for turn in turns)


async def test_a_pool_that_evicts_changes_no_text(model: Path) -> None:
    roomy, _ = await hold(model, 4096, len(CHATS))
    tight, _ = await hold(model, 192, len(CHATS))
    check(tight, evicting=True)
    assert [turn.text for chat in tight for turn in chat] == [
        turn.text for chat in roomy for turn in chat
    ]
    assert cached(tight) < cached(roomy)


def cached(chats: list[list[Result]]) -> int:
    return sum(turn.usage.cached for chat in chats for turn in chat)
