"""`benchmarks/chat_turns.py` at a small size: what a turn computes, on real (random) weights."""

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ramify.protocol.config import EngineConfig, ModelConfig, ServerConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CHATS = [
    ["Capital of France?", "And Spain?", "Äpfel, 東京, 🙂"],
    ["Plan a 1-day trip.", "Merge the best parts."],
    ["one two three four five", "six", "seven eight", "nine ten"],
    ["The quick brown fox", "jumps over the lazy dog.", "naïve café"],
    ["hello world", "hello", "world"],
    ["Capital of France?", "Paris.", "And Spain? Madrid."],
]
TURNS = sum(map(len, CHATS))


@pytest.fixture
def chat_turns(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("chat_turns")


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


def config(model: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=model, device="cpu", threads=1, **settings), server=ServerConfig(port=0)
    )


async def test_a_turn_computes_only_what_is_new(chat_turns: ModuleType, model: Path) -> None:
    run = await chat_turns.hold(config(model, kv_tokens=4096), CHATS, 4, 16)
    assert chat_turns.faults(run) == []
    assert run.unfinished == 0
    summary = run.summary()
    assert summary["turns"] == TURNS + 1  # and the one that waits for the last step
    assert set(summary["reasons"]) == {"length", "stop"}  # both kinds of end were met
    assert summary["executor"] < summary["stateless"]


async def test_a_pool_that_evicts_changes_no_text(chat_turns: ModuleType, model: Path) -> None:
    roomy = await chat_turns.hold(config(model, kv_tokens=4096), CHATS, len(CHATS), 16)
    tight = await chat_turns.hold(config(model, kv_tokens=192), CHATS, len(CHATS), 16)
    assert chat_turns.faults(tight, evicting=True) == []
    assert chat_turns.differences(roomy, tight) == []
    assert tight.total("cached") < roomy.total("cached")


async def test_a_wrong_count_is_found(chat_turns: ModuleType, model: Path) -> None:
    run = await chat_turns.hold(config(model, kv_tokens=4096), CHATS[:1], 1, 4)
    (first, second, *_), *_ = run.chats
    less = chat_turns.Turn(**{**chat_turns.asdict(second), "cached": second.cached - 1})
    wrong = chat_turns.Run(run.conversations, [[first, less], *run.chats[1:]], run.executor, 0, 0.0)
    assert len(chat_turns.faults(wrong)) == 3  # the cached tokens, the prompt, the sum of all


def test_the_command(
    chat_turns: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.dumps({"history": [{"user": text, "bot": "-"} for text in chat]}) for chat in CHATS]
    (tmp_path / chat_turns.DATA).write_text("\n".join(lines))
    flags = f"--data {tmp_path} --model {model} --conversations 2 --kv-tokens 2048 --threads 1"
    monkeypatch.setattr(sys, "argv", ["chat_turns.py", *flags.split(), "--json", str(tmp_path / "out")])
    assert chat_turns.main() == 0
    (result,) = json.loads((tmp_path / "out").read_text())["results"].values()
    assert result["turns"] == sum(map(len, CHATS[:2])) + 1
