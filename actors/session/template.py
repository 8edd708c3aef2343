"""What a chat template adds to a branch, turn by turn (rule 8 of docs/protocol.md). Pure.

A chat template renders whole conversations; a branch only grows. `delta` renders a *stand-in*: the
shortest conversation that ends in the same role, whose last content is a marker, and then the new
turns. What follows the marker is what the template adds, so neither the history nor its length
matters. For templates that never rewrite earlier turns, `first` plus all deltas is the whole
rendering, character for character.

Turns are *open* or *closed*: a turn is closed when the branch holds the text that the template
puts after the content ("<|im_end|>\n"). Appended messages are closed; generated ones are closed by
`closing`, or by the sampled end-of-sequence token and `rest_after_eos`.

This file does not know tokens, nor how a template is run: a `Renderer` does
(`ramify.actors.tokenizer.Tokenizer`). Its texts may hold guards, so give them to `encode_chat`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ramify.actors.session.calls.dialects import Dialect, dialect_of
from ramify.actors.session.calls.speech import Speech
from ramify.actors.session.chat_messages import Shape, as_dicts, shape_of
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import ChatMessage, JsonObject, Role

_MARKER = "ramifyf3a9c1marker"
_QUESTION: JsonObject = {"role": "user", "content": "Q"}
_ANSWER: JsonObject = {"role": "assistant", "content": "A"}
_CALL: JsonObject = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    ],
}


_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "F",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}


class Renderer(Protocol):
    """Runs the model's chat template."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        generate: bool = False,
    ) -> str:
        """The template's text. Raises BadRequest with the template's words if it refuses."""
        ...

    def unguarded(self, rendered: str) -> str:
        """`rendered` without guards, to compare it with a message's content."""
        ...


