"""Every paged back end against attention in float32: small in the interpreter, in earnest on a GPU."""

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ramify.gpu.attention.choice import Choice, choose
from ramify.gpu.attention.paged import Inputs
from ramify.gpu.rows import StepRows
from ramify.protocol.errors import ModelError

CUDA = torch.cuda.is_available()
# the interpreter of 3.6 does not know numpy 2.4
pytest.importorskip("triton", minversion=None if CUDA else "3.7")

DEVICE = torch.device("cuda" if CUDA else "cpu")
WINDOWED = os.environ.get("RAMIFY_TEST_FLASHINFER_WINDOWS") == "1"  # takes FlashInfer's compiler
BACK_ENDS = {
    "triton": ("triton", "triton"),
    "fa3+triton": ("fa3", "triton"),
    "fa3+flashinfer": ("fa3", "flashinfer"),
    "fa2+flashinfer": ("fa2", "flashinfer"),
}
on_gpu = pytest.mark.gpu


@pytest.fixture(params=["triton", *(pytest.param(n, marks=on_gpu) for n in list(BACK_ENDS)[1:])])
def kernels(request: pytest.FixtureRequest) -> Choice:
    name = str(request.param)
    if name != "triton" and importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    if name != "triton" and not CUDA:
        pytest.skip("needs a CUDA device")
    if name.startswith("fa3") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FA3 needs a Hopper GPU")
    return Choice(*BACK_ENDS[name], reason="a test")


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

    def reference(self, q: torch.Tensor, row: int, first: int, window: int | None) -> torch.Tensor:
        """q [n, heads, D] at positions first.. of `row` -> float32 [n, heads * D]."""
        group = q.shape[1] // self.k.shape[1]
        slots = self.slots[row][: first + len(q)]
        k, v = (t[slots].float().transpose(0, 1) for t in (self.k, self.v))  # [kv_heads, n, D]
        keys = torch.arange(len(slots), device=DEVICE)
        outputs = []
        for begin in range(0, len(q), 256):
            part = q[begin : begin + 256].float().unflatten(1, (-1, group)).permute(1, 2, 0, 3)
            reach = torch.arange(first + begin, first + begin + part.shape[2], device=DEVICE)[:, None]
            seen = keys <= reach
            if window is not None:
                seen &= keys > reach - window
            scores = part @ k[:, None].transpose(2, 3) * q.shape[2] ** -0.5
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            outputs.append((weights @ v[:, None]).permute(2, 0, 1, 3).flatten(1))
        return torch.cat(outputs)


