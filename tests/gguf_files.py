"""GGUF files for tests, made by the package `gguf` as llama.cpp's own converter makes them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf import (
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    get_tensor_name_map,
    quants,
)
from safetensors.numpy import load_file, save_file

Floats = npt.NDArray[np.float32]
KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]
_K_FACTORS = {"Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)}  # where their float16 lie
_NORM = "norm.weight"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


SMALL = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
    "initializer_range": 0.2, "rms_norm_eps": 1e-5, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def checkpoint(folder: Path, family: str, sizes: dict[str, Any]) -> Path:
    """Random weights in safetensors, no norm and no bias trivial."""
    named = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, named)(**sizes))
    for name, weight in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return folder


def blocks(values: Floats, kind: str) -> tuple[npt.NDArray[Any], Floats]:
    """The values in blocks, and the floats that these stand for. K blocks hold random codes instead."""
    type_ = GGMLQuantizationType[kind]
    if kind not in _K_FACTORS:
        raw = quants.quantize(values, type_)
    else:
        size = quants.GGML_QUANT_SIZES[type_]
        random = np.random.default_rng(values.size)
        raw = random.integers(
            0, 256, (*values.shape[:-1], values.shape[-1] // size[0], size[1]), np.uint8
        )
        first, last = _K_FACTORS[kind]
        factors = random.uniform(0.5, 1.5, (*raw.shape[:-1], (last - first) // 2)) * 1e-4
        raw[..., first:last] = factors.astype(np.float16).view(np.uint8)
        raw = raw.reshape(*values.shape[:-1], -1)
    return raw, quants.dequantize(raw, type_)


def neighbours(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of q or k as llama.cpp has them: `permute` of its convert_hf_to_gguf.py."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def convert(
    folder: Path,
    path: Path,
    arch: str,
    kind: Callable[[str], str] = lambda name: "F32",
    edit: Callable[[GGUFWriter], None] = lambda writer: None,
    tokenizer: Callable[[GGUFWriter, int], None] | None = None,
    leave_out: tuple[str, ...] = (),
) -> Path:
    """Write the checkpoint in `folder` as a GGUF file, and its weights again as the floats of that.

    `kind`: how the matrix of that name is written. `edit` may add metadata and tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    writer = GGUFWriter(path, arch)
    _metadata(writer, config, arch)
    (tokenizer or plain_tokenizer)(writer, config["vocab_size"])
    number = next(each for each, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(number, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors, folded = _experts_stacked(tensors)
    for name, values in tensors.items():
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert there is not None, name
        written = values
        if arch.startswith("gemma") and name.endswith(_NORM):
            written = values + 1
        plain = values.ndim == 1 or "bias" in name or name.endswith(("gate.weight", "router.weight"))
        one = "F32" if plain else kind(name)
        raw, tensors[name] = (written, values) if one == "F32" else blocks(values, one)
        if name.endswith("shared_expert_gate.weight"):
            raw, one = raw[0], "F32"
        if arch in ("llama", "granite", "granitemoe") and (part := name.split(".")[-2]) in heads:
            raw = neighbours(raw, heads[part])
        if there not in leave_out:
            writer.add_tensor(there, raw, raw_dtype=None if one == "F32" else GGMLQuantizationType[one])
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(folded(tensors), folder / "model.safetensors", {"format": "pt"})
    return path


def _experts_stacked(
    tensors: dict[str, Floats],
) -> tuple[dict[str, Floats], Callable[[dict[str, Floats]], dict[str, Floats]]]:
    """With experts as llama.cpp's converter has them, gate and up apart; and the way back."""
    found: dict[str, Floats] = {}
    numbered: dict[str, list[str]] = {}
    halves: dict[str, tuple[str, str]] = {}
    for name, values in tensors.items():
        if (match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)) is not None:
            numbered.setdefault(f"{match[1]}.{match[3]}", []).append(name)
        elif "input_linear" in name or "gate_up_proj" in name:
            turned, end = "gate_up_proj" in name, "bias" if "bias" in name else "weight"
            own = values.swapaxes(1, -1) if turned and end == "weight" else values
            prefix = re.sub(r"(mlp|block_sparse_moe)\..*", "mlp.experts", name)
            pair = f"{prefix}.gate_proj.{end}", f"{prefix}.up_proj.{end}"
            both = (own[:, ::2], own[:, 1::2]) if turned else np.split(own, 2, 1)
            found |= {each: np.ascontiguousarray(half) for each, half in zip(pair, both, strict=True)}
            halves[name] = pair
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = np.ascontiguousarray(values.swapaxes(1, 2))
        elif name.endswith("experts.down_proj_bias"):
            found[name.replace("_bias", ".bias")] = values
        else:
            found[name + ".weight" * name.endswith("sinks")] = values
    ordered = {each: sorted(names, key=lambda one: int(one.split(".")[-3]))
               for each, names in numbered.items()}  # fmt: skip
    found |= {each: np.stack([tensors[name] for name in names]) for each, names in ordered.items()}

    def folded(stacked: dict[str, Floats]) -> dict[str, Floats]:
        back: dict[str, Floats] = {}
        for each, names in ordered.items():
            back |= dict(zip(names, stacked[each], strict=True))
        for name, (gate, up) in halves.items():
            if "gate_up_proj" not in name:
                back[name] = np.concatenate((stacked[gate], stacked[up]), 1)
            else:
                both = np.stack((stacked[gate], stacked[up]), 2)
                both = both.reshape(len(both), -1, *both.shape[3:])
                back[name] = both if "bias" in name else np.ascontiguousarray(both.swapaxes(1, 2))
        for name in tensors.keys() - back.keys():
            if name.endswith("experts.down_proj"):
                back[name] = np.ascontiguousarray(stacked[f"{name}.weight"].swapaxes(1, 2))
            elif name.endswith("experts.down_proj_bias"):
                back[name] = stacked[name.replace("_bias", ".bias")]
            else:
                back[name] = stacked[name + ".weight" * name.endswith("sinks")]
        return back

    return found, folded


def _metadata(writer: GGUFWriter, config: dict[str, Any], arch: str) -> None:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("num_experts_per_tok"):
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch == "gpt-oss":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch in ("granite", "granitemoe"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    elif arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def plain_tokenizer(writer: GGUFWriter, size: int) -> None:
    """Tokens without meaning: for tests of weights."""
    tokens = ["a", "b", "ab", *(f"<{number}>" for number in range(3, size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)


def bytewise(folder: Path, pre: str) -> Callable[[GGUFWriter, int], None]:
    """The tokenizer.json of a folder, as llama.cpp's converter writes it."""

    def write(writer: GGUFWriter, size: int) -> None:
        whole = json.loads((folder / "tokenizer.json").read_text())
        added = {each["id"]: each for each in whole["added_tokens"]}
        texts = {number: text for text, number in whole["model"]["vocab"].items()}
        texts |= {number: each["content"] for number, each in added.items()}
        kinds = {number: 3 if each["special"] else 4 for number, each in added.items()}
        merges = whole["model"]["merges"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([texts.get(number, f"[PAD{number}]") for number in range(size)])
        writer.add_token_types(
            [kinds.get(number, 1 if number in texts else 5) for number in range(size)]
        )
        writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
        writer.add_chat_template(TEMPLATE)
        ends = next(number for number, text in texts.items() if text == "<|im_end|>")
        writer.add_eos_token_id(ends)

    return write
