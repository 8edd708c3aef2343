"""From what a session says to the AI SDK's UI message chunks: one answer, `start` to `finish`. Pure."""

import msgspec

from ramify.actors.gateway.apis.ai.requests import NO_LIMIT, SendRequest, answers_to, chat_messages
from ramify.actors.gateway.apis.openai.dialogue import Answers, text_parts
from ramify.actors.gateway.apis.openai.errors import of_error
from ramify.actors.gateway.apis.openai.retention import hinting, retaining, seconds_of
from ramify.actors.gateway.apis.pictures import RequestPictures
from ramify.actors.gateway.port.http import Response, json_response
from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import Append, Delta, Done, Error, Generate, JsonObject, Open, Part

BRANCH = "main"
FINISH = {"stop": "stop", "length": "length", "tool": "tool-calls", "deadline": "length"}


class ChatDialogue(Answers):
    """Makes the chunks of one answer: see `Dialogue`. `take` takes them; `error`: why it failed.

    `message_id`: what a client is to call the answer. Raises RamifyError for what cannot be asked.
    """

    outlives = True

    def __init__(self, request: SendRequest, message_id: str, served: Served = Served()) -> None:  # noqa: B008
        settings = request.body
        thinking = settings.thinking(served)
        kept = seconds_of(settings.prompt_cache_retention, settings.prompt_cache_key)
        pictures = RequestPictures(served.pictures, served.fetches)
        messages = chat_messages(request.messages, settings, pictures)
        opened = Open(
            detach="cancel", ttl_s=0.0, tools=settings.functions, effort=thinking.effort, parts=True
        )
        generate = Generate(
            id=2,
            max_tokens=settings.max_output_tokens or NO_LIMIT,
            tool_choice=settings.choice_of_tool,
            constraint=settings.constraint,
            thought_tokens=thinking.tokens,
            **settings.sampling(),
        )
        append = Append(id=1, messages=messages, images=pictures.images)
        hints = hinting(3, settings.kv_hints, kept)
        super().__init__([opened, *retaining(kept), append, generate, *hints], [BRANCH], streams=True)
        self.pictures = pictures.places
        self.error: str | None = None
        self._message_id = answers_to(request.messages) or message_id
        self._fresh: list[JsonObject] = []
        self._started = False
        self._open: tuple[str, str] | None = None  # kind and id of the text that is being said
        self._blocks = 0
        self._blank = ""  # white space that may turn out to stand between calls
        self._calls: dict[int, tuple[str, str, list[str]]] = {}  # number -> id, name, arguments

    def take(self) -> list[JsonObject]:
        """Take the chunks that were made since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    # --- see `Answers`: what is said is in `take`, and nothing is written ----------------------

    def said(self, index: int, delta: Delta) -> bytes:
        self._begin()
        for part in text_parts(delta):
            match part.kind:
                case "text" | "reasoning":
                    self._text(part.kind, part.text)
                case "call":
                    self._call(part)
        return b""

    def ended(self, index: int, done: Done) -> bytes:
        self._finish(done)
        return b""

    def last(self) -> bytes:
        return b""

    def whole(self) -> Response:
        return json_response(200, self.take())

    def refusal(self, error: Error | RamifyError) -> Response:
        self.error = error.message
        return of_error(error)

    # ---

    def _begin(self) -> None:
        if not self._started:
            self._started = True
            self._fresh += [{"type": "start", "messageId": self._message_id}, {"type": "start-step"}]

    def _text(self, kind: str, text: str) -> None:
        if self._open is None or self._open[0] != kind:
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
            self._close()
            self._open = (kind, f"{kind}-{self._blocks}")
            self._blocks += 1
            self._fresh.append({"type": f"{kind}-start", "id": self._open[1]})
        self._blank = ""
        self._fresh.append({"type": f"{kind}-delta", "id": self._open[1], "delta": text})

    def _close(self) -> None:
        self._blank = ""
        if self._open is not None:
            self._fresh.append({"type": f"{self._open[0]}-end", "id": self._open[1]})
            self._open = None

    def _call(self, part: Part) -> None:
        self._close()
        number = part.call or 0
        if part.name is not None:
            self._calls[number] = (part.id or f"call-{number}", part.name, [])
            self._start_call(self._calls[number][0], part.name)
        call = self._calls.get(number)
        if call is not None and part.arguments:
            call[2].append(part.arguments)
            piece = {"toolCallId": call[0], "inputTextDelta": part.arguments}
            self._fresh.append({"type": "tool-input-delta", **piece})

    def _start_call(self, ident: str, name: str) -> None:
        self._fresh.append({"type": "tool-input-start", "toolCallId": ident, "toolName": name})

    def _finish(self, done: Done) -> None:
        self._begin()
        self._close()
        told = {ident for ident, _, _ in self._calls.values()}
        whole: set[str] = set()
        for call in done.tool_calls or ():
            ident, function = call["id"], call["function"]
            whole.add(ident)
            if ident not in told:  # its opening was put into the model's mouth
                self._start_call(ident, function["name"])
            given = msgspec.json.decode(function["arguments"])
            names = {"toolCallId": ident, "toolName": function["name"]}
            self._fresh.append({"type": "tool-input-available", **names, "input": given})
        for ident, name, pieces in self._calls.values():
            if ident not in whole:
                names = {"toolCallId": ident, "toolName": name}
                text = "the call was cut, or is broken"
                said = {"input": "".join(pieces), "errorText": text}
                self._fresh.append({"type": "tool-input-error", **names, **said})
        self._fresh.append({"type": "finish-step"})
        if done.reason == "cancelled":
            self._fresh.append({"type": "abort"})
        usage = done.usage
        counted = {
            "inputTokens": usage.prompt,
            "cachedInputTokens": usage.cached,
            "outputTokens": usage.output,
            "totalTokens": usage.prompt + usage.output,
            "queueMs": usage.queue_ms,
        }
        reason = FINISH.get(done.reason, "other")
        ours = {_camel(name): value for name, value in self.notes([done]).items()}
        ending = {"finishReason": reason, "messageMetadata": {"usage": counted, **ours}}
        self._fresh.append({"type": "finish", **ending})


def _camel(name: str) -> str:
    return name[0] + name.title().replace("_", "")[1:]


class ChatTranscript:
    """Chunks that were said, for who comes later: pieces of one text are one chunk again."""

    def __init__(self) -> None:
        self._chunks: list[tuple[JsonObject, str, list[str]]] = []
        self.size = 0  # characters, about

    def add(self, chunk: JsonObject) -> None:
        """Keep a chunk."""
        key = next((name for name in ("delta", "inputTextDelta") if name in chunk), "")
        rest = {name: value for name, value in chunk.items() if name != key}
        pieces = [chunk[key]] if key else []
        self.size += len(pieces[0]) if pieces else len(msgspec.json.encode(rest))
        if key and self._chunks and self._chunks[-1][0] == rest:
            self._chunks[-1][2].extend(pieces)
        else:
            self._chunks.append((rest, key, pieces))

    def chunks(self) -> list[JsonObject]:
        """Return all chunks, in order."""
        return [{**rest, key: "".join(pieces)} if key else rest for rest, key, pieces in self._chunks]