def check(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    """Relative error of one sequence, against the reference."""
    limit = 1e-5 if ours.dtype == torch.float32 else 1e-2
    assert (ours.float() - wanted).norm() <= limit * wanted.norm()


def make(kernels: Choice, sequences: Sequences, heads: int, window: int | None, **more: Any) -> Any:
    _, kv_heads, dim = sequences.k.shape
    shape = SimpleNamespace(heads=heads, kv_heads=kv_heads, head_dim=dim, windows=(window,))
    if window is not None and kernels.extend != "triton" and not WINDOWED:
        pytest.skip("set RAMIFY_TEST_FLASHINFER_WINDOWS=1 to let FlashInfer compile for windows")
    return kernels.paged(sequences.pages, sequences.page_size, shape, sequences.k.dtype, **more)  # type: ignore[arg-type]


def lines(runs: list[tuple[int, int]]) -> "tuple[torch.Tensor, torch.Tensor]":
    """Row and position of each token of `runs` (cached, new), row by row: int32[T] each."""
    rows = np.repeat(np.arange(len(runs)), [new for _, new in runs])
    positions = np.concatenate([np.arange(cached, cached + new) for cached, new in runs])
    return tuple(torch.from_numpy(a.astype(np.int32)).to(DEVICE) for a in (rows, positions))  # type: ignore[return-value]


def run_step(
    back_end: Any, sequences: Sequences, runs: list[tuple[int, int]], decodes: int, heads: int,
    window: int | None,
) -> None:  # fmt: skip
    """One step over rows 0..: `runs` of (cached, new), the last `decodes` of which are decodes."""
    extends = len(runs) - decodes
    starts, counts = (np.array(part) for part in zip(*runs, strict=True))
    tokens = np.zeros(counts[:extends].sum(), dtype=np.int32)
    index = np.arange(len(runs))
    step = StepRows(index, starts, counts, extends, tokens, index, index)
    rows, positions = lines(runs)
    q = torch.randn((len(rows), heads, sequences.k.shape[2]), device=DEVICE).to(sequences.k.dtype)
    plan = []
    if extends:
        plan = [torch.from_numpy(array).to(DEVICE) for array in back_end.plan(step)]
    else:
        back_end.plan_decodes(rows.cpu().numpy(), positions.cpu().numpy())
    inputs = Inputs(rows, rows, positions, extended=len(tokens), plan=plan)
    pool = sequences.k, sequences.v
    ours = back_end.attend(q, pool, inputs, window)
    again = back_end.attend(q, pool, inputs, window)  # another layer, the same plan
    assert torch.equal(ours, again)
    first = 0
    for row, (cached, new) in enumerate(runs):
        part = slice(first, first + new)
        check(ours[part], sequences.reference(q[part], row, cached, window))
        first += new


EXTENDS = (
    [(0, 1), (0, 300), (900, 7), (4000, 260), (31, 129), (32000, 500)] if CUDA else [(0, 3), (66, 2)]
)
DECODES = (
    [(0, 1), (1, 1), (62, 1), (63, 1), (64, 1), (5000, 1), (32767, 1)] if CUDA else [(0, 1), (69, 1)]
)
DIM = 128 if CUDA else 16
DTYPE = torch.bfloat16 if CUDA else torch.float32


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("group", "window"), [(1, None), (2, None), (4, None), (8, None), (4, 50), (1, 1000)]
)
def test_a_step_of_each_kind(kernels: Choice, page_size: int, group: int, window: int | None) -> None:
    """Extends over prefixes, extends among decodes, decodes alone: one back end, step after step."""
    torch.manual_seed(11)
    kv_heads = 2 if CUDA else 1
    heads = group * kv_heads
    back_end = None
    for extends, decodes in ((EXTENDS, []), (EXTENDS, DECODES), ([], DECODES), (EXTENDS[:2], DECODES)):
        runs = extends + decodes
        if back_end is None:
            largest = [cached + new for cached, new in EXTENDS + DECODES]
            sequences = Sequences(largest, page_size, kv_heads, DIM, DTYPE)
            table = torch.zeros_like(sequences.pages)
            back_end = make(kernels, Moved(sequences, table), heads, window)  # type: ignore[arg-type]
        else:
            lengths = [cached + new for cached, new in runs]
            sequences = Sequences(lengths, page_size, kv_heads, DIM, DTYPE)
        table.zero_()
        table[: len(sequences.pages), : sequences.pages.shape[1]] = sequences.pages
        run_step(back_end, sequences, runs, len(decodes), heads, window)


class Moved:
    """`sequences` under the page table of an executor, which never moves."""

    def __init__(self, sequences: Sequences, pages: torch.Tensor) -> None:
        self.k, self.pages, self.page_size = sequences.k, pages, sequences.page_size


