"""What requests hold: shapes and ranges, checked before any work is done. Unknown fields are refused.

Settings of Ollama's own engine (threads, memory, context size) are accepted and change nothing.
"""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from ramify.actors.gateway.apis.openai.effort import Asked, ThinkingEffort, switched, thinking
from ramify.actors.gateway.apis.openai.requests import Sampling, Struct, sampling_of
from ramify.actors.gateway.apis.pictures import NO_PICTURES, RequestPictures
from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.errors import InvalidField
from ramify.protocol.json_value import check_json
from ramify.protocol.pictures import MOST_AT_ONCE
from ramify.protocol.wire import ChatMessage, Constraint, JsonObject, KvHints, ShortText, Text, Tools

NO_LIMIT = 2**31 - 1  # tokens: what the context has room for
_Nothing = Annotated[list[Any], Meta(max_length=0)] | None


Images = Annotated[list[Text], Meta(max_length=MOST_AT_ONCE)] | None  # in base64


def pictured(text: str, images: Images, pictures: RequestPictures, place: str) -> str:
    """Put the marks of its pictures before a text. Raises InvalidField."""
    at = f"{place}.images" if place else "images"
    marks = [pictures.add(each, "", f"{at}[{i}]", "") for i, each in enumerate(images or ())]
    return "".join(marks) + pictures.text(text)


class OllamaMessage(Struct, frozen=True, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: Images = None
    tool_name: ShortText | None = None
    name: ShortText | None = None
    tool_calls: Tools | None = None
    tool_call_id: ShortText | None = None

    def chat(self, pictures: RequestPictures = NO_PICTURES, place: str = "") -> ChatMessage:
        """Convert the message to a session's. Raises InvalidField for bad `tool_calls`.

        Its pictures come before its text.
        """
        return ChatMessage(
            role=self.role,
            content=pictured(self.content or "", self.images, pictures, place),
            name=self.tool_name or self.name,
            tool_call_id=self.tool_call_id,
            tool_calls=self.tool_calls or None,
            reasoning=self.thinking,
        )


class Options(Sampling, frozen=True, kw_only=True):
    """How to sample; the others are of Ollama's engine, and change nothing here."""

    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None  # -1: no limit
    repeat_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    mirostat: Annotated[int, Meta(ge=0, le=0)] | None = None
    tfs_z: Annotated[float, Meta(ge=1.0, le=1.0)] | None = None
    typical_p: Annotated[float, Meta(ge=1.0, le=1.0)] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    repeat_last_n: int | None = None
    penalize_newline: bool | None = None
    num_keep: int | None = None
    numa: bool | None = None
    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None

    @property
    def limit(self) -> int:
        """The most tokens of the answer."""
        return self.num_predict if self.num_predict and self.num_predict > 0 else NO_LIMIT

    def sampling(self) -> dict[str, Any]:
        """The fields of `generate` that are set."""
        return sampling_of(self, self.stop, repetition_penalty=self.repeat_penalty)


class _Asked(Struct, frozen=True, kw_only=True):
    """The fields of both kinds of requests."""

    MENDS: ClassVar[dict[str, str]] = {
        "images": "give a list of picture files in base64",
        "suffix": "text goes on at its end alone: leave it out",
    }

    model: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None  # the one that is served
    stream: bool | None = None
    format: JsonObject | Literal["", "json"] | None = None
    options: Options | None = None
    keep_alive: float | ShortText | None = None  # of what was computed; the model stays
    kv_hints: KvHints | None = None  # not Ollama's
    think: bool | Asked | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.format, dict):
            check_json(self.format, "format")

    @property
    def settings(self) -> Options:
        return self.options or Options()

    def thinking(self, served: Served) -> ThinkingEffort:
        """Tell how much the model is to think. Raises InvalidField."""
        asked = switched(self.think, served, "think") if isinstance(self.think, bool) else self.think
        most = self.settings.limit
        return thinking(asked, most if most != NO_LIMIT else None, served, "think")

    @property
    def ranks(self) -> int:
        """`generate.logprobs`."""
        return max(1, self.top_logprobs or 0) if self.logprobs else 0

    @property
    def constraint(self) -> Constraint | None:
        """The constraint that `format` asks for."""
        if isinstance(self.format, dict):
            return Constraint(json_schema=self.format)
        return Constraint(json_schema={"type": "object"}) if self.format else None


class OllamaChatRequest(_Asked, frozen=True, kw_only=True):
    """POST /api/chat. No messages: only to see that the model is there."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=1 << 14)] | None = None
    tools: Tools | None = None

    def __post_init__(self) -> None:
        _Asked.__post_init__(self)
        if self.tools is not None:
            check_json(self.tools, "tools")


class GenerateRequest(_Asked, frozen=True, kw_only=True):
    """POST /api/generate. The prompt is a turn of a chat, or with `raw` text that goes on."""

    prompt: Text | None = None
    system: Text | None = None
    raw: bool | None = None
    suffix: Annotated[str, Meta(max_length=0)] | None = None
    template: Annotated[str, Meta(max_length=0)] | None = None
    context: _Nothing = None  # answers carry none: send messages to /api/chat
    images: Images = None

    def __post_init__(self) -> None:
        _Asked.__post_init__(self)
        if self.raw and self.system:
            raise InvalidField("`system` does not go with `raw`: put it into the prompt")

    def messages(self, pictures: RequestPictures = NO_PICTURES) -> list[ChatMessage]:
        """Convert the request to the messages of a chat."""
        system = [ChatMessage(role="system", content=pictures.text(self.system))] if self.system else []
        content = pictured(self.prompt or "", self.images, pictures, "")
        return [*system, ChatMessage(role="user", content=content)]


class ShowRequest(Struct, frozen=True, kw_only=True):
    """POST /api/show."""

    model: Annotated[str, Meta(max_length=4096)] | None = None
    name: Annotated[str, Meta(max_length=4096)] | None = None  # as older clients have it
    verbose: bool | None = None
