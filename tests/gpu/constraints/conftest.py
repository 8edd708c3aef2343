"""Tokenizers of both kinds, trained here on a few lines, and a vocabulary for each."""

import json

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from ramify.actors.tokenizer import Tokenizer
from ramify.gpu.constraints.vocabulary import Vocabulary

CORPUS = [
    '{"name":"Ada","age":36,"ok":true} {"name": "Zoë", "tags": ["a", "b"], "n": null}',
    "the quick brown fox jumps over the lazy dog, 12345 times; none or no, café, 中国 😀",
    '"}, {"id":"abc","value":"def"}], "items":[',
] * 4


def byte_level() -> Tokenizer:
    """As Llama 3 and Qwen."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<|begin|>", "<|end|>"])
    backend.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return Tokenizer.of(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>"))


def sentencepiece() -> Tokenizer:
    """As Llama 2 and Mistral: a space in front of a text, bytes as fallback."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    backend = Backend(
        models.BPE(
            model["vocab"],
            [tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer.of(
        PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
    )


KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece}


@pytest.fixture(scope="session", params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    tokens = tokenizer.words[0]
    return Vocabulary(tokens, tokenizer.eos_ids, tokenizer.encode, size=len(tokens) + 7)
