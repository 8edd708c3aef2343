"""Answers by chat, for clients that come back: under way, or ended not long ago. Pure.

Where there is no room for another ended answer, the name that keeps most of what is short loses its
oldest: many answers of one name take no other's away.
"""

from typing import Generic, NamedTuple, TypeVar

from ramify.actors.gateway.apis.ai.chunks import ChatTranscript

RunT = TypeVar("RunT")  # an answer under way

KEPT_S = 60.0  # an answer that ended
KEPT_ANSWERS = 1024  # of all names of a gateway
KEPT_CHARACTERS = 16 << 20
ANSWER_COST = 256  # characters' worth that an answer takes beside its text

Chat = tuple[str, str]  # the credential's name, and what the client calls the chat


class _Ended(NamedTuple):
    transcript: ChatTranscript
    until: float


class _Kept:
    """The ended answers of one name, in the order of their ends."""

    def __init__(self) -> None:
        self.answers: dict[str, _Ended] = {}
        self.size = 0


class Chats(Generic[RunT]):
    """The answers of one gateway process, which knows no other's."""

    def __init__(self) -> None:
        self._running: dict[Chat, RunT] = {}
        self._kept: dict[str, _Kept] = {}
        self._answers = 0
        self._size = 0

    def running(self, chat: Chat) -> RunT | None:
        """The answer of the chat that is under way, if any."""
        return self._running.get(chat)

    def ended(self, chat: Chat, now: float) -> ChatTranscript | None:
        """The whole answer of the chat that ended not long ago, if any."""
        name, title = chat
        self._expire(name, now)
        kept = self._kept.get(name)
        found = kept.answers.get(title) if kept is not None else None
        return found.transcript if found is not None else None

    def begin(self, chat: Chat, run: RunT) -> None:
        """Note a new answer. The one before is forgotten."""
        self._drop(*chat)
        self._running[chat] = run

    def end(self, chat: Chat, run: RunT, transcript: ChatTranscript | None, now: float) -> None:
        """Note the end of an answer. `transcript`: None if it failed, and is not kept."""
        if self._running.get(chat) is not run:  # another one began
            return
        del self._running[chat]
        name, title = chat
        self._expire(name, now)
        if transcript is None or _size(transcript) > KEPT_CHARACTERS:
            return
        kept = self._kept.setdefault(name, _Kept())
        kept.answers[title] = _Ended(transcript, now + KEPT_S)
        kept.size += _size(transcript)
        self._answers += 1
        self._size += _size(transcript)
        if self._answers > KEPT_ANSWERS or self._size > KEPT_CHARACTERS:
            for other in list(self._kept):
                self._expire(other, now)
        while self._answers > KEPT_ANSWERS:
            self._drop_oldest(max(self._kept, key=lambda each: len(self._kept[each].answers)))
        while self._size > KEPT_CHARACTERS:
            self._drop_oldest(max(self._kept, key=lambda each: self._kept[each].size))

    def _expire(self, name: str, now: float) -> None:
        while (kept := self._kept.get(name)) is not None:
            title = next(iter(kept.answers))
            if kept.answers[title].until > now:
                break
            self._drop(name, title)

    def _drop_oldest(self, name: str) -> None:
        self._drop(name, next(iter(self._kept[name].answers)))

    def _drop(self, name: str, title: str) -> None:
        kept = self._kept.get(name)
        found = kept.answers.pop(title, None) if kept is not None else None
        if kept is None or found is None:
            return
        kept.size -= _size(found.transcript)
        self._size -= _size(found.transcript)
        self._answers -= 1
        if not kept.answers:
            del self._kept[name]


def _size(transcript: ChatTranscript) -> int:
    return transcript.size + ANSWER_COST
