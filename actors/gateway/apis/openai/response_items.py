"""The items of a request for a response: shapes, and the chat messages that they are."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ramify.actors.gateway.apis.openai.messages import Struct, TextContentPart
from ramify.actors.gateway.apis.openai.requests import bad_request
from ramify.actors.gateway.apis.pictures import RequestPictures
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import ChatMessage, JsonObject, ShortText, Text


class InputText(Struct, frozen=True, tag_field="type", tag="input_text"):
    """A part of what a user says."""

    text: Text


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """A part of what the model said, as it came."""

    text: Text
    annotations: Annotated[list[Any], Meta(max_length=1024)] = []
    logprobs: list[Any] | None = None


class Refusal(Struct, frozen=True, tag_field="type", tag="refusal"):
    refusal: Text


class InputImage(Struct, frozen=True, tag_field="type", tag="input_image", kw_only=True):
    """A picture. `detail` changes nothing: it is fitted as the model's processor does it."""

    image_url: Text | None = None
    file_id: ShortText | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


Part = InputText | OutputText | Refusal | TextContentPart | InputImage
Parts = Annotated[list[Part], Meta(max_length=1024)]
_Identity = ShortText | None
_Status = Literal["in_progress", "completed", "incomplete"] | None


class MessageItem(Struct, frozen=True, tag_field="type", tag="message", kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Parts
    id: _Identity = None
    status: _Status = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(Struct, frozen=True, tag_field="type", tag="function_call", kw_only=True):
    call_id: ShortText
    name: ShortText
    arguments: Text
    id: _Identity = None
    status: _Status = None
    namespace: ShortText | None = None

    @property
    def told(self) -> str:
        """The tool's name as the model is told it."""
        return within(self.namespace, self.name)


class CallOutputItem(Struct, frozen=True, tag_field="type", tag="function_call_output", kw_only=True):
    call_id: ShortText
    output: Text | Parts
    id: _Identity = None
    status: _Status = None


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: Text


class ReasoningItem(Struct, frozen=True, tag_field="type", tag="reasoning", kw_only=True):
    summary: Annotated[list[Any], Meta(max_length=1024)] = []
    content: Annotated[list[ReasoningText], Meta(max_length=1024)] | None = None
    encrypted_content: None = None
    id: _Identity = None
    status: _Status = None


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


def within(namespace: str | None, name: str) -> str:
    """Join the names of a tool and of its namespace, in letters that all templates take."""
    return name if namespace is None else f"{namespace}__{name}"


def kept_item(item: JsonObject, unique: str, *, images: bool) -> JsonObject:
    """Make an item of the input as it is kept, with an id. `images`: with the files of its pictures."""
    kind = item.get("type", "message")
    prefix = _PREFIXES.get(kind, "item")
    shown: JsonObject = {"type": kind, "status": "completed", **item}
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        text: JsonObject = {"type": part, "text": content}
        if part == "output_text":
            text["annotations"] = []
        shown["content"] = [text]
    for name in () if images else ("content", "output"):
        if isinstance(parts := shown.get(name), list):
            shown[name] = [_without_file(part) for part in parts]
    return {**shown, "id": item.get("id") or f"{prefix}_{unique}"}


def _without_file(part: Any) -> Any:
    shows = isinstance(part, dict) and part.get("type") == "input_image"
    return {**part, "image_url": None} if shows else part


_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def input_items(values: list[Any]) -> list[Item]:
    """Decode the items; a message may come without a type. All in one go: there may be 16,384."""
    typed = [
        {"type": "message", **value} if isinstance(value, dict) and "type" not in value else value
        for value in values
    ]
    try:
        return msgspec.convert(typed, list[Item])
    except msgspec.ValidationError as error:
        raise bad_request(str(error).replace(" - at `$", " - at `$.input")) from None


def chat_of_items(items: Iterable[Item], pictures: RequestPictures) -> Iterable[ChatMessage]:
    """Join items to messages: thoughts, text and calls of one turn of the assistant become one.

    Raises BadRequest for pictures that are not taken.
    """
    thought, said, calls = "", "", list[JsonObject]()

    def turn() -> Iterable[ChatMessage]:
        nonlocal thought, said, calls
        if said or calls:
            yield ChatMessage(
                role="assistant", content=said, tool_calls=calls or None, reasoning=thought or None
            )
        thought, said, calls = "", "", []

    for i, item in enumerate(items):
        match item:
            case ReasoningItem():
                yield from turn()
                thought = "".join(part.text for part in item.content or ())
            case CallItem():
                function = {"name": item.told, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
            case CallOutputItem():
                yield from turn()
                told = _told(item.output, pictures, f"input[{i}].output")
                yield ChatMessage(role="tool", content=told, tool_call_id=item.call_id)
            case MessageItem():
                told = _told(item.content, pictures, f"input[{i}].content")
                if item.role == "assistant":
                    if said or calls:
                        yield from turn()
                    said = told
                    continue
                yield from turn()
                yield ChatMessage(role="user" if item.role == "user" else "system", content=told)
    yield from turn()


def _told(content: "Text | Parts", pictures: RequestPictures, place: str) -> str:
    """Return the text of an item's content, with the marks of its pictures."""
    if isinstance(content, str):
        return pictures.text(content)
    told = list[str]()
    for number, part in enumerate(content):
        if not isinstance(part, InputImage):
            told.append(pictures.text(part.refusal if isinstance(part, Refusal) else part.text))
            continue
        at = f"{place}[{number}]"
        if part.file_id is not None:
            message = f"`{at}.file_id`: no files are kept here, send the picture as `image_url`"
            raise BadRequest(message, details={"field": f"{at}.file_id"})
        told.append(pictures.add_url(part.image_url or "", "input_image", at, "image_url"))
    return "".join(told)
