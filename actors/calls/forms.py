"""How each family of models writes tool calls. Pure.

A form is a coroutine: it is sent one character after the other, and "" at the end of the text. So it
cannot see how the text was cut into chunks. It raises `Broken` where what it read is no call, and
returns how many of the characters it read are not its own (they belong to the text that follows).

| form | what the model writes |
|---|---|
| `tagged` | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen, ours) |
| `xml` | `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` (Coder) |
| `mistral` | `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME[ARGS]{...}` |
| `mistral` | `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]` (Granite 3) |
| `deepseek` | `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, in marks for all |
| `harmony` | `<|channel|>commentary to=functions.NAME json<|message|>{...}<|call|>` (gpt-oss) |
| `python_tag` | `<|python_tag|>{"name": ..., "parameters": {...}}` (Llama 3) |
| `pythonic` | `<|tool_call_start|>[NAME(KEY=VALUE, ...), ...]<|tool_call_end|>` (LFM2) |
| `glm` | `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>` (GLM) |
| `minimax` | `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`, in tags for all |
| `kimi` | `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` |
| `nemotron` | `<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>` (Nemotron 2) |
| `gemma` | `<|tool_call>call:NAME{KEY:VALUE, ...}<tool_call|>`, strings between `<|"|>` (Gemma 4) |
| `bare` | as `python_tag` without the mark, up to the end of the text, or a list of such objects |

The closing tag of the last call may be missing: some models stop on it.
"""

import json
import re
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from ramify.actors.calls.literals import Reading, blanks, closed, either, key_of, literal, rest, until
from ramify.actors.calls.scanner import Broken, Scanner
from ramify.actors.calls.toolbox import decode

ARGUMENTS = ("arguments", "parameters")  # what families call them
NAME_MOST = 256  # characters of a tool's name, or of what stands in its place

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
ARG_KEY, ARG_KEY_END, ARG_VALUE, ARG_VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
MINIMAX, MINIMAX_END = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END, NAMED_PARAMETER = '<invoke name="', "</invoke>", '<parameter name="'
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI, KIMI_ARGUMENT, KIMI_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
TOOLCALL, TOOLCALL_END = "<TOOLCALL>", "</TOOLCALL>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, CALL_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
PYTHON_TAG = "<|python_tag|>"
RECIPIENT, COMMENTARY = "to=functions.", "<|channel|>commentary to=functions."
MESSAGE, CALL = "<|message|>", "<|call|>"
CALL_LIST = "<|tool_call|>"
PYTHONIC, PYTHONIC_END = "<|tool_call_start|>", "<|tool_call_end|>"
GEMMA, GEMMA_END = "<|tool_call>", "<tool_call|>"
_HEAD_END = re.compile(r"[\s<]")  # what ends a recipient's name


class Sink(Protocol):
    """Where a form tells what it has read."""

    def begin(self) -> None:
        """A call begins."""

    def named(self, name: str, ident: str | None = None) -> None:
        """The call's tool, and the id that the model gave it. Raises Broken if there is no such tool."""

    def argues(self, piece: str) -> None:
        """More of the JSON text of its arguments."""

    def scanned(self) -> str:
        """What went through the scanner, which ends here."""
        ...

    def scans(self, scanner: Scanner, *, arguments: bool = False) -> None:
        """What is read now goes through `scanner`: runs of a string need not be sent one by one.

        `arguments`: all of it is arguments, else what is in that member.
        """

    def typed(self, parameter: str, text: str) -> object:
        """The value of a parameter that was written as plain text."""

    def complete(self, value: object) -> None:
        """Its object is complete. Raises Broken if it is no call."""

    def commit(self) -> None:
        """What was completed counts, whatever follows."""


Form: TypeAlias = Callable[[Sink], Reading[int]]


def tagged(sink: Sink) -> Reading[int]:
    """Behind `<tool_call>`."""
    c = yield from blanks()
    if c == "<":
        yield from rest(FUNCTION, c)
        return (yield from xml(sink))
    yield from _object(sink, c)
    yield from closed(TOOL_CALL_END)
    sink.commit()
    return 0


def xml(sink: Sink) -> Reading[int]:
    """Behind `<tool_call><function=`."""
    yield from _function(sink)
    yield from closed(TOOL_CALL_END)
    sink.commit()
    return 0


def function(sink: Sink) -> Reading[int]:
    """Behind `<function=` where no `<tool_call>` stood before it."""
    yield from _function(sink)
    sink.commit()
    return 0


class _Around(NamedTuple):
    """Around a parameter, and behind all. `lines`: a line break around a value is no part of it."""

    begin: str
    named: str
    value: str
    ended: str
    last: str
    lines: bool = False


