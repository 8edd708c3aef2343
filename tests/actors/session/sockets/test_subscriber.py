"""One socket and branches made by hand: what it is sent, what waits for it, and what that weighs."""

from collections.abc import Sequence
from typing import Any

import pytest

from ramify.actors.kit.memory import OPENED, Budget, Meter, reply_bytes
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.segments import InputSegment, OutputSegment, Tail
from ramify.actors.session.sockets.subscriber import Subscriber
from ramify.protocol import wire as w
from tests.messages import usage


def meter() -> Meter:
    big = 1 << 40
    return Meter(big, Budget("", "", big, big), Budget("", "", big, big))


def socket(*, write: bool = True, held_by: Meter | None = None, **opened: Any) -> Subscriber:
    return Subscriber(1, w.Open(**{"client": "c", **opened}), held_by or meter(), write=write)


def branch(name: str = "a") -> SessionBranch:
    return SessionBranch(name, 1)


def given(at: SessionBranch, text: str) -> None:
    """Input: a token for each letter."""
    letters = at.segments
    tokens = InputSegment(0, _letters(text), text, tail=Tail.RAW).tokens
    letters.append(InputSegment(at.position, tokens, text, tail=Tail.RAW))


def _letters(text: str) -> Any:
    segment = OutputSegment(0)
    segment.tokens.extend(map(ord, text))
    return segment.tokens


def output(at: SessionBranch, *chunks: str, op: int | None = None, ended: bool = False) -> OutputSegment:
    """Output: a token for each letter, a mark behind each chunk."""
    segment = OutputSegment(at.position, op=op, client="c")
    at.segments.append(segment)
    say(segment, *chunks)
    segment.ended = ended
    return segment


def say(segment: OutputSegment, *chunks: str) -> None:
    for chunk in chunks:
        segment.tokens.extend(map(ord, chunk))
        segment.release(len(segment.tokens), chunk)


def cursors(subscriber: Subscriber) -> dict[str, int]:
    return {name: each.sent for name, each in subscriber.progress.items() if each.sent is not None}


def cuts(subscriber: Subscriber) -> dict[str, int]:
    progress = subscriber.progress.items()
    return {name: each.truncate for name, each in progress if each.truncate is not None}


def credits(subscriber: Subscriber) -> dict[str, int]:
    return {name: each.credit for name, each in subscriber.progress.items() if each.credit is not None}


def sent(subscriber: Subscriber) -> list[Any]:
    """Deltas as (branch, position, text, truncate), other messages as they are. Empties `out`."""
    out, subscriber.out = subscriber.out, []
    return [(m.branch, m.position, m.text, m.truncate) if isinstance(m, w.Delta) else m for m in out]


def ok(ident: int) -> w.Ok:
    return w.Ok(id=ident)


def done(ident: int, name: str = "a") -> w.Done:
    used = usage()
    return w.Done(id=ident, branch=name, position=2, reason="stop", usage=used)


# --- deltas ---------------------------------------------------------------------------------------


def test_a_delta_says_all_that_is_new_once() -> None:
    subscriber, a = socket(), branch()
    given(a, "in")
    segment = output(a, "Hel", "lo")
    subscriber.begin(a, a.released)
    subscriber.flush(a)
    assert sent(subscriber) == []  # it knew that
    subscriber.begin(a, 2)
    subscriber.flush(a)
    subscriber.flush(a)
    assert sent(subscriber) == [("a", 7, "Hello", None)]
    say(segment, "!")
    subscriber.flush(a)
    assert sent(subscriber) == [("a", 8, "!", None)]


def test_outputs_with_input_between_are_deltas_of_their_own() -> None:
    subscriber, a = socket(), branch()
    output(a, "one", ended=True)
    given(a, "in")
    output(a, "two", ended=True)
    given(a, "end")
    subscriber.flush(a)
    assert sent(subscriber) == [("a", 3, "one", None), ("a", 8, "two", None)]
    assert cursors(subscriber) == {"a": 11}  # behind the input too


def test_quiet_output_is_passed_over() -> None:
    subscriber, a = socket(), branch()
    output(a, "one", ended=True).quiet = True
    subscriber.flush(a)
    subscriber.reply(a, ok(1))
    assert sent(subscriber) == [ok(1)]
    assert not subscriber.held


