"""What the CPU's kernels read of a step: the fields of every step, at addresses that stay."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from ramify.gpu.ops.cpu_inputs import CpuInputs
from ramify.gpu.ops.cpu_ops import empty_step
from ramify.gpu.step.buckets import tailored
from ramify.gpu.step.inputs import DECLARED, Draws, host_inputs, lay
from ramify.gpu.step.rows import RowTable, StepRows
from ramify.protocol.plan import ExecutorInfo

ROWS, LAST = 8, np.arange(50, 58)
INFO = ExecutorInfo(
    model="", architecture="", parameters=0, vocab_size=100, context=64, page_size=4, pages=128,
    max_rows=ROWS, step_tokens=32, device="cpu", dtype="", attention="", eos_token_ids=[],
    kv_bytes_per_token=1, load_seconds=0.0,
)  # fmt: skip


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


STEPS = {
    "decodes": StepRows(
        ints(3, 1), ints(9, 2), ints(1, 1), 0, np.empty(0, dtype=np.int32), ints(0, 1), ints(0, 4)
    ),
    "a prompt and a decode": StepRows(
        ints(2, 0, 5), ints(0, 4, 7), ints(3, 2, 1), 2, np.arange(5, dtype=np.int32), ints(1, 2),
        ints(0, 1),
    ),
    "a prompt that does not sample": StepRows(
        ints(2), ints(0), ints(3), 1, np.arange(3, dtype=np.int32), ints(), ints()
    ),
    "a given token": StepRows(
        ints(3, 1), ints(9, 2), ints(1, 1), 0, np.empty(0, dtype=np.int32), ints(0, 1), ints(0, 4),
        given=np.array([77, -1], dtype=np.int32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_the_fields_are_those_of_every_step(name: str) -> None:
    """But for tokens that rows sampled: these are known."""
    step, table = STEPS[name], RowTable(INFO)
    table.pages[:] = np.arange(ROWS)[:, None] * 16 + np.arange(table.pages.shape[1])
    own = empty_step(40)
    addresses = [getattr(own.inputs, field).ctypes.data for field in DECLARED]
    inputs = CpuInputs(own, table, 2)
    inputs.lay(STEPS["a prompt and a decode"], LAST)  # what lies there from the step before
    draws = Draws(
        np.linspace(0, 1, len(step.sampling), dtype=np.float32), np.full(len(step.sampling), 0.5)
    )
    inputs.lay(step, LAST, draws)
    wanted = host_inputs(tailored(step, padded=False), {})
    lay(wanted, step, draws, {}, spare=0)
    lines = wanted.bucket.lines
    ids = np.where(wanted.input_ids < 0, LAST[wanted.rows], wanted.input_ids)
    assert own.inputs.input_ids[:lines].tolist() == ids.tolist()
    for field in ("rows", "positions", "temperatures", "uniforms"):
        expected = getattr(wanted, field)
        assert getattr(own.inputs, field)[: len(expected)].tolist() == expected.tolist(), field
    sampled = range(lines) if wanted.sampled_lines is None else wanted.sampled_lines.tolist()
    assert own.lines[: own.lines_count[0]].tolist() == list(sampled)
    assert (own.tokens[0], inputs.furthest) == (lines, wanted.positions.max())
    assert own.slots[:lines].tolist() == table.slots_at(wanted.rows, wanted.positions).tolist()
    assert [getattr(own.inputs, field).ctypes.data for field in DECLARED] == addresses


def test_every_field_has_room_for_the_largest_step() -> None:
    own = empty_step(40)
    assert {len(getattr(own.inputs, name)) for name in DECLARED} == {40}
