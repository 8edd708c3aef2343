"""Blocks of KV in a file, and the index that says which: what a restart finds again.

    DIR/kv-N.blocks   places of equal size, one block each
    DIR/kv-N.index    64 bytes that say what the blocks are, then a record of 64 bytes for each place

A record has the key, the seal and a CRC of the block, the turn in which it was written, a note of
at most 20 bytes, and a CRC of itself. A block is written between two writes of its record: empty,
block, record. So whenever a process ends, each record that is whole names a block that is. What a
machine loses besides shows in the CRCs, and is dropped when it is read. N is one that no other server
has locked: of blocks that are wanted, or else the first, whose blocks go.

Does not know threads, or which blocks are worth a place.
"""

import fcntl
import os
import struct
import zlib
from pathlib import Path

import numpy as np

from ramify.gpu.kv.host_memory import RECORD, Bytes
from ramify.protocol.errors import ConfigError

MOST_PLACES = 1 << 20
MOST_FILES = 64  # of the servers that share a folder
_HEADER = struct.Struct("<8sIQ32sI")
_RECORD = struct.Struct("<16sqIQB20sI")
_SIZE = RECORD  # of both
_MAGIC, _VERSION = b"RAMIFYKV", 2
_EMPTY = bytes(_SIZE)

Record = tuple[bytes, int, int, int, bytes]  # key, seal, CRC of the block, turn, note


class DiskFile:
    """`found`: the keys and places of the blocks that were there, the oldest first; `notes`: of some.
    `renewed`: there were blocks of another stamp, which are gone.
    """

    def __init__(self, folder: Path, stamp: str, size: int, most_bytes: int) -> None:
        """Blocks of `size` bytes with `stamp`, in at most `most_bytes`; those of another stamp go.

        Raises ConfigError if the folder cannot be used, or holds not one block.
        """
        self.size = size
        self.places = min(most_bytes // (size + _SIZE), MOST_PLACES)
        if not self.places:
            raise ConfigError(
                f"--kv-disk-bytes {most_bytes}: a block takes {size + _SIZE}; give at least that"
            )
        header = _HEADER.pack(_MAGIC, _VERSION, size, stamp.encode(), 0)[:-4]
        header = (header + zlib.crc32(header).to_bytes(4, "little")).ljust(_SIZE, b"\0")
        try:
            self.name, self.index = _locked(folder, header)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._blocks = os.open(folder / f"{self.name}.blocks", flags, 0o600)
            for descriptor in (self.index, self._blocks):  # that were there: a copy may be open to all
                os.fchmod(descriptor, 0o600)
            records = self._opened(header)
        except OSError as error:
            raise ConfigError(f"--kv-disk {folder}: {error}; give a folder to write to") from error
        self._turn = max((record[3] for _, record in records), default=0)
        records.sort(key=lambda each: each[1][3])
        self.found = list({record[0]: place for place, record in records}.items())
        self.notes = {record[0]: record[4] for _, record in records if record[4]}

    def write(self, place: int, key: bytes, seal: int, block: Bytes, note: bytes = b"") -> None:
        """Put a block at a place, which has none while that lasts. Raises OSError.

        So it does if the file was removed: a later start would not find it.
        """
        if not os.fstat(self._blocks).st_nlink:
            raise OSError("the file was removed")
        self.put(self.index, _EMPTY, _SIZE * (1 + place))
        self.put(self._blocks, block.data, self.size * place)
        self._turn += 1
        record = _RECORD.pack(key, seal, zlib.crc32(block.data), self._turn, len(note), note, 0)[:-4]
        record += zlib.crc32(record).to_bytes(4, "little")
        self.put(self.index, record.ljust(_SIZE, b"\0"), _SIZE * (1 + place))

    def erase(self, place: int) -> None:
        """Let a place have no block any more. Raises OSError."""
        self.put(self.index, _EMPTY, _SIZE * (1 + place))

    def read(self, place: int, key: bytes, block: Bytes) -> int | None:
        """Read a block into `block`. Its seal; None: it is not there, or not whole. Raises OSError."""
        record = _parsed(os.pread(self.index, _SIZE, _SIZE * (1 + place)))
        if record is None or record[0] != key:
            return None
        length = os.preadv(self._blocks, [block.data], self.size * place)
        return record[1] if length == self.size and zlib.crc32(block.data) == record[2] else None

    def close(self) -> None:
        os.close(self._blocks)
        os.close(self.index)

    def _opened(self, header: bytes) -> list[tuple[int, Record]]:
        """The places with a block of this kind, and their records."""
        was = os.pread(self.index, _SIZE, 0)
        self.renewed = bool(was) and was != header
        if was != header:
            os.ftruncate(self.index, 0)
            os.ftruncate(self._blocks, 0)
            self.put(self.index, header, 0)
            return []
        if os.fstat(self._blocks).st_size > self.places * self.size:  # there were more
            os.ftruncate(self.index, _SIZE * (1 + self.places))
            os.ftruncate(self._blocks, self.size * self.places)
        count = min(self.places, os.fstat(self.index).st_size // _SIZE - 1)
        records: list[tuple[int, Record]] = []
        for first in range(0, count, 1024):
            part = os.pread(self.index, _SIZE * min(1024, count - first), _SIZE * (1 + first))
            for at in range(0, len(part), _SIZE):
                record = _parsed(part[at : at + _SIZE])
                if record is not None:
                    records.append((first + at // _SIZE, record))
        return records

    @staticmethod
    def put(descriptor: int, data: bytes | memoryview, offset: int) -> None:
        with memoryview(data) as left:
            while left.nbytes:
                done = os.pwrite(descriptor, left, offset)
                left, offset = left[done:], offset + done


def empty_block(size: int) -> Bytes:
    return np.zeros(size, dtype=np.uint8)


def _locked(folder: Path, header: bytes) -> tuple[str, int]:
    """The name of a file that no other process uses, and its index, locked. Raises OSError.

    One with this header, if there is one: servers of several models that share a folder find their own
    again, in whatever order they start.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    first: tuple[str, int] | None = None
    for number in range(MOST_FILES):
        path = folder / f"kv-{number}.index"
        if first is not None and not path.exists():
            break
        index = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(index)
            continue
        if os.pread(index, _SIZE, 0) == header:
            if first is not None:
                os.close(first[1])
            return path.stem, index
        if first is None:
            first = path.stem, index
        else:
            os.close(index)
    if first is None:
        raise OSError(f"{MOST_FILES} servers use it already")
    return first


def _parsed(data: bytes) -> Record | None:
    """A record; None: there is none, or it is not whole."""
    if len(data) < _SIZE or data == _EMPTY:
        return None
    key, seal, crc, turn, length, note, own = _RECORD.unpack_from(data)
    whole = zlib.crc32(data[: _RECORD.size - 4]) == own
    return (key, seal, crc, turn, note[:length]) if whole else None
