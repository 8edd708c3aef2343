"""Tiny random models of `transformers`, saved for a server, and what they say after given tokens."""

import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

EOS = 2
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": EOS, "tie_word_embeddings": True,
}  # fmt: skip
Reference = Callable[[Sequence[int], int], list[int]]


def saved(config: str, model: str, fields: dict[str, Any], tokenizer: Path, folder: Path) -> Reference:
    """Save a model and the tokenizer in `folder`. Returns what the model says greedily."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**(SMALL | fields))).eval()
    made.save_pretrained(folder)
    return greedy_of(made)


def greedy_of(model: Any) -> Reference:
    """Many tests ask for the same: answers are kept."""
    settings = transformers.GenerationConfig(do_sample=False, eos_token_id=EOS, pad_token_id=0)

    @cache
    def kept(tokens: tuple[int, ...], n: int) -> tuple[int, ...]:
        ids = torch.tensor([tokens])
        settings.max_new_tokens = n
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        return tuple(int(token) for token in out[0, len(tokens) :])

    return lambda tokens, n: list(kept(tuple(tokens), n))
