"""What a request to /v1/responses holds: shapes, ranges, and the chat messages that its items are."""

import zlib
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ramify.actors.gateway.apis.openai.effort import Asked, ThinkingEffort, thinking
from ramify.actors.gateway.apis.openai.errors import check_result
from ramify.actors.gateway.apis.openai.requests import (
    JsonSchemaFormat,
    Struct,
    TextContentPart,
    bad_request,
)
from ramify.actors.gateway.apis.openai.retention import Retention
from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.errors import InvalidField
from ramify.protocol.json_value import check_json
from ramify.protocol.sampling import check_temperature
from ramify.protocol.wire import (
    MOST_PRIORITY,
    ChatMessage,
    Constraint,
    Count,
    JsonObject,
    KvHints,
    LongText,
    ShortText,
    Text,
)

LOGPROBS = "message.output_text.logprobs"
# What else may be included is of tools that are not served, so there is nothing to include.
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
StreamId = Annotated[str, Meta(min_length=1, max_length=256)] | None


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


Parts = Annotated[list[InputText | OutputText | Refusal | TextContentPart], Meta(max_length=1024)]
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
        """As the model is told the tool's name."""
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


class FunctionTool(Struct, frozen=True, tag_field="type", tag="function", kw_only=True):
    """A tool, flat as this API has it."""

    name: ShortText
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def declared(self, namespace: str | None = None) -> list[JsonObject]:
        """As `open.tools` has it. `namespace`: it is one of these tools."""
        name = within(namespace, self.name)
        function: JsonObject = {"name": name, "parameters": self.parameters or {}}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return [{"type": "function", "function": function}]

    def shown(self) -> JsonObject:
        """As a response repeats it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters or {},
            "strict": bool(self.strict),
        }


class NamespaceTool(Struct, frozen=True, tag_field="type", tag="namespace", kw_only=True):
    """Tools under a name: the model is told each with both names."""

    name: ShortText
    description: Text | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=1024)]

    def declared(self) -> list[JsonObject]:
        """As `open.tools` has them."""
        return [each for tool in self.tools for each in tool.declared(self.name)]

    def shown(self) -> JsonObject:
        """As a response repeats it."""
        tools = [tool.shown() for tool in self.tools]
        return {
            "type": "namespace",
            "name": self.name,
            "description": self.description or "",
            "tools": tools,
        }


def within(namespace: str | None, name: str) -> str:
    """The name of a tool with that of its namespace, in letters that all templates take."""
    return name if namespace is None else f"{namespace}__{name}"


class ToolOfName(Struct, frozen=True):
    type: Literal["function"]
    name: ShortText


class PlainFormat(Struct, frozen=True, tag_field="type", tag="text"):
    pass


class ObjectFormat(Struct, frozen=True, tag_field="type", tag="json_object"):
    pass


class SchemaFormat(JsonSchemaFormat, frozen=True, tag_field="type", tag="json_schema", kw_only=True):
    """The schema stands beside the type here."""


class TextSettings(Struct, frozen=True):
    format: PlainFormat | ObjectFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Struct, frozen=True):
    """How much to think. No summaries are made: the whole thought is told."""

    effort: Asked | None = None
    summary: ShortText | None = None
    generate_summary: ShortText | None = None


class Obfuscation(Struct, frozen=True):
    include_obfuscation: bool = False  # accepted: nothing is padded


class ResponseRequest(Struct, frozen=True, kw_only=True):
    """POST /v1/responses."""

    MENDS: ClassVar[dict[str, str]] = {
        "conversation": "use `previous_response_id`, which goes on from any stored response; "
        "a conversation has no object of its own here",
        "prompt": "no prompts are stored here: send the text as `instructions` and `input`",
        "context_management": "nothing is summarized here: begin again with a shorter `input`",
        "truncation": "only `disabled` is served: what is too long is refused, not cut",
        "messages": "use `input`, or POST /v1/chat/completions",
        "max_tokens": "use `max_output_tokens`",
        "max_completion_tokens": "use `max_output_tokens`",
        "response_format": "use `text.format`",
        "reasoning_effort": "use `reasoning.effort`",
        "service_tier": "there is one: leave it out; `priority` says whose request goes first",
        "verbosity": "only `medium` is served, which changes nothing: ask for brevity in a message",
    }

    model: Annotated[str, Meta(max_length=4096)] | None = None  # the one that is served
    input: Text | Annotated[list[Any], Meta(min_length=1, max_length=1 << 14)] | None = None
    instructions: Text | None = None
    previous_response_id: Annotated[str, Meta(max_length=1024)] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: Obfuscation | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    tools: Annotated[list[FunctionTool | NamespaceTool], Meta(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolOfName | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[Included], Meta(max_length=16)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_tool_calls: Count | None = None  # of tools that the server runs: there are none
    metadata: Annotated[dict[ShortText, ShortText], Meta(max_length=16)] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: Annotated[str, Meta(max_length=4096)] | None = None
    prompt_cache_retention: Retention | None = None
    prompt_cache_key: ShortText | None = None
    safety_identifier: ShortText | None = None
    client_metadata: Annotated[dict[ShortText, LongText], Meta(max_length=64)] | None = None  # Codex's
    # not OpenAI's
    kv_hints: KvHints | None = None
    priority: Annotated[int, Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] = 0

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.background and self.store is False:
            raise InvalidField("`store` must not be false with `background`: nobody could fetch it")
        for i, tool in enumerate(self.tools or ()):
            if isinstance(tool, NamespaceTool):
                check_json([each.parameters for each in tool.tools], f"tools[{i}].tools")
            elif tool.parameters is not None:
                check_json(tool.parameters, f"tools[{i}].parameters")

    @property
    def stores(self) -> bool:
        return self.store is not False

    @property
    def ranks(self) -> int:
        """`generate.logprobs`."""
        wanted = LOGPROBS in (self.include or ()) or self.top_logprobs is not None
        return max(1, self.top_logprobs or 0) if wanted else 0

    @property
    def effort(self) -> Asked | None:
        """How much to think, as it was said."""
        return self.reasoning.effort if self.reasoning is not None else None

    def thinking(self, served: Served) -> ThinkingEffort:
        """How much the model is to think. Raises InvalidField."""
        return thinking(self.effort, self.max_output_tokens, served, "reasoning.effort")

    def items(self, unique: str) -> list[JsonObject]:
        """The input as items with ids. `unique`: what the ids are made of."""
        if self.input is None:
            return []
        given = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        return [_with_id(item, f"{unique}_{i}") for i, item in enumerate(given)]

    @property
    def generates(self) -> bool:
        """Whether it asks for output, not only for its prompt to be computed."""
        return True

    def declared(self) -> list[JsonObject] | None:
        """As `open.tools`."""
        return [each for tool in self.tools or () for each in tool.declared()] or None

    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Namespace and name of tools that have one, by the name that the model is told."""
        return {
            within(space.name, tool.name): (space.name, tool.name)
            for space in self.tools or ()
            if isinstance(space, NamespaceTool)
            for tool in space.tools
        }

    @property
    def choice_of_tool(self) -> str:
        """As `generate.tool_choice`."""
        if isinstance(self.tool_choice, ToolOfName):
            return self.tool_choice.name
        return self.tool_choice or "auto"

    @property
    def constraint(self) -> Constraint | None:
        """The constraint that `text.format` asks for."""
        form = self.text.format if self.text is not None else None
        if isinstance(form, SchemaFormat):
            return Constraint(json_schema=form.schema or {}, after_thought=True)
        if isinstance(form, ObjectFormat):
            return Constraint(json_schema={"type": "object"}, after_thought=True)
        return None

    def messages(self, *, instructed: bool) -> list[ChatMessage]:
        """The messages to append. `instructed`: the branch begins with the instructions already.

        Raises BadRequest.
        """
        made: list[ChatMessage] = []
        if self.instructions and not instructed:
            made.append(ChatMessage(role="system", content=self.instructions))
        if self.input is None:
            return made
        if isinstance(self.input, str):
            return [*made, ChatMessage(role="user", content=self.input)]
        items = _items(self.input)
        known = {item.call_id for item in items if isinstance(item, CallItem)}
        for i, item in enumerate(items if self.previous_response_id is None else ()):
            if isinstance(item, CallOutputItem):
                check_result(f"input[{i}].call_id", item.call_id, known)
        return made + list(_messages(items))


