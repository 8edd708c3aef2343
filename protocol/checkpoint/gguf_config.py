"""The config.json and generation_config.json that the metadata of a GGUF file stands for.

An architecture of llama.cpp becomes one of `transformers`, whose family then reads the fields. What has
no field there is refused by name.
"""

from typing import Any

from ramify.protocol.checkpoint.gguf import GgufFile

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "granite": ("GraniteForCausalLM", "granite"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe"),
    "olmoe": ("OlmoeForCausalLM", "olmoe"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
}
_EXPERTS = {  # what config.json calls an expert's size; "llama" with experts is Mixtral
    "llama": "intermediate_size", "qwen2moe": "moe_intermediate_size",
    "qwen3moe": "moe_intermediate_size", "granitemoe": "intermediate_size",
    "olmoe": "intermediate_size", "gpt-oss": "intermediate_size",
}  # fmt: skip
_RENORMALISED = {"qwen2moe": False, "qwen3moe": True, "olmoe": False}
_LOCAL = ("llama", "granitemoe", "gpt-oss")  # whose config.json calls their number so
_MOST_EXPERTS = 1024
_STACK = "blk.0.ffn_up_exps.weight"
INTERLEAVED = ("llama", "granite", "granitemoe")
"""Whose heads turn neighbours: llama.cpp reordered the rows of q and k."""

_MOST_LAYERS = 1024
_MOST_DIM = 4096  # of a head: tables of positions are as wide
_GRANITE = {  # factors, by their names there
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_BY_HIDDEN = {
    ("gemma2", 46),
    ("gemma3", 62),
}  # the 27B ones: scores are scaled by the width, not by heads
_ENDS = ("eos", "eot", "eom")
_END_TEXTS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
_TOKENS = "tokenizer.ggml.tokens"
_TYPES = {"F32": "float32", "F16": "float16"}


def architecture(file: GgufFile) -> str:
    """As llama.cpp calls it. Raises ModelError for one that is not served from GGUF files."""
    name = file.text("general.architecture")
    if name not in _ARCHITECTURES:
        served = ", ".join(_ARCHITECTURES)
        raise file.refused(f"general.architecture is {name!r}: of GGUF files {served} are served; give "
                           "the model's safetensors checkpoint")  # fmt: skip
    return name


def config_of(file: GgufFile) -> dict[str, Any]:
    """config.json. Raises ModelError."""
    name = architecture(file)
    if file.metadata.get("split.count", 1) != 1:
        raise file.refused(
            f"split.count is {file.metadata['split.count']}: the model is in several files; merge them "
            "with llama-gguf-split --merge"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.refused("tensor token_embd.weight is missing: download the file again")
    layers, hidden = (
        file.whole(f"{name}.block_count", _MOST_LAYERS),
        file.whole(f"{name}.embedding_length"),
    )
    heads = file.whole(f"{name}.attention.head_count")
    dim = file.whole(f"{name}.attention.key_length", _MOST_DIM, max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.whole(f"{name}.{key}", default=dim) != dim:
            raise file.refused(f"{name}.{key} is {file.metadata[f'{name}.{key}']}: heads of {dim} that "
                               "turn in part, or with other values, are not served")  # fmt: skip
    architecture_, model_type = _ARCHITECTURES[name]
    config = {
        "architectures": [architecture_],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(file, name, heads),
        "head_dim": dim,
        "max_position_embeddings": file.whole(f"{name}.context_length"),
        "rms_norm_eps": file.number(f"{name}.attention.layer_norm_rms_epsilon", 0, 1),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "dtype": _TYPES.get(embedding.type.name, "bfloat16"),
        "rope_theta": file.number(f"{name}.rope.freq_base", 1, 1e12, 10_000.0),
        "eos_token_id": generation_of(file)["eos_token_id"],
    }
    config |= _feed_forward(file, name)
    config |= _scaling(file, name, config)
    window = f"{name}.attention.sliding_window"
    if name == "llama" and file.metadata.get(window) and "num_local_experts" not in config:
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    if file.metadata.get(window):
        config["sliding_window"] = file.whole(window)
    if name.startswith("gemma"):
        scalar = hidden // heads if (name, layers) in _BY_HIDDEN else dim
        config |= {"query_pre_attn_scalar": scalar, **_numbers(file, name, _SOFTCAPS)}
    elif name.startswith("granite"):
        config |= _numbers(file, name, _GRANITE)
    return config


def _feed_forward(file: GgufFile, name: str) -> dict[str, Any]:
    """Sizes of feed-forwards, and of experts. Raises ModelError for routers of another kind."""
    dense = f"{name}.feed_forward_length"
    many = file.whole(f"{name}.expert_count", _MOST_EXPERTS, 0, least=0)
    if not many and (name not in _EXPERTS or name == "llama"):
        return {"intermediate_size": _same_in_all(file, dense)}
    stacked = file.tensors.get(_STACK)
    if name not in _EXPERTS:
        raise file.refused(f"{name}.expert_count is {many}: of GGUF files {', '.join(_EXPERTS)} are "
                           "served with experts; give the model's safetensors checkpoint")  # fmt: skip
    if stacked is None or len(stacked.shape) != 3 or stacked.shape[0] != many:
        shape = "missing" if stacked is None else list(stacked.shape)
        raise file.refused(f"{name}.expert_count is {many}, tensor {_STACK} is {shape}: must be a stack "
                           "of so many; convert the model again with a newer llama.cpp")  # fmt: skip
    _check_router(file, name)
    found: dict[str, Any] = {"num_local_experts" if name in _LOCAL else "num_experts": many}
    found["num_experts_per_tok"] = file.whole(f"{name}.expert_used_count", many)
    if dense in file.metadata:
        found["intermediate_size"] = _same_in_all(file, dense)
    found[_EXPERTS[name]] = stacked.shape[1]
    if name in _RENORMALISED:
        found["norm_topk_prob"] = file.flag(f"{name}.expert_weights_norm", _RENORMALISED[name])
    if name == "qwen2moe":
        shared = file.tensors.get("blk.0.ffn_up_shexp.weight")
        if shared is None:
            raise file.refused("tensor blk.0.ffn_up_shexp.weight is missing: download the file again")
        found["shared_expert_intermediate_size"] = shared.shape[0]
    if name == "llama":
        found |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    return found


def _check_router(file: GgufFile, name: str) -> None:
    """That nothing of the metadata changes how experts are chosen. Raises ModelError."""
    alike: dict[str, tuple[float, ...]] = {
        "expert_group_count": (0, 1), "expert_weights_scale": (0.0, 1.0),
        "expert_gating_func": (0, 3) if name == "gpt-oss" else (0, 1),
    }  # fmt: skip
    if name != "qwen2moe":
        alike |= {"expert_shared_count": (0,), "expert_shared_feed_forward_length": (0,)}
    for key, served in alike.items():
        value = file.metadata.get(f"{name}.{key}", served[0])
        if value not in served:
            raise file.refused(f"{name}.{key} is {value!r}: files with such experts are not served; "
                               "give the model's safetensors checkpoint")  # fmt: skip


def generation_of(file: GgufFile) -> dict[str, Any]:
    """generation_config.json: which tokens end a text. Raises ModelError."""
    tokens = tokens_of(file)
    found = [token_id(file, name) for name in _ENDS]
    ends = [each for each in found if each is not None]
    kinds = file.entries("tokenizer.ggml.token_type", int)
    ends += [number for number, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
             if kind == 3 and text in _END_TEXTS]  # fmt: skip
    return {"eos_token_id": list(dict.fromkeys(ends))}


def tokens_of(file: GgufFile) -> list[str]:
    """The texts of all tokens. Raises ModelError if there are none."""
    tokens: list[str] = file.entries(_TOKENS, str)
    if not tokens:
        raise file.refused(f"{_TOKENS} is missing: the file has no tokenizer; download another one")
    return tokens


def token_id(file: GgufFile, name: str) -> int | None:
    """The id of a token with a part in texts: "bos", "eos", ... Raises ModelError."""
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    count = len(tokens_of(file))
    found = file.whole(key, (1 << 32) - 1, least=0)
    if found == (1 << 32) - 1:
        return None  # how llama.cpp says "none"
    if found >= count:
        raise file.refused(f"{key} is {found}: there are {count} tokens")
    return found


def _kv_heads(file: GgufFile, name: str, heads: int) -> int:
    key = f"{name}.attention.head_count_kv"
    return _same_in_all(file, key) if key in file.metadata else heads


def _same_in_all(file: GgufFile, key: str) -> int:
    """A whole number, or a list of the same one for each layer."""
    value = file.metadata.get(key)
    if not isinstance(value, list):
        return file.whole(key)
    if len(set(value)) != 1 or not isinstance(value[0], int) or value[0] < 1:
        raise file.refused(
            f"{key} differs from layer to layer: such models are not served from GGUF files"
        )
    return int(value[0])


def _numbers(file: GgufFile, name: str, keys: dict[str, str]) -> dict[str, float]:
    """Those that the file has, by their names in config.json."""
    given = {key: field for key, field in keys.items() if f"{name}.{key}" in file.metadata}
    return {field: file.number(f"{name}.{key}", 0, 1e9) for key, field in given.items()}


def _scaling(file: GgufFile, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """`rope_scaling`, where positions are stretched."""
    key = f"{name}.rope.scaling"
    factors = file.floats("rope_freqs.weight", config["head_dim"] // 2)
    kind = file.text(f"{key}.type") or "none"
    if factors is not None:  # a divisor for each frequency, as Llama 3.1 has them
        if len(factors) != config["head_dim"] // 2 or not all(0 < each < 1e9 for each in factors):
            raise file.refused(
                f"tensor rope_freqs.weight must be {config['head_dim'] // 2} positive numbers"
            )
        return {"rope_scaling": {
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors,
            "attention_factor": 1.0,
        }}  # fmt: skip
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise file.refused(f"{key}.type is {kind!r}: none, linear and yarn are served")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": file.number(f"{key}.factor", 1, 1e6)}
    original = f"{key}.original_context_length"
    if original in file.metadata:
        scaling["original_max_position_embeddings"] = file.whole(original)
    if name == "gpt-oss":
        scaling["truncate"] = False
    return {"rope_scaling": scaling}
