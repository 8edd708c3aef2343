"""Headers of GGUF files: what `gguf` writes is read, and whatever is wrong with a file is named."""

# ruff: noqa: E501 - the table of files reads line by line

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from ramify.protocol.checkpoint import gguf
from ramify.protocol.checkpoint.files import json_files
from ramify.protocol.checkpoint.gguf import read_gguf
from ramify.protocol.errors import ModelError

U32, F32, BOOL, TEXT, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def field(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def number(key: str, value: int) -> bytes:
    return field(key, U32, struct.pack("<I", value))


def array(key: str, kind: int, count: int, rest: bytes) -> bytes:
    return field(key, ARRAY, struct.pack("<IQ", kind, count) + rest)


def texts(key: str, values: list[str]) -> bytes:
    return array(key, TEXT, len(values), b"".join(map(text, values)))


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sides = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sides + struct.pack("<IQ", kind, offset)


def header(fields: list[bytes], tensors: list[bytes], /, **changes: int) -> bytes:
    given = {"version": 3, "tensors": len(tensors), "fields": len(fields)} | changes
    counts = struct.pack("<IQQ", given["version"], given["tensors"], given["fields"])
    raw = b"GGUF" + counts + b"".join(fields) + b"".join(tensors)
    return raw + bytes(-len(raw) % 32)


FIELDS = {
    "general.architecture": field("general.architecture", TEXT, text("llama")),
    "llama.block_count": number("llama.block_count", 1),
    "llama.context_length": number("llama.context_length", 64),
    "llama.embedding_length": number("llama.embedding_length", 32),
    "llama.feed_forward_length": number("llama.feed_forward_length", 32),
    "llama.attention.head_count": number("llama.attention.head_count", 2),
    "llama.attention.layer_norm_rms_epsilon": field(
        "llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)
    ),
    "tokenizer.ggml.model": field("tokenizer.ggml.model", TEXT, text("gpt2")),
    "tokenizer.ggml.pre": field("tokenizer.ggml.pre", TEXT, text("qwen2")),
    "tokenizer.ggml.tokens": texts("tokenizer.ggml.tokens", ["a", "b", "ab", "<s>"]),
    "tokenizer.ggml.token_type": array(
        "tokenizer.ggml.token_type", 5, 4, struct.pack("<4i", 1, 1, 1, 3)
    ),
    "tokenizer.ggml.merges": texts("tokenizer.ggml.merges", ["a b"]),
    "tokenizer.ggml.eos_token_id": number("tokenizer.ggml.eos_token_id", 3),
}
DATA = bytes(4 * 4 * 32)
TENSOR = tensor("token_embd.weight", [32, 4])


def whole(
    *more: bytes, tensors: list[bytes] | None = None, data: bytes = DATA, **replaced: bytes
) -> bytes:
    """A file that can be read, with fields of other bytes (dots are two underscores), or with none."""
    given = {name.replace("__", "."): raw for name, raw in replaced.items()}
    fields = [each for each in (FIELDS | given).values() if each]
    return header([*fields, *more], [TENSOR] if tensors is None else tensors) + data


def read_all(path: Path, raw: bytes) -> dict[str, Any]:
    path.write_bytes(raw)
    files = json_files(path)
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    return {name: files(name) for name in names}


def test_a_file_of_the_package(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    values = {"a": 1, "b": [1.5, 2.5], "c": "text", "d": True, "e": ["x", "y"], "f": -3}
    writer.add_uint32("a", 1)
    writer.add_array("b", [1.5, 2.5])
    writer.add_string("c", "text")
    writer.add_bool("d", True)
    writer.add_array("e", ["x", "y"])
    writer.add_int64("f", -3)
    writer.add_custom_alignment(64)
    arrays = {"one": np.ones((3, 5), np.float32), "two": np.arange(8, dtype=np.float16)}
    for name, each in arrays.items():
        writer.add_tensor(name, each)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "a.gguf")
    assert values.items() <= file.metadata.items()
    raw = (tmp_path / "a.gguf").read_bytes()
    for name, each in arrays.items():
        place = file.tensors[name]
        assert place.shape == each.shape
        assert raw[place.offset : place.offset + place.bytes] == each.tobytes()


def test_the_base_of_these_tests_is_read(tmp_path: Path) -> None:
    found = read_all(tmp_path / "a.gguf", whole())
    assert found["config.json"]["architectures"] == ["LlamaForCausalLM"]
    assert found["config.json"]["num_key_value_heads"] == 2
    assert found["generation_config.json"] == {"eos_token_id": [3]}
    assert found["tokenizer_config.json"] == {"eos_token": "<s>"}
    assert found["tokenizer.json"]["model"]["merges"] == [["a", "b"]]


def test_a_header_without_its_arrays_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(whole())
    file = read_gguf(path)
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "_Header", None)
        small = read_gguf(path, arrays=False)
    lists = {name for name, value in file.metadata.items() if isinstance(value, list)}
    assert (small.tensors, file.metadata.keys() - small.metadata.keys()) == (file.tensors, lists)
    path.write_bytes(whole(number("new", 1)))
    assert read_gguf(path, arrays=False).metadata["new"] == 1


