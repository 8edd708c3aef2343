"""What the CUDA executor launches and copies in a step, in order.

On a GPU a launch costs microseconds, and a graph holds exactly these. The kernels are recorded instead
of run. Who has to change what is expected here changes what a step costs, and measures it on a GPU.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ramify.gpu.step.buckets import decode_buckets, mixed_buckets
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack
from ramify.protocol.sampling import SamplingParams

pytest.importorskip("triton", minversion="3.7")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="records Triton's interpreter")

ROWS = 16
LAYER = ["_rope_store", "attention", "_add_norm", "_gate_mul", "_add_norm"]
SAMPLER = ["_scan", "_choose"]


class Copies(TorchDispatchMode):
    """Copies of a step's integers to the device."""

    def __init__(self, launched: list[str]) -> None:
        super().__init__()
        self._launched = launched

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(op) == "aten.copy_.default" and args[0].dtype == torch.uint8:
            self._launched.append("upload")
        elif str(op) == "aten.index_copy_.default":
            self._launched.append("pages" if args[0].dim() > 1 else "page table")
        elif str(op) == "aten.copy_.default" and args[0].dtype == torch.int32:
            self._launched.append("download")
        return op(*args, **(kwargs or {}))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from triton.runtime.interpreter import InterpretedFunction

    names: list[str] = []
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda self, *args, **options: names.append(self.fn.__name__)
    )
    return names


@pytest.fixture
def run(
    tmp_path: Path, tiny_config: dict[str, Any], drive: Any, launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., list[str]]:  # fmt: skip
    """run(plan, ...): what the last of the plans launches, between the uploads and the download."""
    from ramify.gpu.attention import triton_shared

    monkeypatch.setattr(triton_shared, "_LEAST_SAVED", 1)

    def last_of(
        *plans: StepPlan, captured: bool = False, draft: str = "none", changes: Any = None
    ) -> list[str]:
        config = tiny_config | {"head_dim": 16, "max_position_embeddings": 2048} | (changes or {})
        (tmp_path / "config.json").write_text(json.dumps(config))
        executor = drive(
            tmp_path, device="cpu", dtype="float32", load_format="dummy", attention="triton",
            max_rows=ROWS, step_tokens=512, kv_tokens=16384, page_size=1 if changes else 16,
            draft=draft,
        ).executor  # fmt: skip
        if captured:
            executor.capture([*decode_buckets(ROWS), *mixed_buckets(ROWS, 512)], lambda what, done: None)
        with Copies(launched):
            for plan in plans:
                launched.clear()
                executor.launch(plan)
        return launched.copy()

    return last_of


def opened(rows: range, cached: int = 0, **settings: Any) -> list[OpenRow]:
    """Rows whose first 256 tokens lie on the same pages."""
    pages = {row: [*range(16), *range(32 * (row + 1), 32 * (row + 1) + 16)] for row in rows}
    return [OpenRow(row, row, pack(pages[row]), cached, SamplingParams(**settings)) for row in rows]


def step(attention: list[str], *, layers: int = 2) -> list[str]:
    """The kernels of a step without the sampler's."""
    layer = [name for part in LAYER for name in (attention if part == "attention" else [part])]
    return ["_embed_norm", *layer * layers]


PREFILL = StepPlan(0, opens=opened(range(2)), extends=[ExtendRow(0, 0, pack([5] * 40), True)])
DECODE = StepPlan(1, decodes=pack([0]))


@pytest.mark.parametrize("captured", [False, True])
def test_extends_and_decodes(run: Any, captured: bool) -> None:
    more = ["_merge"] if captured else []  # a graph has room for extends whose keys are split
    wanted = ["upload", "page table", "upload", *step(["_extend", *more]), *SAMPLER, "download"]
    assert run(PREFILL, captured=captured) == wanted
    wanted = ["upload", *step(["_decode", "_merge"]), *SAMPLER, "download"]
    assert run(PREFILL, DECODE, captured=captured) == wanted
    mixed = StepPlan(1, extends=[ExtendRow(1, 0, pack([7] * 9), True)], decodes=pack([0]))
    wanted = ["upload", *step(["_decode", "_merge", "_extend", *more]), *SAMPLER, "download"]
    assert run(PREFILL, mixed, captured=captured) == wanted


@pytest.mark.parametrize("captured", [False, True])
def test_decodes_that_share_a_prefix(run: Any, captured: bool) -> None:
    rows = range(8)
    extends = [ExtendRow(row, 256, pack([row + 1] * 2), True) for row in rows]
    plans = [StepPlan(0, opens=opened(rows, 256), extends=extends), StepPlan(1, decodes=pack(rows))]
    wanted = ["upload", *step(["_shared", "_decode", "_merge"]), *SAMPLER, "download"]
    assert run(*plans, captured=captured) == wanted