def _with_id(item: JsonObject, unique: str) -> JsonObject:
    kind = item.get("type", "message")
    prefix = _PREFIXES.get(kind, "item")
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        text: JsonObject = {"type": part, "text": content}
        if part == "output_text":
            text["annotations"] = []
        content = [text]
    shown: JsonObject = {"type": kind, "status": "completed", **item}
    if content is not None:
        shown["content"] = content
    return {**shown, "id": item.get("id") or f"{prefix}_{unique}"}


_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def _items(values: list[Any]) -> list[Item]:
    """The items; a message may come without a type. All in one go: there may be 16,384."""
    typed = [
        {"type": "message", **value} if isinstance(value, dict) and "type" not in value else value
        for value in values
    ]
    try:
        return msgspec.convert(typed, list[Item])
    except msgspec.ValidationError as error:
        raise bad_request(str(error).replace(" - at `$", " - at `$.input")) from None


def _messages(items: Iterable[Item]) -> Iterable[ChatMessage]:
    """Thoughts, text and calls of one turn of the assistant are items, and become one message."""
    thought, said, calls = "", "", list[JsonObject]()

    def turn() -> Iterable[ChatMessage]:
        nonlocal thought, said, calls
        if said or calls:
            yield ChatMessage(
                role="assistant", content=said, tool_calls=calls or None, reasoning=thought or None
            )
        thought, said, calls = "", "", []

    for item in items:
        match item:
            case ReasoningItem():
                yield from turn()
                thought = "".join(part.text for part in item.content or ())
            case MessageItem(role="assistant"):
                if said or calls:
                    yield from turn()
                said = text_of(item.content)
            case CallItem():
                function = {"name": item.told, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
            case CallOutputItem():
                yield from turn()
                yield ChatMessage(role="tool", content=text_of(item.output), tool_call_id=item.call_id)
            case MessageItem(role="developer" | "system"):
                yield from turn()
                yield ChatMessage(role="system", content=text_of(item.content))
            case MessageItem():
                yield from turn()
                yield ChatMessage(role="user", content=text_of(item.content))
    yield from turn()


def text_of(content: "Text | Parts") -> str:
    """The text of an item's content."""
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)


class LaneRequest(ResponseRequest, frozen=True, kw_only=True):
    """`response.create` on a WebSocket. `stream_id`: of the lane in which responses follow each other.

    `generate`: false computes the prompt only, so that the next response begins at once.
    """

    type: Literal["response.create"]
    stream_id: StreamId = None
    generate: bool | None = None

    def __post_init__(self) -> None:
        ResponseRequest.__post_init__(self)
        if self.background:
            raise InvalidField("`background` does not go over a WebSocket: use POST /v1/responses")

    @property
    def generates(self) -> bool:
        return self.generate is not False


def checksum(instructions: str | None) -> int:
    """0: there are none."""
    return zlib.crc32(instructions.encode()) | 1 << 32 if instructions else 0
