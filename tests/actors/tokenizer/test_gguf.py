"""Tokenizers of GGUF files: the same ids, bytes and chats as the folder that they were made of."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from gguf import GGUFWriter
from tokenizers import AddedToken, decoders, models, normalizers, processors, trainers

from ramify.actors.tokenizer import Tokenizer
from tests.conftest import TEXT, write_tokenizer
from tests.gguf_files import TEMPLATE, bytewise

PIECES = [
    "Hello",
    " world",
    "  ",
    "\n\n",
    "123",
    "4",
    " don't",
    "ü",
    "ß",
    "日本",
    "🙂",
    "<|im_end|>",
    "\t",
    "x",
]
PROMPTS = ["", *("".join(random.Random(seed).choices(PIECES, k=9)) for seed in range(60))]


def written(path: Path, size: int, tokenizer: Any) -> Path:
    """A file with a tokenizer, and the one tensor that says how many tokens the model has."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    tokenizer(writer, size)
    writer.add_tensor("token_embd.weight", np.zeros((size, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same(ours: Tokenizer, theirs: Tokenizer) -> None:
    assert ours.token_bytes[: theirs.vocab_size] == theirs.token_bytes
    assert (ours.start_ids, ours.bos_id, ours.special_ids) == (
        theirs.start_ids,
        theirs.bos_id,
        theirs.special_ids,
    )
    for prompt in PROMPTS:
        for start in (True, False):
            ids = theirs.encode(prompt, start=start)
            assert ours.encode(prompt, start=start) == ids
            assert ours.decode(ids) == theirs.decode(ids)


def test_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tokenizer(folder)
    path = written(tmp_path / "a.gguf", 400, bytewise(folder, "gpt-2"))
    ours, theirs = Tokenizer.load(path), Tokenizer.load(folder)
    same(ours, theirs)
    assert ours.eos_ids == theirs.eos_ids | {0}  # <|endoftext|>, as llama.cpp knows it by its name
    assert ours.vocab_size == 400
    message = [{"role": "user", "content": "Hi <|im_end|>"}]
    assert ours.unguarded(ours.render(message)) == "<|im_start|>user\nHi <|im_end|><|im_end|>\n"
    assert ours.template_source == TEMPLATE


def test_the_bundled_models(tmp_path: Path) -> None:
    """Its texts are split by Qwen's rule."""
    folder = Path(__file__).parents[3] / "gpu" / "default_model"
    path = written(tmp_path / "a.gguf", 8192, bytewise(folder, "qwen2"))
    same(Tokenizer.load(path), Tokenizer.load(folder))


@pytest.mark.parametrize("rule", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_every_rule_loses_nothing(tmp_path: Path, rule: str) -> None:
    write_tokenizer(tmp_path / "model")
    ours = Tokenizer.load(written(tmp_path / "a.gguf", 384, bytewise(tmp_path / "model", rule)))
    for prompt in PROMPTS:
        text = prompt.replace("<|im_end|>", "")
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_with_scores(tmp_path: Path, prefix: bool) -> None:
    """A BPE of SentencePiece's kind: what `tokenizers` trained, and the same from its pieces' order."""
    special = [AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>")]
    whole = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    whole.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces] if prefix else [spaces])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    whole.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*map(str, special), *bytes_],
                                  show_progress=False)  # fmt: skip
    whole.train_from_iterator([word for line in TEXT for word in line.split(" ")], trainer)
    whole = tokenizers.Tokenizer.from_str(whole.to_str())
    state = json.loads(whole.to_str())
    state["added_tokens"] = [each for each in state["added_tokens"] if each["id"] < 3]
    whole = tokenizers.Tokenizer.from_str(json.dumps(state))
    whole.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    folder = tmp_path / "model"
    folder.mkdir()
    whole.save(str(folder / "tokenizer.json"))
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    texts = [text for text, _ in sorted(whole.get_vocab().items(), key=lambda item: item[1])]

    def write(writer: GGUFWriter, size: int) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(texts)
        writer.add_token_scores([-float(number) for number in range(size)])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (size - 259)])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(prefix)

    ours, theirs = (
        Tokenizer.load(written(tmp_path / "a.gguf", len(texts), write)),
        Tokenizer.load(folder),
    )
    same(ours, theirs)
    assert ours.start_ids == (1,)
    assert ours.eos_ids == {2}