def test_what_some_rows_need_beyond_a_temperature(run: Any) -> None:
    """After the step, from the same logits; the log-probabilities are a second download."""
    cut = PREFILL.opens[1:] + opened(range(1), temperature=0.9, top_p=0.5, logprobs=2)
    plans = [StepPlan(0, opens=cut, extends=PREFILL.extends), DECODE]
    again = ["_best", "_bins", "_gather", "_search", "_masses", "_draw", "_blocks", "_lines"]
    wanted = [
        "upload", *step(["_decode", "_merge"]), *SAMPLER, "upload", *again, "download", "download"
    ]  # fmt: skip
    assert run(*plans) == wanted


QWEN = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@pytest.mark.parametrize("captured", [False, True])
def test_layers_with_fixed_states(run: Any, captured: bool) -> None:
    """A decode is two launches more than its products; the slots travel with the step."""
    opens = [
        OpenRow(row, row, pack(range(64 * row, 64 * row + 64)), 0, SamplingParams()) for row in (0, 1)
    ]
    first = StepPlan(
        0, opens=opens, extends=[ExtendRow(0, 0, pack([5] * 40), True)], states=pack([0, 1])
    )
    extends = ["_prepare", "_solve", "_chunks", "_open"]
    more = ["_merge"] if captured else []

    def model(delta: list[str], attention: list[str]) -> list[str]:
        behind = ["_add_norm", "_gate_mul", "_add_norm"]
        return ["_embed_norm", *delta, *behind, "_rope_store", *attention, "_open_heads", *behind]

    ends = [*SAMPLER, "download"]
    wanted = ["upload", "page table", "upload", *model(extends, ["_extend", *more]), *ends]
    assert run(first, captured=captured, changes=QWEN) == wanted
    decode = StepPlan(1, decodes=pack([0]), states=pack([1, 2]))
    wanted = ["upload", *model(["_recur", "_open"], ["_decode", "_merge"]), *ends]
    assert run(first, decode, captured=captured, changes=QWEN) == wanted
    mixed = StepPlan(
        1, extends=[ExtendRow(1, 0, pack([7] * 9), True)], decodes=pack([0]), states=pack([0, 3, 1, 2])
    )
    both = model(["_recur", "_open", *extends], ["_decode", "_merge", "_extend", *more])
    assert run(first, mixed, captured=captured, changes=QWEN) == ["upload", *both, *ends]


@pytest.mark.parametrize("captured", [False, True])
def test_layers_with_window_pages(run: Any, captured: bool) -> None:
    """Both page tables are written by one launch; a layer's kernels are those of any layer."""
    mistral = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 64,
    }
    pages = pack(range(64))
    opens = [OpenRow(0, 0, pages, 0, SamplingParams(), windows=pages)]
    first = StepPlan(0, opens=opens, extends=[ExtendRow(0, 0, pack([5] * 40), True)])
    more = ["_merge"] if captured else []
    wanted = ["upload", "page table", "upload", *step(["_extend", *more]), *SAMPLER, "download"]
    assert run(first, captured=captured, changes=mistral) == wanted
    wanted = ["upload", *step(["_decode", "_merge"]), *SAMPLER, "download"]
    assert run(first, DECODE, captured=captured, changes=mistral) == wanted


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def test_layers_of_experts(run: Any) -> None:
    """At a few rows four launches (the router's product is the library's) and the norm."""

    def model(attention: list[str], experts: list[str]) -> list[str]:
        layer = ["_rope_store", *attention, "_add_norm", "_route", *experts, "_add_norm"]
        return ["_embed_norm", *layer * 2, *SAMPLER, "download"]

    opens = [OpenRow(0, 0, pack(range(64)), 0, SamplingParams())]
    first = StepPlan(0, opens=opens, extends=[ExtendRow(0, 0, pack([5] * 17), True)])
    many = ["_sort", "_open_many", "_down_many", "_sum_many"]
    assert run(first, changes=EXPERTS)[3:] == model(["_extend"], many)
    wanted = model(["_decode", "_merge"], ["_open_few", "_sum_few"])
    assert run(first, DECODE, captured=True, changes=EXPERTS) == ["upload", *wanted]


LATENTS = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 0,
}


