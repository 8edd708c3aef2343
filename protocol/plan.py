"""What the scheduler sends to the executor for one step, and what comes back.

Integers and bytes, never tensors: a plan crosses a process boundary. Arrays are little-endian
int32 in `bytes` (see `pack` and `unpack`), so that no Python list of ints is built on the way.

The executor keeps one *row* per running request (page table, length, last sampled token,
sampling state). A plan is a diff against those rows, applied in this order:

    saves -> copies -> loads -> closes -> forgets -> constraints -> opens -> grows
    -> [extends and decodes as one batch] -> sample

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

Fixed states (delta net, Mamba, short convolution): what such layers keep of a sequence, at one position,
fills one *state slot*. Slots are written once and shared by reference, so a snapshot, a fork and an
overrun step cost no copy. Slot 0 is all zeros, the state before any token, and is never written; slots
1 to `ExecutorInfo.state_slots` are the cache's to hand out. A row reads one slot in a step and writes
another. Two plans in flight: the second one reads what the first one writes. A row that sits a step out
gets the state that it had: the executor copies it, so that the next plan may read the slot all the same.
So the prompt's last token is an extend of its own where the row could sit out.

Windows: layers that see `ExecutorInfo.window` tokens, the own one included, may keep their KV in a pool
of their own, of `window_pages` pages of one token. A row has a second table for them, in which pages
recur: a position takes the page of an earlier one that no step reads any more. It has an entry for each
position of the page table, from the first one that the row reads.

Tiers: a block of KV (`MovedBlock`) may leave the pool for a slot of the executor's host memory, and come
back. Saves run before all else of their plan, so their pages may be handed out in it. Loads go to pages
that no row has yet; the executor checks what it loads, and names what is not what was saved.
"""

import sys
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import msgspec
from msgspec import structs

from ramify.protocol.pictures import PictureLook, PictureSettings, PlacedPicture
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

    `ramify.actors.grammar` writes bodies, `ramify.gpu.constraints.loads` reads them.
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
    `windows`: int32, the last entries of the table of window pages; see the module's top.
    `pictures`: all of its prompt, in order, without pixels. Of those that its extends run, the executor
    keeps what the tower made: see `StepPlan.looks`.
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
    windows: bytes = b""
    pictures: list[PlacedPicture] = []


class GrowRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Append `pages` (int32) to the page table of `row`, and as many `windows` to that of windows."""

    row: int
    pages: bytes
    windows: bytes = b""


class ExtendRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Run `tokens` (int32) of `row` at positions start, start + 1, ...

    - `start` equals the row's length (a check, not an instruction).
    - `sample`: sample a token after the last one: the prompt is complete. Otherwise it is a chunk of a
      prefill.
    - `drafts`: with `sample`, that many of the last `tokens` are drafts; at least one token is not.
    - `places`, `targets`: int32 of one length, the tokens whose log-probabilities are wanted: that of
      targets[i] behind position places[i]. Places are among those that run, in ascending order; several
      targets may stand at one.
    - `tops`: behind each target, that many of the most likely tokens too.
    """

    row: int
    start: int
    tokens: bytes
    sample: bool
    places: bytes = b""
    targets: bytes = b""
    drafts: int = 0
    tops: int = 0


FULL, STATE, WINDOW = range(3)
"""Forms of what a `MovedBlock` holds."""


class MovedBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What goes between an executor's memory and slot `slot` of host memory.

    - `key`: 16 bytes that name it: of a block, the tokens up to its end.
    - `pages`: int32. FULL: those of up to `cluster.BLOCK` tokens, in order; -1: not loaded, because that
      page is there. WINDOW: so many window pages, as fit a slot. STATE: the state slot.
    - `part`: STATE: which part of the state's bytes, each as long as a slot but for the last.
    """

    slot: int
    key: bytes
    pages: bytes
    form: int = FULL
    part: int = 0


class StepPlan(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """One forward pass. A row stands in at most one of `extends` and `decodes`.

    - `closes`, `decodes`: int32 row numbers. A decode runs the row's last sampled token at position
      `length` and samples the next one.
    - `drafts`: int32, one for each decode, or empty: none. The most tokens that the drafter may guess
      for that row, at most `ExecutorInfo.max_drafts`; for a row with a constraint, the most forced
      tokens, at most `max_forced`. The row's pages hold them all. Each is a line that samples, and a
      step has at most `ExecutorInfo.max_rows` of those.
    - `guesses`: int32, one for each decode, or empty: none. For a row with a constraint: how many of its
      drafts the drafter may guess, where the executor does that (`ExecutorInfo.guesses_constrained`).
    - `constraints`: to load, before any row is opened under them; `forgets`: int32, constraints to drop
      once rows were closed; no row has them.
    - `copies`: int32 pairs, a page and the page that its KV is copied to. All are read before one is
      written, so a page may be read that this plan hands to a row; none is written twice.
    - `states`: int32 pairs, a state slot to read and one to write, which differ: for each extend, then
      for each decode, in plan order. What is written stands for the row's tokens up to the last that it
      runs in this step. A slot may be read by several rows; none is both read and written in one plan.
      Empty where the model has no states.
    - `saves`, `loads`: blocks that go to host memory and come from there, see the module's top.
    - `looks`: pictures that the tower is to run on, beside the steps. No key is under way or kept.
      `PicturesSeen` says when what it made is kept; only then may a row's extends run its tokens.
    - `unseen`: keys that are kept and no longer needed, by no step but those that were sent before.

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
    states: bytes = b""
    saves: list[MovedBlock] = []
    loads: list[MovedBlock] = []
    looks: list[PictureLook] = []
    unseen: list[bytes] = []


