"""Tokenizer files of model folders: what is read of them equals what `transformers` reads.

The tokenizers are made here. Published ones are tried where they are at hand
(`../shared/data/tokenizers`, or the folder that RAMIFY_TOKENIZERS names; packed files need zstandard).
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from ramify.actors.tokenizer import Tokenizer
from ramify.actors.tokenizer.pretrained import Pretrained, read_pretrained
from ramify.protocol.errors import ModelError

SHARED = Path(__file__).parents[3].parent / "shared" / "data" / "tokenizers"
PUBLISHED = Path(os.environ.get("RAMIFY_TOKENIZERS", SHARED))
TEXTS = [
    *("Hello world", " a  b ", "", "don't they're a.", "▁under▁score", "ﬁ Å é 中文 😀"),
    *("<s>x</s> <|im_end|>\n<extra> <pad>y", "<ctrl> <image>  <ctrl>z <tool>"),
]


def spm() -> Backend:
    """As Llama 2: byte fallback, a prefix space, BOS by the post-processor."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcdehlorwxyz"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


def byte_level() -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False, lstrip=True)])
    return backend


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": content, "special": True} | plain | flags


LEGACY = {name: value for name, value in token("<s>", normalized=True).items() if name != "special"}
END = {"eos_token": "<|im_end|>"}
FLAGS = {
    "256": token("<|im_end|>", rstrip=True),
    "258": token("<ctrl>", lstrip=True, rstrip=True),
    "259": token("<extra>", special=False, single_word=True),
    "257": token("<tool>", special=False),
}
TEMPLATES = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
# The tokenizer, tokenizer_config.json, and other files of the folder.
Folder = tuple[Callable[[], Backend], dict[str, Any], dict[str, Any]]
FOLDERS: dict[str, Folder] = {
    "tokenizer.json alone": (spm, {}, {}),
    "names": (spm, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, {}),
    "names of unknown tokens are added": (
        byte_level,
        END | {"pad_token": "<pad>", "bos_token": "<s>"},
        {},
    ),
    "tokens spelt out": (byte_level, {"eos_token": {"__type": "AddedToken", **token("<|im_end|>")}}, {}),
    "add_bos_token is the file's own affair": (
        spm,
        {"add_bos_token": False, "add_eos_token": True, "bos_token": "<s>"},
        {},
    ),
    "more special tokens": (
        byte_level,
        END | {"additional_special_tokens": ["<ctrl>", "<extra>"]},
        {},
    ),
    "more of them, by the newer name": (
        byte_level,
        {"extra_special_tokens": ["<ctrl>"], "additional_special_tokens": ["<no>"]},
        {},
    ),
    "a model's own names": (
        byte_level,
        END | {"image_token": "<image>", "extra_special_tokens": {"control_token": "<ctrl>"}},
        {},
    ),
    "added tokens with flags": (byte_level, END | {"added_tokens_decoder": FLAGS}, {}),
    "a name that only the added tokens spell": (
        byte_level,
        {
            "pad_token": "<pad>",
            "added_tokens_decoder": {"258": token("<pad>", special=False, lstrip=True)},
        },
        {},
    ),
    "special_tokens_map.json": (
        spm,
        {"eos_token": "</s>"},
        {
            "special_tokens_map.json": {
                "bos_token": LEGACY,
                "eos_token": "</s>",
                "pad_token": "<pad>",
                "additional_special_tokens": ["<ctrl>"],
            }
        },
    ),
    "special_tokens_map.json, which newer folders outdate": (
        byte_level,
        END | {"added_tokens_decoder": {"256": token("<|im_end|>")}},
        {"special_tokens_map.json": {"bos_token": "<s>"}},
    ),
    "added_tokens.json": (
        byte_level,
        {"pad_token": "<pad>"},
        {"added_tokens.json": {"<extra>": 259, "<pad>": 258}},
    ),
    "special tokens that may be split": (byte_level, END | {"split_special_tokens": True}, {}),
    "clean_up_tokenization_spaces is of their decoding": (
        byte_level,
        {"clean_up_tokenization_spaces": True, "model_max_length": 3},
        {},
    ),
    "a template in the config": (byte_level, {"chat_template": "{{ bos_token }}"}, {}),
    "templates by name": (byte_level, {"chat_template": TEMPLATES}, {}),
    "a template in a file comes first": (
        byte_level,
        {"chat_template": "old"},
        {"chat_template.jinja": "new"},
    ),
    "templates in files": (
        byte_level,
        {},
        {"chat_template.jinja": "new", "additional_chat_templates/tool_use.jinja": "tools"},
    ),
}


def write(folder: Path, backend: Backend, config: Any, files: dict[str, Any] | None = None) -> None:
    backend.save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config.json": config, **(files or {})}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def theirs(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(
        str(folder), local_files_only=True, fix_mistral_regex=False
    )


