"""The rule by which drafts are accepted, and the output of their rows. On the host.

After the token before the drafts, and after each draft, the sampler chose what it would have chosen
without drafts. A draft is accepted if it equals the choice before it and all drafts before it were
accepted; the row's output is its choices up to the one after the last accepted draft. So the output is
what it would be without drafts, whatever the sampling: a simpler rule than that of Leviathan et al.
2023, which keeps the distribution but not the outcome. It accepts a draft as often as the model's own
draw equals it.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ramify.gpu.step.step_rows import Ints, StepRows, within
from ramify.protocol.plan import NO_TOKEN, ExecutorInfo

_FEW = 48  # lines


@dataclass(slots=True)
class AcceptedTokens:
    """The output of a step's R rows, which have S lines."""

    kept: npt.NDArray[np.bool_]  # [S] lines whose token is output
    counts: Ints  # [R] tokens of each row
    reasons: list[str] = field(default_factory=list)  # why rows got STUCK
    # of each row with a constraint: drafts that a drafter guessed, and those of them that are output;
    # None: there are none
    guessed: "npt.NDArray[np.int64] | None" = None  # [R, 2]


def inputs_of(step: StepRows) -> Ints:
    """Return the draft that each sampling line runs, [S]; NO_TOKEN: none, its row's first line."""
    if step.lines is not None and not step.extends and len(step.given) == len(step.sampling):
        inputs = step.given.astype(np.int64)
        inputs[np.cumsum(step.lines) - step.lines] = NO_TOKEN  # of a short extend, its own token
        return inputs
    inputs = np.full(len(step.sampling), NO_TOKEN, dtype=np.int64)
    if step.lines is not None:
        behind = within(step.lines) > 0
        inputs[behind] = step.given[step.sampling[behind] - step.extends]
    return inputs


def draft_ends(info: ExecutorInfo) -> tuple[int, ...]:
    """Return the tokens that are never accepted as drafts: those that end a text.

    Only for models with fixed states, which keep the state after the last accepted token alone.
    """
    return tuple(info.eos_token_ids) if info.state_slots else ()


def accept(
    step: StepRows, tokens: Ints, inputs: Ints | None = None, ends: tuple[int, ...] = ()
) -> AcceptedTokens:
    """Accept drafts. `tokens` [S]: what each line sampled, NO_TOKEN where logits were not finite.

    `inputs`: `inputs_of(step)`, if that is known. `ends`: drafts that are always refused.
    """
    lines = step.lines
    if lines is None or not len(lines):
        return AcceptedTokens(np.ones(len(tokens), dtype=np.bool_), np.ones(len(tokens), dtype=np.int64))
    if inputs is None:
        inputs = inputs_of(step)
    if len(tokens) <= _FEW:
        return _accept_few(inputs.tolist(), tokens.tolist(), ends)
    wrong = np.zeros(len(tokens), dtype=np.int64)
    np.not_equal(inputs[1:], tokens[:-1], out=wrong[1:])
    if ends:
        wrong[np.isin(inputs, ends)] = 1
    wrong[inputs == NO_TOKEN] = 0
    firsts = np.cumsum(lines) - lines
    missed = np.cumsum(wrong)
    kept = missed == np.repeat(missed[firsts], lines)
    return AcceptedTokens(kept, np.add.reduceat(kept, firsts, dtype=np.int64))


def _accept_few(inputs: list[int], tokens: list[int], ends: tuple[int, ...]) -> AcceptedTokens:
    """Accept drafts of few lines with lists, which cost less than operations on arrays."""
    kept, counts, good = list[bool](), list[int](), True
    for line, draft in enumerate(inputs):
        if draft == NO_TOKEN:
            counts.append(0)
            good = True
        else:
            good = good and draft == tokens[line - 1] and draft not in ends
        kept.append(good)
        counts[-1] += good
    return AcceptedTokens(np.array(kept), np.array(counts, dtype=np.int64))


def packed_rows(step: StepRows, accepted: AcceptedTokens) -> dict[str, Any]:
    """Pack `StepResult.rows`, and `counts`, `drafted` and `guessed` where rows may get other than one
    token. Rows that sat the step out are added.
    """
    rows, lines, counts, guessed = step.sampled_rows, step.lines, accepted.counts, accepted.guessed
    if step.asked is not None:
        there = np.isin(step.asked, rows)
        counts, own = np.zeros(len(there), dtype=np.int64), counts
        counts[there] = own
        if lines is not None:
            lines, own = np.ones(len(there), dtype=np.int64), lines
            lines[there] = own
        if guessed is not None:
            whole = np.zeros((len(there), 2), dtype=np.int64)
            whole[there] = guessed
            guessed = whole
        rows = step.asked
    packed: dict[str, Any] = {"rows": rows.astype(np.int32).tobytes()}
    if lines is not None or (counts != 1).any():
        packed["counts"] = counts.astype(np.int32).tobytes()
    if lines is not None:
        packed["drafted"] = (lines - 1).astype(np.int32).tobytes()
    if guessed is not None:
        packed["guessed"] = guessed.astype(np.int32).tobytes()
    return packed
