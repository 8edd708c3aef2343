"""The size of the house: each number has a bound, which may only fall, and a goal.

Who makes a number smaller lowers its bound in the same commit. Complexity is counted as radon counts it.
"""

import ast
import gc
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOPS = ("actors", "protocol", "clients", "gpu")
COMPLEX, LONG = 20, 450  # a function's complexity, a file's lines
# Whose cases are a kernel's variants: Triton compiles one of them, and would inline their parts anyway
KERNELS = {
    "gpu/attention/triton_balanced.py _attend",
    "gpu/ops/triton_linear.py _linear",
    "gpu/ops/triton_four_bits.py _product",
}
PRIVATE = re.compile(  # a member of another object; not of named tuples, os or sys
    r"(?<!\bself)(?<!\bcls)(?<!\bsuper\(\))"
    r"\._(?!replace\b|asdict\b|fields\b|make\b|exit\b|getframe\b)[a-z]\w*"
)

# folder: files, hundreds of lines. Goals: actors 235 and 410, session 45 files, benchmarks 90 hundred
SIZES = {
    "actors": (321, 653),
    "actors/cache": (19, 46),
    "actors/calls": (11, 27),
    "actors/cluster": (15, 33),
    "actors/executor": (9, 12),
    "actors/front": (8, 16),
    "actors/gateway": (70, 120),
    "actors/grammar": (51, 93),
    "actors/kit": (15, 22),
    "actors/links": (6, 10),
    "actors/processes": (6, 7),
    "actors/routing": (6, 12),
    "actors/scheduler": (24, 55),
    "actors/session": (48, 130),
    "actors/store": (11, 31),
    "actors/tiers": (3, 6),
    "actors/tokenizer": (10, 24),
    "protocol": (37, 64),
    "clients": (83, 138),
    "gpu": (240, 397),
    "benchmarks": (34, 95),
}
# measure: bound, goal
COUNTS = {
    "functions over complexity 20": (0, 0),
    "files over 450 lines": (0, 0),
    "class names that exist twice": (0, 0),
    "floors of session/": (10, 10),
    "sequences unpacked where they are written": (0, 0),
    "private uses across objects": (19, 7),  # nine are of torch and argparse
    "private uses in tests": (237, 0),
}


@cache
def texts(folder: str) -> dict[Path, str]:
    return {
        path.relative_to(ROOT): path.read_text()
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "node_modules" not in path.parts
    }


def sources() -> dict[Path, str]:
    return {path: text for top in TOPS for path, text in texts(top).items()}


@cache
def trees() -> dict[Path, ast.Module]:
    gc.disable()  # millions of nodes, none of which is garbage
    try:
        return {path: ast.parse(text) for path, text in sources().items()}
    finally:
        gc.enable()


def points(node: ast.AST) -> int:
    """What a node adds to the complexity of the function that it is in."""
    match node:
        case ast.If() | ast.IfExp() | ast.Lambda() | ast.Assert():
            return 1
        case ast.BoolOp():
            return len(node.values) - 1
        case ast.comprehension():
            return 1 + len(node.ifs)
        case ast.For() | ast.AsyncFor() | ast.While():
            return 1 + bool(node.orelse)
        case ast.Try() | ast.TryStar():
            return len(node.handlers) + bool(node.orelse)
        case ast.Match():
            return len(node.cases) - any(
                case.guard is None and wild(case.pattern) for case in node.cases
            )
    return 0


def wild(pattern: ast.pattern) -> bool:
    return isinstance(pattern, ast.MatchAs) and pattern.pattern is None


def definitions(node: ast.AST) -> Iterator[ast.stmt]:
    """Classes, functions and methods; those within a function count for that function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        if isinstance(child, ast.stmt) and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from definitions(child)


def complex_functions() -> list[str]:
    return [
        name
        for path, tree in trees().items()
        for each in definitions(tree)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and 1 + sum(map(points, ast.walk(each))) > COMPLEX
        and (name := f"{path} {each.name}") not in KERNELS
    ]


def long_files() -> list[str]:
    return [str(path) for path, text in sources().items() if text.count("\n") > LONG]


def double_names() -> list[str]:
    names = Counter(
        each.name
        for tree in trees().values()
        for each in definitions(tree)
        if isinstance(each, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


def unpacked_displays() -> list[str]:
    """`*("a", "b"), "c"`: one list that is written as several, to look shorter."""
    return [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List)
    ]


def private_uses(found: dict[Path, str]) -> list[str]:
    return [f"{path} {use}" for path, text in found.items() for use in PRIVATE.findall(text)]


def session_floors() -> list[str]:
    """The longest chain of imports between the session's rooms: its folders, and the files in none."""
    modules = {
        f"ramify.{'.'.join(path.with_suffix('').parts)}": tree
        for path, tree in trees().items()
        if path.is_relative_to("actors/session") and path.name != "__init__.py"
    }
    below: dict[str, set[str]] = {room_of(name): set() for name in modules}
    for name, tree in modules.items():
        below[room_of(name)] |= {room_of(other) for other in imports(tree) & modules.keys()} - {
            room_of(name)
        }

    @cache
    def chain(room: str) -> list[str]:
        return [*max(map(chain, below[room]), key=len, default=[]), room]

    return max(map(chain, below), key=len)


def room_of(module: str) -> str:
    return module.removeprefix("ramify.actors.session.").split(".")[0]


def imports(tree: ast.Module) -> set[str]:
    """The modules that a module imports when it is run."""
    return {node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module}


MEASURES: dict[str, Callable[[], list[str]]] = {
    "functions over complexity 20": complex_functions,
    "files over 450 lines": long_files,
    "class names that exist twice": double_names,
    "floors of session/": session_floors,
    "sequences unpacked where they are written": unpacked_displays,
    "private uses across objects": lambda: private_uses(sources()),
    "private uses in tests": lambda: private_uses(texts("tests")),
}


@pytest.mark.parametrize("folder", SIZES)
def test_a_folder_does_not_grow(folder: str) -> None:
    files, hundreds = SIZES[folder]
    found = texts(folder)
    assert len([path for path in found if path.name != "__init__.py"]) <= files
    assert sum(text.count("\n") for text in found.values()) <= 100 * hundreds


@pytest.mark.parametrize("measure", COUNTS)
def test_the_house_grows_no_worse(measure: str) -> None:
    bound, _ = COUNTS[measure]
    found = MEASURES[measure]()
    assert len(found) <= bound, "\n".join(found)


def test_goals_lie_ahead() -> None:
    assert all(goal <= bound for bound, goal in COUNTS.values())
