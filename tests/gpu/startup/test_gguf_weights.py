"""GGUF files through the executor: the same logits as the checkpoint that they were made of."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from ramify.gpu.models.config import read_config
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExtendRow, pack
from tests.gguf_files import KINDS, SMALL, checkpoint, convert

WIDE = SMALL | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
}
WINDOW = ["sliding_attention"] * 5 + ["full_attention"]
GRANITE = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.25, "attention_multiplier": 0.125,
    "logits_scaling": 8.0,
}  # fmt: skip
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
EXPERTS = LOCAL | {"num_experts": 6, "moe_intermediate_size": 96}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32,
        "truncate": False}  # fmt: skip
PROMPT = [3, 77, 5, 9, 120, 41, 41, 8, 66, 150, 12, 13, 99, 7, 54, 31, 2, 90, 17, 25, 25, 101, 140, 6]
# architecture there, class here, changes of SMALL
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {}),
    "llama-tied": ("llama", "Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", "Llama", {"attention_bias": True}),
    "mistral": ("llama", "Mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen3": ("qwen3", "Qwen3", {}),
    "gemma2": ("gemma2", "Gemma2", {
        "sliding_window": 9, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
    }),
    "gemma3": ("gemma3", "Gemma3", {
        "sliding_window": 9, "query_pre_attn_scalar": 32, "num_hidden_layers": 7,
        "layer_types": [*WINDOW, "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    }),
    "granite": ("granite", "Granite", GRANITE),
    "mixtral": ("llama", "Mixtral", EXPERTS),
    "qwen2moe": ("qwen2moe", "Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3moe": ("qwen3moe", "Qwen3Moe", EXPERTS | {"norm_topk_prob": True}),
    "granitemoe": ("granitemoe", "GraniteMoe", LOCAL | GRANITE),
    "olmoe": ("olmoe", "Olmoe", EXPERTS | {"num_key_value_heads": 4, "head_dim": 16}),
    "gpt-oss": ("gpt-oss", "GptOss", EXPERTS | {"sliding_window": 9, "rope_parameters": YARN}),
}  # fmt: skip


def logits(drive: Any, path: Path) -> torch.Tensor:
    d = drive(path)
    d.step(opens=[d.open(0, d.pages(0, 64))])
    return d.forward(extends=[ExtendRow(0, 0, pack(PROMPT), True)])


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.usefixtures("device")
def test_each_family_computes_what_its_checkpoint_does(case: str, tmp_path: Path, drive: Any) -> None:
    arch, family, changes = FAMILIES[case]
    folder = checkpoint(tmp_path / "model", family, SMALL | changes)
    path = convert(folder, tmp_path / "model.gguf", arch)
    ours, theirs = read_config(path), read_config(folder)
    windows = [
        [(one.spec.window, one.spec.softcap) for one in each.attentions] for each in (ours, theirs)
    ]
    assert windows[0] == windows[1]
    assert (ours.context, ours.tied, ours.eos_token_ids) == (theirs.context, theirs.tied, (2,))
    exact = partial(drive, dtype="float32")
    torch.testing.assert_close(logits(exact, path), logits(exact, folder), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_is_what_the_package_reads(kind: str, tmp_path: Path, drive: Any) -> None:
    """The folder holds the floats that `gguf` reads: not a bit of the logits differs."""
    folder = checkpoint(tmp_path / "model", "Llama", WIDE)
    path = convert(folder, tmp_path / "model.gguf", "llama", lambda name: kind)
    assert torch.equal(logits(drive, path), logits(drive, folder))


def test_stretched_positions_of_llama_3(tmp_path: Path, drive: Any) -> None:
    """llama.cpp keeps a divisor for each frequency, in a tensor."""
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
    folder = checkpoint(tmp_path / "model", "Llama", SMALL | {"rope_parameters": rope})

    def edit(writer: GGUFWriter) -> None:
        plain = 1 / 10000.0 ** (np.arange(0, 32, 2, dtype=np.float32) / 32)
        waves = 2 * np.pi / plain
        smooth = (32 / waves - 1) / 3
        between = 1 / ((1 - smooth) / 8 + smooth)
        factors = np.where(waves < 8, 1, np.where(waves > 32, 8, between))
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))

    path = convert(folder, tmp_path / "model.gguf", "llama", edit=edit)
    torch.testing.assert_close(logits(drive, path), logits(drive, folder), atol=1e-4, rtol=1e-4)


def test_large_tensors_are_read_in_parts(
    tmp_path: Path, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "model", "Llama", SMALL)
    path = convert(folder, tmp_path / "model.gguf", "llama", lambda name: "Q8_0")
    whole = logits(drive, path)
    monkeypatch.setattr("ramify.gpu.startup.gguf_weights._PART", 400)
    assert torch.equal(logits(drive, path), whole)


def test_what_the_tensors_lack_or_have_too_many_is_named(tmp_path: Path, drive: Any) -> None:
    def refused(*words: str, **settings: Any) -> None:
        folder = checkpoint(tmp_path / "model", "Llama", SMALL)
        path = convert(folder, tmp_path / "model.gguf", "llama", **settings)
        with pytest.raises(ModelError) as caught:
            drive(path)
        assert all(word in caught.value.message for word in ("model.gguf", *words)), caught.value.message

    def more(name: str, rows: int) -> Any:
        return lambda writer: writer.add_tensor(name, np.zeros((rows, 64), np.float32))

    refused(
        "1 tensor(s) are missing: blk.2.ffn_down.weight", "again", leave_out=("blk.2.ffn_down.weight",)
    )
    refused("blk.0.attn_sinks.weight", "has no place", edit=more("blk.0.attn_sinks.weight", 4))
    refused(
        "blk.1.ffn_up.weight has shape [4, 64]", "[96, 64]",
        leave_out=("blk.1.ffn_up.weight",), edit=more("blk.1.ffn_up.weight", 4),
    )  # fmt: skip


BLOCKS = [kind for kind in KINDS if kind.startswith("Q")]


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_stay_blocks_on_the_kernels(kind: str, tmp_path: Path, drive: Any) -> None:
    """What differs from the floats of the blocks is the rounding of activations to 8 bits."""
    pytest.importorskip("llvmlite")
    folder = checkpoint(tmp_path / "model", "Llama", WIDE)
    path = convert(folder, tmp_path / "model.gguf", "llama", lambda name: kind)
    wanted = logits(drive, path)
    d = drive(path, quantization="auto")
    if d.executor.info.quantization == "none":
        pytest.skip("the kernels do not run on this CPU")
    assert d.executor.info.quantization == ("int4" if kind.startswith("Q4") else "int8")
    assert "the file's blocks" in d.executor.info.quantization_reason
    d.step(opens=[d.open(0, d.pages(0, 64))])
    found = d.forward(extends=[ExtendRow(0, 0, pack(PROMPT), True)])
    assert (found - wanted).norm() < 0.05 * wanted.norm()


def test_a_mixed_file_as_q4_k_m_is_one(tmp_path: Path, drive: Any) -> None:
    """Tensors of one product may be of several types: they get the most bits of them."""
    pytest.importorskip("llvmlite")
    ours = {"v_proj": "Q6_K", "k_proj": "Q4_0", "up_proj": "Q5_K", "down_proj": "Q6_K", "o_proj": "F16"}

    def kind(name: str) -> str:
        return ours.get(name.split(".")[-2], "Q8_0" if "embed" in name else "Q4_K")

    folder = checkpoint(tmp_path / "model", "Llama", WIDE | {"attention_bias": True})
    path = convert(folder, tmp_path / "model.gguf", "llama", kind)
    wanted = logits(drive, path)
    for quantization, room in (("auto", 0.05), ("int8", 0.05)):
        d = drive(path, quantization=quantization)
        d.step(opens=[d.open(0, d.pages(0, 64))])
        found = d.forward(extends=[ExtendRow(0, 0, pack(PROMPT), True)])
        assert (found - wanted).norm() < room * wanted.norm()


@pytest.mark.parametrize(("case", "kinds"), [
    ("qwen2moe", ("Q4_K", "Q6_K")), ("qwen3moe", ("MXFP4", "Q4_0")), ("granitemoe", ("Q8_0", "Q8_0")),
])  # fmt: skip
def test_experts_stay_blocks_on_the_kernels(
    case: str, kinds: tuple[str, str], tmp_path: Path, drive: Any
) -> None:
    """The same experts are chosen, as routers are floats; what differs is as without experts."""
    pytest.importorskip("llvmlite")
    arch, family, changes = FAMILIES[case]
    wide = WIDE | changes | {"moe_intermediate_size": 256, "intermediate_size": 256}
    if "shared_expert_intermediate_size" in wide:
        wide["shared_expert_intermediate_size"] = 256
    folder = checkpoint(tmp_path / "model", family, wide | {"attention_multiplier": 0.1})
    path = convert(folder, tmp_path / "model.gguf", arch, lambda name: kinds["down" in name])
    wanted = logits(drive, path)
    d = drive(path, quantization="auto")
    if d.executor.info.quantization == "none":
        pytest.skip("the kernels do not run on this CPU")
    assert "the file's blocks" in d.executor.info.quantization_reason
    d.step(opens=[d.open(0, d.pages(0, 64))])
    found = d.forward(extends=[ExtendRow(0, 0, pack(PROMPT), True)])
    assert (found - wanted).norm() < 0.05 * wanted.norm()
    assert torch.equal(found.argmax(1), wanted.argmax(1))
    if kinds[0] == "Q8_0":  # and rounded to 4
        coarse = logits(partial(drive, quantization="int4"), path)
        assert 0.01 * wanted.norm() < (coarse - wanted).norm() < 0.5 * wanted.norm()


def test_tokens_are_those_of_the_floats_where_these_are_sure(tmp_path: Path, drive: Any) -> None:
    """Greedy tokens of a 4-bit file against float32: they differ only where two logits are close."""
    pytest.importorskip("llvmlite")
    folder = checkpoint(tmp_path / "model", "Qwen3", SMALL | {"initializer_range": 0.3})
    path = convert(folder, tmp_path / "model.gguf", "qwen3", lambda name: "Q4_0")
    exact, rounded = drive(path), drive(path, quantization="auto")
    sure = 0
    for length in range(2, len(PROMPT)):
        found = []
        for d in (exact, rounded):
            d.step(opens=[d.open(0, d.pages(0, 64))])
            found.append(d.forward(extends=[ExtendRow(0, 0, pack(PROMPT[:length]), True)])[0])
            d.step(closes=[0])
        best, second = found[0].topk(2).values
        if best - second > 0.06 * found[0].abs().max():
            assert found[1].argmax() == found[0].argmax()
            sure += 1
    assert sure > 10