@pytest.mark.parametrize("asked", [False, True])
def test_tokens_are_sent_to_whom_wants_them(asked: bool) -> None:
    subscriber, a = socket(tokens=asked), branch()
    segment = output(a, "ab", "c")
    segment.logprobs = [w.TokenLogprob(token=i, logprob=-1.0) for i in (97, 98, 99)]
    subscriber.begin(a, 2)
    subscriber.flush(a)
    (delta,) = subscriber.out
    assert isinstance(delta, w.Delta)
    assert delta.tokens == ([99] if asked else None)
    assert delta.logprobs == segment.logprobs[2:]


def test_parts_wait_for_their_label_and_text_alone_does_not() -> None:
    a = branch()
    segment = output(a, "Well", "<to")
    segment.labels = ["text"]
    with_parts, plain = socket(parts=True), socket()
    for subscriber in (with_parts, plain):
        subscriber.flush(a)
    assert sent(with_parts) == [("a", 4, "Well", None)]
    assert sent(plain) == [("a", 7, "Well<to", None)]
    with_parts.reply(a, ok(1))
    assert (sent(with_parts), with_parts.held) == ([], 1)
    segment.labels.append("text")
    with_parts.flush(a)
    (delta, reply) = with_parts.out
    assert isinstance(delta, w.Delta)
    assert [part.text for part in delta.parts or ()] == ["<to"]
    assert reply == ok(1)


# --- credit -----------------------------------------------------------------------------------------


def test_credit_ends_at_a_mark_and_a_reply_waits_for_the_rest() -> None:
    subscriber, a = socket(), branch()
    output(a, "ab", "cd", "ef", ended=True)
    subscriber.credit("a", 5, most=9)
    subscriber.reply(a, ok(1))
    assert sent(subscriber) == [("a", 4, "abcd", None)]
    subscriber.credit("a", 6, most=9)
    subscriber.flush(a)
    assert sent(subscriber) == [("a", 6, "ef", None), ok(1)]


def test_credit_up_to_where_a_reply_is_lets_it_through() -> None:
    subscriber, a = socket(), branch()
    output(a, "ab", "cd", ended=True)
    subscriber.credit("a", 4, most=9)
    subscriber.reply(a, ok(1))
    output(a, "ef", ended=True)
    subscriber.reply(a, ok(2))
    assert sent(subscriber) == [("a", 4, "abcd", None), ok(1)]
    assert subscriber.held == 1


def test_credit_is_kept_for_so_many_branches_that_are_still_to_come() -> None:
    subscriber, a = socket(), branch()
    subscriber.begin(a, 0)
    for name in ("a", "x", "y"):
        subscriber.credit(name, 1, most=2)
    subscriber.credit("x", 2, most=2)  # one that is known changes nothing of the others
    assert credits(subscriber) == {"a": 1, "x": 2, "y": 1}
    subscriber.credit("z", 3, most=2)
    assert credits(subscriber) == {"a": 1, "z": 3}


def test_what_is_settled_passes_any_credit_and_the_credit_stays() -> None:
    subscriber, a = socket(), branch()
    output(a, "ab", ended=True)
    subscriber.credit("a", 1, most=9)
    subscriber.throttled = True
    subscriber.settle(a)
    assert sent(subscriber) == [("a", 2, "ab", None)]
    assert (credits(subscriber), subscriber.throttled) == ({"a": 1}, True)
    other = branch("b")
    subscriber.settle(other)
    assert credits(subscriber) == {"a": 1}


# --- slow readers -----------------------------------------------------------------------------------


def test_a_reply_waits_for_a_slow_reader_only_behind_text() -> None:
    subscriber, a, silent = socket(), branch(), branch("b")
    output(a, "ab", ended=True)
    subscriber.throttled = True
    subscriber.reply(a, ok(1))
    subscriber.reply(a, ok(2))
    subscriber.reply(silent, ok(3))
    subscriber.reply(None, ok(4))
    assert sent(subscriber) == [ok(3), ok(4)]
    assert subscriber.held == 2
    subscriber.throttled = False
    subscriber.flush(a)
    assert sent(subscriber) == [("a", 2, "ab", None), ok(1), ok(2)]
    assert (subscriber.held, subscriber._held) == (0, {})


