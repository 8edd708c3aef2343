"""What requests hold: shapes and ranges, checked before any work is done. Unknown fields are refused.

Fields that Anthropic's API has and this server does not are declared with the only value that changes
nothing, so that clients that send it always work, and others are told by name what to do instead.
"""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from ramify.actors.gateway.apis.anthropic.blocks import (
    MOST_MESSAGES,
    NOT_SERVED,
    CacheControl,
    MessageParam,
    System,
)
from ramify.actors.gateway.apis.anthropic.tools import MOST_TOOLS, ToolChoice, ToolParam
from ramify.actors.gateway.apis.openai.effort import ThinkingEffort, thinking
from ramify.actors.gateway.apis.openai.requests import Stops, Struct, sampling_of
from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.errors import InvalidField
from ramify.protocol.sampling import TopK, check_temperature
from ramify.protocol.wire import Constraint, JsonObject, KvHints, ShortText

LEAST_BUDGET = 1024  # tokens of a thought
_Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Nothing = Annotated[list[Any], Meta(max_length=0)] | None
KEEPS_THOUGHTS = "clear_thinking_20251015"  # the one edit that may change nothing: `keep` "all"


class Metadata(Struct, frozen=True, kw_only=True):
    user_id: Annotated[str, Meta(max_length=4096)] | None = None


class Thinking(Struct, frozen=True, kw_only=True):
    """Whether the model is to think. `display` "omitted": only that it did is told."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=LEAST_BUDGET, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    def __post_init__(self) -> None:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise InvalidField('`thinking.budget_tokens` goes with type "enabled": set both, or neither')


class OutputFormat(Struct, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    schema: JsonObject


class OutputConfig(Struct, frozen=True, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Diagnostics(Struct, frozen=True, kw_only=True):
    previous_message_id: ShortText | None = None


class Edit(Struct, frozen=True, kw_only=True):
    """An edit of the history. `keep`: of thoughts."""

    type: ShortText
    keep: Any = None

    def __post_init__(self) -> None:
        if self.type != KEEPS_THOUGHTS or self.keep not in ("all", {"type": "all"}):
            raise InvalidField(
                f"`context_management` {self.type!r} is not served: the server edits no history; "
                "leave it out, and shorten `messages` in the client"
            )


class ContextManagement(Struct, frozen=True, kw_only=True):
    edits: Annotated[list[Edit], Meta(max_length=16)] = []


class CountRequest(Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens, and the fields that it shares with POST /v1/messages."""

    UNSERVED: ClassVar[dict[str, str]] = NOT_SERVED
    MENDS: ClassVar[dict[str, str]] = {
        "container": "there are no containers: the server runs no tools of its own",
        "mcp_servers": "the server calls no MCP servers: let the client call their tools "
        "(`ramify.agent.mcp_tools`)",
        "inference_geo": "the server is where it is: leave it out",
        "speed": "there is one speed: leave it out",
        "compaction": "the server shortens no history: do it in the client",
        "fallbacks": "there is one model: leave it out",
        "prompt": "use `messages`",
        "max_completion_tokens": "use `max_tokens`",
        "stop": "use `stop_sequences`",
        "functions": "use `tools`",
        "task_budget": "use `max_tokens`",
        "service_tier": "there is one: leave it out",
    }

    model: Annotated[str, Meta(min_length=1, max_length=4096)]
    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MOST_MESSAGES)]
    system: System | None = None
    tools: Annotated[list[ToolParam], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # where it was before `output_config`
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    betas: Annotated[list[ShortText], Meta(max_length=64)] | None = None
    container: None = None
    mcp_servers: _Nothing = None
    speed: Literal["standard"] | None = None

    def __post_init__(self) -> None:
        blocks = sum(len(each.content) for each in self.messages if isinstance(each.content, list))
        if len(self.messages) + blocks > MOST_MESSAGES:
            raise InvalidField(f"`messages` and their blocks are over {MOST_MESSAGES}: send fewer")
        config = self.output_config
        if self.output_format is not None and config is not None and config.format is not None:
            raise InvalidField("`output_format` stands beside `output_config.format`: give one")
        names = {tool.name for tool in self.tools or ()}
        choice = self.tool_choice
        if choice is not None and choice.name is not None and choice.name not in names:
            raise InvalidField(f"`tool_choice.name` {choice.name[:64]!r} is none of the `tools`")
        if choice is not None and choice.type == "any" and not names:
            raise InvalidField('`tool_choice` "any" goes with `tools`: give some')
        if self.constraint is not None and names and self.choice_of_tool != "none":
            raise InvalidField(
                "`output_config.format` does not go with `tools`: a constrained answer calls none; "
                'leave one out, or set `tool_choice` to {"type": "none"}'
            )

    @property
    def choice_of_tool(self) -> str:
        """The choice of a tool, as `generate.tool_choice` has it."""
        return self.tool_choice.said if self.tool_choice is not None else "auto"

    @property
    def constraint(self) -> Constraint | None:
        """The constraint on the answer behind a thought."""
        config = self.output_config
        form = (config.format if config is not None else None) or self.output_format
        return Constraint(json_schema=form.schema, after_thought=True) if form is not None else None

    def thinks(self, most: int | None, served: Served) -> ThinkingEffort:
        """Tell how much the model is to think. `most`: tokens of the answer."""
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            return ThinkingEffort(tokens=self.thinking.budget_tokens)
        asked = self.output_config.effort if self.output_config is not None else None
        return thinking(asked, most or None, served, "output_config.effort")

    def declared(self) -> list[JsonObject] | None:
        """Convert the tools to the form of `open.tools`. Raises InvalidField."""
        return [tool.declared(f"tools[{i}]") for i, tool in enumerate(self.tools or ())] or None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """POST /v1/messages. `max_tokens` 0 only computes the prompt."""

    max_tokens: _Tokens
    stop_sequences: Stops | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: TopK | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    diagnostics: Diagnostics | None = None
    kv_hints: KvHints | None = None  # not Anthropic's
    service_tier: Literal["auto", "standard_only"] | None = None  # there is one tier
    inference_geo: None = None

    def __post_init__(self) -> None:
        CountRequest.__post_init__(self)
        check_temperature(self.temperature)
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            raise InvalidField("`thinking.budget_tokens` must be less than `max_tokens`")

    def sampling(self) -> dict[str, Any]:
        """The fields of `generate` that are set."""
        return sampling_of(self, self.stop_sequences)
