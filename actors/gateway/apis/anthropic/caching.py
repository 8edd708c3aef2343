"""Where a client asks that the prompt so far be kept: `cache_control` of blocks, tools, and requests.

Every prompt is in the radix tree once it is computed, marked or not. Marks decide how computed tokens
are called in `usage`, and how long prompt and answer are kept behind others in eviction: as long as
the longest `ttl` says.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ramify.actors.gateway.apis.anthropic.blocks import CacheControl, ToolResultBlock
from ramify.actors.gateway.apis.anthropic.requests import CountRequest
from ramify.protocol.errors import InvalidField
from ramify.protocol.wire import JsonObject

MOST_BREAKPOINTS = 4
_SECONDS = {"5m": 300.0, "1h": 3600.0}


class Marks(NamedTuple):
    """The breakpoints of a request, in the order of the prompt."""

    ttls: tuple[str, ...] = ()

    @classmethod
    def of(cls, request: CountRequest) -> "Marks":
        """Raises InvalidField: there are too many."""
        ttls: list[str] = []
        for found in _found(request):
            ttls.append(found.ttl)
            if len(ttls) > MOST_BREAKPOINTS:
                raise InvalidField(f"`cache_control` stands at more than {MOST_BREAKPOINTS} places")
        return cls(tuple(ttls))

    @property
    def retain_s(self) -> float | None:
        """As `set.retain_s`; None: nothing is marked."""
        return max((_SECONDS[ttl] for ttl in self.ttls), default=None)

    def usage(self, prompt: int, cached: int, output: int) -> JsonObject:
        """`usage` in this API's words: `prompt` tokens are those read, written, and neither.

        With a mark all that was computed is called written: the tree has it, up to the prompt's end.
        """
        written = prompt - cached if self.ttls else 0
        hour = written if self.ttls and set(self.ttls) == {"1h"} else 0
        return {
            "input_tokens": prompt - cached - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": cached,
            "cache_creation": {
                "ephemeral_5m_input_tokens": written - hour,
                "ephemeral_1h_input_tokens": hour,
            },
            "output_tokens": output,
            "service_tier": "standard",
        }


def _found(request: CountRequest) -> Iterator[CacheControl]:
    """Each breakpoint: tools come first in a prompt, then the system's text, then messages."""
    for tool in request.tools or ():
        if tool.cache_control is not None:
            yield tool.cache_control
    if not isinstance(request.system, str):
        for text in request.system or ():
            if text.cache_control is not None:
                yield text.cache_control
    for message in request.messages:
        if isinstance(message.content, str):
            continue
        for block in message.content:
            if isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
                for part in block.content or ():
                    if part.cache_control is not None:
                        yield part.cache_control
            mark = getattr(block, "cache_control", None)
            if mark is not None:
                yield mark
    if request.cache_control is not None:
        yield request.cache_control
