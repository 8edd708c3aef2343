"""Families with layers of experts, against `transformers`, through the executor."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from ramify.gpu.models.config import read_config
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.models.experts import Experts
from ramify.gpu.ops.experts import LayerExperts, RouterSettings, route, run
from ramify.gpu.ops.linear.base import PlainWeight, plain
from ramify.gpu.ops.linear.four_bits import FourBitWeight, four_bit_form
from ramify.gpu.ops.linear.grouped import GroupedWeight
from ramify.gpu.startup.forecast import forecast
from ramify.gpu.startup.packing import Packing
from ramify.gpu.startup.weights import load_weights
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExtendRow, pack
from tests.gpu.models.families.test_families import GEMMA4, SMALL, assert_greedy, prompts
from tests.gpu.models.families.test_hybrids import DELTA, GRANITE, NEMOTRON

CHOSEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", CHOSEN | {"shared_expert_intermediate_size": 48}),
    "qwen3_moe": ("Qwen3Moe", CHOSEN | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe-some": (
        "Qwen3Moe",
        CHOSEN | {"head_dim": 16, "decoder_sparse_step": 2, "mlp_only_layers": [0]},
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "granitemoe": (
        "GraniteMoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 3.0,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "head_dim": 16,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gemma4_moe": (
        "Gemma4",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        DELTA
        | {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        DELTA | CHOSEN | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
    "granite4": (
        "GraniteMoeHybrid",
        GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "head_dim": 32,
            "sliding_window": 20,
            "num_hidden_layers": 4,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "nemotron_h": (
        "NemotronH",
        NEMOTRON
        | {
            "num_hidden_layers": None,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "routed_scaling_factor": 2.5,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
}
STATES = {
    "nemotron_h",
    "qwen3_5_moe",
    "qwen3_next",
    "granite4",
}  # which keep fixed states: another order of sums is seen more


def save(folder: Path, case: str, **more: Any) -> Any:
    """A random model, saved and returned."""
    import transformers

    family, changes = CASES[case]
    torch.manual_seed(7)
    name = f"{family}TextConfig" if family in ("Qwen3_5Moe", "Gemma4") else f"{family}Config"
    config = getattr(transformers, name)(**(SMALL | {"pad_token_id": 0} | changes | more))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("_proj_bias"):  # so that some activations are clamped
            torch.nn.init.normal_(weight, 0.0, 3.0)
        elif name.endswith(("norm.weight", ".bias")):
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.2)
        elif name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(weight, 0.0, 0.3)
        elif name.endswith(("router.scale", "per_expert_scale", "layer_scalar")):
            torch.nn.init.uniform_(weight, 0.3, 1.3)
        elif name.endswith("sinks"):
            torch.nn.init.normal_(weight, 0.0, 2.0)
        elif name.endswith(
            (
                "experts.gate_up_proj",
                "experts.down_proj",
                "gate.weight",
                "router.weight",
                "router.proj.weight",
            )
        ):
            torch.nn.init.normal_(weight, 0.0, 0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_transformers(case: str, tmp_path: Path, drive: Any) -> None:
    model = save(tmp_path, case)
    first, second, _ = prompts()
    with torch.inference_mode():
        logits = model(torch.tensor([first])).logits[0]
    d = drive(tmp_path)
    within = 3e-3 if case in STATES else 1e-4
    # chunk by chunk; logits of each chunk's last token
    opened = d.open(0, d.pages(1024, 192))
    for start, stop in ((0, 30), (30, 31), (31, 57)):
        plan = d.plan(
            opens=[opened] if start == 0 else [],
            extends=[ExtendRow(0, start, pack(first[start:stop]), True)],
        )
        _, ours = d.executor.forward(plan)
        ours, theirs = ours[0].log_softmax(-1), logits[stop - 1].log_softmax(-1)
        torch.testing.assert_close(ours, theirs, atol=within, rtol=0)
    d.step(closes=[0])
    # alone, and batched
    assert_greedy(model, first, d.generate(0, first, 24, d.pages(1024, 192)), 24)
    tokens = d.step(
        opens=[d.open(0, d.pages(0, 192)), d.open(1, d.pages(1536, 192))],
        extends=[ExtendRow(0, 0, pack(first), True), ExtendRow(1, 0, pack(second), True)],
    )
    rest = d.decode([1, 0], 23)
    for row, prompt in enumerate((first, second)):
        assert_greedy(model, prompt, [tokens[row], *rest[row]], 24)


def stack(folder: Path, gate_up: str, down: str) -> None:
    """Rewrite a checkpoint so that a layer's experts are two tensors."""
    path = folder / "model.safetensors"
    found = load_file(path)
    for first in sorted(name for name in found if name.endswith(".experts.0.gate_proj.weight")):
        head = first.removesuffix("experts.0.gate_proj.weight")
        count = sum(name.startswith(f"{head}experts.") for name in found) // 3
        each = [
            [found.pop(f"{head}experts.{n}.{kind}_proj.weight") for kind in ("gate", "up", "down")]
            for n in range(count)
        ]
        found[head + gate_up] = torch.stack([torch.cat(one[:2]) for one in each])
        found[head + down] = torch.stack([one[2] for one in each])
    save_file(found, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("granitemoe", ("input_linear.weight", "output_linear.weight")),
        ("qwen3_moe", ("experts.gate_up_proj", "experts.down_proj")),
    ],
)
def test_experts_of_one_tensor_are_read(
    case: str, names: tuple[str, str], tmp_path: Path, drive: Any
) -> None:
    save(tmp_path, case)
    prompt = prompts()[1]
    wanted = drive(tmp_path).generate(0, prompt, 8, range(64))
    stack(tmp_path, *names)
    assert drive(tmp_path).generate(0, prompt, 8, range(64)) == wanted


