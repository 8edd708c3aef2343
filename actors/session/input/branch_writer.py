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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

import msgspec

from ramify.actors.calls.templates import CALL_ID, NOTHING_ASKED, Asked, note
from ramify.actors.kit.memory import SEGMENT, TOKEN, json_size
from ramify.actors.kit.turns import Steps
from ramify.actors.session.branches.branch import Branch
from ramify.actors.session.branches.segments import History, InputSegment, OutputSegment, Segment, Tail
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.branches.tasks import (
    PartTokens,
    PendingAppend,
    PendingPart,
    Prepared,
)
from ramify.actors.session.input.conversation import (
    Border,
    Conversation,
    borders,
    common,
    common_prefix,
    history_before,
)
from ramify.actors.session.input.template import ChatTemplate
from ramify.actors.tokenizer import Tokenizer
from ramify.actors.tokenizer.histories import Bound
from ramify.protocol.errors import BadRequest, RamifyError, TooLong
from ramify.protocol.wire import Append, ChatMessage, Effort, JsonObject, Miss, Open, Role, Usage

RENDERED = 8  # characters that a template writes in the time in which one is tokenized, about
LOT = 64  # parts that are appended in one go: a strict template may bring all turns anew
PART = 4  # what it costs to append one (see `Work`)
AROUND = 64  # characters that a turn counts for, beside its text
LOOK_BACK = 256  # messages that are searched for calls and results
ENDING = 32  # characters of a message that its end is known by
log = logging.getLogger(__name__)


class Unrendered(NamedTuple):
    """A generation prompt that takes a rendering of the whole conversation: `run`.

    `size`: about how many characters that works on. `key`: branches with the same one share it.
    """

    key: Hashable
    size: int
    run: Callable[[], str]


