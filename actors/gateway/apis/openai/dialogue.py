"""Completions of either kind: what follows the answers of a session, choice by choice."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.actors.gateway.apis.openai.errors import event_of_error, of_error
from ramify.actors.gateway.apis.openai.retention import Hinted
from ramify.actors.gateway.port.dialogues.dialogue import Dialogue
from ramify.actors.gateway.port.http import Response
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import (
    ClientMessage,
    Delta,
    Done,
    Error,
    JsonObject,
    Ok,
    Part,
    ServerMessage,
    TokenLogprob,
    Usage,
)

DONE = b"data: [DONE]\n\n"

Vocabulary = Sequence[bytes]  # what each token id stands for


def event(value: object) -> bytes:
    """Make a server-sent event without a name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class Answers(Dialogue):
    """Follows the answers of one request, choice by choice; subclasses write them down.

    `branches`: the branch of each choice, in order.
    """

    def __init__(self, ops: list[ClientMessage], branches: Sequence[str], *, streams: bool) -> None:
        self.ops = ops
        self.streams = streams
        self._number = {name: i for i, name in enumerate(branches)}
        self._done: list[Done | None] = [None] * len(branches)
        self._began = False
        self._hints = Hinted(ops)

    @property
    def done(self) -> list[Done]:
        """The ends of the choices that have ended, in order."""
        return [done for done in self._done if done is not None]

    def receive(self, messages: Sequence[ServerMessage]) -> bytes | Response | None:
        """See `Dialogue`."""
        out: list[bytes] = []
        for message in self._hints.order(messages):
            if self.over:
                break
            match message:
                case Delta() if message.branch in self._number:
                    out.append(self.said(self._number[message.branch], message))
                case Done(reason="error"):
                    return self._ends(out, _failure(message))
                case Done() if message.branch in self._number:
                    out.append(self.end(self._number[message.branch], message))
                case Ok():
                    out.append(self.added(message))
                case Error() if message.code != "skipped":
                    return self._ends(out, message)
            if all(self._done):
                self.over = True
                if not self.streams:
                    return self.whole()
                out.append(self.last())
        return self._pieces(out)

    def fail(self, error: RamifyError) -> bytes | Response | None:
        """See `Dialogue`."""
        return None if self.over else self._ends([], error)

    def end(self, index: int, done: Done) -> bytes:
        """Note that a choice has ended: see `ended`."""
        self._done[index] = done
        return self.ended(index, done)

    def notes(self, done: Sequence[Done]) -> JsonObject:
        """Make our own fields beside the answer."""
        return noted(done) | self._hints.told

    # --- what subclasses say ---

    def added(self, ok: Ok) -> bytes:
        """Take the reply of an op that generates nothing."""
        return b""

    @abstractmethod
    def said(self, index: int, delta: Delta) -> bytes:
        """Add text of a choice. Returns the events for it, or b"" while it is only collected."""

    @abstractmethod
    def ended(self, index: int, done: Done) -> bytes:
        """End a choice. Returns the events for it."""

    @abstractmethod
    def last(self) -> bytes:
        """Make the end of the stream."""

    @abstractmethod
    def whole(self) -> Response:
        """Make the response where the answer is no stream."""

    def refusal(self, error: Error | RamifyError) -> Response:
        """Make the response for an error before any output."""
        return of_error(error)

    def broken(self, error: Error | RamifyError) -> bytes:
        """Make the event for an error in a stream that has begun."""
        return event(event_of_error(error))

    # ---

    def _pieces(self, out: list[bytes]) -> bytes | None:
        data = b"".join(out)
        self._began = self._began or bool(data)
        return data or None

    def _ends(self, out: list[bytes], error: Error | RamifyError) -> bytes | Response:
        """End with an error: a response of its own as long as nothing was sent, else an event."""
        self.over = True
        if self.streams and (self._pieces(out) is not None or self._began):
            return b"".join(out) + self.broken(error)
        return self.refusal(error)


def _failure(done: Done) -> Error:
    return Error(code=done.error or "internal", message=done.message or "the generation failed")


def text_parts(delta: Delta) -> list[Part]:
    """Return the parts of a delta; all of it is text where the model's format has no parts."""
    if delta.parts is not None:
        return delta.parts
    return [Part(kind="text", text=delta.text)] if delta.text else []


def counted(done: Sequence[Done]) -> dict[str, Any]:
    """Make `usage` of all choices, as both APIs of completions have it. A prompt counts once."""
    usages = [each.usage for each in done]
    prompt = usages[0].prompt if usages else 0
    return count_tokens(prompt, min((u.cached for u in usages), default=0), usages)


def count_tokens(prompt: int, cached: int, usages: Sequence[Usage]) -> dict[str, Any]:
    """Make `usage` for so many prompt tokens and what was generated. `queue_ms`: the longest wait."""
    output = sum(usage.output for usage in usages)
    thought = sum(usage.thought for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
        **({"completion_tokens_details": {"reasoning_tokens": thought}} if thought else {}),
        "queue_ms": max((usage.queue_ms for usage in usages), default=0.0),
    }


def noted(done: Sequence[Done]) -> dict[str, Any]:
    """Make our own fields: how a constraint was read, and why a history was computed again."""
    notes = list(dict.fromkeys(note for each in done for note in each.notes or ()))
    missed = next((each.miss for each in done if each.miss is not None), None)
    told: dict[str, Any] = {"notes": notes} if notes else {}
    return told | ({"ramify_cache_miss": msgspec.to_builtins(missed)} if missed is not None else {})


def spelled(vocabulary: Vocabulary, token: int) -> dict[str, Any]:
    """Spell a token for `logprobs`: its text, and its bytes where it is only part of a character."""
    data = vocabulary[token] if token < len(vocabulary) else b""
    return {"token": data.decode(errors="replace"), "bytes": list(data)}


def word(data: bytes) -> str:
    """Name a token by its text, or by its bytes if it is part of a character: names must differ."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def ranked(vocabulary: Vocabulary, entry: TokenLogprob, most: int) -> dict[str, Any]:
    """Make one token's log-probability with its alternatives, as chats have it."""
    top = [{**spelled(vocabulary, token), "logprob": logprob} for token, logprob in entry.top[:most]]
    return {**spelled(vocabulary, entry.token), "logprob": entry.logprob, "top_logprobs": top}
