"""Appending: what an `append` op puts on a branch, and the generation prompt before an answer.

Two steps. `prepare` decides which text goes where and tokenizes it: that takes time, changes
nothing, and may happen in another thread. `apply` checks the room and appends. Pure.

Template rules (rule 8 of docs/protocol.md). "append" renders only the new turns, as the difference that
the template adds to a conversation that ends like this branch. "strict" renders everything again and
moves the branch back to where the texts part. After a user's or a tool's turn the generation prompt is
appended at once, as a segment of its own, so that all of it can be computed before `generate` arrives;
a further `append` of messages takes that segment back first. So it does with the end of a turn that
depends on what follows (`Tail.PENDING`).
"""

import logging
from array import array
from collections.abc import Hashable, Iterable, Sequence

from msgspec.structs import replace

from ramify.actors.calls.templates import note
from ramify.actors.kit.memory import SEGMENT, TOKEN, json_size
from ramify.actors.kit.turns import Steps
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.segments import Tail
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.branches.tasks import (
    PartTokens,
    PendingAppend,
    PendingPart,
    Prepared,
)
from ramify.actors.session.input.conversation import (
    AROUND,
    StrictRendering,
    asked_of,
    eos_text,
    is_taken_back,
    length_of,
)
from ramify.actors.session.input.next_turn import NextTurn
from ramify.actors.session.input.shown import with_pictures
from ramify.actors.session.input.template import ChatTemplate
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.errors import BadRequest, RamifyError, TooLong
from ramify.protocol.wire import Append, ChatMessage, Effort, JsonObject, Open, Role

RENDERED = 8  # characters that a template writes in the time in which one is tokenized, about
LOT = 64  # parts that are appended in one go: a strict template may bring all turns anew
PART = 4  # what it costs to append one (see `Work`)
log = logging.getLogger(__name__)


