"""The prompt of `ramify chat` on a terminal: editing, history, completion, pasting.

A paste arrives as one piece (bracketed paste), so its lines are one message. While the prompt
waits, what other threads print appears above it. What is typed or pasted during an answer is not
echoed into it, and is there when the next prompt comes. Knows no sessions.
"""

import contextlib
import os
import sys
import termios
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.patch_stdout import patch_stdout

from ramify.clients.commands.screen import shown

HISTORY = 1000  # messages kept
PASTE_ON, PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
WordsOf = Callable[[str], Sequence[str]]  # a command ("" for the commands): what may follow


class Terminal:
    """Reads messages, as a context manager. `words`: for completion with Tab."""

    def __init__(self, words: WordsOf, history: Path | None = None) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=open_history(history or history_file()),
            completer=CommandCompleter(words),
            complete_while_typing=False,
            enable_history_search=True,
        )

    def __enter__(self) -> "Terminal":
        self._before = termios.tcgetattr(sys.stdin)
        silent = termios.tcgetattr(sys.stdin)
        silent[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
        return self

    def __exit__(self, *_: object) -> None:
        self._paste(PASTE_OFF)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def read(self, prompt: str) -> str | None:
        """Read one message; None at the end. Raises KeyboardInterrupt."""
        try:
            with patch_stdout(raw=True):
                return self._session.prompt(shown(prompt))  # it has a branch's name
        except EOFError:
            return None
        finally:
            self._paste(PASTE_ON)  # the prompt switched it off

    def _paste(self, mode: str) -> None:
        sys.stdout.write(mode)
        sys.stdout.flush()


class CommandCompleter(Completer):
    """Completes commands, their arguments, and files."""

    def __init__(self, words: WordsOf) -> None:
        self._words = words
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/"):
            return
        name, space, rest = text.partition(" ")
        if space and name in ("/save", "/load"):
            yield from self._paths.get_completions(Document(rest, len(rest)), complete_event)
            return
        typed = rest if space else name
        for word in self._words(name if space else ""):
            if word.startswith(typed):
                yield Completion(word, start_position=-len(typed), display=shown(word))


def history_file() -> Path:
    """Find the file of entered messages, in the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "ramify" / "messages"


def open_history(file: Path) -> History:
    """Open a history, which keeps the last messages; in memory if the file cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            _trim(file)
        with file.open("ab"):
            pass
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))


def _trim(file: Path) -> None:
    """Keep the last messages: each is an empty line, a line with `#`, and lines with `+`."""
    entries = file.read_bytes().split(b"\n\n#")
    if len(entries) > HISTORY:
        with contextlib.suppress(OSError):
            file.write_bytes(b"\n#" + b"\n\n#".join(entries[-HISTORY:]))
