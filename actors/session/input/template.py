"""What a chat template adds to a branch, turn by turn (rule 8 of docs/protocol.md). Pure.

A chat template renders whole conversations; a branch only grows. `delta` renders a *stand-in*: the
shortest conversation that ends in the same role, whose last content is a marker, and then the new
turns. What follows the marker is what the template adds, so neither the history nor its length
matters. For templates that never rewrite earlier turns, `first` plus all deltas is the whole
rendering, character for character.

Turns are *open* or *closed*: a turn is closed when the branch holds the text that the template
puts after the content ("<|im_end|>\n"). Appended messages are closed; generated ones are closed by
`closing`, or by the sampled end-of-sequence token and `rest_after_eos`.

This file does not know tokens, nor how a template is run: the tokenizer does
(`ramify.actors.tokenizer.Tokenizer`). Its texts may hold guards, so give them to `encode_chat`.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import msgspec

from ramify.actors.calls.dialects import Dialect, dialect_of
from ramify.actors.calls.templates import (
    ANSWER,
    ASKED,
    MARKER,
    NOTHING_ASKED,
    QUESTION,
    RESULT,
    THOUGHTS,
    TOOL,
    Asked,
    Rewrite,
    Shape,
    as_dicts,
    calling,
    rewrites,
    shape_of,
    stand_in,
)
from ramify.actors.session.input.speech import Speech
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import ChatMessage, Effort, JsonObject, MessagePlace, Role

_NAME = "ramify7d20e4tool"
UNSEEN: JsonObject = {"type": "function", "function": {**TOOL["function"], "name": _NAME}}
_MARKED = re.compile(rf"{MARKER}(\d{{1,2}})\.")


class ChatTemplate:
    """One model's template. Stateless but for its caches; sessions may share it."""

    def __init__(
        self, tokenizer: Tokenizer, dialect: Dialect | None = None, *, control: bool = False
    ) -> None:
        """`dialect`: the marks that the model writes (default: all that are known); `control`: some are
        control tokens."""
        self._tokenizer = tokenizer
        self.speech = Speech(
            self.strict, dialect if dialect is not None else dialect_of(""), control=control
        )
        self._closings: dict[Role, str] = {}
        self._ends: dict[Role, str] = {}
        self._prompts: dict[tuple[Role, bool, bool], str] = {}
        self._system_stands: dict[bool, bool] = {}  # with tools, without
        self.late_tools = False  # it writes tools behind a turn that is not the first (Mistral's)
        self._shape: Shape | None = None
        self._rewrites: list[Rewrite] | None = None

    # --- strict mode, and the first turns -------------------------------------------------------

    def strict(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[JsonObject] | None,
        generate: bool,
        effort: Effort | None = None,
    ) -> str:
        """Render the whole conversation. Raises BadRequest."""
        return self._tokenizer.render(self.as_dicts(messages), tools, generate, effort)

    def first(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[JsonObject] | None,
        generate: bool,
        effort: Effort | None = None,
    ) -> str:
        """Render the first turns of an empty branch, with BOS and default system prompt as the template
        has them. Raises BadRequest if the template refuses them, or would lose a turn."""
        if messages[-1].role == "system" and not self._system_can_stand(tools):
            raise BadRequest(
                "this model's chat template shows a system turn together with the user turn that "
                "follows: append both in one `append`"
            )
        text = self.strict(messages, tools, generate, effort)
        self._check_system(messages, text)
        return text

    def places(
        self,
        messages: Sequence[ChatMessage],
        marks: Sequence[MessagePlace],
        text: str,
        tools: Sequence[JsonObject] | None,
        effort: Effort | None = None,
    ) -> list[int | None]:
        """Count the characters of `text`, which `first` made of `messages`, before each mark.

        A marker in the content shows it. None: the template writes that content otherwise, or not.
        """
        marked, shown = list(messages), list[int]()
        for i, mark in sorted(enumerate(marks), key=lambda each: each[1].at, reverse=True):
            content, mine = marked[mark.message].content, messages[mark.message].content
            at = max(min(mark.at, len(mine.rstrip())), len(mine) - len(mine.lstrip()))  # blanks may go
            if mine.strip() and MARKER not in mine:
                content = f"{content[:at]}{MARKER}{i}.{content[at:]}"
                marked[mark.message] = msgspec.structs.replace(marked[mark.message], content=content)
                shown.append(i)
        found: list[int | None] = [None] * len(marks)
        last = max((marks[i].message + 1 for i in shown), default=len(messages))
        for end in sorted({last, len(messages)}) if shown else ():
            try:
                pieces = _MARKED.split(self.strict(marked[:end], tools, False, effort))
            except BadRequest:
                continue
            names = [int(name) for name in pieces[1::2]]
            if sorted(names) == sorted(shown) and text.startswith("".join(pieces[:-1:2])):
                for i, before in zip(names, accumulate(map(len, pieces[::2])), strict=False):
                    found[i] = before
                break
        return found

    def as_dicts(self, messages: Sequence[ChatMessage]) -> list[JsonObject]:
        """Convert messages to the form that this template reads."""
        if not any(message.tool_calls for message in messages):
            return as_dicts(messages)
        if self._shape is None:
            self._shape = shape_of(lambda trial: self._tokenizer.render(trial, [TOOL]))
        return as_dicts(messages, self._shape)

    @property
    def rewrites(self) -> list[Rewrite]:
        """The ways in which a branch of append mode differs from `strict`. Found out once."""
        if self._rewrites is None:
            self._rewrites = rewrites(self, self.speech.dialect)
        return self._rewrites

    @property
    def forgets(self) -> bool:
        """Whether the template leaves thoughts out once the user goes on."""
        return THOUGHTS in self.rewrites

    # --- append mode ----------------------------------------------------------------------------

    def delta(
        self,
        last_role: Role,
        closed: bool,
        messages: Sequence[ChatMessage],
        tools: Sequence[JsonObject] | None,
        generate: bool,
        asked: Asked = NOTHING_ASKED,
    ) -> str:
        """Render what the template adds behind a turn of `last_role` for the new `messages`.

        `closed`: the branch already holds that turn's `closing`. `generate`: with the header of
        an assistant's turn at the end. `asked`: of tools, by the branch. O(new text), and of tools where
        they are written behind that turn (Mistral's). Raises BadRequest.
        """
        if tools and last_role != "system":
            with suppress(BadRequest):
                unseen = [UNSEEN] * min(len(tools), 2)
                text = self._delta(last_role, closed, messages, unseen, generate, asked)
                if _NAME not in text:
                    return text
                self.late_tools = True
        return self._delta(last_role, closed, messages, tools, generate, asked)

    def _delta(
        self,
        last_role: Role,
        closed: bool,
        messages: Sequence[ChatMessage],
        tools: Sequence[JsonObject] | None,
        generate: bool,
        asked: Asked,
    ) -> str:
        if asked.calls and last_role == "assistant":
            try:
                return self._behind_calls(asked, closed, messages, tools, generate)
            except BadRequest:  # not in this shape, or it rewrites the calls
                pass
        before = self._stand_in(last_role, asked)
        text = self._after_marker([*before, *self.as_dicts(messages)], tools, generate, last_role)
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

    def _behind_calls(
        self,
        asked: Asked,
        closed: bool,
        messages: Sequence[ChatMessage],
        tools: Sequence[JsonObject] | None,
        generate: bool,
    ) -> str:
        """Render `delta` for results behind their calls: templates may look back at the called names."""
        asking = [*self._earlier(asked), *self.as_dicts([calling(asked, MARKER)])]
        before = self._after_marker(asking, tools, False, "assistant")
        text = self._after_marker([*asking, *self.as_dicts(messages)], tools, generate, "assistant")
        if not text.startswith(before):
            raise BadRequest("this model's chat template rewrites calls where their results follow")
        self._check_system(messages, text)
        if closed:
            return text[len(before) :]
        # Without the token that ended them, if the model wrote them, or without the end of a last turn.
        missing = [end for end in (*asked.ends, self.pending_end("assistant")) if end]
        ends = [at for at in map(before.find, missing) if at >= 0]
        return text[min(ends, default=len(before)) :]

    def pending_end(self, role: Role) -> str:
        """The end of a last turn of `role`, where it ends otherwise if turns follow; else "".

        What is to follow brings the right end with it: `delta` does, and `generation_prompt`, both where
        they are told that the turn is not closed.
        """
        end = self._ends.get(role)
        if end is None:
            end = "" if self.closing(role) else self._alone(self._stand_in(role), None, False, role)
            self._ends[role] = end
        return end

    def generation_prompt(self, last_role: Role, *, tools: bool = False, closed: bool = True) -> str:
        """Render what `add_generation_prompt` puts behind a turn of `last_role`. Raises BadRequest.

        `tools`: there are some. Which ones is told before the turn's end (see `closing`). `closed`: the
        branch holds the turn's end, also one that depends on what follows.
        """
        shown = [TOOL] if tools and last_role == "system" else None
        key = last_role, shown is not None, closed
        prompt = self._prompts.get(key)
        if prompt is None:
            prompted = self._alone(self._stand_in(last_role), shown, True, last_role)
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
        before = self._stand_in(role)
        closing = self._alone(before, tools, False, role)
        following = [ANSWER] if role == "user" else [QUESTION]
        if role == "tool":
            following.append({**before[-1], "content": "R"})
        for each in following:
            try:
                continued = self._alone([*before, each], tools, False, role)
            except BadRequest:  # nothing of that kind may follow: nothing to compare with
                continue
            if not continued.startswith(closing):
                return ""
        return closing

    def _alone(
        self,
        conversation: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        generate: bool,
        role: Role,
    ) -> str:
        """Call `_after_marker` on stand-ins alone, for templates that need tools (Hermes' tool_use)."""
        try:
            return self._after_marker(conversation, tools, generate, role)
        except BadRequest:
            if tools:
                raise
            return self._after_marker(conversation, [TOOL], generate, role)

    def rest_after_eos(self, eos: str) -> str | None:
        """The rest of an assistant's `closing` where the model has sampled the token `eos` (its text).

        None: the template does not end turns with it; cut the token off and append `closing`.
        """
        closing = self.closing()
        at = closing.find(eos) if eos else -1
        if at < 0 or closing[:at].strip():
            return None
        return closing[at + len(eos) :]

    # --- stand-ins ------------------------------------------------------------------------------

    def _stand_in(self, role: Role, asked: Asked = NOTHING_ASKED) -> list[JsonObject]:
        """Make a `stand_in`, with what templates may look back at: a result's call, earlier results."""
        found = stand_in(role)
        if role == "tool":  # the called name is shown with a result
            found[1:1] = self.as_dicts([calling(asked if asked.calls else ASKED, 1)])
        if asked.again:
            between = [ANSWER, *found] if role == "user" else found[1:]
            found = [*self._earlier(asked), *between]
        return found

    def _earlier(self, asked: Asked) -> list[JsonObject]:
        """Make a question, with a result if there were some: the first one may have a mark."""
        return [QUESTION, *self.as_dicts([calling(ASKED, 1)]), RESULT] if asked.again else [QUESTION]

    def _after_marker(
        self,
        conversation: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        generate: bool,
        role: Role,
    ) -> str:
        text = self._tokenizer.render(conversation, tools, generate)
        # The first one: what the client sends stands behind it.
        _, found, after = text.partition(MARKER)
        if not found:
            raise BadRequest(
                f"this model's chat template does not show a {role!r} turn in its place, so the branch "
                "cannot be continued after it: open the session with template 'strict'"
            )
        return after

    def tells_effort(self) -> bool:
        """Whether the template tells the model how much to think."""
        try:
            low, high = (
                self._tokenizer.render([QUESTION], None, True, each) for each in ("low", "high")
            )
        except BadRequest:
            return False
        return low != high

    def lets_users_follow_results(self) -> bool:
        """Whether a user's turn may stand behind results of tools, before the answer to them."""
        calls = self.as_dicts([calling(ASKED, 1)])
        asking = [QUESTION, *calls, RESULT, {"role": "user", "content": MARKER}]
        try:
            return MARKER in self._tokenizer.render(asking, [TOOL], True)
        except BadRequest:
            return False

    def _system_can_stand(self, tools: Sequence[JsonObject] | None) -> bool:
        """Whether a system turn may be appended before the user turn is known."""
        shown = [TOOL] if tools else None
        stands = self._system_stands.get(shown is not None)
        if stands is None:
            followed = self._tokenizer.render([*stand_in("system"), QUESTION], shown)
            try:
                alone = self._tokenizer.render(stand_in("system"), shown)
            except BadRequest:  # it asks for a user turn
                alone = ""
            stands = MARKER in alone and followed.startswith(alone)
            self._system_stands[shown is not None] = stands
        return stands

    def _check_system(self, messages: Sequence[ChatMessage], text: str) -> None:
        """Raises BadRequest where the template skips a system turn in silence."""
        shown: str | None = None
        for message in messages:
            if message.role == "system" and message.content.strip():
                shown = self._tokenizer.unguarded(text) if shown is None else shown
                if message.content.strip() not in shown:
                    raise BadRequest(
                        "this model's chat template leaves a system turn out at this place: send it as "
                        "the first message, or as a part of a user turn"
                    )
