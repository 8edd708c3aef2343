"""How a generation ends: what of it stays on its branch, and what its client is told. Pure."""

from collections.abc import Callable
from typing import Any, Literal

from ramify.actors.calls.reader import Reader
from ramify.actors.kit.memory import json_bytes
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.segments import Tail
from ramify.actors.session.branches.state import SAVED, SessionState
from ramify.actors.session.branches.tasks import Task
from ramify.actors.session.input.branch_writer import BranchWriter
from ramify.actors.session.output.generation import GenerationState
from ramify.protocol.errors import (
    ConstraintError,
    LimitExceeded,
    Overloaded,
    RamifyError,
    TooLong,
    Unsupported,
)
from ramify.protocol.messages import Finished, NotCompiled
from ramify.protocol.wire import Done, JsonObject, Open

FULL = "the session holds more than it may: drop branches or roll back, then generate on"
RETRY_MS = 1000  # when a full queue may be tried again

EndedHere = Literal["cancelled", "deadline", "stop", "length"]
Reason = EndedHere | Literal["error"]


class Endings:
    """Ends the generations of one session. `on_cut(branch, to)`: the branch was moved back."""

    def __init__(
        self, state: SessionState, writer: BranchWriter, on_cut: Callable[[SessionBranch, int], None]
    ) -> None:
        self._state = state
        self._writer = writer
        self._on_cut = on_cut

    def unsaid(self, generation: GenerationState) -> None:
        """Undo a generation that failed before any output, with the text that it began with."""
        branch = generation.branch
        branch.segments.remove(generation.segment)
        if generation.opened is None:
            return
        revision = self._state.bump()
        self._state.truncate(branch, generation.opened)
        branch.cut_back(revision, generation.opened)
        self._on_cut(branch, generation.opened)

    def close(self, generation: GenerationState, task: Task, finished: Finished) -> Done:
        """Bring segment, handle and text to their final state. Returns the reply."""
        segment, branch = generation.segment, generation.branch
        reason, stop, output = self._cut(generation, finished)
        reader = segment.reading.reader if segment.reading is not None else None
        segment.ends()
        self._state.unsaved += SAVED * len(segment.tokens)
        segment.mean, segment.complete = _mean(generation), reason == "stop"
        if segment.tail is Tail.OPEN and reason == "stop" and not generation.op.keep_open:
            self._writer.close_turn(branch)
        branch.reason = reason
        self._state.bump()
        # what is complete is told now, cut or not: to the next output it is no call of its own
        calls = reader.calls if reader is not None and reason in ("stop", "length") else []
        if reader is not None and reason == "stop":
            self._speak(generation, reader, task.frame.opened, calls)
        usage = branch.usage = generation.usage(finished, output)
        miss = None
        if reason != "error":
            miss = self._writer.turns.answered(branch, usage, generation.arrived, finished.ended)
        return Done(
            id=generation.op.id,
            branch=branch.name,
            position=branch.position,
            revision=self._state.revision,
            reason="tool" if calls and reason == "stop" else reason,
            usage=usage,
            miss=miss,
            tool_calls=calls or None,
            stop=stop,
            mean_logprob=segment.mean,
            error=finished.error,
            message=finished.message or None,
            notes=generation.notes or None,
            **_told(generation, reader, parts=task.frame.opened.parts),
        )

    def _cut(
        self, generation: GenerationState, finished: Finished
    ) -> tuple[Reason, str | int | None, int]:
        """Cut segment and handle to what counts. Returns why it ended, the stop, how many tokens."""
        output = generation.before + finished.output
        if generation.stopping:
            stop = self._cut_at_stop(generation, output)
            if generation.text.stopped is not None:  # as if the scheduler had been told in time
                output = min(output, generation.text.stopped.keep_tokens)
            return "stop", stop, output
        generation.keep(output)
        if generation.stop_token is not None:
            self._settle_stop_token(generation, generation.stop_token)
        self._release_rest(generation)
        if generation.stop_token is not None:
            return "stop", generation.stop_token, output
        return finished.reason, None, output

    def _speak(
        self, generation: GenerationState, reader: Reader, opened: Open, calls: list[JsonObject]
    ) -> None:
        """Note what an ended turn says, where the template of the next one has to be told."""
        segment = generation.segment
        if generation.op.keep_open:
            return
        if calls or opened.template == "strict":
            segment.spoken = self._writer.speech.spoken(reader, generation.branch, segment)
        if segment.spoken is not None:
            spoken = segment.spoken
            segment.grow(
                len(spoken.content) + len(spoken.reasoning or "") + json_bytes(spoken.tool_calls)
            )
        if segment.thought:
            self._writer.turns.ahead(generation.branch, opened, reader, calls)

    def _cut_at_stop(self, generation: GenerationState, output: int) -> str:
        """The branch ends with exactly the text that was shown."""
        stopped = generation.text.stopped
        assert stopped is not None
        state, segment, branch = self._state, generation.segment, generation.branch
        generation.keep(stopped.keep_tokens)
        if output > stopped.keep_tokens:  # it had ended by itself before the cut arrived
            state.move_handle(branch, segment.end)
        if stopped.tail_text:
            tokens = self._writer.continue_output(branch, stopped.tail_text)
            state.extend_handle(branch, tokens)
            segment.tokens.extend(tokens)
            segment.logprobs = None  # the cut token's do not fit the new ones
        segment.release(len(segment.tokens), stopped.tail_text)
        return stopped.stop

    def _settle_stop_token(self, generation: GenerationState, token: int) -> None:
        """Keep a stop token with which the template ends turns; cut off any other."""
        segment = generation.segment
        closes = generation.chat and not generation.op.keep_open
        end = self._writer.end_of_turn(token) if closes else None
        if end is not None:
            segment.tail, segment.eos_text = Tail.EOS, end
        else:
            generation.keep(len(segment.tokens) - 1)
            self._state.move_handle(generation.branch, segment.end)

    def _release_rest(self, generation: GenerationState) -> None:
        segment = generation.segment
        released = generation.text.finish()
        segment.release(len(segment.tokens), released.text if released is not None else "")


