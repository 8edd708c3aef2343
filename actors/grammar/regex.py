r"""Regexes as text, read into expressions. Pure.

The syntax is Python's `re` with re.ASCII: `\d`, `\w`, `\s` and `\b` know ASCII only. So that patterns of
JSON Schema can be read, ECMA 262's escapes are known beside it (`\/`, `\cX`, `\u{...}`, `\uD83D\uDE00`).
Whether a repetition is lazy changes nothing: it is the same language. What cannot be in an automaton
(back references) and what would change its meaning in silence is refused, with position and mend.

Sizes are checked here, before anything is compiled: see `limits`.
"""

import re
from typing import NoReturn

from ramify.actors.grammar.characters import (
    ANY,
    DIGIT,
    NEWLINE,
    SPACE,
    WORD,
    Ranges,
    complement,
    ignore_case,
    ranges,
)
from ramify.actors.grammar.expression import (
    EMPTY,
    Anchor,
    AnchorKind,
    Chars,
    Concat,
    Expression,
    Literal,
    Look,
    Repeat,
    concat,
    union,
)
from ramify.actors.grammar.limits import MAX_BYTES, MAX_NESTING, MAX_REPEAT, MAX_REPEAT_PRODUCT
from ramify.protocol.errors import ConstraintError

_SETS = {
    "d": DIGIT,
    "D": complement(DIGIT),
    "w": WORD,
    "W": complement(WORD),
    "s": SPACE,
    "S": complement(SPACE),
}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "a": 7}
_ANCHORS: dict[str, AnchorKind] = {
    "b": "word",
    "B": "not word",
    "A": "start",
    "Z": "end",
    "z": "end",
}
_HEX = {"x": 2, "u": 4, "U": 8}
COUNT = re.compile(r"\{(\d{0,9})(,?)(\d{0,9})\}")
NAMED_CLASS = re.compile(r"\[:\^?[a-z]+:\]")  # inside brackets
_BRACED = re.compile(r"\{([0-9A-Fa-f]{1,6})\}")
_NAME = re.compile(r"P?<[A-Za-z_]\w*>", re.ASCII)
_FLAGS = re.compile(r"([aisu]*)(?:-([is]+))?([:)])")
_OTHER_FLAGS = re.compile(r"[aimsux]*[mx][aimsux]*(?:-[imsx]+)?[:)]")
_REFUSED = {
    "(?P=": "a back reference cannot be compiled: write the part out",
    "(?P>": "recursion cannot be compiled: use a grammar",
    "(?(": "a conditional part cannot be compiled: write both cases out",
    "(?>": "an atomic part cannot be compiled: it matches by how a search goes, use (?:...)",
    "(?<=": "looking back cannot be compiled: say before it what may stand there",
    "(?<!": "looking back cannot be compiled: say before it what may stand there",
    "(?#": "a comment is not supported: leave it out",
}


class UnknownSyntax(ConstraintError):
    """Syntax that another compiler may know: see `outlines`."""


def parse(pattern: str) -> Expression:
    """The expression of `pattern`. Raises ConstraintError with the position (in characters)."""
    try:
        size = len(pattern.encode())
    except UnicodeEncodeError as error:
        raise ConstraintError(
            "a regex cannot hold half a surrogate pair", position=error.start
        ) from None
    if size > MAX_BYTES:
        raise ConstraintError(f"the regex has {size} bytes: at most {MAX_BYTES}")
    return _RegexParser(pattern).whole()


