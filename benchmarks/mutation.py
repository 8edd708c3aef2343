"""One-place changes to the cores: do the tests of their own folder notice?

    python benchmarks/mutation.py [--sample 100] [--seed 0] [--only scheduler] [--tests FILE] [--jobs 2]
    python benchmarks/mutation.py --only actors/cache/tree.py --sample 0      # all changes of one file

A change (a mutant) turns a comparison, adds one to a number, takes `and` for `or`, negates a condition,
swaps `+` and `-`, `min` and `max`, `True` and `False`, or leaves out a statement. Logging, assertions,
annotations and texts are left alone. The tests of a folder are run once unchanged, and coverage.py notes
which of them reach which line. Each mutant then runs those that reach its line, the fastest first, until
one fails; a line that runs at import has all of them run. A mutant that hangs is noticed as well.

mutmut and cosmic-ray are not used: both rewrite files where they are imported from, and our packages
are folders that an import hook maps to `ramify.*`; both start an interpreter for each mutant, which
costs more than its tests. Here one process imports torch and pytest once and forks for each mutant, and
the loader of the changed file compiles the changed tree; no file is written.

Every mutant that survived is printed with its line, before and after. The exit code is 1 if fewer than
`--least` percent (90) of a folder's mutants were noticed. Some that survive change nothing that can be
seen; `--seed` picks another sample.
"""

import argparse
import ast
import copy
import importlib.machinery
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from report import headline, machine, table, write_json

ROOT = Path(__file__).parents[1]
LEAST = 90.0
LEFT_OUT = ("__init__.py", "actor.py", "integrity.py")  # shells, and a check that only tests use


@dataclass(frozen=True)
class Group:
    """Files that are changed, and the tests that should notice."""

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]


GROUPS = [
    Group(
        "scheduler",
        ("actors/scheduler/*.py",),
        ("tests/actors/scheduler",),
    ),
    Group("cache", ("actors/cache/*.py",), ("tests/actors/cache",)),
    Group(
        "session",
        ("actors/session/*.py", "actors/session/ops/*.py"),
        ("tests/actors/session",),
    ),
    Group(
        "clients",
        tuple(
            f"clients/{n}.py"
            for n in ("session", "stream", "heads", "reconnect", "handles", "generation")
        ),
        ("tests/clients/test_*.py",),
    ),
    Group(
        "gpu",
        tuple(f"gpu/{n}.py" for n in ("rows", "staging", "sampler", "row_sampler")),
        tuple(
            f"tests/gpu/test_{n}.py"
            for n in ("rows", "staging", "sampler", "row_sampler", "torch_executor", "segments")
        ),
    ),
]

# --- the changes --------------------------------------------------------------------------------------

FLIPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SWAPS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
REMOVED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)
LOGGERS = frozenset({"log", "logger", "logging", "_log"})
SKIPPED_FUNCTIONS = frozenset({"__repr__", "__str__"})


@dataclass
class Mutant:
    """Change number `index` of a file. `survived` and `seconds` once it has run."""

    group: Group
    path: Path
    index: int
    line: int = 0
    before: str = ""
    after: str = ""
    survived: bool | None = None
    seconds: float = 0.0
    why: str = ""


