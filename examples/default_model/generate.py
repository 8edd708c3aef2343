"""Generate answers for many conversations at once with a key-value cache, in plain torch.

A second implementation of what `transformers.generate` does, many times faster for the evaluation's
large batches; `evaluate.py --check` compares the two. Does not know what the texts mean.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from model import Layer, Llama
from torch import Tensor


class Cache:
    """Keys and values of all layers; rows are padded on the left to one length."""

    def __init__(self, model: Llama, batch: int, length: int, device: str) -> None:
        shape = model.shape
        size = (shape.layers, batch, shape.kv_heads, length, shape.hidden // shape.heads)
        self.keys = torch.zeros(size, device=device)
        self.values = torch.zeros(size, device=device)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def forward(
    model: Llama, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Cache, start: int
) -> Tensor:
    """Logits of the last place; tokens, positions: [B, T]; mask: [B, 1, T, start + T]; [B, V]."""
    batch, length = tokens.shape
    end = start + length
    x = model.model.embed_tokens(tokens)
    cos, sin = model.cos[positions][:, None], model.sin[positions][:, None]
    for number, module in enumerate(model.model.layers):
        layer = cast(Layer, module)
        attention = layer.self_attn
        inner = layer.input_layernorm(x)
        q, k, v = (
            proj(inner).view(batch, length, -1, attention.head_dim).transpose(1, 2)
            for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cache.keys[number, :, :, start:end] = _rotate(k, cos, sin)
        cache.values[number, :, :, start:end] = v
        y = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), cache.keys[number, :, :, :end], cache.values[number, :, :, :end],
            attn_mask=mask, enable_gqa=attention.heads != attention.kv_heads,
        )  # fmt: skip
        x = x + attention.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return F.linear(model.model.norm(x[:, -1]), model.model.embed_tokens.weight)


@torch.no_grad()
def generate(
    model: Llama,
    prompts: list[list[int]],
    limit: int,
    stop: int = 2,
    temperature: float = 0.0,
    top_k: int = 40,
) -> list[list[int]]:
    """New tokens for each prompt, up to and with `stop` when it comes within `limit` tokens."""
    device = str(model.cos.device)
    batch, width = len(prompts), max(map(len, prompts))
    tokens = torch.zeros(batch, width, dtype=torch.long)
    real = torch.zeros(batch, width + limit, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        real[row, width - len(prompt) :] = True
    tokens, real = tokens.to(device), real.to(device)
    positions = (real.cumsum(1) - 1).clamp(min=0)
    cache = Cache(model, batch, width + limit, device)
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    # A padding place sees itself, so that no row of the softmax is empty.
    mask = (causal & real[:, None, None, :width]) | torch.eye(width, dtype=torch.bool, device=device)
    logits = forward(model, tokens, positions[:, :width], mask, cache, 0)
    made = torch.zeros(batch, limit, dtype=torch.long, device=device)
    done = torch.zeros(batch, dtype=torch.bool, device=device)
    for step in range(limit):
        if temperature:
            best = torch.topk(logits / temperature, top_k)
            drawn = torch.multinomial(best.values.softmax(-1), 1)
            chosen = best.indices.gather(1, drawn)[:, 0]
        else:
            chosen = logits.argmax(-1)
        made[:, step] = chosen
        done |= chosen == stop
        if step + 1 == limit or (step % 8 == 7 and bool(done.all())):
            break
        place = width + step
        seen = real[:, None, None, : place + 1]
        logits = forward(model, chosen[:, None], positions[:, place : place + 1], seen, cache, place)
    rows = made.tolist()
    return [row[: row.index(stop) + 1] if stop in row else row for row in rows]
