"""One-place changes to the cores: do the tests of their own folder notice?

    python benchmarks/mutation.py [--sample 100] [--seed 0] [--only scheduler] [--jobs 2] [--json FILE]
    python benchmarks/mutation.py --only actors/cache/tree.py --sample 0      # all changes of one file

What a change (a mutant) may be is in mutants.py, how one is run in mutation_run.py. The tests of a group
are run once unchanged, and coverage.py notes which of them reach which line. Each mutant then runs those
that reach its line, until one fails or takes far longer than it did. Code that tests run in a process of
its own is not changed there.

mutmut and cosmic-ray are not used: both rewrite files where they are imported from, and our packages
are folders that links make into `ramify.*`; both start an interpreter for each mutant, which costs more
than its tests. Here a mutant is a fork of a process that has collected the tests.

Every mutant that survived is printed. One that nobody can notice is listed in judged.toml with a reason:
it is run and counted all the same, and the share without the listed ones is printed beside. An entry
that fits no change any more, or that a test notices, is an error. The exit code is 1 if fewer than
`--least` percent (90) of a group's mutants were noticed. The same files and seed give the same sample.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mutants import Change, Changes, Judged, Stale
from mutation_run import Changed, Forks, Outcome, Reached, Tests, collected
from report import headline, machine, table, write_json

ROOT = Path(__file__).resolve().parents[1]
JUDGED = ROOT / "benchmarks" / "judged.toml"
LEAST = 90.0
KEY = ("within", "before", "after", "nth")  # `Change.key`
LEFT_OUT = ("__init__.py", "actor.py", "integrity.py")  # shells, and a check that only tests use


@dataclass(frozen=True)
class Group:
    """Files that are changed, and the tests that should notice: patterns from the root."""

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]

    def sources(self) -> list[Path]:
        found = [path for pattern in self.files for path in sorted(ROOT.glob(pattern))]
        return [path for path in dict.fromkeys(found) if path.name not in LEFT_OUT]

    def test_files(self) -> list[Path]:
        found: list[Path] = []
        for pattern in self.tests:
            for path in sorted(ROOT.glob(pattern)):
                found += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        return list(dict.fromkeys(found))


def _clients() -> tuple[str, ...]:
    names = ("session", "stream", "heads", "reconnect", "handles", "generation", "link", "trees")
    return tuple(f"clients/{name}.py" for name in names)


GROUPS = [
    Group("scheduler", ("actors/scheduler/**/*.py",), ("tests/actors/scheduler",)),
    Group("cache", ("actors/cache/**/*.py",), ("tests/actors/cache",)),
    Group("session", ("actors/session/**/*.py",), ("tests/actors/session",)),
    Group("clients", _clients(), ("tests/clients/test_*.py", "tests/clients/program")),
    Group("protocol", ("protocol/**/*.py",), ("tests/protocol",)),
    Group("kit", ("actors/kit/**/*.py",), ("tests/actors/kit",)),
    Group("front", ("actors/front/**/*.py",), ("tests/actors/front",)),
    Group("gateway", ("actors/gateway/**/*.py",), ("tests/actors/gateway",)),
    Group(
        "gpu",
        (
            "gpu/step/rows.py",
            "gpu/step/staging.py",
            "gpu/step/inputs.py",
            "gpu/sampling/*_sampler.py",
            "gpu/sampling/settings.py",
        ),
        ("tests/gpu/step", "tests/gpu/sampling", "tests/gpu/executors/test_torch_executor.py"),
    ),
]


@dataclass
class Mutant:
    """One change of one file, and how it ended."""

    group: Group
    path: Path
    changes: Changes
    index: int
    judged: str | None = None
    outcome: Outcome | None = None

    @property
    def change(self) -> Change:
        return self.changes.all[self.index]

    @property
    def file(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def survived(self) -> bool:
        return self.outcome is not None and self.outcome.passed

    def told(self) -> str:
        """For a person; between the lines, what judged.toml wants."""
        change = self.change
        nth = f"\nnth = {change.nth}" if change.nth else ""
        why = f"  {self.outcome.why}" if self.outcome and self.outcome.why else ""
        note = f"{why}  (judged: {self.judged})" if self.judged else why
        return (
            f"survived: {self.file}:{change.line}{note}\n"
            f"file = {_toml(self.file)}\nwithin = {_toml(change.within)}\n"
            f"before = {_toml(change.before)}\nafter = {_toml(change.after)}{nth}"
        )


def _toml(text: str) -> str:
    quote = "'''" if "\n" in text or ("'" in text and '"' in text) else '"' if "'" in text else "'"
    return f"{quote}{text}{quote}"


def mutants(only: Sequence[str], judged: Judged) -> Iterator[Mutant]:
    """All changes of the groups and files that were asked for."""
    for group in GROUPS:
        for path in group.sources():
            name = str(path.relative_to(ROOT))
            if not only or any(each == group.name or name.startswith(each) for each in only):
                changes = Changes(path.read_text(encoding="utf-8"))
                for index, change in enumerate(changes.all):
                    yield Mutant(group, path, changes, index, judged.reason(name, change))


class Campaign:
    """Runs the chosen mutants of each group."""

    def __init__(self, forks: Forks, folder: Path, kept: Path | None, budget: float) -> None:
        self._forks = forks
        self._folder = folder
        self._kept = kept
        self._budget = budget
        self._begin = time.perf_counter()

    def run(self, group: Group, chosen: Sequence[Mutant], tests: Sequence[str]) -> None:
        """Run them. Ends the program if the tests of the group fail without a change."""
        files = [ROOT / test for test in tests] or group.test_files()
        if not files:
            sys.exit(f"{group.name}: there are no tests")
        if not collected(files, group.sources(), partial(self._drive, group, chosen)):
            sys.exit(f"{group.name}: the tests cannot be collected")

    def _drive(self, group: Group, chosen: Sequence[Mutant], tests: Tests) -> None:
        result = (self._kept or self._folder) / f"{group.name}.json"
        if not result.exists():
            plain: list[Outcome] = []
            self._forks.start(partial(tests.measure, result), plain.append)
            self._forks.finish()
            if not plain[0].passed:
                sys.exit(f"{group.name}: the tests fail without any change: {plain[0].why}")
        reached = Reached.read(result, tests.names)
        seconds = sum(reached.seconds.values())
        print(f"\n{group.name}: {len(tests.names)} tests, {seconds:.1f} s", flush=True)
        for number, mutant in enumerate(chosen):
            after = mutant.changes.apply(mutant.index)
            change = mutant.change
            changed = Changed(mutant.path, mutant.changes.tree, after, change.lines, change.in_function)
            chosen_tests = reached.tests(changed)
            if not chosen_tests:  # unless it is called at import
                changed, chosen_tests = replace(changed, in_function=False), reached.all()
            limits = reached.limits(chosen_tests, self._budget)
            self._forks.start(partial(tests.run, limits, changed), partial(self._over, mutant))
            if number % 20 == 19:
                seconds = time.perf_counter() - self._begin
                print(f"{seconds:6.0f} s  {number + 1} of {len(chosen)}", flush=True)
        self._forks.finish()

    def _over(self, mutant: Mutant, outcome: Outcome) -> None:
        mutant.outcome = outcome
        if mutant.survived:
            print(mutant.told(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sample", type=int, default=100, help="mutants in all; 0: every one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], help="a group, or the start of a path")
    parser.add_argument("--tests", action="append", default=[], help="run these test files only")
    parser.add_argument("--jobs", type=int, default=max(1, os.cpu_count() or 2))
    parser.add_argument("--again", type=Path, help="those that survived, of a file of `--json`")
    parser.add_argument("--least", type=float, default=LEAST, help="percent that must be noticed")
    parser.add_argument(
        "--reached", type=Path, help="keep in this folder which test reaches what, for the next run"
    )
    parser.add_argument(
        "--budget", type=float, default=60.0, help="seconds of tests for each, the fastest first"
    )
    parser.add_argument("--json", help="write the table and every mutant's outcome to this file")
    options = parser.parse_args()
    about = machine()
    print(headline(about), flush=True)
    judged = Judged.read(JUDGED)
    try:
        judged.check(ROOT)
    except Stale as stale:
        sys.exit(f"{JUDGED.name} is stale: {stale}")
    chosen = list(mutants(options.only, judged))
    if options.again:
        before = json.loads(options.again.read_text())["results"]["mutants"]
        survived = {(each["file"], *map(each.get, KEY)) for each in before if each["survived"]}
        chosen = [mutant for mutant in chosen if (mutant.file, *mutant.change.key) in survived]
    elif options.sample:
        rng = random.Random(options.seed)
        places = sorted(rng.sample(range(len(chosen)), min(options.sample, len(chosen))))
        chosen = [chosen[place] for place in places]
    os.chdir(ROOT)
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")  # a fork has one thread
    if options.reached:
        options.reached.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        forks = Forks(options.jobs, Path(folder))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        campaign = Campaign(forks, Path(folder), options.reached, options.budget)
        try:
            for group in GROUPS:
                mine = [mutant for mutant in chosen if mutant.group is group]
                if mine:
                    campaign.run(group, mine, options.tests)
        finally:
            forks.kill()
    sys.exit(_report(options, about, chosen))


def _report(options: argparse.Namespace, about: dict[str, Any], chosen: Sequence[Mutant]) -> int:
    """Prints and writes everything; the exit code."""
    rows = []
    shares = {}
    for file in dict.fromkeys(mutant.file for mutant in chosen):
        rows.append([file, *_counts([mutant for mutant in chosen if mutant.file == file])])
    for name in dict.fromkeys(mutant.group.name for mutant in chosen):
        mine = [mutant for mutant in chosen if mutant.group.name == name]
        rows.append([f"all of {name}", *_counts(mine)])
        shares[name] = 100 * sum(not mutant.survived for mutant in mine) / len(mine)
    print(table(["file", "changes", "run", "survived", "noticed", "without judged"], rows))
    results = [
        {
            "file": mutant.file,
            "line": mutant.change.line,
            **dict(zip(KEY, mutant.change.key, strict=True)),
            "survived": mutant.survived,
            "judged": mutant.judged,
            "seconds": round(mutant.outcome.seconds, 2) if mutant.outcome else None,
            "why": mutant.outcome.why if mutant.outcome else None,
        }
        for mutant in chosen
    ]
    write_json(options.json, about, {"noticed": shares, "mutants": results})
    noticed = [mutant for mutant in chosen if mutant.judged and not mutant.survived]
    for mutant in noticed:
        print(f"{JUDGED.name} is stale: {mutant.file}:{mutant.change.line} is noticed by a test")
    return 1 if noticed or any(share < options.least for share in shares.values()) else 0


def _counts(mutants: Sequence[Mutant]) -> list[str]:
    """Cells: changes there are, run, survived, noticed; noticed of those that are not judged."""
    there = sum(len(changes) for changes in {id(m.changes): m.changes for m in mutants}.values())
    survived = sum(mutant.survived for mutant in mutants)
    judged = sum(mutant.survived and mutant.judged is not None for mutant in mutants)
    rest = len(mutants) - judged
    return [
        str(there),
        str(len(mutants)),
        str(survived),
        f"{1 - survived / len(mutants):.1%}",
        f"{(len(mutants) - survived) / rest:.1%}" if rest else "",
    ]


if __name__ == "__main__":
    main()