def test_a_reply_waits_behind_a_single_token() -> None:
    subscriber, a = socket(), branch()
    output(a, "a", ended=True)
    subscriber.throttled = True
    subscriber.reply(a, ok(1))
    assert sent(subscriber) == []


def test_output_without_a_mark_is_not_waited_for() -> None:
    subscriber, a = socket(), branch()
    output(a)
    subscriber.throttled = True
    subscriber.reply(a, ok(1))
    assert sent(subscriber) == [ok(1)]


def test_what_waits_for_a_socket_counts_until_it_goes() -> None:
    counted = meter()
    subscriber, a = socket(held_by=counted), branch()
    start = counted.held
    assert start == OPENED
    output(a, "ab", ended=True)
    subscriber.throttled = True
    subscriber.reply(a, ok(1))
    assert counted.held == start + reply_bytes(ok(1))
    subscriber.throttled = False
    subscriber.flush(a)
    assert counted.held == start
    subscriber.throttled = True
    output(a, "cd", ended=True)
    child = branch("child")
    subscriber.reply(a, ok(2), [child])
    subscriber.close()
    assert (counted.held, subscriber.held, subscriber._held, subscriber._untold) == (0, 0, {}, {})


# --- children ---------------------------------------------------------------------------------------


def test_children_follow_the_reply_that_tells_of_them() -> None:
    subscriber, a, child, grandchild = socket(), branch(), branch("child"), branch("grandchild")
    output(a, "ab", ended=True)
    output(child, "x", ended=True)
    output(grandchild, "y", ended=True)
    subscriber.throttled = True
    subscriber.reply(a, ok(1), [child])
    subscriber.throttled = False
    subscriber.reply(child, ok(2), [grandchild])
    subscriber.flush(grandchild)
    subscriber.reply(grandchild, ok(3))
    assert (sent(subscriber), subscriber.held) == ([], 3)
    subscriber.flush(a)
    assert sent(subscriber) == [
        ("a", 2, "ab", None),
        ok(1),
        ("child", 1, "x", None),
        ok(2),
        ("grandchild", 1, "y", None),
        ok(3),
    ]
    assert subscriber.held == 0


def test_a_child_that_is_settled_settles_what_its_fork_waits_for() -> None:
    subscriber, a, child = socket(), branch(), branch("child")
    output(a, "ab", ended=True)
    output(child, "x", ended=True)
    subscriber.credit("a", 0, most=9)
    subscriber.reply(a, ok(1), [child])
    subscriber.drop(child)
    assert sent(subscriber) == [("a", 2, "ab", None), ok(1), ("child", 1, "x", None)]
    assert credits(subscriber) == {"a": 0}
    assert cursors(subscriber) == {"a": 2}


# --- branches that move -----------------------------------------------------------------------------


def test_a_cut_moves_the_cursor_back_and_never_on() -> None:
    subscriber, a = socket(), branch()
    subscriber.begin(a, 5)
    subscriber.cut(a, 7)
    assert cursors(subscriber) == {"a": 5}
    subscriber.cut(a, 3)
    assert cursors(subscriber) == {"a": 3}
    subscriber.cut(branch("b"), 0)
    subscriber.rewrite(branch("b"), 0)
    assert (cursors(subscriber), cuts(subscriber)) == ({"a": 3}, {})
    new, unseen = socket(), branch("unseen")
    new.rewrite(unseen, 0)
    assert cuts(new) == {}


def test_what_is_held_comes_before_what_is_generated_behind_a_cut() -> None:
    subscriber, a = socket(), branch()
    output(a, "ab", ended=True)
    subscriber.throttled = True
    subscriber.reply(a, ok(1))
    subscriber.cut(a, 0)
    a.segments.pop()
    output(a, "xy", ended=True)
    subscriber.throttled = False
    subscriber.flush(a)
    assert sent(subscriber) == [ok(1), ("a", 2, "xy", None)]


