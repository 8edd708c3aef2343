"""Every supported family and rope scaling against `transformers`, through the paged executor."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.protocol.plan import ExtendRow, GrowRow, StepPlan, pack
from tests.amount import examples, stride

SMALL = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # so that attention and rope matter to the outcome
}
TOKENS = examples(32, 64)  # from inside of windows and scaled lengths to beyond them
PAD = {"pad_token_id": 0}  # where the default is beyond the vocabulary
LONG = [1.0 + i / 2 for i in range(8)]
SHORT = [1.0 + i / 8 for i in range(8)]


# two layers with a window, then one without; a window shorter than the prompts
GEMMA = {
    "head_dim": 32,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 20,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 160,
}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}, {}),
    "llama-gqa": ("Llama", {}, {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}, {}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}, {}),
    "llama3": (
        "Llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        {},
    ),
    "linear": ("Llama", rope("linear", factor=2.0), {}),
    "dynamic": ("Llama", rope("dynamic", factor=2.0), {}),
    "yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=64), {}),
    "yarn-stretched": (  # as Qwen documents it: max_position_embeddings stays the original length
        "Qwen3",
        {"max_position_embeddings": 64, "head_dim": 16}
        | rope("yarn", factor=4.0, original_max_position_embeddings=64),
        {},
    ),
    "yarn-mscale": (
        "Llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            mscale=0.7,
            mscale_all_dim=1.0,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
        ),
        {},
    ),
    "longrope-short": (
        "Llama",
        rope("longrope", long_factor=LONG, short_factor=SHORT, original_max_position_embeddings=192),
        {"context": 192},
    ),
    "longrope-long": (
        "Llama",
        rope("longrope", long_factor=LONG, short_factor=SHORT, original_max_position_embeddings=32),
        {},
    ),
    "mistral": ("Mistral", {"sliding_window": 24}, {}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 32}, {}),
    "qwen2": ("Qwen2", {}, {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
        {},
    ),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3": ("Qwen3", {"head_dim": 32}, {}),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}, {}),
    "gemma3": ("Gemma3", GEMMA | {"query_pre_attn_scalar": 50}, {}),
    "gemma3-linear": (
        "Gemma3",
        GEMMA
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
            "final_logit_softcapping": 5.0,
        },
        {},
    ),
    "gemma4": ("Gemma4", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}, {}),
    "gemma4-shared": (  # E2B and E4B: KV that layers share, inputs of tokens for every layer
        "Gemma4",
        GEMMA4
        | {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 24,
            "final_logit_softcapping": 5.0,
        },
        {},
    ),
    "smollm3": ("SmolLM3", PAD | {"num_hidden_layers": 5, "no_rope_layer_interval": 2}, {}),
    "smollm3-window": (
        "SmolLM3",
        PAD | {"no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": 20},
        {},
    ),
    "olmo2": ("Olmo2", {}, {}),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "sliding_window": 20,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 500000.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
        {},
    ),
    "exaone4": ("Exaone4", {"sliding_window": 20, "sliding_window_pattern": 3, "head_dim": 32}, {}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 3.0,
        },
        {},
    ),
    "phi3": ("Phi3", PAD | {"sliding_window": 20}, {}),
    "phi4-short": (
        "Phi3",
        PAD
        | {"num_attention_heads": 2, "original_max_position_embeddings": 192}
        | rope("longrope", long_factor=LONG, short_factor=SHORT, partial_rotary_factor=0.5),
        {"context": 192},
    ),
    "phi4-long": (
        "Phi3",
        PAD
        | {"num_attention_heads": 2, "original_max_position_embeddings": 32}
        | rope("longrope", long_factor=LONG, short_factor=SHORT, partial_rotary_factor=0.5),
        {},
    ),
    "seed-oss": ("SeedOss", {"head_dim": 32, "attention_out_bias": True}, {}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}, {}),
}


def save(folder: Path, family: str, changes: dict[str, Any], **options: Any) -> Any:
    """A random model, saved and returned."""
    import transformers

    torch.manual_seed(7)
    name = f"{family}TextConfig" if family in ("Gemma3", "Gemma4") else f"{family}Config"
    config = getattr(transformers, name)(**(SMALL | changes))
    if family == "Gemma2":  # whose soft cap the other implementations leave out
        config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():  # no bias or norm may be trivial
        if name.endswith(("norm.weight", ".bias")):
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.2)
    for name, scalar in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(scalar, 0.3, 1.3)
    dtype = options.pop("dtype", None)
    (model.to(dtype) if dtype else model).save_pretrained(folder, **options)
    # read again: the round trip through a half precision must not touch the rotary buffers
    return type(model).from_pretrained(folder, dtype=torch.float32).eval() if dtype else model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 160, (n,), generator=generator).tolist() for n in (57, 40, 91)]


@torch.inference_mode()
def reference(model: Any, prompt: list[int], n: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def assert_greedy(
    model: Any, prompt: list[int], ours: list[int], n: int = TOKENS, apart: float = 0.0
) -> None:
    """Each of our n tokens is the likeliest one after those before it, or likely but for `apart`.

    So they are what `transformers` would generate; one forward of all of them is faster than n.
    """
    assert len(ours) == n
    likely = model(torch.tensor([[*prompt, *ours[:-1]]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
    chosen = likely.gather(1, torch.tensor(ours)[:, None])[:, 0]
    assert (likely.amax(1) - chosen).max() <= apart


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_transformers(case: str, tmp_path: Path, device: str, drive: Any) -> None:
    family, changes, settings = CASES[case]
    model = save(tmp_path, family, changes)
    first, second, third = prompts()
    with torch.inference_mode():
        logits = model(torch.tensor([first])).logits[0]

    for page_size in (1, 16):
        d = drive(tmp_path, page_size=page_size, **settings)
        # chunk by chunk; logits of each chunk's last token
        d.step(opens=[d.open(0, d.pages(1024, 192))])
        for start, stop in ((0, 30), (30, 31), (31, 57)):
            plan = StepPlan(step=0, extends=[ExtendRow(0, start, pack(first[start:stop]), True)])
            _, ours = d.executor.forward(plan)
            torch.testing.assert_close(ours[0].cpu(), logits[stop - 1], atol=1e-4, rtol=1e-4)
        d.step(closes=[0])
        # alone
        assert_greedy(model, first, d.generate(0, first, TOKENS, d.pages(1024, 192)))
        # batched: two prompts at once, the third joins while they decode, pages come late
        outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}

        def collect(tokens: dict[int, int], into: dict[int, list[int]] = outputs) -> None:
            for row, token in tokens.items():
                into[row].append(token)

        collect(
            d.step(
                opens=[d.open(0, d.pages(0, 64)), d.open(1, d.pages(1536, 192))],
                extends=[ExtendRow(0, 0, pack(first), True), ExtendRow(1, 0, pack(second), True)],
            )
        )
        collect(d.step(grows=[GrowRow(0, pack(d.pages(2048, 128)))], decodes=[1, 0]))
        collect(
            d.step(
                opens=[d.open(2, d.pages(3072, 192))],
                extends=[ExtendRow(2, 0, pack(third[:50]), False)],
                decodes=[0, 1],
            )
        )
        collect(d.step(extends=[ExtendRow(2, 50, pack(third[50:]), True)], decodes=[1, 0]))
        while len(outputs[2]) < TOKENS:
            collect(d.step(decodes=[row for row in outputs if len(outputs[row]) < TOKENS]))
        for row, prompt in enumerate((first, second, third)):
            assert_greedy(model, prompt, outputs[row])


MIXED = ["smollm3", "olmo2", "olmo3", "exaone4", "granite", "phi3", "phi4-short", "phi4-long", "gemma3"]
UNEQUAL = ["gemma4", "gemma4-shared"]


@pytest.mark.parametrize("case", [*MIXED, *UNEQUAL])
def test_log_probabilities_in_chunks_of_every_size(case: str, tmp_path: Path, drive: Any) -> None:
    family, changes, settings = CASES[case]
    model = save(tmp_path, family, changes)
    prompt = prompts()[2][:60]
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    d = drive(tmp_path, page_size=4, **settings)
    for size in range(1, len(prompt) + 1, stride(3)):
        d.step(opens=[d.open(0, d.pages(0, 64))])
        starts = range(0, len(prompt), size)
        for start in starts[:-1]:
            d.step(extends=[ExtendRow(0, start, pack(prompt[start : start + size]), False)])
        last = ExtendRow(0, starts[-1], pack(prompt[starts[-1] :]), True)
        _, ours = d.executor.forward(StepPlan(step=0, extends=[last]))
        torch.testing.assert_close(ours[0].log_softmax(-1), wanted, atol=1e-4, rtol=0)
        d.step(closes=[0])


@pytest.mark.parametrize("case", ["llama-gqa", "mistral", "qwen3", *MIXED[:-2], *UNEQUAL])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_shared_prefix_is_read_from_the_cache(
    case: str, page_size: int, tmp_path: Path, device: str, drive: Any
) -> None:
    family, changes, settings = CASES[case]
    model = save(tmp_path, family, changes)
    prefix = prompts()[2][:64]
    tails = [prompts()[0][:9], prompts()[1][:17], prompts()[0][3:4]]
    d = drive(tmp_path, page_size=page_size, **settings)
    shared = d.pages(2048, 64)
    d.step(opens=[d.open(5, shared)])
    d.prefill(5, 0, prefix, sample=False)
    d.step(closes=[5])
    before = d.executor.counters.tokens
    first = d.step(
        opens=[d.open(row, shared + d.pages(256 * row, 96), cached=64) for row in range(3)],
        extends=[ExtendRow(row, 64, pack(tail), True) for row, tail in enumerate(tails)],
    )
    assert d.executor.counters.tokens - before == sum(map(len, tails))
    rest = d.decode([2, 0, 1], 31)
    for row, tail in enumerate(tails):
        assert_greedy(model, prefix + tail, [first[row], *rest[row]], 32)


@pytest.mark.parametrize("case", ["qwen3", *MIXED])
def test_in_8_bits_near_transformers(case: str, tmp_path: Path, drive: Any) -> None:
    """On the CPU's own kernels, which want heads of 32."""
    pytest.importorskip("llvmlite")
    from ramify.gpu.native.host import host_isa

    if host_isa() is None:
        pytest.skip("the kernels do not run on this CPU")
    family, changes, settings = CASES[case]
    if family in ("Phi3", "Olmo2", "Olmo3"):
        wide = {"num_attention_heads": 2, "num_key_value_heads": 2 if family == "Olmo3" else 1}
    else:
        wide = {"head_dim": 32}
    model = save(tmp_path, family, changes | wide | {"initializer_range": 0.1})
    d = drive(tmp_path, quantization="int8", device="cpu", **settings)
    prompt = prompts()[0]
    d.step(opens=[d.open(0, d.pages(0, 64))])
    d.step(extends=[ExtendRow(0, 0, pack(prompt[:33]), False)])
    _, ours = d.executor.forward(StepPlan(step=0, extends=[ExtendRow(0, 33, pack(prompt[33:]), True)]))
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0, -1]
    assert torch.nn.functional.cosine_similarity(ours[0], wanted, dim=0) > 0.995


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's: garbage in padding
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "case",
    ["gemma2", "gemma3-linear", "smollm3", "olmo3", "exaone4", "granite", "phi4-short", *UNEQUAL],
)
def test_other_norms_and_soft_caps_on_the_kernels(
    case: str, deterministic: bool, tmp_path: Path, drive: Any
) -> None:
    """Soft caps, windows, positions, GeGLU, norms behind products and over widths; chunks, decodes."""
    cuda = torch.cuda.is_available()
    # the interpreter of 3.6 does not know numpy 2.4
    pytest.importorskip("triton", minversion=None if cuda else "3.7")
    family, changes, settings = CASES[case]
    own = {"head_dim": 32 if family == "Phi3" else 16}
    window = {} if changes.get("sliding_window") is None else {"sliding_window": 6}
    model = save(tmp_path, family, changes | own | window)
    prompt = prompts()[0][:11]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0]
    d = drive(
        tmp_path, device="cuda" if cuda else "cpu", dtype="float32", deterministic=deterministic,
        attention="auto" if deterministic else "triton", max_rows=2, step_tokens=32, kv_tokens=256,
        **settings,
    )  # fmt: skip
    d.step(opens=[d.open(0, d.pages(0, 32))])
    for start, stop in ((0, 9), (9, 10)):
        plan = StepPlan(step=0, extends=[ExtendRow(0, start, pack(prompt[start:stop]), True)])
        _, ours = d.executor.forward(plan)
        torch.testing.assert_close(ours[0].cpu(), logits[stop - 1], atol=1e-4, rtol=1e-4)
    first = d.prefill(0, 10, prompt[10:])[0]
    assert first == int(logits[10].argmax())
    assert_greedy(model, prompt, [first, *d.decode([0], 2)[0]], 3)


