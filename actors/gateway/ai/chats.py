"""Answers by chat, for clients that come back: under way, or ended not long ago. Pure."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ramify.actors.gateway.ai.chat_run import ChatRun
    from ramify.actors.gateway.ai.chunks import Transcript

KEPT_S = 60.0  # an answer that ended
KEPT_ANSWERS = 1024  # of all clients of a gateway
KEPT_CHARACTERS = 16 << 20

Chat = tuple[str, str]  # the credential's name, and what the client calls the chat


class _Ended(NamedTuple):
    transcript: "Transcript"
    until: float


class Chats:
    """One a gateway. A process knows its own answers only."""

    def __init__(self) -> None:
        self._running: dict[Chat, ChatRun] = {}
        self._ended: dict[Chat, _Ended] = {}
        self._size = 0

    def running(self, chat: Chat) -> "ChatRun | None":
        """The answer that is under way."""
        return self._running.get(chat)

    def ended(self, chat: Chat, now: float) -> "Transcript | None":
        """The whole answer that ended not long ago."""
        self._expire(now)
        found = self._ended.get(chat)
        return found.transcript if found is not None else None

    def begin(self, chat: Chat, run: "ChatRun") -> None:
        """A new answer: the one before is forgotten."""
        self._drop(chat)
        self._running[chat] = run

    def end(self, chat: Chat, run: "ChatRun", transcript: "Transcript | None", now: float) -> None:
        """An answer is over. `transcript`: None if it failed, and is not kept."""
        if self._running.get(chat) is not run:  # another one began
            return
        del self._running[chat]
        self._expire(now)
        if transcript is not None and transcript.size <= KEPT_CHARACTERS:
            self._ended[chat] = _Ended(transcript, now + KEPT_S)
            self._size += transcript.size
            while self._size > KEPT_CHARACTERS or len(self._ended) > KEPT_ANSWERS:
                self._drop(next(iter(self._ended)))

    def _expire(self, now: float) -> None:
        while self._ended:
            chat = next(iter(self._ended))  # they are in the order of their ends
            if self._ended[chat].until > now:
                break
            self._drop(chat)

    def _drop(self, chat: Chat) -> None:
        found = self._ended.pop(chat, None)
        if found is not None:
            self._size -= found.transcript.size
