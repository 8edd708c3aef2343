"""How a tool call begins, so that a `tool_choice` can force one. Pure.

The model's own template is asked: it renders a conversation that ends with a call, and what stands
between the generation prompt and the tool's name is the opening. Where a template does not show calls
behind its prompt, the dialect knows how they begin.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from os.path import commonprefix
from typing import Any, TypeAlias

from ramify.actors.calls import forms
from ramify.actors.calls.dialects import Dialect
from ramify.actors.calls.exact import CALL_ID, Written
from ramify.actors.calls.toolbox import Toolbox
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import ChatMessage, JsonObject

_NAME = "ramifyf3a9c1name"
_VALUE = "ramifyf3a9c1value"
_PARAMETER = "p"
_PARAMETERS = ("{", forms.PARAMETER, forms.ARG_KEY, forms.NAMED_PARAMETER)  # how arguments begin
_TAGGED = ("hermes", "qwen3-coder")  # whose calls stand between the same tags
_QUESTION = ChatMessage(role="user", content="Q")
_ANSWER = ChatMessage(role="assistant", content=_VALUE)


# Renders messages with tools, and with the generation prompt if the last one says so.
Render: TypeAlias = Callable[[Sequence[ChatMessage], Sequence[JsonObject] | None, bool], str]


class Openings:
    """The openings of one model; sessions may share it. `render` raises BadRequest."""

    def __init__(self, render: Render, dialect: Dialect) -> None:
        self._render_all = render
        self._dialect = dialect
        self._known: tuple[str, str] | None = None

    def check(self, choice: str, tools: Toolbox, *, chat: bool) -> None:
        """Raise BadRequest for a `tool_choice` that cannot be forced."""
        if choice in ("auto", "none"):
            return
        fault = None
        if not tools:
            fault = "needs tools: name them in `open.tools`"
        elif not self._dialect.opening:
            fault = "cannot be forced: this server was told that the model writes no calls"
        elif not chat:
            fault = "needs a chat: append `messages` before"
        elif choice != "required" and choice not in tools:
            names = ", ".join(tools.names[:8])
            fault = f"is none of auto, none, required, and the session's tools ({names})"
        if fault is not None:
            raise BadRequest(f"`tool_choice` {choice[:64]!r} {fault}", details={"field": "tool_choice"})

    def text(self, choice: str) -> str:
        """What the turn begins with: up to a call's name, or up to its arguments if it is named.

        It ends where a token may begin: blanks and quotes before what the model says are left to it.
        """
        opening, argument = self._both()
        if choice == "required":
            return opening.rstrip(' "')
        return opening + choice + argument.rstrip(" ")

    def written(self) -> Written:
        """How the template writes a call: with the space that JSON has behind a colon."""
        opening, argument = self._both()
        places = [at for mark in self._dialect.openings if (at := opening.find(mark)) >= 0]
        if places and not self._dialect.tags:  # without the end of a thought that the prompt began
            opening = opening[min(places) :]
        return Written(opening, f"{argument} " if argument.endswith('":') else argument)

    @cached_property
    def unthought(self) -> str | None:
        """What keeps the model from thinking, behind a generation prompt: an empty thought, as the
        template writes one, or the end of the one that the prompt began. "": it does not think anyway;
        None: nothing does."""
        thought = self._dialect.thought
        if thought is None:
            return ""
        if self._dialect.tags:  # a thought is a message of its own
            return None
        try:
            prompt = self._render([_QUESTION], generate=True)
            shown = self._render([_QUESTION, _ANSWER], generate=False).partition(_VALUE)[0]
        except BadRequest:
            return None
        begun, ended = prompt.rfind(thought.begin), prompt.rfind(thought.end)
        if ended > begun:
            return ""
        empty = shown.removeprefix(prompt)
        if (
            begun < 0
            and empty != shown
            and thought.begin in empty
            and empty.rstrip().endswith(thought.end)
        ):
            return empty
        end = f"\n{thought.end}\n\n"
        return end if begun >= 0 else f"{thought.begin}\n{end}"

    @cached_property
    def thinks_first(self) -> bool:
        """Whether the generation prompt begins a thought that the opening does not end."""
        thought = self._dialect.thought
        if thought is None or self._dialect.tags:
            return False
        try:
            prompt = self._render([_QUESTION], generate=True)
        except BadRequest:
            return False
        prompt += self._both()[0]
        return prompt.rfind(thought.begin) > prompt.rfind(thought.end)

    def _both(self) -> tuple[str, str]:
        if self._known is None:
            self._known = self._rendered() or (self._dialect.opening, self._dialect.argument)
            if self._known[0] == self._dialect.opening and self._known[0].endswith('"name":'):
                self._known = self._known[0] + ' "', self._known[1]
        return self._known

    def _rendered(self) -> tuple[str, str] | None:
        """(opening, what stands between name and arguments) as the template writes them."""
        try:
            prompt = self._render([_QUESTION], generate=True)
            call = self._render([_QUESTION, _call(_NAME)], generate=False)
        except BadRequest:
            return None
        before, named, after = call.rpartition(_NAME)
        if not named or _VALUE not in after:
            return None
        if self._dialect.name in _TAGGED and (
            before.endswith(forms.FUNCTION) != self._dialect.opening.endswith(forms.FUNCTION)
        ):
            return None  # between the same tags, but another family's
        # what the prompt and the call begin with alike is no part of the call
        shared = len(commonprefix([prompt, call]))  # noqa: RUF071 - texts, not paths
        places = [(before.rfind(mark), mark) for mark in self._dialect.openings]
        marks = [at for at, mark in places if at >= 0 and at + len(mark) > shared]
        if call.startswith(prompt) and (self._dialect.bare is not None or marks):
            opening = before[len(prompt) :]
        elif marks:  # the prompt ends a thought that a call does not show
            opening = before[min(marks) :]
        else:
            return None
        argument = after.partition(_VALUE)[0]
        end = max(map(argument.rfind, _PARAMETERS))
        return (opening, argument[:end]) if end >= 0 else None

    def _render(self, messages: Sequence[ChatMessage], *, generate: bool) -> str:
        return self._render_all(messages, [_tool(_NAME)], generate)


def _call(name: str) -> ChatMessage:
    function: dict[str, Any] = {"name": name, "arguments": {_PARAMETER: _VALUE}}
    call = {"id": CALL_ID, "type": "function", "function": function}
    return ChatMessage(role="assistant", tool_calls=[call])


def _tool(name: str) -> JsonObject:
    properties = {_PARAMETER: {"type": "string", "description": "P"}}
    schema = {"type": "object", "properties": properties, "required": [_PARAMETER]}
    return {"type": "function", "function": {"name": name, "description": "F", "parameters": schema}}
