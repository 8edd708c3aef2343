"""Which drafter is chosen, and which draft models are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.gpu.attention.registry import KernelChoice
from ramify.gpu.models.config import parse_config
from ramify.gpu.startup.drafts import bundled, choose_draft, kernel_obstacle, unlike_tokens
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ConfigError, ModelError


def tokenizer(folder: Path, tokens: dict[str, int] | list[Any], **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, **more}))
    return folder


@pytest.mark.parametrize("asked", ["none", "ngram"])
def test_what_was_asked_for(tmp_path: Path, asked: str) -> None:
    choice = choose_draft(ModelConfig(path=tmp_path, draft=asked))
    assert (choice.kind, choice.folder, choice.reason) == (asked, None, "as asked")


def test_the_bundled_models_have_the_same_tokens() -> None:
    model, draft = bundled("default_model"), bundled("default_draft")
    assert unlike_tokens(model, draft) is None
    choice = choose_draft(ModelConfig(path=model, draft="model"))
    assert (choice.kind, choice.folder) == ("model", draft)


def test_nothing_is_guessed_unless_it_is_asked_for() -> None:
    assert choose_draft(ModelConfig(path=bundled("default_model"))).kind == "none"


def test_kernels_that_run_no_drafts() -> None:
    """FlashInfer's decode, whose lengths the host plans; automatic is none."""
    model = bundled("default_model")
    triton, fa3 = KernelChoice("triton", "triton", ""), KernelChoice("fa3", "triton", "")
    for kernels in (triton, fa3):
        assert choose_draft(ModelConfig(path=model, draft="ngram"), kernels).kind == "ngram"
        assert choose_draft(ModelConfig(path=model), kernels).kind == "none"
        assert choose_draft(ModelConfig(path=model, draft="model"), kernels).kind == "model"
    with pytest.raises(ModelError, match=r"on the host.*give --attention auto or triton"):
        choose_draft(ModelConfig(path=model, draft="ngram"), KernelChoice("fa3", "flashinfer", ""))
    torchs = KernelChoice("torch", "torch", "")
    assert choose_draft(ModelConfig(path=model, draft="model"), torchs).kind == "model"


@pytest.mark.parametrize(
    ("family", "fields", "told"),
    [
        ("Gemma4", {"head_dim": 64, "global_head_dim": 128}, "its layers are of unequal sizes"),
        ("DeepseekV3", {"first_k_dense_replace": 9}, "its attention keeps latents"),
        ("Llama", {"num_key_value_heads": 2}, None),
    ],
)
def test_draft_models_that_a_gpu_does_not_run(family: str, fields: Any, told: str | None) -> None:
    pytest.importorskip("triton")
    sizes = {"num_attention_heads": 4, "hidden_size": 256, "num_hidden_layers": 6}
    raw = {"architectures": [f"{family}ForCausalLM"], **sizes, **fields}
    model = parse_config(raw, {}, Path("draft"))
    assert kernel_obstacle(model, torch.bfloat16, torch.device("cpu")) == told


def test_another_file_with_the_same_tokens(tmp_path: Path) -> None:
    """Order and everything but the tokens may differ; a list is a vocabulary as well."""
    added = [{"id": 2, "content": "<s>", "special": True}]
    one = tokenizer(tmp_path / "one", {"a": 0, "b": 1}, added_tokens=added)
    two = tokenizer(tmp_path / "two", {"b": 1, "a": 0}, added_tokens=added, version="2")
    three = tokenizer(tmp_path / "three", [["a", -1.0], ["b", -2.0]], added_tokens=added)
    assert unlike_tokens(one, two) is None
    assert unlike_tokens(one, three) is None
    assert choose_draft(ModelConfig(path=one, draft=str(two))).folder == two


@pytest.mark.parametrize(
    ("tokens", "added", "words"),
    [
        ({"a": 1, "b": 0}, [], "0 is 'a' in the model and 'b' in the draft model"),
        ({"a": 0}, [], "1 is 'b' in the model and nothing in the draft model"),
        ({"a": 0, "b": 1, "c": 2}, [], "2 is nothing in the model and 'c' in the draft model"),
        ({"a": 0, "b": 1}, [{"id": 1, "content": "b", "special": True}], "'b (special)'"),
    ],
)
def test_other_tokens_are_refused(tmp_path: Path, tokens: Any, added: Any, words: str) -> None:
    one = tokenizer(tmp_path / "one", {"a": 0, "b": 1})
    two = tokenizer(tmp_path / "two", tokens, added_tokens=added)
    with pytest.raises(ModelError) as caught:
        choose_draft(ModelConfig(path=one, draft=str(two)))
    assert words in str(caught.value)
    assert "needs the tokenizer of the model" in str(caught.value)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    one = tokenizer(tmp_path / "one", {"a": 0})
    with pytest.raises(ModelError, match="is not a folder: give one, or auto, none, ngram or model"):
        choose_draft(ModelConfig(path=one, draft=str(tmp_path / "missing")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="is missing, so the tokens cannot be compared"):
        choose_draft(ModelConfig(path=one, draft=str(tmp_path / "empty")))
    for text in ("[1]", "{", '{"model": {"vocab": {"a": "x"}}}', '{"model": {"vocab": [1]}}'):
        (tmp_path / "empty" / "tokenizer.json").write_text(text)
        with pytest.raises(ModelError, match="cannot be read"):
            choose_draft(ModelConfig(path=one, draft=str(tmp_path / "empty")))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"draft": ""}, "--draft is empty"),
        ({"draft": "x" * 5000}, "--draft is empty or longer"),
        ({"draft_tokens": 0}, "--draft-tokens is 0: must be 1 to 8"),
        ({"draft_tokens": 9}, "--draft-tokens is 9: must be 1 to 8"),
    ],
)
def test_settings_are_bounded(tmp_path: Path, settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelConfig(path=tmp_path, **settings)


def test_tokens_of_a_gguf_file_are_compared(tmp_path: Path) -> None:
    from tests.conftest import write_tokenizer
    from tests.gguf_files import SMALL, bytewise, checkpoint, convert

    folder = checkpoint(tmp_path / "model", "Llama", SMALL | {"vocab_size": 384})
    write_tokenizer(tmp_path / "tokens")
    path = convert(
        folder, tmp_path / "a.gguf", "llama", tokenizer=bytewise(tmp_path / "tokens", "gpt-2")
    )
    assert unlike_tokens(path, path) is None
    assert unlike_tokens(path, tmp_path / "tokens") is None
    assert "other tokens" in str(unlike_tokens(path, bundled("default_model")))
