"""A plain Llama for training, with the parameter names of Hugging Face's LlamaForCausalLM.

Knows the forward pass, attention within documents, and how to write a folder that `transformers` and
Ramify load. Does not know data, optimizers or generation (`evaluate.py` generates through the folder).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

SHARD_BYTES = 14 * 2**20


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; head_dim is hidden / heads."""

    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 8
    intermediate: int = 1408
    vocab: int = 8192
    context: int = 2048
    theta: float = 10000.0
    epsilon: float = 1e-5


SHAPES = {
    "default": Shape(),
    "deep": Shape(hidden=448, layers=10, heads=7, kv_heads=7, intermediate=1280),
    "gqa": Shape(hidden=512, layers=8, heads=8, kv_heads=4, intermediate=1536),
    "draft": Shape(hidden=192, layers=4, heads=3, kv_heads=3, intermediate=512),
    "tiny": Shape(hidden=64, layers=2, heads=1, kv_heads=1, intermediate=128),
}


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, H]."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.epsilon).to(x.dtype)


# What a server does where a client does not say: the transcripts in the README were sampled so.
GENERATION = {
    "do_sample": True, "temperature": 0.7, "top_k": 40, "eos_token_id": 2, "pad_token_id": 0, "max_new_tokens": 256,
}  # fmt: skip


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves convention; x: [B, heads, T, D], cos and sin: [T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention that does not look across documents."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.head_dim = shape.hidden // shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * self.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | Tensor | None) -> Tensor:
        """x: [B, T, H]; mask: a block mask, a boolean [B, 1, T, T], or None for plain causal."""
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = self.heads != self.kv_heads
        if isinstance(mask, BlockMask):
            y = flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
        elif mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        assert isinstance(y, Tensor)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    """Gated feed-forward layer (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each with its norm before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | Tensor | None) -> Tensor:
        """x: [B, T, H]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Embedding, layers and the last norm; named `model` in a checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.epsilon)


class Llama(nn.Module):
    """The language model; its output matrix is the embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        head_dim = shape.hidden // shape.heads
        rates = shape.theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(shape.context).float(), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * shape.layers) ** 0.5 if deep else 0.02
                nn.init.normal_(weight, std=std)

    def forward(self, tokens: Tensor, mask: BlockMask | Tensor | None = None) -> Tensor:
        """tokens: [B, T] to logits [B, T, V]."""
        return self.head(self.hidden(tokens, mask))

    def head(self, x: Tensor) -> Tensor:
        """x: [..., H] to logits [..., V]."""
        return F.linear(x, self.model.embed_tokens.weight)

    def hidden(self, tokens: Tensor, mask: BlockMask | Tensor | None = None) -> Tensor:
        """tokens: [B, T] to [B, T, H], after the last norm."""
        x = self.model.embed_tokens(tokens)
        if torch.is_autocast_enabled(tokens.device.type):
            x = x.to(torch.get_autocast_dtype(tokens.device.type))
        cos, sin = self.cos[: tokens.shape[1]].to(x.dtype), self.sin[: tokens.shape[1]].to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        out: Tensor = self.model.norm(x)
        return out


def document_mask(documents: Tensor) -> BlockMask | Tensor:
    """Attention mask for rows packed with several documents; documents: [B, T] numbers."""
    batch, length = documents.shape

    def visible(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (documents[b, q] == documents[b, k])

    if documents.is_cuda:
        return _block_mask(visible, batch, length)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


def _block_mask(visible: Any, batch: int, length: int) -> BlockMask:
    return _compiled_block_mask(visible, batch, None, length, length, device="cuda")


_compiled_block_mask = torch.compile(create_block_mask, dynamic=False)


def config(shape: Shape) -> dict[str, Any]:
    """config.json of the folder."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def save_folder(model: Llama, tokenizer: Path, out: Path) -> None:
    """Write a folder with weights in bfloat16, in shards of at most 15 MiB."""
    out.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, weight in model.state_dict().items():
        tensor = weight.detach().to("cpu", torch.bfloat16).contiguous()
        bytes_ = tensor.numel() * 2
        if shards[-1] and size + bytes_ > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += bytes_
        total += bytes_
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        (out / file).chmod(0o644)
        places.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write_json(out / "model.safetensors.index.json", index)
    write_json(out / "config.json", config(model.shape))
    write_json(out / "generation_config.json", GENERATION)
    shutil.copyfile(tokenizer / "tokenizer.json", out / "tokenizer.json")
    described = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(out / "tokenizer_config.json", {**described, "model_max_length": model.shape.context})


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON with a line break at the end."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def load_folder(folder: Path, context: int = 0) -> Llama:
    """The model of a folder that `save_folder` wrote, in float32; `context`: at least so many positions."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(
        hidden=values["hidden_size"], layers=values["num_hidden_layers"], heads=values["num_attention_heads"],
        kv_heads=values["num_key_value_heads"], intermediate=values["intermediate_size"],
        vocab=values["vocab_size"], context=max(context, values["max_position_embeddings"]), theta=values["rope_theta"],
        epsilon=values["rms_norm_eps"],
    )  # fmt: skip
    model = Llama(shape)
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        state.update(load_file(path))
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model


def describe(model: Llama) -> str:
    """Sizes in one line."""
    count = sum(weight.numel() for weight in model.parameters())
    return f"{count / 1e6:.2f}M parameters, {asdict(model.shape)}"