def test_other_experts_than_the_config_says(tmp_path: Path, drive: Any) -> None:
    save(tmp_path, "qwen3_moe")
    stack(tmp_path, "experts.gate_up_proj", "experts.down_proj")
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"num_local_experts": 8', '"num_local_experts": 6'))
    with pytest.raises(ModelError, match="other experts than in config"):
        drive(tmp_path)


def test_experts_of_one_dimension(tmp_path: Path, drive: Any) -> None:
    save(tmp_path, "qwen3_moe")
    stack(tmp_path, "experts.gate_up_proj", "experts.down_proj")
    found = load_file(tmp_path / "model.safetensors")
    name = next(name for name in found if name.endswith("experts.down_proj"))
    found[name] = torch.zeros(8)
    save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="three dimensions"):
        drive(tmp_path)


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("qwen3_moe", "mlp_only_layers", 3),
        ("qwen3_moe", "mlp_only_layers", [7]),
        ("qwen3_moe", "mlp_only_layers", [[]]),
        ("glm4_moe", "first_k_dense_replace", "one"),
        ("glm4_moe", "n_group", 3),
        ("mixtral", "num_experts_per_tok", 7),
        ("gpt_oss", "swiglu_limit", 5.0),
        ("gpt_oss", "quantization_config", {"quant_method": "eetq"}),
    ],
)
def test_fields_that_cannot_be(case: str, field: str, value: Any, tmp_path: Path, drive: Any) -> None:
    save(tmp_path, case)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ModelError, match=field if field != "n_group" else "groups"):
        drive(tmp_path)


