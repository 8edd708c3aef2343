"""How long a model may think: `thinking.budget_tokens`.

The first generation ends with the budget. Where it is still thinking then, the thought is ended for it,
and a second one gives the answer; else the second one goes on where the first one was.
"""

import msgspec

from ramify.actors.gateway.apis.anthropic.requests import MessagesRequest
from ramify.protocol.wire import Append, ClientMessage, Constraint, Done, Generate

GENERATE, CLOSE, GO_ON = 4, 5, 6  # ids of the ops, which increase


def generation(request: MessagesRequest, most: int) -> Generate:
    """The generation that a request asks for, of so many tokens."""
    choice = request.tool_choice
    return Generate(
        id=GENERATE,
        max_tokens=most,
        tool_choice=request.choice_of_tool,
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        constraint=request.constraint,
        **request.sampling(),
    )


class Budget:
    """`end`: the mark that ends a thought; None: the model does not think, and there is no budget."""

    def __init__(self, request: MessagesRequest, end: str | None) -> None:
        tokens = request.thinking.budget_tokens if request.thinking is not None else None
        self._request = request
        self._end = end
        self._tokens = tokens if end is not None else None
        self._first: Done | None = None

    @property
    def first(self) -> Generate:
        """The generation to begin with."""
        return generation(self._request, self._tokens or self._request.max_tokens)

    def goes_on(self, done: Done, context: int, *, thinks: bool, calls: bool) -> list[ClientMessage]:
        """The ops that follow; none: it is over. `thinks`: it has not come to an end of its thought;
        `calls`: it has begun a call."""
        left = self._request.max_tokens - done.usage.output
        if self._tokens is None or self._first is not None or done.reason != "length" or left <= 0:
            return []
        if done.position >= context:
            return []
        self._first = done
        rest = msgspec.structs.replace(generation(self._request, left), id=GO_ON)
        if thinks:
            return [Append(id=CLOSE, text=f"\n{self._end}\n\n"), rest]
        constraint = Constraint(continue_=True) if rest.constraint is not None else None
        choice = "auto" if calls else rest.tool_choice
        return [msgspec.structs.replace(rest, constraint=constraint, tool_choice=choice)]

    def whole(self, done: Done) -> Done:
        """The end of both generations, as if they were one."""
        first = self._first
        if first is None:
            return done
        usage = msgspec.structs.replace(
            first.usage,
            output=first.usage.output + done.usage.output,
            forced=first.usage.forced + done.usage.forced,
            total_ms=done.usage.total_ms,
        )
        calls = [*(first.tool_calls or ()), *(done.tool_calls or ())]
        notes = [*(first.notes or ()), *(done.notes or ())]
        reason = "tool" if done.reason == "stop" and calls and done.stop is None else done.reason
        return msgspec.structs.replace(
            done, usage=usage, tool_calls=calls or None, notes=notes or None, reason=reason
        )
