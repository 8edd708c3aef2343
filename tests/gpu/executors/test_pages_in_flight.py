"""Rows that read pages which a step in flight computes for another row, or copies of such pages.

The scheduler grants a prefix as soon as the step that computes it was sent, so every executor has to
read what that step writes, not what the pages held before.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.executors.fake_model import FakeModel
from ramify.protocol.cluster import BLOCK
from ramify.protocol.plan import ExtendRow, MovedBlock, StepPlan, pack, unpack

PREFIX = [5, 9, 2, 40, 7, 7, 7, 31, 100, 64, 3, 90]
OWN = [[17, 55], [21, 6, 8], [44]]  # what each row has behind the prefix
TOKENS = 4
INTERPRETED = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="needs Triton's interpreter"
)
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
EXECUTORS = [
    "fake",
    {"attention": "torch"},
    {"quantization": "int8"},
    pytest.param({"attention": "triton"}, marks=INTERPRETED),
    pytest.param({"attention": "triton", "deterministic": True}, marks=INTERPRETED),
    pytest.param({"device": "cuda", "dtype": "bfloat16"}, marks=GPU),
    pytest.param({"device": "cuda", "dtype": "bfloat16", "attention": "triton"}, marks=GPU),
    pytest.param({"device": "cuda", "dtype": "bfloat16", "deterministic": True}, marks=GPU),
]


@pytest.fixture(params=EXECUTORS, ids=str)
def d(request: Any, drive: Any, tmp_path: Path, tiny_config: dict[str, Any]) -> Any:
    if request.param == "fake":
        model = FakeModel(vocab_size=128)
        return drive(FakeExecutor(model, context=200, pages=256, page_size=4, host_blocks=4))
    if "quantization" in request.param:
        pytest.importorskip("llvmlite")
        from ramify.gpu.native.host import host_isa

        if host_isa() is None:
            pytest.skip("the kernels do not run on this CPU")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(tiny_config | sizes))
    torch.manual_seed(1)
    settings = {"page_size": 4, "kv_tokens": 1024, "max_rows": 4, "load_format": "dummy"}
    settings["kv_host"] = 1 << 20
    return drive(tmp_path, **settings, **request.param)


def test_a_prefix_that_is_in_flight_is_read(d: Any) -> None:
    wanted = [d.generate(0, PREFIX + own, TOKENS, d.pages(512, 40)) for own in OWN]
    shared, size = d.pages(0, len(PREFIX)), d.page_size
    assert len(PREFIX) % size == 0
    d.generate(0, [3] * 60, 1, d.pages(0, 64))  # what the pages held before
    tables = [shared + d.pages(100 * row + 100, 24) for row in range(len(OWN))]
    owner = StepPlan(
        1, opens=[d.open(0, tables[0])], extends=[ExtendRow(0, 0, pack(PREFIX + OWN[0]), True)]
    )
    children = StepPlan(
        2,
        opens=[d.open(row, tables[row], cached=len(PREFIX)) for row in (1, 2)],
        extends=[ExtendRow(row, len(PREFIX), pack(OWN[row]), True) for row in (1, 2)],
        decodes=pack([0]),
    )
    found: list[list[int]] = [[], [], []]
    for pending in [d.executor.launch(plan) for plan in (owner, children)]:
        result = pending.result()
        for row, token in zip(unpack(result.rows), unpack(result.tokens), strict=True):
            found[row].append(token)
    for row, tokens in d.decode([0, 1, 2], TOKENS - 1).items():
        found[row] += tokens
    assert [tokens[:TOKENS] for tokens in found] == wanted


def test_a_page_is_copied_before_anybody_writes_to_it_again(d: Any) -> None:
    """The owner's last page goes to another row in the plan that copies it."""
    prompt, size = PREFIX + OWN[0], d.page_size
    wanted = d.generate(0, prompt, TOKENS, d.pages(512, 40))
    d.generate(0, [3] * 60, 1, d.pages(0, 64))
    tables = [d.pages(100 * row, 24) for row in range(3)]
    whole, cut = len(PREFIX), (len(prompt) - 1) // size
    assert whole // size == cut < (len(prompt) - 1) / size
    owner = StepPlan(
        1, opens=[d.open(0, tables[0])], extends=[ExtendRow(0, 0, pack(prompt), sample=False)]
    )
    shared = tables[0][:cut] + tables[1][cut:]
    other = [tables[0][cut], *tables[2]]
    heir = StepPlan(
        2,
        closes=pack([0]),
        opens=[d.open(1, shared, cached=len(prompt) - 1), d.open(2, other)],
        extends=[
            ExtendRow(1, len(prompt) - 1, pack(prompt[-1:]), True),
            ExtendRow(2, 0, pack([9] * size), sample=False),
        ],
        copies=pack([tables[0][cut], tables[1][cut]]),
    )
    pending = [d.executor.launch(plan) for plan in (owner, heir)]
    pending[0].result()
    assert list(unpack(pending[1].result().tokens)) == wanted[:1]
    assert d.decode([1], TOKENS - 1)[1] == wanted[1:]


def test_a_block_leaves_before_its_pages_are_written_and_comes_back(d: Any) -> None:
    """Its pages go to another row in the plan that saves it; the next plan loads it. Steps overlap."""
    on_gpu = d.executor.info.device.startswith("cuda")
    if "deterministic" in d.executor.info.attention and not on_gpu:
        pytest.skip("its interpreted kernels take long, and know nothing of blocks")
    tokens = BLOCK if on_gpu else 16
    size, count = d.page_size, tokens // d.page_size
    prompt = [(7 * i) % 90 + 3 for i in range(tokens + 5)]
    wanted = d.generate(0, prompt, TOKENS, d.pages(512, 100))
    tables = [d.pages(100 * row, 96) for row in range(3)]
    key, other_pages = b"k" * 16, d.pages(700, tokens)
    block = MovedBlock(1, key, pack(tables[0][:count]))
    owner = StepPlan(
        1, opens=[d.open(0, tables[0])], extends=[ExtendRow(0, 0, pack(prompt), sample=False)]
    )
    other = StepPlan(
        2, closes=pack([0]), saves=[block], opens=[d.open(1, tables[0])],
        extends=[ExtendRow(1, 0, pack([9] * len(prompt)), sample=False)],
    )  # fmt: skip
    first = [-1, *tables[2][1:count]]  # this page is there: the row has computed it
    back = StepPlan(
        3, opens=[d.open(2, tables[2])], extends=[ExtendRow(2, 0, pack(prompt[:size]), sample=False)],
        loads=[MovedBlock(1, key, pack(first)), MovedBlock(1, b"o" * 16, pack(other_pages))],
    )  # fmt: skip
    pending = [d.executor.launch(plan) for plan in (owner, other)]
    pending[0].result()
    pending.append(d.executor.launch(back))
    pending[1].result()
    assert list(unpack(pending[2].result().lost)) == [1]  # what was asked for with another key
    row = d.open(3, tables[2], cached=tokens)
    last = ExtendRow(3, tokens, pack(prompt[tokens:]), True)
    result = d.executor.launch(StepPlan(4, closes=pack([2]), opens=[row], extends=[last])).result()
    assert list(unpack(result.tokens)) == wanted[:1]
    assert not result.lost
