"""Every paged back end against attention in float64: small in the interpreter, in earnest on a GPU."""

import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from ramify.gpu.attention.registry import KernelChoice
from ramify.gpu.attention.spec import AttentionShape, AttentionSpec
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.step.buckets import Bucket, tailored
from ramify.gpu.step.inputs import StepInputs
from ramify.gpu.step.rows import StepRows
from ramify.gpu.step.step_rows import within
from ramify.protocol.plan import ExtendRow, pack

CUDA = torch.cuda.is_available()
# the interpreter of 3.6 does not know numpy 2.4
pytest.importorskip("triton", minversion=None if CUDA else "3.7")

DEVICE = torch.device("cuda" if CUDA else "cpu")
WINDOWED = os.environ.get("RAMIFY_TEST_FLASHINFER_WINDOWS") == "1"  # takes FlashInfer's compiler
BACK_ENDS = {
    "triton": ("triton", "triton"),
    "triton, balanced": ("triton", "triton"),
    "fa3+triton": ("fa3", "triton"),
    "fa3+flashinfer": ("fa3", "flashinfer"),
    "fa2+flashinfer": ("fa2", "flashinfer"),
}
on_gpu = pytest.mark.gpu


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, spec: AttentionSpec
) -> torch.Tensor:
    """The reference, in float64. q [n, heads, D] at positions first..; k, v [first + n, kv_heads, D].

    Returns [n, heads * D].
    """
    group = q.shape[1] // k.shape[1]
    k, v = (part.double().transpose(0, 1) for part in (k, v))
    keys = torch.arange(k.shape[1], device=q.device)
    outputs = []
    for begin in range(0, len(q), 256):
        part = q[begin : begin + 256].double().unflatten(1, (-1, group)).permute(1, 2, 0, 3)
        reach = torch.arange(first + begin, first + begin + part.shape[2], device=q.device)[:, None]
        seen = keys <= reach
        if spec.window is not None:
            seen &= keys > reach - spec.window
        scores = part @ k[:, None].transpose(2, 3) * spec.scale  # [kv_heads, group, n, keys]
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        if spec.sinks is not None:
            sinks = spec.sinks.double().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : k.shape[1]]
        outputs.append((weights @ v[:, None]).permute(2, 0, 1, 3).flatten(1))
    return torch.cat(outputs)


