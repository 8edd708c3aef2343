"""Several ranks against one, in float32: all kinds of layers, and what is decided beside the model."""

import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ramify.gpu.drafting.ngram import NgramDrafter
from ramify.gpu.ranks.ring import RankPlace
from ramify.gpu.startup.load import load_executor
from ramify.protocol.cluster import BLOCK
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExtendRow, MovedBlock, StepPlan, pack, unpack
from tests.amount import stride
from tests.gpu.conftest import Driver
from tests.gpu.drafting.conftest import write_folder
from tests.gpu.drafting.test_jump_forward import SAMPLINGS, generate
from tests.gpu.models.families import test_experts, test_families, test_hybrids, test_latents
from tests.gpu.models.families.test_families import prompts
from tests.gpu.ranked import ranked
from tests.gpu.startup import test_fp8_checkpoints

# What is divided: biases behind parts of sums; tensors of several blocks; soft caps and windows; KV
# heads that ranks share; norms over all heads; delta nets; Mamba beside attention; convolutions; states
# without KV; experts beside a dense part, with biases and sinks, with latents; a vocabulary that is not
# divisible
CASES: list[tuple[str, str, int]] = [
    ("families", "llama-biases", 4),
    ("families", "phi3", 2),
    ("families", "gemma3-linear", 4),
    ("families", "olmo3", 2),
    ("hybrids", "qwen3_5", 2),
    ("hybrids", "falcon_h1-gate first", 2),
    ("hybrids", "lfm2-biases", 4),
    ("hybrids", "nemotron_h-biases", 2),
    ("experts", "gemma4_moe", 2),
    ("experts", "gpt_oss", 2),
    ("experts", "qwen3_next", 2),
    ("latents", "deepseek_v3", 4),
]

KINDS = {
    "families": test_families.CASES, "hybrids": test_hybrids.CASES, "experts": test_experts.CASES,
    "latents": test_latents.CASES,
}  # fmt: skip
OTHERS = [
    (kind, case, count)
    for kind, cases in KINDS.items()
    for case in sorted(cases)
    for count in (2, 4)
    if (kind, case, count) not in CASES
    and case != "gemma4-shared"  # which wants a vocabulary of its own
]


def save(kind: str, case: str, folder: Path) -> dict[str, Any]:
    """A random model; the settings that it wants."""
    if kind == "families":
        family, changes, settings = test_families.CASES[case]
        test_families.save(folder, family, changes | {"vocab_size": 163})
        return settings
    saves: dict[str, Callable[[Path, str], Any]] = {
        "hybrids": test_hybrids.save, "experts": test_experts.save, "latents": test_latents.save
    }  # fmt: skip
    saves[kind](folder, case)
    return {}


def compute(executor: Any) -> tuple[list[torch.Tensor], list[dict[int, int]]]:
    """Logits of chunks and of a step of all kinds, then tokens of decodes."""
    d = Driver(executor)
    first, second, _ = prompts()
    d.step(opens=[d.open(row, d.pages(512 * row, 128)) for row in range(2)])
    logits = [d.forward(extends=[ExtendRow(0, 0, pack(first[:30]), True)]).clone()]
    d.prefill(1, 0, second)
    mixed = d.forward(extends=[ExtendRow(0, 30, pack(first[30:]), True)], decodes=[1])
    return [*logits, mixed.clone()], [d.step(decodes=[0, 1]) for _ in range(8)]


@pytest.mark.parametrize(("kind", "case", "count"), CASES)
def test_equal_to_one_rank(kind: str, case: str, count: int, tmp_path: Path) -> None:
    settings = save(kind, case, tmp_path)
    config = {"path": tmp_path, "device": "cpu", "kv_tokens": 1024, "quantization": "none", **settings}
    one = load_executor(ModelConfig(**config), lambda what, share: None)
    wanted, tokens = compute(one)
    one.close()
    with ranked(ModelConfig(**config, tensor_parallel=count)) as executor:
        found, tokens_too = compute(executor)
        assert executor.info.parameters == one.info.parameters
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), atol=3e-4, rtol=0)
    assert tokens_too == tokens