def test_layers_with_latents(run: Any) -> None:
    """A decode: what is kept, turned and absorbed in one launch, and one that opens the output.

    Beside the three of experts, with their shared one, and the norm. Branches that share
    a prefix read it in one launch more.
    """

    def model(attention: list[str], experts: list[str]) -> list[str]:
        layer = ["_store", *attention, "_by_head", "_add_norm", "_route", *experts]
        return ["_embed_norm", *layer * 2, *SAMPLER, "download"]

    rows, own = range(8), {row: range(512 * (row + 1), 512 * (row + 1) + 40) for row in range(8)}
    opens = [OpenRow(row, row, pack([*range(256), *own[row]]), 256, SamplingParams()) for row in rows]
    extends = [ExtendRow(row, 256, pack([row + 1] * 3), True) for row in rows]
    first = StepPlan(0, opens=opens, extends=extends)
    few, alone = ["_open_few", "_sum_few", "_add_norm"], ["_decode", "_merge"]
    wanted = ["upload", *model(alone, few)]
    assert run(first, DECODE, captured=True, changes=LATENTS) == wanted
    both = StepPlan(1, decodes=pack(rows))
    wanted = ["upload", *model(["_shared", *alone], ["_open_together", "_sum_few", "_add_norm"])]
    for captured in (False, True):
        assert run(first, both, captured=captured, changes=LATENTS) == wanted


@pytest.mark.parametrize("captured", [False, True])
def test_drafts(run: Any, captured: bool) -> None:
    """A launch to know the row and one to keep its last token, one to guess, one to compare.

    Only behind drafts a step is corrected; each keeps its tokens, which a graph does.
    """
    drafted = StepPlan(1, decodes=pack([0]), drafts=pack([3]))
    model, behind = ["_remember", *step(["_decode", "_merge"]), *SAMPLER], ["_accept", "download"]
    wanted = ["upload", "_track", "upload", "_remember", "_propose", *model, *behind]
    assert run(PREFILL, drafted, captured=captured, draft="ngram") == wanted
    after = StepPlan(2, decodes=pack([0]))
    wanted = ["upload", "_correct", *model, "download"]
    assert run(PREFILL, drafted, after, captured=captured, draft="ngram") == wanted
    assert run(PREFILL, after, captured=captured, draft="ngram") == ["upload", *model, "download"]


def test_drafts_of_a_model(run: Any, tmp_path: Path) -> None:
    """A row that was not drafted catches up first; a guess is a pass; without drafts none of it runs."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    drafted, draft = StepPlan(1, decodes=pack([0]), drafts=pack([2])), str(tmp_path)
    first, later = step(["_decode", "_merge"]), step(["_decode", "_merge"])
    passes = [*first, *SAMPLER, "_advance", *later, *SAMPLER, "_advance"]
    caught = ["upload", "_fill", *step(["_extend"])]
    model = ["_remember", *step(["_decode", "_merge"]), *SAMPLER]
    rest = [*model, "_accept", "download"]
    ahead = ["upload", "_track", "upload", "_remember", *caught, "upload", "_begin", *passes]
    assert run(PREFILL, drafted, captured=True, draft=draft) == [*ahead, *rest]
    ahead = ["upload", "_correct", "upload", "_begin", *passes]
    assert run(PREFILL, drafted, drafted, captured=True, draft=draft) == [*ahead, *rest]
    wanted = ["upload", "_correct", *model, "download"]
    assert run(PREFILL, drafted, DECODE, captured=True, draft=draft) == wanted
    assert run(PREFILL, DECODE, captured=True, draft=draft) == ["upload", *model, "download"]


def test_drafts_that_come_with_an_extend(run: Any) -> None:
    """Nothing guesses: the row's seed is uploaded, and samples are compared."""
    given = [ExtendRow(0, 0, pack([5] * 4), True, drafts=3)]
    wanted = [
        "upload", "page table", "upload", "_track", "upload", *step(["_decode", "_merge"]), *SAMPLER,
        "_accept", "download",
    ]  # fmt: skip
    assert run(StepPlan(0, opens=PREFILL.opens, extends=given)) == wanted


def test_targets_run_the_head_once_more(run: Any) -> None:
    extend = ExtendRow(0, 0, pack([5] * 40), True, places=pack([3, 9]), targets=pack([1, 2]))
    scored = StepPlan(0, opens=PREFILL.opens, extends=[extend])
    wanted = ["upload", "page table", "upload", *step(["_extend"]), *SAMPLER, "upload", "download",
              "download"]  # fmt: skip
    assert run(scored) == wanted


def test_pages_are_copied_first(run: Any) -> None:
    """Both numbers in one upload; all layers' keys at once, and all their values."""
    plan = StepPlan(1, decodes=pack([0]), copies=pack([0, 900, 1, 901]))
    model = step(["_decode", "_merge"])
    wanted = ["upload", "pages", "pages", "upload", *model, *SAMPLER, "download"]
    assert run(PREFILL, plan) == wanted
    model = ["_remember", *model]  # and the tokens of their slots
    wanted = ["upload", *["pages"] * 3, "upload", *model, *SAMPLER, "download"]
    assert run(PREFILL, plan, draft="ngram") == wanted