@on_gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 8)])
def test_a_graph_of_decodes_is_replayed_at_other_lengths(
    kernels: Choice, page_size: int, heads: int, kv_heads: int
) -> None:
    torch.manual_seed(12)
    lengths = [1, 77, 3000, 9000, 640, 31, 2, 20000]
    sequences = Sequences(lengths, page_size, kv_heads, DIM, DTYPE)
    back_end = make(kernels, sequences, heads, None)
    q = torch.randn((8, heads, DIM), device=DEVICE).to(DTYPE)
    rows, positions = (torch.zeros(8, dtype=torch.int32, device=DEVICE) for _ in range(2))
    inputs = Inputs(rows, rows, positions, extended=0, plan=[])
    pool = sequences.k, sequences.v
    zeros = np.zeros(8, dtype=np.int32)
    back_end.plan_decodes(zeros, zeros)
    back_end.attend(q, pool, inputs, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = back_end.attend(q, pool, inputs, None)
    for order in (range(8), [7, 6, 5, 4, 3, 2, 1, 0], [3] * 8):
        own = np.array(list(order), dtype=np.int32)
        at = np.array([lengths[row] - 1 for row in order], dtype=np.int32)
        rows.copy_(torch.from_numpy(own))
        positions.copy_(torch.from_numpy(at))
        back_end.plan_decodes(own, at)
        graph.replay()
        for line, (row, position) in enumerate(zip(own.tolist(), at.tolist(), strict=True)):
            wanted = sequences.reference(q[line : line + 1], row, position, None)
            check(output[line : line + 1], wanted)


SHAPE: Any = SimpleNamespace(heads=4, kv_heads=2, head_dim=128, windows=(None,))
CPU = torch.device("cpu")


def test_a_choice_says_why() -> None:
    choice = choose("auto", SHAPE, torch.bfloat16, CPU)
    assert (choice.name, choice.reason) == ("torch", "the device is a CPU")
    assert choose("torch", SHAPE, torch.bfloat16, CPU).name == "torch"
    assert Choice("fa3", "triton", "").name == "flashinfer prefill fa3 + triton decode"
    assert Choice("triton", "triton", "").workspace_bytes(SHAPE, CPU, 257, 4096) == 0


def test_what_cannot_be_had_is_an_error_that_names_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ModelError, match=r"--attention flashinfer: it runs on CUDA.*--attention triton"):
        choose("flashinfer", SHAPE, torch.bfloat16, CPU)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ModelError, match=r"TRITON_INTERPRET=1.*; give --attention torch"):
        choose("triton", SHAPE, torch.bfloat16, CPU)


class Machine:
    """A GPU and a FlashInfer that are not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ramify.gpu.attention import choice

        self.capability, self.installed, self.built, self.compiler = (9, 0), True, True, False
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        monkeypatch.setattr(choice.importlib.util, "find_spec", self.find)
        monkeypatch.setattr(choice, "import_module", lambda name: self)
        monkeypatch.setattr(choice, "_modules", lambda *rest: ["a", "b"])
        monkeypatch.setattr(choice, "_is_built", lambda module: self.built)
        monkeypatch.setattr(choice, "_can_build", lambda: self.compiler)

    def find(self, name: str) -> object:
        return object() if name != "flashinfer" or self.installed else None

    def choose(self, asked: str, dtype: torch.dtype = torch.bfloat16, **shape: Any) -> Choice:
        model: Any = SimpleNamespace(**(vars(SHAPE) | shape))
        return choose(asked, model, dtype, torch.device("cuda"))


@pytest.mark.parametrize(
    ("machine", "call", "extend", "reason"),
    [
        ({}, {}, "fa3", "Hopper"),
        ({"installed": False}, {}, "triton", "not installed"),
        ({"capability": (8, 0)}, {}, "triton", "FA2 is no faster"),
        ({"capability": (7, 5)}, {}, "triton", "8.0 or more"),
        ({"built": False, "compiler": True}, {}, "triton", "not compiled"),
        ({}, {"dtype": torch.float32}, "triton", "float32"),
        ({}, {"head_dim": 32}, "triton", "not 32"),
        ({}, {"head_dim": 80}, "torch", "not 80"),
    ],
)
def test_auto_takes_fa3_where_it_is_at_hand(
    machine: dict[str, Any], call: dict[str, Any], extend: str, reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    there = Machine(monkeypatch)
    vars(there).update(machine)
    choice = there.choose("auto", **call)
    assert choice.extend == extend
    assert choice.decode == ("torch" if extend == "torch" else "triton")
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("machine", "call", "mend"),
    [
        ({"installed": False}, {}, r"pip install 'ramify\[cuda\]'"),
        ({"built": False}, {}, "install flashinfer-jit-cache"),
        ({}, {"dtype": torch.float32}, "--dtype bfloat16"),
        ({}, {"head_dim": 32}, "--attention triton"),
    ],
)
def test_flashinfer_is_refused_with_a_mend(
    machine: dict[str, Any], call: dict[str, Any], mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Machine(monkeypatch)
    vars(there).update(machine)
    with pytest.raises(ModelError, match=mend):
        there.choose("flashinfer", **call)


def test_flashinfer_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Machine(monkeypatch)
    assert there.choose("flashinfer").name == "flashinfer prefill fa3 + flashinfer decode"
    there.capability, there.built, there.compiler = (8, 9), False, True
    choice = there.choose("flashinfer")
    assert (choice.extend, choice.compiles) == ("fa2", True)