class BranchWriter:
    """Puts input on the branches of one session, and opens and closes turns around a generation."""

    def __init__(self, state: SessionState, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._state = state
        self.tokenizer = tokenizer
        self._template = template
        self.speech = template.speech
        # Ids that the model does not have: it would fail as a whole, with everybody on it.
        self._unknown = tokenizer.beyond(state.vocab)

    def rewritten(self, *, tools: bool) -> str | None:
        """What a client of append mode should know of the template. `tools`: the client has some."""
        return note(self._template.rewrites, tools=tools)

    # --- append: prepare ---------------------------------------------------------------------

    def situation(self, branch: Branch, op: Append, *, strict: bool) -> Hashable:
        """All that `prepare` depends on: branches with equal situations share one `Prepared`. O(1)."""
        if op.messages is not None and strict:
            return branch.segments.top
        tail, role, over_prompt = self._end(branch, op)
        at = branch.segments[-1].start if over_prompt else branch.position
        eos = _eos_text(branch) if tail is Tail.EOS else ""
        asked = _asked(branch, op.messages or (), ())
        return tail, role, over_prompt, eos, at == 0, self._after(branch, at), asked

    def size(self, branch: Branch, op: Append, *, strict: bool, tools: int = 0) -> int:
        """About how many characters `prepare` has to work on. `tools`: bytes of JSON, which the template
        is shown each time; only where it writes them are they tokenized too.
        """
        if op.tokens is not None:
            return len(op.tokens)
        if op.text is not None:
            return len(op.text)
        size = sum(
            len(message.content) + len(message.reasoning or "") + json_size(message.tool_calls) + AROUND
            for message in op.messages or ()
        )
        size += tools if branch.position == 0 else tools // RENDERED
        return size + _history(branch) if strict else size

    def prepare(
        self,
        branch: Branch,
        op: Append,
        *,
        strict: bool,
        tools: list[JsonObject] | None,
        room: int,
        effort: Effort | None = None,
    ) -> Prepared:
        """The text and tokens that `op` appends. No tokens if they certainly need more than `room`.

        Raises BadRequest. Changes nothing: another thread may run it while the branch is at rest.
        """
        pending = self._pending(branch, op, tools, effort, strict=strict)
        if pending.tokens is not None:
            return Prepared(pending, [_encoded(pending.tokens)])
        least = sum(self.tokenizer.least_tokens(part.text) for part in pending.parts)
        if least > room:
            return Prepared(msgspec.structs.replace(pending, least=least), None)
        encoded: list[PartTokens] = []
        tokenized = 0
        start, after = pending.start, pending.after
        bound = self._bound(op, pending, tools, effort) if not strict else None
        known = bound.tokens() if bound is not None else array("i")
        for part in pending.parts:
            text = part.text
            if known and bound is not None and part is pending.parts[0]:
                text, start, after = text[bound.chars :], False, self.tokenizer.context(known[-1])
            if not part.chat:
                tokens = self.tokenizer.encode(text, start=start, special=op.special, after=after)
            else:
                tokens = self.tokenizer.encode_chat(text, start=start, after=after) if text else []
            self._check(tokens)
            tokenized += len(tokens)
            before = known if part is pending.parts[0] else array("i")
            encoded.append(_encoded(tokens, before))
            if encoded[-1].tokens:
                start, after = False, encoded[-1].tokens[-1]
        return Prepared(pending, encoded, tokenized, bound)

    def _bound(
        self,
        op: Append,
        pending: PendingAppend,
        tools: list[JsonObject] | None,
        effort: Effort | None,
    ) -> Bound | None:
        """What is known of the history that a stateless request begins with. O(bytes)."""
        state = self._state
        if not state.binds or not op.messages or not pending.start:
            return None
        text, inside = pending.parts[0].text, self.tokenizer.inside_token
        return state.histories.find(state.owner, op.messages, tools, effort, text, inside)

    def waits(self, op: Append) -> bool:
        """Whether `prepare` may wait for a store."""
        asks = self._state.binds and self._state.histories.waits
        return asks and any(message.role == "assistant" for message in op.messages or ())

    def prepared(self, prepared: Prepared) -> None:
        """Count an append that was prepared."""
        histories = self._state.histories
        histories.tokenized += prepared.tokenized
        if prepared.bound is not None:
            self._state.asked = prepared.pending.parts[0].text, prepared.bound
            histories.use(self._state.owner, prepared.bound)

    def answered(self, branch: Branch, usage: Usage, asked: float, ended: float) -> Miss | None:
        """An answer has ended: if the history comes back, it goes on with these tokens.

        Returns why that history's tokens were computed again, if they were.
        """
        if self._state.asked is None:
            return None
        (text, bound), segments = self._state.asked, list(branch.segments)
        if segments[0].raw != text or any(each.messages for each in segments[1:]):
            return None  # a later turn, which only this session goes on from
        known = bound.length
        pieces = [(text[bound.chars :], segments[0].tokens[known:])]
        pieces += [(each.raw, each.tokens[:]) for each in segments[1:]]
        until = asked + branch.retain_s if branch.retain_s else 0.0
        self._state.histories.add(self._state.owner, bound, pieces, until)
        return bound.missed(usage.prompt, usage.cached, ended)

    def room(self, branches: Iterable[str]) -> int:
        """The most tokens that any of these branches has room for."""
        known = (self._state.branches.get(name) for name in branches)
        lengths = [_before_prompt(branch) for branch in known if branch is not None]
        return self._state.context - min(lengths, default=0)

    # --- append: apply -----------------------------------------------------------------------

    def apply(self, branch: Branch, prepared: Prepared, op: int) -> Steps[int | None]:
        """Append it, in parts. Returns where the branch was moved back to, if it was.

        Raises TooLong or LimitExceeded at its first step, and then nothing has changed.
        """
        state, pending = self._state, prepared.pending
        cut = _cut(branch, pending)
        removed = branch.position - cut if cut is not None else 0
        if prepared.encoded is None:
            state.room(branch, pending.least - removed, at_least=True)
            raise TooLong("the text was longer than the room there was: send it again")
        count = sum(len(each.tokens) for each in prepared.encoded)
        state.room(branch, count - removed)
        messages = [message for part in pending.parts for message in part.messages]
        chars = 2 * sum(len(part.text) for part in pending.parts)
        chars += sum(len(message.content) + len(message.reasoning or "") for message in messages)
        state.meter.require(SEGMENT * (1 + len(messages)) + TOKEN * count + chars)
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
            )
        return cut

    def begins(self, branch: Branch, prepared: Prepared) -> int:
        """Where what is appended will stand."""
        cut = _cut(branch, prepared.pending)
        return branch.position if cut is None else cut

    # --- pending appends ----------------------------------------------------------------------

    def _pending(
        self,
        branch: Branch,
        op: Append,
        tools: list[JsonObject] | None,
        effort: Effort | None,
        *,
        strict: bool,
    ) -> PendingAppend:
        if op.messages is not None and strict:
            return self._append_strict(branch, op.messages, tools, effort)
        tail, role, over_prompt = self._end(branch, op)
        at = branch.segments[-1].start if over_prompt else branch.position
        after = self._after(branch, at)
        if op.messages is not None:
            text = self._added(branch, tail, role, op.messages, tools, effort)
            parts = self._parts(text, op.messages)
            return PendingAppend(parts, at == 0, after, over_prompt=over_prompt)
        if op.tokens is not None:
            self._check(op.tokens, "tokens")
        text = self.tokenizer.decode(op.tokens) if op.tokens is not None else op.text or ""
        return PendingAppend(
            [PendingPart(text, False, tail, role, turn=1)], at == 0, after, tokens=op.tokens
        )

    def _end(self, branch: Branch, op: Append) -> tuple[Tail, Role | None, bool]:
        """How the branch ends, for messages; how it will end, for text and tokens.

        The third: the last segment is taken back: a generation prompt to which nothing was said, or the
        end of a turn that depends on what follows.
        """
        tail, role = branch.tail, branch.role
        if op.messages is None:
            if tail is Tail.CLOSED and role in ("user", "tool") and not self._prompt(role):
                return Tail.OPEN, "assistant", False  # into its mouth, as behind a prompt
            opened = tail in (Tail.PROMPT, Tail.OPEN)
            return (Tail.OPEN, role, False) if opened else (Tail.RAW, None, False)
        if not _is_taken_back(branch):
            return tail, role, False
        before = branch.segments[-2] if len(branch.segments) > 1 else None
        return (before.tail, before.role, True) if before else (Tail.RAW, None, True)

    def _added(
        self,
        branch: Branch,
        tail: Tail,
        role: Role | None,
        messages: Sequence[ChatMessage],
        tools: list[JsonObject] | None,
        effort: Effort | None,
    ) -> str:
        """What the template adds for `messages` behind a branch that ends so."""
        if tail is Tail.RAW or role is None:
            return self._template.first(messages, tools, False, effort)
        closed = tail not in (Tail.OPEN, Tail.PENDING)
        asked = _asked(branch, messages, self.tokenizer.eos_texts)
        text = self._template.delta(role, closed, messages, tools, False, asked)
        return self._after_eos(branch) + text if tail is Tail.EOS else text

    def _after_eos(self, branch: Branch) -> str:
        """What the template puts behind the end-of-turn token that the branch ends with."""
        return self._template.rest_after_eos(_eos_text(branch)) or ""

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

    # --- strict ------------------------------------------------------------------------------

    def _append_strict(
        self,
        branch: Branch,
        messages: Sequence[ChatMessage],
        tools: list[JsonObject] | None,
        effort: Effort | None,
    ) -> PendingAppend:
        before = Conversation.of(branch.segments)
        every = [*before.messages, *messages]
        try:
            closed = self._template.strict(every, tools, False, effort)
        except BadRequest as error:
            if messages[-1].role != "system":
                raise
            raise BadRequest(f"{error}; append a system and a user turn in one `append`") from error
        rendered, end = closed, len(closed)
        if messages[-1].role in ("user", "tool"):
            rendered = self._template.strict(every, tools, True, effort)
            end = common_prefix(closed, rendered)  # then comes the generation prompt
        at, begin = common(branch, before.base, rendered, self.tokenizer.inside_token)
        end = max(end, begin)
        lost = [(segment, index) for segment, index in before.turns if segment.start >= at]
        changed = at < branch.position and any(
            _speaks(p) for p in branch.segments if p.end > at or p.start >= at
        )
        end_of = partial(self._end_of, every)
        new = Border(begin, len(before.messages), 1)
        if changed:
            new = self._new_turn(before, closed, begin, messages, tools)
        places = borders(rendered, (at, begin), lost, new, end_of)
        history: History | None = None
        if changed:
            history = history_before(branch, before.base, at, every[: places[0].message])
        parts: list[PendingPart] = []
        for here, following in pairwise([*places, Border(end, len(every), 0)]):
            shown = every[here.message : following.message]
            part = PendingPart(
                rendered[here.char : following.char],
                True,
                Tail.CLOSED,
                shown[-1].role if shown else "assistant",
                messages=shown,
                turn=here.turns,
                op=here.op,
                history=history,
            )
            parts.append(part)
            history = None
        if rendered[end:]:
            parts.append(PendingPart(rendered[end:], True, Tail.PROMPT, "assistant"))
        return PendingAppend(parts, at == 0, self._after(branch, at), cut=at)

    def _new_turn(
        self,
        before: Conversation,
        rendered: str,
        begin: int,
        messages: Sequence[ChatMessage],
        tools: list[JsonObject] | None,
    ) -> Border:
        """Where the new turn begins in `rendered`, whose text from `begin` on is new."""
        count = len(before.messages)
        try:
            added = self._template.delta(before.messages[-1].role, True, messages, tools, False)
        except BadRequest:  # the template joins these turns, or the second one looks back
            added = ""
        if added and rendered.endswith(added) and len(rendered) - len(added) >= begin:
            return Border(len(rendered) - len(added), count, 1)
        end = self._end_of(before.messages, count - 1)
        place = rendered.rfind(end, begin) if end else -1
        return Border(place + len(end), count, 1) if place >= 0 else Border(begin, count, -1)

    def _end_of(self, messages: Sequence[ChatMessage], index: int) -> str:
        """What the rendering of a message ends with, "" if that is not known."""
        message = messages[index]
        role = message.role
        closing = self._template.closing(role) or self._template.pending_end(role)
        content = message.content.strip()[-ENDING:]
        return content + closing if content and closing else ""

    # --- around a generation -----------------------------------------------------------------

    def open_turn(
        self,
        branch: Branch,
        opened: Open,
        opening: str = "",
        *,
        known: dict[Hashable, str | RamifyError] | None = None,
    ) -> int | None:
        """Make the branch ready for an answer: after a complete turn, add the generation prompt.

        `opened`: the client's settings. `known`: prompts that took a rendering of the whole
        conversation, or why there is none (see `unrendered`). `opening`: what the answer has to begin
        with; returns where that stands, None without it.
        Raises BadRequest, TooLong, and then nothing has changed.
        """
        tail, role = branch.tail, branch.role
        prompt: list[int] = []
        text = ""
        if tail in (Tail.CLOSED, Tail.EOS, Tail.PENDING) and role is not None:
            text = self._prompt_behind(branch, role, opened, {} if known is None else known)
            if tail is Tail.EOS:
                text = self._after_eos(branch) + text
            prompt = self._continue(branch, text) if text else []
            self._check(prompt)
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

    def unrendered(
        self, branch: Branch, opened: Open, known: Mapping[Hashable, str | RamifyError]
    ) -> Unrendered | None:
        """What `open_turn` would render, unless it is `known`; its result goes there, by the key.

        Another thread may run it: it works on the segments that the branch has now.
        """
        complete = branch.tail in (Tail.CLOSED, Tail.EOS, Tail.PENDING)
        key = branch.segments.top
        if not complete or not _rendered_anew(opened, branch.role) or key in known:
            return None
        segments = branch.segments.copy()
        return Unrendered(key, _history(branch), lambda: self._rendered(segments, opened))

    def _prompt_behind(
        self, branch: Branch, role: Role, opened: Open, known: dict[Hashable, str | RamifyError]
    ) -> str:
        """The generation prompt behind a complete turn of `role`."""
        if not _rendered_anew(opened, role):
            ended = branch.tail is not Tail.PENDING
            return self._template.generation_prompt(role, tools=bool(opened.tools), closed=ended)
        # A template may want none here (R1 behind a tool's output), which stand-ins cannot tell.
        key = branch.segments.top
        prompt = known.get(key)
        if prompt is None:
            prompt = known[key] = self._rendered(branch.segments, opened)
        if isinstance(prompt, RamifyError):
            raise prompt
        return prompt

    def _rendered(self, segments: Iterable[Segment], opened: Open) -> str:
        """The generation prompt behind them."""
        every = Conversation.of(segments).messages
        closed, rendered = (
            self._template.strict(every, opened.tools, generate, opened.effort)
            for generate in (False, True)
        )
        return rendered[common_prefix(closed, rendered) :]

    def _said(self, branch: Branch, prompt: list[int], opening: str) -> list[int]:
        """Tokens of an opening behind `prompt`, or behind the branch."""
        after = self.tokenizer.context(prompt[-1]) if prompt else self._after(branch, branch.position)
        tokens = self._counted(self.tokenizer.encode_chat(opening, after=after))
        self._check(tokens)
        return tokens

    def close_turn(self, branch: Branch) -> None:
        """Append the template's end of an assistant's turn, as far as there is room."""
        text = self._template.closing("assistant")
        tokens = self._continue(branch, text) if text else []
        if not self._unknown.keys().isdisjoint(tokens):
            log.warning("the model has no token for the end of a turn", extra={"text": text})
        elif tokens and branch.position + len(tokens) <= self._state.context:
            self._state.extend(branch, tokens, text, tail=Tail.CLOSED, role="assistant", chat=True)

    def continue_output(self, branch: Branch, text: str) -> list[int]:
        """Tokens of `text`, which the model said as a part of other tokens, behind the branch."""
        after = self._after(branch, branch.position)
        tokens = self._counted(self.tokenizer.encode(text, special=False, after=after))
        if self._unknown.keys().isdisjoint(tokens):
            return tokens
        known = [token for token in tokens if token not in self._unknown]
        log.warning("text that the model said has tokens that it does not have", extra={"text": text})
        return known

    def end_of_thought(self, branch: Branch) -> list[int]:
        """Tokens that end the thought in which the branch stands."""
        tokens = self._continue(branch, self.speech.end_of_thought)
        return tokens if self._unknown.keys().isdisjoint(tokens) else []

    def check_stops(self, stop_token_ids: Sequence[int]) -> None:
        """Raises BadRequest for ids that the model cannot sample."""
        self._check(stop_token_ids, "stop_token_ids")

    def check_known(self, tokens: Sequence[int]) -> None:
        """Raises BadRequest for ids of the tokenizer that the model does not have."""
        self._check(tokens)

    def end_of_turn(self, token: int) -> str | None:
        """The text of `token` if the template ends an assistant's turn with it, else None."""
        text = self.tokenizer.decode([token], special=True)
        return text if self._template.rest_after_eos(text) is not None else None

    # --- tokens ------------------------------------------------------------------------------

    def _continue(self, branch: Branch, text: str) -> list[int]:
        return self._counted(
            self.tokenizer.encode_chat(text, after=self._after(branch, branch.position))
        )

    def _counted(self, tokens: list[int]) -> list[int]:
        self._state.histories.tokenized += len(tokens)
        return tokens

    def _after(self, branch: Branch, at: int) -> int | None:
        """The token before position `at`, if it changes how text behind it is tokenized."""
        link = branch.segments.before(at)
        if link is None:
            return None
        return self.tokenizer.context(link.segment.tokens[at - link.segment.start - 1])

    def _check(self, tokens: Sequence[int], field: str | None = None) -> None:
        """Raise BadRequest for an id that the model does not have. `field`: the ids were given."""
        size = self._state.vocab
        if field is None:
            if not self._unknown or max(tokens, default=0) < size:
                return
        elif max(tokens, default=0) < size:
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
            f"{self._unknown.get(token, '')!r} is token {token} of the tokenizer, but the model's "
            f"vocabulary has {size} tokens, 0 to {size - 1}: leave it out, or serve a model whose "
            "embedding was resized for this tokenizer",
            details=details,
        )