class StandIn:
    """FlashInfer as far as it is called, on a CPU: its wrappers' arguments, and what they mean."""

    class BatchPrefillWithPagedKVCacheWrapper:
        def __init__(self, scratch: torch.Tensor, layout: str, backend: str) -> None:
            assert layout == "NHD"
            self.compact = backend == "fa2"

        def plan(
            self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, indices: torch.Tensor,
            last: torch.Tensor, heads: int, kv_heads: int, dim: int, page_size: int, *, causal: bool,
            window_left: int, q_data_type: torch.dtype, seq_lens: torch.Tensor,
            max_token_per_sequence: int,
        ) -> None:  # fmt: skip
            assert causal
            assert max_token_per_sequence == qo_indptr.diff().max()
            counts = -(-seq_lens // page_size)
            assert torch.equal((counts - 1) * page_size + last, seq_lens)
            if self.compact:
                assert torch.equal(kv_indptr.diff(), counts)
            ends = kv_indptr[:-1] + counts
            self.q, self.lists, self.indices = qo_indptr, torch.stack((kv_indptr[:-1], ends)), indices
            self.lengths, self.left = seq_lens.tolist(), window_left

        def run(self, q: torch.Tensor, paged: Any, out: torch.Tensor) -> None:
            assert len(q) == self.q[-1]
            spec = AttentionSpec(q.shape[2] ** -0.5, window=None if self.left < 0 else self.left + 1)
            bounds = zip(self.q.tolist(), self.q.tolist()[1:], self.lists.T.tolist(), strict=False)
            for (start, stop, (begin, end)), length in zip(bounds, self.lengths, strict=True):
                pages = self.indices[begin:end].long()
                k, v = (part[pages].flatten(0, 1)[:length] for part in paged)
                own = attention(q[start:stop], k, v, length - (stop - start), spec)
                out[start:stop] = own.view(out[start:stop].shape)

    class BatchDecodeWithPagedKVCacheWrapper(BatchPrefillWithPagedKVCacheWrapper):
        def __init__(
            self, scratch: torch.Tensor, layout: str, use_cuda_graph: bool, use_tensor_cores: bool,
            paged_kv_indptr_buffer: torch.Tensor, paged_kv_indices_buffer: torch.Tensor,
            paged_kv_last_page_len_buffer: torch.Tensor,
        ) -> None:  # fmt: skip
            super().__init__(scratch, layout, "fa2")
            assert use_cuda_graph
            self.buffers = paged_kv_indptr_buffer, paged_kv_last_page_len_buffer
            self.list = paged_kv_indices_buffer

        def reset_workspace_buffer(self, scratch: torch.Tensor, plans: torch.Tensor) -> None:
            pass

        def plan(  # type: ignore[override]
            self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, heads: int,
            kv_heads: int, dim: int, page_size: int, *, window_left: int, q_data_type: torch.dtype,
            **more: Any,
        ) -> None:  # fmt: skip
            assert not len(indices)
            assert torch.equal(self.buffers[0], indptr)
            assert torch.equal(self.buffers[1], last)
            lengths = (indptr.diff() - 1) * page_size + last
            super().plan(
                torch.arange(len(indptr)), indptr, self.list, last, heads, kv_heads, dim, page_size,
                causal=True, window_left=window_left, q_data_type=q_data_type, seq_lens=lengths,
                max_token_per_sequence=1,
            )  # fmt: skip

    @staticmethod
    def fast_decode_plan(wrapper: Any, *arguments: Any, **options: Any) -> None:
        assert torch.equal(options["global_override_indptr_cpu"], arguments[0])
        wrapper.plan(*arguments, **options)


@pytest.fixture(params=list(BACK_ENDS))
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KernelChoice:
    """On a CPU FlashInfer is the stand-in."""
    name = str(request.param)
    if name == "deterministic":
        return KernelChoice("triton", "triton", "a test", deterministic=True)
    if name == "triton, balanced":
        from ramify.gpu.attention.triton_paged import TritonPaged

        monkeypatch.setattr(TritonPaged, "fewest_balanced", 1)
    elif name != "triton":
        from ramify.gpu.attention.flashinfer_paged import FlashInferPaged

        monkeypatch.setattr(FlashInferPaged, "fewest_tiles", 0)
        if not CUDA:
            monkeypatch.setitem(sys.modules, "flashinfer", cast(Any, StandIn))
            monkeypatch.setitem(sys.modules, "flashinfer.decode", cast(Any, StandIn))
        elif importlib.util.find_spec("flashinfer") is None:
            pytest.skip("flashinfer is not installed")
        elif name.startswith("fa3") and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("FA3 needs a Hopper GPU")
    return KernelChoice(*BACK_ENDS[name], reason="a test")


class Sequences:
    """Random keys and values under a random page table; what nobody owns is NaN."""

    def __init__(
        self, lengths: list[int], page_size: int, kv_heads: int, dim: int, dtype: torch.dtype
    ) -> None:
        counts = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(counts) + 3)
        self.page_size = page_size
        self.pages = torch.zeros((len(lengths), max(counts) + 5), dtype=torch.int32)
        slots = len(order) * page_size + 1  # the last is the pool's padding slot
        self.k, self.v = (
            torch.full((slots, kv_heads, dim), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)
        )
        self.slots = []
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            own, order = order[:count], order[count:]
            self.pages[row, :count] = own
            slot = (own[:, None] * page_size + torch.arange(page_size)).view(-1)[:length].to(DEVICE)
            self.slots.append(slot)
            for tensor in (self.k, self.v):
                tensor[slot] = torch.randn((length, kv_heads, dim), device=DEVICE).to(dtype)
        self.pages = self.pages.to(DEVICE)

    def reference(self, q: torch.Tensor, row: int, first: int, spec: AttentionSpec) -> torch.Tensor:
        """q [n, heads, D] at positions first.. of `row` -> float64 [n, heads * D]."""
        slots = self.slots[row][: first + len(q)]
        return attention(q, self.k[slots], self.v[slots], first, spec)


