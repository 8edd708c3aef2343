"""The Triton matrix products against torch in float32, on whatever device the kernels run here."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

# the interpreter of 3.6 does not know numpy 2.4
pytest.importorskip("triton", minversion=None if torch.cuda.is_available() else "3.7")

from ramify.gpu.attention.spec import AttentionSpec
from ramify.gpu.executors.step_kernels import layer_sizes
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.models.config import read_config
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.ops.gluon_check import gluon_works
from ramify.gpu.ops.linear.base import Linear, plain
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.tilings import GluonTiling, LayerSizes, OpTilings, Tiling, tilings_for
from ramify.gpu.ops.triton_linear import Products, UnscaledRows
from ramify.gpu.ops.triton_ops import TritonOps
from ramify.gpu.startup.random_weights import fill_random
from ramify.gpu.step.buckets import Bucket
from ramify.gpu.step.inputs import StepInputs

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32  # the interpreter cannot multiply bfloat16
EPS = 1e-5
SMALL = [  # tokens, outputs, inputs of a product and how it is cut up
    (1, 48, 64, Tiling(16, 32, 32)),
    (5, 40, 144, Tiling(16, 32, 64, splits=2, swap=False)),
    (17, 72, 112, Tiling(16, 32, 32, splits=3)),
    (33, 40, 64, Tiling(32, 16, 64, swap=False)),
]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def linear(outputs: int, inputs: int, bias: bool, dtype: torch.dtype = DTYPE) -> Linear:
    weight = random(outputs, inputs, seed=1, dtype=dtype) / inputs**0.5
    return plain(weight, random(outputs, seed=2, dtype=dtype) if bias else None)


def product(x: Tensor, product: Linear) -> Tensor:
    """In float32."""
    bias = product.bias.float() if product.bias is not None else None
    return F.linear(x.float(), product.tensor.float(), bias)


def check(got: Tensor, wanted: Tensor) -> None:
    """Equal but for the order of sums and the rounding to got's type."""
    wanted = wanted.float()
    error = (got.float() - wanted).abs().max() / wanted.abs().max()
    assert error < (2e-5 if got.dtype == torch.float32 else 2**-7)


def norm_of(rows: UnscaledRows, hidden: int) -> Tensor:
    """What a product of `rows` multiplies, once it has scaled its sums."""
    assert rows.squares is not None
    scale = torch.rsqrt(rows.squares.sum(1, keepdim=True) / hidden + EPS)
    return (rows.values.float() * scale).to(rows.values.dtype)


def exact_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    """In float32."""
    return RMSNorm(norm.weight.float(), norm.eps)(x.float())


@pytest.mark.parametrize(("tokens", "outputs", "inputs", "tiling"), SMALL)
def test_products(tokens: int, outputs: int, inputs: int, tiling: Tiling) -> None:
    products = Products(DEVICE)
    x = random(tokens, inputs)
    squares = random(tokens, 3, seed=3).abs().float() * inputs
    divided = x.float() * torch.rsqrt(squares.sum(1, keepdim=True) / inputs + EPS)
    for rows, values, bias in ((UnscaledRows(x), x, True), (UnscaledRows(x, squares), divided, False)):
        own = linear(outputs, inputs, bias)
        check(products.plain(rows, own, EPS, tiling), product(values, own))
        gate, up = product(values, own).chunk(2, 1)
        whole = dataclasses.replace(tiling, splits=1, inputs=16)
        check(products.gated(rows, own, EPS, whole), F.silu(gate) * up)


@pytest.mark.parametrize(("tokens", "outputs", "inputs", "tiling"), SMALL)
def test_sum_and_the_norm_after_it(tokens: int, outputs: int, inputs: int, tiling: Tiling) -> None:
    products = Products(DEVICE)
    x, own, norm = random(tokens, inputs), linear(outputs, inputs, True), RMSNorm(random(outputs), EPS)
    residual = random(tokens, outputs, seed=4)
    wanted = residual.float() + product(x, own)
    rows = products.add(x, own, residual, norm, tiling)
    check(residual, wanted)
    check(norm_of(rows, outputs), exact_norm(residual, norm))
    following = linear(24, outputs, False)  # what a library product makes of such rows
    got = products.plain(rows, following, EPS, None)
    check(got, product(exact_norm(residual, norm), following))