def test_text_that_changed_is_sent_again_from_the_lowest_place() -> None:
    subscriber, a = socket(), branch()
    output(a, "ab", "cd", ended=True)
    subscriber.flush(a)
    sent(subscriber)
    subscriber.rewrite(a, 4)  # it has seen no more than that
    assert cuts(subscriber) == {}
    subscriber.rewrite(a, 3)
    subscriber.begin(a, 4)
    subscriber.rewrite(a, 0)
    subscriber.begin(a, 4)
    subscriber.rewrite(a, 2)
    subscriber.begin(a, 0)
    subscriber.flush(a)
    assert sent(subscriber) == [("a", 4, "abcd", 0)]
    assert cuts(subscriber) == {}


def test_a_truncation_belongs_to_one_branch() -> None:
    subscriber, a, b = socket(), branch(), branch("b")
    subscriber.begin(a, 3)
    subscriber.rewrite(a, 1)
    output(b, "x")
    subscriber.flush(b)
    assert sent(subscriber) == [("b", 1, "x", None)]
    assert cuts(subscriber) == {"a": 1}


def test_a_branch_that_takes_anothers_place_says_where_its_own_text_ended() -> None:
    subscriber, a = socket(), branch()
    given(a, "abcde")
    subscriber.place(a)
    assert (sent(subscriber), cursors(subscriber)) == ([], {"a": 5})
    subscriber.begin(a, 4)
    subscriber.rewrite(a, 2)
    subscriber.place(a)
    assert sent(subscriber) == [("a", 2, "", 2)]
    assert (cursors(subscriber), cuts(subscriber)) == ({"a": 5}, {})


def test_a_new_name_has_all_that_the_old_one_had() -> None:
    subscriber, a = socket(), branch()
    subscriber.begin(a, 5)
    subscriber.rewrite(a, 2)
    subscriber.credit("a", 9, most=9)
    subscriber.credit("x", 1, most=9)
    subscriber.throttled = True
    subscriber.rename(a, "b")
    assert credits(subscriber) == {"b": 9, "x": 1}
    assert (cursors(subscriber), cuts(subscriber)) == ({"b": 2}, {"b": 2})
    a.label.name = "b"
    subscriber.drop(a)
    assert (cursors(subscriber), cuts(subscriber), credits(subscriber)) == ({}, {}, {"x": 1})


# --- resuming ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("have", "start", "truncate"),
    [(0, 0, None), (4, 4, None), (5, 4, 4), (6, 6, None), (9, 6, 6)],
)
def test_a_socket_goes_on_at_the_mark_before_what_it_has(
    have: int, start: int, truncate: int | None
) -> None:
    subscriber, a = socket(), branch()
    given(a, "in")
    output(a, "ab", "cd")
    subscriber.resume(a, have, 0)
    assert cursors(subscriber) == {"a": start}
    assert cuts(subscriber).get("a") == truncate


def test_a_socket_goes_on_where_the_branch_was_cut_back_to() -> None:
    subscriber, a = socket(), branch()
    output(a, "ab", "cd", ended=True)
    a.cut_back(5, 3)
    subscriber.resume(a, 4, 5)
    assert (cursors(subscriber), cuts(subscriber)) == ({"a": 4}, {})
    subscriber.resume(a, 4, 4)
    assert (cursors(subscriber), cuts(subscriber)) == ({"a": 2}, {"a": 2})


def test_a_socket_with_less_than_a_cut_left_goes_on_at_what_it_has() -> None:
    subscriber, a = socket(), branch()
    output(a, "ab", "cd", ended=True)
    a.cut_back(5, 3)
    subscriber.resume(a, 0, 4)
    assert (cursors(subscriber), cuts(subscriber)) == ({"a": 0}, {})


def test_a_resume_before_several_outputs_goes_back_in_none_of_them() -> None:
    subscriber, a = socket(), branch()
    output(a, "ab", ended=True)
    given(a, "in")
    output(a, "cd", ended=True)
    subscriber.resume(a, 1, 0)
    assert cursors(subscriber) == {"a": 0}
    subscriber.resume(a, 3, 0)
    assert cursors(subscriber) == {"a": 3}
    assert not subscriber.looking
    output(a, "efgh", ended=True)
    subscriber.resume(a, 9, 0)
    assert cursors(subscriber) == {"a": 6}


