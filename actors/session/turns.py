"""Appending: what an `append` op puts on a branch, and the generation prompt before an answer.

Two steps, so that long text can be tokenized off the event loop in between: `draft` decides which
text goes where and changes nothing; `apply` checks the room and appends. Pure.

Template rules (protocol, rule 8). "append" renders only the new turns, as the difference that the
template adds to a conversation that ends like this branch. "strict" renders everything again and
moves the branch back to where the texts part. After a user's or a tool's turn the generation
prompt is appended at once, as a piece of its own, so that all of it can be computed before
`generate` arrives; a further `append` of messages takes that piece back first.
"""

from collections.abc import Sequence

import msgspec

from ramify.actors.session.branch import Branch
from ramify.actors.session.meter import PIECE, TOKEN
from ramify.actors.session.outbox import Part
from ramify.actors.session.pieces import OutputPiece, Tail
from ramify.actors.session.state import SessionState
from ramify.actors.session.template import ChatTemplate
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import Append, ChatMessage, JsonObject

LONG_TEXT = 16_384  # characters: above, tokenizing would hold up the event loop for milliseconds


class Draft(msgspec.Struct, frozen=True):
    """An append that is decided on but not done. `cut`: move the branch back to there first."""

    parts: list[Part]
    cut: int | None = None
    messages: Sequence[ChatMessage] = ()
    tokens: Sequence[int] | None = None  # given as tokens: nothing to encode

    @property
    def long(self) -> bool:
        return sum(len(part.text) for part in self.parts) > LONG_TEXT


