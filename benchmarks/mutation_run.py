"""Runs the tests of a group against changed code: collects them once, then forks for each change.

A child swaps the code of the changed functions and runs the tests that reach the changed line, the
fastest first, until one fails. No file is written and nothing is imported again. Code that runs at
import (constants, fields, defaults) cannot be swapped: for such a change the child imports everything
anew. This file does not know what a change is, nor which are chosen.
"""

import ast
import functools
import gc
import hashlib
import importlib.machinery
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

BASELINE_S = 600.0  # for one test, unchanged
MEMORY = 8 << 30  # bytes of data that a child may have: a changed loop may fill a list for ever


@dataclass(frozen=True)
class Outcome:
    """Of one child. `code` 0: all tests passed."""

    code: int
    seconds: float
    why: str

    @property
    def passed(self) -> bool:
        return self.code == 0


@dataclass(frozen=True)
class Changed:
    """A file with one change: its tree before and after, and the lines of the changed statement."""

    path: Path
    before: ast.Module
    after: ast.Module
    lines: range
    in_function: bool


class Reached:
    """Which tests of a group reach which line of its files, and how long they take.

    Measured now or in an earlier run: of a file that has changed since, it knows the tests that reach
    any of it; tests that it does not know are taken to reach everything.
    """

    def __init__(
        self,
        lines: dict[str, dict[str, list[str]]],
        seconds: dict[str, float],
        digests: dict[str, str],
        names: Iterable[str],
    ) -> None:
        self._lines = lines
        self._digests = digests
        self._new = set(names) - seconds.keys()
        self.seconds = {name: seconds.get(name, 0.05) for name in names}

    @classmethod
    def read(cls, path: Path, names: Iterable[str]) -> "Reached":
        """`names`: the tests there are now."""
        return cls(*json.loads(path.read_text()), names)

    def tests(self, changed: Changed) -> list[str]:
        """Those that reach the changed lines, the fastest first; all of them if they run at import."""
        found = set(self.seconds)
        lines = self._lines.get(str(changed.path))
        if changed.in_function and lines is not None:
            if self._digests.get(str(changed.path)) == digest(changed.path):
                lines = {line: lines.get(line, []) for line in map(str, changed.lines)}
            found &= {test for tests in lines.values() for test in tests} | self._new
        return self._fastest_first(found)

    def all(self) -> list[str]:
        """All tests, the fastest first."""
        return self._fastest_first(self.seconds)

    def _fastest_first(self, tests: Iterable[str]) -> list[str]:
        return sorted(tests, key=lambda test: (self.seconds[test], test))

    def limits(self, tests: Sequence[str], budget: float) -> dict[str, float]:
        """Those that take `budget` seconds in all, and how long each may take on a busy machine."""
        limits = {}
        for test in tests:
            budget -= self.seconds[test]
            if budget >= 0:
                limits[test] = 10 + 20 * self.seconds[test]
        return limits


class Forks:
    """Runs functions in forked processes, at most `jobs` at once, and hears how each has ended."""

    def __init__(self, jobs: int, folder: Path) -> None:
        self._jobs = jobs
        self._folder = folder
        self._running: dict[int, tuple[Callable[[Outcome], None], float, Path]] = {}
        self._count = 0

    def start(self, run: Callable[[], int], over: Callable[[Outcome], None]) -> None:
        """Fork and call `run` once there is room; `over` is told the outcome."""
        self._wait(self._jobs - 1)
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        pid = os.fork()
        if pid == 0:
            _child(run, folder)
        self._running[pid] = (over, time.perf_counter(), folder)

    def finish(self) -> None:
        """Wait for all that run."""
        self._wait(0)

    def kill(self) -> None:
        """End those that run: nobody waits for them any more."""
        for pid in self._running:
            _kill(pid)

    def _wait(self, most: int) -> None:
        while len(self._running) > most:
            self._poll()
            time.sleep(0.005)

    def _poll(self) -> None:
        for pid, (over, begin, folder) in list(self._running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            _kill(pid)  # what it has started, too
            code = os.waitstatus_to_exitcode(status)
            why = "" if code == 0 else "hung" if code < 0 else _last_words(folder / "log")
            shutil.rmtree(folder, ignore_errors=True)
            del self._running[pid]
            over(Outcome(code, time.perf_counter() - begin, why))


def _child(run: Callable[[], int], folder: Path) -> None:
    """Everything that a child does. Does not return."""
    code = 70
    try:
        os.setpgid(0, 0)
        out = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))]
    return (failed or lines or ["no output"])[-1][:200]


# --- the tests ----------------------------------------------------------------------------------------


