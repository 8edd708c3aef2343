"""The messages of a chat, as OpenAI's API has them, and what a session's template takes of them."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ramify.actors.gateway.apis.pictures import NO_PICTURES, RequestPictures
from ramify.protocol.wire import ChatMessage, ShortText, Text, Tools


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of what clients send. `MENDS`: what to do instead, by a field that is not served;
    `UNSERVED`: by a kind of part (default: `NOT_SERVED`)."""

    MENDS: ClassVar[dict[str, str]] = {}


class TextContentPart(Struct, kw_only=True, frozen=True, tag_field="type", tag="text"):
    """A part of a message's content. Only text can be served."""

    text: Text


class RefusalPart(Struct, kw_only=True, frozen=True, tag_field="type", tag="refusal"):
    """A refusal that a client sends back as it got it."""

    refusal: Text


class ImageUrl(Struct, kw_only=True, frozen=True):
    """A picture's URL. `detail` changes nothing: the picture is fitted as the model's processor does."""

    url: Text
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImageUrlPart(Struct, kw_only=True, frozen=True, tag_field="type", tag="image_url"):
    """A picture, as a data URL."""

    image_url: ImageUrl


ContentPart = TextContentPart | RefusalPart | ImageUrlPart
Content = Text | Annotated[list[ContentPart], Meta(max_length=1024)]


class Message(Struct, kw_only=True, frozen=True):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: ShortText | None = None
    tool_calls: Tools | None = None
    tool_call_id: ShortText | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    parsed: msgspec.Raw = (
        msgspec.Raw()
    )  # what a client made of the content: it sends it back with the message

    def chat(self, pictures: RequestPictures = NO_PICTURES, place: str = "") -> ChatMessage:
        """Convert the message, which stands at `place`, to a session's.

        Raises InvalidField for bad `tool_calls`, and for pictures that are not taken.
        """
        return ChatMessage(
            role="system" if self.role == "developer" else self.role,
            content=content_text(self.content, pictures, place) or self.refusal or "",
            name=self.name,
            tool_call_id=self.tool_call_id,
            tool_calls=self.tool_calls or None,
            reasoning=self.reasoning_content or self.reasoning,
        )


def content_text(content: Content | None, pictures: RequestPictures, place: str) -> str:
    """Return the text of a message's content, with the marks of its pictures."""
    if content is None or isinstance(content, str):
        return pictures.text(content or "")
    told = list[str]()
    for number, part in enumerate(content):
        if isinstance(part, ImageUrlPart):
            at = f"{place}.content[{number}]"
            told.append(pictures.add_url(part.image_url.url, "image_url", at, "image_url.url"))
        else:
            text = part.text if isinstance(part, TextContentPart) else part.refusal
            told.append(pictures.text(text))
    return "".join(told)


def chat_of(messages: Sequence[Message], pictures: RequestPictures) -> list[ChatMessage]:
    """Convert messages to a session's. Raises InvalidField."""
    return [message.chat(pictures, f"messages[{i}]") for i, message in enumerate(messages)]
