"""The whole executor on a random model: seeds, retraction, bad logits, attention layouts."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.gpu.attention.torch_attention import TorchAttention
from ramify.gpu.executors.base import BadLogits
from ramify.gpu.kv.pool import KVPool
from ramify.gpu.step.batch import make_batch
from ramify.gpu.step.rows import RowTable
from ramify.protocol.plan import ExecutorInfo, ExtendRow, OpenRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams

PROMPT = [5, 9, 2, 40, 7, 7, 7, 31, 100]


@pytest.fixture
def tiny(tmp_path: Path, tiny_config: dict[str, Any], drive: Any) -> Any:
    """A driver on a dummy model."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    return drive(tmp_path, load_format="dummy")


def test_sampled_tokens_depend_neither_on_neighbours_nor_on_retraction(tiny: Any) -> None:
    sampling = SamplingParams(
        temperature=1.0, top_p=0.95, frequency_penalty=0.4, repetition_penalty=1.2, seed=99
    )
    pages = range(60)
    alone = tiny.step(
        opens=[tiny.open(0, pages, sampling=sampling, history=pack(PROMPT))],
        extends=[ExtendRow(0, 0, pack(PROMPT), True)],
    )
    whole = [alone[0], *tiny.decode([0], 19)[0]]
    tiny.step(closes=[0])
    # with neighbours, in chunks, retracted after 8 tokens and prefilled again
    crowd = [
        tiny.open(row, range(100 * row, 100 * row + 60), sampling=SamplingParams(seed=row))
        for row in (1, 2)
    ]
    tiny.step(
        opens=[*crowd, tiny.open(3, range(500, 560), sampling=sampling, history=pack(PROMPT))],
        extends=[ExtendRow(row, 0, pack([row] * 30), True) for row in (1, 2)]
        + [ExtendRow(3, 0, pack(PROMPT[:4]), False)],
    )
    first = tiny.step(extends=[ExtendRow(3, 4, pack(PROMPT[4:]), True)], decodes=[1, 2])[3]
    again = [first, *tiny.decode([1, 3, 2], 7)[3]]
    tiny.step(closes=[3])
    tokens = PROMPT + again
    resumed = tiny.step(
        opens=[tiny.open(0, range(700, 760), sampling=sampling, sampled=8, history=pack(tokens))],
        extends=[ExtendRow(0, 0, pack(tokens), True)],
        decodes=[1],
    )
    again += [resumed[0], *tiny.decode([0, 1], 11)[0]]
    assert again == whole


def test_counters_and_result(tiny: Any) -> None:
    opens = [
        tiny.open(4, range(20), sampling=SamplingParams(temperature=0.0, logprobs=2)),
        tiny.open(1, range(20, 40)),
    ]
    extends = [ExtendRow(4, 0, pack(PROMPT), True), ExtendRow(1, 0, pack(PROMPT), False)]
    pending = tiny.executor.launch(StepPlan(step=12, opens=opens, extends=extends))
    assert pending.ready()
    result = pending.result()
    assert (result.step, result.computed, list(unpack(result.rows))) == (12, 18, [4])
    assert result.logprobs[0].top_ids[0] == unpack(result.tokens)[0]
    assert result.elapsed_us > 0
    assert (tiny.executor.counters.steps, tiny.executor.counters.tokens) == (1, 18)
    empty = tiny.executor.launch(StepPlan(step=13, closes=pack([4, 1]))).result()
    assert (empty.rows, empty.tokens, empty.computed) == (b"", b"", 0)
    tiny.executor.close()


def test_bad_logits_name_the_request_and_spare_the_others(tiny: Any) -> None:
    wanted = tiny.generate(0, PROMPT, 6, range(30))
    poison = 77
    tiny.executor._model.embedding[poison] = torch.nan
    bad = tiny.open(7, range(100, 130))
    opens = [tiny.open(0, range(200, 230)), bad]
    extends = [ExtendRow(0, 0, pack(PROMPT), True), ExtendRow(7, 0, pack([3, poison]), True)]
    pending = tiny.executor.launch(StepPlan(step=0, opens=opens, extends=extends))
    with pytest.raises(BadLogits, match="request") as caught:
        pending.result()
    assert (caught.value.rows, caught.value.requests) == ([7], [107])
    tokens = list(unpack(caught.value.result.tokens))
    assert tokens == [wanted[0], -1]
    # its pages are freed and padded neighbours read other slots of the pool: nothing leaks over
    tiny.step(closes=[7])
    short = tiny.open(8, [100, 2, 101, 4, 102], sampling=SamplingParams(temperature=0.0))
    tiny.step(opens=[short], extends=[ExtendRow(8, 0, pack([1, 2]), True)], decodes=[0])
    rest = tiny.decode([8, 0], 2)[0]
    assert rest == wanted[2:4]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    layout=st.sampled_from(["scattered", "runs", "shared"]),
    page_size=st.sampled_from([1, 8]),
    window=st.sampled_from([None, 1, 50]),
    in_place=st.booleans(),
)
def test_attention_over_pages(
    seed: int, layout: str, page_size: int, window: int | None, in_place: bool
) -> None:
    """Mixed extends and decodes in any page layout against plain attention, row by row."""
    shuffle = random.Random(seed)
    pages, heads, kv_heads, dim = 2048 // page_size, 4, 2, 8
    info = ExecutorInfo(
        "", "", 0, 100, 512, page_size, pages, 16, 4096, "cpu", "float32", "", [], 0, 0.0
    )
    table = RowTable(info)
    pool = KVPool(1, pages, page_size, kv_heads, dim, torch.float32, torch.device("cpu"))
    pool.k[:, : pool.padding_slot] = torch.nan  # whatever nobody wrote must not matter
    pool.v[:, : pool.padding_slot] = torch.nan
    attention = TorchAttention(pool, table, heads, (window,))
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
        fresh = pool.k[0, slots].isnan().any(-1).any(-1)
        pool.k[0, slots[fresh]] = torch.randn(int(fresh.sum()), kv_heads, dim, generator=generator)
        pool.v[0, slots[fresh]] = torch.randn(int(fresh.sum()), kv_heads, dim, generator=generator)

    batch = make_batch(step, table, torch.zeros(16, dtype=torch.int64))
    attention.plan(batch)
    total = len(batch.tokens)
    q = torch.randn(total, heads, dim, generator=generator)
    k, v = (torch.randn(total, kv_heads, dim, generator=generator) for _ in range(2))
    output = attention.attend(0, q, k, v)
    for i, row in enumerate(step.rows.tolist()):
        first, last = int(batch.qo_indptr[i]), int(batch.qo_indptr[i + 1])
        slots = torch.from_numpy(table.slots(row, 0, lengths[row]))
        keys, values = (t[0, slots].repeat_interleave(heads // kv_heads, 1) for t in (pool.k, pool.v))
        positions = np.arange(lengths[row])
        reach = positions[None, :] <= positions[-(last - first) :, None]
        if window is not None:
            reach &= positions[None, :] > positions[-(last - first) :, None] - window
        wanted = F.scaled_dot_product_attention(
            q[first:last].transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1),
            attn_mask=torch.from_numpy(reach),
        )  # fmt: skip
        wanted = wanted.transpose(0, 1).reshape(last - first, -1)
        torch.testing.assert_close(output[first:last], wanted, atol=1e-5, rtol=1e-5)
