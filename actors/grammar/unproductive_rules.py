"""Rules of a grammar in Lark's form that no text can complete. Pure.

A parser goes into such a rule, and then the output can neither end nor, perhaps, go on: each of the
rule's alternatives needs a rule that needs another one, round and round. (They are called unproductive;
Hopcroft and Ullman 1979.) What this file does not read, other grammars inside and imports, counts as
something that a text can complete.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<skip>(?://|\#)[^\n]*|[^\S\n]+)
    |(?P<line>\n)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<name>[!?]?[A-Za-z_][\w.\-]*)
    |(?P<count>[{~]\s*\d+(?:\s*(?:,|\.\.)\s*\d*)?\s*\}?)
    |(?P<sign>->|\.\.|[\[\]()|:*+?&~%=,{}<>@.]|.)""",
    re.VERBOSE,
)


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


def endless_rules(text: str) -> list[tuple[str, int]]:
    """The rules that no text completes, and where each is defined: a character of `text`.

    None of them if the grammar has a form that is not read here.
    """
    try:
        rules = dict(_rules(list(_tokens(text))))
    except (_Unread, RecursionError):
        return []
    needed_by: dict[str, list[str]] = {}
    for name, (body, _) in rules.items():
        for other in _names(body):
            needed_by.setdefault(other, []).append(name)
    ends: set[str] = set()
    looked_at = list(rules)
    while looked_at:
        name = looked_at.pop()
        if name not in ends and _ends(rules[name][0], rules, ends):
            ends.add(name)
            looked_at += needed_by.get(name, ())
    return [(name, at) for name, (_, at) in rules.items() if name not in ends]


class _Unread(Exception):
    """The grammar has a form that this file does not know."""


_Tree = (
    tuple[str, list["_Tree"]] | str
)  # ("any" or "all", parts) or the name of a rule; ("all", []): ends
_END: _Tree = ("all", [])


def _ends(tree: _Tree, rules: dict[str, tuple[_Tree, int]], ends: set[str]) -> bool:
    if isinstance(tree, str):
        return tree not in rules or tree in ends
    kind, parts = tree
    some = (_ends(part, rules, ends) for part in parts)
    return any(some) if kind == "any" else all(some)


def _names(tree: _Tree) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    else:
        for part in tree[1]:
            yield from _names(part)


def _tokens(text: str) -> Iterator[_Token]:
    for found in _TOKEN.finditer(text):
        if found.lastgroup != "skip":
            yield _Token(str(found.lastgroup), found[0], found.start())


def _rules(tokens: list[_Token]) -> Iterator[tuple[str, tuple[_Tree, int]]]:
    at = 0
    while at < len(tokens):
        kind, text, place = tokens[at]
        if kind == "line":
            at += 1
        elif kind == "name":
            at += 1
            while at < len(tokens) and tokens[at].text != ":":  # options, a priority
                if tokens[at].kind == "line":
                    raise _Unread
                at += 1
            reader = _RuleReader(tokens, at + 1)
            yield text.lstrip("!?"), (reader.alternatives(), place)
            at = reader.at
            if at < len(tokens) and tokens[at].kind != "line":
                raise _Unread
        elif text == "%":  # a directive: its line
            while at < len(tokens) and tokens[at].kind != "line":
                at += 1
        else:
            raise _Unread


class _RuleReader:
    """Reads the body of a rule. `at`: the next token."""

    def __init__(self, tokens: list[_Token], at: int) -> None:
        self._tokens = tokens
        self.at = at

    def alternatives(self) -> _Tree:
        found = [self._sequence()]
        while self._goes_on():
            found.append(self._sequence())
        return "any", found

    def _goes_on(self) -> bool:
        """Past a `|`, which may stand on the next line."""
        at = self.at
        while at < len(self._tokens) and self._tokens[at].kind == "line":
            at += 1
        if at < len(self._tokens) and self._tokens[at].text == "|":
            self.at = at + 1
            return True
        return False

    def _sequence(self) -> _Tree:
        parts: list[_Tree] = []
        while self.at < len(self._tokens):
            kind, text, _ = self._tokens[self.at]
            if kind == "line" or text in ("|", ")", "]"):
                break
            self.at += 1
            if text == "->":
                self.at += 1  # an alias
            elif text == "(":
                parts.append(self._group(")"))
            elif text == "[":
                self._group("]")  # may be left out
            elif text in ("*", "?"):
                if parts:
                    parts[-1] = _END
            elif kind == "count":
                if parts and re.match(r"[{~]\s*0", text):
                    parts[-1] = _END
            elif kind == "name":
                parts.append(text.lstrip("!?"))
            elif kind == "text" or text in ("+", "..", "&", "~"):
                pass
            else:
                raise _Unread
        return "all", parts

    def _group(self, close: str) -> _Tree:
        found = self.alternatives()
        while self.at < len(self._tokens) and self._tokens[self.at].kind == "line":
            self.at += 1
        if self.at >= len(self._tokens) or self._tokens[self.at].text != close:
            raise _Unread
        self.at += 1
        return found
