"""The model families: what differs between them, and the defaults of their config classes.

A config.json saved by `transformers` leaves out what equals the defaults of its class, so they are kept
here. Reading it is `config`'s business; what the settings mean is `decoder`'s.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between the families, and the defaults of their config classes."""

    model_type: str
    defaults: dict[str, Any]
    qkv_bias: bool | None = None  # None: as `attention_bias` says
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    norm_offset: float = 0.0  # added to the weights of the norms
    post_norms: bool = False  # what attention and feed-forward add to the residual is normalised
    scaled_embedding: bool = False  # embeddings are multiplied by the root of their size
    rope_theta: float = 10_000.0
    local_rope_theta: float | None = None  # layers with a window have a base of their own
    full_every: int | None = None  # without `layer_types`: every so many layers one has no window


_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN = _COMMON | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = _COMMON | {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama",
        _COMMON
        | {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "eos_token_id": 2,
        },
        mlp_bias=None,
    ),
    "MistralForCausalLM": Family(
        "mistral",
        _COMMON
        | {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
        qkv_bias=False,
        output_bias=False,
    ),
    "Qwen2ForCausalLM": Family("qwen2", _QWEN, qkv_bias=True, output_bias=False),
    "Qwen3ForCausalLM": Family("qwen3", _QWEN | {"head_dim": 128}, qk_norm=True),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        _GEMMA
        | {
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        norm_offset=1.0,
        post_norms=True,
        scaled_embedding=True,
        full_every=2,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        _GEMMA | {"vocab_size": 262208, "max_position_embeddings": 131072},
        qk_norm=True,
        norm_offset=1.0,
        post_norms=True,
        scaled_embedding=True,
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
        full_every=6,
    ),
}
