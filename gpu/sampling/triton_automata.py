"""Constraints followed on the device: the legal tokens of each line, and its state after its token.

`masks_into` sends the bytes of every token of the vocabulary through the automaton from the line's
state: a thread for each token, and neighbours have equally many bytes (see `constraints.byte_tables`).
So no mask is computed beforehand or kept. `advance` does the same for the one
token that was sampled. Neither waits for the host, so steps stay in flight.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ramify.protocol.constraints import POP_STEP, WORDS_HEADER

_BLOCK = 1024  # places of one program
_ROWS = 16  # lines of one program that advances
_POP_STEP = tl.constexpr(POP_STEP)
FREE, AUTOMATON = -1, 0  # kinds of a line, in its ask; n > 0: the host gave mask n - 1


@dataclass(slots=True)
class DeviceTokenBytes:
    """`constraints.byte_tables.TokenBytes` on the device."""

    ids: Tensor
    places: Tensor
    first: Tensor
    base: Tensor
    bytes: Tensor
    stops: int


@dataclass(slots=True)
class TokenMasks:
    """The masks of N asks: bit p % 32 of word p // 32 of `words` int32 [N, words] says whether the token
    at place p is legal. `places` int32 [V]: the place of each token.
    """

    words: Tensor
    places: Tensor

    @property
    def width(self) -> int:
        return self.words.shape[1]


def masks_into(
    asks: Tensor, tokens: DeviceTokenBytes, arena: Tensor, tables: Tensor, states: Tensor,
    given: Tensor, host: Tensor, words: Tensor, counts: Tensor, nested: bool,
) -> None:  # fmt: skip
    """Write the masks of asks int32 [N, 16] to words int32 [N, W]; add their sizes to counts int32 [N].

    arena int32: `byte_tables` of the automata; tables, states int32 [rows]: where each row's table
    begins, and its state; given int32 [N]: the state of a line if it is not its row's, else -1; host
    int32 [K, W']: masks by token. `nested`: automata may have values without a schema; the kernel that
    follows these is compiled apart, as it takes twice the registers.
    """
    n, size = len(asks), len(tokens.ids)
    block = min(_BLOCK, max(32, triton.next_power_of_2(size)))
    _masks[(n, triton.cdiv(size, block))](
        asks, arena, tables, states, given, host, tokens.ids, tokens.places, tokens.first, tokens.base,
        tokens.bytes, words, counts, size, tokens.stops, host.shape[1], words.shape[1],
        HEADER=WORDS_HEADER, BLOCK=block, NESTED=nested, num_warps=4,
    )  # fmt: skip


def advance(
    asks: Tensor, tokens: DeviceTokenBytes, arena: Tensor, tables: Tensor, states: Tensor, given: Tensor,
    counts: Tensor, sampled: Tensor, kept: Tensor | None, forced: Tensor, nested: bool,
) -> None:  # fmt: skip
    """Advance states int32 [rows] by what the asks' lines sampled, and mark those without a choice.

    sampled int32 [S]; kept int32 [S]: 1 for lines whose token is output, None: all are, and each row has
    one; counts as of `masks_into`. Writes forced int32 [S]: 1 where one token was legal.
    """
    n = len(asks)
    _follow[(triton.cdiv(n, _ROWS),)](
        asks, arena, tables, states, given, tokens.places, tokens.first, tokens.base, tokens.bytes,
        counts, sampled, kept, forced, n, tokens.stops, HEADER=WORDS_HEADER, BLOCK=_ROWS, NESTED=nested,
        num_warps=1,
    )  # fmt: skip


@triton.jit
def _start(arena, table, HEADER: tl.constexpr):
    """Read the header of the automaton at `table`: see `protocol.constraints.Layout`.

    Returns the end state; where classes, knowledge of states, beginnings of rows, and steps begin; the
    bits of inner states, of these and returns, and of stacks; where the returns begin.
    """
    columns = tl.load(arena + table)
    end = tl.load(arena + table + 1)
    kinds = tl.load(arena + table + 2)
    inner = tl.load(arena + table + 4)
    bits = tl.load(arena + table + 5)
    shift = tl.load(arena + table + 6)
    depth = tl.load(arena + table + 7)
    classes = table + HEADER
    known = classes + 256
    begins = known + end + 1 + inner
    steps = begins + end + 1 + inner
    return end, classes, known, begins, steps, bits, shift, depth, steps + columns * kinds


@triton.jit
def _place(state, end, bits):
    """Compute the index of `state` in the knowledge of states and in the beginnings of rows."""
    inside = state - end - 1
    return tl.where(inside >= 0, end + 1 + (inside & ((1 << bits) - 1)), state)


@triton.jit
def _nested(arena, state, step, behind, alive, end, bits, shift, depth, returns):
    """Return the next state: `behind`, or where `step` leads inside values without a schema."""
    inside = state - end - 1
    stack = inside >> shift
    number = (inside & ((1 << shift) - 1)) >> bits
    base = end + 1 + (number << bits)
    begun = (-1 - step) >> 1
    deeper = tl.where(
        (stack >> (depth - 1)) > 0, -1, base + ((2 * stack + (begun & 1)) << shift) + (begun >> 1)
    )
    ends = alive & (step == _POP_STEP)
    outside = tl.load(arena + returns + number, mask=ends & (stack == 1), other=-1)
    outer = base + ((stack >> 1) << shift) + 2 + (stack & 1)
    closed = tl.where(stack == 1, outside, outer)
    moved = tl.where(step == _POP_STEP, closed, deeper)
    return tl.where(((step & 1) > 0) & (step < 0), moved, behind)


@triton.jit(do_not_specialize=["size", "stops", "host_words", "own_words"])
def _masks(
    asks, arena, tables, states, given, host, ids, places, first, base, bytes, words, counts, size,
    stops, host_words, own_words, HEADER: tl.constexpr, BLOCK: tl.constexpr, NESTED: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ask = asks + n * 16
    kind = tl.load(ask + 15)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    legal = at < 0
    if kind > 0:
        id = tl.load(ids + at, mask=inside, other=0)
        word = tl.load(host + (kind - 1).to(tl.int64) * host_words + (id >> 5), mask=inside, other=0)
        legal = inside & (((word >> (id & 31)) & 1) > 0)
    if kind == 0:
        row = tl.load(ask + 1)
        state = tl.load(given + n)
        if state < 0:
            state = tl.load(states + row)
        end, classes, known, begins, steps, bits, shift, depth, returns = _start(
            arena, tl.load(tables + row), HEADER
        )
        place_of = state
        if NESTED:
            place_of = _place(state, end, bits)
        own = tl.load(arena + known + place_of)
        token = (own >> 1) - 1
        if token >= 0:
            legal = at == tl.load(places + token)
        else:
            begin = tl.load(first)
            alive = (at >= begin) & inside
            here = tl.where(alive, state, -1)
            read = 0
            while tl.max(alive.to(tl.int32), 0) > 0:
                byte = tl.load(bytes + tl.load(base + read) + at, mask=alive, other=0).to(tl.int32)
                column = tl.load(arena + classes + byte, mask=alive, other=0)
                place = here
                if NESTED:
                    place = _place(here, end, bits)
                row_of = tl.load(arena + begins + place, mask=alive, other=0)
                step = tl.load(arena + steps + row_of + column, mask=alive, other=0)
                behind = tl.where((step & 1) > 0, 0, here) + (step >> 1)
                if NESTED:
                    behind = _nested(arena, here, step, behind, alive, end, bits, shift, depth, returns)
                here = behind
                read += 1
                alive = alive & (here >= 0) & (at >= tl.load(first + read))
            legal = (here >= 0) | ((at < stops) & ((own & 1) > 0))
    if kind >= 0:
        bits = tl.where(legal, 1, 0).to(tl.uint32) << (tl.arange(0, BLOCK) & 31).to(tl.uint32)
        packed = tl.sum(tl.reshape(bits, [BLOCK // 32, 32]), 1).to(tl.uint32).to(tl.int32, bitcast=True)
        place = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
        tl.store(words + n * own_words + place, packed, mask=place < own_words)
        some = tl.sum(tl.where(legal, 1, 0), 0)
        if some > 0:
            tl.atomic_add(counts + n, some)


@triton.jit(do_not_specialize=["n", "stops"])
def _follow(
    asks, arena, tables, states, given, places, first, base, bytes, counts, sampled, kept, forced, n,
    stops, HEADER: tl.constexpr, BLOCK: tl.constexpr, NESTED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    kind = tl.load(asks + at * 16 + 15, mask=inside, other=-1)
    line = tl.load(asks + at * 16, mask=inside, other=0)
    row = tl.load(asks + at * 16 + 1, mask=inside, other=0)
    held = inside & (kind >= 0)
    one = tl.load(counts + at, mask=held, other=0) == 1
    tl.store(forced + line, one.to(tl.int32), mask=held)
    final = inside & (kind == 0)
    if kept is not None:  # the last of the row's lines that are output
        final = final & (tl.load(kept + line, mask=final, other=0) > 0)
        after = at + 1
        other = tl.load(asks + after * 16 + 1, mask=after < n, other=-1) != row
        following = tl.load(kept + line + 1, mask=final & ~other, other=0)
        final = final & (other | (following == 0))
    state = tl.load(given + at, mask=final, other=-1)
    state = tl.where(final & (state < 0), tl.load(states + row, mask=final, other=0), state)
    token = tl.load(sampled + line, mask=final, other=-1)
    final = final & (token >= 0)  # -1: the logits were not finite, and the row is given up
    table = tl.load(tables + row, mask=final, other=0)
    end, classes, _known, begins, steps, bits, shift, depth, returns = _start(arena, table, HEADER)
    place = tl.load(places + token, mask=final, other=0)
    here = tl.where(place < stops, end, state)
    alive = final & (place >= tl.load(first))
    read = 0
    while tl.max(alive.to(tl.int32), 0) > 0:
        byte = tl.load(bytes + tl.load(base + read) + place, mask=alive, other=0).to(tl.int32)
        column = tl.load(arena + classes + byte, mask=alive, other=0)
        at_row = here
        if NESTED:
            at_row = _place(here, end, bits)
        row_of = tl.load(arena + begins + at_row, mask=alive, other=0)
        step = tl.load(arena + steps + row_of + column, mask=alive, other=0)
        behind = tl.where((step & 1) > 0, 0, here) + (step >> 1)
        if NESTED:
            behind = _nested(arena, here, step, behind, alive, end, bits, shift, depth, returns)
        here = behind
        read += 1
        alive = alive & (here >= 0) & (place >= tl.load(first + read))
    tl.store(states + row, here, mask=final & (here >= 0))