class Tests:
    """The collected tests of a group, in the process that forks. Made by `collected`."""

    def __init__(self, session: Any, files: Sequence[Path]) -> None:
        self._session = session
        self._files = files
        self._items = {item.nodeid: item for item in session.items}
        self.names = list(self._items)
        self._functions = _functions(files)

    def measure(self, result: Path) -> int:
        """In a child: all tests, unchanged; what `Reached` needs goes to `result`."""
        import coverage

        aliases = [str(file).replace("/", "*/", 1) for file in self._files]
        watch = coverage.Coverage(
            data_file=None, include=[*map(str, self._files), *aliases], config_file=False
        )
        plugin = _Measure(watch)
        self._session.config.pluginmanager.register(plugin)
        watch.start()
        code = self.run(dict.fromkeys(self._items, BASELINE_S))
        watch.stop()
        data = watch.get_data()
        lines = {os.path.realpath(f): data.contexts_by_lineno(f) for f in data.measured_files()}
        digests = {str(file): digest(file) for file in self._files}
        result.write_text(json.dumps([lines, plugin.seconds, digests]))
        return code

    def run(self, limits: Mapping[str, float], changed: Changed | None = None) -> int:
        """In a child: these tests up to the first that fails; its exit code.

        The first that takes longer than its limit ends the child: the kernel does that, whatever hangs.
        """
        names = list(limits)
        if changed is not None and not (changed.in_function and self._swap(changed)):
            _load(changed)
            return _run_anew(names, _Alarm(limits))
        self._session.config.pluginmanager.register(_Alarm(limits))
        from _pytest.main import pytest_runtestloop

        session = self._session
        session.items = [self._items[name] for name in names]
        session.config.option.maxfail = 1
        with suppress(session.Failed, session.Interrupted):
            pytest_runtestloop(session)
        return 1 if session.testsfailed else 0

    def _swap(self, changed: Changed) -> bool:
        """Give the changed functions their new code; False if that is not possible."""
        before, after = (
            _codes(compile(tree, str(changed.path), "exec", dont_inherit=True))
            for tree in (changed.before, changed.after)
        )
        swapped = False
        for function in self._functions.get(str(changed.path), ()):
            key = _key(function.__code__)
            old, new = before.get(key, []), after.get(key, [])
            if old == new:
                continue
            if len(old) != 1 or len(new) != 1 or old[0].co_freevars != new[0].co_freevars:
                return False
            function.__code__ = new[0]
            swapped = True
        return swapped


class _Measure:
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


class _Alarm:
    """A pytest plugin: a test that takes too long ends the process."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        self._limits = limits

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._limits[nodeid])


class _Driver:
    """A pytest plugin: collects as always, and then has `drive` do what it likes with the tests."""

    def __init__(self, files: Sequence[Path], drive: Callable[[Tests], None]) -> None:
        self._files = files
        self._drive = drive
        self.driven = False

    def pytest_runtestloop(self, session: Any) -> bool:
        if not session.testsfailed:
            tests = Tests(session, self._files)
            gc.collect()
            gc.freeze()  # children share the pages
            self._drive(tests)
            self.driven = True
        return True


def collected(tests: Sequence[Path], files: Sequence[Path], drive: Callable[[Tests], None]) -> bool:
    """Collect tests, import what they import, and call `drive` with them; False if that fails."""
    driver = _Driver(files, drive)
    _pytest([str(test) for test in tests], [driver], "--no-summary")
    return driver.driven


def _run_anew(names: Sequence[str], alarm: _Alarm) -> int:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if name.partition(".")[0] in ("ramify", "tests") or "/tests/" in file:
            del sys.modules[name]
    return _pytest(names, [alarm])


def _pytest(arguments: Sequence[str], plugins: Sequence[Any], *options: str) -> int:
    import pytest
    from hypothesis import Phase, settings

    # a failure is enough: nobody reads the smallest example; the same examples in each run
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutation", phases=phases, database=None, derandomize=True)
    settings.load_profile("mutation")
    fixed = ("-x", "-q", "-s", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist")
    warnings = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    return int(pytest.main([*fixed, *warnings, *options, *arguments], plugins=list(plugins)))


# --- changed code -------------------------------------------------------------------------------------


def digest(file: Path) -> str:
    """Changes with the file's content."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _functions(files: Sequence[Path]) -> dict[str, list[FunctionType]]:
    """The functions of these files that live in this process. Forgets what functions have cached."""
    found: dict[str, list[FunctionType]] = {str(file): [] for file in files}
    for each in gc.get_objects():
        kind = type(each)  # not isinstance: that asks the objects, and some of them warn
        if kind is FunctionType:
            found.get(os.path.realpath(each.__code__.co_filename), []).append(each)
        elif kind is functools._lru_cache_wrapper:
            each.cache_clear()
    return found


def _key(code: CodeType) -> tuple[str, int]:
    return (code.co_qualname, code.co_firstlineno)


def _codes(code: CodeType) -> dict[tuple[str, int], list[CodeType]]:
    found: dict[tuple[str, int], list[CodeType]] = {}
    for each in _inner(code):
        found.setdefault(_key(each), []).append(each)
    return found


def _inner(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inner(constant)


def _load(changed: Changed) -> None:
    """From now on this process imports the changed tree in place of the file."""
    loader = importlib.machinery.SourceFileLoader
    original = loader.get_code
    path = os.path.realpath(changed.path)

    def get_code(self: Any, fullname: str) -> CodeType | None:
        if os.path.realpath(self.path) == path:
            return compile(changed.after, path, "exec", dont_inherit=True)
        return original(self, fullname)

    loader.get_code = get_code  # type: ignore[method-assign]
