"""The way the user called this program, so that hints are commands that work where they are read."""

import os
import shlex
import shutil
import sys
from pathlib import Path


def command(*args: str) -> str:
    """Write `ramify ARGS` as this process was called: `ramify`, `.venv/bin/ramify`, `python -m ...`."""
    return shlex.join([*_program(), *args])


def _program() -> list[str]:
    called = Path(sys.argv[0])
    if called.name == "cli.py" or called.parts[-2:] == ("ramify", "__main__.py"):  # python -m
        return [sys.executable, "-m", "ramify"]
    if called.name != "ramify":
        return ["ramify"]  # as a library: nothing better is known
    found = shutil.which("ramify")
    if found is not None and os.path.realpath(found) == os.path.realpath(called):
        return ["ramify"]
    absolute = Path(os.path.abspath(called))
    here = Path.cwd()
    return [str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)]
