"""From one turn to the next: what comes back of a history, and what is computed ahead. Pure.

A stateless request brings its history; what it has in common with one that was here keeps its tokens
(`Histories`). Where the template leaves out the thought of an answer once others follow, the next prompt
is not what was sampled. Then what it begins with can be computed before it comes (`NextTurn.ahead`).
"""

from array import array
from collections.abc import Iterable, Sequence

import msgspec

from ramify.actors.calls.reader import Reader
from ramify.actors.calls.templates import MARKER
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.branches.tasks import Prepared
from ramify.actors.session.input.conversation import Conversation
from ramify.actors.session.input.template import ChatTemplate
from ramify.actors.tokenizer import Tokenizer
from ramify.actors.tokenizer.histories import Bound
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import Append, ChatMessage, Effort, JsonObject, Miss, Open, Usage

AHEAD = 16_384  # tokens that are computed ahead of a turn, at most
CHARS = 16  # of a token's text, at most about

Piece = tuple[str, "array[int]"]


class NextTurn:
    """Prepares the next turns of one session's conversations."""

    def __init__(self, state: SessionState, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._state = state
        self._tokenizer = tokenizer
        self._template = template

    def find(
        self, op: Append, text: str, tools: list[JsonObject] | None, effort: Effort | None
    ) -> Bound | None:
        """Find the history that a stateless request begins with. O(bytes)."""
        state, inside = self._state, self._tokenizer.inside_token
        if not state.binds or not op.messages or op.images:
            return None
        return state.histories.find(state.owner, op.messages, tools, effort, text, inside)

    def waits(self, op: Append) -> bool:
        """Whether `find` may wait for a store."""
        asks = self._state.binds and self._state.histories.waits
        return asks and any(message.role == "assistant" for message in op.messages or ())

    def prepared(self, prepared: Prepared) -> None:
        """Count an append that was prepared."""
        histories = self._state.histories
        histories.tokenized += prepared.tokenized
        if prepared.bound is not None:
            self._state.asked = prepared.pending.parts[0].text, prepared.bound
            histories.use(self._state.owner, prepared.bound)

    def answered(self, branch: SessionBranch, usage: Usage, asked: float, ended: float) -> Miss | None:
        """Remember the tokens of an answer that has ended, for when its history comes back.

        Returns why that history's tokens were computed again, if they were.
        """
        bound, pieces = self._history(branch)
        if bound is None:
            return None
        until = asked + branch.retain_s if branch.retain_s else 0.0
        self._state.histories.add(self._state.owner, bound, pieces, until)
        return bound.missed(usage.prompt, usage.cached, ended)

    def _history(self, branch: SessionBranch) -> tuple[Bound | None, list[Piece]]:
        """Return what was known of a stateless request, and the text and tokens behind that."""
        if self._state.asked is None:
            return None, []
        (text, bound), segments = self._state.asked, list(branch.segments)
        if segments[0].raw != text or any(each.messages for each in segments[1:]):
            return None, []  # a later turn, which only this session goes on from
        first = text[bound.chars :], segments[0].tokens[bound.length :]
        return bound, [first, *((each.raw, each.tokens[:]) for each in segments[1:])]

    def ahead(
        self, branch: SessionBranch, opened: Open, reader: Reader, calls: list[JsonObject]
    ) -> None:
        """Compute ahead the prompt of the next turn, up to what that turn says: an answer with a thought
        has ended, and the template leaves thoughts out of later prompts.

        A stateless client sends thoughts back behind calls if it did so before.
        """
        if self._state.ahead is None or not self._template.forgets:
            return
        (bound, pieces), segments = self._history(branch), branch.segments.copy()
        if bound is not None:
            messages = list(segments[0].messages)
            said = ChatMessage(role="assistant", content=reader.content, tool_calls=calls or None)
            if any(each.reasoning for each in messages):
                said = msgspec.structs.replace(said, reasoning=reader.reasoning or None)
            messages.append(said)

            def prompt() -> "array[int]":
                return self._prompt(messages, calls, opened, [*bound.pieces(), *pieces])
        elif opened.template == "strict":

            def prompt() -> "array[int]":
                found = Conversation.of(segments)
                pieces = [(each.raw, each.tokens) for each in segments]
                return (
                    self._prompt(found.messages, calls, opened, pieces) if not found.base else array("i")
                )
        else:
            return
        self._state.ahead(self._state.namespace, prompt)

    def _prompt(
        self,
        messages: Sequence[ChatMessage],
        calls: Sequence[JsonObject],
        opened: Open,
        pieces: Iterable[Piece],
    ) -> "array[int]":
        """Tokenize the next prompt, as far as it is known; no tokens if it begins with all `pieces`."""
        if not messages:  # they stand behind raw text
            return array("i")
        turn = ChatMessage(role="user", content=MARKER)
        if calls:
            name = calls[0]["function"]["name"]
            turn = ChatMessage(role="tool", content=MARKER, tool_call_id=calls[0]["id"], name=name)
        try:
            text = self._template.strict([*messages, turn], opened.tools, False, opened.effort)
        except BadRequest:  # no such turn may follow
            return array("i")
        text = text.partition(MARKER)[0]
        tokens: array[int] = array("i")
        chars = 0
        for raw, known in pieces:
            end = chars + len(raw)
            if not text.startswith(raw, chars) or self._tokenizer.inside_token(text, end):
                break
            tokens.extend(known)
            chars = end
        else:
            return array("i")
        behind = text[chars : chars + CHARS * AHEAD]
        after = tokens[-1] if tokens else None
        tokens.extend(self._tokenizer.encode_chat(behind, start=not tokens, after=after)[:AHEAD])
        return tokens
