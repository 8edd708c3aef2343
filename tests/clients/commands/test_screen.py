"""Plain output: what goes where."""

import io

from ramify.clients.commands.screen import Screen, shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_become_pictures() -> None:
    assert shown("a\tb\nc") == "a\tb\nc"
    assert shown("a\u202eb\u2066c\u200f\u061c\u2028d") == "a�b�c���d"
    assert shown("\x1b[2J\r\x7f\x9b") == "␛[2J␍␡�"


def test_a_pipe_gets_the_text_as_it_is_and_a_terminal_does_not() -> None:
    for out, text in ((io.StringIO(), "a\x1bb\n"), (Terminal(), "a␛b\n")):
        screen = Screen(out, io.StringIO(), colour=False)
        with screen.answer() as answer:
            answer.add("a\x1b")
            answer.add("b")
        screen.end_line()
        screen.end_line()
        assert out.getvalue() == text


def test_a_note_does_not_stand_in_the_midst_of_a_line() -> None:
    both = Terminal()
    screen = Screen(both, both, colour=True)
    with screen.answer() as answer:
        answer.add("half")
        screen.note("gone")
    screen.end_line()
    assert both.getvalue() == "half\n\x1b[2mgone\x1b[0m\n"


def test_text_that_is_taken_back_is_told() -> None:
    notes = io.StringIO()
    Screen(io.StringIO(), notes, colour=False).add("x", cut=4)
    assert "last 4 characters were taken back" in notes.getvalue()


def test_notes_are_for_a_terminal_wherever_the_answer_goes() -> None:
    """`ramify chat --script > file`: a hostile server's errors were written to stderr as they came."""
    out, notes = io.StringIO(), io.StringIO()
    screen = Screen(out, notes, colour=False)
    screen.note("\x1b]0;owned\x07")
    screen.error("\x1b[2Jgone\u202e")
    assert notes.getvalue() == "␛]0;owned␇\n␛[2Jgone�\n"
