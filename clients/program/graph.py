"""The ops of a program, drawn: one node for each op, and an arrow from each op that it waits for."""

import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ramify.clients.program.steps import Sender, Step
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import Append, Fork, Generate, Join, Op, Prune, Select, names

_SHOWN = 40  # characters of a text
_NAMES = 6  # of branches


class Graph(msgspec.Struct, frozen=True):
    """A traced program. `ops`: what it sends, as far as it could be traced. `names`: of their gaps.

    `stops`: why it is not one frame, each with its place; empty: the whole program is one. `moved`: what
    `using(reorder=True)` changed of its prompts, which `ops` show as they are sent.
    """

    name: str
    ops: list[Op]
    names: list[str | None]
    stops: list[str]
    moved: list[str] = []

    @property
    def whole(self) -> bool:
        """Whether the whole program is known, and goes out as one frame."""
        return not self.stops

    def edges(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of indices of `ops`: the second one stands behind the first on a branch."""
        last: dict[str, int] = {}
        for i, op in enumerate(self.ops):
            reads, writes = _touched(op)
            for before in sorted({last[name] for name in (*reads, *writes) if name in last}):
                yield before, i
            last.update(dict.fromkeys((*reads, *writes), i))

    def labels(self) -> list[str]:
        """Write the text of each node."""
        return [_label(op, name) for op, name in zip(self.ops, self.names, strict=True)]

    def mermaid(self) -> str:
        """Write the graph as mermaid text."""
        lines = ["flowchart TD"]
        for i, label in enumerate(self.labels()):
            text = label.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
            lines.append(f'    n{i}["{text.replace(">", "&gt;").replace(chr(10), "<br/>")}"]')
        lines += [f"    n{a} --> n{b}" for a, b in self.edges()]
        lines += [f"    %% reordered {what}" for what in self.moved]
        return "\n".join([*lines, *(f"    %% not one frame: {why}" for why in self.stops)]) + "\n"

    def dot(self) -> str:
        """Write the graph as DOT, for graphviz."""
        lines = [f"digraph {_quoted(self.name)} {{", "    node [shape=box, fontname=sans];"]
        notes = [*(f"reordered {what}" for what in self.moved)]
        notes += [f"not one frame: {why}" for why in self.stops]
        if notes:
            lines.append(f"    fontname=sans; labeljust=l; label={_quoted(chr(10).join(notes))};")
        for i, (op, label) in enumerate(zip(self.ops, self.labels(), strict=True)):
            model = isinstance(op, Generate | Select)
            look = ', style="rounded,filled", fillcolor="#dcebff"' if model else ""
            lines.append(f"    n{i} [label={_quoted(label)}{look}];")
        lines += [f"    n{a} -> n{b};" for a, b in self.edges()]
        return "\n".join([*lines, "}"]) + "\n"

    def show(self, path: str | Path | None = None) -> str:
        """Print the graph as mermaid text and return it. `path`: also as a picture, by graphviz.

        The suffix says which kind: `.svg`, `.png`, `.pdf`. Raises FileNotFoundError without `dot`.
        """
        text = self.mermaid()
        if path is not None:
            self.picture(Path(path))
        print(text)
        return text

    def picture(self, path: Path) -> None:
        """Draw the graph with graphviz."""
        dot = shutil.which("dot")
        if dot is None:
            raise FileNotFoundError(
                "`dot` is not installed: install graphviz, or use the mermaid text of show()"
            )
        kind = path.suffix.removeprefix(".") or "svg"
        subprocess.run([dot, f"-T{kind}", "-o", str(path)], input=self.dot().encode(), check=True)


class _Paper:
    """A backend that nothing is sent to; branches get short names."""

    frames = True

    def __init__(self) -> None:
        self._children: dict[str, int] = {}

    def fresh_names(self, parent: str, count: int) -> list[str]:
        if not self._children:  # the program's own branch
            self._children[parent] = 0
            return [parent]
        first = self._children.get(parent, 0) + 1
        self._children[parent] = first + count - 1
        return [f"{parent}.{first + i}" for i in range(count)]

    async def send(self, ops: Sequence[Op]) -> NoReturn:
        raise BadRequest("a trace sends nothing")

    def branch(self, name: str) -> NoReturn:
        raise BadRequest("a trace knows no positions")


class StepRecorder(Sender):
    """Keeps the steps of a traced program."""

    def __init__(self, name: str) -> None:
        super().__init__(_Paper(), "auto")
        self._name = name
        self._steps: list[Step] = []

    def add(self, step: Step, where: Callable[[], str]) -> None:
        for state in (*step.writes, *step.reads):
            state.last = step
        self._steps.append(step)

    def flush(self) -> None:
        pass

    def graph(self, why: str | None) -> Graph:
        """Make the recorded graph. `why`: why the trace ended before the program did."""
        graph = Graph(self._name, [], [], [] if why is None else [why])
        for step in self._steps:
            ops = list(step.ops())
            graph.ops.extend(ops)
            graph.names.extend([None] * (len(ops) - 1) + [step.name] if ops else [])
        return graph


def _touched(op: Op) -> tuple[Sequence[str], Sequence[str]]:
    """Find the branches that an op reads, and those that it changes."""
    match op:
        case Fork():
            return [], [*([op.branch] if op.branch is not None else []), *op.as_]
        case Join():
            return op.from_, [op.branch]
        case Prune():
            return [*op.from_, *(op.score_from or [])], op.targets
        case Append() | Generate() | Select():
            return [], names(op.branch)
        case _:
            raise AssertionError(op)


def _label(op: Op, name: str | None) -> str:
    match op:
        case Append(messages=list(messages)):
            said = "\n".join(f"{turn.role}: {_short(turn.content)}" for turn in messages)
            return f"append to {_names(op.branch)}\n{said}"
        case Append():
            return f"append to {_names(op.branch)}\n{_short(op.text or '')}"
        case Generate():
            return f"generate {name or ''} on {_names(op.branch)}".replace("  ", " ")
        case Select():
            return f"select {name or ''} of {len(op.choices)} on {_names(op.branch)}".replace("  ", " ")
        case Fork():
            return f"fork {op.branch} into {_listed(op.as_)}" if op.branch else f"new {op.as_[0]}"
        case Join():
            return f"join {_listed(op.from_)} into {op.branch}"
        case Prune(from_=[only]):
            return f"{', '.join(op.targets)} goes on as {only}"
        case Prune():
            return f"prune {_listed(op.from_)} by {op.by} into {_listed(op.targets)}"
        case _:
            raise AssertionError(op)


def _names(branch: Any) -> str:
    return _listed(names(branch))


def _listed(given: Sequence[str]) -> str:
    """List some names; of many, the first and the last."""
    if len(given) <= _NAMES:
        return ", ".join(given)
    return f"{given[0]}, {given[1]} ... {given[-1]} ({len(given)})"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