SPM = field("tokenizer.ggml.model", TEXT, text("llama"))
# what the message names, and the file
MALFORMED: dict[str, tuple[tuple[str, ...], Callable[[], bytes]]] = {
    "empty": (("cannot be read", "GGUF file"), lambda: b""),
    "another format": (("no GGUF file",), lambda: b"PK\x03\x04" + bytes(64)),
    "cut in the version": (("version", "cut short"), lambda: b"GGUF\x03"),
    "version 1": (("version 1", "convert"), lambda: header([], [], version=1)),
    "big-endian": (("version", "big-endian"), lambda: header([], [], version=3 << 24)),
    "too many fields": (("metadata_kv_count", "at most"), lambda: header([], [], fields=1 << 40)),
    "too many tensors": (("tensor_count", "at most"), lambda: header([], [], tensors=1 << 63)),
    "fields that are not there": (("metadata 3 of 5", "cut short"), lambda: header(
        [number("a", 1), number("b", 2)], [], fields=5)[:60]),
    "a long key": (("metadata 1 of 1", "300 bytes"), lambda: header([number("k" * 300, 1)], [])),
    "a key that never ends": (("metadata 1 of 1", "bytes"), lambda: header(
        [struct.pack("<Q", 1 << 60)], [])),
    "a text that never ends": (("general.name", "bytes"), lambda: header(
        [field("general.name", TEXT, struct.pack("<Q", 1 << 62))], [])),
    "a text beyond the end": (("general.name", "cut short"), lambda: header(
        [field("general.name", TEXT, struct.pack("<Q", 4000))], [])),
    "a text that is none": (("general.name", "UTF-8"), lambda: header(
        [field("general.name", TEXT, text(b"\xff\xfe"))], [])),
    "a type that there is not": (("general.x", "type is 77"), lambda: header([field("general.x", 77, b"")], [])),
    "a list of a type that there is not": (("general.x", "type 50"), lambda: header(
        [array("general.x", 50, 1, b"")], [])),
    "a list of lists": (("general.x", "type 9"), lambda: header([array("general.x", ARRAY, 1, b"")], [])),
    "a list without end": (("general.x", "entries"), lambda: header([array("general.x", U64, 1 << 61, b"")], [])),
    "lists without end together": (("general.y", "all arrays together"), lambda: header(
        [array("general.x", BOOL, 3 << 20, bytes(3 << 20)), array("general.y", BOOL, 2 << 20, b"")], [])),
    "a list beyond the end": (("general.x", "cut short"), lambda: header(
        [array("general.x", U64, 1 << 20, b"")], [])),
    "texts beyond the end": (("general.x", "cut short"), lambda: header(
        [array("general.x", TEXT, 1 << 20, b"")], [])),
    "a field twice": (("general.x", "twice"), lambda: header([number("general.x", 1)] * 2, [])),
    "an odd alignment": (("general.alignment", "power of 2"), lambda: whole(number("general.alignment", 24))),
    "an alignment with a fraction": (("general.alignment", "32.0"), lambda: whole(
        field("general.alignment", F32, struct.pack("<f", 32)))),
    "no dimensions": (("tensor t", "dimensions"), lambda: whole(tensors=[tensor("t", [])])),
    "too many dimensions": (("tensor t", "5 dimensions"), lambda: whole(tensors=[tensor("t", [1] * 5)])),
    "an empty side": (("tensor t", "shape"), lambda: whole(tensors=[tensor("t", [32, 0])])),
    "a huge side": (("tensor t", "shape"), lambda: whole(tensors=[tensor("t", [32, 1 << 62])])),
    "a huge tensor": (("tensor t", "cut short"), lambda: whole(tensors=[tensor("t", [1 << 30] * 3)])),
    "a type that is not served": (("tensor t", "Q2_K", "Q4_K"), lambda: whole(tensors=[tensor("t", [256], 10)])),
    "a type that nobody knows": (("tensor t", "99"), lambda: whole(tensors=[tensor("t", [256], 99)])),
    "half a block": (("tensor t", "whole blocks of Q4_0"), lambda: whole(tensors=[tensor("t", [40, 2], 2)])),
    "an odd offset": (("tensor t", "multiple of 32"), lambda: whole(tensors=[tensor("t", [4], 0, 4)])),
    "tensors that overlap": (("tensor b", "overlaps"), lambda: whole(
        tensors=[tensor("a", [32]), tensor("b", [32], 0, 96)])),
    "an offset beyond the end": (("tensor t", "cut short"), lambda: whole(
        tensors=[tensor("t", [32], 0, 1 << 40)])),
    "data cut short": (("tensor token_embd.weight", "cut short"), lambda: whole()[:-1]),
    "a tensor twice": (("tensor token_embd.weight", "twice"), lambda: whole(tensors=[TENSOR, TENSOR])),
    "no architecture": (("general.architecture", "granite"), lambda: whole(general__architecture=b"")),
    "an architecture that is not served": (("general.architecture", "'mamba'"), lambda: whole(
        general__architecture=field("general.architecture", TEXT, text("mamba")))),
    "no embedding": (("token_embd.weight is missing",), lambda: whole(tensors=[tensor("t", [32])])),
    "no layers": (("llama.block_count",), lambda: whole(llama__block_count=number("llama.block_count", 0))),
    "too many layers": (("llama.block_count",), lambda: whole(
        llama__block_count=number("llama.block_count", 1 << 30))),
    "a number that is a text": (("llama.context_length", "'x'"), lambda: whole(
        llama__context_length=field("llama.context_length", TEXT, text("x")))),
    "no heads": (("llama.attention.head_count",), lambda: whole(llama__attention__head_count=b"")),
    "unequal layers": (("llama.feed_forward_length", "layer"), lambda: whole(
        llama__feed_forward_length=array("llama.feed_forward_length", U32, 2, struct.pack("<2I", 3, 4)))),
    "heads that turn in part": (("llama.rope.dimension_count",), lambda: whole(
        number("llama.rope.dimension_count", 8))),
    "heads that are far too wide": (("llama.attention.key_length", "4096"), lambda: whole(
        number("llama.attention.key_length", 1 << 30))),
    "experts that are not there": (("llama.expert_count is 8", "ffn_up_exps", "missing"), lambda: whole(
        number("llama.expert_count", 8))),
    "another number of experts": (("llama.expert_count is 8", "[2, 4, 8]"), lambda: whole(
        number("llama.expert_count", 8),
        tensors=[TENSOR, tensor("blk.0.ffn_up_exps.weight", [8, 4, 2], 0, 512)], data=bytes(1024))),
    "far too many experts": (("llama.expert_count", "1024"), lambda: whole(
        number("llama.expert_count", 1 << 30))),
    "experts in groups": (("llama.expert_group_count is 4", "safetensors"), lambda: whole(
        number("llama.expert_count", 2), number("llama.expert_group_count", 4),
        tensors=[TENSOR, tensor("blk.0.ffn_up_exps.weight", [8, 4, 2], 0, 512)], data=bytes(1024))),
    "several files": (("split.count", "--merge"), lambda: whole(number("split.count", 2))),
    "odd scaling": (("llama.rope.scaling.type", "yarn"), lambda: whole(
        field("llama.rope.scaling.type", TEXT, text("su")))),
    "odd divisors": (("rope_freqs.weight", "8"), lambda: whole(
        tensors=[TENSOR, tensor("rope_freqs.weight", [16], 0, 512)], data=bytes(1024))),
    "no tokens": (("tokenizer.ggml.tokens", "no tokenizer"), lambda: whole(tokenizer__ggml__tokens=b"")),
    "more tokens than rows": (("tokenizer.ggml.tokens has 5", "4 rows"), lambda: whole(
        tokenizer__ggml__tokens=texts("tokenizer.ggml.tokens", list("abcde")))),
    "a token twice": (("tokenizer.ggml.tokens", "twice"), lambda: whole(
        tokenizer__ggml__tokens=texts("tokenizer.ggml.tokens", list("abca")))),
    "tokens that are numbers": (("tokenizer.ggml.tokens", "list"), lambda: whole(
        tokenizer__ggml__tokens=array("tokenizer.ggml.tokens", U32, 1, bytes(4)))),
    "kinds of other tokens": (("tokenizer.ggml.token_type", "3 entries for 4"), lambda: whole(
        tokenizer__ggml__token_type=array("tokenizer.ggml.token_type", 5, 3, bytes(12)))),
    "a merge of unknown pieces": (("tokenizer.ggml.merges", "entry 0"), lambda: whole(
        tokenizer__ggml__merges=texts("tokenizer.ggml.merges", ["a z"]))),
    "no merges": (("tokenizer.ggml.merges", "missing"), lambda: whole(tokenizer__ggml__merges=b"")),
    "an unknown rule": (("tokenizer.ggml.pre", "'odd'", "qwen2"), lambda: whole(
        tokenizer__ggml__pre=field("tokenizer.ggml.pre", TEXT, text("odd")))),
    "an unknown tokenizer": (("tokenizer.ggml.model", "'bert'"), lambda: whole(
        tokenizer__ggml__model=field("tokenizer.ggml.model", TEXT, text("bert")))),
    "pieces without scores": (("tokenizer.ggml.scores", "0 entries for 4"), lambda: whole(
        tokenizer__ggml__model=SPM)),
    "an end that is no token": (("tokenizer.ggml.eos_token_id is 9", "4 tokens"), lambda: whole(
        tokenizer__ggml__eos_token_id=number("tokenizer.ggml.eos_token_id", 9))),
    "a template that is no text": (("tokenizer.chat_template",), lambda: whole(
        number("tokenizer.chat_template", 1))),
    "a flag that is a number": (("tokenizer.ggml.add_bos_token", "true or false"), lambda: whole(
        number("tokenizer.ggml.add_bos_token", 1))),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_wrong_is_named(case: str, tmp_path: Path) -> None:
    words, raw = MALFORMED[case]
    path = tmp_path / "wrong.gguf"
    with pytest.raises(ModelError) as caught:
        read_all(path, raw())
    for word in (str(path), *words):
        assert word in caught.value.message


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    raw = whole()
    for size in range(0, len(raw), 7):
        with pytest.raises(ModelError):
            read_all(tmp_path / "cut.gguf", raw[:size])


def test_bytes_that_flip_end_in_an_error_or_in_a_file(tmp_path: Path) -> None:
    """Nothing else is raised, and nothing large is made of a few bytes."""
    raw, random = whole(), np.random.default_rng(0)
    for _ in range(400):
        wrong = bytearray(raw)
        for at in random.integers(0, len(raw) - len(DATA), 3):
            wrong[at] = random.integers(0, 256)
        with suppress(ModelError):
            read_all(tmp_path / "flipped.gguf", bytes(wrong))