class Turns:
    """Appends to the branches of one session."""

    def __init__(self, state: SessionState, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._state = state
        self.tokenizer = tokenizer
        self._template = template

    # --- append ------------------------------------------------------------------------------

    def draft(
        self, branch: Branch, op: Append, *, strict: bool, tools: list[JsonObject] | None
    ) -> Draft:
        """Decide what `op` appends. Raises BadRequest; changes nothing."""
        if op.tokens is not None:
            return self._draft_tokens(op.tokens)
        if op.text is not None:
            tail = Tail.OPEN if branch.tail in (Tail.PROMPT, Tail.OPEN) else Tail.RAW
            role = branch.role if tail is Tail.OPEN else None
            return Draft([Part(op.text, False, branch.position == 0, tail, role)])
        assert op.messages is not None
        if strict:
            return self._draft_strict(branch, op.messages, tools)
        return self._draft_messages(branch, op.messages, tools)

    def encode(self, part: Part) -> list[int]:
        """Tokens of a part. May be called from another thread."""
        if part.chat:
            return self.tokenizer.encode_chat(part.text, start=part.start)
        return self.tokenizer.encode(part.text, start=part.start)

    def apply(
        self, branch: Branch, draft: Draft, encoded: Sequence[Sequence[int]], op: int
    ) -> int | None:
        """Append the draft. Returns where the branch was moved back to, if it was.

        Raises TooLong or LimitExceeded, and then nothing has changed.
        """
        state = self._state
        cut = draft.cut if draft.cut is not None and draft.cut < branch.position else None
        removed = branch.position - cut if cut is not None else 0
        count = sum(map(len, encoded)) + len(draft.tokens or ())
        state.room(branch, count - removed)
        chars = 2 * sum(len(part.text) for part in draft.parts)
        chars += sum(len(message.content) for message in draft.messages)
        state.meter.require(PIECE * (1 + len(draft.messages)) + TOKEN * count + chars)
        if cut is not None:
            state.truncate(branch, cut)
        if draft.tokens is not None:
            tail = Tail.OPEN if branch.tail in (Tail.PROMPT, Tail.OPEN) else Tail.RAW
            text = self.tokenizer.decode(draft.tokens)
            role = branch.role if tail is Tail.OPEN else None
            state.extend(branch, draft.tokens, text, tail=tail, role=role, op=op, turn=True)
        for part, tokens in zip(draft.parts, encoded, strict=False):
            state.extend(
                branch,
                tokens,
                self.tokenizer.unguarded(part.text),
                raw=part.text,
                tail=part.tail,
                role=part.role,
                op=op,
                messages=() if part.prompt else draft.messages,
                turn=not part.prompt,
            )
        return cut

    def _draft_tokens(self, tokens: Sequence[int]) -> Draft:
        size = self.tokenizer.vocab_size
        for i, token in enumerate(tokens):
            if token >= size:
                raise BadRequest(
                    f"tokens[{i}] is {token}: the vocabulary has {size} tokens", details={"vocab": size}
                )
        return Draft([], tokens=tokens)

    def _draft_messages(
        self, branch: Branch, messages: Sequence[ChatMessage], tools: list[JsonObject] | None
    ) -> Draft:
        cut: int | None = None
        tail, role = branch.tail, branch.role
        if tail is Tail.PROMPT:  # nothing was generated: take the generation prompt back
            prompt = branch.pieces[-1]
            cut = prompt.start
            before = branch.pieces[-2] if len(branch.pieces) > 1 else None
            tail, role = (before.tail, before.role) if before else (Tail.RAW, None)
        at = branch.position if cut is None else cut
        if tail is Tail.RAW or role is None:
            text = self._template.first(messages, tools, False)
            return self._parts(text, messages, cut, first=at == 0)
        text = self._template.delta(role, tail is not Tail.OPEN, messages, tools, False)
        if tail is Tail.EOS:
            text = self._after_eos(branch) + text
        return self._parts(text, messages, cut, first=False)

    def _after_eos(self, branch: Branch) -> str:
        """What the template puts behind the end-of-turn token that the branch ends with."""
        for piece in reversed(branch.pieces):
            if isinstance(piece, OutputPiece):
                return self._template.rest_after_eos(piece.eos_text) or ""
        return ""

    def _parts(
        self, text: str, messages: Sequence[ChatMessage], cut: int | None, *, first: bool
    ) -> Draft:
        role = messages[-1].role
        parts = [Part(text, True, first, Tail.CLOSED, role)]
        if role in ("user", "tool"):
            prompt = self._template.generation_prompt(role)
            if prompt:
                parts.append(Part(prompt, True, False, Tail.PROMPT, "assistant", prompt=True))
        return Draft(parts, cut, messages)

    # --- strict ------------------------------------------------------------------------------

    def _draft_strict(
        self, branch: Branch, messages: Sequence[ChatMessage], tools: list[JsonObject] | None
    ) -> Draft:
        turns: list[ChatMessage] = []
        for piece in branch.pieces:
            if isinstance(piece, OutputPiece):
                turns.append(ChatMessage(role="assistant", content=piece.text))
            else:
                turns.extend(piece.messages)
        text = self._template.strict([*turns, *messages], tools, False)
        at, chars = self._common(branch, text)
        return self._parts(text[chars:], messages, at, first=at == 0)

    def _common(self, branch: Branch, rendered: str) -> tuple[int, int]:
        """(position, characters of `rendered`) up to which the branch's text is a prefix of it.

        Only borders of pieces and marks of outputs count: elsewhere no position names the text.
        Pieces keep their rendered text with its guards, so equal turns compare equal.
        """
        position = chars = 0
        for piece in branch.pieces:
            raw = piece.raw
            if rendered.startswith(raw, chars):
                position, chars = piece.end, chars + len(raw)
                continue
            if isinstance(piece, OutputPiece):
                common = _common_prefix(raw, rendered[chars : chars + len(raw)])
                mark = piece.offset_mark(common)
                position = piece.mark_position(mark)
                chars += sum(map(len, piece.chunks[:mark]))
            break
        return position, chars

    # --- around a generation -----------------------------------------------------------------

    def open_turn(self, branch: Branch, tools: list[JsonObject] | None) -> None:
        """Make the branch ready for an answer: after a complete turn, add the generation prompt."""
        tail, role = branch.tail, branch.role
        if tail not in (Tail.CLOSED, Tail.EOS) or role is None:
            return
        text = self._template.generation_prompt(role, tools)
        if tail is Tail.EOS:
            text = self._after_eos(branch) + text
        if text:
            tokens = self.tokenizer.encode_chat(text)
            self._state.room(branch, len(tokens) + 1)
            self._state.extend(branch, tokens, text, tail=Tail.PROMPT, role="assistant")

    def close_turn(self, branch: Branch) -> None:
        """Append the template's end of an assistant's turn, as far as there is room."""
        text = self._template.closing("assistant")
        tokens = self.tokenizer.encode_chat(text) if text else []
        if tokens and branch.position + len(tokens) <= self._state.context:
            self._state.extend(branch, tokens, text, tail=Tail.CLOSED, role="assistant")

    def end_of_turn(self, token: int) -> str | None:
        """The text of `token` if the template ends an assistant's turn with it, else None."""
        text = self.tokenizer.decode([token], special=True)
        return text if self._template.rest_after_eos(text) is not None else None


def _common_prefix(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:  # binary search: slices compare at memory speed
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
