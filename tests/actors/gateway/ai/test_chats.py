"""Answers that are kept for who comes back: for how long, how many, how large."""

from typing import Any

import pytest

from ramify.actors.gateway.ai import chats as module
from ramify.actors.gateway.ai.chats import KEPT_S, Chats
from ramify.actors.gateway.ai.chunks import Transcript

CHAT = ("", "chat")


def transcript(characters: int = 3) -> Transcript:
    made = Transcript()
    made.add({"type": "text-delta", "id": "t", "delta": "x" * characters})
    return made


def ended(chats: Chats, name: str, kept: Transcript | None, now: float = 0.0) -> None:
    run: Any = object()
    chats.begin(("", name), run)
    chats.end(("", name), run, kept, now)


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
