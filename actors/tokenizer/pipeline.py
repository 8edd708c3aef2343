"""What a `tokenizers` pipeline does, by its parts: the bytes of each id, the space before a text.

Pure. It does not know of chats.
"""

import json
import re
from itertools import accumulate
from typing import Any, Literal

import msgspec
import tokenizers
import tokenizers.models

from ramify.protocol.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class BytesBound(msgspec.Struct, frozen=True):
    """How many bytes of text one token can stand for. 0: any number.

    `strips`: white space beside tokens may be swallowed, and does not count. `forms`: the Unicode
    normal forms that texts are brought into, which makes some of them shorter.
    """

    bytes: int
    strips: bool
    forms: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ()


_GROWS = {"Prepend", "ByteLevel"}  # normalizers that never shorten a text
COMPOSED = 4  # the most that a normal form divides a text's bytes by: U+1D400 is A in NFKC


def bytes_bound(backend: tokenizers.Tokenizer, table: list[bytes]) -> BytesBound:
    added = backend.get_added_tokens_decoder().values()
    longest = max(max(map(len, table), default=0), *(len(t.content.encode()) for t in added), 4)
    strips = any(token.lstrip or token.rstrip for token in added)
    model = backend.model
    kept = isinstance(model, tokenizers.models.BPE)
    bytewise = (kept and model.byte_fallback) or '"ByteLevel"' in json.dumps(_state(backend.decoder))
    if not bytewise and (not kept or model.fuse_unk):
        return BytesBound(0, strips)  # one unknown token may stand for a whole word or text
    forms: list[Literal["NFC", "NFD", "NFKC", "NFKD"]] = []
    for step in _steps(_state(backend.normalizer)):
        kind = step.get("type")
        if kind in ("NFC", "NFD", "NFKC", "NFKD"):
            forms.append(kind)
        elif kind == "Strip":
            strips = True
        elif kind == "Replace":
            pattern = step.get("pattern", {}).get("String")
            if pattern is None or len(pattern.encode()) > len(step.get("content", "").encode()):
                return BytesBound(0, strips)
        elif kind not in _GROWS:
            return BytesBound(0, strips)
    return BytesBound(longest, strips, tuple(forms))


def _steps(normalizer: Any) -> list[dict[str, Any]]:
    """The normalizers of a sequence, one after the other."""
    if normalizer is None:
        return []
    if normalizer.get("type") == "Sequence":
        return [step for part in normalizer["normalizers"] for step in _steps(part)]
    return [normalizer]


def _state(component: Any) -> Any:
    """The JSON that a component of a `tokenizers` pipeline serializes to; None for None."""
    return None if component is None else json.loads(component.__getstate__())


def bytes_of_ids(backend: tokenizers.Tokenizer, special: frozenset[int], at_least: int) -> list[bytes]:
    """The bytes of each id: b"" for control tokens and ids without a token."""
    vocab = backend.get_vocab(with_added_tokens=False)
    added = backend.get_added_tokens_decoder()
    table = [b""] * max(at_least, 1 + max([*vocab.values(), *added], default=-1))
    decoder = json.dumps(_state(backend.decoder), ensure_ascii=False)
    if '"ByteLevel"' in decoder:
        to_bytes = _byte_level_all
    elif '"ByteFallback"' in decoder or "▁" in decoder:
        to_bytes = _sentencepiece_all
    else:
        raise ModelError(
            f"tokenizer.json: decoder {decoder} is not supported (byte-level BPE and SentencePiece are)"
        )
    for i, found in zip(vocab.values(), to_bytes(list(vocab)), strict=True):
        table[i] = found
    for i, entry in added.items():
        table[i] = entry.content.encode()
    for i in special:
        if i < len(table):
            table[i] = b""
    return table


def _gpt2_byte_map() -> dict[int, str]:
    """Character -> character of the byte it stands for (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {b: chr(b) for b in printable} | {256 + n: chr(b) for n, b in enumerate(rest)}


_GPT2_BYTES = _gpt2_byte_map()


def _byte_level_all(tokens: list[str]) -> list[bytes]:
    """Of each; in one go where all are byte-level tokens, whose characters are a byte each."""
    try:
        whole = "".join(tokens).translate(_GPT2_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return list(map(_byte_level, tokens))
    ends = list(accumulate(map(len, tokens)))
    return [whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_GPT2_BYTES).encode("latin-1")
    except UnicodeEncodeError:  # not a byte-level token: `tokenizers` shows it as it is
        return token.encode()


def _sentencepiece_all(tokens: list[str]) -> list[bytes]:
    found = [(token, _BYTE_TOKEN.fullmatch(token)) for token in tokens]
    return [
        bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode() for token, byte in found
    ]


def without_prefix_space(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer without the space it puts before a text; `backend` itself if it puts none."""
    steps = [_state(backend.normalizer), _state(backend.pre_tokenizer)]
    if _prefix_free(steps) == steps:
        return backend
    whole = json.loads(backend.to_str())
    for name in ("normalizer", "pre_tokenizer"):
        whole[name] = _prefix_free(whole[name])
    return tokenizers.Tokenizer.from_str(json.dumps(whole))


def _prefix_free(step: Any) -> Any:
    """A pipeline's JSON with Prepend, Metaspace's and ByteLevel's prefix space taken out."""
    if isinstance(step, list):
        return [_prefix_free(part) for part in step if not _is_prepend(part)]
    if not isinstance(step, dict):
        return step
    if _is_prepend(step):
        return None
    step = {key: _prefix_free(value) for key, value in step.items()}
    if "prepend_scheme" in step:
        step["prepend_scheme"] = "never"
    if "add_prefix_space" in step:
        step["add_prefix_space"] = False
    return step


def _is_prepend(step: Any) -> bool:
    return isinstance(step, dict) and step.get("type") == "Prepend"