def check(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    """Relative error of one sequence, against the reference."""
    limit = 1e-5 if ours.dtype == torch.float32 else 1e-2
    assert (ours.double() - wanted).norm() <= limit * wanted.norm()


def make(
    kernels: KernelChoice, sequences: Any, heads: int, spec: AttentionSpec, max_drafts: int = 0
) -> Any:
    _, kv_heads, dim = sequences.k.shape
    shape = AttentionShape(heads, kv_heads, dim, sequences.k.dtype, (spec,))
    if CUDA and spec.window is not None and kernels.kind == "flashinfer" and not WINDOWED:
        pytest.skip("set RAMIFY_TEST_FLASHINFER_WINDOWS=1 to let FlashInfer compile for windows")
    nothing = np.zeros(len(sequences.pages), dtype=np.int64)
    # all that is asked of the table on the host
    table: Any = SimpleNamespace(
        page_size=sequences.page_size, max_guessed=max_drafts, pages=sequences.pages.cpu().numpy(),
        openings=nothing, unsettled=nothing,
    )  # fmt: skip
    return kernels.back_end(table, [shape], DEVICE, sequences.pages)


def lines(runs: list[tuple[int, int]]) -> "tuple[torch.Tensor, torch.Tensor]":
    """Row and position of each token of `runs` (cached, new), row by row: int32[T] each."""
    rows = np.repeat(np.arange(len(runs)), [new for _, new in runs])
    positions = np.concatenate([np.arange(cached, cached + new) for cached, new in runs])
    return tuple(torch.from_numpy(a.astype(np.int32)).to(DEVICE) for a in (rows, positions))  # type: ignore[return-value]


def step_of(runs: list[tuple[int, int]], first: int, extends: int) -> StepRows:
    """`runs` of (cached, new) in rows first.."""
    starts, counts = (np.array(part) for part in zip(*runs, strict=True))
    tokens = np.zeros(counts[:extends].sum(), dtype=np.int32)
    index = np.arange(len(runs))
    return StepRows(index + first, starts, counts, extends, tokens, index, index)


def inputs_of(
    bucket: Bucket, rows: torch.Tensor, positions: torch.Tensor, plan: "dict[str, Any] | None" = None
) -> StepInputs[torch.Tensor]:
    """What attention reads of a step."""
    parts = {name: torch.from_numpy(array).to(DEVICE) for name, array in (plan or {}).items()}
    parts["moved_turns"] = torch.zeros(3, len(rows), dtype=torch.int32, device=DEVICE)  # not attention's
    return StepInputs.from_parts(bucket, {"rows": rows, "positions": positions, **parts})


def run_step(
    back_end: Any, sequences: Sequences, runs: list[tuple[int, int]], decodes: int, heads: int,
    spec: AttentionSpec,
) -> None:  # fmt: skip
    """One step over rows 0..: `runs` of (cached, new), the last `decodes` of which are decodes."""
    step = step_of(runs, 0, len(runs) - decodes)
    rows, positions = lines(runs)
    q = torch.randn((len(rows), heads, sequences.k.shape[2]), device=DEVICE).to(sequences.k.dtype)
    bucket = tailored(step, padded=False)
    plan = back_end.plan(step, bucket, False)
    if not step.extends:
        back_end.plan_decodes(rows.cpu().numpy(), positions.cpu().numpy())
    inputs = inputs_of(bucket, rows, positions, plan)
    kv = LayerKV(sequences.k, sequences.v, sequences.page_size)
    ours = back_end.attend(q, kv, inputs, spec)
    if CUDA:  # another layer, the same plan
        assert torch.equal(ours, back_end.attend(q, kv, inputs, spec))
    first = 0
    for row, (cached, new) in enumerate(runs):
        part = slice(first, first + new)
        check(ours[part], sequences.reference(q[part], row, cached, spec))
        first += new


EXTENDS = (
    [(0, 1), (0, 300), (900, 7), (4000, 260), (31, 129), (32000, 500)] if CUDA else [(0, 3), (66, 2)]
)
DECODES = (
    [(0, 1), (1, 1), (62, 1), (63, 1), (64, 1), (5000, 1), (32767, 1)] if CUDA else [(0, 1), (69, 1)]
)
DIM = 128 if CUDA else 16
DTYPE = torch.bfloat16 if CUDA else torch.float32


GROUPS = [(1, None), (2, None), (4, None), (8, None), (4, 50), (1, 1000)]


def run_kinds(
    kernels: KernelChoice, page_size: int, heads: int, kv_heads: int, spec: AttentionSpec,
    dim: int = DIM, dtype: torch.dtype = DTYPE,
) -> None:  # fmt: skip
    """Extends over prefixes, extends among decodes, decodes alone: one back end, step after step."""
    largest = [cached + new for cached, new in EXTENDS + DECODES]
    sequences = Sequences(largest, page_size, kv_heads, dim, dtype)
    table = torch.zeros_like(sequences.pages)
    back_end = make(kernels, Moved(sequences, table), heads, spec)
    kinds = [(EXTENDS, DECODES), ([], DECODES), ([], DECODES[::-1])]
    if CUDA:
        kinds += [(EXTENDS, []), (EXTENDS[:2], DECODES)]
    for extends, decodes in kinds:
        runs = extends + decodes
        sequences = Sequences([cached + new for cached, new in runs], page_size, kv_heads, dim, dtype)
        table.zero_()
        table[: len(sequences.pages), : sequences.pages.shape[1]] = sequences.pages
        run_step(back_end, sequences, runs, len(decodes), heads, spec)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("group", "window"), GROUPS if CUDA else [(1, None), (4, None), (2, 9)])
