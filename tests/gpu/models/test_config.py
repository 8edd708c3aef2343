"""What config.json says of families whose layers differ. The rest of it: `startup/test_weights.py`."""

from pathlib import Path
from typing import Any

import pytest

from ramify.gpu.models.config import parse_config
from ramify.gpu.models.definition import Definition
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
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": {}}}}, "rope_parameters"),
    ],
)
def test_what_gemma_3_may_not_say(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        parse_config(GEMMA | change, {}, PATH)