class _RegexParser:
    """A recursive descent over `text`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._ignore_case = False
        self._dot_all = False
        self._known: dict[object, Expression] = {}  # one object for equal parts: it is compiled once
        self._product: dict[int, int] = {}  # id(expression): counts inside each other
        self._kept: list[Expression] = []  # what those ids belong to

    def whole(self) -> Expression:
        found = self._alternatives()
        if self._at < len(self._text):
            self._fail("this parenthesis closes nothing: escape it, \\)", self._at)
        return found

    def _fail(self, message: str, position: int | None = None) -> NoReturn:
        at = self._at if position is None else position
        raise ConstraintError(f"regex, character {at}: {message}", position=at)

    def _unknown(self, message: str, position: int) -> NoReturn:
        raise UnknownSyntax(f"regex, character {position}: {message}", position=position)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _alternatives(self) -> Expression:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        made = self._one(("|", *map(id, parts)), union(*parts))
        return self._noted(made, parts)

    def _sequence(self) -> Expression:
        parts: list[Expression] = []
        run = bytearray()  # of literal characters

        def close() -> None:
            if run:
                data = bytes(run)
                parts.append(self._one(data, Literal(data)))
                run.clear()

        while (char := self._peek()) and char not in "|)":
            start = self._at
            atom = self._atom()
            atom = self._repeated(atom, start)
            if isinstance(atom, Literal):
                run += atom.data
            else:
                close()
                parts.append(atom)
        close()
        made = self._one(tuple(map(id, parts)), concat(*parts) if parts else EMPTY)
        return self._noted(made, parts)

    def _one(self, key: object, made: Expression) -> Expression:
        """The first expression with this key. What a key names by its id is kept by that expression."""
        return self._known.setdefault(key, made)

    def _noted(self, made: Expression, parts: list[Expression]) -> Expression:
        """Keep in mind how deep counts lie inside each other."""
        if made not in parts:
            product = max((self._product.get(id(part), 1) for part in parts), default=1)
            if product > 1:
                self._note(made, product)
        return made

    def _note(self, made: Expression, product: int) -> None:
        self._product[id(made)] = product
        self._kept.append(made)

    def _repeated(self, atom: Expression, start: int) -> Expression:
        """`atom` with the counts behind it. Only one count may follow, as in Python."""
        counts = self._counts()
        if counts is None:
            return atom
        least, most = counts
        self._take("?")  # lazy: the same language
        if self._peek() == "+":
            self._fail("a possessive repetition matches by how a search goes: leave the second + out")
        if self._peek() in ("*", "?") or self._counts_here() is not None:
            self._fail("a repetition cannot be repeated: put parentheses around it")
        if isinstance(atom, Concat) and not atom.parts:
            return atom
        top = least if most is None else most
        product = self._product.get(id(atom), 1) * max(top, 1)
        if top > MAX_REPEAT:
            self._fail(f"a repetition counts up to {MAX_REPEAT}, not {top}", start)
        if product > MAX_REPEAT_PRODUCT:
            self._fail(
                f"repetitions inside each other multiply to {product}: at most {MAX_REPEAT_PRODUCT}",
                start,
            )
        made = self._one((id(atom), least, most), Repeat(atom, least, most))
        self._note(made, product)
        return made

    def _counts_here(self) -> re.Match[str] | None:
        match = COUNT.match(self._text, self._at)
        if match is None or not (match[1] or match[2]) or (match[3] and not match[2]):
            return None
        return match

    def _counts(self) -> tuple[int, int | None] | None:
        for char, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(char):
                return counts
        match = self._counts_here()
        if match is None:
            return None  # a { that counts nothing is a character, as in Python
        start, self._at = self._at, match.end()
        least = int(match[1] or 0)
        most = int(match[3]) if match[3] else (None if match[2] else least)
        if most is not None and least > most:
            self._fail(f"{match[0]}: the smaller number comes first", start)
        return least, most

    def _atom(self) -> Expression:
        start = self._at
        char = self._text[start]
        self._at += 1
        match char:
            case "(":
                return self._group(start)
            case "[":
                return self._chars(self._class(start))
            case ".":
                return self._chars(ANY if self._dot_all else complement(NEWLINE))
            case "^":
                return Anchor("start")
            case "$":
                return Anchor("end")
            case "*" | "+" | "?":
                self._fail(
                    "there is nothing to repeat here: escape it, or put something before it", start
                )
            case "\\":
                return self._escape(start)
            case "{":
                self._at = start
                if self._counts_here() is not None:
                    self._fail("there is nothing to repeat here: escape the brace, \\{")
                self._at = start + 1
        return self._character(ord(char))

    def _character(self, code: int) -> Expression:
        if self._ignore_case and chr(code).isascii() and chr(code).isalpha():
            return self._chars(((code, code),))
        return Literal(chr(code).encode())

    def _chars(self, chars: Ranges) -> Expression:
        if self._ignore_case:
            chars = ignore_case(chars)
        return self._one(("[", chars), Chars(chars))

    def _group(self, start: int) -> Expression:
        flags = (self._ignore_case, self._dot_all)
        look: bool | None = None
        if self._peek() == "?":
            for opening, why in _REFUSED.items():
                if self._text.startswith(opening, start):
                    self._fail(why, start)
            self._at += 1
            named = _NAME.match(self._text, self._at)
            if named is not None:
                self._at = named.end()
            elif self._take("=") or self._take("!"):
                look = self._text[self._at - 1] == "!"
            elif self._flags(start):
                return EMPTY
        self._depth += 1
        if self._depth > MAX_NESTING:
            self._fail(f"groups lie more than {MAX_NESTING} deep: flatten them", start)
        inside = self._alternatives()
        if not self._take(")"):
            self._fail("this parenthesis is never closed", start)
        self._depth -= 1
        self._ignore_case, self._dot_all = flags
        if look is not None:
            return Look(inside, look)
        if isinstance(inside, Literal):  # not one run with its neighbours: a count means all of it
            return self._one(("(", id(inside)), Concat((inside,)))
        return inside

    def _flags(self, start: int) -> bool:
        """Read what stands between "(?" and ":" or ")". Whether that was all of the group."""
        match = _FLAGS.match(self._text, self._at)
        if match is None and _OTHER_FLAGS.match(self._text, self._at):
            self._unknown("the flags m and x are not supported: use (?i), (?s)", start)
        if match is None:
            self._fail("this kind of group is not supported: use (?:...), (?i), (?s)", start)
        if match[3] == ")" and (start or match[2]):
            self._fail("flags for the whole regex stand at its beginning: use (?i:...)", start)
        self._at = match.end()
        for letters, value in ((match[1], True), (match[2] or "", False)):
            if "i" in letters:
                self._ignore_case = value
            if "s" in letters:
                self._dot_all = value
        return match[3] == ")"

    def _escape(self, start: int) -> Expression:
        char = self._peek()
        if char in _ANCHORS:
            self._at += 1
            return Anchor(_ANCHORS[char])
        if char and char in "123456789k":
            self._fail("a back reference cannot be compiled: write the part out", start)
        found = self._escaped(start)
        return self._chars(found) if isinstance(found, tuple) else self._character(found)

    def _escaped(self, start: int) -> int | Ranges:
        """The character or set that a backslash before this place means."""
        char = self._peek()
        if not char:
            self._fail("a backslash at the end escapes nothing: double it", start)
        self._at += 1
        if char in _SETS:
            return _SETS[char]
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in _HEX:
            return self._hex(_HEX[char], start)
        if char == "0":
            if self._peek().isdigit():
                self._fail("octal escapes are not supported: use \\xHH", start)
            return 0
        if char == "c" and self._peek().isascii() and self._peek().isalpha():
            self._at += 1
            return ord(self._text[self._at - 1]) & 31
        if char in "pP":
            self._unknown("Unicode properties are not supported: write the ranges out, [à-ÿ]", start)
        if char.isascii() and char.isalnum():
            self._fail(f"\\{char} means nothing here: leave the backslash out", start)
        return ord(char)

    def _hex(self, digits: int, start: int) -> int:
        braced = _BRACED.match(self._text, self._at)
        if braced is not None:
            self._at = braced.end()
            code = int(braced[1], 16)
        else:
            code = self._digits(digits, start)
        if 0xD800 <= code < 0xDC00 and self._take("\\u"):
            low = self._digits(4, start)
            if 0xDC00 <= low < 0xE000:
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            self._fail(f"U+{code:04X} is no character", start)
        return code

    def _digits(self, count: int, start: int) -> int:
        text = self._text[self._at : self._at + count]
        if len(text) < count or not re.fullmatch("[0-9A-Fa-f]+", text):
            self._fail(f"{count} hexadecimal digits are needed here", start)
        self._at += count
        return int(text, 16)

    def _class(self, start: int) -> Ranges:
        """A set in brackets, from behind its "["."""
        negative = self._take("^")
        pairs: list[tuple[int, int]] = []
        first = self._at
        while self._peek() != "]" or self._at == first:  # a ] at once is a character, as in Python
            if not self._peek():
                self._fail("this bracket is never closed", start)
            at = self._at
            low = self._member()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
                if isinstance(low, tuple) or isinstance(high, tuple):
                    self._fail("a range goes from character to character: escape the -", at)
                else:
                    if low > high:
                        self._fail(f"the range {self._text[at : self._at]} goes backwards", at)
                    pairs.append((low, high))
            elif isinstance(low, tuple):
                pairs.extend(low)
            else:
                pairs.append((low, low))
        self._at += 1
        chars = ranges(pairs)
        if self._ignore_case:
            chars = ignore_case(chars)
        return complement(chars) if negative else chars

    def _member(self) -> int | Ranges:
        """A character or a set inside brackets."""
        start = self._at
        char = self._text[start : start + 1]
        if not char:
            self._fail("this bracket is never closed")
        self._at += 1
        if char == "[" and self._peek() in (":", "."):
            self._unknown("named classes are not supported: write [a-z], [0-9]", start)
        if char != "\\":
            return ord(char)
        if self._take("b"):
            return 8
        return self._escaped(start)
