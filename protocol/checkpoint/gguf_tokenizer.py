"""The tokenizer.json and tokenizer_config.json that the metadata of a GGUF file stands for.

Two kinds: byte-level BPE ("gpt2"), whose texts are split first by a rule that has a name, and
SentencePiece's BPE ("llama"), whose merges follow from the scores of its pieces.
"""

from itertools import islice
from typing import Any

from ramify.protocol.checkpoint.gguf import GgufFile
from ramify.protocol.checkpoint.gguf_config import token_id, tokens_of

_KEY = "tokenizer.ggml"
_UNKNOWN, _CONTROL, _OWN, _BYTE = 2, 3, 4, 6  # kinds of tokens; own: that people added
_SPACE = "▁"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_QWEN = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, str | None] = {  # None: GPT-2's rule, behind digits one by one
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "tekken": _TEKKEN,
    "smollm": None,
    "refact": None,
    "starcoder": None,
    "gpt-2": "",
}
_BEGINS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # with BOS, if the file does not say
_WHOLE = _BEGINS  # a word that is a token needs no merges
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def tokenizer_of(file: GgufFile) -> dict[str, Any]:
    """tokenizer.json. Raises ModelError."""
    tokens = _tokens(file)
    kinds = file.entries(f"{_KEY}.token_type", int) or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise file.refused(f"{_KEY}.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    kind = file.text(f"{_KEY}.model")
    if kind == "gpt2":
        pipeline = _bytewise(file, tokens)
    elif kind == "llama":
        pipeline = _sentencepiece(file, tokens, kinds)
    else:
        raise file.refused(f"{_KEY}.model is {kind!r}: gpt2 and llama are served; give the model's "
                           "safetensors checkpoint")  # fmt: skip
    added = [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": each != _OWN}
        for number, (text, each) in enumerate(zip(tokens, kinds, strict=True))
        if each in (_CONTROL, _OWN) and text
    ]  # fmt: skip
    vocab = {text: number for number, text in enumerate(tokens)}
    pipeline["model"]["vocab"] = vocab
    begin = token_id(file, "bos") if _begins(file, kind) else None
    return pipeline | {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "post_processor": None if begin is None else _beginning(tokens[begin], begin),
    }  # fmt: skip


def tokenizer_config_of(file: GgufFile) -> dict[str, Any]:
    """tokenizer_config.json: names of special tokens, and chat templates. Raises ModelError."""
    tokens = _tokens(file)
    ids = {name: token_id(file, there) for there, name in _NAMED.items()}
    config: dict[str, Any] = {name: tokens[i] for name, i in ids.items() if i is not None}
    template = file.text("tokenizer.chat_template")
    others = file.entries("tokenizer.chat_templates", str)
    named = {each: file.text(f"tokenizer.chat_template.{each}") for each in islice(others, 16)}
    if named and template is not None:
        named["default"] = template
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in named.items() if text is not None
        ]
    elif template is not None:
        config["chat_template"] = template
    return config


def _tokens(file: GgufFile) -> list[str]:
    tokens = tokens_of(file)
    if len(set(tokens)) != len(tokens):
        raise file.refused(f"{_KEY}.tokens holds the same text twice: download the file again")
    rows = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0
    if len(tokens) > rows:
        raise file.refused(f"{_KEY}.tokens has {len(tokens)} entries, token_embd.weight {rows} rows: "
                           "the two are of different models")  # fmt: skip
    return tokens


def _begins(file: GgufFile, kind: str) -> bool:
    """Whether a text begins with BOS."""
    usual = kind == "llama" or file.text(f"{_KEY}.pre") in _BEGINS
    return file.flag(f"{_KEY}.add_bos_token", usual)


def _beginning(text: str, number: int) -> dict[str, Any]:
    first = {"SpecialToken": {"id": text, "type_id": 0}}
    one, two = ({"Sequence": {"id": each, "type_id": 0}} for each in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [first, one],
        "pair": [first, one, first, two],
        "special_tokens": {text: {"id": text, "ids": [number], "tokens": [text]}},
    }


# --- byte-level BPE ---


def _bytewise(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    rule = file.text(f"{_KEY}.pre")
    if rule not in _SPLITS:
        raise file.refused(f"{_KEY}.pre is {rule!r}: of the rules that split texts {', '.join(_SPLITS)} "
                           "are served; give the model's safetensors checkpoint")  # fmt: skip
    pattern = _SPLITS[rule]
    steps: list[dict[str, Any]] = []
    if pattern is None:
        steps.append({"type": "Digits", "individual_digits": True})
    elif pattern:
        steps.append({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
                      "invert": False})  # fmt: skip
    steps.append(_byte_level(use_regex=not pattern))
    return {
        "normalizer": {"type": "NFC"} if pattern == _QWEN else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": _byte_level(use_regex=True),
        "model": _bpe(_merges(file, set(tokens)), ignore_merges=rule in _WHOLE),
    }


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _merges(file: GgufFile, known: set[str]) -> list[list[str]]:
    key = f"{_KEY}.merges"
    merges = []
    for number, each in enumerate(file.entries(key, str)):
        one, _, other = each.partition(" ")
        if one not in known or other not in known or one + other not in known:
            raise file.refused(f"{key}: entry {number} does not join two tokens to one that is there")
        merges.append([one, other])
    if not merges:
        raise file.refused(f"{key} is missing: download another file")
    return merges


def _bpe(merges: list[list[str]], **more: Any) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "merges": merges, **more,
    }  # fmt: skip


# --- SentencePiece ---


def _sentencepiece(file: GgufFile, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    scores = file.entries(f"{_KEY}.scores", (int, float))
    if len(scores) != len(tokens):
        raise file.refused(f"{_KEY}.scores has {len(scores)} entries for {len(tokens)} tokens: download "
                           "another file")  # fmt: skip
    prefix = file.flag(f"{_KEY}.add_space_prefix", True)
    spaces: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, spaces] if prefix else [spaces]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = token_id(file, "unknown")
    if unknown is None:
        unknown = kinds.index(_UNKNOWN) if _UNKNOWN in kinds else None
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            _scored_merges(tokens, scores, kinds),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in kinds,
        ),
    }


def _scored_merges(tokens: list[str], scores: list[float], kinds: list[int]) -> list[list[str]]:
    """Each way to join two pieces to a third, the best piece first (as `transformers` derives them)."""
    ids = {
        text: number
        for number, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind not in (_UNKNOWN, _CONTROL, _BYTE) and len(text) <= _LONGEST
    }
    found: list[tuple[float, int, int, list[str]]] = []
    for text, number in ids.items():
        pairs = [(text[:at], text[at:]) for at in range(1, len(text))]
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(scores[number], len(a), len(b), [a, b]) for a, b in known]
    found.sort(key=lambda each: each[:3], reverse=True)
    return [pair for *_, pair in found]


_LONGEST = 256  # characters of a piece that is joined from others