def test_a_launch_leaves_the_counters_as_they_were() -> None:
    products = Products(DEVICE)
    x, own = random(3, 128), linear(40, 128, False)
    first = products.plain(UnscaledRows(x), own, EPS, Tiling(16, 16, 16, splits=4))
    second = products.plain(UnscaledRows(x), own, EPS, Tiling(16, 16, 16, splits=4))
    assert torch.equal(first, second)


def test_a_gated_product_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="give one split"):
        Products(DEVICE).gated(
            UnscaledRows(random(1, 64)), linear(32, 64, False), EPS, Tiling(16, 16, 16, 2)
        )


LLAMA = LayerSizes(4096, 4096, 6144, 14336, torch.bfloat16, overlaps=True)
LITE = LayerSizes(2048, 2048, 3648, 10944, torch.bfloat16, overlaps=True)  # DeepSeek-V2-Lite
QWEN = LayerSizes(1024, 2048, 4096, 3072, torch.bfloat16, overlaps=True)


@pytest.mark.parametrize(
    "sizes",
    [
        dataclasses.replace(QWEN, dtype=torch.float16),  # row * gain could overflow before its norm
        dataclasses.replace(QWEN, dtype=torch.float32),
        dataclasses.replace(QWEN, overlaps=False),
        dataclasses.replace(QWEN, hidden=1028),
    ],
)
def test_the_library_takes_what_the_kernel_is_not_for(sizes: LayerSizes) -> None:
    assert tilings_for(1, sizes) == OpTilings()


def test_tilings_of_real_models() -> None:
    for sizes in (QWEN, LLAMA):
        assert tilings_for(1, sizes).linear is not None
        assert tilings_for(4096, sizes) == OpTilings()
        for tokens in range(1, 300):
            tilings = tilings_for(tokens, sizes)
            assert not isinstance(tilings.gated, Tiling) or tilings.gated.splits == 1
            # rows that are not divided yet cost a kernel more if a library product takes them
            assert tilings.add is None or (tilings.gated is not None and tilings.linear is not None)
            # Gluon changes the gated product alone, and holds no more inputs than there are
            with_gluon = tilings_for(tokens, dataclasses.replace(sizes, gluon=True))
            assert dataclasses.replace(with_gluon, gated=tilings.gated) == tilings
            if isinstance(with_gluon.gated, GluonTiling):
                assert with_gluon.gated.inputs * with_gluon.gated.stages <= sizes.hidden
        assert isinstance(tilings_for(8192, dataclasses.replace(sizes, gluon=True)).gated, GluonTiling)
    assert tilings_for(8192, dataclasses.replace(LLAMA, gluon=True, hidden=256)) == OpTilings()
    few = tilings_for(1, LITE)
    assert None not in (few.linear, few.add, few.gated)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 32, 33, 64, 100, 256, 700, 2000])
@pytest.mark.parametrize("sizes", [QWEN, LLAMA, LITE], ids=["qwen", "llama", "deepseek"])
def test_real_shapes(sizes: LayerSizes, tokens: int) -> None:
    if not CUDA:
        pytest.skip("needs a CUDA device")
    products, half = Products(DEVICE), torch.bfloat16
    tilings = tilings_for(tokens, dataclasses.replace(sizes, gluon=gluon_works(DEVICE)))
    x = random(tokens, sizes.hidden, dtype=half)
    squares = (x.float() ** 2).sum(1, keepdim=True)
    divided = x.float() * torch.rsqrt(squares / sizes.hidden + EPS)
    rows = UnscaledRows(x, squares)
    for bias in (False, True):
        qkv = linear(sizes.qkv, sizes.hidden, bias, half)
        check(products.plain(rows, qkv, EPS, tilings.linear), product(divided, qkv))
        gate_up = linear(2 * sizes.intermediate, sizes.hidden, bias, half)
        gate, up = product(divided, gate_up).chunk(2, 1)
        check(products.gated(rows, gate_up, EPS, tilings.gated), F.silu(gate) * up)
        for inputs, tiling in ((sizes.attention, tilings.add), (sizes.intermediate, tilings.add)):
            own = linear(sizes.hidden, inputs, bias, half)
            norm = RMSNorm(random(sizes.hidden, dtype=half), EPS)
            mixed, residual = (
                random(tokens, inputs, dtype=half),
                random(tokens, sizes.hidden, dtype=half),
            )
            wanted = residual.float() + product(mixed, own)
            got = products.add(mixed, own, residual, norm, tiling)
            check(residual, wanted)
            normed = got.values if got.squares is None else norm_of(got, sizes.hidden)
            check(normed, exact_norm(residual, norm))


