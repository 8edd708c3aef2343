"""The matrix products of a step on one GPU: our Triton and Gluon kernels against cuBLAS, one by one.

Each case is a CUDA graph of one product after another on distinct weights (more of them than the L2
cache holds), as in a decode step. cuBLAS is timed with the kernels that ours make needless: the norm
after `output` and `down`, the activation after `gate_up`.

    python benchmarks/gpu_linear.py --shape llama-3.1-8b --tokens 1,8,32 --formats int4,mxfp4,fp8
"""

# mypy: disable-error-code="import-untyped"

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ramify.gpu.ops.gluon_check import gluon_works
from ramify.gpu.ops.linear.base import Form, Linear, plain
from ramify.gpu.ops.linear.four_bits import four_bit_form
from ramify.gpu.ops.linear.fp8 import fp8_form
from ramify.gpu.ops.linear.humming import humming_form
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.tilings import AnyTiling, GluonTiling, LayerSizes, Tiling, tilings_for
from ramify.gpu.ops.triton_layer import add_norm
from ramify.gpu.ops.triton_linear import Products, UnscaledRows

PRODUCTS = {  # outputs, inputs
    "qwen3-0.6b": {
        "qkv": (4096, 1024), "output": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072),
    },
    "llama-3.1-8b": {
        "qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
    },
}  # fmt: skip
SIZES = {
    "qwen3-0.6b": LayerSizes(1024, 2048, 4096, 3072, torch.bfloat16, overlaps=True),
    "llama-3.1-8b": LayerSizes(4096, 4096, 6144, 14336, torch.bfloat16, overlaps=True),
}
RINGS = [
    GluonTiling(1, 128, 64, 8), GluonTiling(1, 128, 128, 4), GluonTiling(1, 256, 64, 5),
    GluonTiling(2, 128, 64, 6), GluonTiling(2, 256, 64, 4),
]  # fmt: skip
L2 = 150e6  # bytes of weights that one graph reads at least
EPS = 1e-6