class Changes:
    """All changes of one tree, in order. `each()` gives a tree with one change, and what it is."""

    def __init__(self, source: str) -> None:
        self._tree = ast.parse(source)
        self._places: list[tuple[ast.AST, Callable[[Any], ast.AST | None], str]] = []
        self._collect(self._tree)

    def __len__(self) -> int:
        return len(self._places)

    def apply(self, index: int) -> tuple[ast.Module, int, str, str]:
        """(tree, line, before, after) of one change."""
        node, change, _ = self._places[index]
        before = ast.unparse(node)
        memo: dict[int, Any] = {}
        tree = copy.deepcopy(self._tree, memo)
        twin = memo[id(node)]
        changed = change(twin)
        if changed is not twin:
            _Replace(twin, changed).visit(tree)
        after = "(left out)" if isinstance(changed, ast.Pass) else ast.unparse(changed or twin)
        ast.fix_missing_locations(tree)
        return tree, getattr(node, "lineno", 0), before, after

    def _add(self, node: ast.AST, change: Callable[[Any], ast.AST | None], what: str) -> None:
        self._places.append((node, change, what))

    def _collect(self, node: ast.AST) -> None:
        if self._left_alone(node):
            return
        match node:
            case ast.Compare(ops=[op]) if type(op) in FLIPS:
                self._add(node, _flip, "comparison")
            case ast.BoolOp():
                self._add(node, _other_bool, "and/or")
            case ast.BinOp(op=op) if type(op) in SWAPS and not _is_text(node):
                self._add(node, _other_operator, "operator")
            case ast.Constant(value=bool()):
                self._add(node, _other_constant, "constant")
            case ast.Constant(value=int() | float()):
                self._add(node, _other_constant, "constant")
            case ast.If() | ast.While() | ast.IfExp():
                self._add(node.test, _negate, "condition")
            case ast.Call(func=ast.Name(id="min" | "max")):
                self._add(node.func, _other_end, "min/max")
            case ast.UnaryOp(op=ast.Not()):
                self._add(node, lambda n: n.operand, "not")
        if isinstance(node, REMOVED) and not _is_docstring(node):
            self._add(node, lambda n: ast.copy_location(ast.Pass(), n), "statement")
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self._collect(child)

    def _left_alone(self, node: ast.AST) -> bool:
        match node:
            case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
                return True
            case ast.FunctionDef(name=name) if name in SKIPPED_FUNCTIONS:
                return True
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
                return name in LOGGERS
            case ast.Assign(targets=[ast.Name(id=name)]):
                return name in LOGGERS or name == "__slots__"
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return True
            case _:
                return False


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST | None) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self._new if node is self._old else self.generic_visit(node)


def _flip(node: ast.Compare) -> ast.AST:
    node.ops = [FLIPS[type(node.ops[0])]()]
    return node


def _other_bool(node: ast.BoolOp) -> ast.AST:
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return node


def _other_operator(node: ast.BinOp) -> ast.AST:
    node.op = SWAPS[type(node.op)]()
    return node


def _other_constant(node: ast.Constant) -> ast.AST:
    node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
    return node


def _other_end(node: ast.Name) -> ast.AST:
    node.id = "max" if node.id == "min" else "min"
    return node


def _negate(node: ast.expr) -> ast.AST:
    return ast.copy_location(ast.UnaryOp(ast.Not(), node), node)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_text(node: ast.BinOp) -> bool:
    """`a | b` of types, `"x" * 3`."""
    sides = (node.left, node.right)
    return any(isinstance(s, ast.Constant) and isinstance(s.value, str | None) for s in sides)


# --- running one --------------------------------------------------------------------------------


def load_changed(path: Path, tree: ast.Module) -> None:
    """From now on this process imports `path` as `tree`, whatever it has imported before.

    The headline's modules have imported clients: their changes were not loaded, and none was noticed.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == "ramify"]:
        del sys.modules[name]
    loader = importlib.machinery.SourceFileLoader
    original = loader.get_code
    changed = os.path.realpath(path)

    def get_code(self: Any, fullname: str) -> CodeType | None:
        if os.path.realpath(self.path) == changed:
            return compile(tree, changed, "exec", dont_inherit=True)
        return original(self, fullname)

    loader.get_code = get_code  # type: ignore[method-assign]


def tests_of(group: Group) -> list[str]:
    """The test files of a group."""
    found: list[Path] = []
    for pattern in group.tests:
        full = ROOT / pattern
        found += sorted(full.rglob("test_*.py") if full.is_dir() else ROOT.glob(pattern))
    if not found:
        sys.exit(f"there are no tests at {', '.join(group.tests)}")
    return [str(test) for test in dict.fromkeys(found)]


class Reached:
    """Which tests of a group reach which line of its files, and how long they take."""

    def __init__(self, lines: dict[str, dict[str, list[str]]], seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self._lines = lines

    def tests(self, path: Path, line: int) -> list[str]:
        """Those that reach a line, the fastest first; all of them if none is known to."""
        lines = self._lines.get(str(path), {})
        for each in range(line, max(0, line - 12), -1):  # a statement begins further up
            found = [test for test in lines.get(str(each), ()) if test in self.seconds]
            if found:
                return sorted(found, key=self.seconds.__getitem__)
        return sorted(self.seconds, key=self.seconds.__getitem__)

    def limit(self, tests: Sequence[str]) -> float:
        """Seconds that these tests may take."""
        return 4 * sum(self.seconds[test] for test in tests) + 30


class Measure:
    """A pytest plugin: tells coverage.py which test runs, and notes how long it took."""

    def __init__(self, coverage: Any) -> None:
        self.seconds: dict[str, float] = {}
        self._coverage = coverage

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.skipped:
            self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._coverage.switch_context("")


def measure(group: Group, result: Path, out: int) -> int:
    """In a forked process: the tests of a group, unchanged; what `Reached` needs goes to `result`."""
    import coverage

    files = [str(path) for pattern in group.files for path in sorted(ROOT.glob(pattern))]
    aliases = [file.replace(str(ROOT), f"{ROOT}/src/ramify", 1) for file in files]
    watch = coverage.Coverage(data_file=None, include=[*files, *aliases], config_file=False)
    watch.start()
    plugin = Measure(watch)
    code = run_tests(tests_of(group), None, None, out, [plugin])
    watch.stop()
    data = watch.get_data()
    lines: dict[str, dict[int, list[str]]] = {}
    for file in data.measured_files():
        lines[os.path.realpath(file)] = data.contexts_by_lineno(file)
    result.write_text(json.dumps([lines, plugin.seconds]))
    return code


def run_tests(
    tests: Sequence[str],
    path: Path | None,
    tree: ast.Module | None,
    out: int,
    plugins: Sequence[Any] = (),
) -> int:
    """In a forked process: pytest's exit code."""
    import pytest
    from hypothesis import Phase, settings

    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(ROOT)
    if path is not None and tree is not None:
        load_changed(path, tree)
    # a failure is enough: nobody reads the smallest example
    settings.register_profile("mutation", phases=(Phase.explicit, Phase.generate), database=None)
    settings.load_profile("mutation")
    return int(
        pytest.main(
            [
                *("-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"),
                *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
                *tests,
            ],
            plugins=list(plugins),
        )
    )