def replayed(
    subscriber: Subscriber,
    a: SessionBranch,
    replies: dict[int, Sequence[w.ServerMessage]],
    have: int = 0,
) -> list[Any]:
    subscriber.resume(a, have, 0)
    subscriber.replay(a, {ident: list(each) for ident, each in replies.items()})
    return sent(subscriber)


def test_what_was_missed_comes_with_its_replies_in_between() -> None:
    a = branch()
    output(a, "ab", op=1, ended=True)
    output(a, "cd", op=2, ended=True)
    output(a, "ef", op=3)
    kept = {1: [done(1, "b"), done(1)], 3: [done(3)]}
    expected = [("a", 2, "ab", None), done(1), ("a", 4, "cd", None), ("a", 6, "ef", None)]
    assert replayed(socket(), a, kept) == expected
    expected.remove(done(1))
    assert replayed(socket(write=False), a, kept) == expected
    assert replayed(socket(client="other"), a, kept) == expected


def test_replies_wait_for_credit_after_a_resume() -> None:
    a = branch()
    output(a, "ab", op=1, ended=True)
    subscriber = socket()
    subscriber.credit("a", 0, most=9)
    assert replayed(subscriber, a, {1: [done(1)]}) == []
    assert subscriber.held == 1
    subscriber.credit("a", 2, most=9)
    subscriber.flush(a)
    assert sent(subscriber) == [("a", 2, "ab", None), done(1)]


def test_a_socket_that_has_too_much_is_told_even_where_nothing_follows() -> None:
    a = branch()
    given(a, "in")
    assert replayed(socket(), a, {}, have=9) == [("a", 2, "", 2)]
    subscriber = socket()
    subscriber.throttled = True
    assert replayed(subscriber, a, {}, have=9) == []
    assert cuts(subscriber) == {"a": 2}


# --- ticks ------------------------------------------------------------------------------------------


def test_without_ticks_nothing_is_held_back() -> None:
    subscriber, a = socket(), branch()
    segment = output(a, "a")
    assert subscriber.stream([a], 1.0) is None
    say(segment, "b")
    assert subscriber.stream([a], 1.0) is None
    assert subscriber.tick([a], 9.0) is None
    assert sent(subscriber) == [("a", 1, "a", None), ("a", 2, "b", None)]


def test_between_ticks_text_waits_and_all_branches_go_together() -> None:
    subscriber, a, b = socket(tick_ms=500), branch(), branch("b")
    first, second = output(a, "a"), output(b, "b")
    assert subscriber.stream([a], 1.0) is None
    assert subscriber.stream([b], 1.0) is None
    say(first, "A")
    say(second, "B")
    assert subscriber.stream([a], 1.4) == 1.5
    assert subscriber.tick([a, b], 1.4) == 1.5
    assert sent(subscriber) == [("a", 1, "a", None), ("b", 1, "b", None)]
    assert subscriber.tick([a, b], 1.5) is None
    assert sent(subscriber) == [("a", 2, "A", None), ("b", 2, "B", None)]
    say(first, "!")
    assert subscriber.stream([a], 1.5) is None  # of that moment too
    assert subscriber.stream([b], 1.75) == 2.0
    assert sent(subscriber) == [("a", 3, "!", None)]


def test_a_tick_without_text_begins_no_pause() -> None:
    subscriber, a = socket(tick_ms=500), branch()
    assert subscriber.tick([a], 1.0) is None
    assert subscriber.next_tick == 0.0
    output(a, "a")
    assert subscriber.stream([a], 1.1) is None
    assert sent(subscriber) == [("a", 1, "a", None)]
    assert subscriber.next_tick == 1.6
    say(a.segments[-1], "b")
    assert subscriber.stream([a], 1.6) is None
    assert sent(subscriber) == [("a", 2, "b", None)]


def test_tools_are_read_once_when_they_are_wanted() -> None:
    subscriber = socket(tools=[{"type": "function", "function": {"name": "f"}}])
    assert "f" in subscriber.tools
    assert subscriber.tools is subscriber.tools
