"""The products of many tokens against torch in float32, and that they compile without a GPU."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

# the interpreter of 3.6 does not know numpy 2.4
pytest.importorskip("triton", minversion=None if torch.cuda.is_available() else "3.7")

from ramify.gpu.ops import gluon_check
from ramify.gpu.ops.tilings import GluonTiling

EPS = 1e-5
TILINGS = [
    GluonTiling(1, 128, 64, 8),
    GluonTiling(1, 128, 128, 4),
    GluonTiling(2, 128, 64, 6, band=2),
    GluonTiling(2, 256, 64, 4),
]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from ramify.gpu.ops import gluon_linear

layout = repr(gluon_linear._layout())
for groups, outputs, inputs, stages, gated, scaled in (
    (2, 256, 64, 4, True, False), (2, 256, 64, 4, False, False), (1, 128, 128, 4, True, True),
):
    boxes = {"x": 64, "weight": outputs // 2 if gated else outputs, "output": 64}
    signature = {name: f"tensordesc<bf16[{rows}, {inputs}],{layout}>" for name, rows in boxes.items()}
    signature["output"] = f"tensordesc<bf16[64, {outputs // 2}],{layout}>"
    signature |= {"squares": "*fp32", "tokens": "i32", "size": "i32", "inputs": "i32", "parts": "i32"}
    signature |= {"eps": "fp32"}
    constants = dict(
        GROUPS=groups, OUTPUTS=outputs, INPUTS=inputs, STAGES=stages, BAND=8, GATED=gated, PARTS=32
    )
    if not scaled:
        constants["squares"] = None
    signature |= dict.fromkeys(constants, "constexpr")
    values = {(list(signature).index(name),): value for name, value in constants.items()}
    source = GluonASTSource(gluon_linear._ring, signature, values)
    options = {"num_warps": 4, "launch_pdl": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= 227 * 1024
    print("compiled")
"""


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def check(got: Tensor, wanted: Tensor) -> None:
    """Equal but for the order of sums and the rounding to bfloat16."""
    error = (got.float() - wanted).abs().max() / wanted.abs().max()
    assert error < 2**-7


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs"),
    [
        (1, 128, 512),
        (63, 272, 520),  # neither the columns nor the inputs fill their last tile
        (130, 40000, 512),  # more tiles than multiprocessors
        (700, 3088, 1032),
    ],
)
def test_products(tokens: int, outputs: int, inputs: int, tiling: GluonTiling) -> None:
    x, weight = random(tokens, inputs), random(outputs, inputs, seed=1) / inputs**0.5
    squares = random(tokens, 3, seed=2).abs().float() * inputs
    divided = x.float() * torch.rsqrt(squares.sum(1, keepdim=True) / inputs + EPS)
    for sums, rows in ((None, x.float()), (squares, divided)):
        wanted = F.linear(rows, weight.float())
        plain = gluon_check.gluon_product(x, sums, weight, False, EPS, tiling)
        check(plain, wanted)
        gate, up = wanted.chunk(2, 1)
        gated = gluon_check.gluon_product(x, sums, weight, True, EPS, tiling)
        check(gated, F.silu(gate) * up)
        assert torch.equal(plain, gluon_check.gluon_product(x, sums, weight, False, EPS, tiling))
        assert torch.equal(gated, gluon_check.gluon_product(x, sums, weight, True, EPS, tiling))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_inside_a_graph_after_the_kernel_that_makes_its_rows() -> None:
    x, weight = random(200, 1024), random(2048, 1024, seed=1) / 32
    second = random(1024, 1024, seed=2) / 32
    tiling = GluonTiling(2, 256, 64, 4)

    def both(rows: Tensor) -> Tensor:
        return gluon_check.gluon_product(
            gluon_check.gluon_product(rows * 2, None, weight, True, EPS, tiling),
            None,
            second,
            False,
            EPS,
            tiling,
        )

    wanted = [both(x), both(x + 1)]
    graph, rows = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        got = both(rows)
    for values, result in zip((x, x + 1), wanted, strict=True):
        rows.copy_(values)
        graph.replay()
        assert torch.equal(got, result)


def test_fewer_inputs_than_the_ring_holds() -> None:
    ones = torch.ones((8, 192), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="give fewer stages"):
        gluon_check.gluon_product(ones, None, ones, False, EPS, GluonTiling(2, 256, 64, 4))


def test_without_a_gpu_nothing_is_tried() -> None:
    assert not gluon_check.gluon_works(torch.device("cpu"))


def test_a_triton_that_cannot_compile_it_leaves_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*operands: object) -> Tensor:
        raise AttributeError("module 'tma' has no attribute 'async_load'")

    monkeypatch.setattr(gluon_check, "gluon_product", fail)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not gluon_check.gluon_works.__wrapped__(torch.device("cuda"))
    assert "install triton 3.6" in caplog.text


def test_it_compiles_for_hopper_without_one(tmp_path: object) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.stdout.count("compiled") == 3, ran.stderr[-2000:]
