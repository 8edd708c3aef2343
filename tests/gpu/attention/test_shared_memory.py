"""How much of a Hopper's shared memory a program of each attention kernel takes, by the compiler."""

import sys
from pathlib import Path

import pytest

from tests.gpu.forked import forked

pytest.importorskip("triton", minversion="3.6")

MOST = 232448  # 227 KiB
IMPORTS = """
import torch
import triton
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import JITFunction, driver

class Notes:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(Notes())

def compile(src, target, options, **more):
    backend = make_backend(target)
    options = backend.parse_options(dict(options, **src.parse_options()))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = src.make_ir(target, options, functions, modules, context)
    stages, metadata = {}, dict(vars(options), target=target)
    backend.add_stages(stages, options, src.language)
    for name in ("ttir", "ttgir"):
        module = stages[name](module, metadata)
    rest = ir.pass_manager(module.context)  # up to where memory is shared out: the others take long
    passes.convert.add_scf_to_cf(rest)
    passes.gluon.add_inliner(rest)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(rest, 90, 80)
    rest.run(module, "shared")
    print(src.name, module.get_int_attr("ttg.shared"))
    return object()

triton.compiler.compile = compile
launch = JITFunction.run

def run(kernel, *args, grid, warmup, **options):
    return launch(kernel, *args, grid=grid, warmup=True, **options)

JITFunction.run = run
import ramify.gpu.programmatic_launch as programmatic_launch
programmatic_launch.overlaps = lambda device: True
from ramify.gpu.attention.spec import AttentionSpec
from ramify.gpu.attention.triton_balanced import balanced_attention
from ramify.gpu.attention.triton_decode import decode_attention
from ramify.gpu.attention.triton_extend import extend_attention
from ramify.gpu.attention.triton_shared import SharedGroups, shared_attention
from ramify.gpu.kv.layout import LayerKV
"""
RUN = """
spec, zeros = AttentionSpec(0.1), torch.zeros((8, 64), dtype=torch.int32)
for dim, dtype in ((64, torch.bfloat16), (256, torch.float32), (512, torch.bfloat16)):
    k, q = (torch.zeros((8, heads, dim), dtype=dtype) for heads in (1, 8))
    kv, output = LayerKV(k, k, 1), torch.zeros((8, 8 * dim), dtype=dtype)
    decode_attention(q, kv, zeros[0], zeros[0], zeros, spec, 1)
    balanced_attention(q, output, kv, zeros[0], zeros[0], zeros, spec, 132, zeros)
    extend_attention(q, output, kv, zeros[:, :7], zeros[:0], zeros, spec)
    shared_attention(q, kv, SharedGroups(zeros[:, :5], zeros[0], zeros[:, :4]), zeros, spec)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
def test_the_largest_heads_of_each_type_fit(tmp_path: Path) -> None:
    """Heads of 512 are refused in float32, which does not fit."""
    with forked(IMPORTS, tmp_path) as process:
        done = process.run(RUN, tmp_path, [])
    assert done.code == 0, done.said
    found = [line.split() for line in done.said.splitlines() if line.startswith("_")]
    assert {name for name, _ in found} == {"_decode", "_attend", "_extend", "_shared"}
    assert len(found) == 12
    assert max(int(size) for _, size in found) <= MOST, found