def check(ours: Pretrained, fast: Any) -> None:
    """The same tokenizer, to the last flag, and the same names."""
    state, expected = json.loads(ours.backend.to_str()), json.loads(fast.backend_tokenizer.to_str())
    if state["post_processor"] is None:  # theirs is then a template that adds nothing
        assert expected.pop("post_processor")["single"] == [{"Sequence": {"id": "A", "type_id": 0}}]
        del state["post_processor"]
    for side in (state, expected):  # never obeyed
        del side["truncation"], side["padding"]
    assert state == expected
    assert ours.special_tokens == fast.special_tokens_map
    assert list(ours.special_tokens) == list(fast.special_tokens_map)
    assert ours.extra_special == fast.extra_special_tokens
    assert set(ours.special_ids()) == set(fast.all_special_ids)
    assert ours.token_id("bos_token") == fast.bos_token_id
    assert ours.token_id("eos_token") == fast.eos_token_id
    assert ours.templates == fast.chat_template
    for text in TEXTS:
        for special in (False, True):
            ids = ours.backend.encode(text, add_special_tokens=special).ids
            assert ids == fast.encode(text, add_special_tokens=special)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    make, config, files = FOLDERS[name]
    write(tmp_path, make(), config, files)
    check(read_pretrained(tmp_path), theirs(tmp_path))


@pytest.mark.parametrize("legacy", [False, True])
def test_what_transformers_saved(legacy: bool, tmp_path: Path) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=spm(), bos_token="<s>", eos_token="</s>", extra_special_tokens=["<ctrl>"]
    )
    fast.add_tokens([AddedToken("<extra>", rstrip=True), "plain"])
    fast.chat_template = "{{ messages }}"
    fast.save_pretrained(tmp_path, legacy_format=legacy)
    check(read_pretrained(tmp_path), theirs(tmp_path))


def test_tokenization_of_a_saved_truncation_and_padding_is_whole(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    write(tmp_path, backend, {})
    assert len(Tokenizer.load(tmp_path).encode("abcdef")) == 6


def test_a_bundled_model_needs_no_transformers() -> None:
    folder = Path(__file__).parents[3] / "gpu" / "default_model"
    check(read_pretrained(folder), theirs(folder))


class TestWhatTransformersIsKeptFor:
    def test_which_file_counts_by_its_version(self, tmp_path: Path) -> None:
        versions = ["tokenizer.4.0.0.json", "tokenizer.json"]
        write(tmp_path, spm(), {"fast_tokenizer_files": versions})
        newer = byte_level()
        newer.save(str(tmp_path / "tokenizer.4.0.0.json"))
        assert read_pretrained(tmp_path).backend.get_vocab_size() == newer.get_vocab_size()

    def test_a_slow_tokenizer_is_converted(self, tmp_path: Path) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {text: i for i, text in enumerate([*alphabet, "<|endoftext|>", "ab"])}
        (tmp_path / "vocab.json").write_text(json.dumps(vocab))
        (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.encode("ab") == [vocab["ab"]]
        assert tokenizer.decode(tokenizer.encode("abc é")) == "abc é"

    def test_code_in_the_folder_is_not_run(self, tmp_path: Path) -> None:
        config = {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "mine.py").write_text("raise SystemExit('it ran')")
        (tmp_path / "vocab.json").write_text("{}")
        with pytest.raises(ModelError, match="slow tokenizer"):
            Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"chat_template": 5}, "chat_template"),
        ({"added_tokens_decoder": {"x": {}}}, "invalid literal"),
        ({"added_tokens_decoder": {"1": {"content": 3}}}, "tokenizer.json"),
    ],
)
def test_files_that_make_no_sense_are_named(config: Any, why: str, tmp_path: Path) -> None:
    write(tmp_path, byte_level(), config)
    with pytest.raises(ModelError, match=why):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "mistral_v3"])
def test_published_tokenizers(name: str, tmp_path: Path) -> None:
    """Their texts, with the ids that sentencepiece and `transformers` have given them."""
    packed = PUBLISHED / f"{name}_tokenizer.json.zst"
    if not packed.is_file():
        pytest.skip(f"{packed} is not here")
    zstandard = pytest.importorskip("zstandard")
    whole = zstandard.ZstdDecompressor().decompress(packed.read_bytes(), max_output_size=1 << 26)
    (tmp_path / "tokenizer.json").write_bytes(whole)
    config = PUBLISHED / f"{name}_tokenizer_config.json"
    if config.is_file():
        (tmp_path / "tokenizer_config.json").write_bytes(config.read_bytes())
    check(read_pretrained(tmp_path), theirs(tmp_path))
    ours = Tokenizer.load(tmp_path)
    for line in (PUBLISHED / "cases.jsonl").read_text().splitlines():
        case = json.loads(line)
        if name in case:
            special = case.get("special", False)
            plain = ours.encode_chat(case["text"], start=True)
            guarded = ours.encode(case["text"], special=special, start=True)
            assert plain == case[name]
            assert guarded[len(ours.start_ids) :] == case[name] or not special


def test_reading_imports_neither_transformers_nor_torch(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), {"chat_template": "{{ messages[0].content }}"})
    script = (
        "import sys, pathlib\n"
        "from ramify.actors.tokenizer import Tokenizer\n"
        f"tokenizer = Tokenizer.load(pathlib.Path({str(tmp_path)!r}))\n"
        "assert tokenizer.render([{'role': 'user', 'content': 'x'}]) == 'x'\n"
        "assert not {'transformers', 'torch', 'huggingface_hub'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
