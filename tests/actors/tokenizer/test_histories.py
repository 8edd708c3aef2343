"""Histories by fingerprint: what is found, what counts, what makes room. Pure."""

from array import array
from collections.abc import Sequence
from typing import Any

from ramify.actors.tokenizer.histories import MOST_DROPPED, Bound, Histories, fingerprints
from ramify.protocol.limits import Limits
from ramify.protocol.saved import SavedHistory
from ramify.protocol.wire import ChatMessage, Miss, Role

Messages = list[ChatMessage]


def said(*contents: str) -> Messages:
    """A user and an assistant in turn."""
    roles: tuple[Role, Role] = ("user", "assistant")
    return [ChatMessage(role=roles[i % 2], content=each) for i, each in enumerate(contents)]


def text_of(messages: Messages) -> str:
    return "".join(f"<{each.content}>" for each in messages)


def never(text: str, at: int) -> bool:
    return False


def find(table: Histories, messages: Messages, owner: str = "", tools: Any = None) -> Bound:
    return table.find(owner, messages, tools, None, text_of(messages), never)


def answer(table: Histories, messages: Messages, said: str, owner: str = "") -> Bound:
    """A request, and its answer whose token ids are no tokenizer's."""
    bound = find(table, messages, owner)
    table.use(owner, bound)
    rest = text_of(messages)[bound.chars :]
    ids = array("i", [len(messages)] * len(rest))
    table.add(owner, bound, [(rest, ids), ("<", array("i", [7])), (f"{said}>", array("i", [900, 901]))])
    return bound


def test_a_history_that_comes_back_has_the_tokens_that_were_sampled() -> None:
    table = Histories(Limits())
    assert answer(table, said("a"), "b").outcome == "new"
    bound = find(table, said("a", "b", "c"))
    assert (bound.outcome, bound.chars) == ("bound", len("<a><b>"))
    assert list(bound.tokens()) == [1, 1, 1, 7, 900, 901]
    answer(table, said("a", "b", "c"), "d")
    later = find(table, said("a", "b", "c", "d", "e"))
    assert list(later.tokens()) == [1, 1, 1, 7, 900, 901, 3, 3, 3, 7, 900, 901]
    assert find(table, said("a", "b", "c")).outcome == "bound"  # asked again


def test_an_edited_history_agrees_up_to_the_edit() -> None:
    table = Histories(Limits())
    answer(table, said("a"), "b")
    answer(table, said("a", "b", "c"), "d")
    edited = find(table, said("a", "other", "c"))
    assert (edited.outcome, list(edited.tokens())) == ("edited", [1, 1, 1, 7])
    middle = find(table, said("a", "b", "changed", "d", "e"))
    assert (middle.outcome, list(middle.tokens())) == ("edited", [1, 1, 1, 7, 900, 901])
    foreign = find(table, said("x", "b", "c"))
    assert (foreign.outcome, foreign.piece) == ("new", None)


def test_two_answers_to_one_request_are_told_apart() -> None:
    table = Histories(Limits())
    answer(table, said("a"), "b")
    answer(table, said("a"), "x")
    for each in "bx":
        bound = find(table, said("a", each, "c"))
        assert (bound.outcome, bound.chars) == ("bound", 6)


def test_names_and_tools_keep_histories_apart() -> None:
    table = Histories(Limits())
    answer(table, said("a"), "b", owner="one")
    assert find(table, said("a", "b", "c"), "one").outcome == "bound"
    assert find(table, said("a", "b", "c"), "two").piece is None
    assert find(table, said("a", "b", "c"), "one", tools=[{"name": "t"}]).piece is None


def test_a_name_with_many_histories_pushes_out_its_own() -> None:
    table = Histories(Limits(histories=4))
    answer(table, said("kept"), "b", owner="one")
    for i in range(20):
        answer(table, said(f"{i}"), "b", owner="two")
    assert len(table) == 4
    assert find(table, said("kept", "b", "c"), "one").outcome == "bound"
    assert find(table, said("0", "b", "c"), "two").outcome == "evicted"
    assert find(table, said("19", "b", "c"), "two").outcome == "bound"


def test_bytes_are_bounded_and_shared_pieces_count_once() -> None:
    table = Histories(Limits(history_bytes=20_000))
    messages = said("a")
    for _ in range(10):
        answer(table, messages, "b")
        messages = [*messages, *said("x", "b")[1:], *said("c")]
    grown = table.size
    assert grown < 20_000
    big = said("y" * 3000)
    answer(table, big, "b", owner="two")
    assert table.size <= 20_000
    for i in range(50):
        answer(table, said(f"{i}" * 100), "b")
        assert table.size <= 20_000
    for _ in range(len(table)):
        owner = next(iter(table._owners))
        table._drop_oldest(owner)
    assert (table.size, len(table)) == (0, 0)


def test_pieces_that_went_while_a_request_ran_count_again() -> None:
    table = Histories(Limits(histories=1))
    answer(table, said("a"), "b")
    bound = find(table, said("a", "b", "c"))
    answer(table, said("other"), "b")
    table.add("", bound, [("<c>", array("i", [1]))])
    assert len(table) == 1
    whole = table.size
    table._drop_oldest("")
    assert (whole > 0, table.size) == (True, 0)


def test_fingerprints_cost_one_pass() -> None:
    keys = fingerprints("", said("a", "b", "c", "d", "e"), None, None)
    assert [key.messages for key in keys] == [1, 3, 5]
    again = fingerprints("", said("a", "b", "c"), None, None)
    assert [key.digest for key in again] == [key.digest for key in keys[:2]]