class Forks:
    """Runs mutants in forked processes, several at once."""

    def __init__(self, jobs: int, folder: Path) -> None:
        self._jobs = jobs
        self._folder = folder
        self._running: dict[int, tuple[Mutant, float, float, Path]] = {}

    def start(self, mutant: Mutant, limit: float, run: Callable[[int], int]) -> None:
        """Fork, and call `run` with a file for its output. There must be room (`wait`)."""
        log = self._folder / f"{id(mutant)}.log"
        out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                os.setpgid(0, 0)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                code = run(out)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(out)
        self._running[pid] = (mutant, time.perf_counter(), limit, log)

    def wait(self, room: bool) -> list[Mutant]:
        """Until one more can start (`room`), or none runs any more; returns those that ended."""
        ended: list[Mutant] = []
        while self._running and (not room or len(self._running) >= self._jobs):
            ended += self._poll()
            time.sleep(0.02)
        return ended

    def kill(self) -> None:
        """End those that run: nobody waits for them any more."""
        for pid in self._running:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _poll(self) -> list[Mutant]:
        ended = []
        for pid, (mutant, begin, limit, log) in list(self._running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            seconds = time.perf_counter() - begin
            if not done:
                if seconds < limit:
                    continue
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                mutant.survived, mutant.why = False, "hung"
            else:
                mutant.survived = os.waitstatus_to_exitcode(status) == 0
                mutant.why = "" if mutant.survived else _why(log)
            mutant.seconds = seconds
            log.unlink(missing_ok=True)
            del self._running[pid]
            ended.append(mutant)
            if mutant.survived and mutant.index >= 0:
                print(_told(mutant), flush=True)
        return ended


def _why(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (failed or lines or ["no output"])[-1][:200]


# --- the campaign --------------------------------------------------------------------------------


@dataclass
class Tally:
    """Of one file."""

    all: int = 0
    run: int = 0
    survived: list[Mutant] = field(default_factory=list)


def mutants(options: argparse.Namespace) -> Iterator[tuple[Group, Path, Changes]]:
    """The files that were asked for."""
    for group in GROUPS:
        if options.tests:
            group = replace(group, tests=tuple(options.tests))
        for pattern in group.files:
            for path in sorted(ROOT.glob(pattern)):
                name = str(path.relative_to(ROOT))
                wanted = not options.only or any(
                    only == group.name or name.startswith(only) for only in options.only
                )
                if wanted and path.name not in LEFT_OUT:
                    yield group, path, Changes(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sample", type=int, default=100, help="mutants in all; 0: every one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="a group, or the start of a file's path")
    parser.add_argument("--tests", action="append", help="run these files or folders only")
    parser.add_argument("--jobs", type=int, default=max(1, os.cpu_count() or 2))
    parser.add_argument("--least", type=float, default=LEAST, help="percent that must be noticed")
    parser.add_argument("--json", help="write the table and the survivors to this file")
    options = parser.parse_args()
    about = machine()
    print(headline(about), flush=True)
    _import_once()
    tallies: dict[Path, Tally] = {}
    chosen: list[Mutant] = []
    known: dict[Path, Changes] = {}
    for group, path, changes in mutants(options):
        known[path] = changes
        tallies[path] = Tally(all=len(changes))
        chosen += [Mutant(group, path, i) for i in range(len(changes))]
    rng = random.Random(options.seed)
    if options.sample:
        chosen = rng.sample(chosen, min(options.sample, len(chosen)))
    chosen.sort(key=lambda m: (m.group.name, str(m.path), m.index))
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        forks = Forks(options.jobs, Path(folder))
        ended: list[Mutant] = []
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            reached = _baseline(forks, chosen, Path(folder))
            for number, mutant in enumerate(chosen):
                tree, mutant.line, mutant.before, mutant.after = known[mutant.path].apply(mutant.index)
                ended += forks.wait(room=True)
                tests = reached[mutant.group.name].tests(mutant.path, mutant.line)
                run = partial(run_tests, tests, mutant.path, tree)
                forks.start(mutant, reached[mutant.group.name].limit(tests), run)
                if number % 20 == 19:
                    seconds = time.perf_counter() - begin
                    print(f"{seconds:6.0f} s  {number + 1} of {len(chosen)}", flush=True)
            ended += forks.wait(room=False)
        finally:
            forks.kill()
    for mutant in ended:
        tally = tallies[mutant.path]
        tally.run += 1
        if mutant.survived:
            tally.survived.append(mutant)
    sys.exit(1 if _report(options, about, tallies, ended) else 0)


def _import_once() -> None:
    """What every child needs and no mutant changes."""
    import hypothesis  # noqa: F401
    import msgspec  # noqa: F401
    import pytest  # noqa: F401
    import tokenizers  # noqa: F401
    import torch
    import transformers  # noqa: F401
    import websockets  # noqa: F401

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(1)


def _baseline(forks: Forks, chosen: list[Mutant], folder: Path) -> dict[str, Reached]:
    """What the tests of each group reach. Ends the program if they fail without a change."""
    reached = {}
    for group in {m.group.name: m.group for m in chosen}.values():
        plain = Mutant(group, ROOT, -1)
        result = folder / f"{group.name}.json"
        forks.start(plain, 1800.0, partial(measure, group, result))
        forks.wait(room=False)
        if not plain.survived:
            sys.exit(f"{group.name}: the tests fail without any change: {plain.why}")
        print(f"{group.name}: its tests take {plain.seconds:.1f} s", flush=True)
        reached[group.name] = Reached(*json.loads(result.read_text()))
    return reached


def _report(
    options: argparse.Namespace, about: dict[str, Any], tallies: dict[Path, Tally], ended: list[Mutant]
) -> bool:
    """Prints everything; True if too little was noticed."""
    rows = []
    groups: dict[str, list[Mutant]] = {}
    for mutant in ended:
        groups.setdefault(mutant.group.name, []).append(mutant)
    for path, tally in tallies.items():
        if tally.run:
            noticed = tally.run - len(tally.survived)
            rows.append(
                [
                    str(path.relative_to(ROOT)),
                    str(tally.all),
                    str(tally.run),
                    f"{noticed / tally.run:.0%}",
                ]
            )
    shares = {}
    for name, all_ in groups.items():
        shares[name] = 100 * sum(not m.survived for m in all_) / len(all_)
        rows.append([f"all of {name}", "", str(len(all_)), f"{shares[name]:.1f}%"])
    print(table(["file", "changes", "run", "noticed"], rows))
    for mutant in ended:
        if mutant.survived:
            print(_told(mutant))
    results = [
        {
            "file": str(m.path.relative_to(ROOT)),
            "line": m.line,
            "before": m.before,
            "after": m.after,
            "survived": m.survived,
            "seconds": round(m.seconds, 1),
            "why": m.why,
        }
        for m in ended
    ]
    write_json(options.json, about, {"noticed": shares, "mutants": results})
    return any(share < options.least for share in shares.values())


def _told(mutant: Mutant) -> str:
    return (
        f"survived: {mutant.path.relative_to(ROOT)}:{mutant.line}  #{mutant.index}\n"
        f"    - {_first_line(mutant.before)}\n    + {_first_line(mutant.after)}"
    )


def _first_line(text: str) -> str:
    lines = text.splitlines()
    return lines[0] + (" ..." if len(lines) > 1 else "")


if __name__ == "__main__":
    main()
