"""Pictures whose tokens see each other: each back end against attention's definition in float64."""

import importlib.util

import numpy as np
import pytest
import torch

from ramify.gpu.attention.registry import KernelChoice
from ramify.gpu.attention.spec import AttentionShape, AttentionSpec
from ramify.gpu.kv.layout import PairLayout
from ramify.gpu.step.buckets import tailored
from ramify.gpu.step.inputs import NO_DRAWS, host_inputs, lay
from ramify.gpu.step.rows import PlanError, RowTable
from ramify.protocol.pictures import PlacedPicture
from ramify.protocol.plan import ExecutorInfo, ExtendRow, OpenRow, StepPlan, pack
from ramify.protocol.sampling import SamplingParams

HEADS, KV_HEADS, DIM, ROWS = 4, 2, 16, 4
CPU = torch.device("cpu")
TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available(), reason="no interpreter"
)
# of each row: what is cached, what is new, and where pictures are: begun in the cache, side by side,
# longer than a window, behind a stretch of text that a tile does not end with; no picture; a token alone
RUNS = [(3, 70, [(1, 6), (20, 36), (37, 60)]), (0, 33, [(0, 20)]), (5, 9, []), (40, 1, [(8, 30)])]


def placed(start: int, stop: int) -> PlacedPicture:
    return PlacedPicture(start, 1, stop - start, bytes([start]))


def rows_with_pictures(runs: list[tuple[int, int, list[tuple[int, int]]]]) -> RowTable:
    table = RowTable(
        ExecutorInfo("", "", 0, 100, 512, 1, 512, ROWS, 512, "cpu", "float32", "", [], 0, 0.0)
    )
    opens = [
        OpenRow(
            row, row, pack(range(128 * row, 128 * row + cached + new)), cached, SamplingParams(),
            pictures=[placed(*each) for each in pictures],
        )
        for row, (cached, new, pictures) in enumerate(runs)
    ]  # fmt: skip
    table.apply(StepPlan(step=0, opens=opens))
    return table


@pytest.mark.parametrize(
    "kind", ["torch", pytest.param("triton", marks=TRITON), pytest.param("deterministic", marks=TRITON)]
)
@pytest.mark.parametrize("window", [None, 9])
def test_tokens_of_a_picture_see_each_other(kind: str, window: int | None) -> None:
    """Beside layers of the same shape that do not; extends of any length."""
    table = rows_with_pictures(RUNS)
    extends = [ExtendRow(row, cached, pack([1] * new), True)
               for row, (cached, new, _) in enumerate(RUNS)]  # fmt: skip
    step = table.apply(StepPlan(step=1, extends=extends))
    specs = AttentionSpec(0.4, None, window, whole=True), AttentionSpec(0.4)
    shape = AttentionShape(HEADS, KV_HEADS, DIM, torch.float32, specs)
    choice = KernelChoice(
        "torch" if kind == "torch" else "triton", kind, "", deterministic=kind == "deterministic"
    )
    pages = torch.arange(128 * ROWS, dtype=torch.int32).view(ROWS, 128)
    attention = choice.back_end(table, [shape], CPU, pages)
    kv = PairLayout(((KV_HEADS, DIM),), torch.float32).allocate(512, 1, CPU).layers[0]
    draw = torch.Generator().manual_seed(3)
    kv.k[:], kv.v[:] = (torch.randn(kv.k.shape, generator=draw) for _ in range(2))
    bucket = tailored(step, padded=False)
    plan = attention.plan(step, bucket, captured=False)
    inputs = host_inputs(bucket, plan)
    lay(inputs, step, NO_DRAWS, plan, spare=0)
    q = torch.randn((step.computed, HEADS, DIM), generator=draw)
    for spec in specs:
        output, first = attention.attend(q, kv, inputs.on(CPU), spec), 0
        for row, (cached, new, pictures) in enumerate(RUNS):
            keys, own = np.arange(cached + new), np.arange(cached, cached + new)[:, None]
            seen = keys <= own
            for start, stop in pictures if spec.whole else ():
                seen |= (own >= start) & (own < stop) & (keys >= start) & (keys < stop)
            if spec.window is not None:
                seen &= keys > own - spec.window
            k, v = (each[128 * row : 128 * row + cached + new].double().repeat_interleave(2, 1)
                    for each in (kv.k, kv.v))  # fmt: skip
            scores = torch.einsum("qhd,khd->hqk", q[first : first + new].double(), k) * spec.scale
            weights = scores.masked_fill(~torch.from_numpy(seen), -torch.inf).softmax(-1)
            wanted = torch.einsum("hqk,khd->qhd", weights, v).reshape(new, -1)
            found = output[first : first + new].double()
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
            first += new


def test_an_extend_that_ends_inside_of_a_picture_is_refused() -> None:
    table = rows_with_pictures([(0, 20, [(5, 15)])])
    step = table.apply(StepPlan(step=1, extends=[ExtendRow(0, 0, pack([1] * 14), False)]))
    shape = AttentionShape(HEADS, KV_HEADS, DIM, torch.float32, (AttentionSpec(0.4, whole=True),))
    attention = KernelChoice("torch", "torch", "").back_end(table, [shape], CPU)
    with pytest.raises(PlanError, match="row 0 is extended up to 14, inside of a picture up to 15"):
        attention.plan(step, tailored(step, padded=False), captured=False)
