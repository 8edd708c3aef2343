"""Keys and values as 8-bit floats: the kernels give what torch gives of the same codes."""

import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExtendRow, pack
from tests.gpu.attention.test_paged_attention import StandIn

CUDA = torch.cuda.is_available()
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "pairs": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "num_key_value_heads": 2},
    "latents": {
        "architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 32, "q_lora_rank": None,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 2,
        "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "num_key_value_heads": 4,
    },
}  # fmt: skip
PROMPT = [3, 9, 27, 17, 51, 25, 11, 33, 35, 41]


def write(folder: Path, kind: str) -> Path:
    (folder / "config.json").write_text(json.dumps(COMMON | SHAPES[kind]))
    return folder


def logits(drive: Any, folder: Path, **settings: Any) -> tuple[Any, list[torch.Tensor]]:
    """Of a prompt, and of three tokens behind it."""
    settings = {"load_format": "dummy", "quantization": "none", "max_rows": 2} | settings
    d = drive(folder, **settings)
    d.step(opens=[d.open(0, d.pages(0, 32))])
    found = [d.forward(extends=[ExtendRow(0, 0, pack(PROMPT), True)]).clone()]
    for at, token in enumerate((5, 6, 7), len(PROMPT)):
        found.append(d.forward(extends=[ExtendRow(0, at, pack([token]), True)]).clone())
    return d.executor.info, found


@pytest.mark.parametrize("kind", SHAPES)
def test_torch_reads_what_it_stored_in_half_the_memory(kind: str, tmp_path: Path, drive: Any) -> None:
    write(tmp_path, kind)
    plain, wanted = logits(drive, tmp_path)
    info, found = logits(drive, tmp_path, kv_dtype="fp8")
    numbers = plain.kv_bytes_per_token // 4
    heads = 2 * 2 * 2 if kind == "pairs" else 2
    assert info.kv_dtype == "fp8"
    assert info.kv_bytes_per_token == numbers + 4 * heads
    for one, other in zip(wanted, found, strict=True):
        assert 0 < (one - other).norm() < 0.05 * one.norm()


def test_what_has_no_such_keys_says_so(tmp_path: Path, drive: Any) -> None:
    write(tmp_path, "pairs")
    with pytest.raises(ModelError, match="leave --kv-dtype fp8 out"):
        logits(drive, tmp_path, kv_dtype="fp8", quantization="int8")


