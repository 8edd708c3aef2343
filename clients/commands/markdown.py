"""Answers as Markdown on a terminal, while they stream.

Text is shown by blocks (a paragraph, a list, a fenced program). A block that is complete is printed
once, for good, and scrolls away as any output; only the last, unfinished one is drawn again when
text comes. So nothing flickers, and the work for a long answer is that of its blocks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from ramify.clients.commands.screen import PendingAnswer, Screen, shown

_PARSER = MarkdownIt().enable("table")


class MarkdownScreen(Screen):
    """A terminal that shows Markdown. Answers go through `console`; notes as well, or to `notes`.

    A console is locked, and puts notes above the block that is being drawn.
    """

    def __init__(self, console: Console, notes: Console | None = None) -> None:
        super().__init__(None, None, colour=True)
        self._console = console
        self._notes_console = notes or console

    @contextmanager
    def answer(self) -> Iterator[PendingAnswer]:
        live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
        shower = Blocks(self._console, live)
        try:
            with live:
                try:
                    yield shower
                finally:
                    live.update("", refresh=True)
        finally:
            shower.finish()  # what was interrupted stays on the screen too

    def end_line(self) -> None:
        pass  # blocks end theirs

    def _line(self, text: str, style: str) -> None:
        # the terminal wraps it: a command that is told is one line where it is copied
        said = Text(shown(text), style="red" if style == "31" else "dim")
        self._notes_console.print(said, soft_wrap=True)


class Blocks:
    """The blocks of one answer. `_pending`: the text of the block that is not complete."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console = console
        self._live = live
        self._pending = ""
        self._printed = False

    def add(self, text: str, cut: int = 0) -> None:
        if cut > len(self._pending):
            self._console.print(Text("(text above was taken back by another client)", style="dim"))
        self._pending = self._pending[: max(0, len(self._pending) - cut)] + shown(text)
        *finished, self._pending = blocks(self._pending)
        if finished:
            self._live.update("")
        for block in finished:
            self._print(block)
        self._live.update(_Tail(_markdown(self._pending), gap=self._printed), refresh=True)

    def finish(self) -> None:
        """Print what is left of an answer that has ended."""
        for block in blocks(self._pending + "\n"):
            if block.strip():
                self._print(block)
        self._pending = ""

    def _print(self, block: str) -> None:
        if self._printed:
            self._console.print()
        self._console.print(_markdown(block))
        self._printed = True


class _Tail:
    """The end of something, as far as the window has room: above it, lines would stay for ever."""

    def __init__(self, body: Markdown, *, gap: bool) -> None:
        self._body = body
        self._gap = gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._body, options, pad=False)
        if self._gap:
            lines.insert(0, [])
        for i, line in enumerate(lines[-max(1, console.size.height - 2) :]):
            if i:
                yield Segment.line()
            yield from line


def blocks(text: str) -> list[str]:
    """Split Markdown into its top-level blocks. All are complete but the last, which may be empty.

    A line without its end may become anything, so it belongs to the last block.
    """
    whole = text[: text.rfind("\n") + 1]
    starts = [t.map[0] for t in _PARSER.parse(whole) if t.level == 0 and t.nesting >= 0 and t.map]
    lines = text.split("\n")
    cuts = [0, *starts[1:], len(lines)]
    return ["\n".join(lines[a:b]) + ("\n" if b < len(lines) else "") for a, b in pairwise(cuts)]


def _markdown(text: str) -> Markdown:
    return Markdown(text, code_theme="ansi_dark")
