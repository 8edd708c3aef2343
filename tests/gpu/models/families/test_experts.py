"""Families with layers of experts, against `transformers`, through the executor."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from ramify.gpu.ops.experts import LayerExperts, RouterSettings, route, run
from ramify.gpu.ops.linear.base import plain
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExtendRow, pack
from tests.gpu.models.families.test_families import SMALL, prompts, reference
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


def save(folder: Path, case: str) -> Any:
    """A random model, saved and returned."""
    import transformers

    family, changes = CASES[case]
    torch.manual_seed(7)
    name = "Qwen3_5MoeTextConfig" if family == "Qwen3_5Moe" else f"{family}Config"
    config = getattr(transformers, name)(**(SMALL | {"pad_token_id": 0} | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("norm.weight", ".bias")):
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.2)
        elif name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(weight, 0.0, 0.3)
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj", "gate.weight")):
            torch.nn.init.normal_(weight, 0.0, 0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_transformers(case: str, tmp_path: Path, drive: Any) -> None:
    model = save(tmp_path, case)
    first, second, _ = prompts()
    wanted = [reference(model, prompt, 24) for prompt in (first, second)]
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
    assert d.generate(0, first, 24, d.pages(1024, 192)) == wanted[0]
    tokens = d.step(
        opens=[d.open(0, d.pages(0, 192)), d.open(1, d.pages(1536, 192))],
        extends=[ExtendRow(0, 0, pack(first), True), ExtendRow(1, 0, pack(second), True)],
    )
    rest = d.decode([1, 0], 23)
    assert [[tokens[row], *rest[row]] for row in (0, 1)] == wanted


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
    ],
)
def test_fields_that_cannot_be(case: str, field: str, value: Any, tmp_path: Path, drive: Any) -> None:
    save(tmp_path, case)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ModelError, match=field if field != "n_group" else "groups"):
        drive(tmp_path)


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


def test_experts_without_a_gate_have_no_kernels_for_a_gpu(tmp_path: Path, drive: Any) -> None:
    pytest.importorskip("triton")
    save(tmp_path, "nemotron_h")
    with pytest.raises(ModelError, match="the kernels for a GPU know experts with a gate alone"):
        drive(tmp_path, attention="triton")


def test_routers_with_groups_are_refused_in_8_bits(tmp_path: Path, drive: Any) -> None:
    save(tmp_path, "glm4_moe")
    with pytest.raises(ModelError, match="groups of experts have no kernel in 8 bits"):
        drive(tmp_path, quantization="int8")