def test_a_step_of_each_kind(
    kernels: KernelChoice, page_size: int, group: int, window: int | None
) -> None:
    torch.manual_seed(11)
    kv_heads = 2 if CUDA else 1
    run_kinds(kernels, page_size, group * kv_heads, kv_heads, AttentionSpec(DIM**-0.5, window=window))


SPECS = {
    "scale": {"scale": 0.7},
    "soft cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all of them": {"scale": 0.4, "softcap": 3.0, "window": 9, "sinks": True},
}


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("kernels", ["triton", "triton, balanced", "deterministic"], indirect=True)
def test_soft_caps_windows_and_sinks(kernels: KernelChoice, kind: str) -> None:
    torch.manual_seed(13)
    kv_heads, heads = (2, 8) if CUDA else (2, 4)
    fields: dict[str, Any] = {"scale": DIM**-0.5} | SPECS[kind]
    if fields.pop("sinks", False):
        fields["sinks"] = torch.linspace(-2.0, 3.0, heads, device=DEVICE)
    run_kinds(kernels, 16, heads, kv_heads, AttentionSpec(**fields))


@pytest.mark.parametrize("kernels", ["triton", "triton, balanced", "deterministic"], indirect=True)
def test_heads_of_512(kernels: KernelChoice) -> None:
    """Of Gemma 4's layers without a window; in 16 bits, because floats do not fit into a tile."""
    torch.manual_seed(14)
    run_kinds(kernels, 16, 4, 1, AttentionSpec(1.0 / 16), 512, torch.float16)


DRAFTS = [(0, 3), (70, 1), (15, 4), (63, 9), (5, 2), (40, 1), (1, 5)]
"""Lines of each row with the tokens before them: some fill a program's tile, some take several."""


