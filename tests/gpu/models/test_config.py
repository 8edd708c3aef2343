"""What config.json says of families whose layers differ. The rest of it: `startup/test_weights.py`."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.gpu.models.config import parse_config
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.models.definition import Definition
from ramify.gpu.ops.linear.base import plain_weight
from ramify.gpu.ops.rotary import Rotary, inverse_frequencies
from ramify.gpu.startup.packing import Packing
from ramify.protocol.errors import ModelError

PATH = Path("config.json")
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "sliding_window": 512,
}


def test_gemma_3_as_its_checkpoints_spell_it() -> None:
    """`rope_theta`, `rope_local_base_freq` and `sliding_window_pattern`, or by layer type."""
    old = GEMMA | {
        "rope_theta": 900_000.0, "rope_local_base_freq": 9_000.0, "sliding_window_pattern": 3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    full, windowed = "full_attention", "sliding_attention"
    new = GEMMA | {
        "layer_types": [windowed, windowed, full, windowed, windowed, full, windowed],
        "rope_parameters": {
            full: {"rope_type": "linear", "factor": 8.0, "rope_theta": 900_000.0},
            windowed: {"rope_type": "default", "rope_theta": 9_000.0},
        },
    }
    for config in (parse_config(raw, {}, PATH) for raw in (old, new)):
        assert windows(config) == [512, 512, None, 512, 512, None, 512]
        everywhere, local = rope_of(config, 2), rope_of(config, 0)
        assert (everywhere["rope_type"], everywhere["factor"]) == ("linear", 8.0)
        assert everywhere["rope_theta"] == 900_000.0
        assert (local["rope_type"], local["rope_theta"]) == ("default", 9_000.0)
        assert config.layers[0].feed_forward.activation == "gelu_tanh"


def test_gemma_as_its_defaults_say() -> None:
    three = parse_config(GEMMA | {"hidden_size": 1152}, {}, PATH)
    assert windows(three) == [512] * 5 + [None, 512]
    specs = [layer.mixer.spec for layer in three.layers]
    assert {(spec.scale, spec.softcap) for spec in specs} == {(256**-0.5, None)}
    thetas = [rope_of(three, layer)["rope_theta"] for layer in (5, 0)]
    assert thetas == [1_000_000.0, 10_000.0]
    assert three.tied
    assert {(layer.mixer.qk_norm, layer.norms) for layer in three.layers} == {("head", "both")}
    assert (three.norm_offset, three.embedding_scale) == (1.0, 1152**0.5)
    assert three.logit_softcap is None
    two = parse_config({"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 3}, {}, PATH)
    assert windows(two) == [4096, None, 4096]
    assert [layer.mixer.spec.softcap for layer in two.layers] == [50.0] * 3
    assert (two.logit_softcap, two.layers[0].mixer.qk_norm) == (30.0, None)
    assert rope_of(two, 0) == rope_of(two, 1)


def windows(config: Definition) -> list[int | None]:
    return [layer.mixer.spec.window for layer in config.layers]


def rope_of(config: Definition, layer: int) -> dict[str, Any]:
    rope = config.layers[layer].mixer.rope
    assert rope is not None
    return rope


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"quantization_config": ["fp8"]}, r"quantization_config \(of an unknown method\)"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": {}}}}, "rope_parameters"),
    ],
)
def test_what_gemma_3_may_not_say(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        parse_config(GEMMA | change, {}, PATH)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("SmolLM3", {"no_rope_layers": [1, 0]}, "no_rope_layers must hold 0 or 1 for each of 3"),
        ("SmolLM3", {"no_rope_layers": [1, 0, "x"]}, "no_rope_layers"),
        ("SmolLM3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ("Olmo2", {"clip_qkv": 8.0}, "clip_qkv is 8.0: Olmo2ForCausalLM"),
        ("Olmo3", {"layer_types": [["full_attention"]] * 3}, "layer_types must name 3 layers"),
        ("Exaone4", {"sliding_window_pattern": "LLX"}, "sliding_window_pattern is 'LLX'"),
        ("Granite", {"residual_multiplier": -1}, "residual_multiplier is -1"),
        ("Granite", {"logits_scaling": "x"}, "logits_scaling is 'x'"),
        ("Granite", {"num_local_experts": 8}, "num_local_experts"),
        ("Phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ("Phi3", {"partial_rotary_factor": 0.1, "head_dim": 32}, "turns 3 of a head's 32"),
        ("Mistral", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta is 0.1"),
        ("Llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("Llama", {"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type is ['yarn']"),
        ("Llama", {"rope_theta": 1e30}, "rope_theta is 1e+30: must be a number in (0, 1e+12)"),
        ("Llama", {"rope_theta": "x"}, "rope_theta is 'x'"),
        ("Llama", {"rope_theta": [7] * 100_000}, "must be a number in (0, 1e+12)"),
        ("Llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan: must be a number below 1e+30"),
        ("Llama", {"rms_norm_eps": -float("inf")}, "rms_norm_eps is -inf"),
        ("Llama", {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
    ],
)
def test_what_no_layer_knows_is_refused_by_name(name: str, change: dict[str, Any], told: str) -> None:
    raw = {"architectures": [f"{name}ForCausalLM"], "num_hidden_layers": 3} | change
    with pytest.raises(ModelError, match=re.escape(told)) as refused:
        parse_config(raw, {}, PATH)
    assert len(str(refused.value)) < 600


def test_rotary_fields_that_overflow_are_refused_by_name() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1e300, "max_position_embeddings": 8}
    with pytest.raises(ModelError, match="the fields of rope_type 'dynamic' are wrong"):
        inverse_frequencies(rope, 4, 1 << 20)


def test_both_spellings_of_rope_fields_mean_the_same() -> None:
    longrope = {"short_factor": [1.0] * 36, "long_factor": [2.0] * 36}
    for name, old, new in (
        ("SmolLM3", {"rope_theta": 5e6}, {"rope_parameters": {"rope_theta": 5e6}}),
        (
            "Phi3",
            {
                "rope_theta": 1e5,
                "partial_rotary_factor": 0.75,
                "rope_scaling": longrope | {"type": "su"},
            },
            {
                "rope_parameters": longrope
                | {"rope_theta": 1e5, "partial_rotary_factor": 0.75, "rope_type": "longrope"}
            },
        ),
        (
            "Olmo3",
            {"rope_theta": 4e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 4e5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 4e5},
                }
            },
        ),
    ):
        named = {"architectures": [f"{name}ForCausalLM"]}
        one, other = (parse_config(named | each, {}, PATH) for each in (old, new))
        for a, b in zip(one.layers, other.layers, strict=True):
            assert {k: v for k, v in (a.mixer.rope or {}).items() if k != "type"} == (b.mixer.rope or {})


def test_a_part_of_a_head_is_rotated_in_the_order_of_the_kernels() -> None:
    rotary = Rotary({"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}, 8, 64,
                    torch.device("cpu"))  # fmt: skip
    assert rotary.order is not None
    assert rotary.order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    cos, sin = rotary.angles(torch.tensor([3]), torch.float32)
    x = torch.arange(8.0).view(1, 1, 8)
    turned = rotary.rotate(x[..., rotary.order], cos, sin)[0, 0]
    assert turned[[2, 3, 6, 7]].tolist() == [4.0, 5.0, 6.0, 7.0]
    angle = torch.tensor([3.0, 0.3])
    wanted = torch.tensor([0.0, 1.0]) * angle.cos() - torch.tensor([2.0, 3.0]) * angle.sin()
    torch.testing.assert_close(turned[:2], wanted)


@pytest.mark.parametrize(
    ("architecture", "field", "most"),
    [
        ("LlamaForCausalLM", "hidden_size", 1 << 18),
        ("LlamaForCausalLM", "intermediate_size", 1 << 18),
        ("LlamaForCausalLM", "head_dim", 1 << 14),
        ("LlamaForCausalLM", "num_attention_heads", 1 << 12),
        ("LlamaForCausalLM", "vocab_size", 1 << 24),
        ("DeepseekV3ForCausalLM", "kv_lora_rank", 1 << 14),
        ("DeepseekV3ForCausalLM", "q_lora_rank", 1 << 14),
        ("DeepseekV3ForCausalLM", "v_head_dim", 1 << 14),
        ("DeepseekV3ForCausalLM", "moe_intermediate_size", 1 << 18),
        ("NemotronHForCausalLM", "ssm_state_size", 1 << 12),
    ],
)
def test_sizes_are_bounded_by_name(architecture: str, field: str, most: int) -> None:
    """Before anything of such a size is made."""
    for value in (most + 1, 1 << 31, 1 << 200):
        with pytest.raises(
            ModelError, match=rf"{field} is \d+: must be a positive integer of at most {most}"
        ):
            parse_config({"architectures": [architecture], field: value}, {}, PATH)


def test_the_text_part_of_a_model_with_a_tower() -> None:
    raw = {"architectures": ["Mistral3ForConditionalGeneration"], "eos_token_id": 7, "dtype": "bfloat16"}
    text = {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None}
    found = parse_config(raw | {"text_config": text}, {}, PATH)
    assert (len(found.layers), found.eos_token_ids, found.dtype) == (2, (7,), "bfloat16")
    for other, told in (
        ({}, "text_config is None"),
        ({"text_config": text | {"model_type": "ministral3"}}, "text_config.model_type is 'ministral3'"),
        ({"text_config": text | {"hidden_size": "x"}}, "text_config: hidden_size is 'x'"),
    ):
        with pytest.raises(ModelError, match=told):
            parse_config(raw | other, {}, PATH)


def test_gemma_4_says_its_layers_in_either_spelling() -> None:
    kinds = ["sliding_attention", "full_attention"]
    text = {"model_type": "gemma4_text", "num_hidden_layers": 4, "layer_types": kinds * 2,
            "attention_k_eq_v": True, "num_kv_shared_layers": 1}  # fmt: skip
    raw = {"architectures": ["Gemma4ForConditionalGeneration"]}
    own = {"head_dim": 512, "num_key_value_heads": 2}
    published = text | {"global_head_dim": 512, "num_global_key_value_heads": 2}
    for spelled in (published, text | {"per_layer_config": {"1": own, "3": own}}):
        found = parse_config(raw | {"text_config": spelled}, {}, PATH)
        mixers = [layer.mixer for layer in found.layers]
        assert [(one.kv_heads, one.head_dim) for one in mixers] == [(4, 256), (2, 512)] * 2
        assert [one.keys_are_values for one in mixers] == [False, True] * 2
        assert [one.kv_of for one in mixers] == [None, None, None, 1]
        assert found.kv_places() == [0, 1, 2, 1]
        assert found.kv_layout(torch.float16).bytes_per_token == 2 * 2 * (2 * 4 * 256 + 2 * 512)
        assert "model.vision_tower." in found.names.skipped
    for changes, told in (
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4"),
        ({"num_kv_shared_layers": 3}, "layer 1 has none to read from"),
        ({"per_layer_config": {"1": {"head_dim": "x"}}}, "head_dim is 'x'"),
        ({"vocab_size_per_layer_input": 5}, "vocab_size_per_layer_input is 5"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    ):
        with pytest.raises(ModelError, match=told):
            parse_config(raw | {"text_config": published | changes}, {}, PATH)


def test_scalars_of_layers_that_cannot_be_are_refused() -> None:
    raw = {"architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32,
           "intermediate_size": 16, "vocab_size": 16, "vocab_size_per_layer_input": 16,
           "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 8,
           "hidden_size_per_layer_input": 4}  # fmt: skip
    model = Decoder(parse_config(raw, {}, PATH), 64, torch.float32, torch.device("cpu"))
    views = model.weights()
    for view in views.values():
        view.fill_(1.0)
    views["model.layers.1.layer_scalar"].zero_()
    with pytest.raises(ModelError, match=r"layers\.1\.layer_scalar is 0\.0"):
        model.complete()


def test_biases_and_norms_of_heads_follow_the_order_of_their_rows() -> None:
    """No family has both of them and a partial rotation so far."""
    raw = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 1, "attention_bias": True,
           "hidden_size": 32, "intermediate_size": 16, "vocab_size": 16, "num_attention_heads": 2,
           "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
    config = parse_config(raw, {}, PATH)
    mixer = config.layers[0].mixer
    partial = replace(mixer, rope=(mixer.rope or {}) | {"partial_rotary_factor": 0.5})
    layer = replace(config.layers[0], mixer=partial)
    model = Decoder(replace(config, layers=(layer,)), 64, torch.float32, torch.device("cpu"))
    views, order = model.weights(), torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    for view in views.values():
        view.copy_(torch.arange(len(view)).view(-1, *[1] * (view.dim() - 1)).expand_as(view))
    packing = Packing(views, model.products(), plain_weight)
    for name in list(views):
        packing.loaded(name)
    model.complete()
    ours = model.layers[0].mixer
    rows = torch.cat((order, order + 8, order, torch.arange(8)))
    assert ours.qkv.bias is not None
    assert torch.equal(ours.qkv.bias, rows.float())
    assert torch.equal(ours.qkv.tensor[:, 0], rows.float())
    for norm in (ours.heads.q_norm, ours.heads.k_norm):
        assert norm is not None
        assert torch.equal(norm.weight, order.float())