@pytest.mark.parametrize(("kind", "case", "count"), OTHERS[:: stride(41)])
def test_all_others_are_equal_or_refused(kind: str, case: str, count: int, tmp_path: Path) -> None:
    try:
        test_equal_to_one_rank(kind, case, count, tmp_path)
    except ModelError as error:
        assert re.search(  # noqa: PT017
            "not divisible|two heads at least|normalised each as a whole|every layer", str(error)
        )


WIDE = ("minimax_m2", "olmoe")  # norms over all heads, of which a rank would have one
WHOLE = [("experts", case, 2) for case in sorted(test_experts.CASES) if case not in WIDE] + [
    ("latents", "deepseek_v3", 4)
]


@pytest.mark.parametrize(("kind", "case", "count"), WHOLE[:: stride(3)])
def test_experts_whole_by_rank(kind: str, case: str, count: int, tmp_path: Path) -> None:
    save(kind, case, tmp_path)
    config = {"path": tmp_path, "device": "cpu", "kv_tokens": 1024, "quantization": "none"}
    found = []
    for ranks, whole in ((1, False), (count, True)):
        given = ModelConfig(**config, tensor_parallel=ranks, expert_parallel=whole)
        with ranked(given) as executor:
            d = Driver(executor)
            d.step(opens=[d.open(0, d.pages(0, 128))])
            found.append(d.forward(extends=[ExtendRow(0, 0, pack(prompts()[0]), True)]).log_softmax(-1))
    torch.testing.assert_close(*found, atol=3e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "served"), [("channel", "fp8"), ("deepseek", "fp8"), ("deepseek", "none")]
)
def test_stored_weights_are_divided(kind: str, served: str, tmp_path: Path) -> None:
    """8-bit floats with scales by row and by block, of attention and of experts: kept, and widened."""
    test_fp8_checkpoints.write(tmp_path, kind, head_dim=64, moe_intermediate_size=256)
    config = {"path": tmp_path, "device": "cpu", "kv_tokens": 64, "quantization": served}
    found = []
    for count in (1, 2):
        with ranked(ModelConfig(**config, tensor_parallel=count)) as executor:
            assert executor.info.quantization == served
            d = Driver(executor)
            d.step(opens=[d.open(0, d.pages(0, 64))])
            extend = ExtendRow(0, 0, pack(range(1, 20)), True)
            found.append(d.forward(extends=[extend]).log_softmax(-1))
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)


SMALL = {
    "num_hidden_layers": 1, "head_dim": 16, "vocab_size": 150, "hidden_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48,
}  # fmt: skip


@pytest.fixture
def kernels(one_at_a_time: None) -> dict[str, Any]:
    """Settings of ranks on a GPU's kernels."""
    return {"attention": "triton", "max_rows": 2, "step_tokens": 16, "tensor_parallel": 2}


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> list[slice]:
    """Sums of 4 tokens or more are made in halves, which it tells; all others by gloo."""
    from ramify.gpu.ops import triton_halves
    from ramify.gpu.ops.triton_halves import HalvedSums
    from ramify.gpu.ranks import peers
    from ramify.gpu.ranks.group import Ranks

    monkeypatch.setattr(peers, "LEAST_HALVED", 4)
    monkeypatch.setattr(triton_halves, "_ROUND", 2)
    hidden, none = SMALL["hidden_size"], torch.zeros(0, dtype=torch.int64)
    size = peers.halves_room(2, hidden, torch.float32, 16)
    memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    made, add = list[slice](), HalvedSums.add

    def meet(ranks: Ranks, *_: Any) -> None:
        own = ranks.rank
        given = peers.halves_in(memory[1 - own], memory[own], hidden, torch.float32)
        ranks.peers = peers.PeerRows(own, 2, 0, 0, none, 0, none, given)

    def waited(sums: HalvedSums, half: slice, *rest: Any) -> None:
        """In place of the kernel, which would keep the other rank's kernels from running."""
        place = int(half.start > 0), sums.peers.made & 1
        while int(sums.peers.my_bells[place]) != 1 + (sums.peers.made >> 1 & 1):
            time.sleep(1e-4)
        made.append(half)
        add(sums, half, *rest)

    monkeypatch.setattr(Ranks, "meet", meet)
    monkeypatch.setattr(HalvedSums, "add", waited)
    return made


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's: garbage in padding
def test_kernels_of_a_gpu(tmp_path: Path, kernels: dict[str, Any], halves: list[slice]) -> None:
    """Each rank's part of a block leaves, and comes back elsewhere."""
    test_families.save(tmp_path, "Llama", SMALL)
    prompt = [token % 150 for token in prompts()[0][:9]]
    config = {"path": tmp_path, "device": "cpu", "kv_tokens": 256, "quantization": "none"}
    one = load_executor(ModelConfig(**config), lambda what, share: None)
    wanted = Driver(one).generate(0, prompt, 4, range(64))
    one.close()
    with ranked(ModelConfig(**config, **kernels, kv_host=1 << 20)) as executor:
        d, key, elsewhere = Driver(executor), b"k" * 16, range(BLOCK, 2 * BLOCK)
        assert d.generate(0, prompt, 4, range(BLOCK)) == wanted
        assert sorted(part.stop - part.start for part in halves) == [4] * 4 + [5] * 4  # of two ranks
        d.step(saves=[MovedBlock(1, key, pack(range(BLOCK)))])
        plan = StepPlan(
            99, opens=[d.open(1, elsewhere, cached=8)],
            extends=[ExtendRow(1, 8, pack(prompt[8:]), True)],
            loads=[
                MovedBlock(1, key, pack(elsewhere)), MovedBlock(0, b"o" * 16, pack(range(128, 192)))
            ],
        )  # fmt: skip
        result = executor.launch(plan).result()
        assert (list(unpack(result.tokens)), list(unpack(result.lost))) == (wanted[:1], [0])
        assert not executor.info.host_memory  # which would be taken for whole blocks
        assert executor.info.rank_memory


