"""Markdown while it streams: blocks are printed once, and what stays is what a whole text gives."""

import io
import re

import pytest
from rich.console import Console

from ramify.clients.commands.markdown import MarkdownScreen, blocks

TEXT = """# A title

A paragraph with **bold** text
that goes on.

1. one
2. two

   still two

```python
def f():

    return 1
```

| a | b |
|---|---|
| 1 | 2 |

The *end*
"""


def screen(width: int = 60, height: int = 25) -> tuple[MarkdownScreen, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=height, color_system=None)
    return MarkdownScreen(console), out


def left(written: str) -> list[str]:
    """The lines that a terminal shows in the end: cursor movements up and erased lines are obeyed."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", written):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part.startswith("\x1b["):
            count = int(re.sub(r"\D", "", part) or 1)
            if part.endswith("A"):
                row -= count
                assert row >= 0
            elif part.endswith("K"):
                lines[row] = ""
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    while lines and not lines[-1].strip():
        lines.pop()
    return [line.rstrip() for line in lines]


def streamed(text: str, step: int, **size: int) -> list[str]:
    shown, out = screen(**size)
    with shown.answer() as answer:
        for i in range(0, len(text), step):
            answer.add(text[i : i + step])
    return left(out.getvalue())


@pytest.mark.parametrize("step", [1, 3, 50, 10_000])
def test_what_stays_is_the_same_however_it_comes(step: int) -> None:
    found = [line.strip() for line in streamed(TEXT, step)]
    for line in (
        "A paragraph with bold text that goes on.",
        "1 one",
        "still two",
        "return 1",
        "The end",
    ):
        assert found.count(line) == 1, found
    assert found == [line.strip() for line in streamed(TEXT, 7)]


def test_a_block_larger_than_the_window_is_printed_whole() -> None:
    rows = "".join(f"row {i}\n\n" for i in range(3))
    program = "```\n" + "".join(f"line {i}\n" for i in range(60)) + "```\n"
    found = [line.strip() for line in streamed(rows + program, 9, height=10)]
    assert [line for line in found if line.startswith("line")] == [f"line {i}" for i in range(60)]


def test_complete_blocks_never_change() -> None:
    """Printed is printed: the complete blocks of a prefix are those of every longer text."""
    whole = blocks(TEXT)
    assert "".join(whole) == TEXT
    assert len(whole) == 6
    for i in range(len(TEXT)):
        *finished, _ = blocks(TEXT[:i])
        assert finished == whole[: len(finished)]
    assert blocks("para\n#") == ["para\n#"]  # may become #word, which goes on
    assert blocks("para\n# head\n") == ["para\n", "# head\n"]
    assert blocks("1. a\n\n") == ["1. a\n\n"]
    assert blocks("```\na\n\nb\n") == ["```\na\n\nb\n"]
    assert blocks("") == [""]


def test_what_was_interrupted_stays_on_the_screen() -> None:
    shown, out = screen()
    with pytest.raises(KeyboardInterrupt), shown.answer() as answer:
        answer.add("half an ans")
        raise KeyboardInterrupt
    assert "half an ans" in left(out.getvalue())


def test_notes_stand_above_the_block_that_is_drawn() -> None:
    shown, out = screen()
    with shown.answer() as answer:
        answer.add("one ")
        shown.note("the server is gone")
        answer.add("two")
    assert [line for line in left(out.getvalue()) if line] == ["the server is gone", "one two"]


def test_a_command_that_is_told_can_be_copied() -> None:
    """It is one line, however narrow the window is."""
    shown, out = screen()
    command = "ramify chat " + "--set seed=1 " * 20 + "end"
    shown.note(f"to go on: {command}")
    assert f"to go on: {command}" in left(out.getvalue())


def test_text_that_is_taken_back() -> None:
    shown, out = screen()
    with shown.answer() as answer:
        answer.add("one wrong")
        answer.add("right", cut=5)
    assert [line for line in left(out.getvalue()) if line] == ["one right"]
    shown, out = screen()
    with shown.answer() as answer:
        answer.add("one\n\ntwo\n")
        answer.add("three", cut=8)
    assert [line for line in left(out.getvalue()) if line] == [
        "one",
        "(text above was taken back by another client)",
        "three",
    ]


def test_a_model_cannot_write_to_the_terminal() -> None:
    shown, out = screen()
    with shown.answer() as answer:
        answer.add("a\x1b]0;title\x07b\x9b2J")
    assert "\x1b]" not in out.getvalue()
    assert "\x9b" not in out.getvalue()