_CODER = _Around(PARAMETER, ">", "", PARAMETER_END, FUNCTION_END, lines=True)
_GLM = _Around(ARG_KEY, ARG_KEY_END, ARG_VALUE, ARG_VALUE_END, TOOL_CALL_END)
_MINIMAX = _Around(NAMED_PARAMETER, '">', "", PARAMETER_END, INVOKE_END)


def _function(sink: Sink) -> Reading[None]:
    sink.begin()
    name = (yield from until(">", NAME_MOST)).strip()
    sink.named(name)
    yield from _tagged(sink, name, (yield from blanks()), _CODER)


def _tagged(sink: Sink, name: str, c: str, tags: _Around) -> Reading[None]:
    """Parameters that have tags, and what ends them; `c` is the first character."""
    arguments: dict[str, object] = {}
    while (yield from either(c, tags.begin, tags.last)) != tags.last:
        key = (yield from until(tags.named, NAME_MOST)).strip()
        if tags.value:
            yield from rest(tags.value, (yield from blanks()))
        text = yield from until(tags.ended)
        value = sink.typed(key, text.removeprefix("\n").removesuffix("\n") if tags.lines else text)
        sink.argues((", " if arguments else "{") + f"{_json(key)}: {_json(value)}")
        arguments[key] = value
        c = yield from blanks()
    sink.argues("}" if arguments else "{}")
    sink.complete({"name": name, "arguments": arguments})


def glm(sink: Sink) -> Reading[int]:
    """Behind `<tool_call>`: the name, and perhaps a line break behind it (4.5, 4.6)."""
    sink.begin()
    name = (yield from until("<", NAME_MOST)).strip()
    sink.named(name)
    yield from _tagged(sink, name, "<", _GLM)
    sink.commit()
    return 0


def minimax(sink: Sink) -> Reading[int]:
    """Behind `<minimax:tool_call>`."""
    while True:
        c = yield from blanks()
        if not c or (yield from either(c, INVOKE, MINIMAX_END)) == MINIMAX_END:
            return 0
        sink.begin()
        name = yield from until('">', NAME_MOST)
        sink.named(name)
        yield from _tagged(sink, name, (yield from blanks()), _MINIMAX)
        sink.commit()


def kimi(sink: Sink) -> Reading[int]:
    """Behind `<|tool_calls_section_begin|>`. What names a call is its id, too."""
    known: set[str] = set()
    while True:
        c = yield from blanks()
        if not c or (yield from either(c, KIMI, SECTION_END)) == SECTION_END:
            return 0
        sink.begin()
        ident = (yield from until(KIMI_ARGUMENT, NAME_MOST)).strip()
        name, _, number = ident.removeprefix("functions.").rpartition(":")
        sink.named(name, ident if number.isdecimal() and ident not in known else None)
        known.add(ident)
        yield from _arguments(sink, name, (yield from blanks()))
        yield from closed(KIMI_END)
        sink.commit()


def nemotron(sink: Sink) -> Reading[int]:
    """Behind `<TOOLCALL>`."""
    yield from mistral(sink)
    yield from closed(TOOLCALL_END)
    return 0


def mistral(sink: Sink) -> Reading[int]:
    """Behind `[TOOL_CALLS]`, and behind Granite's `<|tool_call|>`."""
    c = yield from blanks()
    if c == "{":
        yield from _object(sink, c)
        sink.commit()
        return 0
    if c != "[":
        return (yield from _named(sink, c))
    while True:
        c = yield from blanks()
        yield from _object(sink, c)
        c = yield from blanks()
        if c not in (",", "]", ""):
            raise Broken
        sink.commit()
        if c != ",":
            return 0


def _named(sink: Sink, c: str) -> Reading[int]:
    """`NAME[CALL_ID]ID[ARGS]{...}`, of which the id may be missing, and `[ARGS]` as well."""
    sink.begin()
    head = ""
    while c != "{":
        head += c
        if not c or len(head) > NAME_MOST:
            raise Broken
        c = yield
    name, marked, ident = head.removesuffix(ARGS).partition(CALL_ID)
    if marked and not ident:
        raise Broken
    sink.named(name.strip())
    yield from _arguments(sink, name.strip(), c)
    sink.commit()
    return 0


def deepseek(sink: Sink) -> Reading[int]:
    """Behind `<｜tool▁calls▁begin｜>`.

    V3 and R1 put "function" before the name, and a fence around the arguments.
    """
    while True:
        c = yield from blanks()
        if not c:
            return 0
        if (yield from either(c, CALL_BEGIN, CALLS_END)) == CALLS_END:
            return 0
        sink.begin()
        head = (yield from until(CALL_SEP, NAME_MOST)).strip()
        fenced = head == "function"
        name = (yield from until("\n", NAME_MOST)).strip() if fenced else head
        sink.named(name)
        c = yield from blanks()
        if fenced:
            yield from rest("```json", c)
            c = yield from blanks()
        yield from _arguments(sink, name, c)
        if fenced:
            c = yield from blanks()
            yield from rest("```", c)
        yield from closed(CALL_END)
        sink.commit()


