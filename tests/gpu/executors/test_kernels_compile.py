"""Triton's front end takes every kernel that the CUDA executor launches, without a GPU.

The interpreter runs Python, and so accepts more than the compiler: a float as a condition, values
whose type changes in a loop. A driver that only takes notes stands in for the GPU. Compiling ends with
Triton's own intermediate language, because the rest takes several times as long and rarely fails. Each
test is a process of its own, because the other tests have their kernels interpreted.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.forked import Forked, forked

pytest.importorskip("triton", minversion="3.6")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")

IMPORTS = """
import hashlib, json, sys, types
import msgspec
from dataclasses import replace
from pathlib import Path
import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import JITFunction, driver

class Notes:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(Notes())
made = []
KEPT = Path(__file__).parent / "kept"  # a file for each kernel and kind of arguments, of all tests
KEPT.mkdir()

def compile(src, target, options, **more):
    kept = KEPT / hashlib.sha256(f"{src.hash()} {sorted(options.items())}".encode()).hexdigest()
    if kept.exists():
        made.append(src.name)
        return object()
    backend = make_backend(target)
    options = backend.parse_options(dict(options, **src.parse_options()))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    src.make_ir(target, options, functions, modules, context)
    kept.touch()
    made.append(src.name)
    return object()

triton.compiler.compile = compile  # before the first launch of any kernel
launch = JITFunction.run

def run(kernel, *args, grid, warmup, **options):
    return launch(kernel, *args, grid=grid, warmup=True, **options)

JITFunction.run = run

import numpy as np
import ramify.gpu.programmatic_launch as programmatic_launch
programmatic_launch.overlaps = lambda device: True  # before anybody imports it
from ramify.gpu.attention.registry import KernelChoice
from ramify.actors.grammar.automaton import Automaton as Machine
from ramify.actors.grammar.forced_texts import forced_texts
from ramify.actors.grammar.automaton_words import rows_of, words_of
from ramify.gpu.constraints.byte_automaton import ByteAutomaton
from ramify.gpu.constraints.matcher import AutomatonConstraint
from ramify.gpu.constraints.token_automaton import TokenAutomaton
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.gpu.attention.triton_paged import TritonPaged
from ramify.gpu.drafting.device_model import DeviceModelDrafter
from ramify.gpu.drafting.triton_ngram import DeviceNgramDrafter
from ramify.gpu.executors import cuda_executor, step_kernels
from ramify.gpu.kv.layout import FP8
from ramify.gpu.models.config import read_config
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.ops.linear.four_bits import four_bit_form
from ramify.gpu.ops.linear.fp8 import fp8_form
from ramify.gpu.startup import rehearsal
from ramify.gpu.step.rows import RowTable
from ramify.protocol.plan import ExecutorInfo, ExtendRow, OpenRow, StepPlan, pack
from ramify.protocol.sampling import SamplingParams

step_kernels.gluon_works = lambda device: True
TritonPaged.fewest_balanced = 32
CPU = torch.device("cpu")
ROWS, TOKENS, PAGE = 24, 64, 16

def warm(executor, buckets):
    executor._warm_sampler()
    for bucket in buckets:
        executor._warm(bucket)

cuda_executor.CudaExecutor.warm = torch.inference_mode()(warm)

def warm_drafter(executor):
    if executor.drafts.drafter is not None:
        executor.drafts.drafter.warm_sizes()
        executor.drafts.drafter.capture(lambda what, done: None)

cuda_executor.CudaExecutor.warm_drafter = torch.inference_mode()(warm_drafter)

def drafter_for(draft, model, info):
    if draft == "none":
        return None
    if draft in ("ngram", "states"):
        return DeviceNgramDrafter()
    pool = model.config.kv_layout(model.dtype).allocate(info.pages, PAGE, CPU)
    products = cuda_executor.Products(CPU)
    sizes = step_kernels.layer_sizes(model, products)
    return DeviceModelDrafter(model, pool, sizes, info.max_drafts)

