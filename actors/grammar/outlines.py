r"""Regexes and choices by `outlines-core` (the regex-automata of Rust). Pure.

Our own compiler (`regex`, `compiler`) goes first: it is faster where it is hard, knows lookahead, and
says where a fault is. What it does not read and Rust's does comes here: Unicode properties
(`\p{Greek}`), named classes (`[[:alpha:]]`), the flags m and x. With `--grammar-backend outlines` all
regexes and choices come here. A pattern is rewritten so that it means what it means to us:
`\d \w \s \b` know ASCII only, brackets and braces are Python's.

outlines-core takes the first match, so `(no|none)` never is "none". Behind `(?:...)\z`, over a
vocabulary of the 256 bytes, what it makes is the automaton of the whole language. It refuses a regex
whose beginning looks around or may be empty; behind a line break, which is taken off again, it does not.
"""

import contextlib
import importlib
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, NoReturn

import numpy as np

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.fragment import Fragment, reduce, too_large
from ramify.actors.grammar.limits import MAX_REPEAT, MAX_STATES
from ramify.actors.grammar.regex import COUNT, NAMED_CLASS, UnknownSyntax, parse
from ramify.protocol.constraints import GrammarBackend
from ramify.protocol.errors import ConstraintError

outlines_core: Any
try:
    outlines_core = importlib.import_module("outlines_core")
except ImportError:  # it has no wheel for this machine
    outlines_core = None

_END = 256  # the id of the end
_ALONE = "this server compiles with nothing else (--grammar-backend outlines)"
_LIMITS = "it knows no lookahead, few anchors but at both ends, and of properties Unicode's own"
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~ -]")  # what Rust's syntax may take for more than itself
_SETS = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\x0b\x0c\r\x20"}
_ESCAPES = {"b": r"\x08", "0": r"\x00", **{char: f"\\{char}" for char in "nrtfva"}}
_OUTSIDE = {"b": r"(?-u:\b)", "B": r"(?-u:\B)", "A": r"\A", "Z": r"\z", "z": r"\z"}
_STARTS = re.compile(r"(?<![\\\[])\^|\\A")  # but in brackets
_ENDS = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")
_ALTERNATIVES = re.compile(r"\||(?<!\[)\^|(?<!\\)\$")
_LEADING_FLAGS = re.compile(r"\(\?[aimsux]+\)")
_FLAGS_OFF = re.compile(r"\(\?[a-z]*-")
_FLAGS = re.compile(r"\(\?([a-z]+)")
_PROPERTY = re.compile(r"[pP](?:\{[^{}]{1,64}\}|[A-Za-z])")
_CODE = re.compile(r"x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[xu]\{[0-9A-Fa-f]{1,6}\}")
_GROUP = re.compile(r"\?(?:P?<[A-Za-z_]\w*>|[aimsux]*(?:-[imsx]+)?[:)])", re.ASCII)


def regex_automaton(pattern: str, backend: GrammarBackend = "auto") -> tuple[Automaton, tuple[str, ...]]:
    """The texts that `pattern` matches as a whole, by our compiler if it can, and notes.

    Raises ConstraintError with the position.
    """
    if backend == "outlines":
        return _by_outlines_alone(pattern)
    try:
        return Automaton.from_regex(pattern), ()
    except UnknownSyntax as error:
        return outlines_automaton(pattern, error)


def search_automaton(pattern: str) -> Automaton:
    """The texts in which `pattern` matches somewhere, by our compiler if it can. Raises ConstraintError.

    outlines-core does not look around, so anchors there may only stand at both ends of the pattern.
    """
    try:
        return Automaton.from_regex(pattern, search=True)
    except UnknownSyntax as error:
        leading = _LEADING_FLAGS.match(pattern)
        flags = leading[0] if leading is not None else ""
        body = pattern[len(flags) :]
        begins, ends = body.startswith("^"), _ENDS.search(body) is not None
        inner = body[1 if begins else 0 : -1 if ends else None]
        lines = "m" in "".join(_FLAGS.findall(pattern))
        if (begins or ends) and (lines or _ALTERNATIVES.search(inner)):
            raise  # an anchor of lines, or of one alternative
        around = rf"{flags}(?:{inner})"
        around = around if begins else rf"[\s\S]*{around}"
        return outlines_automaton(around if ends else rf"{around}[\s\S]*", error)[0]


def outlines_automaton(pattern: str, unread: UnknownSyntax) -> tuple[Automaton, tuple[str, ...]]:
    """The texts that `pattern` matches as a whole, and notes. `unread`: why we cannot read it.

    Raises ConstraintError.
    """
    position = (unread.details or {}).get("position")
    if outlines_core is None:
        raise ConstraintError(
            f"{unread.message} (or install outlines-core on the server)", position=position
        )
    found = _compiled(rewritten(pattern))
    if found is None:
        raise ConstraintError(
            f"{unread.message} (outlines-core, which knows some, does not take the regex either)",
            position=position,
        )
    return found, ("the regex was compiled by outlines-core", *_case_notes(pattern))


def choices_automaton(choices: Iterable[str]) -> Automaton:
    """Exactly the texts `choices`, which have no surrogates. Raises ConstraintError."""
    found = _compiled("|".join(_META.sub(r"\\\g<0>", choice) for choice in choices))
    if found is None:
        raise ConstraintError(f"outlines-core does not take these choices, and {_ALONE}")
    return found


def _by_outlines_alone(pattern: str) -> tuple[Automaton, tuple[str, ...]]:
    """As `regex_automaton`, without our own compiler."""
    found = _compiled(rewritten(pattern))
    if found is None:
        with contextlib.suppress(UnknownSyntax):
            parse(pattern)  # what is wrong with it, and where
        raise ConstraintError(f"outlines-core does not take the regex, and {_ALONE}: {_LIMITS}")
    return found, _case_notes(pattern)


