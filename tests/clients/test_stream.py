"""Tickets and streams: text in parts, cut where it must be."""

from ramify.clients.stream import Stream, Ticket, answering_branches
from ramify.protocol.errors import Conflict
from ramify.protocol.wire import (
    Append,
    Cancel,
    Delta,
    Done,
    Drop,
    Fork,
    Generate,
    Part,
    TokenLogprob,
)
from tests.messages import usage


def delta(position: int, text: str, **more: object) -> Delta:
    return Delta(branch="main", position=position, text=text, **more)  # type: ignore[arg-type]


def done(position: int, prompt: int = 0) -> Done:
    used = usage(prompt=prompt, computed=prompt, output=position - prompt)
    return Done(id=1, branch="main", position=position, reason="stop", usage=used)


def test_unread_deltas_are_merged() -> None:
    stream = Stream("main")
    assert stream.take() is None
    logprob = TokenLogprob(token=7, logprob=-0.5)
    stream.add(delta(1, "a", tokens=[7], logprobs=[logprob]))
    stream.add(delta(3, "bc", tokens=[8, 9]))
    taken = stream.take()
    assert taken is not None
    assert (taken.text, taken.position, taken.tokens) == ("abc", 3, [7, 8, 9])
    assert taken.logprobs == [logprob]
    stream.add(delta(4, "d"))
    again = stream.take()
    assert again is not None
    assert (again.text, again.tokens, again.cut) == ("d", None, 0)
    assert stream.take() is None


def test_what_text_is_stays_with_the_text() -> None:
    stream = Stream("main")
    stream.add(delta(1, "a", parts=[Part(kind="reasoning", text="a")]))
    stream.add(delta(2, "b", parts=[Part(kind="text", text="b")]))
    taken = stream.take()
    assert taken is not None
    assert [(part.kind, part.text) for part in taken.parts or ()] == [("reasoning", "a"), ("text", "b")]


def test_how_far_a_text_reaches() -> None:
    stream = Stream("main")
    assert stream.end == 0
    stream.add(delta(5, "early"))
    stream.begin_at(5)
    stream.add(delta(5, "late, and early"))
    assert (stream.end, stream.take()) == (0, None)
    stream.add(delta(6, "mine"))
    assert stream.end == 6


def test_text_whose_owner_is_not_known_is_not_shown_when_the_session_ends() -> None:
    stream = Stream("main")
    stream.held = True
    stream.add(delta(2, "ab"))
    stream.fail(Conflict("x"))
    assert stream.take() is None


def test_the_whole_text_has_the_tokens_of_the_deltas() -> None:
    stream = Stream("main")
    logprob = TokenLogprob(token=7, logprob=-0.5)
    stream.add(delta(1, "a", tokens=[7], logprobs=[logprob]))
    stream.finish(done(2), "ab")
    taken = stream.take()
    assert taken is not None
    assert (taken.text, taken.tokens, taken.logprobs) == ("ab", [7], [logprob])


def test_a_cut_takes_back_what_was_read() -> None:
    stream = Stream("main")
    stream.add(delta(2, "ab"))
    stream.add(delta(5, "cde"))
    stream.take()
    stream.add(delta(6, "f"))
    over = stream.cut_back(2)
    assert [part.text for part in over] == ["cde", "f"]
    taken = stream.take()
    assert taken is not None
    assert (taken.cut, taken.text) == (3, "")


def test_text_past_the_end_belongs_to_the_next() -> None:
    stream = Stream("main")
    stream.add(delta(4, "mine"))
    stream.add(delta(9, "next"))
    assert [part.text for part in stream.finish(done(4), None)] == ["next"]
    assert stream.text == "mine"


def test_text_before_the_start_is_not_mine() -> None:
    stream = Stream("main")
    stream.add(delta(4, "before"))
    assert stream.take() is not None
    stream.add(delta(8, "mine"))
    stream.finish(done(8, prompt=5), None)
    taken = stream.take()
    assert taken is not None
    assert (taken.cut, taken.text) == (len("before"), "mine")


def test_the_whole_text_replaces_the_parts() -> None:
    stream = Stream("main")
    stream.add(delta(2, "ab"))
    stream.take()
    stream.finish(done(6), "abcdef")
    taken = stream.take()
    assert taken is not None
    assert (taken.text, taken.cut) == ("cdef", 0)
    assert stream.text == "abcdef"

    other = Stream("main")
    other.add(delta(2, "xy"))
    other.take()
    other.finish(done(6), "abcdef")
    taken = other.take()
    assert taken is not None
    assert (taken.text, taken.cut) == ("abcdef", 2)


def test_a_held_stream_shows_nothing() -> None:
    stream = Stream("main")
    stream.held = True
    stream.add(delta(2, "ab"))
    assert stream.take() is None
    stream.finish(done(2), None)
    taken = stream.take()
    assert taken is not None
    assert taken.text == "ab"


def test_who_answers() -> None:
    assert answering_branches(Append(id=1, branch=["a", "b"])) == ["a", "b"]
    assert answering_branches(Generate(id=1, n=2, as_=["x", "y"])) == ["x", "y"]
    assert answering_branches(Drop(id=1, branch="a")) == ["a"]
    assert answering_branches(Fork(id=1, as_=["a", "b"])) == []
    assert answering_branches(Cancel(id=1, branch=["a", "b"])) == []


def test_a_ticket_counts_its_replies() -> None:
    ticket = Ticket(Generate(id=1, branch=["a", "b"]), [])
    assert ticket.owes("a")
    ticket.settle("a")
    assert not ticket.owes("a")
    assert not ticket.settled
    ticket.fail(Conflict("x"), None)
    assert ticket.settled
    assert ticket.streams["b"].error is not None
    assert ticket.streams["a"].error is not None  # nothing had come for it
