"""What a request to /v1/responses holds: shapes, ranges, and the chat messages that its items are."""

import zlib
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from ramify.actors.gateway.apis.openai.effort import Asked, ThinkingEffort, thinking
from ramify.actors.gateway.apis.openai.errors import check_result
from ramify.actors.gateway.apis.openai.requests import JsonSchemaFormat, Struct
from ramify.actors.gateway.apis.openai.response_items import (
    CallItem,
    CallOutputItem,
    chat_of_items,
    input_items,
    kept_item,
    within,
)
from ramify.actors.gateway.apis.openai.retention import Retention
from ramify.actors.gateway.apis.pictures import NO_PICTURES, RequestPictures
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
# What else may be included, but files of pictures, is of tools that are not served: there is nothing.
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


class FunctionTool(Struct, frozen=True, tag_field="type", tag="function", kw_only=True):
    """A tool, flat as this API has it."""

    name: ShortText
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def declared(self, namespace: str | None = None) -> list[JsonObject]:
        """Convert the tool to the form of `open.tools`. `namespace`: the one that has it."""
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
        """Convert the tools to the form of `open.tools`."""
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
        """How much to think, as the request has it."""
        return self.reasoning.effort if self.reasoning is not None else None

    def thinking(self, served: Served) -> ThinkingEffort:
        """Tell how much the model is to think. Raises InvalidField."""
        return thinking(self.effort, self.max_output_tokens, served, "reasoning.effort")

    def items(self, unique: str) -> list[JsonObject]:
        """Make the items of the input, with ids. `unique`: what the ids are made of."""
        if self.input is None:
            return []
        given = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        images = "message.input_image.image_url" in (self.include or ())
        return [kept_item(item, f"{unique}_{i}", images=images) for i, item in enumerate(given)]

    @property
    def generates(self) -> bool:
        """Whether it asks for output, not only for its prompt to be computed."""
        return True

    def declared(self) -> list[JsonObject] | None:
        """Convert all tools to the form of `open.tools`."""
        return [each for tool in self.tools or () for each in tool.declared()] or None

    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Map the name that the model is told to namespace and name, for tools that have a namespace."""
        return {
            within(space.name, tool.name): (space.name, tool.name)
            for space in self.tools or ()
            if isinstance(space, NamespaceTool)
            for tool in space.tools
        }

    @property
    def choice_of_tool(self) -> str:
        """The choice of a tool, as `generate.tool_choice` has it."""
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

    def messages(
        self, *, instructed: bool, pictures: RequestPictures = NO_PICTURES
    ) -> list[ChatMessage]:
        """Make the messages to append. `instructed`: the branch begins with the instructions already.

        Raises BadRequest.
        """
        made: list[ChatMessage] = []
        if self.instructions and not instructed:
            made.append(ChatMessage(role="system", content=pictures.text(self.instructions)))
        if self.input is None:
            return made
        if isinstance(self.input, str):
            return [*made, ChatMessage(role="user", content=pictures.text(self.input))]
        items = input_items(self.input)
        known = {item.call_id for item in items if isinstance(item, CallItem)}
        for i, item in enumerate(items if self.previous_response_id is None else ()):
            if isinstance(item, CallOutputItem):
                check_result(f"input[{i}].call_id", item.call_id, known)
        return made + list(chat_of_items(items, pictures))


class LaneRequest(ResponseRequest, frozen=True, kw_only=True):
    """A `response.create` on a WebSocket. `stream_id`: of the lane in which responses follow each other.

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
    """Hash the instructions; 0: there are none."""
    return zlib.crc32(instructions.encode()) | 1 << 32 if instructions else 0
