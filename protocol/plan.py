"""What the scheduler sends to the executor for one step, and what comes back.

Integers and bytes, never tensors: a plan crosses a process boundary. Arrays are little-endian
int32 in `bytes` (see `pack` and `unpack`), so that no Python list of ints is built on the way.

The executor keeps one *row* per running request (page table, length, last sampled token,
sampling state). A plan is a diff against those rows, applied in this order:

    copies -> closes -> forgets -> constraints -> opens -> grows -> [extends and decodes as one batch]
    -> sample

Overlap: the scheduler may send plan N+1 before it has seen result N. A decode therefore names
only a row: its input is the row's last sampled token, which the executor holds. Plans run
strictly in order, so a page that is released after plan N was sent and handed to another row
in plan N+1 is safe.

Lengths, for one row with `length` tokens whose KV is in the pool:

    [0 .......... cached)[cached .......... prompt)[prompt ...... length) last sampled
     KV was there at open   extends compute these     decodes computed      its KV is not yet
                                                                            in the pool

Drafts (speculative decoding; Leviathan et al. 2023, Chen et al. 2023): a row may run tokens that are
only guessed. Behind each of them the executor samples as it would have without drafts, with the random
number of that output token, and goes on as long as what it sampled is what the next draft says. So the
output is the same with and without drafts. A step gives such a row 1 + (drafts accepted) tokens; the KV
of refused drafts lies behind the row's length, where the next step overwrites it. How far a row got only
the executor knows until the result is back, so a plan never states a decode's position.

A row may sit a step out: what it needs to sample is not ready (its constraint is being loaded, or the
mask behind its output is still computed), and nobody else waits for that. Its length, its output and
its random number are as before the step, and its next decode is what this one would have been. An
extend that was to sample was computed all the same: the next decode runs its last token again, and
samples.
"""

import sys
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import msgspec

from ramify.protocol.sampling import SamplingParams, TokenLogprobs

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("ramify packs int32 arrays in the machine's order, which must be little-endian")


# In StepResult.tokens:
NO_TOKEN = -1  # the row's logits were not finite, nothing was sampled
STUCK = -2  # the row's constraint allows nothing any more; see `StepResult.reasons`


def pack(values: Iterable[int]) -> bytes:
    """Pack integers as little-endian int32."""
    return array("i", values).tobytes()


# The inverse of `pack`. Raises ValueError if the bytes are not a whole number of int32.
unpack: Callable[[bytes], "array[int]"] = partial(array, "i")


def pack_floats(values: Iterable[float]) -> bytes:
    """Pack numbers as little-endian float32."""
    return array("f", values).tobytes()


# The inverse of `pack_floats`. Raises ValueError if the bytes are not a whole number of float32.
unpack_floats: Callable[[bytes], "array[float]"] = cast(Any, partial(array, "f"))


class LoadConstraint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Keep `body` as constraint `ident` (at least 1) until a plan forgets it. Ident 0: the vocabulary.

    What is in a body, say `ramify.gpu.constraints.loads` (who reads it) and `ramify.actors.grammar` (who
    writes it).
    """

    ident: int
    body: bytes


class OpenRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request begins to run in row `row` (which is closed at this point).

    `pages`: int32, the page table: position p lives in page `pages[p // page_size]`, slot
    `p % page_size`. It covers at least the cached prefix; `grows` append to it.
    `cached`: tokens whose KV is in those pages already; the row's length at the start.
    `sampled`: how many output tokens the request sampled before (after a retraction or a
    pause): the index of the next random number.
    `history`: int32, given only when `sampling.penalized`, `ExecutorInfo.drafts_from_history`, or a
    `constraint` behind `obeyed` tokens: every token before the next sampled one; its last `sampled`
    tokens are outputs of this request.
    `constraint`: which one its outputs obey; 0: none. It was loaded by this plan or an earlier one.
    `obeyed`: how many of the last tokens of `history` it has taken already: at least `sampled`, more
    where the request continues another one's output.
    """

    row: int
    request: int
    pages: bytes
    cached: int
    sampling: SamplingParams
    sampled: int = 0
    history: bytes = b""
    constraint: int = 0
    obeyed: int = 0


class GrowRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Append `pages` (int32) to the page table of `row`."""

    row: int
    pages: bytes


class ExtendRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Run `tokens` (int32) of `row` at positions start, start + 1, ...

    `start` equals the row's length (a check, not an instruction). With `sample`, a token is
    sampled after the last one: the prompt is complete. Without, it is a chunk of a prefill.
    `drafts`: with `sample`, so many of the last `tokens` are drafts; there is at least one token more.
    `places`, `targets`: int32 of one length, the tokens whose log-probabilities are wanted: that of
    targets[i] behind position places[i]. Places are among those that run, in ascending order;
    several targets may stand at one. `tops`: of each target also so many of the most likely tokens.
    """

    row: int
    start: int
    tokens: bytes
    sample: bool
    places: bytes = b""
    targets: bytes = b""
    drafts: int = 0
    tops: int = 0


