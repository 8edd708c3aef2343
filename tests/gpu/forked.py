"""A Python process that imports once, and runs each program in a fork: torch and Triton take seconds.

For tests that must not share a process with others, whose kernels are interpreted.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_SERVE = """

def _serve():
    import builtins as _builtins, json as _json, os as _os, sys as _sys, traceback as _traceback

    for line in _sys.stdin:
        job = _json.loads(line)
        child = _os.fork()
        if not child:
            out = _os.open(job["out"], _os.O_WRONLY | _os.O_CREAT, 0o600)
            _os.dup2(out, 1)
            _os.dup2(out, 2)
            _os.chdir(job["folder"])
            _os.environ["TRITON_CACHE_DIR"] = job["folder"] + "/cache"
            _sys.argv[1:] = job["arguments"]
            code = 0
            try:
                exec(_builtins.compile(job["program"], "program", "exec"), globals())
            except BaseException:
                _traceback.print_exc()
                code = 1
            _sys.stdout.flush()
            _sys.stderr.flush()
            _os._exit(code)
        print(_os.waitstatus_to_exitcode(_os.waitpid(child, 0)[1]), flush=True)

_serve()
"""


class Done(NamedTuple):
    """`said`: on its standard output and error."""

    code: int
    said: str


class Forked:
    """Runs programs in forks of a process. See `forked`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, program: str, folder: Path, arguments: Sequence[str] = ()) -> Done:
        """Run it in `folder`, with Triton's cache there. It sees all that was imported."""
        out = folder / "said"
        job = {
            "program": program,
            "folder": str(folder),
            "out": str(out),
            "arguments": list(arguments),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return Done(int(self._process.stdout.readline()), out.read_text())


@contextmanager
def forked(imports: str, folder: Path) -> Iterator[Forked]:
    """`imports`: what runs once, first; it may define kernels, but must start no threads."""
    file = folder / "imports.py"  # kernels are read from files
    file.write_text(imports + _SERVE)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with subprocess.Popen(
        [sys.executable, str(file)],
        env=environment | {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Forked(process)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