@pytest.mark.parametrize(
    ("group", "kind"), [(1, "scale"), (2, "all of them"), (4, "sinks"), (7, "scale")]
)
@pytest.mark.parametrize("extends", [[], [(9, 8)]])
@pytest.mark.parametrize("kernels", ["triton", "triton, balanced", "deterministic"], indirect=True)
def test_lines_of_one_row(
    kernels: KernelChoice, group: int, kind: str, extends: list[tuple[int, int]]
) -> None:
    """Drafts are decodes of their row at the positions that follow; each sees what is before it."""
    torch.manual_seed(17)
    kv_heads = 2 if CUDA else 1
    heads = group * kv_heads
    fields: dict[str, Any] = {"scale": DIM**-0.5} | SPECS[kind]
    if fields.pop("sinks", False):
        fields["sinks"] = torch.linspace(-2.0, 3.0, heads, device=DEVICE)
    spec = AttentionSpec(**fields)
    runs = extends + [(cached * (40 if CUDA else 1), new) for cached, new in DRAFTS]
    sequences = Sequences([cached + new for cached, new in runs], 16, kv_heads, DIM, DTYPE)
    back_end = make(kernels, sequences, heads, spec, max_drafts=8)
    # each draft is a decode of its own
    n, new = len(extends), np.array([new for _, new in runs])
    each = np.where(np.arange(len(runs)) < n, 1, new)
    at = within(each)
    whole = step_of(runs, 0, n)
    step = StepRows(
        np.repeat(whole.rows, each), np.repeat(whole.starts, each) + at,
        np.where(np.arange(len(at)) < n, np.repeat(new, each), 1), n, whole.tokens,
        np.arange(len(at)), np.arange(len(at)), lines=each,
    )  # fmt: skip
    rows, positions = lines(runs)
    q = torch.randn((len(rows), heads, DIM), device=DEVICE).to(DTYPE)
    bucket = tailored(step, padded=False)
    plan = back_end.plan(step, bucket, False)
    if "runs" in plan:
        assert plan["runs"].sum() == len(step.rows) - n
        assert (plan["runs"] > 0).sum() < len(step.rows) - n
    kv = LayerKV(sequences.k, sequences.v, 16)
    ours = back_end.attend(q, kv, inputs_of(bucket, rows, positions, plan), spec)
    first = 0
    for row, (cached, count) in enumerate(runs):
        part = slice(first, first + count)
        check(ours[part], sequences.reference(q[part], row, cached, spec))
        first += count