class LinearCase:
    """One product at one number of tokens, with all its operands."""

    def __init__(self, name: str, outputs: int, inputs: int, tokens: int, weights: list[Tensor]) -> None:
        self.name, self.tokens = name, tokens
        self.weights = weights
        self.bytes = 2 * outputs * inputs
        new = torch.Generator("cuda").manual_seed(tokens)
        self.x = torch.randn((tokens, inputs), generator=new, device="cuda").bfloat16()
        squares = torch.rand((tokens, inputs // 32), generator=new, device="cuda") * 64
        self.rows = UnscaledRows(self.x, squares)
        self.normed = UnscaledRows(self.x)
        self.residual = torch.zeros((tokens, outputs), device="cuda", dtype=torch.bfloat16)
        self.norm = RMSNorm(torch.ones(outputs, device="cuda", dtype=torch.bfloat16), EPS)

    def run(self, products: Products, weight: Tensor, tiling: AnyTiling | None) -> Tensor:
        return self.run_linear(products, plain(weight), tiling)

    def formed(self, products: Products, form: Form, tiling: AnyTiling | None) -> float:
        """Microseconds with its weights in another form."""
        linears = {weight.data_ptr(): Linear(form(plain(weight))) for weight in self.weights}
        return self.time(lambda weight: self.run_linear(products, linears[weight.data_ptr()], tiling))

    def run_linear(self, products: Products, linear: Linear, tiling: AnyTiling | None) -> Tensor:
        if self.name == "qkv":
            return products.plain(self.rows if tiling else self.normed, linear, EPS, tiling)
        if self.name == "gate_up":
            return products.gated(self.rows if tiling else self.normed, linear, EPS, tiling)
        assert not isinstance(tiling, GluonTiling)
        return products.add(self.x, linear, self.residual, self.norm, tiling).values

    def separate(self, weight: Tensor) -> Tensor:
        """As `run` without a tiling, with the residual sum in the norm's kernel."""
        if self.name in ("qkv", "gate_up"):
            return F.linear(self.x, weight)
        return add_norm(F.linear(self.x, weight), self.residual, self.norm)

    def error(self, products: Products, tiling: AnyTiling) -> float:
        """Largest difference from float32 mathematics, in parts of the largest result."""
        self.residual.zero_()
        weight = self.weights[0]
        scaled = self.name in ("qkv", "gate_up")
        x = self.x.float()
        if scaled:
            assert self.rows.squares is not None
            x = x * torch.rsqrt(self.rows.squares.sum(1) / x.shape[1] + EPS)[:, None]
        wanted = x @ weight.float().T
        if self.name == "gate_up":
            gate, up = wanted.chunk(2, 1)
            wanted = F.silu(gate) * up
        got = self.run(products, weight, tiling).float()
        return float((got - wanted).abs().max() / wanted.abs().max())

    def time(self, run: Callable[[Tensor], Tensor]) -> float:
        """Microseconds of one product."""
        run(self.weights[0])
        torch.cuda.synchronize()
        self.residual.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in self.weights:
                run(weight)
        times = []
        for _ in range(6):
            begin, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / len(self.weights))
        return float(sorted(times[1:])[2])


def candidates(name: str, tokens: int, outputs: int, inputs: int) -> Iterator[AnyTiling]:
    """Tilings worth trying."""
    if tokens > 32 and name in ("qkv", "gate_up") and gluon_works(torch.device("cuda")):
        yield from RINGS  # which add nothing to a residual
    if tokens > 512:
        return
    shapes: list[tuple[int, int, int, int, int, bool]]  # tokens, outputs, inputs, warps, stages, swap
    if tokens <= 32:
        rows = 16 if tokens <= 16 else 32
        if name == "gate_up":
            shapes = [
                (rows, 64, 128, 4, 3, True), (rows, 64, 64, 4, 5, True), (rows, 32, 128, 4, 5, False),
                (rows, 32, 256, 4, 3, False), (rows, 64, 128, 4, 2, True), (rows, 16, 256, 4, 4, False),
                (rows, 64, 256, 4, 2, True),
            ]  # fmt: skip
        else:
            shapes = [
                (rows, 64, 128, 4, 4, True), (rows, 64, 128, 4, 6, True), (rows, 64, 256, 4, 3, True),
                (rows, 64, 256, 4, 2, True), (rows, 32, 256, 4, 4, False), (rows, 128, 128, 8, 4, True),
            ]  # fmt: skip
    elif tokens <= 64:
        shapes = [
            (64, 64, 128, 4, 3, True), (64, 64, 64, 4, 5, True), (64, 64, 128, 4, 3, False),
            (64, 32, 128, 4, 4, False), (32, 64, 128, 4, 4, True),
        ]  # fmt: skip
        if name != "gate_up":
            shapes += [(64, 128, 64, 4, 5, True), (64, 64, 256, 4, 3, True)]
    else:
        shapes = [
            (128, 64, 64, 8, 4, False), (64, 64, 64, 4, 4, False), (64, 64, 128, 4, 3, False),
            (128, 64, 128, 8, 3, False), (128, 64, 128, 8, 3, True), (64, 64, 128, 4, 3, True),
            (64, 128, 64, 4, 4, False), (128, 128, 64, 8, 3, False),
        ]  # fmt: skip
        if name != "gate_up":
            shapes += [
                (128, 128, 64, 8, 4, False),
                (128, 256, 64, 8, 3, False),
                (256, 64, 64, 8, 4, False),
            ]
    columns = outputs // 2 if name == "gate_up" else outputs
    for (rows, width, step, warps, stages, swap), splits in itertools.product(shapes, (1, 2, 4, 8)):
        programs = -(-tokens // rows) * -(-columns // width) * splits
        if splits > 1 and (name == "gate_up" or programs > 560 or inputs < 2 * step * splits):
            continue
        if programs >= (48 if splits == 1 else 100):
            yield Tiling(rows, width, step, splits, stages, warps, swap)


def compile_some(shape: str, tokens: list[int], part: int, parts: int) -> None:
    """Run each kernel once, every `parts`-th of them: fills Triton's cache on disk."""
    products = Products(torch.device("cuda"))
    seen: set[Any] = set()
    for count, (name, (outputs, inputs)) in itertools.product(tokens, PRODUCTS[shape].items()):
        case = None
        for tiling in candidates(name, count, outputs, inputs):
            key = (name.replace("down", "output"), tiling)
            if key in seen:
                continue
            seen.add(key)
            if len(seen) % parts == part:
                weights = [torch.zeros((outputs, inputs), device="cuda", dtype=torch.bfloat16)]
                case = case or LinearCase(name, outputs, inputs, count, weights)
                try:
                    case.run(products, case.weights[0], tiling)
                except Exception as error:  # does not fit the GPU: reported when it is timed
                    print(type(error).__name__, tiling, file=sys.stderr)


def measure(case: LinearCase, products: Products, tilings: Sequence[AnyTiling | None]) -> dict[str, Any]:
    """Microseconds of the bare library product, of it with its neighbours, and of each tiling."""
    found = []
    for tiling in filter(None, tilings):
        try:
            error = case.error(products, tiling)
            took = case.time(partial(case.run, products, tiling=tiling))
        except triton.runtime.errors.OutOfResources:  # which is an answer too
            continue
        if not error < 0.02:
            raise SystemExit(f"wrong by {error}: {case.name} of {case.tokens} tokens, {tiling}")
        found.append({"us": took, "tiling": asdict(tiling)})
    return {
        "product": case.name,
        "tokens": case.tokens,
        "product_us": case.time(partial(F.linear, case.x)),
        "library_us": case.time(partial(case.run, products, tiling=None)),
        "separate_us": case.time(case.separate),
        "found": sorted(found, key=lambda own: own["us"]),
    }


FORMS: dict[str, Form] = {
    "int4": four_bit_form("int4", rounds=True),  # groups of 128
    "mxfp4": four_bit_form("mxfp4", rounds=True),
    "fp8": fp8_form(torch.device("cuda"), True),
}


def form_of(name: str) -> Form:
    """Of FORMS, or with `-humming` behind its name, by that package's kernels."""
    form = FORMS[name.removesuffix("-humming")]
    return form if name in FORMS else humming_form(form, torch.bfloat16, torch.device("cuda"))


OPERATIONS = {"qkv": "linear", "output": "add", "gate_up": "gated", "down": "add"}  # of the products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(PRODUCTS), default="qwen3-0.6b")
    parser.add_argument("--tokens", default="1,8,16,32,64,128,192,256")
    parser.add_argument("--compilers", type=int, default=0, help="processes that compile ahead")
    parser.add_argument("--compile-part", type=int)
    told = f"of weights, beside bfloat16: {', '.join(FORMS)}, int4-humming, mxfp4-humming"
    parser.add_argument("--formats", default="", help=told)
    parser.add_argument("--search", action="store_true", help="time all tilings worth trying")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device")
    tokens = [int(count) for count in args.tokens.split(",")]
    if args.compile_part is not None:
        compile_some(args.shape, tokens, args.compile_part, args.compilers)
        return
    command = [sys.executable, *sys.argv, "--compile-part"]
    for process in [subprocess.Popen([*command, str(part)]) for part in range(args.compilers)]:
        process.wait()
    report = []
    forms = {name: form_of(name) for name in filter(None, args.formats.split(","))}
    sizes = replace(SIZES[args.shape], gluon=gluon_works(torch.device("cuda")))
    products = Products(torch.device("cuda"))
    for name, (outputs, inputs) in PRODUCTS[args.shape].items():
        copies = max(4, int(L2 / (2 * outputs * inputs)) + 1)
        weights = [
            (torch.randn((outputs, inputs), device="cuda") / inputs**0.5).bfloat16()
            for _ in range(copies)
        ]
        for count in tokens:
            case = LinearCase(name, outputs, inputs, count, weights)
            tilings = [getattr(tilings_for(count, sizes), OPERATIONS[name])]
            if args.search:
                tilings = [*candidates(name, count, outputs, inputs)]
            line = measure(case, products, tilings)
            report.append(line)
            found: list[dict[str, Any]] = line["found"]
            print(
                f"{name:8}{count:4}  product {line['product_us']:6.2f}"
                f"  library {line['library_us']:6.2f}  {line['separate_us']:6.2f}", end="",
            )  # fmt: skip
            for own in found[:3]:
                print(f"  ours {own['us']:6.2f} ({case.bytes / own['us'] / 1e6:4.2f} TB/s)", end="")
                if args.search:
                    print(" ", own["tiling"], end="")
            for form in forms:
                took = case.formed(products, forms[form], tilings[0])
                line[form] = took
                print(f"  {form} {took:6.2f}", end="")
            print(flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
