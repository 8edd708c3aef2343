"""What the examples share: flags, a server, real data, and what it all took."""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel

from ramify import ConnectionLost
from ramify.clients.bench.server import served
from ramify.clients.generation import Result


@dataclass
class Stage:
    """A server, and where to write. `size`: how many items, branches or rounds, as the example says."""

    url: str
    size: int
    data: Path | None
    console: Console
    options: argparse.Namespace = field(default_factory=argparse.Namespace)
    _usage: list[tuple[int, int, int]] = field(default_factory=list)

    def rows(self, name: str, made_up: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """A data set of the folder `--data`; without one, what the example brings along."""
        if self.data is None:
            return list(made_up)
        path = self.data if self.data.is_file() else self.data / f"{name}.jsonl"
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def took(self, *results: Result) -> None:
        """Add up what generations cost."""
        self._usage += [(r.usage.prompt, r.usage.computed, r.usage.output) for r in results]

    def report(self) -> str:
        prompt, computed, output = (sum(column) for column in zip(*self._usage, strict=True))
        return (
            f"{len(self._usage)} calls, {prompt:,} prompt tokens: {computed:,} computed "
            f"({computed / max(1, prompt):.0%}); {output:,} output tokens"
        )


@contextmanager
def stage(
    text: str,
    arguments: Sequence[str] | None,
    *,
    size: int,
    what: str,
    least: int = 1,
    flags: Callable[[argparse.ArgumentParser], object] | None = None,
) -> Iterator[Stage]:
    """Parse the flags, start a server if none is named, and say at the end what it took.

    `text`: of the example's head, its first line is shown. `size`, `what`: the default of --size, and
    what it counts; `least` of them are needed. `flags`: adds more, which are in `options`.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default=os.environ.get("RAMIFY_URL"), help="a running server")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="real data sets (JSON lines); or one file"
    )
    parser.add_argument("--size", type=int, default=size, help=f"{what} (default {size})")
    if flags is not None:
        flags(parser)
    options = parser.parse_args(arguments)
    if options.size < least:
        parser.error(f"--size is {options.size}: at least {least}")
    console = Console(highlight=False)
    console.print(Panel(text.strip().splitlines()[0], border_style="blue"))
    try:
        with _server(options.url, console) as url:
            shown = Stage(url, options.size, options.data, console, options)
            yield shown
            if shown._usage:
                console.print(f"[dim]{shown.report()}[/]")
    except ConnectionLost as lost:
        raise SystemExit(str(lost)) from None


@contextmanager
def _server(url: str | None, console: Console) -> Iterator[str]:
    """The one that was named, or one of our own with the bundled model."""
    if url is not None:
        yield url
        return
    console.print(
        "[dim]The bundled model is tiny: it shows how things run, its answers are poor. "
        "RAMIFY_URL or --url name a server with a better one.[/]"
    )
    with served([], None) as server:
        yield server.url


def brief(text: str, most: int = 200) -> str:
    """A text on one line, not too long, and no markup."""
    flat = " ".join(text.split())
    return (flat if len(flat) <= most else flat[: most - 1] + "…").replace("[", r"\[")


def total(values: Iterable[bool]) -> str:
    """How many of them are true."""
    found = list(values)
    return f"{sum(found)} of {len(found)}"