@pytest.mark.usefixtures("ordered_dots")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_deterministic_on_kernels_of_a_gpu(tmp_path: Path, kernels: dict[str, Any]) -> None:
    """Whole and alone, or cut and beside another: bit for bit."""
    test_families.save(tmp_path, "Llama", SMALL)
    text, other = ([token % 150 for token in prompt[:7]] for prompt in prompts()[:2])
    config = ModelConfig(
        path=tmp_path, device="cpu", kv_tokens=128, quantization="none", deterministic=True, **kernels
    )
    with ranked(config) as executor:
        d = Driver(executor)
        d.step(opens=[d.open(row, d.pages(64 * row, 64)) for row in range(2)])
        alone = d.forward(extends=[ExtendRow(0, 0, pack(text), True)])[0].clone()
        d.step(closes=[0], opens=[d.open(0, d.pages(0, 64))])
        d.prefill(0, 0, text[:3], sample=False)
        extends = [ExtendRow(1, 0, pack(other), True), ExtendRow(0, 3, pack(text[3:]), True)]
        assert torch.equal(d.forward(extends=extends)[1], alone)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_drafts_on_kernels_of_a_gpu(tmp_path: Path, kernels: dict[str, Any]) -> None:
    """Two steps in flight, so that positions are right on rank 0's device alone. Half of the drafts of
    a model that is the model with noise are right."""
    folder, draft = write_folder(tmp_path / "model"), write_folder(tmp_path / "draft")
    test_families.save(folder, "Llama", SMALL)
    shutil.copy(folder / "config.json", draft)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(5)
    tensors["lm_head.weight"] += 0.1 * torch.randn_like(tensors["lm_head.weight"])
    save_file(tensors, draft / "model.safetensors")
    texts, outputs = [[5, 9, 2, 40, 7], [31, 100, 64, 3]], list[list[int]]([[], []])
    config = {"path": folder, "device": "cpu", "kv_tokens": 256, "quantization": "none"}
    one = load_executor(ModelConfig(**config), lambda what, share: None)
    wanted = [Driver(one).generate(row, text, 18, range(64)) for row, text in enumerate(texts)]
    one.close()
    kernels |= {"max_rows": 6, "draft": str(draft), "draft_tokens": 2}
    with ranked(ModelConfig(**config, **kernels)) as executor:
        d, steps, drafted = Driver(executor), deque[Any](), 0
        opens = [d.open(row, d.pages(64 * row, 64)) for row in range(2)]
        extends = [ExtendRow(row, 0, pack(text), True) for row, text in enumerate(texts)]
        plans = [d.plan(opens=opens, extends=extends)]
        plans += [d.plan(decodes=[0, 1], drafts=pack(most)) for most in ([2, 1], [1, 2], [2, 2])]
        for plan in [*plans, d.plan(decodes=[0, 1])]:
            steps.append(executor.launch(plan))
            while len(steps) > (plan.drafts != b""):
                result = steps.popleft().result()
                tokens, drafted = list(unpack(result.tokens)), drafted + sum(unpack(result.drafted))
                for row, count in enumerate(unpack(result.counts) or [1, 1]):
                    outputs[row] += tokens[:count]
                    del tokens[:count]
    for output, whole in zip(outputs, wanted, strict=True):
        assert output == whole[: len(output)]
    assert 10 < sum(map(len, outputs)) < 10 + drafted  # five steps of two rows