def chosen_tilings(tilings: OpTilings, tokens: int, sizes: LayerSizes) -> OpTilings:
    return tilings


class Echo:
    """In place of attention: each token's queries."""

    name = "echo"

    def attend(self, q: Tensor, kv: LayerKV, step: StepInputs[Tensor], spec: AttentionSpec) -> Tensor:
        return q.flatten(1)


@pytest.mark.parametrize(
    ("architecture", "sampling"),
    [("LlamaForCausalLM", None), ("Qwen2ForCausalLM", [1, 2]), ("Qwen3ForCausalLM", None)],
)
def test_a_model_on_them(
    tmp_path: Path, tiny_config: dict[str, Any], architecture: str, sampling: list[int] | None
) -> None:
    """The same logits whichever products a pass runs on; Qwen2's have a bias."""
    tiny_config |= {"architectures": [architecture], "head_dim": 16, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    config = read_config(tmp_path)
    model = Decoder(config, 64, DTYPE, DEVICE)
    fill_random(model.weights())
    for name, view in model.weights().items():
        if name.endswith(("bias", "norm.weight")):  # 0 and 1 would hide a mistake
            view.uniform_(0.5, 1.5)
    pool = config.kv_layout(DTYPE).allocate(16, 4, DEVICE)
    pages = torch.arange(12, dtype=torch.int32, device=DEVICE).view(3, 4)
    last = torch.tensor([5, 6, 7], dtype=torch.int32, device=DEVICE)

    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    logits = []
    for tilings in (OpTilings(), OpTilings(*(Tiling(16, 32, 32, n) for n in (1, 2, 1)))):
        products, attention = Products(DEVICE), cast(Any, Echo())
        sizes = layer_sizes(model, products)
        ops = TritonOps(
            pool, pages, last, attention, products, sizes, model.rotaries,
            partial(chosen_tilings, tilings),
        )  # fmt: skip
        chosen = None if sampling is None else torch.tensor(sampling, device=DEVICE)
        lines = 3 if sampling is None else len(sampling)
        parts = {
            "input_ids": integers(-1, -2, -3), "rows": integers(0, 1, 2), "positions": integers(0, 3, 9)
        }  # fmt: skip
        inputs = StepInputs.from_parts(
            Bucket(0, 0, 3, lines), parts if chosen is None else {**parts, "sampled_lines": chosen}
        )
        logits.append(torch.empty((lines, config.vocab_size), dtype=DTYPE, device=DEVICE))
        model.logits(model.forward(inputs, ops), chosen, ops, logits[-1])
    check(logits[1], logits[0])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rings_are_tried_where_they_may_be_chosen(
    deterministic: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial compiles a kernel, and warns where it fails."""
    from ramify.gpu.executors import step_kernels
    from ramify.gpu.ops.invariant_linear import InvariantProducts

    monkeypatch.setattr(step_kernels, "gluon_works", lambda device: True)
    attention = SimpleNamespace(width=512, rows=768)
    config = SimpleNamespace(hidden_size=512, attention=attention, intermediate_size=1024)
    model: Any = SimpleNamespace(config=config, dtype=dtype, device=torch.device("cpu"))
    products = (InvariantProducts if deterministic else Products)(torch.device("cpu"))
    assert step_kernels.layer_sizes(model, products).gluon == (
        not deterministic and dtype == torch.bfloat16
    )