def _case_notes(pattern: str) -> tuple[str, ...]:
    if re.search(r"\(\?[a-z]*i", pattern):
        return ("(?i) ignores the case of all letters there, not of ASCII's alone",)
    return ()


@cache
def _bytes() -> Any:
    return outlines_core.Vocabulary(_END, {bytes([b]): [b] for b in range(256)})


def _compiled(regex: str) -> Automaton | None:
    """The automaton of a regex in Rust's syntax; None if it is refused."""
    try:
        index = outlines_core.Index(rf"(?:{regex})\z", _bytes())
        return _automaton(index, index.get_initial_state())
    except ValueError:
        pass
    regex = regex.removeprefix("^").removeprefix(r"\A")
    if _STARTS.search(regex) and "m" not in "".join(_FLAGS.findall(regex)):
        return None  # an anchor at the start of the text would look at the line break
    try:
        index = outlines_core.Index(rf"\n(?:{regex})\z", _bytes())
    except ValueError:
        return None
    return _automaton(index, index.get_transitions()[index.get_initial_state()][ord("\n")])


def _automaton(index: Any, start: int) -> Automaton:
    transitions: dict[int, dict[int, int]] = index.get_transitions()
    finals = set(index.get_final_states())
    states = dict.fromkeys([start, *transitions, *finals])
    if len(states) > 4 * MAX_STATES:
        raise too_large()
    numbers = {state: i for i, state in enumerate(states)}
    table = np.full((len(states), 256), -1, np.int32)
    for state, ways in transitions.items():
        row = table[numbers[state]]
        for byte, target in ways.items():
            if byte != _END:
                row[byte] = numbers[target]
    final = np.array([state in finals for state in states])
    part = reduce(Fragment(table, final))
    return Automaton.of(part, np.arange(256).astype(np.uint8))


def rewritten(pattern: str) -> str:
    """`pattern` in Rust's syntax, with our meaning. Raises ConstraintError."""
    return _Rewriter(pattern).whole()


class _Rewriter:
    """Rewrites one pattern in one walk."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._out: list[str] = []

    def _fail(self, message: str) -> NoReturn:
        raise ConstraintError(f"regex, character {self._at}: {message}", position=self._at)

    def _copy(self, found: re.Match[str]) -> None:
        self._out.append(found[0])
        self._at = found.end()

    def whole(self) -> str:
        repeated = False
        while self._at < len(self._text):
            char = self._text[self._at]
            count = COUNT.match(self._text, self._at) if char == "{" else None
            if char in "*+?" or (count is not None and (count[1] or count[2])):
                if repeated:
                    self._fail("a repetition cannot be repeated: put parentheses around it")
                self._repeat(char, count)
                repeated = True
                continue
            repeated = False
            self._one(char)
        made = "".join(self._out)
        leading = _LEADING_FLAGS.match(made)
        open_to_the_end = leading is not None and "x" in leading[0] and not _FLAGS_OFF.search(made)
        return made + "\n" if open_to_the_end else made  # it ends a comment

    def _repeat(self, char: str, count: "re.Match[str] | None") -> None:
        if count is None:
            self._out.append(char)
            self._at += 1
        else:
            if max(int(count[1] or 0), int(count[3] or 0)) > MAX_REPEAT:
                self._fail(f"a repetition counts up to {MAX_REPEAT}")
            self._out.append(f"{{{count[1] or 0}{count[2]}{count[3]}}}")
            self._at = count.end()
        if self._text[self._at : self._at + 1] == "?":  # lazy: the same language
            self._at += 1

    def _one(self, char: str) -> None:
        if char == "\\":
            self._escape(inside=False)
        elif char == "[":
            self._brackets()
        elif char == "(" and self._text[self._at + 1 : self._at + 2] == "?":
            group = _GROUP.match(self._text, self._at + 1)
            if group is None:
                self._fail("this kind of group is not supported")
            self._out.append(
                "(" + re.sub("[au]", "", group[0]) if "<" not in group[0] else "(" + group[0]
            )
            self._at = group.end()
        else:
            self._out.append("\\" + char if char in "{}]" else char)
            self._at += 1

    def _brackets(self) -> None:
        self._out.append("[")
        self._at += 1
        if self._text[self._at : self._at + 1] == "^":
            self._out.append("^")
            self._at += 1
        first = self._at
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "]" and self._at > first:
                self._out.append("]")
                self._at += 1
                return
            named = NAMED_CLASS.match(self._text, self._at)
            if named is not None:
                self._copy(named)
            elif char == "\\":
                self._escape(inside=True)
            else:
                self._out.append("\\" + char if char in "[]&~ #^" else char)
                self._at += 1
        self._fail("a bracket is never closed")

    def _escape(self, *, inside: bool) -> None:
        at = self._at + 1
        char = self._text[at : at + 1]
        known = _PROPERTY.match(self._text, at) or _CODE.match(self._text, at)
        if known is not None:
            self._out.append("\\")
            self._copy(known)
            return
        if char.lower() in _SETS:
            made = _SETS[char.lower()]
            negated = f"[^{made}]" if char.isupper() else made
            found = negated if inside or char.isupper() else f"[{made}]"
        elif char in _OUTSIDE and not inside:
            found = _OUTSIDE[char]
        elif char in _ESCAPES:
            found = _ESCAPES[char]
        elif not char or (char.isascii() and char.isalnum()):
            self._fail(f"\\{char} is not supported here")
        else:
            found = f"\\{char}" if char.isascii() else char
        self._out.append(found)
        self._at += 2
