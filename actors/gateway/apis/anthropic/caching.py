"""Where a client asks that the prompt so far be kept: `cache_control` of blocks, tools, and requests.

Every prompt is in the radix tree once it is computed, marked or not. Marks decide how computed tokens
are called in `usage`, and how long what stands before them is kept behind others in eviction. A mark at
the end of the prompt keeps the answer, too. Pure.
"""

from typing import Any, NamedTuple

from ramify.actors.gateway.apis.anthropic.conversation import RequestConversation
from ramify.actors.gateway.apis.anthropic.requests import CountRequest
from ramify.actors.gateway.apis.openai.retention import OWN
from ramify.protocol.errors import InvalidField
from ramify.protocol.wire import JsonObject, KvAction, KvHints, MessagePlace

MOST_BREAKPOINTS = 4
_SECONDS = {"5m": 300.0, "1h": 3600.0}
_NOWHERE = {"outcome": "rejected", "reason": "the chat template does not show this place"}


class CacheMarks(NamedTuple):
    """The breakpoints of a request, in the order of the prompt: how long, and where (None: its end)."""

    ttls: tuple[str, ...] = ()
    places: tuple[MessagePlace | None, ...] = ()

    @classmethod
    def of(cls, request: CountRequest, told: RequestConversation) -> "CacheMarks":
        """Collect the breakpoints of a request. Raises InvalidField for too many."""
        tools = [tool.cache_control for tool in request.tools or ()]
        found = [(each, told.head) for each in tools if each is not None] + told.marks
        last = len(told.messages) - 1
        made = [
            (each.ttl, None if where.message > last or _ends(told, where) else where)
            for each, where in found
        ]
        if request.cache_control is not None:
            made.append((request.cache_control.ttl, None))
        if len(made) > MOST_BREAKPOINTS:
            raise InvalidField(f"`cache_control` stands at more than {MOST_BREAKPOINTS} places")
        return cls(*map(tuple, zip(*made, strict=True))) if made else cls()

    @property
    def retain_s(self) -> float | None:
        """For how many seconds the whole prompt is kept; None: its end is not marked."""
        whole = [_SECONDS[ttl] for ttl, place in zip(self.ttls, self.places, strict=True) if not place]
        return max(whole, default=None)

    @property
    def inner(self) -> list[MessagePlace]:
        """The breakpoints before the prompt's end, as `append.marks` has them."""
        return [place for place in self.places if place is not None]

    def hints(self, positions: list[int | None]) -> KvHints:
        """Make the hints that keep all of them. `positions`: of the inner ones, in tokens."""
        ends = iter(positions)
        actions: list[KvAction] = []
        for number, (ttl, place) in enumerate(zip(self.ttls, self.places, strict=True)):
            payload: JsonObject = {"duration": _SECONDS[ttl]}
            if place is not None:
                payload["end"] = next(ends, None)
            if payload.get("end", 1):
                actions.append(KvAction(str(number), "kv.retain", "1.0", payload))
        return KvHints("0.1", OWN, actions)

    def kept(self, outcomes: list[JsonObject]) -> JsonObject:
        """Make `ramify_retention`: what became of each breakpoint, in their order."""
        found = {each["action_id"]: each for each in outcomes}
        told: list[Any] = []
        for number in range(len(self.ttls)):
            of = found.get(str(number), _NOWHERE)
            told.append({name: value for name, value in of.items() if name != "action_id"})
        worst = next((each for each in told if each["outcome"] != "accepted"), told[0])
        return {"outcome": worst["outcome"], "breakpoints": told}

    def usage(self, prompt: int, cached: int, output: int) -> JsonObject:
        """Make `usage` in this API's words: `prompt` tokens are read from cache, written, or neither.

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


def _ends(told: RequestConversation, place: MessagePlace) -> bool:
    """Whether `place` is the end of the last turn, with nothing behind it."""
    last = len(told.messages) - 1
    return place.message == last and place.at >= len(told.messages[last].content) and not told.prefill
