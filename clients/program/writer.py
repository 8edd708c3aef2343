"""Turns the steps of one branch into ops. Pure: it knows the protocol, not who sends the ops.

Text waits here until a gap needs it, so however a program was cut into `+=`, the same ops go out, and so
the same tokens. Whole turns become messages of one `append`; text outside of turns is raw.

    user("Q"), assistant("A: ", gen("a", stop="."), " and ", gen("b"))

    append    messages: user "Q"
    append    text "A: ", in the assistant's turn that is open now
    generate  a; the turn stays open at its stop
    append    text " and "
    generate  b; its end closes the turn
"""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Protocol, TypeAlias

from ramify.clients.options import GenerateOptions
from ramify.clients.program.expressions import Begin, Choose, End, Gap, Gen, Step, Text, TurnRole
from ramify.protocol.pictures import MARK
from ramify.protocol.wire import Append, ChatMessage, Generate, Op, Select


class Inserted(Protocol):
    """Text of a record that the server makes: what a join appends."""

    async def text(self) -> str: ...


Item: TypeAlias = str | Gap | Inserted | ChatMessage


class Writer:
    """The content of one branch, and the part of it that is not sent yet.

    `record`: all of it in order, as (turn, role, text or gap, or what others did). The role is None
    outside of turns. Turns are numbered, so that two of the same role stay apart. `defaults`: options of
    gaps without their own. `edit`: returns the text to send for a whole turn or for all that stands
    between turns.
    """

    def __init__(
        self,
        branch: str,
        defaults: GenerateOptions | None = None,
        edit: Callable[[str], str] | None = None,
    ) -> None:
        self.branch = branch
        self._edit = edit
        self._defaults: GenerateOptions = defaults or {}
        self.record: list[tuple[int, TurnRole | None, Item]] = []
        self._turn = 0
        self._pending: list[ChatMessage | str] = []  # whole turns, and text that is not in one
        self._text: list[str] = []  # of the turn that is being written
        self._images: list[bytes] = []  # those whose marks are in either, in order
        self._role: TurnRole | None = None
        self._open = False  # the turn has begun on the branch, because it holds a gap

    def fork(self, branch: str, options: GenerateOptions | None = None) -> "Writer":
        """Make the writer of a child that was forked after `flush`. `options`: of its gaps."""
        child = Writer(branch, {**self._defaults, **(options or {})}, self._edit)
        child.record = list(self.record)
        child._role, child._open, child._turn = self._role, self._open, self._turn
        return child

    def insert(self, role: TurnRole | None, item: Inserted) -> None:
        """Note what something else appends to the branch, after `flush`. Raises TypeError
        inside a turn.
        """
        if role is not None:
            self._begin(role)
        self.record.append((self._turn, self._role, item))
        if role is not None:
            self._role = None
            self._turn += 1

    def note(self, messages: Iterable[ChatMessage]) -> None:
        """Note whole turns that something else has put onto the branch, after `flush`.

        Raises TypeError inside a turn.
        """
        for message in messages:
            self._begin(message.role)
            self.record.append((self._turn, self._role, message))
            self._role = None
        self._turn += 1

    @property
    def turn(self) -> int:
        """The number of the present turn."""
        return self._turn

    @property
    def place(self) -> tuple[TurnRole | None, bool]:
        """Whether a turn goes on."""
        return self._role, self._open

    def follow(self, other: "Writer") -> None:
        """Take over the content of `other`, after its `flush`; what the branch held is forgotten."""
        self.rewind(0)
        self._role, self._open = other.place
        self._turn = other.turn

    def rewind(self, record: int) -> None:
        """Forget what was written since the record had this length, and had been flushed."""
        del self.record[record:]
        self._pending.clear()
        self._text.clear()
        self._images.clear()
        self._role, self._open = None, False
        self._turn += 1

    def write(self, steps: Iterable[Step]) -> list[tuple[list[Op], Gap]]:
        """Take steps. Returns what has to be sent now: for each gap, its ops, the gap's own last."""
        runs: list[tuple[list[Op], Gap]] = []
        waiting: Gap | None = None  # whether its end closes the turn depends on the step after it
        for step in steps:
            if waiting is not None:
                runs.append((self._fill(waiting, closes=isinstance(step, End)), waiting))
                waiting = None
            match step:
                case Text(text, image):
                    if image is not None:
                        self._images.append(image)
                    self.record.append((self._turn, self._role, text))
                    (self._pending if self._role is None or self._open else self._text).append(text)
                case Begin(role):
                    self._begin(role)
                case End():
                    self._end()
                case Gen() | Choose():
                    self.record.append((self._turn, self._role, step))
                    waiting = step
        if waiting is not None:
            runs.append((self._fill(waiting, closes=False), waiting))
        return runs

    def flush(self) -> list[Op]:
        """Make the ops for all that waits, so that the branch holds everything that was written.

        Raises TypeError in the middle of a turn that no gap has opened: its text would lose its end.
        """
        if self._text:
            raise TypeError(f"the {self._role!r} turn has not ended: fork or read after it")
        return self._take()

    def _begin(self, role: TurnRole) -> None:
        if self._role is not None:
            raise TypeError(f"a {role!r} turn stands inside a {self._role!r} turn")
        self._role = role
        self._turn += 1

    def _end(self) -> None:
        assert self._role is not None
        if not self._open:
            text = self._edited("".join(self._text))
            self._pending.append(ChatMessage(role=self._role, content=text))
            self._text.clear()
        # else: what follows its last gap waits as text; the next turn closes this one
        self._role, self._open = None, False
        self._turn += 1

    def _fill(self, gap: Gap, *, closes: bool) -> list[Op]:
        self._pending += self._text  # the turn's text before its first gap
        self._text.clear()
        self._open = self._role is not None
        if isinstance(gap, Choose):  # its turn stays open: whatever turn comes next closes it
            choices = list(gap.choices)
            return [*self._take(), Select(id=0, branch=self.branch, choices=choices, **gap.options)]
        keep = self._role is not None and not closes
        options: GenerateOptions = {"keep_open": keep, **self._defaults, **gap.options}
        return [*self._take(), Generate(id=0, branch=self.branch, **options)]

    def _take(self) -> list[Op]:
        """Make the ops: one `append` for each run of turns, and one for each run of text."""
        pending, self._pending = self._pending, []
        ops: list[Op] = []
        for is_turn, run in groupby(pending, lambda item: isinstance(item, ChatMessage)):
            if is_turn:
                turns = [item for item in run if isinstance(item, ChatMessage)]
                images = self._shown("".join(turn.content for turn in turns))
                ops.append(Append(id=0, branch=self.branch, messages=turns, images=images))
            else:
                text = self._edited("".join(map(str, run)))
                ops.append(Append(id=0, branch=self.branch, text=text, images=self._shown(text)))
        return ops

    def _shown(self, text: str) -> list[bytes]:
        """Find the pictures of marks in a text that is sent. A mark of the user's own has none."""
        count = text.count(MARK) if self._images else 0
        shown, self._images = self._images[:count], self._images[count:]
        return shown

    def _edited(self, text: str) -> str:
        """Edit `text` for sending. It ends the record, except for the gap that it is sent for."""
        edited = text if self._edit is None else self._edit(text)
        if edited == text:
            return text
        end = len(self.record)
        while end and not isinstance(self.record[end - 1][2], str):
            end -= 1
        start, size = end, 0
        while size < len(text):
            start -= 1
            size += len(str(self.record[start][2]))
        turn, role, _ = self.record[end - 1]
        self.record[start:end] = [(turn, role, edited)]
        return edited
