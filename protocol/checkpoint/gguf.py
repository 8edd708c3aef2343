"""Reads the header of a GGUF file: its metadata, and where each tensor lies.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count, length, type and
offset is checked before work is done with it; a fault raises ModelError, which names the field. It does
not know what metadata and tensors mean. The package `gguf` reads such files too, and checks nothing.
"""

import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ramify.protocol.errors import ModelError

_MOST_FIELDS = 1 << 16  # of metadata; likewise of tensors
_MOST_ENTRIES = (
    1 << 22
)  # of all arrays together: tokens, kinds, scores and merges of large ones are 1.3M
_MOST_TEXTS = 1 << 28  # bytes of all texts together
_MOST_NAME = 256  # bytes
_MOST_TEXT = 1 << 22  # bytes: a chat template
_MOST_SIDE = 1 << 31  # of a tensor
_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


class BlockType(NamedTuple):
    """How a tensor's numbers are written: blocks of so many, of so many bytes."""

    name: str
    numbers: int
    bytes: int


_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
_UNSERVED = {  # for the message
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """`shape`: rows first, as torch has it; `offset`: from the beginning of the file, in bytes."""

    type: BlockType
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What the header of the file at `path` says."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]

    def refused(self, told: str) -> ModelError:
        """To be raised."""
        return ModelError(f"{self.path}: {told}")

    def number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        """A number of the metadata. Raises ModelError if it is none, or out of bounds."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise self.refused(f"{key} is {_shown(value)}: must be a number from {least} to {most}")
        return value

    def whole(self, key: str, most: int = _MOST_SIDE, default: int | None = None, least: int = 1) -> int:
        """A whole number of the metadata, 1 or more. Raises ModelError."""
        value = self.number(key, least, most, default)
        if not isinstance(value, int):
            raise self.refused(f"{key} is {_shown(value)}: must be a whole number")
        return value

    def text(self, key: str) -> str | None:
        """A text of the metadata. Raises ModelError if it is something else."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refused(f"{key} is {_shown(value)}: must be a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.refused(f"{key} is {_shown(value)}: must be true or false")
        return value

    def entries(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        """An array of the metadata, [] if it is not there. Raises ModelError."""
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value[:1]):
            raise self.refused(f"{key} is {_shown(value)}: must be a list of another type")
        return value

    def floats(self, name: str, most: int) -> list[float] | None:
        """The numbers of a small float32 tensor, None if the file has none of that name."""
        place = self.tensors.get(name)
        if place is None:
            return None
        if place.type.name != "F32" or len(place.shape) != 1 or place.shape[0] > most:
            raise self.refused(f"{name} must be up to {most} numbers of type F32")
        with self.path.open("rb") as file:
            file.seek(place.offset)
            return list(struct.unpack(f"<{place.shape[0]}f", file.read(place.bytes)))


def read_gguf(path: Path, arrays: bool = True) -> GgufFile:
    """Read the header. Raises ModelError that names the field and says what to do.

    `arrays` False: those of the metadata, which are most of it, are left out. What is then left of the
    file that was read last is kept, and told again while the file is as it was.
    """
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            key = path, state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
            known = None if arrays else _kept.get(key)
            if known is not None:
                return known
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                found = _Header(path, data, arrays).read()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelError(f"{path} cannot be read ({error}): give a GGUF file") from None
    small = {name: value for name, value in found.metadata.items() if not isinstance(value, list)}
    _kept.clear()
    _kept[key] = known = GgufFile(path, small, found.tensors)
    return found if arrays else known


_kept: dict[tuple[Path, int, int, int, int], GgufFile] = {}


class _Header:
    def __init__(self, path: Path, data: mmap.mmap, arrays: bool) -> None:
        self._path, self._data, self._size, self._texts = path, data, len(data), arrays
        self._at = 0
        self._entries, self._bytes = _MOST_ENTRIES, _MOST_TEXTS  # that may still come
        self._field = "the header"  # what is being read, for errors

    def read(self) -> GgufFile:
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{self._path} is no GGUF file: it does not begin with GGUF; give a model "
                             "folder, or a file that ends in .gguf")  # fmt: skip
        self._at = 4
        version = self._number("I", "version")
        if version not in (2, 3):
            big = version and not version & 0xFFFF
            why = "it is big-endian" if big else f"version {version} is not 2 or 3"
            raise self._fault(f"{why}: convert the model again with a newer llama.cpp")
        tensors = self._count("tensor_count")
        fields = self._count("metadata_kv_count")
        metadata: dict[str, Any] = {}
        for number in range(fields):
            self._field = f"metadata {number + 1} of {fields}"
            key = self._text(_MOST_NAME)
            if key in metadata:
                raise self._fault(f"{key} is there twice: download it again")
            self._field = key
            metadata[key] = self._value(self._number("I"))
        self._field = "general.alignment"
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment not in [1 << bits for bits in range(3, 17)]:
            raise self._fault(f"it is {_shown(alignment)}: must be a power of 2 from 8 to 65536")
        places = dict(self._tensor(number, tensors) for number in range(tensors))
        if len(places) < tensors:
            raise self._fault("a tensor's name is there twice: download it again")
        start = -(-self._at // alignment) * alignment
        return GgufFile(self._path, metadata, self._placed(places, start, alignment))

    def _tensor(self, number: int, count: int) -> tuple[str, TensorPlace]:
        """Its offset is from where the data begin."""
        self._field = f"tensor {number + 1} of {count}"
        name = self._text(_MOST_NAME)
        self._field = f"tensor {name}"
        sides = self._number("I")
        if not 1 <= sides <= 4:
            raise self._fault(f"it has {sides} dimensions: must have 1 to 4")
        shape = [self._number("Q") for _ in range(sides)]
        if not all(1 <= side < _MOST_SIDE for side in shape):
            raise self._fault(f"its shape is {shape}: each must be from 1 to {_MOST_SIDE - 1}")
        kind = self._number("I")
        if kind not in _TYPES:
            known = ", ".join(each.name for each in _TYPES.values())
            raise self._fault(f"its type is {_UNSERVED.get(kind, kind)}, which is not served: give a "
                              f"file in {known}")  # fmt: skip
        block, numbers = _TYPES[kind], 1
        for side in shape:
            numbers *= side
        if shape[0] % block.numbers:
            raise self._fault(f"its rows of {shape[0]} are not whole blocks of {block.name}, "
                              f"{block.numbers} each: download it again")  # fmt: skip
        size = numbers // block.numbers * block.bytes
        return name, TensorPlace(block, tuple(reversed(shape)), self._number("Q"), size)

    def _placed(self, found: dict[str, TensorPlace], start: int, step: int) -> dict[str, TensorPlace]:
        """With offsets from the beginning of the file, which lie in it and apart."""
        end, places = start, {}
        for name, place in sorted(found.items(), key=lambda item: item[1].offset):
            self._field = f"tensor {name}"
            offset = start + place.offset
            if place.offset % step:
                raise self._fault(f"its offset {place.offset} is not a multiple of {step}")
            if offset < end:
                raise self._fault("it overlaps the one before it: download it again")
            end = offset + place.bytes
            if end > self._size:
                raise self._fault(f"it ends at byte {end}, the file at {self._size}: the download was "
                                  "cut short, download it again")  # fmt: skip
            places[name] = TensorPlace(place.type, place.shape, offset, place.bytes)
        return places

    # --- values ---

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text(_MOST_TEXT)
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise self._fault(f"its type is {kind}: must be from 0 to 12")
        inner, count = self._number("I"), self._number("Q")
        if count > self._entries:
            raise self._fault(
                f"it has {count} entries: all arrays together have {_MOST_ENTRIES} at most"
            )
        self._entries -= count
        if inner == _TEXT:
            self._reach(8 * count)
            return self._text_array(count)
        if inner not in _SCALARS:
            raise self._fault(f"its entries are of type {inner}: must be numbers or texts")
        shape = struct.Struct(f"<{count}{_SCALARS[inner]}")
        at = self._reach(shape.size)
        self._at += shape.size
        return list(shape.unpack_from(self._data, at))

    def _text_array(self, count: int) -> list[str]:
        """As `_text`, of many: without its calls, which were most of a start."""
        data, at, end = self._data, self._at, self._size
        least = end - min(end - at, self._bytes + 8 * count)  # of what is left, when too much is read
        found: list[bytes] = []
        for _ in range(count):
            begin = at + 8
            (size,) = _LENGTH(data, at) if begin <= end else (end,)
            at = begin + size
            if size > _MOST_TEXT or end - at < least:
                return [self._text(_MOST_TEXT) for _ in range(count)]  # says what is wrong
            if self._texts:
                found.append(data[begin:at])
        self._bytes -= at - self._at - 8 * count
        self._at = at
        try:
            return [text.decode("utf-8") for text in found]
        except UnicodeDecodeError:
            raise self._fault("a text is not UTF-8: download it again") from None

    def _text(self, most: int) -> str:
        at = self._reach(8)
        (size,) = _LENGTH(self._data, at)
        self._at = at + 8
        if size > most:
            raise self._fault(f"a text has {size} bytes: at most {most} are read")
        if size > self._bytes:
            raise self._fault(f"all texts together have {_MOST_TEXTS} bytes at most")
        self._bytes -= size
        at = self._reach(size)
        self._at = at + size
        try:
            return self._data[at : at + size].decode("utf-8")
        except UnicodeDecodeError:
            raise self._fault("a text is not UTF-8: download it again") from None

    def _count(self, field: str) -> int:
        count: int = self._number("Q", field)
        if count > _MOST_FIELDS:
            raise self._fault(f"it is {count}: at most {_MOST_FIELDS}")
        return count

    def _number(self, kind: str, field: str | None = None) -> Any:
        if field is not None:
            self._field = field
        shape = struct.Struct(f"<{kind}")
        at = self._reach(shape.size)
        self._at += shape.size
        return shape.unpack_from(self._data, at)[0]

    def _reach(self, size: int) -> int:
        """Where the next `size` bytes begin. Raises ModelError if the file ends before they do."""
        if size > self._size - self._at:
            raise self._fault("the file ends within it: the download was cut short, download it again")
        return self._at

    def _fault(self, told: str) -> ModelError:
        return ModelError(f"{self._path}: {self._field}: {told}")


_LENGTH: Callable[[Any, int], tuple[int]] = struct.Struct("<Q").unpack_from


def _shown(value: Any) -> str:
    text = repr(value[:3] if isinstance(value, list) else value)
    return text if len(text) < 60 else f"{text[:60]}..."
