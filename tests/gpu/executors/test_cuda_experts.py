"""Models with layers of experts on the CUDA executor: small in the interpreter, the same on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.gpu.step.buckets import Bucket
from ramify.protocol.plan import ExtendRow, pack
from tests.gpu.executors.test_cuda_states import CUDA, STEPS, in_flight, where
from tests.gpu.models.families.test_experts import STATES, save
from tests.gpu.models.families.test_families import prompts
from tests.gpu.models.families.test_hybrids import FEW_LAYERS, assert_same


@where
@pytest.mark.parametrize("case", ["glm4_moe", "qwen3_5_moe", "nemotron_h"])
def test_as_transformers(case: str, where: Any, tmp_path: Path, drive: Any) -> None:
    """Groups, a shared expert without a gate and one with it, a delta net; chunks beside decodes."""
    few = FEW_LAYERS["qwen3_5"] if case == "qwen3_5_moe" and not CUDA else {}
    model = save(tmp_path, case, **few)
    first, second, _ = prompts()
    d = drive(tmp_path, **where)
    with torch.inference_mode():
        likely = model(torch.tensor([first])).logits[0].log_softmax(-1)
    d.step(opens=[d.open(2, d.pages(3000, 120))])
    within = 3e-3 if case in STATES or CUDA else 1e-4
    for start, stop in ((0, 7), (7, 30), (30, 31)):
        ours = d.forward(extends=[ExtendRow(2, start, pack(first[start:stop]), True)])[0]
        ours = ours.log_softmax(-1).cpu()
        torch.testing.assert_close(ours, likely[stop - 1], atol=within, rtol=0)
    plans: list[dict[str, Any]] = [
        {"closes": [2], "opens": [d.open(0, d.pages(0, 256))],
         "extends": [ExtendRow(0, 0, pack(first), True)]},
        {"decodes": [0], "opens": [d.open(1, d.pages(1000, 256))],
         "extends": [ExtendRow(1, 0, pack(second[:20]), False)]},
        {"decodes": [0], "extends": [ExtendRow(1, 20, pack(second[20:]), True)]},
        *({"decodes": rows} for rows in ([1, 0], [0, 1]) * STEPS),
    ]  # fmt: skip
    sampled = in_flight(d, plans)
    for row, prompt in enumerate((first, second)):
        output = [each[row] for each in sampled if row in each]
        assert_same(model, prompt, output, len(output))


REAL: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "hidden_size": 256,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
    },
    "nemotron_h": {
        "hidden_size": 256,
        "num_attention_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 1024,
        "ssm_state_size": 128,
        "mamba_head_dim": 64,
        "mamba_num_heads": 16,
        "n_routed_experts": 32,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 232,  # which no tile divides, as 1,856
    },
}


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("case", REAL)
def test_heads_and_windows_of_real_sizes(case: str, tmp_path: Path, drive: Any) -> None:
    """A prompt beyond the window, in chunks on both paths of the experts, and tokens one by one."""
    model = save(tmp_path, case, **REAL[case])
    text = torch.randint(3, model.config.vocab_size, (404,)).tolist()
    with torch.inference_mode():
        likely = model(torch.tensor([text])).logits[0].log_softmax(-1)
    d = drive(tmp_path, device="cuda", dtype="float32", step_tokens=256, max_rows=4, window_tokens=0)
    d.step(opens=[d.open(0, d.pages(0, 512))])
    for start, stop in ((0, 250), (250, 390), (390, 400), *((at, at + 1) for at in range(400, 404))):
        ours = d.forward(extends=[ExtendRow(0, start, pack(text[start:stop]), True)])[0]
        torch.testing.assert_close(ours.log_softmax(-1).cpu(), likely[stop - 1], atol=5e-3, rtol=0)


@where
def test_deterministic_mode_alone_and_batched(
    where: Any, tmp_path: Path, drive: Any, ordered_dots: None
) -> None:
    """The same bits for a prompt alone, behind a hit, and cut up beside others."""
    save(tmp_path, "glm4_moe")
    text = prompts()[0][:20]
    d = drive(tmp_path, deterministic=True, **where)
    d.step(opens=[d.open(0, d.pages(0, 64))])
    whole = d.forward(extends=[ExtendRow(0, 0, pack(text), True)])[0].clone()
    d.step(opens=[d.open(1, d.pages(0, 64), cached=19), d.open(2, d.pages(1000, 64))])
    assert torch.equal(d.forward(extends=[ExtendRow(1, 19, pack(text[19:]), True)])[0], whole)
    d.step(opens=[d.open(3, d.pages(2000, 64))], extends=[ExtendRow(2, 0, pack(text[:11]), False)])
    logits = d.forward(
        extends=[ExtendRow(3, 0, pack([9] * 17), True), ExtendRow(2, 11, pack(text[11:]), True)]
    )
    assert torch.equal(logits[1], whole)


@where
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about the garbage in padding
def test_steps_of_padding_run(where: Any, tmp_path: Path, drive: Any) -> None:
    """Whatever their garbage is, it chooses experts that there are."""
    save(tmp_path, "glm4_moe")
    d = drive(tmp_path, **where)
    for bucket in (Bucket(0, 0, 1, 1), Bucket(0, 0, 8, 8), Bucket(32, 4, 8, 8)):
        d.executor.run_padding(bucket)
