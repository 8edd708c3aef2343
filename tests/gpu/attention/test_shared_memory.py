"""How much of a Hopper's shared memory a program of each attention kernel takes, by the compiler."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.forked import Forked, forked

pytest.importorskip("triton", minversion="3.6")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")

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
    extend_attention(q, output, kv, zeros[:, :7], zeros[:0], zeros, spec, zeros[0])
    shared_attention(q, kv, SharedGroups(zeros[:, :5], zeros[0], zeros[:, :4]), zeros, spec)
"""
LATENTS = """
from ramify.gpu.attention.latent import LatentHeads
from ramify.gpu.kv.layout import LatentLayout
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.triton_latent import open_latents, store_latents
kv = LatentLayout(1, 512, 64, torch.bfloat16).allocate(4, 1, torch.device("cpu")).layers[0]
spec, zeros = AttentionSpec(0.1), torch.zeros((8, 64), dtype=torch.int32)
rows = torch.zeros((8, 16 * 576), dtype=torch.bfloat16)
heads = LatentHeads(torch.zeros((16, 256, 512), dtype=torch.bfloat16), 128, spec)
decode_attention(rows.view(8, 16, 576), kv, zeros[0], zeros[0], zeros, spec, 64)
norm, angles = RMSNorm(rows[0, :512], 1e-6), torch.zeros((8, 32))
where = norm, (angles, angles), zeros[0], zeros[0], zeros, kv, None
store_latents(rows[:, :3072], rows[:, 3072:], heads, *where, False)
open_latents(rows, heads, False)
"""
DEEPSEEK = """
from types import SimpleNamespace
from ramify.gpu.attention.latent import LatentHeads
from ramify.gpu.attention.spec import AttentionShape, LatentSizes
from ramify.gpu.attention.triton_expanded import TritonLatent
from ramify.gpu.kv.layout import LatentLayout
kv = LatentLayout(1, 512, 64, torch.bfloat16).allocate(4, 16, torch.device("cpu")).layers[0]
q, output = (torch.zeros(8, 16 * size, dtype=torch.bfloat16) for size in (576, 512))
q, zeros, spec = q.view(8, 16, 576), torch.zeros((8, 64), dtype=torch.int32), AttentionSpec(0.1)
balanced_attention(q, output, kv, zeros[0], zeros[0], zeros, spec, 132, zeros)
extend_attention(q, output, kv, zeros[:, :7], zeros[:0], zeros, spec)
shared_attention(q, kv, SharedGroups(zeros[:, :5], zeros[0], zeros[:, :4]), zeros, spec)
shape = AttentionShape(16, 1, 576, q.dtype, (spec,), 512, False, LatentSizes(512, 128, 64, 128))
table = SimpleNamespace(max_guessed=0, max_length=8, step_tokens=8, page_size=1, max_rows=8)
heads = LatentHeads(torch.zeros(16, 256, 512, dtype=q.dtype), 128, spec)
TritonLatent(zeros, table, shape).launch(output[:, :3072], q, heads, None, output, 0, 0, 8)
"""
EXPERTS = """
from dataclasses import replace
from ramify.gpu.ops.experts import LayerExperts, RouterSettings, SharedExpert
from ramify.gpu.ops.linear.base import plain
from ramify.gpu.ops.triton_experts import ExpertRoutes
from ramify.gpu.ops.triton_experts_few import open_few, sum_few
from ramify.gpu.ops.triton_experts_many import run_many
from ramify.gpu.ops.triton_experts_together import open_together
from ramify.gpu.ops.triton_linear import UnscaledRows

def stacked(outputs, inputs, count=2):
    weight = torch.zeros((count * outputs, inputs), dtype=torch.bfloat16)
    return replace(plain(weight), stacked=count)

def layer(size, beside, activation):
    parts = 1 if activation == "relu2" else 2
    whole = stacked(parts * beside, hidden, 1), stacked(hidden, beside, 1)
    own = stacked(parts * size, hidden), stacked(hidden, size)
    shared = SharedExpert(*whole, beside, False, activation)
    return LayerExperts(None, None, *own, shared, RouterSettings(top=6), activation)

for hidden, one in ((2688, (1856, 3712, "relu2")), (2048, (1408, 2816, "silu"))):
    one = layer(*one)
    for tokens in (8, 8192):
        x = torch.zeros((tokens, hidden), dtype=torch.bfloat16)
        routes = ExpertRoutes(torch.zeros((tokens, 6), dtype=torch.int32), torch.zeros((tokens, 7)))
        if tokens > 16:
            run_many(x, one, routes, x, False)
        else:
            sum_few(open_few(UnscaledRows(x), 0.0, one, routes), one, routes)
            open_together(UnscaledRows(x), 0.0, one, routes)
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    with forked(IMPORTS, tmp_path_factory.mktemp("imported")) as process:
        yield process


def shared(process: Forked, program: str, folder: Path) -> list[tuple[str, int]]:
    """Each kernel that the program compiles, and the shared memory that it takes."""
    done = process.run(program, folder)
    assert done.code == 0, done.said
    words = [line.split() for line in done.said.splitlines() if line.startswith("_")]
    return [(name, int(size)) for name, size in words]


def test_the_largest_heads_of_each_type_fit(imported: Forked, tmp_path: Path) -> None:
    """Heads of 512 are refused in float32, which does not fit."""
    found = shared(imported, RUN, tmp_path)
    assert {name for name, _ in found} == {"_decode", "_attend", "_extend", "_shared"}
    assert len(found) == 12
    assert max(size for _, size in found) <= MOST, found


def test_latents_of_deepseek_and_experts_of_nemotron_fit(imported: Forked, tmp_path: Path) -> None:
    found = shared(imported, LATENTS + EXPERTS, tmp_path)
    few, many = (
        {"_open_few", "_open_together", "_sum_few"},
        {"_sort", "_open_many", "_down_many", "_sum_many"},
    )
    assert {name for name, _ in found} == {"_decode", "_merge", "_store", "_by_head"} | few | many
    assert max(size for _, size in found) <= MOST, found


def test_prompts_and_shared_latents_of_deepseek_fit(imported: Forked, tmp_path: Path) -> None:
    found = shared(imported, DEEPSEEK, tmp_path)
    assert {"_attend", "_extend", "_expanded", "_shared"} <= {name for name, _ in found}
    assert max(size for _, size in found) <= MOST, found