def reason_here(generation: GenerationState) -> EndedHere | None:
    """Tell how a generation ends whose engine is gone; None: it goes on."""
    if generation.decided:
        return "stop"
    if generation.cancelled or generation.exhausted:
        return "cancelled"
    if generation.expired:
        return "deadline"
    return "length" if generation.remaining <= 0 else None


def _told(generation: GenerationState, reader: Reader | None, *, parts: bool) -> dict[str, Any]:
    """Make the texts of a `done`. `parts`: the client wants content and reasoning apart."""
    segment = generation.segment
    if generation.op.hidden:
        return {}
    told = {"text": segment.text} if generation.op.quiet else {}
    if parts or (segment.rule is not None and segment.rule.what.thinks):
        told["content"] = segment.text.strip() if reader is None else reader.content
        if reader is not None and reader.reasoning:
            told["reasoning"] = reader.reasoning
    return told


def _mean(generation: GenerationState) -> float | None:
    return generation.logprob_sum / generation.logprob_count if generation.logprob_count else None


def refusal(finished: Finished) -> RamifyError:
    """Make the error that a failed request sends to its client."""
    match finished.error:
        case "overloaded":
            return Overloaded(finished.message, retry_ms=RETRY_MS)
        case "too_long":
            return TooLong(finished.message)
        case "limit":
            return LimitExceeded(finished.message)
        case "bad_constraint":
            return ConstraintError(finished.message)
        case _:
            return RamifyError(finished.message or "the engine failed")


def refused_constraint(message: NotCompiled) -> RamifyError:
    """Make the error of a generation whose constraint cannot be had."""
    match message.code:
        case "bad_constraint":
            error: RamifyError = ConstraintError(message.message)
            error.details = dict(message.details) if message.details else None
            return error
        case "unsupported":
            return Unsupported(message.message, details={"field": "constraint"})
        case "overloaded":
            return Overloaded(message.message, retry_ms=RETRY_MS)
        case _:
            return RamifyError(message.message)


def ended_here(
    generation: GenerationState,
    now: float,
    error: RamifyError | None = None,
    reason: EndedHere = "cancelled",
) -> Finished:
    """Make the end of a generation that the scheduler does not have, or cannot end any more."""
    segment = generation.segment
    return Finished(
        request=generation.request,
        reason=reason if error is None else "error",
        output=len(segment.tokens) - generation.before,
        prompt=segment.start,
        cached=0,
        computed=0,
        arrived=generation.arrived,
        started=0.0,
        first_token=0.0,
        ended=now,
        error=None if error is None else error.code,
        message="" if error is None else error.message,
    )