def harmony(sink: Sink) -> Reading[int]:
    """Behind the recipient's `to=functions.`: the rest of the header, the arguments, and the call's end.

    The recipient stands behind the channel, or (as the template writes it) behind the role before it.
    """
    sink.begin()
    head = yield from until(MESSAGE, NAME_MOST)
    name = _HEAD_END.split(head, maxsplit=1)[0]
    sink.named(name)
    c = yield from blanks()
    yield from _arguments(sink, name, c)
    yield from closed(CALL)
    sink.commit()
    return 0


def pythonic(sink: Sink) -> Reading[int]:
    """Behind `<|tool_call_start|>`: a list of Python's calls, or one of them."""
    c = yield from blanks()
    listed = c == "["
    if listed:
        c = yield from blanks()
    while True:
        sink.begin()
        name = c + (yield from until("(", NAME_MOST))
        yield from _pairs(sink, name.strip(), "=", ")")
        c = yield from blanks()
        if c == "," and listed:
            sink.commit()
            c = yield from blanks()
            continue
        if listed:
            if c not in ("]", ""):
                raise Broken
            c = yield from blanks()
        if c:
            yield from rest(PYTHONIC_END, c)
        sink.commit()
        return 0


def gemma(sink: Sink) -> Reading[int]:
    """Behind `<|tool_call>`."""
    c = yield from blanks()
    yield from rest("call:", c)
    sink.begin()
    name = yield from until("{", NAME_MOST)
    yield from _pairs(sink, name.strip(), ":", "}")
    yield from closed(GEMMA_END)
    sink.commit()
    return 0


def python_tag(sink: Sink) -> Reading[int]:
    """Behind `<|python_tag|>`: objects with ";" between them. What follows them is text."""
    c = yield from blanks()
    while True:
        yield from _object(sink, c)
        sink.commit()
        read = 1
        c = yield
        while c.isspace() or c == ";":
            read += 1
            c = yield
        if c != "{":
            return read if c else 0


def bare(sink: Sink) -> Reading[int]:
    """From the beginning of an answer to its end: objects with ";" between them, or a list."""
    c = yield from blanks()
    listed = c == "["
    if listed:
        c = yield from blanks()
    while True:
        yield from _object(sink, c)
        c = yield from blanks()
        if listed and c == "]":
            listed = False
            c = yield from blanks()
        elif c == ("," if listed else ";"):
            c = yield from blanks()
            continue
        if listed:
            raise Broken
        if not c:
            sink.commit()
            return 0


# --- what they are made of -------------------------------------------------------------------------


def _object(sink: Sink, c: str) -> Reading[None]:
    """An object with the name and the arguments of a call; `c` is its first character."""
    sink.begin()
    scanner = Scanner()
    name: list[str] = []
    sink.scans(scanner)
    while True:
        if not c:
            raise Broken
        inside = scanner.push(c)
        if inside and scanner.key == "name":
            name.append(c)
        elif name:
            told = decode("".join(name))
            if not isinstance(told, str):
                raise Broken
            sink.named(told)
            name.clear()
        if inside and scanner.key in ARGUMENTS:
            sink.argues(c)
        if scanner.ended:
            break
        c = yield
    sink.complete(decode(sink.scanned()))


def _pairs(sink: Sink, name: str, between: str, end: str) -> Reading[None]:
    """Keys and values that are no JSON, up to `end`, which is read too."""
    sink.named(name)
    arguments: dict[str, object] = {}
    c = yield from blanks()
    while c != end:
        key, c = yield from key_of(c, between, NAME_MOST)
        value, c = yield from literal(c)
        sink.argues((", " if arguments else "{") + f"{_json(key)}: {_json(value)}")
        arguments[key] = value
        if c == ",":
            c = yield from blanks()
        elif c != end:
            raise Broken
    sink.argues("}" if arguments else "{}")
    sink.complete({"name": name, "arguments": arguments})


def _arguments(sink: Sink, name: str, c: str) -> Reading[None]:
    """The object of the arguments alone; `c` is its first character."""
    scanner = Scanner()
    sink.scans(scanner, arguments=True)
    while True:
        if not c:
            raise Broken
        scanner.push(c)
        sink.argues(c)
        if scanner.ended:
            break
        c = yield
    sink.complete({"name": name, "arguments": decode(sink.scanned())})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
