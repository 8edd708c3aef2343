"""Answers that are kept for who comes back: for how long, how many, how large."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.actors.gateway.apis.ai import chats as module
from ramify.actors.gateway.apis.ai.chats import KEPT_S, Chats
from ramify.actors.gateway.apis.ai.chunks import ChatTranscript

CHAT = ("", "chat")


def transcript(characters: int = 3) -> ChatTranscript:
    made = ChatTranscript()
    made.add({"type": "text-delta", "id": "t", "delta": "x" * characters})
    return made


def ended(chats: Chats, name: str, kept: ChatTranscript | None, now: float = 0.0, who: str = "") -> None:
    run: Any = object()
    chats.begin((who, name), run)
    chats.end((who, name), run, kept, now)


def test_an_answer_is_kept_for_a_while() -> None:
    chats, run, kept = Chats(), object(), transcript()
    chats.begin(CHAT, run)  # type: ignore[arg-type]
    assert chats.running(CHAT) is run
    chats.end(CHAT, run, kept, 10.0)  # type: ignore[arg-type]
    assert chats.running(CHAT) is None
    assert chats.ended(CHAT, 10.0 + KEPT_S - 1) is kept
    assert chats.ended(CHAT, 10.0 + KEPT_S) is None
    assert chats.ended(("somebody else", "chat"), 10.0) is None


def test_a_new_answer_takes_the_place_of_the_last() -> None:
    chats, kept = Chats(), transcript()
    ended(chats, "chat", kept)
    old: Any = object()
    new: Any = object()
    chats.begin(CHAT, old)
    assert chats.ended(CHAT, 0.0) is None
    chats.begin(CHAT, new)
    chats.end(CHAT, old, kept, 0.0)  # late
    assert (chats.running(CHAT), chats.ended(CHAT, 0.0)) == (new, None)


def test_what_failed_is_not_kept() -> None:
    chats = Chats()
    ended(chats, "chat", None)
    assert chats.ended(CHAT, 0.0) is None


def test_no_more_than_so_many_and_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_ANSWERS", 3)
    monkeypatch.setattr(module, "KEPT_CHARACTERS", 100)
    monkeypatch.setattr(module, "ANSWER_COST", 0)
    chats = Chats()
    for i in range(5):
        ended(chats, str(i), transcript())
    assert [chats.ended(("", str(i)), 0.0) is not None for i in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    ended(chats, "large", transcript(95))
    assert [chats.ended(("", str(i)), 0.0) is not None for i in range(5)] == [False] * 4 + [True]
    ended(chats, "too large", transcript(200))
    assert chats.ended(("", "too large"), 0.0) is None
    assert chats.ended(("", "large"), 0.0) is not None


@pytest.mark.parametrize("characters", [3, 200_000])
def test_many_answers_of_one_name_take_no_other_name_s_away(characters: int) -> None:
    """1,040 short ones, or 200 long ones."""
    chats, kept = Chats(), transcript(1000)
    ended(chats, "chat", kept, who="alice")
    for i in range(1040 if characters < 100 else 200):
        ended(chats, str(i), transcript(characters), who="mallory")
    assert chats.ended(("alice", "chat"), 0.0) is kept
    assert chats.ended(("mallory", "0"), 0.0) is None
    for i in range(40):  # as many names as there is room for have an even part each
        for who in range(40):
            ended(chats, str(i), transcript(), who=f"name {who}")
    left = [
        sum(chats.ended((f"name {who}", str(i)), 0.0) is not None for i in range(40))
        for who in range(40)
    ]
    assert min(left) >= module.KEPT_ANSWERS // 42 - 1
    assert chats._answers <= module.KEPT_ANSWERS


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 40), st.floats(0, 20)),
        max_size=60,
    )
)
def test_what_is_kept_is_what_is_counted(steps: list[tuple[int, int, int, float]]) -> None:
    chats, now = Chats(), 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "KEPT_ANSWERS", 8)
        patch.setattr(module, "KEPT_CHARACTERS", 2500)
        for who, chat, size, later in steps:
            now += later
            ended(chats, str(chat), transcript(size * 10) if size else None, now, who=str(who))
            kept = [one for name in chats._kept.values() for one in name.answers.values()]
            assert len(kept) == chats._answers <= 8
            assert sum(one.transcript.size + module.ANSWER_COST for one in kept) == chats._size <= 2500
            assert all(name.answers for name in chats._kept.values())
