"""Back ends side by side: what they plan together has room in the step."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ramify.gpu.attention.groups import Grouper, GroupLimits, is_grouped
from ramify.gpu.attention.registry import KernelChoice
from ramify.gpu.attention.spec import AttentionShape, AttentionSpec
from ramify.gpu.step.buckets import Bucket
from ramify.gpu.step.step_rows import StepRows

pytest.importorskip("triton", minversion="3.6")


def test_drafts_of_rows_that_share_keys_in_layers_without_a_window(monkeypatch: Any) -> None:
    from ramify.gpu.attention import triton_paged

    def grouper(table: Any, shape: Any, lines: int = 1) -> Grouper:
        return Grouper(table, GroupLimits(16, 16, 2, 64 // lines, 3))

    monkeypatch.setattr(triton_paged, "grouper_for", grouper)
    pages = torch.arange(40, dtype=torch.int32).repeat(4, 1)  # four rows of the same tokens
    nothing = np.zeros(4, dtype=np.int64)
    table: Any = SimpleNamespace(
        page_size=1, max_guessed=3, pages=pages.numpy(), openings=nothing, unsettled=nothing
    )
    full = AttentionShape(2, 1, 16, torch.float32, (AttentionSpec(1.0),))
    windowed = replace(full, specs=(AttentionSpec(1.0, window=9),), windowed=True)
    back_end = KernelChoice("triton", "triton", "a test").back_end(
        table, [windowed, full], torch.device("cpu"), pages, pages + 40
    )
    rows, index = np.repeat(np.arange(4), 2), np.arange(8)
    one, drafts = np.ones(8, dtype=np.int64), np.full(4, 2)
    none = np.empty(0, dtype=np.int32)
    step = StepRows(rows, 30 + index % 2, one, 0, none, index, index, lines=drafts)
    bucket = Bucket(0, 0, 8, 8, drafted=True)
    plan = back_end.plan(step, bucket, False)
    assert is_grouped(plan)
    assert {"runs", "runs/1"} <= plan.keys()
    room = back_end.room(replace(bucket, grouped=True))
    assert {name: part.shape for name, part in plan.items()} == {n: p.shape for n, p in room.items()}
    assert not back_end.room(Bucket(0, 0, 1, 1, grouped=True, drafted=True))  # one is never grouped