def _rendered_anew(opened: Open, role: Role | None) -> bool:
    """Whether the prompt behind a turn of `role` takes the whole conversation."""
    return opened.template == "strict" and role in ("user", "tool")


def _history(branch: Branch) -> int:
    """About how many characters a rendering of the branch's whole conversation works on."""
    return branch.position * 4 + len(branch.segments) * AROUND


def _encoded(tokens: Sequence[int], before: "array[int] | None" = None) -> PartTokens:
    packed = array("i", tokens) if before is None else before + array("i", tokens)
    return PartTokens(packed, packed.tobytes())


def _speaks(segment: Segment) -> bool:
    """Whether a conversation is read off it."""
    return isinstance(segment, OutputSegment) or bool(
        segment.messages or segment.history or not segment.chat
    )


def _is_taken_back(branch: Branch) -> bool:
    """Whether messages take back the last segment: a generation prompt, or the end of a pending turn."""
    if branch.tail is Tail.PROMPT:
        return True
    if branch.tail is not Tail.CLOSED or len(branch.segments) < 2:
        return False
    last, before = branch.segments[-1], branch.segments[-2]
    return before.tail is Tail.PENDING and isinstance(last, InputSegment) and not last.messages


def _before_prompt(branch: Branch) -> int:
    """Where an append to the branch begins at the earliest, if it takes back what `_end` says."""
    return branch.segments[-1].start if _is_taken_back(branch) else branch.position


