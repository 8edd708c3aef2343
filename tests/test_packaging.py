"""Two wheels, the client's and the engine's, hold every package and data file between them. Every tool
finds one package: `src/ramify`."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from setuptools import find_namespace_packages, find_packages

import ramify

ROOT = Path(__file__).resolve().parents[1]
LINKS = ROOT / "src" / "ramify"
ENGINE = ROOT / "src" / "ramify-engine"
TOP = ("actors", "clients", "gpu", "protocol")
CLIENT = ("clients", "protocol")
WEB = ROOT / "clients/web"  # an npm package: of it the engine's wheel holds what a server serves
SERVED = ("lib", "site")
THIN = {  # what the client's dependencies bring, by import names
    *(
        "h11",
        "markdown_it",
        "mdurl",
        "msgspec",
        "prompt_toolkit",
        "pygments",
        "rich",
        "wcwidth",
        "websockets",
    ),
}
BESIDE = {
    *(".ci", ".dockerignore", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile"),
    *("README.md", "benchmarks", "docs", "examples", "pyproject.toml", "src", "tests"),
}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def engine() -> dict[str, Any]:
    """What `ramify[serve]` adds."""
    return tomllib.loads((ENGINE / "pyproject.toml").read_text())


def packages_on_disk(*tops: str) -> list[str]:
    found = []
    for top in tops:
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


def test_the_client_and_the_engine_share_the_packages(
    project: dict[str, Any], engine: dict[str, Any]
) -> None:
    """Each package is in one of the wheels. Above its packages the engine's has no modules."""
    find = project["tool"]["setuptools"]["packages"]["find"]
    thin = find_packages(str(ROOT / find["where"][0]), find["exclude"])
    assert sorted(thin) == ["ramify", *packages_on_disk(*CLIENT)]
    full = find_namespace_packages(str(ENGINE), **engine["tool"]["setuptools"]["packages"]["find"])
    spaces = {"ramify", "ramify.clients"}
    data = {
        package
        for package in full
        if (package + ".").startswith(("ramify.clients.web.", "ramify.gpu.default_"))
    }
    assert sorted({*full} - spaces - data) == packages_on_disk("actors", "gpu")
    for space in spaces:
        assert not list((ENGINE.joinpath(*space.split("."))).glob("*.py"))


def test_the_engine_is_of_the_clients_version(project: dict[str, Any], engine: dict[str, Any]) -> None:
    version = project["project"]["version"]
    assert engine["project"]["version"] == version
    assert f"ramify=={version}" in engine["project"]["dependencies"]
    assert project["project"]["optional-dependencies"]["serve"] == [f"ramify-engine=={version}"]


def test_every_folder_with_code_is_a_package() -> None:
    for top in TOP:
        for module in (ROOT / top).rglob("*.py"):
            if "node_modules" in module.parts:  # packages of the npm registry
                continue
            assert (module.parent / "__init__.py").is_file(), module


def test_the_package_is_typed() -> None:
    assert (LINKS / "py.typed").is_file()


def test_every_data_file_is_listed(project: dict[str, Any], engine: dict[str, Any]) -> None:
    """The model and the page in the engine's wheel, none in the client's."""
    assert project["tool"]["setuptools"]["package-data"] == {"ramify": ["py.typed"]}
    globs = {
        path.resolve()
        for package, patterns in engine["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in ENGINE.joinpath(*package.split(".")).glob(pattern)
    }
    for top in TOP:
        for path in (ROOT / top).rglob("*"):
            elsewhere = WEB in path.parents and path.relative_to(WEB).parts[0] not in SERVED
            if path.is_file() and path.suffix not in (".py", ".pyc") and not elsewhere:
                assert path in globs, path


def test_the_build_does_not_warn_of_data_folders(
    project: dict[str, Any], engine: dict[str, Any]
) -> None:
    """Data that are listed *and* found by themselves are taken for forgotten packages."""
    for each in (project, engine):
        assert each["tool"]["setuptools"]["include-package-data"] is False


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


@pytest.fixture
def thin(tmp_path: Path) -> Path:
    """A folder with what the client's wheel holds."""
    (tmp_path / "ramify").mkdir()
    for name in (*CLIENT, *(path.name for path in LINKS.glob("*.py"))):
        (tmp_path / "ramify" / name).symlink_to(LINKS / name)
    return tmp_path


def python(code: str, thin: Path) -> "subprocess.CompletedProcess[str]":
    """Run it where nothing can be imported but the client and what its dependencies bring."""
    alone = (
        "import sys, importlib.abc\n"
        f"sys.path.insert(0, {str(thin)!r})\n"
        # an editable installation finds the engine's packages by itself, wherever the client's are
        "finders = [f for f in sys.meta_path if '__editable__' not in getattr(f, '__module__', '')]\n"
        "sys.meta_path[:] = finders\n"
        "class Alone(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        top = name.partition('.')[0]\n"
        f"        if top not in sys.stdlib_module_names and top not in {THIN | {'ramify'}}:\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Alone())\n"
    )
    return subprocess.run(
        [sys.executable, "-P", "-c", alone + code], capture_output=True, text=True, check=False
    )


def test_every_module_of_the_client_needs_its_dependencies_alone(thin: Path) -> None:
    code = (
        "import pkgutil, importlib, ramify\n"
        "for each in pkgutil.walk_packages(ramify.__path__, 'ramify.'):\n"
        "    importlib.import_module(each.name)\n"
        "print(len(sys.modules))"
    )
    done = python(code, thin)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_client_alone_says_what_to_install(thin: Path) -> None:
    store = thin / "sessions.db"
    store.touch()
    commands = [
        ["serve"],
        ["chat", "Hi."],
        ["chat", "--own", "Hi."],
        ["store", "ls", "--store", str(store)],
        ["replica", "--join", "127.0.0.1:1", "--secret-file", "secret"],
        ["info", "--model", "owner/name"],
    ]
    code = (
        "from ramify.clients import cli\n"
        "from ramify.clients.commands import chat\n"
        "chat.server_at = lambda *_: None\n"
        f"for line in {commands}:\n"
        "    assert cli.main(line) == 2, line\n"
    )
    done = python(code, thin)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(commands), done.stderr
    for line in lines:
        assert "the engine is not installed" in line
        assert f"{sys.executable} -m pip install 'ramify[serve]'" in line
    assert lines[1].startswith("ramify: no server answers on port 8765 (--url names another one), and")


@pytest.mark.parametrize(
    ("code", "most"),
    [
        ("import ramify", 3),  # and the two of its folder that typing needs
        ("import ramify; ramify.connect", 300),
        ("from ramify.clients import cli; cli.build_parser().format_help()", 400),
    ],
)
def test_a_start_imports_few_modules(thin: Path, code: str, most: int) -> None:
    """What a start takes is mostly its imports."""
    code = (
        f"before = set(sys.modules)\n{code}\nnew = set(sys.modules) - before\n"
        "late = {'rich', 'prompt_toolkit', 'markdown_it', 'pygments'} & new\n"
        "assert not late, late\n"
        "print(len(new))"
    )
    done = python(code, thin)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) <= most
