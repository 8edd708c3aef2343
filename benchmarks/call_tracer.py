"""Notes which of our functions a thread enters, in this process or in those that it starts.

It does not know what the calls are for.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS = tuple(f"{folder}/" for folder in ("actors", "protocol"))  # the server's folders
BEGIN, END = signal.SIGUSR1, signal.SIGUSR2
_HOOK = "import sys; sys.path.append({here!r}); import call_tracer; call_tracer.obey({folder!r})"


@dataclass(frozen=True)
class EnteredCall:
    """A function of ours that was entered."""

    file: str
    name: str


@dataclass(frozen=True)
class Way:
    """The calls between two moments, in order."""

    calls: list[EnteredCall]

    @property
    def moves(self) -> int:
        files = [call.file for call in self.calls]
        return sum(a != b for a, b in pairwise(files))

    @property
    def files(self) -> list[str]:
        return sorted({call.file for call in self.calls})


@dataclass(frozen=True)
class Figures:
    calls: int
    moves: int
    files: int


class Tracer:
    """Notes calls on the thread that enters `tracing`. `events`: codes of ours, and what was written."""

    def __init__(self) -> None:
        self.events: list[CodeType | bytes] = []
        self._ours: dict[CodeType, bool] = {}

    @contextmanager
    def tracing(self) -> Iterator[None]:
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        ours = self._ours.get(code)
        if ours is None:
            ours = self._ours[code] = relative(code).startswith(OURS)
        if ours:
            self.events.append(code)
        elif code.co_name == "write" and code.co_filename.endswith("selector_events.py"):
            self.events.append(bytes(frame.f_locals["data"]))


def relative(code: CodeType) -> str:
    """The file of `code` as the repository names it."""
    try:
        return str(Path(code.co_filename).resolve().relative_to(ROOT))
    except ValueError:
        return ""


def way(events: Iterable[CodeType | bytes]) -> Way:
    return Way(
        [EnteredCall(relative(code), code.co_qualname) for code in events if isinstance(code, CodeType)]
    )


def figures(taken: Way) -> Figures:
    return Figures(len(taken.calls), taken.moves, len(taken.files))


@contextmanager
def traced_children(folder: Path) -> Iterator[None]:
    """Processes that are started meanwhile obey: see `obey`. Their files go to `folder`."""
    (folder / "sitecustomize.py").write_text(
        _HOOK.format(here=str(ROOT / "benchmarks"), folder=str(folder))
    )
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def traced(folder: Path) -> list[int]:
    """The processes that obey."""
    return [int(file.stem) for file in folder.glob("*.obeys")]


def end_notes(folder: Path, children: list[int]) -> dict[str, Way]:
    """What each of `children` has done until now."""
    for child in children:
        os.kill(child, END)
    while len(files := list(folder.glob("*.calls"))) < len(children):
        time.sleep(0.05)
    return {
        file.stem: Way([EnteredCall(*each) for each in json.loads(file.read_text())]) for file in files
    }


def obey(folder: str) -> None:
    """Note this process' calls between two signals, and write them to a file named by its id."""
    tracer = Tracer()

    def write(*_: object) -> None:
        sys.setprofile(None)
        calls = [(call.file, call.name) for call in way(tracer.events).calls]
        part = Path(folder, f"{os.getpid()}.part")
        part.write_text(json.dumps(calls))
        part.rename(part.with_suffix(".calls"))

    signal.signal(BEGIN, lambda *_: sys.setprofile(tracer.profile))
    signal.signal(END, write)
    Path(folder, f"{os.getpid()}.obeys").touch()
