r"""Patterns of ECMA 262, which JSON Schema asks for, in the syntax of our regexes. Pure.

The two differ in what `.` leaves out (four line ends, not one) and in white space (`\s` knows more than
ASCII). Both are written out here; all else is read alike.
"""

import re

from ramify.actors.grammar.regex import NAMED_CLASS

_LINE_ENDS = r"\n\r\u2028\u2029"
# white space behind ASCII's: ECMA 262, WhiteSpace and LineTerminator
_SPACES = r"\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
# everything else: what lies between the ranges of white space
_NO_SPACES = (
    r"\x00-\x08\x0e-\x1f!-\u009f\u00a1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e"
    r"\u2030-\u205e\u2060-\u2fff\u3001-\ufefe\uff00-\U0010ffff"
)


def from_ecma(pattern: str) -> str:
    """`pattern` as our regexes read it. What is wrong with it stays, for them to tell."""
    # behind ^ another one says nothing: so in pydantic's pattern of a Decimal
    pattern = re.sub(r"^\^\(\?([!=])\^", r"^(?\1", pattern)
    found: list[str] = []
    in_class = False
    at = 0
    while at < len(pattern):
        named = NAMED_CLASS.match(pattern, at) if in_class else None
        if named is not None:
            piece = named[0]
        else:
            piece = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        at += len(piece)
        if piece == "\\s":
            piece = rf"\s{_SPACES}" if in_class else rf"[\s{_SPACES}]"
        elif piece == "\\S":
            piece = _NO_SPACES if in_class else rf"[^\s{_SPACES}]"
        elif piece == "." and not in_class:
            piece = f"[^{_LINE_ENDS}]"
        elif piece == "[":
            in_class = True
        elif piece == "]":
            in_class = False
        found.append(piece)
    return "".join(found)
