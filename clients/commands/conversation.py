"""The talk of `ramify chat`: turns and slash commands on a session's branches.

It reads lines from a function and writes to a `Screen`, so that tests can hold a conversation. It
does not know terminals, flags or sockets.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec

from ramify.clients.generation import Result
from ramify.clients.handles import GenerateOptions
from ramify.clients.sync import SyncBranch, SyncGeneration, SyncSession
from ramify.protocol.errors import BadRequest, RamifyError
from ramify.protocol.wire import Append, BranchState, ChatMessage, Generate, Rollback, Usage

ReadLine = Callable[[str], str | None]

HELP = """\
/fork NAME       a new branch from here; /switch NAME goes there
/switch NAME     go on with another branch
/tree            the branches
/undo            take the last turn back
/retry           answer the last message again
/set KEY VALUE   a generation option (temperature, max_tokens, ...); without VALUE: the default again
/system TEXT     start this branch over with a system message
/save FILE       write this branch's turns (JSON)
/quit            leave (Ctrl-D). Ctrl-C stops an answer. A line that ends in \\ goes on"""


class Screen(NamedTuple):
    """Where things are shown: answers to `out`, the rest to `notes`. `colour`: both are a terminal."""

    out: TextIO
    notes: TextIO
    colour: bool

    def text(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()

    def note(self, text: str) -> None:
        """A line that is not part of an answer; dim on a terminal."""
        self.notes.write(f"\x1b[2m{text}\x1b[0m\n" if self.colour else f"{text}\n")
        self.notes.flush()

    def error(self, text: str) -> None:
        self.notes.write(f"\x1b[31m{text}\x1b[0m\n" if self.colour else f"{text}\n")
        self.notes.flush()


class Conversation:
    """A chat with one session. `options`: the generation options of every turn."""

    def __init__(
        self, session: SyncSession, read: ReadLine, screen: Screen, options: GenerateOptions
    ) -> None:
        self._session = session
        self._read = read
        self._screen = screen
        self._options = options
        self._branch: SyncBranch = session.main
        self._last: dict[str, str] = {}  # the last message said on each branch
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: screen.note(HELP),
            "fork": self._fork,
            "switch": self._switch,
            "tree": lambda _: screen.note(draw_tree(session.tree().branches, self._branch.name)),
            "undo": self._undo,
            "retry": self._retry,
            "set": self._set,
            "system": self.system,
            "save": self._save,
        }

    def run(self) -> None:
        """Talk until the end of the input or /quit. Raises what ends the session."""
        while True:
            line = self._message()
            if line is None or line.strip() in ("/quit", "/exit"):
                return
            try:
                self.handle(line)
            except RamifyError as error:
                self._screen.error(error.message)
                if self._session.error is not None:
                    raise

    def _message(self) -> str | None:
        """One message: a line, and what follows while it ends in a backslash. None: the end."""
        name = self._branch.name
        prompt = "> " if name == "main" else f"{name}> "
        lines: list[str] = []
        while True:
            try:
                line = self._read("... " if lines else prompt)
            except KeyboardInterrupt:
                self._screen.note("\nCtrl-D leaves")
                lines.clear()
                continue
            if line is None:
                return "\n".join(lines) if lines else None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def handle(self, line: str) -> None:
        """One message or command. Raises RamifyError."""
        if not line.strip():
            return
        if not line.startswith("/"):
            self._last[self._branch.name] = line
            self._show(self._branch.chat(line, **self._options))
            return
        name, _, rest = line[1:].partition(" ")
        command = self._commands.get(name.strip())
        if command is None:
            raise BadRequest(f"/{name} is no command: /help lists them")
        command(rest.strip())

    def _show(self, generation: SyncGeneration) -> None:
        """Stream an answer; Ctrl-C stops it and keeps what is there."""
        try:
            for delta in generation:
                self._screen.text(delta.text)
        except KeyboardInterrupt:
            generation.cancel()
        except RamifyError:
            self._screen.text("\n")
            raise
        result = generation.result()
        self._screen.text("\n")
        self._screen.note(describe(result))

    # --- commands -----------------------------------------------------------------------------

    def _fork(self, name: str) -> None:
        self._branch.fork(_one(name, "/fork NAME"))
        if self._branch.name in self._last:
            self._last[name] = self._last[self._branch.name]
        self._screen.note(f"{name} starts at token {self._branch.position}: /switch {name}")

    def _switch(self, name: str) -> None:
        known = [branch.name for branch in self._session.branches]
        if _one(name, "/switch NAME") not in known:
            raise BadRequest(f"there is no branch {name!r}: {', '.join(known)}")
        self._branch = self._session.branch(name)

    def _undo(self, _: str) -> None:
        position = self._branch.rollback(turns=1).position
        self._last.pop(self._branch.name, None)
        self._screen.note(f"back at token {position}")

    def _retry(self, _: str) -> None:
        """Roll back, say it again, generate: one frame, and the prompt is still cached."""
        name = self._branch.name
        if name not in self._last:
            raise BadRequest("nothing was said here yet")
        again = ChatMessage(role="user", content=self._last[name])
        *_handles, generation = self._session.send(
            [
                Rollback(id=0, branch=name, turns=1),
                Append(id=0, branch=name, messages=[again]),
                Generate(id=0, branch=name, **self._options),
            ]
        )
        assert isinstance(generation, SyncGeneration)
        self._show(generation)

    def system(self, text: str) -> None:
        """Start the branch over with a system message."""
        if not text:
            raise BadRequest("use /system TEXT")
        if self._branch.position:
            self._branch.rollback(to=0)
        self._branch.say(text, role="system")
        self._last.pop(self._branch.name, None)

    def _set(self, rest: str) -> None:
        if not rest:
            self._screen.note(json.dumps(self._options) if self._options else "all defaults")
            return
        name, _, value = rest.partition(" ")
        set_option(self._options, name, value.strip())

    def _save(self, name: str) -> None:
        branch = self._branch.tree(text=True)
        turns = [
            {"role": turn.role, "text": turn.text, "start": turn.start, "end": turn.end}
            for turn in branch.turns or []
        ]
        record = {"model": self._session.model, "branch": branch.branch, "turns": turns}
        try:
            target = Path(shlex.split(_one(name, "/save FILE", spaces=True))[0]).expanduser()
            target.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            raise BadRequest(f"cannot save: {error}") from None
        self._screen.note(f"{len(turns)} turns in {target}")


def _one(name: str, usage: str, *, spaces: bool = False) -> str:
    if not name or (" " in name and not spaces):
        raise BadRequest(f"use {usage}")
    return name


def set_option(options: GenerateOptions, name: str, value: str) -> None:
    """Set a generation option from text (JSON, or a plain string); no text takes it out.

    Raises BadRequest that names the option.
    """
    table: dict[str, Any] = options  # type: ignore[assignment]  # checked right here
    if name not in GenerateOptions.__annotations__:
        known = ", ".join(GenerateOptions.__annotations__)
        raise BadRequest(f"{name!r} is no generation option: {known}")
    if not value:
        table.pop(name, None)
        return
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    try:
        msgspec.convert({"type": "generate", "id": 0, name: parsed}, Generate)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{name}: {error}") from None
    table[name] = parsed


def describe(result: Result) -> str:
    """One line on a turn, for example

    53 tokens, 41.2 tok/s, first after 11 ms, 120 of 133 prompt tokens cached
    """
    usage = result.usage
    parts = [f"{usage.output} tokens"]
    rate = decode_rate(usage)
    if rate is not None:
        parts.append(f"{rate:.1f} tok/s")
    if usage.ttft_ms is not None:
        parts.append(f"first after {usage.ttft_ms:.0f} ms")
    parts.append(f"{usage.cached} of {usage.prompt} prompt tokens cached")
    if result.reason != "stop":
        parts.append(result.reason)
    return ", ".join(parts)


def decode_rate(usage: Usage) -> float | None:
    """Tokens a second after the first one; None where that cannot be said."""
    if usage.ttft_ms is None or usage.output < 2 or usage.total_ms <= usage.ttft_ms:
        return None
    return (usage.output - 1) / (usage.total_ms - usage.ttft_ms) * 1e3


def draw_tree(branches: list[BranchState], current: str) -> str:
    """The branches as an indented tree; the current one is marked."""
    names = {branch.branch for branch in branches}
    children: dict[str | None, list[BranchState]] = {}
    for branch in branches:
        parent = branch.parent if branch.parent in names else None
        children.setdefault(parent, []).append(branch)
    lines: list[str] = []

    def walk(parent: str | None, depth: int) -> None:
        for branch in children.get(parent, ()):
            mark = "*" if branch.branch == current else " "
            at = f" from {branch.at}" if branch.at is not None and branch.parent else ""
            busy = ", generating" if branch.running is not None else ""
            lines.append(f"{mark} {'  ' * depth}{branch.branch}{at}: {branch.position} tokens{busy}")
            walk(branch.branch, depth + 1)

    walk(None, 0)
    return "\n".join(lines)