class StepPlan(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """One forward pass. `closes` and `decodes`: int32 row numbers.

    A row stands in at most one of `extends` and `decodes`. A decode runs the row's last
    sampled token at position `length` and samples the next one.
    `drafts`: int32, one for each decode, or empty: none. So many tokens the executor's drafter may
    guess for that row, at most `ExecutorInfo.max_drafts`, or for one with a constraint what that says
    must follow, at most `max_forced`; the row's pages hold them all. Each is a line
    that samples, and a step has at most `ExecutorInfo.max_rows` of those.
    `guesses`: int32, one for each decode, or empty: none. For a row with a constraint, how many of its
    drafts the drafter may guess, where the executor does that (`ExecutorInfo.guesses_constrained`).
    `constraints`: to be loaded, before any row is opened under them; `forgets`: int32, constraints that
    are dropped once rows were closed; no row has them.
    `copies`: int32 pairs, a page and the page that its KV is copied to. All are read before one is
    written, so a page may be read that this plan hands to a row; none is written twice.
    A plan may have no extends and no decodes (it only closes rows): it still gets a result.
    """

    step: int
    closes: bytes = b""
    opens: list[OpenRow] = []
    grows: list[GrowRow] = []
    extends: list[ExtendRow] = []
    decodes: bytes = b""
    drafts: bytes = b""
    constraints: list[LoadConstraint] = []
    forgets: bytes = b""
    guesses: bytes = b""
    copies: bytes = b""


class StepResult(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """What one StepPlan produced.

    `rows`: int32[S], the rows that sampled: first the extends with `sample` in plan order, then the
    decodes in plan order. `tokens`: int32[S], the token of each; NO_TOKEN where the logits were not
    finite (the KV of that step is not to be trusted; other rows are fine). `counts`: int32[S], how many
    tokens each row has in `tokens`, which lie one row after another then; empty: one each; 0: the row
    sat the step out, see the module's top. NO_TOKEN and STUCK can only be a row's last. `drafted`:
    int32[S], how many drafts each row ran, empty: none; a row's count is at most one more. `guessed`:
    int32[S, 2], of rows with a constraint, how many of these drafts the drafter guessed, and how many of
    the guesses are output; empty: none. `logprobs`:
    empty if no row asked, else an entry for each token. `computed`: tokens that went through the model.
    `elapsed_us`: from the step's start to its end on the device. `scores`: float32, the log-
    probabilities of the extends' targets in plan order: the model's raw ones; NaN where the logits were
    not finite. Behind each target of an extend with `tops` so many pairs follow: a token (ids are below
    2^24, and so exact) and its log-probability, the most likely first. `forced`: a byte for each of
    `tokens`, 1 where the row's constraint allowed no other; empty: nowhere. `busy_us`: what `elapsed_us`
    would be if nobody else had used the executor's cores, by the time that its threads ran; 0: it is
    not known. `late_us`: of that, or of `elapsed_us`, what the drafter took to compute what it had
    missed of rows, a prompt for example: once for each row.
    `reasons`: for each STUCK among `tokens`, why, for the client.
    """

    step: int
    rows: bytes
    tokens: bytes
    computed: int
    elapsed_us: int
    logprobs: list[TokenLogprobs | None] = []
    scores: bytes = b""
    counts: bytes = b""
    drafted: bytes = b""
    forced: bytes = b""
    busy_us: int = 0
    late_us: int = 0
    reasons: list[str] = []
    guessed: bytes = b""


class ExecutorInfo(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What an executor says of itself once it is ready."""

    model: str  # served name
    architecture: str  # e.g. "LlamaForCausalLM"
    parameters: int
    vocab_size: int
    context: int  # longest sequence in tokens
    page_size: int  # tokens a page
    pages: int  # in the pool
    max_rows: int  # requests that run at once
    step_tokens: int  # most tokens in one step
    device: str
    dtype: str
    attention: str  # the kernels, e.g. "triton"
    eos_token_ids: list[int]
    kv_bytes_per_token: int
    load_seconds: float
    attention_reason: str = ""  # why these
    quantization: str = "none"  # "int8": weights as 8-bit integers
    quantization_reason: str = ""  # why
    extend_sizes: list[int] = []  # prompt tokens that a step is padded to, ascending; none: it is not
    logits_cost: float = 0.0  # of one scored position, in prompt tokens
    drafter: str = ""  # what guesses tokens, e.g. "ngram"; "": nothing does
    max_drafts: int = 0  # that a row may have in a step
    drafts_from_history: bool = False  # the drafter reads `OpenRow.history`
    constrains: bool = False  # rows may have a constraint
    max_forced: int = 0  # tokens of a row in a step that its constraint may draft; 0: it drafts none
    guesses_constrained: bool = False  # the drafter guesses for rows with a constraint, too


class ExecutorDown(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The executor failed; nothing that it held can be trusted. `reason` is for the log."""

    reason: str


class StopExecutor(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Finish the plans received so far, then stop."""