@pytest.mark.parametrize(
    ("kind", "deterministic"), [("pairs", False), ("pairs", True), ("latents", False)]
)
def test_kernels_read_and_write_as_torch_does(
    kind: str, deterministic: bool, tmp_path: Path, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extends over a prefix, then decodes; codes differ where a number lies between two."""
    pytest.importorskip("triton", minversion=None if CUDA else "3.7")
    from ramify.gpu.attention import triton_widened

    taken, layer = list[int](), triton_widened.WidenedKeys.layer

    def watched(self: Any, kv: Any, places: torch.Tensor) -> Any:
        taken.extend(places[:, 2].tolist())
        return layer(self, kv, places)

    monkeypatch.setattr(triton_widened, "_FEWEST", 4)
    monkeypatch.setattr(triton_widened.WidenedKeys, "layer", watched)
    write(tmp_path, kind)
    _, wanted = logits(drive, tmp_path, kv_dtype="fp8")
    settings: dict[str, Any] = {"attention": "triton", "kv_dtype": "fp8", "deterministic": deterministic}
    _, found = logits(drive, tmp_path, **settings)
    for one, other in zip(wanted, found, strict=True):
        assert (one - other.cpu()).norm() < 0.005 * one.norm()
    assert (max(taken, default=0) == len(PROMPT)) == (kind == "pairs" and not deterministic)


def test_codes_are_read_in_pairs_as_float16() -> None:
    """By both kernels for decodes and by that for extends, beside float64; heads of unlike sizes."""
    pytest.importorskip("triton", minversion=None if CUDA else "3.7")
    from ramify.gpu.attention.spec import AttentionSpec
    from ramify.gpu.attention.triton_balanced import balanced_attention
    from ramify.gpu.attention.triton_decode import decode_attention
    from ramify.gpu.attention.triton_extend import extend_attention
    from ramify.gpu.kv.layout import FP8, PairLayout

    device = torch.device("cuda" if CUDA else "cpu")
    torch.manual_seed(1)
    length, heads, dim = 21, 2, 32
    layer = PairLayout(((1, dim),), FP8).allocate(32, 1, device).layers[0]
    slots = torch.randperm(32, device=device)[:length]
    sizes = torch.tensor([1e-4, 1.0, 300.0], device=device).repeat(7)[:, None, None]
    k, v = torch.randn((2, length, 1, dim), device=device)
    layer.store(slots, k, v * sizes)
    q = (torch.randn((length, heads, dim), device=device) * 3).to(torch.float16)
    keys, values = (part.double() for part in layer.read(slots, torch.float32))
    scores = torch.einsum("qhd,kd->qhk", q.double(), keys[:, 0]) * 0.25
    hidden = torch.ones((length, length), device=device).triu(1).bool()
    weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    wanted = torch.einsum("qhk,kd->qhd", weights, values[:, 0]).flatten(1)

    spec, pages = AttentionSpec(0.25), slots.int()[None]
    row, last = (torch.tensor([one], dtype=torch.int32, device=device) for one in (0, length - 1))
    found = decode_attention(q[-1:], layer, row, last, pages, spec, 2)
    other, arrived = torch.empty_like(found), torch.zeros(8, dtype=torch.int32, device=device)
    balanced_attention(q[-1:], other, layer, row, last, pages, spec, 2, arrived)
    items = torch.tensor([[0, 0, length, 0, 0, length, -1]], dtype=torch.int32, device=device)
    extended = torch.empty((length, heads * dim), dtype=q.dtype, device=device)
    extend_attention(q, extended, layer, items, items[:0, :4], pages, spec)
    for got, right in ((found, wanted[-1:]), (other, wanted[-1:]), (extended, wanted)):
        assert (got.double() - right).norm() < 2e-3 * right.norm()


@pytest.mark.parametrize(("page", "extend"), [(1, "triton"), (4, "triton"), (4, "fa3")])
def test_many_new_tokens_read_keys_that_were_widened_once(
    page: int, extend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs behind prefixes of unlike lengths, beside float64; one run of few tokens reads codes."""
    pytest.importorskip("triton", minversion=None if CUDA else "3.7")
    if CUDA and extend == "fa3":
        pytest.skip("FlashInfer itself knows no heads this small")
    monkeypatch.setitem(sys.modules, "flashinfer", cast(Any, StandIn))
    from types import SimpleNamespace

    import numpy as np

    from ramify.gpu.attention.flashinfer_paged import FlashInferPaged
    from ramify.gpu.attention.spec import AttentionShape, AttentionSpec
    from ramify.gpu.attention.triton_paged import TritonPaged
    from ramify.gpu.kv.layout import FP8, PairLayout
    from ramify.gpu.step.buckets import Bucket

    device = torch.device("cuda" if CUDA else "cpu")
    torch.manual_seed(2)
    heads, kv_heads, dim, longest = 4, 2, 16, 256
    spec = AttentionSpec(0.25)
    shape = AttentionShape(heads, kv_heads, dim, torch.float16, (spec,), codes=True)
    table: Any = SimpleNamespace(max_guessed=0, max_length=longest, page_size=page)
    layer = PairLayout(((kv_heads, dim),), FP8).allocate(4 * longest // page, page, device).layers[0]
    pages = torch.randperm(4 * longest // page, device=device).int().view(4, -1)
    bucket, back_end = Bucket(256, 2, 0, 0), TritonPaged(pages, table, shape, shares_keys=False)
    if extend == "fa3":
        monkeypatch.setattr(FlashInferPaged, "fewest_tiles", 0)
        back_end = FlashInferPaged(pages, table, shape, "fa3", "triton")
    for starts, counts in (([70, 3], [110, 101]), ([70, 3], [7, 20])):
        step: Any = SimpleNamespace(
            rows=np.array([2, 1]),
            starts=np.array(starts),
            counts=np.array(counts),
            extends=2,
            lines=None,
        )
        q, wanted = torch.randn((sum(counts), heads, dim)).to(device, torch.float16), []
        first = 0
        for row, start, count in zip((2, 1), starts, counts, strict=True):
            positions = torch.arange(start + count, device=device)
            slots = pages[row, positions // page].long() * page + positions % page
            k, v = torch.randn((2, len(slots), kv_heads, dim), device=device)
            layer.store(slots, k, v)
            keys, values = (x.repeat_interleave(2, 1) for x in layer.read(slots, torch.float64))
            scores = torch.einsum("qhd,khd->hqk", q[first : first + count].double(), keys) * 0.25
            hidden = positions[None] > positions[start:, None]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            wanted.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
            first += count
        plan = {
            name: torch.from_numpy(array).to(device)
            for name, array in back_end.plan(step, bucket, captured=False).items()
        }
        assert ("widened" in plan) == (counts[0] > 7)
        assert ("items" in plan) == (extend == "triton" or counts[0] == 7)
        given: Any = SimpleNamespace(extended=len(q), plan=plan)
        found, right = back_end.attend(q, layer, given, spec).double(), torch.cat(wanted)
        assert (found - right).norm() < 2e-3 * right.norm()