@pytest.fixture
def llama(tmp_path: Path) -> dict[str, Any]:
    test_families.save(tmp_path, "Llama", {})
    return {
        "path": tmp_path, "device": "cpu", "kv_tokens": 4096, "max_rows": 32, "page_size": 4,
        "quantization": "none", "kv_host": 1 << 20,
    }  # fmt: skip


def decide(executor: Any) -> Any:
    """A constraint that is late, drafts, scores, and blocks that leave and come back."""
    loaded, _, _, _ = generate(Driver(executor), True, slow="loaded")
    late = executor.constraints.counters.sat_out
    drafter = NgramDrafter(executor.info.max_rows)
    outputs, _, _, forced = generate(Driver(executor), True, drafter=drafter)
    for tokens in (loaded, outputs):  # how many steps it is in depends on how late others are
        del tokens[len(SAMPLINGS)]
    d = Driver(executor)
    prompt = prompts()[0] + prompts()[1][:10]
    table, other, key = d.pages(0, 100), d.pages(400, 100), b"k" * 16
    block = MovedBlock(1, key, pack(table[: BLOCK // d.page_size]))
    scored = ExtendRow(0, 0, pack(prompt), True, places=pack([3, 9]), targets=pack([1, 2]))
    result = executor.launch(StepPlan(1, opens=[d.open(0, table)], extends=[scored])).result()
    scores = torch.frombuffer(bytearray(result.scores), dtype=torch.float32)
    d.step(closes=[0], saves=[block])
    pages = pack(other[: BLOCK // d.page_size])
    plan = StepPlan(
        2, opens=[d.open(0, other, cached=BLOCK)],
        extends=[ExtendRow(0, BLOCK, pack(prompt[BLOCK:]), True)],
        loads=[MovedBlock(1, key, pages), MovedBlock(0, b"o" * 16, pack(d.pages(900, BLOCK)))],
    )  # fmt: skip
    again = executor.launch(plan).result()
    assert again.tokens == result.tokens  # the keys are those that were saved
    return (loaded, outputs, forced, result.tokens, list(unpack(again.lost))), scores, late


def test_all_else_is_decided_by_rank_0(llama: dict[str, Any]) -> None:
    one = load_executor(ModelConfig(**llama), lambda what, share: None)
    wanted, scores, _ = decide(one)
    one.close()
    with ranked(ModelConfig(**llama, tensor_parallel=2)) as executor:
        found, scores_too, late = decide(executor)
    assert found == wanted
    assert found[-1] == [0]
    assert late > 0
    torch.testing.assert_close(scores_too, scores, atol=1e-4, rtol=0)


def test_a_rank_reads_its_part_alone(llama: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are copied out of the files: what each rank has, and nothing twice but norms."""
    from ramify.gpu.startup import weights

    read: list[int] = []
    plain = weights._Target.read

    def counted(self: Any, file: Any, name: str) -> Any:
        tensor = plain(self, file, name)
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(weights._Target, "read", counted)
    with ranked(ModelConfig(**llama, tensor_parallel=2)) as executor:
        norms = 64 * 7
        assert sum(read) == executor.info.parameters + norms
    assert not [name for name in os.listdir("/dev/shm") if "ramify" in name]


def test_a_rank_that_fails_at_load_is_told(
    llama: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While rank 0 waits for it, which it does for ever."""
    over = threading.Event()

    def load(config: ModelConfig, progress: object, place: RankPlace) -> None:
        if place.rank:
            raise ModelError("no rank 1")
        over.wait(60)

    monkeypatch.setattr(f"{ranked.__module__}.load_rank", load)
    with pytest.raises(ModelError, match="no rank 1"), ranked(ModelConfig(**llama, tensor_parallel=2)):
        pass
    over.set()
