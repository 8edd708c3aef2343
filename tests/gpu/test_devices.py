"""How many cores a process may use."""

import os
from pathlib import Path

import pytest

from ramify.gpu.devices import cores


@pytest.fixture(autouse=True)
def mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)


def found(folder: Path, cgroup: str, files: dict[str, str]) -> int:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "own").write_text(cgroup)
    return cores(folder, folder / "own")


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 12),
        ({"a/b/cpu.max": "max 100000\n"}, 12),
        ({"a/b/cpu.max": "250000 100000\n"}, 3),
        ({"a/cpu.max": "50000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1),
        ({"a/b/cpu.max": "9900000 100000\n"}, 12),
        ({"a/b/cpu.max": "odd"}, 12),
    ],
)
def test_a_control_group_and_those_above_it_limit_them(
    tmp_path: Path, files: dict[str, str], count: int
) -> None:
    assert found(tmp_path, "0::/a/b\n", files) == count


def test_groups_of_version_1(tmp_path: Path) -> None:
    files = {"cpu,cpuacct/x/cpu.cfs_quota_us": "400000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"}
    assert found(tmp_path, "4:memory:/\n3:cpu,cpuacct:/x\n", files) == 4
    (tmp_path / "cpu,cpuacct/x/cpu.cfs_quota_us").write_text("-1")
    assert cores(tmp_path, tmp_path / "own") == 12


def test_where_there_are_no_groups(tmp_path: Path) -> None:
    assert cores(tmp_path, tmp_path / "none") == 12
