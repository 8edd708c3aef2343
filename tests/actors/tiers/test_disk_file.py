"""Blocks on a disk: found again, dropped where anything is torn, within their bytes."""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramify.actors.tiers.disk_file import DiskFile, empty_block
from ramify.actors.tiers.mover import check_folder
from ramify.protocol.errors import ConfigError

SIZE, STAMP = 256, "a" * 32


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int) -> "np.typing.NDArray[np.uint8]":
    return np.frombuffer(np.random.default_rng(number).bytes(SIZE), dtype=np.uint8)


def opened(folder: Path, stamp: str = STAMP, size: int = SIZE, places: int = 4) -> DiskFile:
    return DiskFile(folder, stamp, size, places * (size + 64))


def filled(folder: Path) -> None:
    file = opened(folder)
    for place in (2, 0, 3):
        file.write(place, key(place), 10 + place, block(place))
    file.close()


def test_what_was_written_is_found_again_the_oldest_first(tmp_path: Path) -> None:
    filled(tmp_path)
    file, into = opened(tmp_path), empty_block(SIZE)
    assert file.found == [(key(2), 2), (key(0), 0), (key(3), 3)]
    assert file.read(3, key(3), into) == 13
    assert (into == block(3)).all()
    assert file.read(3, key(2), into) is None
    assert file.read(1, key(1), into) is None
    file.close()


def test_another_model_s_or_size_s_blocks_go(tmp_path: Path) -> None:
    filled(tmp_path)
    other = opened(tmp_path, stamp="b" * 32)
    assert other.found == []
    other.close()
    filled(tmp_path)
    opened(tmp_path, size=512).close()
    assert os.stat(tmp_path / "kv-0.blocks").st_size == 0


def test_models_that_share_a_folder_find_their_own_in_any_order(tmp_path: Path) -> None:
    stamps = ["a" * 32, "b" * 32, "c" * 32]
    files = [opened(tmp_path, stamp) for stamp in stamps]
    for number, file in enumerate(files):
        file.write(0, key(number), 5, block(number))
    for file in files:
        file.close()
    again = {stamp: opened(tmp_path, stamp) for stamp in stamps[::-1]}
    assert [again[stamp].found for stamp in stamps] == [[(key(number), 0)] for number in range(3)]
    for file in again.values():
        file.close()
    other = opened(tmp_path, "d" * 32)  # no file more: that of the first goes
    assert (other.name, other.found, len(list(tmp_path.iterdir()))) == ("kv-0", [], 6)
    assert other.renewed
    assert not any(file.renewed for file in [*files, *again.values()])
    other.close()


def test_fewer_bytes_keep_what_fits(tmp_path: Path) -> None:
    filled(tmp_path)
    file = opened(tmp_path, places=3)
    assert file.found == [(key(2), 2), (key(0), 0)]
    assert os.stat(tmp_path / "kv-0.blocks").st_size == 3 * SIZE
    file.close()


def test_a_second_server_has_a_file_of_its_own(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    assert (first.name, second.name) == ("kv-0", "kv-1")
    first.close()
    second.close()


def test_flipped_bits_are_never_read(tmp_path: Path) -> None:
    """A thousand of them, in blocks and records."""
    filled(tmp_path)
    dice, into = random.Random(1), empty_block(SIZE)
    for _ in range(1000):
        path = tmp_path / dice.choice(["kv-0.blocks", "kv-0.index"])
        start = 64 if path.suffix == ".index" else 0
        with path.open("r+b") as file:
            at = dice.randrange(start, os.stat(path).st_size)
            file.seek(at)
            (was,) = file.read(1)
            file.seek(at)
            file.write(bytes([was ^ 1 << dice.randrange(8)]))
        disk = opened(tmp_path)
        for number in (0, 2, 3):
            seal = disk.read(number, key(number), into)
            assert seal is None or (seal == 10 + number and (into == block(number)).all())
        disk.close()
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([was]))


def test_a_write_that_is_cut_off_leaves_no_block(tmp_path: Path) -> None:
    filled(tmp_path)
    for pieces in range(3):  # of the three writes, so many are done
        file = opened(tmp_path)
        count, put = 0, file.put

        def cut(descriptor: int, data: bytes, offset: int, pieces: int = pieces, put: Any = put) -> None:
            nonlocal count
            count += 1
            if count > pieces:
                raise OSError("killed")
            put(descriptor, data[: len(data) // (2 if count == 2 else 1)], offset)

        file.put = cut  # type: ignore
        with pytest.raises(OSError, match="killed"):
            file.write(3, key(9), 19, block(9))
        file.close()
        again, into = opened(tmp_path), empty_block(SIZE)
        assert again.read(3, key(9), into) is None
        assert (again.read(3, key(3), into) is None) == (pieces > 0)
        again.close()


def test_what_cannot_be_used_is_said_with_its_mend(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-disk-bytes 100: a block takes 320"):
        DiskFile(tmp_path, STAMP, SIZE, 100)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--kv-disk .*give a folder"):
        opened(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"--kv-disk .*give a folder"):
        check_folder(tmp_path / "file")
    check_folder(tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


def test_others_do_not_read_what_was_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_folder(tmp_path / "new")
    opened(tmp_path / "new").close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert not caplog.messages
    for path in (tmp_path / "new").iterdir():
        path.chmod(0o644)
    (tmp_path / "new").chmod(0o755)
    check_folder(tmp_path / "new")
    assert "chmod 700" in caplog.text
    opened(tmp_path / "new").close()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o600}


def test_nothing_is_written_to_a_file_that_was_removed(tmp_path: Path) -> None:
    file = opened(tmp_path / "kv")
    file.write(0, key(0), 10, block(0))
    shutil.rmtree(tmp_path / "kv")
    with pytest.raises(OSError, match="removed"):
        file.write(1, key(1), 11, block(1))
    assert file.read(0, key(0), empty_block(SIZE)) == 10
    file.close()
