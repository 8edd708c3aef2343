"""Texts with marks as bytes."""

from ramify.actors.grammar.marks import Marks, name, symbols

MARKS = Marks(["<tool>", "<tool>x", "</tool>"])


def test_marks_become_tokens_the_longest_first() -> None:
    assert MARKS.encode("a<tool>é<tool>xb") == b"a\xff<tool>\xfe\xc3\xa9\xff<tool>x\xfeb"
    assert Marks([]).encode("<tool>") == b"<tool>"
    assert symbols(b"a\xff<t>\xfeb") == [b"a", b"\xff<t>\xfe", b"b"]


def test_a_trigger_is_searched_for_as_tokens_and_spelled() -> None:
    assert list(MARKS.triggers("<tool>", '<tool>{"a"')) == [
        (name("<tool>"), b'{"a"'),
        (b"<tool>", b'{"a"'),
    ]
    assert list(MARKS.triggers("<f=", "<f=g>")) == [(b"<f=", b"g>")]
    # one that ends inside a mark has all of it, where it is a token
    assert list(MARKS.triggers("<to", "<tool>a</tool>")) == [
        (name("<tool>"), b"a" + name("</tool>")),
        (b"<to", b"ol>a" + name("</tool>")),
    ]
