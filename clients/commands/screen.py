"""The output of `ramify chat`: answers as they come, and notes beside them.

`Screen` writes plain text; `markdown.MarkdownScreen` renders. Notes may come from another thread, such
as that the server is gone. This file does not know sessions or commands.
"""

import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TextIO

# What a terminal would obey, shown as the pictures that Unicode has for it; not tab and newline.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
# Unicode's bidirectional controls, and its own ends of lines: what they reorder reads as something else.
_BIDI = 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)
_PICTURES |= dict.fromkeys(_BIDI, 0xFFFD)


class PendingAnswer(Protocol):
    """An answer on its way."""

    def add(self, text: str, cut: int = 0) -> None:
        """Take back `cut` characters of what was shown, then show `text`."""


class Screen:
    """Plain text: answers to `out`, the rest to `notes`.

    None stands for `sys.stdout` as it is when something is written: while a prompt waits, that is
    what puts lines above it. `colour`: both are a terminal.
    """

    def __init__(self, out: TextIO | None, notes: TextIO | None, *, colour: bool) -> None:
        self._out = out
        self._notes = notes
        self.colour = colour
        self._lock = threading.Lock()
        self._open = False  # the answer's last line has no end yet

    @property
    def out(self) -> TextIO:
        return self._out or sys.stdout

    @property
    def notes(self) -> TextIO:
        return self._notes or sys.stdout

    def answer(self) -> AbstractContextManager[PendingAnswer]:
        """Give a context for the time of an answer."""
        return nullcontext(self)

    def add(self, text: str, cut: int = 0) -> None:
        """Show a part of the answer."""
        if cut:
            self.note(f"(the last {cut} characters were taken back by another client)")
        if text:
            with self._lock:
                self.out.write(shown(text) if self.out.isatty() else text)
                self.out.flush()
                self._open = not text.endswith("\n")

    def end_line(self) -> None:
        """End the answer's last line, if it has no end."""
        if self._open:
            self.add("\n")

    def note(self, text: str) -> None:
        """Show a line that is not part of an answer; dim on a terminal."""
        self._line(text, "2")

    def error(self, text: str) -> None:
        self._line(text, "31")

    def _line(self, text: str, style: str) -> None:
        with self._lock:
            if self._open and self.colour:  # the same terminal: not in the middle of a line
                self.notes.write("\n")
                self._open = False
            text = shown(
                text
            )  # wherever it goes: with `--script > file` notes are on a terminal all the same
            self.notes.write(f"\x1b[{style}m{text}\x1b[0m\n" if self.colour else f"{text}\n")
            self.notes.flush()


def shown(text: str) -> str:
    """Clean a text for a terminal. A model's text must not move the cursor, or worse."""
    return text.replace("\r\n", "\n").translate(_PICTURES)