def test_a_large_history_pushes_out_a_bounded_number_of_small_ones() -> None:
    """What is left over goes with the next ones: no turn of the loop drops thousands."""
    table = Histories(Limits(history_bytes=670_000))
    for i in range(700):
        answer(table, said(f"{i}"), "ok")
    answer(table, said("long"), "y" * 300_000)
    assert len(table) == 701 - MOST_DROPPED
    for i in range(3):
        answer(table, said(f"more {i}"), "ok")
    assert table.size <= 670_000


def long(*contents: str) -> Messages:
    return said(*(each * 300 for each in contents))


def reason(table: Histories, messages: Messages, cached: int = 0, now: float = 0.0) -> Any:
    prompt = len(text_of(messages))
    found = find(table, messages).missed(prompt, cached, now)
    return None if found is None else (found.reason, found.message, found.tokens)


def conversation() -> Histories:
    table = Histories(Limits())
    answer(table, long("a"), "b" * 300)
    answer(table, long("a", "b", "c"), "d" * 300)
    return table


def test_the_first_message_that_is_otherwise_is_told() -> None:
    table = conversation()
    for number, edited in enumerate(["xbcde", "axcde", "abxde", "abcxe"]):
        told, message, tokens = reason(table, long(*edited), cached=302 * number)
        assert (told, message) == ("edited" if number else "new", number)
        assert abs(tokens - (1208 - 302 * number)) < 40  # up to the last answer: what comes next is new
    assert reason(table, long(*"abcde"), cached=1205 - 64) is None
    assert reason(table, long(*"abcdx"), cached=1205) is None  # that was never part of the history


def test_a_system_prompt_alone_is_no_conversation() -> None:
    table = Histories(Limits())
    system = [ChatMessage(role="system", content="s" * 300)]
    answer(table, [*system, *long("a")], "b" * 300)
    told, message, tokens = reason(table, [*system, *long("x", "b", "c")], cached=302)
    assert (told, message, 550 < tokens < 650) == ("new", 1, True)
    assert reason(table, [*system, *long("x")], cached=302) == ("new", 1, 0)
    assert reason(table, [*system, *long("a")], cached=603) is None  # asked again


def test_kv_that_is_gone_was_evicted_or_had_expired() -> None:
    table = conversation()
    messages = long(*"abcde")
    known = find(table, messages).length
    assert reason(table, messages, cached=100) == ("evicted", None, known - 100)
    bound = find(table, messages)
    table.add("", bound, [(text_of(messages)[bound.chars :], array("i", [1] * 300))], until=50.0)
    again = find(table, messages)
    assert again.missed(5000, 0, 49.0) == Miss(reason="evicted", tokens=again.length)
    assert again.missed(5000, 0, 50.0) == Miss(reason="expired", tokens=again.length)


def test_a_history_that_had_to_make_room_was_evicted() -> None:
    table = Histories(Limits(histories=1))
    answer(table, long("a"), "b" * 300)
    answer(table, long("y"), "z")
    told, message, tokens = reason(table, long(*"abc"))
    assert (told, message, 550 < tokens < 650) == ("evicted", None, True)
    assert reason(table, long(*"abc"), cached=600) is None  # its KV is there all the same


def test_marks_go_with_the_last_piece_that_has_them() -> None:
    table = Histories(Limits(histories=3))
    answer(table, long("a"), "b" * 300)
    kept = table.size
    answer(table, long("a", "b", "c"), "d" * 300)
    assert find(table, long(*"abxde")).changed == 2
    for each in ("one", "two", "three"):
        answer(table, said(each), "b")
    assert find(table, long(*"abxde")).changed == 0
    assert (len(table), table.size < kept + 3 * 2000) == (3, True)


def kept(saved: dict[bytes, SavedHistory], model: str = "m") -> Histories:
    """A process that has this store. As `StoreActor` does, it finds the first, and all before it."""

    def recall(asked: Sequence[bytes]) -> list[SavedHistory]:
        for first in asked:
            found, at = [], saved.get(first)
            while at is not None:
                found.append(at)
                at = saved.get(at.before) if at.before is not None else None
            if found:
                return found[::-1]
        return []

    table = Histories(Limits())
    table.keep(model, lambda owner, history: saved.update({history.asked: history}), recall)
    return table


def test_another_process_goes_on_from_the_store() -> None:
    saved: dict[bytes, SavedHistory] = {}
    one, two = kept(saved), kept(saved)
    messages = said("a")
    for turn in range(12):  # each has only every second answer in memory
        answer((one, two)[turn % 2], messages, f"answer {turn}")
        texts = [each.content for each in messages]
        messages = said(*texts, f"answer {turn}", f"question {turn}")
    alone = Histories(Limits())
    known = Histories(Limits())
    for count in range(1, len(messages), 2):
        answer(known, messages[:count], messages[count].content)
    later = find(kept(saved), messages)
    assert (later.outcome, later.tokens()) == ("bound", find(known, messages).tokens())
    assert one.outcomes == two.outcomes | {"new": 1, "bound": 5}
    assert find(alone, messages).outcome == "new"
    assert len(saved) == 12
    assert all(len(each.pieces) == 3 for each in saved.values())  # each is saved once
    assert find(kept(saved, model="other"), messages).outcome == "new"
    edited = [*messages[:5], *said("changed"), *messages[6:]]
    assert find(kept(saved), edited).tokens() == find(known, edited).tokens()
    table = kept(saved)
    answer(table, messages, "the end")
    assert find(table, messages).missed(1000, 0, 0.0) is not None


def test_a_request_that_comes_again_is_saved_whole() -> None:
    saved: dict[bytes, SavedHistory] = {}
    table = kept(saved)
    for text in ("b", "other"):
        answer(table, said("a"), text)
    (history,) = saved.values()
    assert (history.before, history.kept) == (None, 0)
    assert find(kept(saved), said("a", "other", "c")).outcome == "bound"