def executor_for(config, dtype, sinks, deterministic, draft):
    codes = dtype == "fp8"  # of weights, and of keys and values
    dtype = torch.bfloat16 if codes else getattr(torch, dtype)
    Path("config.json").write_text(json.dumps(config))
    shape = read_config(Path("."))
    if sinks:
        sunk = torch.zeros(shape.attention.heads)
        mixers = [layer.mixer for layer in shape.layers]
        mixers = [replace(one, spec=replace(one.spec, sinks=sunk)) for one in mixers]
        pairs = zip(shape.layers, mixers, strict=True)
        shape = replace(shape, layers=tuple(replace(layer, mixer=one) for layer, one in pairs))
    model = Decoder(shape, 512, dtype, CPU)
    if draft == "int4":
        for linear, _ in model.products():
            linear.tensor.zero_()
            linear.weight = four_bit_form(draft, True)(linear)
        draft = "ngram"
    for linear, _ in model.products() if codes else ():
        linear.weight = fp8_form(CPU, rounds=True)(linear)
    choice = KernelChoice("triton", "triton", "a test", deterministic=deterministic)
    info = ExecutorInfo(
        model="", architecture="", parameters=0, vocab_size=shape.vocab_size, context=512,
        page_size=PAGE, pages=64, max_rows=ROWS, step_tokens=TOKENS, device="cpu", dtype="",
        attention="", attention_reason="", eos_token_ids=[], kv_bytes_per_token=1, load_seconds=0.0,
        constrains=True,
    )
    drafts = {"max_drafts": 3, "max_forced": 0 if draft == "states" else 4} if draft != "none" else {}
    states = {"state_slots": 9, "page_size": 1} if draft in ("none", "states") else {}
    info = msgspec.structs.replace(info, **drafts, **states)
    pool = shape.kv_layout(FP8 if codes else dtype).allocate(info.pages, info.page_size, CPU)
    if info.state_slots:
        pool.states = shape.state_layout().allocate(info.state_slots, CPU, 3)
    drafter = drafter_for(draft, model, info)
    seen = None  # what no kernel reads: tokens have three positions
    if "qwen3_5" in config["model_type"]:
        seen = types.SimpleNamespace(turned=True, take=lambda plan: None)
    table = RowTable(info)
    return cuda_executor.CudaExecutor(model, pool, table, info, choice, drafter, pictures=seen)

text = Vocabulary([b"a", b"b"], [2], lambda text: [0] * len(text), 128)
forty = Machine.from_regex("a{40}")
rows = rows_of(forty)
machine = TokenAutomaton(text, ByteAutomaton(words_of(forty, rows), forced_texts(forty, rows)))
constraint = AutomatonConstraint(machine)

"""
CHECK = """
config = json.loads(sys.argv[1])
sinks, deterministic, draft = sys.argv[3] == "sinks", sys.argv[4] == "1", sys.argv[5]
executor = executor_for(config, sys.argv[2], sinks, deterministic, draft)
rehearsal.warm_all(executor)
print(*sorted(set(made)))

