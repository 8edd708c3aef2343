"""The wheel must hold every package and every data file: a missing line is silent otherwise."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOP = ("actors", "clients", "gpu", "protocol")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> list[str]:
    found = []
    for top in TOP:
        for init in (ROOT / top).rglob("__init__.py"):
            found.append(".".join(("ramify", *init.parent.relative_to(ROOT).parts)))
    return sorted(found)


def test_every_package_is_listed(project: dict[str, Any]) -> None:
    assert sorted(project["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_every_folder_with_code_is_a_package() -> None:
    for top in TOP:
        for module in (ROOT / top).rglob("*.py"):
            assert (module.parent / "__init__.py").is_file(), module


def test_every_package_is_typed() -> None:
    for name in packages_on_disk():
        folder = ROOT.joinpath(*name.split(".")[1:])
        assert (folder / "py.typed").is_file(), name


def test_every_data_file_is_listed(project: dict[str, Any]) -> None:
    listed = project["tool"]["setuptools"]["package-data"]
    globs = {
        path
        for package, patterns in listed.items()
        if package != "*"
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    for top in TOP:
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc", ".typed"):
                assert path in globs, path
