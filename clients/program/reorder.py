"""Constant text before text that varies, where the user asks for it: more of a prompt is shared.

    Question: {question}                     Answer in one word.
    Answer in one word.              ->      Question: {question}

The program is traced with marked arguments, so that it is known which lines of its text hold one. Of
each branch, the first text in which one stands is changed: its constant lines come first, in their
order; the others follow. Behind that text no prefix is shared anyway. The run itself gets the arguments
as they are, and text that is not what the trace foresaw stays as it is.

A line varies, too, if it holds a text of an argument that lost its mark on the way (`"".join`). What
Python makes of an argument otherwise (a hash, a date) counts as constant: `Graph.moved` says what was
moved. Pure.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import msgspec

from ramify.protocol.wire import Append, Fork, Generate, Op, Prune, Select, names

_BEGIN, _NAMED, _END = "\U000f5a01", "\U000f5a02", "\U000f5a03"  # of a private use area
_MARKS = re.compile(f"{_BEGIN}([^{_NAMED}]*){_NAMED}|{_END}")
_BREAKS = re.compile(r"(\n+)")
_SHOWN = 40  # characters of a line
_TOLD = 3  # characters of an argument's line, from which on it is looked for in text without marks


class Marked(str):
    """A text of an argument. It is an ordinary string until it becomes a part of another one."""

    __slots__ = ("argument",)
    argument: str

    def __new__(cls, text: str, argument: str) -> "Marked":
        made = super().__new__(cls, text)
        made.argument = argument
        return made

    def __format__(self, spec: str) -> str:
        return _shown(format(str.__str__(self), spec), self.argument)

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> Any:
        return f"{self}{other}" if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return f"{other}{self}" if isinstance(other, str) else NotImplemented


class _Number:
    """The mark of a number that is written into a text."""

    argument: str

    def __format__(self, spec: str) -> str:
        return _shown(super().__format__(spec), self.argument)

    def __str__(self) -> str:
        return _shown(super().__repr__(), self.argument)


class _Int(_Number, int):
    pass


class _Float(_Number, float):
    pass


def _kept(method: str) -> Callable[..., Any]:
    """Wrap a method of `str`, so that its texts are still the argument's."""

    def call(self: Marked, *args: Any, **kwargs: Any) -> Any:
        return mark(getattr(str, method)(self, *args, **kwargs), self.argument)

    return call


_CASES = ("upper", "lower", "title", "capitalize", "casefold")
_ENDS = ("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "center", "ljust", "rjust")
_PARTS = ("split", "rsplit", "splitlines", "partition", "rpartition", "__getitem__")
_WHOLES = ("replace", "translate", "__mul__", "__rmul__", "__mod__")

for _method in _CASES + _ENDS + _PARTS + _WHOLES:
    setattr(Marked, _method, _kept(_method))


def mark(value: Any, argument: str) -> Any:
    """Mark texts and numbers of a value, so that they can be recognised in texts made of them."""
    match value:
        case str():
            return Marked(value, argument)
        case bool():
            return value
        case int() | float():
            made = _Int(value) if isinstance(value, int) else _Float(value)
            made.argument = argument
            return made
        case list():
            return [mark(each, argument) for each in value]
        case tuple() if type(value) is tuple:
            return tuple(mark(each, argument) for each in value)
        case dict():
            return {key: mark(each, argument) for key, each in value.items()}
        case _:
            return value


class ReorderedText(NamedTuple):
    """A text that was reordered. `lines`: those that came to the front; `arguments`: those that vary."""

    branch: str
    role: str
    lines: list[str]
    arguments: list[str]

    def __str__(self) -> str:
        first = self.lines[0] if len(self.lines[0]) <= _SHOWN else self.lines[0][: _SHOWN - 3] + "..."
        more = f" and {len(self.lines) - 1} more" if len(self.lines) > 1 else ""
        why = f" ({', '.join(self.arguments)})" if self.arguments else ""
        return f"on {self.branch}, {self.role}: {first!r}{more} now before what varies{why}"


class Reordering(NamedTuple):
    """The new form of each text, and what was moved."""

    texts: dict[str, str]
    moved: list[ReorderedText]

    def text(self, text: str) -> str:
        """Find the text to send for `text`, a whole turn or all that stands between turns."""
        return self.texts.get(text, text)


def reordering(ops: Iterable[Op], arguments: Mapping[str, Any]) -> Reordering:
    """Work out the reordering for a program that was traced with marked `arguments` and sent `ops`."""
    made = Reordering({}, [])
    texts = {line for each in arguments.values() for text in _leaves(each) for line in text.splitlines()}
    told = {text for line in texts if len(text := line.strip()) >= _TOLD}
    constant: set[str] = set()  # branches that are the same in every run so far
    for op in ops:
        match op:
            case Fork() if op.branch is None or op.branch in constant:
                constant.update(op.as_)
            case Append():
                for name in constant.intersection(names(op.branch)):
                    if any(_reorder(made, told, name, *each) for each in _texts(op)):
                        constant.discard(name)
            case Generate() | Select():
                constant.difference_update(names(op.branch))
            case Prune():
                constant.difference_update(op.targets)
            case _:
                pass
    return made


def plain(op: Op) -> Op:
    """Take the marks out of an op."""
    if not isinstance(op, Append):
        return op
    if op.messages is None:
        return msgspec.structs.replace(op, text=unmarked(op.text or ""))
    turns = [msgspec.structs.replace(turn, content=unmarked(turn.content)) for turn in op.messages]
    return msgspec.structs.replace(op, messages=turns)


def unmarked(text: str) -> str:
    """Take the marks out of a text."""
    return _MARKS.sub("", text)


def _texts(op: Append) -> Iterable[tuple[str, str]]:
    """Find the (role, text) pairs that an op appends."""
    if op.messages is None:
        return [("text", op.text or "")]
    return [(turn.role, turn.content) for turn in op.messages]


def _reorder(made: Reordering, told: Set[str], branch: str, role: str, text: str) -> bool:
    """Note the new order of a text, if lines of it can be moved. Returns whether the text varies."""
    lines, breaks = _lines(text)
    varying = [line for line in lines if _BEGIN in line or any(each in line for each in told)]
    if not varying:
        return False
    first = lines.index(varying[0])
    moved = [line for line in lines[first:] if line.strip() and line not in varying]
    if moved and unmarked(text) not in made.texts:
        order = [*lines[:first], *moved, *(line for line in lines[first:] if line not in moved)]
        whole = "".join(map("".join, zip(order, breaks, strict=True)))
        made.texts[unmarked(text)] = unmarked(whole)
        names = dict.fromkeys(name for name in _MARKS.findall(text) if name)
        made.moved.append(ReorderedText(branch, role, [line.strip() for line in moved], list(names)))
    return True


def _leaves(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list() | tuple():
            for each in value:
                yield from _leaves(each)
        case dict():
            for each in value.values():
                yield from _leaves(each)


def _lines(text: str) -> tuple[list[str], list[str]]:
    """Split a text into lines and their breaks. A break inside of an argument does not count."""
    lines, breaks = [""], [""]
    depth = 0
    for part in _BREAKS.split(text):
        if part.startswith("\n") and depth == 0:
            breaks[-1] = part
            lines.append("")
            breaks.append("")
        else:
            lines[-1] += part
            depth += part.count(_BEGIN) - part.count(_END)
    return lines, breaks


def _shown(text: str, argument: str) -> str:
    return f"{_BEGIN}{argument}{_NAMED}{text}{_END}"
