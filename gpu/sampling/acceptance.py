"""Which drafts a step accepts, and what its rows' output is then. On the host.

Behind each draft, and behind the token ahead of the drafts, the sampler chose what it would have chosen
without them. As long as that is the next draft, the row's output goes on; the first choice that is not,
or the one behind the last draft, is its last token. So the output is what it would be without drafts,
whatever the sampling: a simpler rule than that of Leviathan et al. 2023, which keeps a distribution but
not its outcomes. It accepts a draft as often as the model's own draw is equal to it.
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
    """What a step's R rows have sampled, of S lines."""

    kept: npt.NDArray[np.bool_]  # [S] lines whose token is output
    counts: Ints  # [R] tokens of each row
    reasons: list[str] = field(default_factory=list)  # why rows got STUCK
    # of each row with a constraint: drafts that a drafter guessed, and those of them that are output;
    # None: there are none
    guessed: "npt.NDArray[np.int64] | None" = None  # [R, 2]


def inputs_of(step: StepRows) -> Ints:
    """[S] the draft that a sampling line runs; NO_TOKEN: the first line of its row, which runs none."""
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
    """Tokens that are never accepted as drafts: those that end a text, behind which nothing is wanted.

    Of models with fixed states, where only the state at the end of what was accepted is kept.
    """
    return tuple(info.eos_token_ids) if info.state_slots else ()


def accept(
    step: StepRows, tokens: Ints, inputs: Ints | None = None, ends: tuple[int, ...] = ()
) -> AcceptedTokens:
    """`tokens` [S]: what each line sampled, NO_TOKEN where its logits were not finite.

    `inputs`: `inputs_of(step)`, if that is known. `ends`: drafts that are refused.
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
    """The same without arrays, whose operations cost more than some lines."""
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
    """`StepResult.rows`, and `counts`, `drafted` and `guessed` where a row got no token, or may get
    several.

    Rows that sat the step out are added.
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
