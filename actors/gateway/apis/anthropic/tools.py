"""The tools of a request, as clients declare them and as templates take them."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from ramify.actors.gateway.apis.anthropic.blocks import CacheControl, Name
from ramify.actors.gateway.apis.openai.requests import Struct
from ramify.protocol.errors import InvalidField
from ramify.protocol.wire import JsonObject, ShortText, Text

MOST_TOOLS = 1024
_ON_THE_SERVER = ("web_", "code_execution_", "tool_search_", "mcp_", "advisor_")
_RESERVED = ("auto", "none", "required")  # what `generate.tool_choice` says of no tool in particular


class ToolParam(Struct, frozen=True, kw_only=True):
    """A tool of the client. The fields below `strict` are those of tools that are not served, so that
    the error is about the tool."""

    type: ShortText | None = None
    name: Name | None = None
    description: Text | None = None
    input_schema: JsonObject | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # input is told as it comes, unless this is false
    defer_loading: bool | None = None  # accepted: the tool is in the prompt from the beginning
    input_examples: Annotated[list[JsonObject], Meta(max_length=64)] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Meta(max_length=1)] | None = None
    max_uses: Any = None
    max_content_tokens: Any = None
    allowed_domains: Any = None
    blocked_domains: Any = None
    user_location: Any = None
    citations: Any = None
    use_cache: Any = None
    max_characters: Any = None
    display_width_px: Any = None
    display_height_px: Any = None
    display_number: Any = None
    enable_zoom: Any = None
    mcp_server_name: Any = None
    default_config: Any = None
    configs: Any = None
    model: Any = None

    def declared(self, place: str) -> JsonObject:
        """Convert the tool to the form of `open.tools`. Raises InvalidField for a field in `place`."""
        if self.type not in (None, "custom"):
            mend = "declare a tool with `name` and `input_schema`, and run it in the client"
            if self.type.startswith(_ON_THE_SERVER):
                mend = f"the server runs no tools of its own: {mend}"
            raise InvalidField(f"`{place}.type` {self.type!r} is not served: {mend}")
        if self.name is None or self.input_schema is None:
            missing = "name" if self.name is None else "input_schema"
            raise InvalidField(f"`{place}.{missing}` is missing")
        self._check(place)
        if not isinstance(self.input_schema.get("properties"), dict | None):
            raise InvalidField(f"`{place}.input_schema.properties` must be an object")
        function: JsonObject = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.input_schema
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}

    def _check(self, place: str) -> None:
        for field in self.__struct_fields__[self.__struct_fields__.index("max_uses") :]:
            if getattr(self, field) is not None:
                raise InvalidField(f"`{place}.{field}` is of tools that are not served: leave it out")
        if self.input_examples:
            raise InvalidField(
                f"`{place}.input_examples` are not shown to the model: put them into `description`"
            )


class ToolChoice(Struct, frozen=True, kw_only=True):
    """Which tool must be called, if any."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    def __post_init__(self) -> None:
        if (self.type == "tool") != (self.name is not None):
            raise InvalidField('`tool_choice.name` goes with type "tool": set both, or neither')
        if self.name in _RESERVED:
            raise InvalidField(
                f"`tool_choice.name` {self.name!r} is a word of its own here: rename the tool"
            )

    @property
    def said(self) -> str:
        """The choice, as `generate.tool_choice` has it."""
        return self.name or ("required" if self.type == "any" else self.type)