# whatever is served then is compiled already
made.clear()
"""
SERVE = """
scored = dict(places=pack([3, 4]), targets=pack([1, 2]))
asks = SamplingParams(top_p=0.5, logprobs=2), SamplingParams(presence_penalty=0.5), SamplingParams()
opens = [OpenRow(row, row, pack([2 * row, 2 * row + 1]), 0, ask) for row, ask in enumerate(asks)]
extends = [ExtendRow(row, 0, pack(range(1, 17 - 5 * row)), True, **scored) for row in range(3)]
with torch.inference_mode():
    executor.launch(StepPlan(0, opens=opens, extends=extends))
    executor.launch(StepPlan(1, decodes=pack([0, 1, 2])))
    executor.launch(StepPlan(2, decodes=pack([0, 1, 2]), drafts=pack([3, 0, 2])))
    last = [ExtendRow(3, 0, pack([1, 2, 3]), True, drafts=2)]
    opens = [OpenRow(3, 3, pack([9]), 0, asks[1])]
    executor.launch(StepPlan(3, opens=opens, extends=last, decodes=pack([0, 1]), drafts=pack([2, 3])))
    executor._ring = [None] * len(executor._ring)  # nothing was computed
    executor.constraints.rows.put(1, constraint)
    opens = [
        OpenRow(row, row, pack([10 + row]), 0, ask, 0, pack([1]), 1)
        for row, ask in enumerate([*asks, SamplingParams(temperature=0.9)], 4)
    ]
    extends = [ExtendRow(row, 0, pack([1]), True) for row in range(4, 8)]
    executor.launch(StepPlan(4, opens=opens, extends=extends))
    rows, drafts = pack([4, 5, 6, 7]), pack([2, 2, 0, 3])
    assert executor.launch(StepPlan(5, decodes=rows, drafts=drafts)).drafted is not None
assert not made, made
"""
SERVE_STATES = """
pages = [pack(range(20 * row, 20 * row + 20)) for row in range(2)]
opens = [OpenRow(row, row, pages[row], 0, SamplingParams()) for row in range(2)]
extends = [ExtendRow(row, 0, pack(range(1, 17 - 5 * row)), True) for row in range(2)]
with torch.inference_mode():
    executor.launch(StepPlan(0, opens=opens, extends=extends, states=pack([0, 1, 0, 2])))
    executor.launch(StepPlan(1, decodes=pack([1, 0]), states=pack([2, 3, 1, 4])))
    if executor.info.max_drafts:
        drafted = StepPlan(2, decodes=pack([1, 0]), drafts=pack([2, 1]), states=pack([3, 5, 4, 6]))
        executor.launch(drafted)
