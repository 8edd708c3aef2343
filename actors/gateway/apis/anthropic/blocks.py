"""What messages hold: content blocks, with bounds, checked before any work is done.

Fields that an answer of this API has are declared here too, since clients send answers back as they got
them. Unknown fields and kinds of blocks are refused by name.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw

from ramify.actors.gateway.apis.openai.requests import Struct
from ramify.protocol.tools import LONGEST_NAME
from ramify.protocol.wire import JsonObject, ShortText, Text

MOST_BLOCKS = 1 << 12  # of one message
MOST_MESSAGES = 1 << 14  # of one request, with the blocks of all; as many as one `append` takes
_SERVER_BLOCK = "the server runs no tools of its own: leave the block out"
# Kinds of blocks that Anthropic's API has and this server does not, and what to do instead.
NOT_SERVED = {
    **dict.fromkeys(("document", "search_result", "container_upload"), "no files are read: send text"),
    **dict.fromkeys(
        ("server_tool_use", "web_search_tool_result", "web_fetch_tool_result",
         "code_execution_tool_result", "bash_code_execution_tool_result",
         "text_editor_code_execution_tool_result", "tool_search_tool_result",
         "mcp_tool_use", "mcp_tool_result"), _SERVER_BLOCK),
    "compaction": "the server shortens no history: send a text with the summary",
}  # fmt: skip

Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
_Nothing = Annotated[list[Any], Meta(max_length=0)] | None


class CacheControl(Struct, frozen=True, kw_only=True):
    """A breakpoint. `scope` changes nothing: each credential's name has a cache of its own."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"
    scope: ShortText | None = None


class TextBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: Text
    cache_control: CacheControl | None = None
    citations: _Nothing = None
    parsed_output: Raw = Raw()  # what a client made of the text: it sends it back with the block


class ToolReference(Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_reference"):
    """What a client's search for tools found: one that is declared in `tools`."""

    tool_name: Name
    cache_control: CacheControl | None = None


class Base64Source(Struct, frozen=True, kw_only=True, tag_field="type", tag="base64"):
    """`media_type` changes nothing: the file says what it is."""

    data: Text
    media_type: ShortText


class UrlSource(Struct, frozen=True, kw_only=True, tag_field="type", tag="url"):
    url: Text


class ImageBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="image"):
    source: Base64Source | UrlSource
    cache_control: CacheControl | None = None


class ThinkingBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """`signature`: see `signatures`."""

    thinking: Text
    signature: Text


class RedactedThinkingBlock(
    Struct, frozen=True, kw_only=True, tag_field="type", tag="redacted_thinking"
):
    """A thought that only another server can read."""

    data: Text


class Caller(Struct, frozen=True, kw_only=True):
    type: Literal["direct"]


class ToolUseBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: Name
    name: Name
    input: JsonObject
    cache_control: CacheControl | None = None
    caller: Caller | None = None
    toolset_name: None = None


class ToolResultBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: Name
    content: (
        Text
        | Annotated[list[TextBlock | ImageBlock | ToolReference], Meta(max_length=MOST_BLOCKS)]
        | None
    ) = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


Block = TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
System = Text | Annotated[list[TextBlock], Meta(max_length=MOST_BLOCKS)]


class MessageParam(Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Meta(max_length=MOST_BLOCKS)]

    @property
    def blocks(self) -> "list[Block]":
        """Its content; a string is one block of text."""
        return [TextBlock(text=self.content)] if isinstance(self.content, str) else self.content
