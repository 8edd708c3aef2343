"""GGUF files of random blocks in the shapes of published models: for benchmarks, with a whole tokenizer.

    python benchmarks/gguf_shapes.py qwen3-0.6b Q4_K_M FILE

Q4_K_M is mixed as llama.cpp's own tool mixes it: values, the way back of the feed-forward in half of the
layers, and logits are Q6_K. Numbers are small enough for every format to stay finite.
"""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.constants import GGML_QUANT_SIZES

QWEN3: dict[str, Any] = {
    "arch": "qwen3", "vocab": 151_936, "heads": 16, "kv_heads": 8, "dim": 128, "layers": 28,
    "theta": 1e6,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3 | {"hidden": 1024, "inner": 3072},
    "qwen3-1.7b": QWEN3 | {"hidden": 2048, "inner": 6144},
    "granite-1b-a400m": {
        "arch": "granitemoe", "vocab": 49_155, "heads": 16, "kv_heads": 8, "dim": 64, "layers": 24,
        "theta": 10_000.0, "hidden": 1024, "inner": 512, "experts": 32, "top": 8,
    },
}  # fmt: skip
KINDS = ("Q4_K_M", "Q8_0", "Q4_0")
_SCALE = 0.02  # of the numbers
_HALVES = {"Q8_0": (0, 2, 127), "Q4_0": (0, 2, 8), "Q4_K": (0, 4, 63 * 15), "Q6_K": (208, 210, 128 * 32)}
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def write(shape: str, kind: str, path: Path) -> Path:
    """Write the file unless it is there."""
    if path.exists():
        return path
    sizes, part = SHAPES[shape], path.with_suffix(".part")
    writer = GGUFWriter(part, sizes["arch"])
    _metadata(writer, sizes)
    _tokenizer(writer, sizes["vocab"])
    for name, dims in _tensors(sizes).items():
        if len(dims) == 1 or "gate_inp" in name:
            values = np.ones(dims, np.float32) if len(dims) == 1 else _normal(dims)
            writer.add_tensor(name, values)
        else:
            own = _kind(name, kind, sizes["layers"])
            writer.add_tensor(name, _blocks(dims, own), raw_dtype=GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)
    return path


def _normal(dims: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).normal(0, _SCALE, dims).astype(np.float32)


def _tensors(sizes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = sizes["hidden"], sizes["inner"]
    q, kv = sizes["heads"] * sizes["dim"], sizes["kv_heads"] * sizes["dim"]
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (sizes["vocab"], hidden)}
    found["output_norm.weight"] = (hidden,)
    for layer in range(sizes["layers"]):
        own: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (q, hidden), "attn_k": (kv, hidden),
            "attn_v": (kv, hidden), "attn_output": (hidden, q),
        }  # fmt: skip
        if sizes["arch"] == "qwen3":
            own |= {"attn_q_norm": (sizes["dim"],), "attn_k_norm": (sizes["dim"],)}
        if "experts" in sizes:
            many = sizes["experts"]
            own |= {
                "ffn_gate_inp": (many, hidden), "ffn_gate_exps": (many, inner, hidden),
                "ffn_up_exps": (many, inner, hidden), "ffn_down_exps": (many, hidden, inner),
            }  # fmt: skip
        else:
            own |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
        found |= {f"blk.{layer}.{name}.weight": dims for name, dims in own.items()}
    return found


def _kind(name: str, kind: str, layers: int) -> str:
    if kind != "Q4_K_M":
        return kind
    if name == "token_embd.weight":
        return "Q6_K"
    layer = int(name.split(".")[1])
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "Q6_K" if more and ("attn_v" in name or "ffn_down" in name) else "Q4_K"


def _blocks(dims: tuple[int, ...], kind: str) -> npt.NDArray[np.uint8]:
    """uint8 [.., bytes of a row]: random codes, factors of one size."""
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    draw = np.random.default_rng(dims[0])
    raw = draw.integers(0, 256, (*dims[:-1], dims[-1] // numbers, size), np.uint8)
    first, last, most = _HALVES[kind]
    raw[..., first:last] = np.full((last - first) // 2, 2 * _SCALE / most, np.float16).view(np.uint8)
    return raw.reshape(*dims[:-1], -1)


def _metadata(writer: GGUFWriter, sizes: dict[str, Any]) -> None:
    writer.add_block_count(sizes["layers"])
    writer.add_context_length(32_768)
    writer.add_embedding_length(sizes["hidden"])
    writer.add_feed_forward_length(sizes["inner"])
    writer.add_head_count(sizes["heads"])
    writer.add_head_count_kv(sizes["kv_heads"])
    writer.add_key_length(sizes["dim"])
    writer.add_value_length(sizes["dim"])
    writer.add_rope_dimension_count(sizes["dim"])
    writer.add_rope_freq_base(sizes["theta"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(sizes["vocab"])
    if "experts" in sizes:
        writer.add_expert_count(sizes["experts"])
        writer.add_expert_used_count(sizes["top"])
    if sizes["arch"] == "granitemoe":
        writer.add_attention_scale(1 / sizes["dim"])
        writer.add_embedding_scale(12.0)
        writer.add_residual_scale(0.22)
        writer.add_logit_scale(6.0)


def _tokenizer(writer: GGUFWriter, size: int) -> None:
    """Bytewise merges of random letters: as many tokens and merges as a published one has."""
    draw = random.Random(0)
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [chr(256 + number) for number in range(256 - len(visible))]
    tokens = [*map(chr, visible), *others]
    known, words, merges = set(tokens), list(_LETTERS), []
    while len(tokens) < size - 3:
        one, other = draw.choice(words), draw.choice(words)
        if len(one + other) <= 12 and one + other not in known:
            merges.append(f"{one} {other}")
            for each in (tokens, words):
                each.append(one + other)
            known.add(one + other)
    kinds = [TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL] * 3
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, "<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(size - 1)


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