class BranchWriter:
    """Puts input on the branches of one session, and opens and closes turns around a generation."""

    def __init__(self, state: SessionState, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._state = state
        self.tokenizer = tokenizer
        self._template = template
        self.strict = StrictRendering(template, tokenizer.inside_token)
        self.speech = template.speech
        self.turns = NextTurn(state, tokenizer, template)
        # Ids that the model does not have: it would fail as a whole, with everybody on it.
        self.unknown = tokenizer.beyond(state.vocab)

    def rewritten(self, *, tools: bool) -> str | None:
        """What a client of append mode should know of the template. `tools`: the client has some."""
        return note(self._template.rewrites, tools=tools)

    # --- append: prepare ---------------------------------------------------------------------

    def situation(self, branch: SessionBranch, op: Append, *, strict: bool) -> Hashable:
        """All that `prepare` depends on. Branches with equal situations share one `Prepared`. O(1)."""
        if op.messages is not None and strict:
            return branch.segments.top
        tail, role, over_prompt = self._end(branch, op)
        at = branch.segments[-1].start if over_prompt else branch.position
        eos = eos_text(branch) if tail is Tail.EOS else ""
        asked = asked_of(branch, op.messages or (), ())
        return tail, role, over_prompt, eos, at == 0, self._after(branch, at), asked

    def size(self, branch: SessionBranch, op: Append, *, strict: bool, tools: int = 0) -> int:
        """About how many characters `prepare` has to work on. `tools`: bytes of JSON, which the template
        is shown each time if it is strict or writes them late; where it writes them, they are tokenized.
        """
        if op.tokens is not None:
            return len(op.tokens)
        if op.text is not None:
            return len(op.text)
        size = sum(
            len(message.content) + len(message.reasoning or "") + json_size(message.tool_calls) + AROUND
            for message in op.messages or ()
        )
        again = strict or self._template.late_tools
        size += tools if branch.position == 0 else tools // RENDERED * again
        return size + length_of(branch) if strict else size

    def prepare(
        self,
        branch: SessionBranch,
        op: Append,
        *,
        strict: bool,
        tools: list[JsonObject] | None,
        room: int,
        effort: Effort | None = None,
    ) -> Prepared:
        """Make the text and tokens that `op` appends. No tokens if they certainly need more than `room`.

        Raises BadRequest. Changes nothing: another thread may run it while the branch is at rest.
        """
        pending = self._pending(branch, op, tools, effort, strict=strict)
        if op.images:
            party = self._state.owner or self._state.number
            pending = with_pictures(pending, op.images, self._state.pictures, party)
        if pending.tokens is not None:
            return Prepared(pending, [_encoded(pending.tokens)])
        least = sum(self.tokenizer.least_tokens(part.text) for part in pending.parts)
        if least > room:
            return Prepared(replace(pending, least=least), None)
        encoded: list[PartTokens] = []
        tokenized = 0
        start, after = pending.start, pending.after
        bound = None
        if pending.start and not strict:
            bound = self.turns.find(op, pending.parts[0].text, tools, effort)
        known = bound.tokens() if bound is not None else array("i")
        for part in pending.parts:
            if part.ids is not None:
                encoded.append(_encoded(part.ids))
                start, after = False, self.tokenizer.context(part.ids[-1])
                continue
            text = part.text
            if known and bound is not None and part is pending.parts[0]:
                text, start, after = text[bound.chars :], False, self.tokenizer.context(known[-1])
            if not part.chat:
                tokens = self.tokenizer.encode(text, start=start, special=op.special, after=after)
            else:
                tokens = self.tokenizer.encode_chat(text, start=start, after=after) if text else []
            self.check(tokens)
            tokenized += len(tokens)
            before = known if part is pending.parts[0] else array("i")
            encoded.append(_encoded(tokens, before))
            if encoded[-1].tokens:
                start, after = False, encoded[-1].tokens[-1]
        told = pending.start and not strict
        marks = self._marks(op, pending, encoded[0], tools, effort, told=told) if op.marks else []
        return Prepared(pending, encoded, tokenized, bound, marks)

    def _marks(
        self, op: Append, pending: PendingAppend, encoded: PartTokens, tools: list[JsonObject] | None,
        effort: Effort | None, *, told: bool,
    ) -> list[int | None]:  # fmt: skip
        """Count the tokens before each of `marks`. `told`: the template tells where they are."""
        if op.messages is None:
            return []
        text = pending.parts[0].text
        places: list[int | None] = [None for _ in op.marks]
        if op.images:  # the text is in several parts
            return places
        if told:
            places = self._template.places(op.messages, op.marks, text, tools, effort)
        return self.tokenizer.tokens_before(encoded.tokens, text, places)

    def room(self, branches: Iterable[str]) -> int:
        """The most tokens that any of these branches has room for."""
        known = (self._state.branches.get(name) for name in branches)
        lengths = [_before_prompt(branch) for branch in known if branch is not None]
        return self._state.context - min(lengths, default=0)

    # --- append: apply -----------------------------------------------------------------------

    def apply(self, branch: SessionBranch, prepared: Prepared, op: int) -> Steps[int | None]:
        """Append what was prepared, in parts. Returns where the branch was moved back to, if it was.

        Raises TooLong or LimitExceeded at its first step, and then nothing has changed.
        """
        state, pending = self._state, prepared.pending
        cut = _cut(branch, pending)
        removed = branch.position - cut if cut is not None else 0
        if prepared.encoded is None:
            state.room(branch, pending.least - removed, at_least=True)
            raise TooLong("the text was longer than the room there was: send it again")
        tokens = sum(len(each.tokens) for each in prepared.encoded)
        state.room(branch, tokens - removed)
        messages = [message for part in pending.parts for message in part.messages]
        chars = 2 * sum(len(part.text) for part in pending.parts)
        chars += state.room_for(branch, [part.picture for part in pending.parts if part.picture])
        chars += sum(len(message.content) + len(message.reasoning or "") for message in messages)
        state.meter.require(SEGMENT * (1 + len(messages)) + TOKEN * tokens + chars)
        if cut is not None:
            state.truncate(branch, cut)
        parts = zip(pending.parts, prepared.encoded, strict=True)
        for number, (part, encoded) in enumerate(parts, 1):
            if number % LOT == 0:
                yield PART * LOT
            state.extend(
                branch,
                encoded.tokens,
                self.tokenizer.unguarded(part.text),
                packed=encoded.packed,
                raw=part.text,
                tail=part.tail,
                role=part.role,
                op=op if part.op is None else part.op,
                messages=part.messages,
                turn=part.turn,
                chat=part.chat,
                history=part.history,
                picture=part.picture,
            )
        return cut

    def begins(self, branch: SessionBranch, prepared: Prepared) -> int:
        """The position at which what is appended will begin."""
        cut = _cut(branch, prepared.pending)
        return branch.position if cut is None else cut

    # --- pending appends ----------------------------------------------------------------------

    def _pending(
        self,
        branch: SessionBranch,
        op: Append,
        tools: list[JsonObject] | None,
        effort: Effort | None,
        *,
        strict: bool,
    ) -> PendingAppend:
        if op.messages is not None and strict:
            parts, at = self.strict.append(branch, op.messages, tools, effort)
            if any(each.picture is not None and each.end > at for each in branch.segments):
                raise BadRequest(
                    "the template now writes a turn with a picture otherwise than before: open with the "
                    'rule "append", which leaves it as it is, or say the conversation on a new branch'
                )
            return PendingAppend(parts, at == 0, self._after(branch, at), cut=at)
        tail, role, over_prompt = self._end(branch, op)
        at = branch.segments[-1].start if over_prompt else branch.position
        after = self._after(branch, at)
        if op.messages is not None:
            text = self._added(branch, tail, role, op.messages, tools, effort)
            parts = self._parts(text, op.messages)
            return PendingAppend(parts, at == 0, after, over_prompt=over_prompt)
        if op.tokens is not None:
            self.check(op.tokens, "tokens")
        text = self.tokenizer.decode(op.tokens) if op.tokens is not None else op.text or ""
        return PendingAppend(
            [PendingPart(text, False, tail, role, turn=1)], at == 0, after, tokens=op.tokens
        )

    def _end(self, branch: SessionBranch, op: Append) -> tuple[Tail, Role | None, bool]:
        """Tell how the branch ends, where messages follow; how it will end, where text or tokens do.

        Returns its tail, its role, and whether the last segment is taken back: a generation prompt
        without an answer, or the end of a turn that depends on what follows.
        """
        tail, role = branch.tail, branch.role
        if op.messages is None:
            if tail is Tail.CLOSED and role in ("user", "tool") and not self._prompt(role):
                return Tail.OPEN, "assistant", False  # into its mouth, as behind a prompt
            opened = tail in (Tail.PROMPT, Tail.OPEN)
            return (Tail.OPEN, role, False) if opened else (Tail.RAW, None, False)
        if not is_taken_back(branch):
            return tail, role, False
        before = branch.segments[-2] if len(branch.segments) > 1 else None
        return (before.tail, before.role, True) if before else (Tail.RAW, None, True)

    def _added(
        self,
        branch: SessionBranch,
        tail: Tail,
        role: Role | None,
        messages: Sequence[ChatMessage],
        tools: list[JsonObject] | None,
        effort: Effort | None,
    ) -> str:
        """Render what the template adds for `messages` behind a branch with this tail and role."""
        if tail is Tail.RAW or role is None:
            return self._template.first(messages, tools, False, effort)
        closed = tail not in (Tail.OPEN, Tail.PENDING)
        asked = asked_of(branch, messages, self.tokenizer.eos_texts)
        text = self._template.delta(role, closed, messages, tools, False, asked)
        return self._after_eos(branch) + text if tail is Tail.EOS else text

    def _after_eos(self, branch: SessionBranch) -> str:
        """The text that the template puts behind the end-of-turn token at the branch's end."""
        return self._template.rest_after_eos(eos_text(branch)) or ""

    def _parts(self, text: str, messages: Sequence[ChatMessage]) -> list[PendingPart]:
        role = messages[-1].role
        end = self._template.pending_end(role)
        pending = end != "" and text.endswith(end)
        tail = Tail.PENDING if pending else Tail.CLOSED
        text = text[: len(text) - len(end)] if pending else text
        parts = [PendingPart(text, True, tail, role, messages=messages, turn=1)]
        if role in ("user", "tool"):
            prompt = self._prompt(role, closed=not pending)
            if prompt:
                parts.append(PendingPart(prompt, True, Tail.PROMPT, "assistant"))
        elif pending:
            parts.append(PendingPart(end, True, Tail.CLOSED, role))
        return parts

    def _prompt(self, role: Role, *, closed: bool = True) -> str:
        return self._template.generation_prompt(role, closed=closed)

    # --- around a generation -----------------------------------------------------------------

    def open_turn(
        self,
        branch: SessionBranch,
        opened: Open,
        opening: str = "",
        *,
        known: dict[Hashable, str | RamifyError] | None = None,
    ) -> int | None:
        """Make the branch ready for an answer: after a complete turn, add the generation prompt.

        `opened`: the client's settings. `known`: prompts that took a rendering of the whole
        conversation, or why there is none (see `StrictRendering.unrendered`). `opening`: what the answer
        has to begin with; returns where that stands, None without it.
        Raises BadRequest, TooLong, and then nothing has changed.
        """
        tail, role = branch.tail, branch.role
        prompt: list[int] = []
        text = ""
        if tail in (Tail.CLOSED, Tail.EOS, Tail.PENDING) and role is not None:
            text = self.strict.prompt_behind(branch, role, opened, {} if known is None else known)
            if tail is Tail.EOS:
                text = self._after_eos(branch) + text
            prompt = self._continue(branch, text) if text else []
            self.check(prompt)
        said = self._said(branch, prompt, opening) if opening else []
        if prompt or said:
            self._state.room(branch, len(prompt) + len(said) + 1)
        if text:
            self._state.extend(branch, prompt, text, tail=Tail.PROMPT, role="assistant", chat=True)
        if not opening:
            return None
        at = branch.position
        self._state.extend(branch, said, opening, tail=Tail.OPEN, role="assistant")
        return at

    def _said(self, branch: SessionBranch, prompt: list[int], opening: str) -> list[int]:
        """Tokenize an opening that stands behind `prompt`, or behind the branch."""
        after = self.tokenizer.context(prompt[-1]) if prompt else self._after(branch, branch.position)
        tokens = self._counted(self.tokenizer.encode_chat(opening, after=after))
        self.check(tokens)
        return tokens

    def close_turn(self, branch: SessionBranch) -> None:
        """Append the template's end of an assistant's turn, as far as there is room."""
        text = self._template.closing("assistant")
        tokens = self._continue(branch, text) if text else []
        if not self.unknown.keys().isdisjoint(tokens):
            log.warning("the model has no token for the end of a turn", extra={"text": text})
        elif tokens and branch.position + len(tokens) <= self._state.context:
            self._state.extend(branch, tokens, text, tail=Tail.CLOSED, role="assistant", chat=True)

    def continue_output(self, branch: SessionBranch, text: str) -> list[int]:
        """Tokenize `text` behind the branch: the model has said it as a part of other tokens."""
        after = self._after(branch, branch.position)
        tokens = self._counted(self.tokenizer.encode(text, special=False, after=after))
        if self.unknown.keys().isdisjoint(tokens):
            return tokens
        known = [token for token in tokens if token not in self.unknown]
        log.warning("text that the model said has tokens that it does not have", extra={"text": text})
        return known

    def end_of_thought(self, branch: SessionBranch) -> list[int]:
        """Tokenize the end of the thought inside which the branch ends."""
        tokens = self._continue(branch, self.speech.end_of_thought)
        return tokens if self.unknown.keys().isdisjoint(tokens) else []

    def end_of_turn(self, token: int) -> str | None:
        """The text of `token` if the template ends an assistant's turn with it, else None."""
        text = self.tokenizer.decode([token], special=True)
        return text if self._template.rest_after_eos(text) is not None else None

    # --- tokens ------------------------------------------------------------------------------

    def _continue(self, branch: SessionBranch, text: str) -> list[int]:
        return self._counted(
            self.tokenizer.encode_chat(text, after=self._after(branch, branch.position))
        )

    def _counted(self, tokens: list[int]) -> list[int]:
        self._state.histories.tokenized += len(tokens)
        return tokens

    def _after(self, branch: SessionBranch, at: int) -> int | None:
        """The token before position `at`; None: it does not change how text behind it is tokenized."""
        link = branch.segments.before(at)
        if link is None:
            return None
        return self.tokenizer.context(link.segment.tokens[at - link.segment.start - 1])

    def check(self, tokens: Sequence[int], field: str | None = None) -> None:
        """Raises BadRequest for an id that the model does not have. `field`: where a client gave ids."""
        size = self._state.vocab
        if (field is None and not self.unknown) or max(tokens, default=0) < size:
            return
        at = next(i for i, token in enumerate(tokens) if token >= size)
        token = tokens[at]
        details = {"token": token, "vocab": size}
        if field is not None:
            raise BadRequest(
                f"{field}[{at}] is {token}: the model's vocabulary has {size} tokens, 0 to {size - 1}",
                details=details,
            )
        raise BadRequest(
            f"{self.unknown.get(token, '')!r} is token {token} of the tokenizer, but the model's "
            f"vocabulary has {size} tokens, 0 to {size - 1}: leave it out, or serve a model whose "
            "embedding was resized for this tokenizer",
            details=details,
        )


def _encoded(tokens: Sequence[int], before: "array[int] | None" = None) -> PartTokens:
    packed = array("i", tokens) if before is None else before + array("i", tokens)
    return PartTokens(packed, packed.tobytes())


def _before_prompt(branch: SessionBranch) -> int:
    """Where an append to the branch begins at the earliest, if it takes back what `_end` says."""
    return branch.segments[-1].start if is_taken_back(branch) else branch.position


def _cut(branch: SessionBranch, pending: PendingAppend) -> int | None:
    """The position to which the branch is moved back first; None: it stays."""
    cut = branch.segments[-1].start if pending.over_prompt else pending.cut
    return cut if cut is not None and cut < branch.position else None
