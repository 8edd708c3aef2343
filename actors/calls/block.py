"""The calls behind one mark, while they are read: a form's sink, and the labels of its text. Pure."""

import re
from collections.abc import Callable, Iterator

from ramify.actors.calls.forms import ARGUMENTS, Form
from ramify.actors.calls.scanner import Broken, Scanner
from ramify.actors.calls.toolbox import Call, Toolbox
from ramify.protocol.wire import Part

_RUN = re.compile(r'[^"\\]+')  # of a string: nothing that ends or escapes
HELD_MOST = 512  # characters that wait for a label, as long as no tool is named


class Block:
    """See the module's top. `mark`: what it began with, "" where the form has none.

    `committed`: characters, from the mark on, that are calls whatever follows; `calls`: those calls,
    with their numbers. `number()`: the number of a call that begins now.
    """

    def __init__(self, mark: str, form: Form, tools: Toolbox, number: Callable[[], int]) -> None:
        self.mark = mark
        self.committed = 0
        self.calls: list[tuple[int, Call]] = []
        self.broken = False
        self._tools = tools
        self._number = number
        self._raw = [mark]
        self._read = len(mark)
        self._complete: list[tuple[int, Call]] = []
        self._known = False  # a tool is named: before that it may well be an answer
        # the call that is being read
        self._index: int | None = None
        self._name: str | None = None
        self._ident: str | None = None
        self._argued: list[str] = []
        self._whole = False  # its arguments came as a string: they are told when it is complete
        # labels
        self.labelled = 0  # characters that `take` has given
        self._parts: list[Part] = []
        self._span: list[str] = [mark] if mark else []
        self._of: int | None = None  # the call that the span belongs to
        self._told_name: bool
        self._told: int  # of `_argued`
        self._scanner: Scanner | None = None  # what is read goes through it,
        self._scanned: int  # from this entry of `_raw` on,
        self._all_arguments = False  # and all of it is arguments
        self._form = form(self)
        next(self._form)

    @property
    def text(self) -> str:
        """All that it has read."""
        return "".join(self._raw)

    @property
    def held(self) -> int:
        """Bytes that it holds, about: each character three times, in lists."""
        return 24 * self._read

    # --- reading ---------------------------------------------------------------------------------

    def feed(self, text: str) -> str | None:
        """Read more. None if the calls go on after `text`; else the text that does not belong to them.

        Then it is `broken`, or all its text is calls.
        """
        at = -1
        while at + 1 < len(text):
            at += 1
            if self._scanner is not None and self._scanner.in_string:
                run = _RUN.match(text, at)
                if run is not None and self._takes(run[0]):
                    at = run.end() - 1
                    continue
            c = text[at]
            self._raw.append(c)
            self._read += 1
            before = self._index
            try:
                self._form.send(c)
            except StopIteration as end:
                back: int = end.value
                whole = self.text
                self._raw = [whole[: len(whole) - back]]
                if not back:
                    self._span_on(c, before)
                return whole[len(whole) - back :] + text[at + 1 :]
            except Broken:
                self.broken = True
                return text[at + 1 :]
            self._span_on(c, before if before is not None else self._index)
        return None

    def _takes(self, run: str) -> bool:
        """Read characters of a string at once; False if the form has to see them."""
        scanner = self._scanner
        assert scanner is not None
        if scanner.key == "name" and not self._all_arguments:
            return False
        self._raw.append(run)
        self._read += len(run)
        if self._all_arguments or scanner.key in ARGUMENTS:
            self.argues(run)
        self._span_on(run, self._index)
        return True

    def end(self) -> None:
        """The text has ended: it is `broken`, or all its text is calls."""
        try:
            self._form.send("")
        except StopIteration:
            return
        except Broken:
            pass
        self.broken = True

    # --- labels ----------------------------------------------------------------------------------

    @property
    def hidden(self) -> bool:
        """Whether its label is not known yet."""
        return not self._known and self._read <= HELD_MOST

    def take(self) -> Iterator[Part]:
        """The labels of what was read since; none while it is hidden."""
        if self.hidden:
            return
        self._cut()
        parts, self._parts = self._parts, []
        for part in parts:
            self.labelled += len(part.text)
            yield part if self._known else Part(kind="text", text=part.text)

    def forget_labels(self) -> None:
        """What was read so far stood before the output. The open call is labelled from here on."""
        self._cut()
        self.labelled = self._read
        self._parts.clear()
        self._told_name, self._told = False, 0

    def _span_on(self, c: str, index: int | None) -> None:
        if index != self._of:
            self._cut()
            self._of = index
        self._span.append(c)

    def _cut(self) -> None:
        """Make a part of the span."""
        if not self._span:
            return
        text, index = "".join(self._span), self._of
        self._span.clear()
        if index is None:
            self._parts.append(Part(kind="markup", text=text))
            return
        name = None if self._told_name else self._name
        self._told_name = self._told_name or name is not None
        fresh, self._told = "".join(self._argued[self._told :]), len(self._argued)
        ident = self._ident if name is not None else None
        self._parts.append(
            Part(kind="call", text=text, call=index, id=ident, name=name, arguments=fresh or None)
        )

    # --- the form tells --------------------------------------------------------------------------

    def begin(self) -> None:
        """A call begins."""
        self._cut()
        self._index = self._number()
        self._name, self._ident, self._argued, self._whole = None, None, [], False
        self._told_name, self._told = False, 0

    def named(self, name: str, ident: str | None = None) -> None:
        """The call's tool and id. Raises Broken if there is no such tool, or it was named before."""
        if name not in self._tools or self._name is not None:
            raise Broken
        self._name, self._ident, self._known = name, ident, True

    def argues(self, piece: str) -> None:
        """More of the JSON text of its arguments."""
        if not self._argued and piece[0] != "{":
            self._whole = True
        if not self._whole:
            self._argued.append(piece)

    def scans(self, scanner: Scanner, *, arguments: bool = False) -> None:
        """What is read from the last character on goes through `scanner`."""
        self._scanner, self._all_arguments = scanner, arguments
        self._scanned = len(self._raw) - 1

    def scanned(self) -> str:
        """What went through the scanner, which has come to its end."""
        return "".join(self._raw[self._scanned :])

    def typed(self, parameter: str, text: str) -> object:
        """The value of a parameter that was written as plain text."""
        assert self._name is not None
        return self._tools.typed(self._name, parameter, text)

    def complete(self, value: object) -> None:
        """Its object is complete. Raises Broken if it is no call."""
        call = self._tools.as_call(value)
        if call is None or self._index is None:
            raise Broken
        if not self._argued:
            self._argued.append(call.arguments)
        self._complete.append((self._index, call._replace(ident=self._ident)))
        self._index = None

    def commit(self) -> None:
        """What was completed counts, whatever follows."""
        self.calls += self._complete
        self._complete.clear()
        self.committed = self._read