def pack_experts(folder: Path) -> dict[str, torch.Tensor]:
    """Give a checkpoint random experts as MXFP4, scales in another file; returns it as floats."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found = load_file(folder / "model.safetensors")
    first, second, wide = {}, {}, dict(found)
    for name, weight in found.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            first[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(119, 126, blocks.shape[:-1], dtype=torch.uint8)
        wide[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        first[f"{name}_scales"], second[f"{name}_blocks"] = scales, blocks
    places = {}
    for number, part in enumerate((first, second), 1):
        path = folder / f"model-0000{number}-of-00002.safetensors"
        save_file(part, path, metadata={"format": "pt"})
        places |= dict.fromkeys(part, path.name)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    path = folder / "config.json"
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantized))
    return wide


def test_mxfp4_becomes_floats(tmp_path: Path, drive: Any) -> None:
    model, prompt = save(tmp_path, "gpt_oss"), prompts()[0]
    model.load_state_dict(pack_experts(tmp_path))
    assert_greedy(model, prompt, drive(tmp_path).generate(0, prompt, 16, range(128)), 16)
    assert "weights" in forecast(tmp_path)  # which reads no numbers


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter takes a minute")
def test_mxfp4_stays_on_the_kernels_of_a_gpu(tmp_path: Path, drive: Any) -> None:
    model, prompt = save(tmp_path, "gpt_oss"), prompts()[0]
    model.load_state_dict(pack_experts(tmp_path))
    d = drive(tmp_path, attention="triton", quantization="auto", dtype="float32")
    assert d.executor.info.quantization == "mxfp4"
    assert_greedy(model, prompt, d.generate(0, prompt, 16, range(128)), 16)


def test_mxfp4_is_kept_as_kernels_read_it(tmp_path: Path) -> None:
    """All experts of a layer in one matrix, a gate before its up; the router in floats."""
    save(tmp_path, "gpt_oss")
    wide = pack_experts(tmp_path)
    shape = read_config(tmp_path)
    model = Decoder(shape, 64, torch.float32, torch.device("cpu"), late=True)
    views = model.weights()
    packing = Packing(views, model.products(), four_bit_form("mxfp4", rounds=False), (GroupedWeight,))
    load_weights(tmp_path, views, lambda *_: None, packing, shape.names, shape.stored)
    one = model.layers[0].feed_forward
    assert isinstance(one, Experts)
    assert isinstance(one.layer.gate_up.weight, FourBitWeight)
    part = "model.layers.0.mlp.experts"
    gate_up = wide[f"{part}.gate_up_proj"].transpose(1, 2)  # gate and up take turns
    gates, ups = gate_up[:, 0::2], gate_up[:, 1::2]
    assert torch.equal(one.layer.gate_up.weight.floats(), torch.cat((gates, ups), 1).flatten(0, 1))
    down = wide[f"{part}.down_proj"].transpose(1, 2).flatten(0, 1)
    assert torch.equal(one.layer.down.weight.floats(), down)
    assert isinstance(one.layer.router.weight, PlainWeight)


def test_forks_of_layers_with_sinks_and_windows(tmp_path: Path, drive: Any) -> None:
    model = save(tmp_path, "gpt_oss")
    prefix, tails = prompts()[2][:64], [prompts()[0][:9], prompts()[1][:17]]
    d = drive(tmp_path, page_size=16)
    shared = d.pages(2048, 64)
    d.step(opens=[d.open(5, shared)])
    d.prefill(5, 0, prefix, sample=False)
    d.step(closes=[5])
    first = d.step(
        opens=[d.open(row, shared + d.pages(256 * row, 96), cached=64) for row in range(2)],
        extends=[ExtendRow(row, 64, pack(tail), True) for row, tail in enumerate(tails)],
    )
    rest = d.decode([1, 0], 15)
    for row, tail in enumerate(tails):
        assert_greedy(model, prefix + tail, [first[row], *rest[row]], 16)


def test_mxfp4_of_other_shapes(tmp_path: Path, drive: Any) -> None:
    save(tmp_path, "gpt_oss")
    pack_experts(tmp_path)
    path = tmp_path / "model-00001-of-00002.safetensors"
    found = load_file(path)
    name = next(name for name in found if name.endswith("experts.down_proj_scales"))
    save_file(found | {name: found[name][:, 1:].contiguous()}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"blocks .* and scales"):
        drive(tmp_path)
    save_file(found | {name: found[name].int()}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="MXFP4 has bytes"):
        drive(tmp_path)


@pytest.mark.parametrize("case", ["gpt_oss", "gemma4_moe"])
def test_experts_on_the_kernels_of_a_gpu(case: str, tmp_path: Path, drive: Any) -> None:
    """Clamped ones, and those beside a dense feed-forward."""
    pytest.importorskip("triton")
    few = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    model, prompt = save(tmp_path, case, **few), prompts()[0][:24]
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, 5]])).logits[0]
    d = drive(tmp_path, attention="triton", dtype="float32", kv_tokens=256, max_rows=2, step_tokens=64)
    page = d.executor.info.page_size
    # both paths: many tokens, and one
    opens, steps = [d.open(0, range(64 // page))], [(0, prompt, logits[-2]), (24, [5], logits[-1])]
    for start, tokens, wanted in steps:
        ours = d.forward(opens=opens, extends=[ExtendRow(0, start, pack(tokens), True)])[0]
        opens = []
        torch.testing.assert_close(ours.log_softmax(-1), wanted.log_softmax(-1), atol=1e-4, rtol=0)


def test_clamped_experts_are_refused_in_8_bits(tmp_path: Path, drive: Any) -> None:
    save(tmp_path, "gpt_oss")
    with pytest.raises(ModelError, match="clamped_swiglu has no kernel"):
        drive(tmp_path, quantization="int8")


LOGITS = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, -1.0], [0.0] * 6])


def test_ties_go_to_the_lower_index() -> None:
    counts, chosen = route(LOGITS, None, RouterSettings(top=2))
    assert chosen.tolist() == [[1, 2], [0, 1]]
    torch.testing.assert_close(counts, torch.full((2, 2), 0.5))


def test_groups_and_a_correction_choose_but_do_not_count() -> None:
    correction = torch.tensor([0.0, 0.0, 0.0, 9.0, 0.0, 0.0])
    settings = RouterSettings(
        top=2, score="sigmoid", renormalise=False, scale=2.0, groups=3, top_groups=1, corrected=True
    )
    counts, chosen = route(LOGITS, correction, settings)
    assert chosen.tolist() == [[3, 2], [3, 2]]
    torch.testing.assert_close(counts, 2 * LOGITS.sigmoid().gather(1, chosen))


def test_all_tokens_on_one_expert() -> None:
    """And none on others; a batch of one token among them."""
    generator = torch.Generator().manual_seed(1)
    x, up, down = (torch.randn(*shape, generator=generator) for shape in ((5, 8), (4, 12, 8), (4, 8, 6)))
    equal = plain(torch.zeros(4, 8))  # the first is chosen
    stacked = [replace(plain(each.flatten(0, 1)), stacked=4) for each in (up, down)]
    layer = LayerExperts(equal, None, *stacked, None, RouterSettings(top=1), "silu")
    gate, wide = F.linear(x, up[0]).chunk(2, -1)
    wanted = F.linear(F.silu(gate) * wide, down[0])
    torch.testing.assert_close(run(x, layer), wanted)
    torch.testing.assert_close(run(x[:1], layer), wanted[:1])


def test_routers_with_groups_are_refused_in_8_bits(tmp_path: Path, drive: Any) -> None:
    save(tmp_path, "glm4_moe")
    with pytest.raises(ModelError, match="groups of experts have no kernel in 8 bits"):
        drive(tmp_path, quantization="int8")
