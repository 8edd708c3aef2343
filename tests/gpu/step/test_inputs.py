"""The fields of a step: what is declared is laid out, padded and sent as it is declared."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ramify.gpu.step.buckets import (
    NOTHING,
    Bucket,
    BucketTable,
    decode_buckets,
    mixed_buckets,
    tailored,
)
from ramify.gpu.step.inputs import (
    DECLARED,
    NO_DRAWS,
    Draws,
    StepFrame,
    StepInputs,
    host_inputs,
    lay,
    layout,
    pad,
)
from ramify.gpu.step.rows import StepRows
from ramify.gpu.step.staging import Upload, frame_bytes

ROWS, SPARE = 40, 40


@st.composite
def steps(draw: st.DrawFn) -> StepRows:
    """Extends of some rows, decodes of others; the first extends do not all sample."""
    order = draw(st.permutations(range(ROWS)))
    n, decodes = draw(st.integers(0, 12)), draw(st.integers(0, 25))
    counts = draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))
    silent = draw(st.sets(st.integers(0, 11)))
    sampling = [i for i in range(n + decodes) if i >= n or i not in silent]
    return StepRows(
        rows=np.array(order[: n + decodes], dtype=np.int64),
        starts=np.array(draw(st.lists(st.integers(0, 99), min_size=n + decodes, max_size=n + decodes))),
        counts=np.array([*counts, *[1] * decodes], dtype=np.int64),
        extends=n,
        tokens=np.arange(1000, 1000 + sum(counts), dtype=np.int32),
        sampling=np.array(sampling, dtype=np.int64),
        draws=np.array(sampling, dtype=np.int64),
    )


def laid(bucket: Bucket, step: StepRows) -> StepInputs[Any]:
    """The step laid into arrays that hold something else."""
    plan = {"tiles": np.full((step.extends, 4), 7, dtype=np.int32)} if bucket.extended else {}
    room = {"tiles": np.empty((bucket.runs, 4), dtype=np.int32)} if bucket.extended else {}
    inputs = host_inputs(bucket, room)
    for name in DECLARED:
        array = getattr(inputs, name)
        if array is not None:
            array.fill(77)
    draws = np.arange(1, len(step.sampling) + 1) / 4
    lay(inputs, step, Draws(draws.astype(np.float32), draws), plan, SPARE)
    return inputs


def check(bucket: Bucket, step: StepRows) -> None:
    inputs = laid(bucket, step)
    assert len(inputs.input_ids) == len(inputs.rows) == len(inputs.positions) == bucket.lines
    tokens, n = len(step.tokens), step.extends
    decoded = [*step.given.tolist(), *(-1 - step.rows[n + len(step.given) :]).tolist()]
    wanted = [  # code, row, position of each token, sequence by sequence
        [
            (int(step.tokens[step.counts[:i].sum() + k]) if i < n else decoded[i - n], row, start + k)
            for k in range(count)
        ]
        for i, (row, start, count) in enumerate(
            zip(step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True)
        )
    ]
    columns = (inputs.input_ids.tolist(), inputs.rows.tolist(), inputs.positions.tolist())
    lines = list(zip(*columns, strict=True))
    assert lines[:tokens] == [line for run in wanted[:n] for line in run]
    first, stop = bucket.extended, bucket.extended + len(step.rows) - n
    assert lines[first:stop] == [run[0] for run in wanted[n:]]
    assert set(lines[tokens:first] + lines[stop:]) <= {(0, SPARE, 0)}
    sampled = len(step.sampling)
    draws = [(i + 1) / 4 for i in range(sampled)] + [0] * (bucket.sampling - sampled)
    assert inputs.temperatures.tolist() == inputs.uniforms.tolist() == draws
    if not bucket.extended:
        assert inputs.sampled_lines is None
        assert inputs.rows_that_sample is inputs.rows
        return
    index, owners = inputs.sampled_lines.tolist(), inputs.rows_that_sample.tolist()
    last = [wanted[i][-1] for i in step.sampling.tolist()]
    assert [lines[i] for i in index[:sampled]] == last
    assert owners == [row for _, row, _ in last] + [SPARE] * (bucket.sampling - sampled)
    assert set(index[sampled:]) <= {0}
    assert inputs.plan["tiles"].tolist() == [[7] * 4] * n + [[0] * 4] * (bucket.runs - n)


@given(steps(), st.booleans())
def test_a_padded_step_says_what_the_step_says(step: StepRows, decodes: bool) -> None:
    step = step.with_short_extends_as_decodes() if decodes else step
    table = BucketTable([*decode_buckets(ROWS), *mixed_buckets(ROWS, 256)])
    bucket = table.find(step)
    if bucket is not None:
        assert len(step.tokens) <= bucket.extended
        assert step.extends <= bucket.runs
        assert len(step.rows) - step.extends <= bucket.decodes
        assert len(step.sampling) <= bucket.sampling <= ROWS
        check(bucket, step)
    else:
        assert len(step.tokens) > 256 or step.extends > 8
    check(tailored(step, padded=True), step)
    check(tailored(step, padded=False), step)
    for bucket in decode_buckets(ROWS)[-1:] + mixed_buckets(ROWS, 64):
        check(bucket, NOTHING)


def test_padding_is_as_declared() -> None:
    for bucket in (Bucket(16, 4, 2, 6), Bucket(0, 0, 4, 4)):
        inputs = host_inputs(bucket, {"tiles": np.ones((4, 2), dtype=np.int32)})
        lay(inputs, NOTHING, NO_DRAWS, {}, SPARE)
        padded = host_inputs(bucket, {"tiles": np.ones((4, 2), dtype=np.int32)})
        pad(padded, SPARE)
        for name, field in DECLARED.items():
            array = getattr(inputs, name)
            assert (array is None) == (field.length(bucket) is None)
            if array is not None:
                assert set(array.tolist()) == {SPARE if field.padding == "spare" else 0}
                assert array.tolist() == getattr(padded, name).tolist()
        assert not inputs.plan["tiles"].any()


def test_a_frame_is_one_copy_of_all_fields() -> None:
    bucket, room = Bucket(16, 2, 3, 5), {"tiles": np.zeros((2, 4), dtype=np.int32)}
    fields = layout(bucket, room)
    assert list(fields) == [*DECLARED, "tiles"]
    upload = Upload(torch.device("cpu"), fixed=frame_bytes(fields))
    frame = StepFrame(bucket, upload.frame(0, fields))
    for name in DECLARED:
        getattr(frame.host, name).fill(3)
    frame.host.plan["tiles"].fill(4)
    assert not frame.device.rows.any()
    frame.send()
    for name, field in DECLARED.items():
        sent = getattr(frame.device, name)
        assert str(sent.dtype) == f"torch.{field.dtype}"
        assert sent.tolist() == [3] * len(getattr(frame.host, name))
    assert frame.device.plan["tiles"].tolist() == [[4] * 4] * 2
    assert frame.device.extended == 16


def test_a_plan_may_not_hide_a_field() -> None:
    with pytest.raises(ValueError, match="'rows'"):
        layout(Bucket(0, 0, 1, 1), {"rows": np.zeros(1, dtype=np.int32)})


def test_arrays_become_tensors_by_their_names() -> None:
    for bucket in (decode_buckets(8)[0], mixed_buckets(8, 64)[0]):
        room = {"tiles": np.arange(6, dtype=np.int32).reshape(2, 3)}
        inputs = host_inputs(bucket, room)
        pad(inputs, SPARE)
        inputs.plan["tiles"][...] = room["tiles"]
        tensors = inputs.on(torch.device("cpu"))
        assert tensors.bucket is bucket
        assert torch.equal(tensors.plan["tiles"], torch.from_numpy(room["tiles"]))
        for name in DECLARED:
            array, tensor = getattr(inputs, name), getattr(tensors, name)
            assert (array is None) == (tensor is None)
            assert array is None or torch.equal(tensor, torch.from_numpy(array))
