"""Machine code that is kept: found only by what it depends on, and read only where it is safe to run."""

import ctypes
import os
from pathlib import Path

import pytest

from ramify.gpu.native import kept
from ramify.gpu.native.host import MachineCode
from ramify.gpu.native.ir import I64, PTR, Function, Module
from ramify.gpu.native.kept import CachedCode


def writer(value: int, calls: list[int]) -> "object":
    def write(module: Module) -> None:
        calls.append(value)
        f = Function(module, "give", [PTR])
        f.store(f.i64(value), f.at(f.args[0], 0, I64))
        f.done()

    return write


def run(compiled: MachineCode) -> int:
    found = ctypes.c_int64()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address("give"))(ctypes.addressof(found))
    return found.value


def test_code_is_compiled_once(tmp_path: Path) -> None:
    calls: list[int] = []
    place = tmp_path / "a" / "kernels"
    for _ in range(3):
        assert run(MachineCode("seven", writer(7, calls), place)) == 7
    assert run(MachineCode("eight", writer(8, calls), place)) == 8
    assert calls == [7, 8]
    assert len(os.listdir(place)) == 2
    assert place.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o777 for each in place.iterdir()} == {0o600}


def test_without_a_folder_nothing_is_kept() -> None:
    calls: list[int] = []
    for _ in range(2):
        assert run(MachineCode("seven", writer(7, calls), None)) == 7
    assert calls == [7, 7]


class TestEntry:
    @pytest.fixture
    def entry(self, tmp_path: Path) -> CachedCode:
        found = CachedCode(("a", "b"), tmp_path / "kernels")
        found.write(b"code")
        assert found.read() == b"code"
        return found

    @pytest.fixture
    def file(self, entry: CachedCode, tmp_path: Path) -> Path:
        (found,) = (tmp_path / "kernels").iterdir()
        return found

    def test_it_is_found_by_all_it_depends_on(
        self, entry: CachedCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert CachedCode(("a", "b"), tmp_path / "kernels").read() == b"code"
        assert CachedCode(("ab", ""), tmp_path / "kernels").read() is None
        monkeypatch.setattr(kept, "_sources", lambda: "changed")
        assert CachedCode(("a", "b"), tmp_path / "kernels").read() is None

    @pytest.mark.parametrize("size", [0, 10, 35])
    def test_a_part_of_it_is_nothing(self, entry: CachedCode, file: Path, size: int) -> None:
        os.truncate(file, size)
        assert entry.read() is None

    def test_other_bytes_are_nothing(self, entry: CachedCode, file: Path) -> None:
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        assert entry.read() is None

    def test_what_others_may_write_is_not_run(self, entry: CachedCode, file: Path) -> None:
        file.chmod(0o620)
        assert entry.read() is None
        file.chmod(0o600)
        file.parent.chmod(0o777)
        assert entry.read() is None
        entry.write(b"more")
        file.parent.chmod(0o700)
        assert entry.read() == b"code"

    def test_what_others_own_is_not_run(
        self, entry: CachedCode, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
        assert entry.read() is None

    def test_links_are_not_followed(self, entry: CachedCode, file: Path, tmp_path: Path) -> None:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
        assert entry.read() is None
        file.parent.rename(tmp_path / "folder")
        file.parent.symlink_to(tmp_path / "folder")
        assert entry.read() is None

    def test_what_is_too_large_is_not_kept(
        self, entry: CachedCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kept, "MOST_BYTES", 35)
        assert entry.read() is None
        other = CachedCode(("c",), tmp_path / "kernels")
        other.write(b"code")
        assert other.read() is None

    def test_the_oldest_go(
        self, entry: CachedCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kept, "MOST_FILES", 8)
        for n in range(8):
            os.utime(tmp_path / "kernels" / entry._name)
            for each in (tmp_path / "kernels").iterdir():  # a second ago: no two are of one time
                found = each.stat()
                os.utime(each, ns=(found.st_atime_ns, found.st_mtime_ns - 1_000_000_000))
            assert entry.read() == b"code"
            CachedCode((str(n),), tmp_path / "kernels").write(b"other")
        assert len(os.listdir(tmp_path / "kernels")) == 8
        assert entry.read() == b"code"
        assert CachedCode(("0",), tmp_path / "kernels").read() is None


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    entry = CachedCode(("a",), tmp_path / "file" / "kernels")
    entry.write(b"code")
    assert entry.read() is None


def test_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAMIFY_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept.folder() == tmp_path / "ramify" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kept.folder() == tmp_path / ".cache" / "ramify" / "kernels"
    monkeypatch.setenv("RAMIFY_KERNEL_CACHE", str(tmp_path / "x"))
    assert kept.folder() == tmp_path / "x"
    monkeypatch.setenv("RAMIFY_KERNEL_CACHE", "")
    assert kept.folder() is None