class StepResult(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """The result of one StepPlan.

    - `rows`: int32[S], the rows that sampled: first the extends with `sample`, then the decodes, in plan
      order.
    - `tokens`: int32[S], the token of each. NO_TOKEN where the logits were not finite: the KV of that
      step is not to be trusted, other rows are fine. NO_TOKEN and STUCK can only be a row's last.
    - `counts`: int32[S], how many of `tokens` each row has, one row after another; empty: one each. 0:
      the row sat the step out, see the module's top.
    - `drafted`: int32[S], drafts that each row ran; empty: none. A row's count is at most one more.
    - `guessed`: int32[S, 2], for rows with a constraint: drafts that the drafter guessed, and guesses
      that are output; empty: none.
    - `logprobs`: empty if no row asked, else an entry for each token.
    - `computed`: tokens that went through the model.
    - `elapsed_us`: from the step's start to its end on the device. `busy_us`: what that would be without
      other users of the executor's cores; 0: unknown. `late_us`: the part of these in which the drafter
      computed what it had missed of rows (a prompt, for example), once for each row.
    - `scores`: float32, the raw log-probabilities of the extends' targets in plan order; NaN where the
      logits were not finite. Behind each target of an extend with `tops` stand that many pairs, the most
      likely first: a token (ids are below 2^24, and so exact) and its log-probability.
    - `forced`: a byte for each of `tokens`, 1 where the row's constraint allowed no other; empty:
      nowhere.
    - `reasons`: for each STUCK among `tokens`, why, for the client.
    - `lost`: int32, slots whose load failed: their bytes are not those of the key. `load_us`: the part
      of `elapsed_us` that loads and saves took.
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
    lost: bytes = b""
    load_us: int = 0


class PicturesSeen(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """What the tower made of the pictures `keys` is kept; on the pictures `failed` it could not run, for
    this `reason`. Comes at any time between results, and once a second, empty, while the tower runs.
    `layers`: that the tower has run since its start, so that one that hangs is noticed.
    """

    keys: list[bytes] = []
    failed: list[bytes] = []
    reason: str = ""
    layers: int = 0


class ExecutorInfo(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The executor's description of itself, sent once it is ready."""

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
    quantization: str = "none"  # "int8", "int4": weights as integers; "fp8": as 8-bit floats
    quantization_reason: str = ""  # why
    extend_sizes: list[int] = []  # prompt tokens that a step is padded to, ascending; none: it is not
    logits_cost: float = 0.0  # of one scored position, in prompt tokens
    drafter: str = ""  # what guesses tokens, e.g. "ngram"; "": nothing does
    max_drafts: int = 0  # that a row may have in a step
    drafts_from_history: bool = False  # the drafter reads `OpenRow.history`
    constrains: bool = False  # rows may have a constraint
    max_forced: int = 0  # tokens of a row in a step that its constraint may draft; 0: it drafts none
    guesses_constrained: bool = False  # the drafter guesses for rows with a constraint, too
    state_slots: int = 0  # of fixed states, without slot 0; 0: the model has none
    state_bytes: int = 0  # of one slot
    window: int = 0  # tokens that the layers with a pool of their own see, the own one included; 0: none
    window_pages: int = 0  # in that pool
    window_bytes: int = 0  # of one of these pages; `kv_bytes_per_token` does not count them
    kv_dtype: str = "auto"  # "fp8": keys and values as 8-bit floats; else as `dtype`
    host_blocks: int = 0  # slots for blocks of KV in host memory
    pictures: PictureSettings | None = None  # None: it takes none
    picture_bytes: int = 0  # of what the tower makes of a picture, for each of its tokens
    picture_room: int = 0  # bytes of that to keep at most; those of one request's pictures in any case
    host_memory: str = ""  # where another process of the machine finds them (`gpu.kv.host_memory`)
    rank_memory: str = ""  # where it finds this rank's parts of them
    block_bytes: int = 0  # of a block, or of this rank's part
    pictures_reason: str = ""  # why a model that sees takes none
    kv_stamp: str = ""  # what its KV comes from: model, weights, format; equal stamps fit each other

    def told(self) -> dict[str, Any]:
        """What clients may know."""
        hidden = "host_memory", "rank_memory"
        return {name: value for name, value in structs.asdict(self).items() if name not in hidden}


class ExecutorDown(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The executor failed; nothing that it held can be trusted. `reason` is for the log."""

    reason: str


class StopExecutor(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Finish the plans received so far, then stop."""


# What the executor is told.
ExecutorMessage = StepPlan | StopExecutor
