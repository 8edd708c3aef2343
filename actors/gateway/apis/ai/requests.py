"""What a `WebSocketChatTransport` sends: frames, UI messages, settings; checked before any work is done.

Messages are the AI SDK's `UIMessage`s, which carry more than a text model reads: their unknown fields
and the kinds of parts that are for the eye (`data-*`, sources) are passed over. Of the settings in
`body` unknown ones are refused by name.
"""

import base64
import binascii
from typing import Annotated, Any, Literal
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from ramify.actors.gateway.apis.openai.effort import Asked, ThinkingEffort, thinking
from ramify.actors.gateway.apis.openai.requests import AnySeed, Penalty, Stops, sampling_of
from ramify.actors.gateway.apis.openai.retention import Retention
from ramify.actors.gateway.apis.pictures import NO_PICTURES, RequestPictures
from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.errors import BadRequest, InvalidField
from ramify.protocol.json_value import check_json
from ramify.protocol.sampling import MinP, RepetitionPenalty, TopK, check_temperature
from ramify.protocol.wire import ChatMessage, Constraint, Count, JsonObject, KvHints, ShortText, Text

MOST_PARTS = 4096  # of a message
MOST_MESSAGES = 1 << 14
NO_LIMIT = 2**31 - 1  # tokens: what the context has room for
RequestId = Annotated[str, Meta(min_length=1, max_length=256)]
_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Headers = Annotated[dict[str, Annotated[str, Meta(max_length=4096)]], Meta(max_length=64)]


class UiPart(msgspec.Struct, frozen=True, rename="camel"):
    """A part of a message: text, reasoning, file, tool-NAME, dynamic-tool, or what is passed over."""

    type: Annotated[str, Meta(max_length=512)]
    text: Text = ""
    state: ShortText | None = None
    tool_call_id: ShortText | None = None
    tool_name: ShortText | None = None
    input: Any = None
    output: Any = None
    error_text: Text | None = None
    media_type: ShortText | None = None
    filename: Annotated[str, Meta(max_length=1024)] | None = None
    url: Text = ""

    @property
    def tool(self) -> str | None:
        """The name of the tool that it calls, if it is a call."""
        if self.type == "dynamic-tool":
            return self.tool_name
        return self.type.removeprefix("tool-") if self.type.startswith("tool-") else None


class UiMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant"]
    parts: Annotated[list[UiPart], Meta(max_length=MOST_PARTS)]
    id: Annotated[str, Meta(max_length=1024)] = ""


class ToolDescription(msgspec.Struct, frozen=True, rename="camel"):
    """A tool by name, as `streamText` and assistant-ui have it."""

    description: Annotated[str, Meta(max_length=1 << 16)] | None = None
    input_schema: JsonObject | None = None
    parameters: JsonObject | None = None


