"""Attention on torch against its definition in float64, in any layout of pages."""

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.gpu.attention.spec import AttentionShape, AttentionSpec
from ramify.gpu.attention.torch_attention import TorchAttention
from ramify.gpu.kv.layout import PairLayout
from ramify.gpu.step.buckets import tailored
from ramify.gpu.step.inputs import NO_DRAWS, host_inputs, lay
from ramify.gpu.step.rows import RowTable
from ramify.protocol.plan import ExecutorInfo, ExtendRow, OpenRow, StepPlan, pack
from ramify.protocol.sampling import SamplingParams


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    layout=st.sampled_from(["scattered", "runs", "shared"]),
    page_size=st.sampled_from([1, 8]),
    window=st.sampled_from([None, 1, 50]),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
    in_place=st.booleans(),
)
def test_attention_over_pages(
    seed: int, layout: str, page_size: int, window: int | None, softcap: float | None, sinks: bool,
    in_place: bool,
) -> None:  # fmt: skip
    """Mixed extends and decodes in any page layout against attention's definition, row by row."""
    shuffle = random.Random(seed)
    pages, heads, kv_heads, dim = 2048 // page_size, 4, 2, 8
    info = ExecutorInfo(
        "", "", 0, 100, 512, page_size, pages, 16, 4096, "cpu", "float32", "", [], 0, 0.0
    )
    table = RowTable(info)
    cpu, sink = torch.device("cpu"), torch.tensor([-1.0, 0.5, 2.0, 4.0])
    spec = AttentionSpec(0.4, softcap, window, sink if sinks else None)
    pool = PairLayout(((kv_heads, dim),), torch.float32).allocate(pages, page_size, cpu)
    kv = pool.layers[0]
    kv.k[: pool.padding_slot] = torch.nan  # whatever nobody wrote must not matter
    kv.v[: pool.padding_slot] = torch.nan
    shape = AttentionShape(heads, kv_heads, dim, torch.float32, (spec,))
    attention = TorchAttention(table, shape, cpu)
    attention._in_place = in_place
    generator = torch.Generator().manual_seed(seed)

    free = list(range(pages))
    if layout == "scattered":
        shuffle.shuffle(free)
    prefix = [free.pop(0) for _ in range(128 // page_size)]
    opens, extends, decodes, lengths = [], [], [], []
    for row in range(6):
        cached = (
            shuffle.choice([0, 3, 60, 128, 140])
            if layout != "shared"
            else shuffle.choice([64, 128, 131])
        )
        new = shuffle.choice([1, 2, 33]) if row < 3 else 1
        count = -(-(cached + new) // page_size)
        own = prefix[: min(cached, 128) // page_size] if layout == "shared" else []
        taken = [free.pop(0) for _ in range(count - len(own))]
        opens.append(OpenRow(row, row, pack(own + taken), cached, SamplingParams()))
        lengths.append(cached + new)
        if row < 3 or not cached:
            extends.append(ExtendRow(row, cached, pack([1] * new), True))
        else:
            decodes.append(row)
    table.apply(StepPlan(step=0, opens=opens))
    table._decodable[:] = True
    step = table.apply(StepPlan(step=1, extends=extends, decodes=pack(decodes)))
    for row in range(6):  # shared slots get the same values from each row that holds them
        cached = opens[row].cached
        slots = torch.from_numpy(table.slots(row, 0, cached))
        fresh = kv.k[slots].isnan().any(-1).any(-1)
        kv.k[slots[fresh]] = torch.randn(int(fresh.sum()), kv_heads, dim, generator=generator)
        kv.v[slots[fresh]] = torch.randn(int(fresh.sum()), kv_heads, dim, generator=generator)

    bucket = tailored(step, padded=False)
    plan = attention.plan(step, bucket, captured=False)
    inputs = host_inputs(bucket, plan)
    lay(inputs, step, NO_DRAWS, plan, spare=0)
    on_device = inputs.on(cpu)
    total = step.computed
    q = torch.randn(total, heads, dim, generator=generator)
    k, v = (torch.randn(total, kv_heads, dim, generator=generator) for _ in range(2))
    kv.store(on_device.plan["slots"], k, v)
    output = attention.attend(q, kv, on_device, spec)
    ends = np.cumsum(step.counts).tolist()
    for i, row in enumerate(step.rows.tolist()):
        first, last = ends[i] - int(step.counts[i]), ends[i]
        slots = torch.from_numpy(table.slots(row, 0, lengths[row]))
        keys, values = (t[slots].repeat_interleave(heads // kv_heads, 1) for t in (kv.k, kv.v))
        positions = np.arange(lengths[row])
        reach = positions[None, :] <= positions[-(last - first) :, None]
        if window is not None:
            reach &= positions[None, :] > positions[-(last - first) :, None] - window
        scores = torch.einsum("qhd,khd->hqk", q[first:last].double(), keys.double()) * spec.scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~torch.from_numpy(reach), -torch.inf)
        if sinks:
            scores = torch.cat((scores, sink.double()[:, None, None].expand(*scores.shape[:2], 1)), -1)
        weights = scores.softmax(-1)[..., : lengths[row]]
        wanted = torch.einsum("hqk,khd->qhd", weights, values.double()).reshape(last - first, -1)
        torch.testing.assert_close(output[first:last].double(), wanted, atol=1e-5, rtol=1e-5)