@pytest.mark.parametrize("group", [1, 2, 4])
def test_lines_of_rows_that_share_keys(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with drafts beside ones without, on the pages of one prefix, which are read together."""
    from ramify.gpu.attention import triton_paged
    from ramify.gpu.attention.groups import Grouper, GroupLimits, is_grouped
    from ramify.gpu.attention.triton_shared import TILE

    def grouper(table: Any, shape: Any, lines: int = 1) -> Grouper:
        return Grouper(table, GroupLimits(16, 16, 2, TILE // (group * lines), 3))

    monkeypatch.setattr(triton_paged, "grouper_for", grouper)
    torch.manual_seed(19)
    kv_heads = 2 if CUDA else 1
    heads, spec = group * kv_heads, AttentionSpec(DIM**-0.5)
    runs = [(cached + 40, new) for cached, new in DRAFTS]
    sequences = Sequences([cached + new for cached, new in runs], 16, kv_heads, DIM, DTYPE)
    for row in range(1, 5):  # the first 32 tokens are those of row 0
        sequences.pages[row, :2] = sequences.pages[0, :2]
        sequences.slots[row][:32] = sequences.slots[0][:32]
    back_end = make(KernelChoice("triton", "triton", "a test"), sequences, heads, spec, max_drafts=8)
    each = np.array([new for _, new in runs])
    rows, positions = lines(runs)
    index = np.arange(len(rows))
    step = StepRows(
        rows.cpu().numpy().astype(np.int64), positions.cpu().numpy().astype(np.int64),
        np.ones(len(rows), dtype=np.int64), 0, np.empty(0, dtype=np.int32), index, index, lines=each,
    )  # fmt: skip
    q = torch.randn((len(rows), heads, DIM), device=DEVICE).to(DTYPE)
    bucket = tailored(step, padded=False)
    plan = back_end.plan(step, bucket, False)
    assert is_grouped(plan)
    firsts = np.flatnonzero(plan["runs"][: each[:5].sum()])
    assert (plan["own"][firsts, 0] >= 32).all()
    room = back_end.room(replace(bucket, grouped=True, drafted=True))
    assert {name: part.shape for name, part in room.items()} == {n: p.shape for n, p in plan.items()}
    kv = LayerKV(sequences.k, sequences.v, 16)
    inputs = inputs_of(replace(bucket, grouped=True, drafted=True), rows, positions, plan)
    ours = back_end.attend(q, kv, inputs, spec)
    first = 0
    for row, (cached, count) in enumerate(runs):
        part = slice(first, first + count)
        check(ours[part], sequences.reference(q[part], row, cached, spec))
        first += count


class Moved:
    """`sequences` under the page table of an executor, which never moves."""

    def __init__(self, sequences: Sequences, pages: torch.Tensor) -> None:
        self.k, self.pages, self.page_size = sequences.k, pages, sequences.page_size


def test_small_steps_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of the two serves a step depends on its tiles, and both give the same."""
    if not CUDA:
        monkeypatch.setitem(sys.modules, "flashinfer", cast(Any, StandIn))
    elif importlib.util.find_spec("flashinfer") is None or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs flashinfer and a Hopper GPU")
    runs = [(3, 5000), (0, 700), (20, 1)] if CUDA else [(3, 40), (0, 90), (20, 1)]
    sequences = Sequences([cached + new for cached, new in runs], 16, 2, DIM, DTYPE)
    spec = AttentionSpec(DIM**-0.5)
    back_end = make(KernelChoice("fa3", "triton", "a test"), sequences, 16 if CUDA else 2, spec)
    served = []
    for part in (runs, runs[1:2], runs[2:]):
        first = runs.index(part[0])
        step = step_of(part, first, len(part))
        served.append("triton" if back_end.plan(step, tailored(step, False), False) else "fa3")
    assert served == ["fa3", "triton", "triton"]
    for decodes in (0, 1):
        run_step(back_end, sequences, runs, decodes, 16 if CUDA else 2, spec)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about the garbage in padding
@pytest.mark.skipif(CUDA, reason="FlashInfer itself serves no model this small")
@pytest.mark.parametrize("captured", [True, False])
def test_the_executor_runs_each_back_end(
    kernels: KernelChoice, captured: bool, tmp_path: Path, tiny_config: dict[str, Any], drive: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Padded steps, steps that no graph holds, decodes alone: the tokens are those of torch."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config | {"head_dim": 16}))
    if not captured:
        monkeypatch.setattr("ramify.gpu.step.graphs.StepGraphs.find", lambda *rest: None)
    texts = [[3 * i % 120 + 3 for i in range(n)] for n in (40, 3)]
    results = []
    for choice in (KernelChoice("torch", "torch", "a test"), kernels):
        monkeypatch.setattr("ramify.gpu.startup.load.choose", lambda *rest, choice=choice: choice)
        d = drive(tmp_path, device="cpu", load_format="dummy", max_rows=3, step_tokens=64)
        assert (d.executor.info.attention, d.executor.info.attention_reason) == (choice.name, "a test")
        tokens = [d.step(
            opens=[d.open(row, d.pages(512 * row, 96)) for row in range(2)],
            extends=[ExtendRow(0, 0, pack(texts[0]), True)],
        )]  # fmt: skip
        tokens.append(d.step(extends=[ExtendRow(1, 0, pack(texts[1]), True)], decodes=[0]))
        tokens += [d.step(decodes=rows) for rows in ([1, 0], [0], [0, 1])]
        results.append(tokens)
    assert results[0] == results[1]


@on_gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 8)])
def test_a_graph_of_decodes_is_replayed_at_other_lengths(
    kernels: KernelChoice, page_size: int, heads: int, kv_heads: int
) -> None:
    torch.manual_seed(12)
    lengths = [1, 77, 3000, 9000, 640, 31, 2, 20000]
    sequences = Sequences(lengths, page_size, kv_heads, DIM, DTYPE)
    spec = AttentionSpec(DIM**-0.5)
    back_end = make(kernels, sequences, heads, spec)
    q = torch.randn((8, heads, DIM), device=DEVICE).to(DTYPE)
    rows, positions = (torch.zeros(8, dtype=torch.int32, device=DEVICE) for _ in range(2))
    inputs = inputs_of(Bucket(0, 0, 8, 8), rows, positions)
    kv = LayerKV(sequences.k, sequences.v, page_size)
    zeros = np.zeros(8, dtype=np.int32)
    back_end.plan_decodes(zeros, zeros)
    back_end.attend(q, kv, inputs, spec)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = back_end.attend(q, kv, inputs, spec)
    for order in (range(8), [7, 6, 5, 4, 3, 2, 1, 0], [3] * 8):
        own = np.array(list(order), dtype=np.int32)
        at = np.array([lengths[row] - 1 for row in order], dtype=np.int32)
        rows.copy_(torch.from_numpy(own))
        positions.copy_(torch.from_numpy(at))
        back_end.plan_decodes(own, at)
        graph.replay()
        for line, (row, position) in enumerate(zip(own.tolist(), at.tolist(), strict=True)):
            wanted = sequences.reference(q[line : line + 1], row, position, spec)
            check(output[line : line + 1], wanted)


