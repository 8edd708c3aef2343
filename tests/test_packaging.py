"""The wheel holds every package and data file, and every tool finds one package: `src/ramify`."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from setuptools import find_packages

import ramify

ROOT = Path(__file__).resolve().parents[1]
LINKS = ROOT / "src" / "ramify"
TOP = ("actors", "clients", "gpu", "protocol")
WEB = ROOT / "clients/web"  # an npm package: of it the wheel holds what a server serves
SERVED = ("lib", "site")
BESIDE = {
    *(".ci", ".dockerignore", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile"),
    *("README.md", "benchmarks", "docs", "examples", "pyproject.toml", "src", "tests"),
}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> list[str]:
    found = ["ramify"]
    for top in TOP:
        for init in (ROOT / top).rglob("__init__.py"):
            found.append(".".join(("ramify", *init.parent.relative_to(ROOT).parts)))
    return sorted(found)


def test_every_folder_at_the_top_is_linked() -> None:
    assert sorted(path.name for path in LINKS.iterdir() if path.is_symlink()) == sorted(TOP)
    for top in TOP:
        assert (LINKS / top).readlink() == Path("../..") / top  # relative: any checkout will do


def test_nothing_else_was_left_at_the_top() -> None:
    """What a run has written there, a store for example, is committed easily."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is no git checkout")
    assert {path.split("/")[0] for path in done.stdout.splitlines()} <= {*TOP, *BESIDE}


def test_every_package_is_found(project: dict[str, Any]) -> None:
    (where,) = project["tool"]["setuptools"]["packages"]["find"]["where"]
    assert sorted(find_packages(str(ROOT / where))) == packages_on_disk()


def test_every_folder_with_code_is_a_package() -> None:
    for top in TOP:
        for module in (ROOT / top).rglob("*.py"):
            if "node_modules" in module.parts:  # packages of the npm registry
                continue
            assert (module.parent / "__init__.py").is_file(), module


def test_the_package_is_typed() -> None:
    assert (LINKS / "py.typed").is_file()


def test_every_data_file_is_listed(project: dict[str, Any]) -> None:
    listed = project["tool"]["setuptools"]["package-data"]
    globs = {
        path.resolve()
        for package, patterns in listed.items()
        for pattern in patterns
        for path in (ROOT / "src").joinpath(*package.split(".")).glob(pattern)
    }
    for top in TOP:
        for path in (ROOT / top).rglob("*"):
            elsewhere = WEB in path.parents and path.relative_to(WEB).parts[0] not in SERVED
            if path.is_file() and path.suffix not in (".py", ".pyc") and not elsewhere:
                assert path in globs, path


def test_the_build_does_not_warn_of_data_folders(project: dict[str, Any]) -> None:
    """Data that are listed *and* found by themselves are taken for forgotten packages."""
    assert project["tool"]["setuptools"]["include-package-data"] is False


def test_the_top_of_the_package_is_the_client() -> None:
    from ramify import clients

    assert set(ramify.__all__) == set(clients.__all__)
    for name in ramify.__all__:
        assert getattr(ramify, name) is getattr(clients, name)
    assert set(ramify.__all__) <= set(dir(ramify))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ramify.nonsense


def test_an_import_loads_only_what_is_used_and_nothing_twice() -> None:
    """`import ramify.protocol` brings no client; no module is known by two names."""
    code = (
        "import sys, ramify.protocol.config\n"
        "assert 'ramify.clients' not in sys.modules, 'client'\n"
        "import ramify, ramify.actors.engine\n"
        "ramify.connect\n"
        "files = [m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)]\n"
        "import os; ours = [os.path.realpath(f) for f in files if 'ramify' in f]\n"
        "assert len(ours) == len(set(ours)) > 20, 'twice'"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
