"""Gemma 2 and 3: norms of 1 + w on both sides, windows in a pattern, scaled embeddings."""

from ramify.gpu.models.definition import Definition, LayerSettings, TensorNames
from ramify.gpu.models.fields import Fields
from ramify.gpu.models.parts import COMMON, Family, attention, decoder, dense, windows
from ramify.gpu.models.rope import rope, ropes
from ramify.gpu.models.towers import siglip_vision

_COMMON = COMMON | {
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
_SECOND = _COMMON | {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_THIRD = _COMMON | {"vocab_size": 262208, "max_position_embeddings": 131072}
_NAMES = TensorNames(before=("input_layernorm", "pre_feedforward_layernorm"))


def define_2(fields: Fields) -> Definition:
    positions = rope(fields)
    softcap = fields.optional("attn_logit_softcapping")
    mixers = [(window, positions) for window in windows(fields, lambda index: index % 2 == 0)]
    return _define(fields, mixers, softcap, qk_norm=False)


def define_3(fields: Fields) -> Definition:
    pattern = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or 6
    if not isinstance(pattern, int) or pattern < 1:
        raise fields.refused(
            f"sliding_window_pattern is {pattern!r}: must be a positive integer or null"
        )
    if fields.get("attn_logit_softcapping"):
        raise fields.refused("attn_logit_softcapping is not supported: scores of Gemma 3 have no soft "
                             "cap, set it to null")  # fmt: skip
    everywhere, local = ropes(
        fields,
        fields.get("rope_theta") or 1_000_000.0,
        fields.get("rope_local_base_freq") or 10_000.0,
    )
    mixers = [
        (window, everywhere if window is None else local)
        for window in windows(fields, lambda index: (index + 1) % pattern > 0)
    ]
    return _define(fields, mixers, None, qk_norm=True)


def _define(
    fields: Fields, mixers: list[tuple[int | None, dict[str, object]]],
    softcap: float | None, qk_norm: bool,
) -> Definition:  # fmt: skip
    scalar = fields.optional("query_pre_attn_scalar")
    bias, feed_forward = fields.flag("attention_bias"), dense(fields)
    layers = [
        LayerSettings(
            attention(
                fields, positions, window=window, scale=None if scalar is None else scalar**-0.5,
                softcap=softcap, qk_norm="head" if qk_norm else None, qkv_bias=bias, output_bias=bias,
            ),
            feed_forward,
            norms="both",
        )
        for window, positions in mixers
    ]  # fmt: skip
    return decoder(
        fields, layers, names=_NAMES,
        embedding_scale=fields.integer("hidden_size") ** 0.5, embedding_scale_rounded=True,
        norm_offset=1.0, logit_softcap=fields.optional("final_logit_softcapping"),
    )  # fmt: skip


FAMILIES = (
    Family("Gemma2ForCausalLM", "gemma2", _SECOND, define_2),
    Family("Gemma3ForCausalLM", "gemma3_text", _THIRD, define_3),
    Family(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        _THIRD,
        define_3,
        text="gemma3_text",
        vision=siglip_vision,
    ),
)