def _eos_text(branch: Branch) -> str:
    """The end-of-turn token that the branch ends with, as the template spells it."""
    last = branch.output()
    return last.eos_text if last is not None else ""


def _asked(branch: Branch, messages: Sequence[ChatMessage], ends: tuple[str, ...]) -> Asked:
    """What a template may look back at for `messages`, as far as they are about calls."""
    if not any(message.role == "tool" or message.tool_calls for message in messages):
        return NOTHING_ASKED
    calls: tuple[tuple[str, str], ...] | None = None if messages[0].role == "tool" else ()
    for said in islice(_back(branch), LOOK_BACK):
        if said is not None and said.role == "tool":
            if calls is not None:
                return Asked(calls, ends, again=True)
        elif calls is None:
            calls = _named((said.tool_calls if said is not None else None) or ())
    return Asked(calls or (), ends)


def _back(branch: Branch) -> Iterator[ChatMessage | None]:
    """The messages of a branch, last one first; None for text that no message tells."""
    for segment in reversed(branch.segments):
        if isinstance(segment, OutputSegment):
            yield segment.spoken
        elif not segment.chat:
            yield None
        else:  # without messages: the end of a turn, or a generation prompt
            yield from reversed(segment.messages)


def _named(calls: Sequence[JsonObject]) -> tuple[tuple[str, str], ...]:
    functions = [(call.get("function", call), call.get("id")) for call in calls]
    return tuple((str(each.get("name", "")), str(ident or CALL_ID)) for each, ident in functions)


def _cut(branch: Branch, pending: PendingAppend) -> int | None:
    """Where the branch is moved back to first, None: it stays."""
    cut = branch.segments[-1].start if pending.over_prompt else pending.cut
    return cut if cut is not None and cut < branch.position else None