class ChosenTool(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    type: Literal["tool"]
    tool_name: _Name


class CallResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json"]
    schema: JsonObject | None = None
    name: ShortText | None = None
    description: Annotated[str, Meta(max_length=1 << 16)] | None = None


class CallSettings(
    msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True
):
    """The `body` of a request: the AI SDK's call settings, and ours of the same kind."""

    model: Annotated[str, Meta(max_length=4096)] | None = None
    system: Text | None = None
    instructions: Text | None = None  # as v7 calls `system`
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: AnySeed | None = None
    stop_sequences: Stops | None = None
    tools: (
        Annotated[dict[_Name, ToolDescription], Meta(max_length=1024)]
        | Annotated[list[JsonObject], Meta(max_length=1024)]
        | None
    ) = None
    tool_choice: Literal["auto", "none", "required"] | ChosenTool | None = None
    response_format: CallResponseFormat | None = None
    reasoning: Asked | Literal["provider-default"] | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: Retention | None = None
    kv_hints: KvHints | None = None

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        for name, schema in self._schemas():
            check_json(schema, name)

    def _schemas(self) -> list[tuple[str, Any]]:
        given: list[tuple[str, Any]] = []
        if isinstance(self.tools, dict):
            given += [("tools", each.input_schema or each.parameters) for each in self.tools.values()]
        elif self.tools is not None:
            given.append(("tools", self.tools))
        if self.response_format is not None:
            given.append(("responseFormat.schema", self.response_format.schema))
        return [(name, schema) for name, schema in given if schema is not None]

    @property
    def functions(self) -> list[JsonObject] | None:
        """The tools, as `open` takes them."""
        if not isinstance(self.tools, dict):
            return self.tools or None
        return [
            {
                "name": name,
                "description": tool.description or "",
                "parameters": tool.input_schema or tool.parameters or {"type": "object"},
            }
            for name, tool in self.tools.items()
        ] or None

    @property
    def choice_of_tool(self) -> str:
        """The choice of a tool, as `generate.tool_choice` has it."""
        choice = self.tool_choice
        return choice.tool_name if isinstance(choice, ChosenTool) else choice or "auto"

    @property
    def constraint(self) -> Constraint | None:
        """The constraint that `responseFormat` asks for."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        return Constraint(json_schema=wanted.schema if wanted.schema is not None else {"type": "object"})

    def thinking(self, served: Served) -> ThinkingEffort:
        """Tell how much the model is to think. Raises InvalidField."""
        asked = None if self.reasoning == "provider-default" else self.reasoning
        return thinking(asked, self.max_output_tokens, served, "reasoning")

    def sampling(self) -> dict[str, Any]:
        """The fields of `generate` that are set."""
        return sampling_of(self, self.stop_sequences)


class Envelope(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of every frame."""

    type: Literal["send", "resume", "abort"]
    request_id: RequestId


class SendRequest(msgspec.Struct, frozen=True, rename="camel"):
    """A request to answer a turn. `id`: the chat's."""

    request_id: RequestId
    id: ShortText
    trigger: Literal["submit-message", "regenerate-message"]
    messages: Annotated[list[UiMessage], Meta(min_length=1, max_length=MOST_MESSAGES)]
    headers: _Headers = {}
    body: CallSettings = CallSettings()


class ResumeRequest(msgspec.Struct, frozen=True, rename="camel"):
    """A request for the answer of a chat, from its beginning or behind `last_sequence`."""

    request_id: RequestId
    id: ShortText
    headers: _Headers = {}
    last_sequence: Annotated[int, Meta(ge=0, le=2**53 - 1)] | None = None


def chat_messages(
    messages: list[UiMessage], settings: CallSettings, pictures: RequestPictures = NO_PICTURES
) -> list[ChatMessage]:
    """Convert the conversation to a session's chat messages. Raises BadRequest that names the place.

    Calls that have no result yet are left out, as `convertToModelMessages` can.
    """
    system = settings.instructions or settings.system
    turns = [ChatMessage(role="system", content=pictures.text(system))] if system else []
    for i, message in enumerate(messages):
        if message.role == "assistant":
            said = _assistant(message, i)
            if pictures.reads:
                said = [replace(each, content=pictures.text(each.content)) for each in said]
            turns += said
        else:
            content = "".join(
                _said(part, f"messages[{i}].parts[{j}]", pictures)
                for j, part in enumerate(message.parts)
            )
            turns.append(ChatMessage(role=message.role, content=content))
    if not turns or turns[-1].role not in ("user", "tool"):
        raise BadRequest(
            "the last message must be a user's, or hold results of tools: there is nothing to answer",
            details={"field": "messages"},
        )
    return turns


def answers_to(messages: list[UiMessage]) -> str | None:
    """Find the message that the answer continues: the id of the last one, if it is the assistant's."""
    return messages[-1].id or None if messages[-1].role == "assistant" else None


def _assistant(message: UiMessage, i: int) -> list[ChatMessage]:
    """Convert a message of the assistant: its steps, each with the results of its calls."""
    turns: list[ChatMessage] = []
    step: list[tuple[int, UiPart]] = []
    for j, part in enumerate(message.parts):
        if part.type == "step-start":
            turns += _step(step, i)
            step = []
        else:
            step.append((j, part))
    return turns + _step(step, i)


def _step(parts: list[tuple[int, UiPart]], i: int) -> list[ChatMessage]:
    if not parts:  # of 80,000 empty steps
        return []
    text = "".join(part.text for _, part in parts if part.type == "text")
    thought = "".join(part.text for _, part in parts if part.type == "reasoning")
    calls: list[JsonObject] = []
    results: list[ChatMessage] = []
    for j, part in parts:
        name = part.tool
        if name is None or part.state not in _RESULTS:
            continue
        if part.tool_call_id is None or not name:
            raise BadRequest(
                f"`messages[{i}].parts[{j}]` is a call without a `toolCallId` or a name",
                details={"field": f"messages[{i}].parts[{j}]"},
            )
        given = part.input if isinstance(part.input, dict) else {}
        calls.append(
            {
                "id": part.tool_call_id,
                "type": "function",
                "function": {"name": name, "arguments": msgspec.json.encode(given).decode()},
            }
        )
        results.append(
            ChatMessage(role="tool", content=_result(part), name=name, tool_call_id=part.tool_call_id)
        )
    if not (text or thought or calls):
        return []
    turn = ChatMessage(
        role="assistant", content=text, reasoning=thought or None, tool_calls=calls or None
    )
    return [turn, *results]


_RESULTS = ("output-available", "output-error", "output-denied")


def _result(part: UiPart) -> str:
    """Write the result of a call as text."""
    if part.state == "output-denied":
        return "The user did not allow this call."
    if part.state == "output-error":
        return part.error_text or "The call failed."
    if isinstance(part.output, str):
        return part.output
    return msgspec.json.encode(part.output).decode()


def _said(part: UiPart, where: str, pictures: RequestPictures) -> str:
    """Return the text of a part of a user's or system message, or a picture's mark.

    Raises BadRequest.
    """
    if part.type == "text":
        return pictures.text(part.text)
    if part.type != "file":
        return ""  # for the eye: data-*, sources
    kind = (part.media_type or "").partition("/")[0]
    if kind == "image" and pictures.reads:
        return pictures.add_url(part.url, "file", where, "url")
    if kind != "text" or not part.url.startswith("data:"):
        raise BadRequest(
            f"`{where}` is a file of the type {part.media_type!r}: the model reads text alone. Send "
            "text files as data URLs",
            details={"field": where},
        )
    return pictures.text(f"\n\n{part.filename or 'File'}:\n{_data_url(part.url, where)}")


def _data_url(url: str, where: str) -> str:
    """Decode the text in a `data:` URL (RFC 2397). Raises InvalidField."""
    head, comma, data = url.partition(",")
    try:
        if not comma:
            raise ValueError("there is no comma")
        raw = unquote_to_bytes(data)
        if head.endswith(";base64"):
            raw = base64.b64decode(raw, validate=True)
        return raw.decode()
    except (ValueError, binascii.Error) as error:
        raise InvalidField(f"`{where}.url` is no data URL of UTF-8 text: {error}") from None
