"""Families whose layers keep fixed states, against `transformers`, through the executor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.gpu.models.config import read_config
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExtendRow, pack
from tests.gpu.models.families.test_families import PAD, SMALL, TOKENS, assert_greedy, prompts

DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "eos_token_id": 1,
}
GRANITE = PAD | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 3.0,
}
FALCON = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 6,
    "mamba_d_ssm": 96,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.6,
    "embedding_multiplier": 3.0,
    "key_multiplier": 0.5,
    "lm_head_multiplier": 0.7,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.4,
    "ssm_multipliers": [0.9, 1.1, 0.6, 1.4, 0.7],
    "mlp_multipliers": [1.2, 0.3],
}
NEMOTRON = {
    "layers_block_type": [
        *("linear_attention", "mlp", "linear_attention", "full_attention"),
        *("mlp", "linear_attention", "linear_attention"),
    ],
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 24,
    "n_groups": 2,
    "head_dim": 16,
    "time_step_min": 1e-30,  # which is clamped in prompts alone, where we never do
}
KIMI = {
    "pad_token_id": 0,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "num_key_value_heads": 4,
    "linear_num_heads": 3,
    "linear_head_dim": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", DELTA),
    "qwen3_5-biases": ("Qwen3_5", DELTA | {"attention_bias": True, "tie_word_embeddings": True}),
    "lfm2": (
        "Lfm2",
        PAD | {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "block_multiple_of": 32},
    ),
    "lfm2-biases": (
        "Lfm2",
        PAD
        | {
            "layer_types": ["conv", "conv", "full_attention"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "granite4": ("GraniteMoeHybrid", GRANITE),
    "granite4-rope": (
        "GraniteMoeHybrid",
        GRANITE
        | {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "position_embedding_type": "rope",
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1": ("FalconH1", FALCON | {"mamba_rms_norm": True}),
    "falcon_h1-gate first": (
        "FalconH1",
        FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mlp_bias": True},
    ),
    "falcon_h1-not normed": ("FalconH1", FALCON | {"mamba_d_ssm": None, "mamba_n_heads": 8}),
    "kimi_linear": ("KimiLinear", KIMI),
    "nemotron_h": ("NemotronH", NEMOTRON),
    "nemotron_h-biases": (
        "NemotronH",
        NEMOTRON | {"mlp_bias": True, "use_bias": True, "use_conv_bias": False},
    ),
}
TOLERANCE = {
    "KimiLinear": 3e-3,
    "FalconH1": 3e-3,
    "NemotronH": 3e-3,
    "Qwen3_5": 3e-3,
    "GraniteMoeHybrid": 3e-3,
    "Lfm2": 1e-4,
}


# by case: two layers that keep states and one that attends, where steps are interpreted
FEW_LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "granite4": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "falcon_h1": {"num_hidden_layers": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    },
    "lfm2": {"num_hidden_layers": 3, "full_attn_idxs": [1]},
}


def save(folder: Path, case: str, **more: Any) -> tuple[Any, float]:
    """A random model, saved and returned; and how far log-probabilities may be apart."""
    import transformers

    family, changes = CASES[case]
    torch.manual_seed(7)
    name = "Qwen3_5TextConfig" if family == "Qwen3_5" else f"{family}Config"
    small = dict(SMALL) if family != "NemotronH" else {**SMALL, "num_hidden_layers": None}
    config = getattr(transformers, name)(**(small | changes | more))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():  # no bias or norm may be trivial
        if name.endswith(("norm.weight", ".bias")):
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.2)
        elif name.endswith(("dt_bias", ".D")):
            torch.nn.init.normal_(weight, 0.5, 0.5)
    model.save_pretrained(folder)
    return model, TOLERANCE[family]


@torch.inference_mode()
def log_probabilities(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def assert_same(model: Any, prompt: list[int], ours: list[int], n: int = TOKENS) -> None:
    """What `transformers` would generate, or as likely."""
    assert_greedy(model, prompt, ours, n, 3e-3)


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_in_chunks_of_every_size(case: str, tmp_path: Path, drive: Any) -> None:
    model, tolerance = save(tmp_path, case)
    prompt = prompts()[2][:70]
    wanted = log_probabilities(model, prompt)
    d = drive(tmp_path)
    for size in [*range(1, 9), 31, 33, 63, 64, 65, 70]:
        d.step(opens=[d.open(0, d.pages(0, 96))])
        for start in range(0, len(prompt), size):
            run = prompt[start : start + size]
            ours = d.forward(extends=[ExtendRow(0, start, pack(run), True)])
            ours = ours[0].log_softmax(-1)
            torch.testing.assert_close(ours, wanted[start + len(run) - 1], atol=tolerance, rtol=0)
        d.step(closes=[0])


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_alone_and_batched(case: str, tmp_path: Path, drive: Any) -> None:
    model, _ = save(tmp_path, case)
    texts = prompts()
    d = drive(tmp_path)
    assert_same(model, texts[0], d.generate(0, texts[0], TOKENS, d.pages(1024, 192)))
    outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def collect(**plan: Any) -> None:
        for row, token in d.step(**plan).items():
            outputs[row].append(token)

    collect(
        opens=[d.open(0, d.pages(0, 192)), d.open(1, d.pages(1536, 192))],
        extends=[ExtendRow(0, 0, pack(texts[0]), True), ExtendRow(1, 0, pack(texts[1]), True)],
    )
    collect(decodes=[1, 0])
    collect(
        opens=[d.open(2, d.pages(3072, 192))],
        extends=[ExtendRow(2, 0, pack(texts[2][:50]), False)],
        decodes=[0, 1],
    )
    collect(extends=[ExtendRow(2, 50, pack(texts[2][50:]), True)], decodes=[1, 0])
    while len(outputs[2]) < TOKENS:
        collect(decodes=[row for row in outputs if len(outputs[row]) < TOKENS])
    for row, prompt in enumerate(texts):
        assert_same(model, prompt, outputs[row])


@pytest.mark.parametrize("case", ["qwen3_5", "lfm2", "granite4", "falcon_h1", "nemotron_h"])
def test_branches_go_on_from_one_slot(case: str, tmp_path: Path, drive: Any) -> None:
    """Three rows read the state behind a prefix whose row is closed; one of them comes back later."""
    model, tolerance = save(tmp_path, case)
    prefix = prompts()[2][:64]
    tails = [prompts()[0][:9], prompts()[1][:17], prompts()[0][3:4]]
    d = drive(tmp_path)
    shared = d.pages(2048, 64)
    d.step(opens=[d.open(5, shared)])
    d.prefill(5, 0, prefix, sample=False)
    d.step(closes=[5])
    kept = d.states[5]
    opens = [d.open(row, shared + d.pages(256 * row, 96), cached=64) for row in range(3)]
    extends = [ExtendRow(row, 64, pack(tail), True) for row, tail in enumerate(tails)]
    pairs = [slot for row in range(3) for slot in (kept, 1 + 3 * row)]
    first = d.step(opens=opens, extends=extends, states=pack(pairs))
    rest = d.decode([2, 0, 1], 31)
    for row, tail in enumerate(tails):
        assert_same(model, prefix + tail, [first[row], *rest[row]], 32)
    d.step(closes=[0], opens=[d.open(3, shared + d.pages(1024, 32), cached=64)])
    again = d.forward(extends=[ExtendRow(3, 64, pack(tails[0]), True)], states=pack([kept, 10]))
    likely = log_probabilities(model, prefix + tails[0])[-1]
    torch.testing.assert_close(again[0].log_softmax(-1), likely, atol=tolerance, rtol=0)


@pytest.mark.parametrize("names", ["model.language_model.", "language_model.model."])
def test_the_text_of_qwen_with_its_tower_and_mtp_layer(names: str, tmp_path: Path, drive: Any) -> None:
    from safetensors.torch import load_file, save_file

    model, _ = save(tmp_path, "qwen3_5")
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = {
        name.replace("model.", names, 1) if name.startswith("model.") else name: tensor
        for name, tensor in load_file(path).items()
    }
    extra = {"model.visual.patch_embed.proj.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)}
    save_file(tensors | extra, path)
    text = json.loads(config.read_text())
    text.pop("architectures")
    text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    raw = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {},
        "tie_word_embeddings": False,
    }
    config.write_text(json.dumps(raw))
    d = drive(tmp_path)
    prompt = prompts()[0]
    assert_same(model, prompt, d.generate(0, prompt, 16, d.pages(0, 128)), 16)


def test_memory_is_that_of_the_layers_that_need_it(tmp_path: Path, drive: Any) -> None:
    save(tmp_path, "qwen3_5")
    info = drive(tmp_path, state_slots=40).executor.info
    assert info.kv_bytes_per_token == 2 * 2 * 32 * 4  # of one layer of four
    channels = 2 * 2 * 16 + 4 * 24
    assert info.state_bytes == 3 * (3 * channels + 4 * 16 * 24) * 4
    assert info.state_slots == 40
    assert (info.max_drafts, info.max_forced) == (0, 0)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"quantization": "int8"}, "fixed states have no kernels in 8 bits"),
        ({"state_slots": 1 << 24}, "--state-slots 16777216 do not fit"),
        ({"page_size": 16}, "--page-size 16: the model's layers keep fixed states"),
    ],
)
def test_what_fixed_states_do_not_serve_is_refused(
    settings: dict[str, Any], told: str, tmp_path: Path, drive: Any
) -> None:
    save(tmp_path, "qwen3_5")
    with pytest.raises(ModelError, match=told):
        drive(tmp_path, **settings)


def test_kimi_linear_as_it_is_published(tmp_path: Path) -> None:
    """Its linear layers are in an object and counted from 1; tensors' names do not depend on that."""
    path = tmp_path / "config.json"
    written = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
    counts = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_token": 2}
    sizes = {"num_heads": 3, "head_dim": 16, "short_conv_kernel_size": 3}
    linear = {"full_attn_layers": [3], "kda_layers": [1, 2, 4], **sizes}
    published = {
        "linear_attn_config": linear, "first_k_dense_replace": 2, "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "model_max_length": 512,
    }  # fmt: skip
    path.write_text(json.dumps(written | counts | published))
    found = read_config(tmp_path)
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    flat = {
        "layer_types": kinds, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        "linear_num_heads": 3, "linear_head_dim": 16, "linear_conv_kernel_dim": 3,
        "model_max_length": 512,
    }  # fmt: skip
    path.write_text(json.dumps(written | counts | flat))
    assert str(found) == str(read_config(tmp_path))
    assert found.max_position == 512
    path.write_text(json.dumps(written | counts | published | {"mla_use_nope": False}))
    with pytest.raises(ModelError, match="mla_use_nope is False: served is True"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("case", "change", "told"),
    [
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias is true"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers is .1.0.: must be 5 numbers"),
        ("falcon_h1", {"mlp_multipliers": [1.0, None]}, "mlp_multipliers holds None"),
        ("falcon_h1", {"key_multiplier": True}, "key_multiplier holds True: must be a number"),
        ("nemotron_h", {"layers_block_type": ["M", "dense"]}, "layers_block_type names 'dense'"),
        ("nemotron_h", {"layers_block_type": ["moe", "mamba"]}, "block 0 is a feed-forward"),
        ("nemotron_h", {"hybrid_override_pattern": "ME*", "moe_latent_size": 8}, "moe_latent_size"),
        ("nemotron_h", {"layers_block_type": 7}, "layers_block_type must name 1 to 1024 blocks"),
        ("nemotron_h", {"hybrid_override_pattern": "-M*"}, "block 0 is a feed-forward that no mixer"),
        ("nemotron_h", {"hybrid_override_pattern": "M--*"}, "block 2 is a feed-forward that no mixer"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu': must be relu2"),
        ("nemotron_h", {"n_groups": 3}, "mamba_num_heads 8 is no multiple of 3 n_groups"),
    ],
)
def test_blocks_that_cannot_be(
    case: str, change: dict[str, Any], told: str, tmp_path: Path, drive: Any
) -> None:
    save(tmp_path, case)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=told):
        drive(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"time_step_limit": [0.001, 1.0]}, "time_step_limit is .*: only .0, Infinity. is served"),
        ({"mamba_d_head": 24}, "mamba_n_heads 8 of mamba_d_head are not the mixer's width, 128"),
        ({"mamba_n_groups": 3}, "mamba_n_heads 8 is no multiple of 3 groups"),
        ({"mamba_d_conv": 65}, "mamba_d_conv is 65: must be an integer from 1 to 64"),
    ],
)
def test_mamba_layers_that_cannot_be(
    change: dict[str, Any], told: str, tmp_path: Path, drive: Any
) -> None:
    save(tmp_path, "granite4")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=told):
        drive(tmp_path)


def test_heads_that_the_kernels_do_not_hold_are_refused(tmp_path: Path, drive: Any) -> None:
    pytest.importorskip("triton")
    save(tmp_path, "qwen3_5")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"linear_value_head_dim": 256}))
    with pytest.raises(ModelError, match="delta nets with heads of up to 128, not 256"):
        drive(tmp_path, attention="triton")


def test_in_8_bits_by_itself_they_are_served_in_floats(tmp_path: Path, drive: Any) -> None:
    save(tmp_path, "lfm2")
    info = drive(tmp_path, quantization="auto").executor.info
    assert info.quantization == "none"
    assert "fixed states" in info.quantization_reason