assert not made, made
"""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 512,  # from here on and by 128 our own products run
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
GEMMA = LLAMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 32,
    "query_pre_attn_scalar": 50,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
OLMO = LLAMA | {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA4 = LLAMA | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 64,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "sliding_window": 32,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 128,
}
QWEN = LLAMA | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "head_dim": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
GRANITE4 = LLAMA | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_local_experts": 0,
    "shared_intermediate_size": 512,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 16,
    "mamba_d_state": 128,
}
LFM2 = LLAMA | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention"],
}
CHOSEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
QWEN_MOE = (
    QWEN
    | CHOSEN
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": 128,
    }
)
GLM_MOE = LLAMA | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_attention_heads": 40,  # in two groups: as many sequences are few or many
    "num_key_value_heads": 40,
    "q_lora_rank": 128,
    "first_k_dense_replace": 2,
    "n_routed_experts": 16,
    "moe_intermediate_size": 128,
}
KIMI = LLAMA | {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "num_key_value_heads": 8,
    "model_max_length": 512,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense"],
    "linear_num_heads": 2,
    "num_experts": 8,
}
NEMOTRON = LLAMA | {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "num_hidden_layers": None,
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
}
STEP = {"_embed_norm", "_add_norm", "_rope_store", "_extend"}
DECODES = {"_attend", "_decode", "_merge", "_shared"}
SAMPLING = {"_gather", "_search", "_masses", "_draw"}
DRAFTS = {"_correct", "_correct_draws", "_track", "_accept", "_record"}
PLAIN = STEP | DECODES | {"_linear", "_divide_rows"}
RECURRENT = {"_recur", "_open", "_open_heads"}
KDA = {"_recur", "_open", "_prepare", "_decays", "_products", "_solve", "_chunks"}
MAMBA = {"_scan", "_open_groups"}
CONSTRAINTS = {"_masks", "_follow"}
MANY = {"_route", "_sort", "_open_many", "_down_many", "_sum_many"}
FEW = {"_route", "_open_few", "_open_together", "_sum_few"}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    with forked(IMPORTS, tmp_path_factory.mktemp("imported")) as process:
        yield process


@pytest.mark.parametrize(
    ("config", "dtype", "sinks", "deterministic", "draft", "kernels"),
    [
        (LLAMA, "bfloat16", "", False, "ngram", PLAIN | SAMPLING | DRAFTS | CONSTRAINTS | {"_propose"}),
        (LLAMA, "bfloat16", "", False, "model", PLAIN | DRAFTS | {"_begin", "_advance", "_fill"}),
        (LLAMA, "bfloat16", "", False, "int4", DECODES | {"_product"}),
        (GEMMA, "bfloat16", "", False, "ngram", STEP | DECODES | {"_gate_mul"}),
        (OLMO, "bfloat16", "", False, "ngram", STEP | DECODES | {"_linear"}),
        (GEMMA4, "bfloat16", "", False, "ngram", STEP | DECODES | {"_gate_mul"}),
        (LLAMA, "float32", "sinks", False, "model", STEP | DECODES | {"_gate_mul"}),
        (GEMMA, "bfloat16", "sinks", True, "ngram", {"_attend", "_merge", "_rope_store"}),
        (QWEN, "bfloat16", "", False, "none", RECURRENT | {"_prepare", "_solve", "_chunks"}),
        (QWEN, "bfloat16", "", True, "none", RECURRENT),
        (KIMI, "bfloat16", "", False, "none", KDA | {"_store", "_by_head"}),
        (GRANITE4, "bfloat16", "", False, "none", MAMBA | {"_convolve", "_scan_chunks"}),
        (GRANITE4, "bfloat16", "", True, "none", MAMBA),
        (LFM2, "bfloat16", "", False, "states", {"_short_conv", "_take_back", "_accept"}),
        (QWEN_MOE, "bfloat16", "", False, "none", FEW | MANY),
        (GLM_MOE, "bfloat16", "", False, "ngram", FEW | MANY),
        (GLM_MOE, "bfloat16", "", True, "ngram", MANY),
        (GPT_OSS, "bfloat16", "", False, "ngram", FEW | MANY | STEP | DECODES),
        (GLM_MOE, "fp8", "", False, "ngram", FEW | MANY | PLAIN | {"_round_rows"}),
        (NEMOTRON, "bfloat16", "", False, "none", FEW | MANY | MAMBA),
        (NEMOTRON, "bfloat16", "", True, "none", MANY | MAMBA),
        (DEEPSEEK, "bfloat16", "", False, "ngram", DECODES | {"_store", "_by_head", "_extend"}),
        (DEEPSEEK, "bfloat16", "", True, "ngram", {"_attend", "_store", "_by_head"}),
    ],
    ids=[
        "llama",
        "draft model",
        "int4",
        "gemma",
        "olmo",
        "gemma4",
        "float32-sinks",
        "deterministic",
        "qwen3.5",
        "qwen3.5-deterministic",
        "kimi-linear",
        "granite4",
        "granite4-deterministic",
        "lfm2",
        "qwen3.5-moe",
        "glm4-moe",
        "glm4-moe-deterministic",
        "gpt-oss",
        "glm4-moe-fp8",
        "nemotron",
        "nemotron-deterministic",
        "deepseek",
        "deepseek-deterministic",
    ],
)
def test_the_compiler_takes_every_kernel(
    config: dict[str, object],
    dtype: str,
    sinks: str,
    deterministic: bool,
    draft: str,
    kernels: set[str],
    imported: Forked,
    tmp_path: Path,
) -> None:
    about = [json.dumps(config), dtype, sinks, str(int(deterministic)), draft]
    done = imported.run(
        CHECK + (SERVE_STATES if draft in ("none", "states") else SERVE), tmp_path, about
    )
    assert done.code == 0, done.said
    assert kernels <= set(done.said.split())
