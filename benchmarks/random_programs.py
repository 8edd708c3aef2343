"""Random programs of two clients (and a viewer) on one session: does each know what the session holds?

    python benchmarks/random_programs.py [--programs 3000] [--seed 0] [--json FILE]

The world is that of the tests, without a loop or a socket: the real session, scheduler and cache, and a
fake executor, whose mailboxes are worked off in random order (`tests/actors/session/conftest.py`). A
program is a few dozen frames of both clients, with conflicts, renames, cancels, slow readers and resumes
at any moment (`two_clients.py` beside it says what is checked). Program i has the seed `--seed` + i.

The exit code is 1 if a program failed; its seed and what was wrong are printed.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from types import ModuleType

from report import headline, machine, table, write_json

from ramify.actors.tokenizer import Tokenizer

TESTS = Path(__file__).parents[1] / "tests"


def load(path: Path, name: str) -> ModuleType:
    """A module of the tests, which are no package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30, help="frames of a program")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    about = machine()
    print(headline(about), flush=True)
    world = load(TESTS / "actors" / "session" / "conftest.py", "session_world")
    programs = load(TESTS / "actors" / "session" / "two_clients.py", "two_clients")
    counts: Counter[str] = Counter()
    failed: dict[int, str] = {}
    begin = shown = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        load(TESTS / "conftest.py", "tests_conftest").write_tokenizer(Path(folder))
        tokenizer = Tokenizer.load(Path(folder))
        for seed in range(options.seed, options.seed + options.programs):
            try:
                counts.update(
                    programs.run_program(world.SimEngine, tokenizer, seed, steps=options.steps)
                )
            except Exception as error:
                failed[seed] = "".join(traceback.format_exception(error, limit=-3))
            if time.perf_counter() - shown > 10:
                shown = time.perf_counter()
                print(
                    f"{shown - begin:6.0f} s  {seed - options.seed + 1:6} programs, "
                    f"{len(failed)} failed",
                    flush=True,
                )
    figures = {
        "programs": options.programs,
        "failed": len(failed),
        "seconds": round(time.perf_counter() - begin, 1),
        **dict(sorted(counts.items())),
    }
    print(table(["", ""], [[name, f"{value:,}"] for name, value in figures.items()]))
    for seed, what in list(failed.items())[:5]:
        print(f"--- seed {seed}\n{what}")
    write_json(options.json, about, {"figures": figures, "failed": failed})
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