def test_dynamic_scaling_beyond_the_pretrained_length_is_that_of_the_full_context(
    tmp_path: Path, drive: Any
) -> None:
    model = save(tmp_path, "Llama", CASES["dynamic"][1] | {"max_position_embeddings": 64})
    prompt = (prompts()[0] + prompts()[2])[:128]
    d = drive(tmp_path, context=128)
    d.step(opens=[d.open(0, d.pages(0, 129))])
    _, ours = d.executor.forward(StepPlan(step=0, extends=[ExtendRow(0, 0, pack(prompt), True)]))
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(ours[0], logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_sharded_checkpoints(tmp_path: Path, drive: Any, dtype: torch.dtype) -> None:
    model = save(tmp_path, "Llama", {}, dtype=dtype, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompt = prompts()[0]
    d = drive(tmp_path)  # float32 on a CPU
    assert d.executor.info.dtype == "float32"
    assert_greedy(model, prompt, d.generate(0, prompt, TOKENS, d.pages(0, 128)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["qwen3", "olmo3", "granite", "phi4-short"])
def test_runs_in_half_precision(case: str, tmp_path: Path, device: str, drive: Any, dtype: Any) -> None:
    family, changes, settings = CASES[case]
    model = save(tmp_path, family, changes | {"initializer_range": 0.05})
    first, second, _ = prompts()
    d = drive(tmp_path, dtype=dtype, **settings)
    assert d.executor.info.dtype == dtype
    d.step(opens=[d.open(row, d.pages(512 * row, 128)) for row in range(2)])
    extends = [ExtendRow(row, 0, pack(prompt), True) for row, prompt in enumerate((first, second))]
    _, ours = d.executor.forward(StepPlan(step=0, extends=extends))
    with torch.inference_mode():
        wanted = torch.stack([model(torch.tensor([p])).logits[0, -1] for p in (first, second)])
    assert (ours.cpu() - wanted).abs().max() < 0.05 * wanted.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["torch", "triton", "auto", "flashinfer"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_each_back_end_in_bfloat16(family: str, attention: str, tmp_path: Path, drive: Any) -> None:
    """Logits of chunks, of a step with an extend and a decode, and of decodes from CUDA graphs."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    size = {"hidden_size": 512} if family == "Qwen2" else {"head_dim": 128}
    window = {"sliding_window": None} if family == "Mistral" else {}
    changes = size | window | {"initializer_range": 0.05}
    model = save(tmp_path, family, changes, dtype=torch.bfloat16)
    first, second, _ = prompts()
    device = {"device": "cuda", "dtype": "bfloat16", "attention": attention, "max_rows": 4}

    def agree(ours: torch.Tensor, *texts: list[int]) -> None:
        with torch.inference_mode():
            wanted = torch.stack([model(torch.tensor([text])).logits[0, -1] for text in texts])
        assert (ours.cpu() - wanted).norm() < 0.03 * wanted.norm()

    for page_size in (1, 16):
        d = drive(tmp_path, page_size=page_size, **device)
        d.step(opens=[d.open(row, d.pages(512 * row, 128)) for row in range(2)])
        for start, stop in ((0, 30), (30, 31), (31, 56)):
            plan = StepPlan(step=0, extends=[ExtendRow(0, start, pack(first[start:stop]), True)])
            agree(d.executor.forward(plan)[1], first[:stop])
        text = [*first, d.prefill(0, 56, first[56:])[0]]
        plan = StepPlan(step=0, extends=[ExtendRow(1, 0, pack(second[:-1]), True)], decodes=pack([0]))
        agree(d.executor.forward(plan)[1], second[:-1], text)
        # forward samples nothing: row 0 runs its last token once more, one position on
        other = [*second, d.prefill(1, len(second) - 1, second[-1:])[1]]
        other += d.decode([1], 6)[1]
        agree(d.executor.forward(StepPlan(step=0, decodes=pack([1])))[1], other)


def test_the_old_spelling_of_rope_settings(tmp_path: Path, drive: Any) -> None:
    import json

    model = save(tmp_path, "Llama", CASES["llama3"][1])
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    settings = raw.pop("rope_parameters")
    raw["rope_theta"] = settings.pop("rope_theta")
    settings["type"] = settings.pop("rope_type")
    raw["rope_scaling"] = settings
    raw["torch_dtype"] = raw.pop("dtype")
    path.write_text(json.dumps(raw))
    d = drive(tmp_path)
    prompt = prompts()[0]
    assert_greedy(model, prompt, d.generate(0, prompt, 32, d.pages(0, 128)), 32)


TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "image_size": 28, "patch_size": 14}  # fmt: skip


@pytest.mark.parametrize("names", ["old", "new"])
@pytest.mark.parametrize("family", ["Gemma3", "Mistral3"])
def test_the_text_of_a_model_with_a_vision_tower(
    family: str, names: str, tmp_path: Path, drive: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints name their tensors in an older or a newer way; those of the tower are not read."""
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(7)
    if family == "Gemma3":
        text: Any = transformers.Gemma3TextConfig(**(SMALL | GEMMA))
        tower: dict[str, Any] = {}
    else:
        text = transformers.MistralConfig(**SMALL, sliding_window=None)
        tower = {"model_type": "pixtral", "head_dim": 16}
    tokens = {"mm_tokens_per_image": 4} if family == "Gemma3" else {}
    whole = getattr(transformers, f"{family}Config")(
        text_config=text.to_dict(), vision_config=TOWER | tower, tie_word_embeddings=family == "Gemma3",
        **tokens,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForConditionalGeneration")(whole).eval()
    model.save_pretrained(tmp_path)
    if names == "new":
        path = tmp_path / "model.safetensors"
        tensors = {f"model.{name}": tensor for name, tensor in load_file(path).items()}
        renamed = {
            "model.language_model.model.": "model.language_model.",
            "model.language_model.lm_head.": "lm_head.",
        }
        for old, new in renamed.items():
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        save_file(tensors, path)
    prompt = prompts()[0]
    with torch.inference_mode(), caplog.at_level("INFO", "ramify.gpu.startup"):
        wanted = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        d = drive(tmp_path)
    assert "text alone is served" in caplog.text
    d.step(opens=[d.open(0, d.pages(0, 64))])
    _, ours = d.executor.forward(StepPlan(step=0, extends=[ExtendRow(0, 0, pack(prompt), True)]))
    torch.testing.assert_close(ours[0], wanted, atol=1e-4, rtol=1e-4)