@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize("kv_heads", [1, 3, 4, 8, 14, 16, 30])
def test_no_number_of_decodes_launches_what_was_not_warmed(
    kv_heads: int, max_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without a graph have any number of decodes, the warmed ones some."""
    from ramify.gpu.attention import triton_balanced, triton_decode
    from ramify.gpu.attention.triton_paged import TritonPaged
    from ramify.gpu.startup.rehearsal import warm_all

    rows, launched = 256, set[Any]()

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Any:
            return lambda *operands, **constants: launched.add((self.name, *constants.items()))

    for module, name in ((triton_decode, "_decode"), (triton_decode, "_merge"),
                         (triton_balanced, "_attend")):  # fmt: skip
        monkeypatch.setattr(module, name, Noted(f"{module.__name__}.{name}"))
        monkeypatch.setattr(module, "overlaps", lambda device: True)
    spec = AttentionSpec(0.25)
    shape = AttentionShape(2 * kv_heads, kv_heads, 16, torch.float32, (spec,))
    table: Any = SimpleNamespace(page_size=16, max_guessed=max_drafts)
    pages = torch.zeros((rows + 1, 1), dtype=torch.int32)
    attention = TritonPaged(pages, table, shape, shares_keys=False)

    def decode(count: int, drafted: bool) -> None:
        q, keys = torch.zeros((count, 2 * kv_heads, 16)), torch.zeros((16, kv_heads, 16))
        lines = torch.zeros(count, dtype=torch.int32)
        runs = {"runs": np.zeros(count, dtype=np.int32)} if drafted else {}
        inputs = inputs_of(Bucket(0, 0, count, count), lines, lines, runs)
        output = torch.empty((count, 2 * kv_heads * 16))
        attention.decode(q, LayerKV(keys, keys, 16), inputs, spec, output)

    class Executor:
        info = SimpleNamespace(max_rows=rows, step_tokens=8192)

        def forms(self, bucket: Bucket) -> list[Bucket]:
            return [bucket]

        def unlike_decodes(self) -> list[Bucket]:
            counts = attention.unlike_decodes(rows)
            return [Bucket(0, 0, count, count, drafted=drafted) for count in counts for drafted in kinds]

        def warm(self, buckets: list[Bucket]) -> None:
            for bucket in buckets:
                if bucket.decodes:
                    decode(bucket.decodes, bucket.drafted)

        def warm_drafter(self) -> None:
            pass

    kinds = [False, True] if max_drafts else [False]
    executor: Any = Executor()
    warm_all(executor)
    warmed = launched.copy()
    for count in range(1, rows + 1):
        for drafted in kinds:
            decode(count, drafted)
    assert launched == warmed