class ChatTemplate:
    """One model's template. Stateless but for its caches; sessions may share it."""

    def __init__(
        self, renderer: Renderer, dialect: Dialect | None = None, *, control: bool = False
    ) -> None:
        """`dialect`: the marks that the model writes (default: all that are known); `control`: some are
        control tokens."""
        self._renderer = renderer
        self.speech = Speech(
            self.strict, dialect if dialect is not None else dialect_of(""), control=control
        )
        self._closings: dict[Role, str] = {}
        self._ends: dict[Role, str] = {}
        self._prompts: dict[tuple[Role, bool, bool], str] = {}
        self._system_stands: bool | None = None
        self._shape: Shape | None = None

    # --- strict mode, and the first turns -------------------------------------------------------

    def strict(
        self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject] | None, generate: bool
    ) -> str:
        """The whole conversation, rendered anew. Raises BadRequest."""
        return self._renderer.render(self.as_dicts(messages), tools, generate)

    def first(
        self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject] | None, generate: bool
    ) -> str:
        """The first turns of an empty branch, with BOS and a default system prompt as the template
        has them. Raises BadRequest if the template refuses them, or would lose a turn."""
        if messages[-1].role == "system" and not self._system_can_stand():
            raise BadRequest(
                "this model's chat template puts a system turn into the user turn that follows: "
                "append both in one `append`"
            )
        text = self.strict(messages, tools, generate)
        self._check_system(messages, text)
        return text

    def as_dicts(self, messages: Sequence[ChatMessage]) -> list[JsonObject]:
        """Messages in the shape that this template reads."""
        if not any(message.tool_calls for message in messages):
            return as_dicts(messages)
        if self._shape is None:
            self._shape = shape_of(lambda trial: self._renderer.render(trial, [_TOOL]))
        return as_dicts(messages, self._shape)

    # --- append mode ----------------------------------------------------------------------------

    def delta(
        self,
        last_role: Role,
        closed: bool,
        messages: Sequence[ChatMessage],
        tools: Sequence[JsonObject] | None,
        generate: bool,
    ) -> str:
        """What the template adds behind a turn of `last_role` for the new `messages`.

        `closed`: the branch already holds that turn's `closing`. `generate`: with the header of
        an assistant's turn at the end. O(new text). Raises BadRequest.
        """
        conversation = [*_stand_in(last_role), *self.as_dicts(messages)]
        text = self._after_marker(conversation, tools, generate, last_role)
        self._check_system(messages, text)
        if not closed:
            return text
        closing = self.closing(last_role, tools)
        if not text.startswith(closing):
            raise BadRequest(
                f"this model's chat template joins a {messages[0].role!r} turn to the {last_role!r} "
                "turn before it: append both in one `append`, or open the session with template 'strict'"
            )
        return text[len(closing) :]

    def pending_end(self, role: Role) -> str:
        """The end of a last turn of `role`, where it ends otherwise if turns follow; else "".

        What is to follow brings the right end with it: `delta` does, and `generation_prompt`, both where
        they are told that the turn is not closed.
        """
        end = self._ends.get(role)
        if end is None:
            end = "" if self.closing(role) else self._alone(_stand_in(role), None, False, role)
            self._ends[role] = end
        return end

    def generation_prompt(self, last_role: Role, *, tools: bool = False, closed: bool = True) -> str:
        """What `add_generation_prompt` puts behind a turn of `last_role`. Raises BadRequest.

        `tools`: there are some. Which ones is told before the turn's end (see `closing`). `closed`: the
        branch holds the turn's end, also one that depends on what follows.
        """
        shown = [_TOOL] if tools and last_role == "system" else None
        key = last_role, shown is not None, closed
        prompt = self._prompts.get(key)
        if prompt is None:
            prompted = self._alone(_stand_in(last_role), shown, True, last_role)
            closing = self.closing(last_role, shown) or (self.pending_end(last_role) if closed else "")
            if not prompted.startswith(closing):
                raise BadRequest(
                    f"this model's chat template rewrites a {last_role!r} turn before an answer: "
                    "open the session with template 'strict'"
                )
            prompt = prompted[len(closing) :]
            self._prompts[key] = prompt
        return prompt

    def closing(self, role: Role = "assistant", tools: Sequence[JsonObject] | None = None) -> str:
        """The end of a turn: what the template puts behind a content of `role`.

        "" where that depends on what follows: see `pending_end`. `tools`
        matter for a system turn only, where many templates put them behind the content.
        """
        if role == "system" and tools:
            return self._closing(role, tools)
        closing = self._closings.get(role)
        if closing is None:
            closing = self._closings[role] = self._closing(role, None)
        return closing

    def _closing(self, role: Role, tools: Sequence[JsonObject] | None) -> str:
        stand_in = _stand_in(role)
        closing = self._alone(stand_in, tools, False, role)
        following = _ANSWER if role == "user" else _QUESTION
        try:
            continued = self._alone([*stand_in, following], tools, False, role)
        except BadRequest:  # nothing of that kind may follow: nothing to compare with
            return closing
        return closing if continued.startswith(closing) else ""

    def _alone(
        self,
        conversation: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        generate: bool,
        role: Role,
    ) -> str:
        """`_after_marker` of stand-ins only, for templates that want tools too (Hermes' tool_use)."""
        try:
            return self._after_marker(conversation, tools, generate, role)
        except BadRequest:
            if tools:
                raise
            return self._after_marker(conversation, [_TOOL], generate, role)

    def rest_after_eos(self, eos: str) -> str | None:
        """What is left of an assistant's `closing` when the model sampled the token `eos` (its text).

        None: the template does not end turns with it; cut the token off and append `closing`.
        """
        closing = self.closing()
        at = closing.find(eos) if eos else -1
        if at < 0 or closing[:at].strip():
            return None
        return closing[at + len(eos) :]

    # --- stand-ins ------------------------------------------------------------------------------

    def _after_marker(
        self,
        conversation: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        generate: bool,
        role: Role,
    ) -> str:
        text = self._renderer.render(conversation, tools, generate)
        # The first one: what the client sends stands behind it.
        _, found, after = text.partition(_MARKER)
        if not found:
            raise BadRequest(
                f"this model's chat template does not show a {role!r} turn in its place, so the branch "
                "cannot be continued after it: open the session with template 'strict'"
            )
        return after

    def _system_can_stand(self) -> bool:
        """Whether a system turn may be appended before the user turn is known."""
        if self._system_stands is None:
            alone = self._renderer.render(_stand_in("system"))
            followed = self._renderer.render([*_stand_in("system"), _QUESTION])
            self._system_stands = _MARKER in alone and followed.startswith(alone)
        return self._system_stands

    def _check_system(self, messages: Sequence[ChatMessage], text: str) -> None:
        """Some templates skip system turns in silence: an instruction must not get lost."""
        shown: str | None = None
        for message in messages:
            if message.role == "system" and message.content.strip():
                shown = self._renderer.unguarded(text) if shown is None else shown
                if message.content.strip() not in shown:
                    raise BadRequest(
                        "this model's chat template leaves a system turn out at this place: send it as "
                        "the first message, or as a part of a user turn"
                    )


def _stand_in(role: Role) -> list[JsonObject]:
    """The shortest usual conversation that ends with a turn of `role`; its content is the marker."""
    turn: JsonObject = {"role": role, "content": _MARKER}
    match role:
        case "system" | "user":
            return [turn]
        case "assistant":
            return [_QUESTION, turn]
        case "tool":
            return [_QUESTION, _CALL, {**turn, "tool_call_id": "call00001", "name": "f"}]
