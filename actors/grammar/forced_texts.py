"""The forced texts of an automaton's states, whatever the tokens are. Pure.

Counted texts have the same text in thousands of states, and each end of a text is a text of its own. So
each is kept once, and its tokens are found once.
"""

import numpy as np
from numpy.typing import NDArray

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.automaton_words import AutomatonRows
from ramify.protocol.constraints import NO_STEP, ForcedTexts

_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Numbers = NDArray[np.int64]


def forced_texts(automaton: Automaton, rows: AutomatonRows) -> ForcedTexts:
    """The states with only one byte to go on with, and their texts."""
    following, classes = automaton.next, rows.classes
    takes = rows.kinds > NO_STEP
    column = takes.argmax(axis=1)
    single = (np.count_nonzero(takes, axis=1) == 1) & (np.bincount(classes) == 1)[column]
    single &= rows.kinds.max(axis=1) < 2 * len(automaton)  # no value that no schema describes begins
    size = len(automaton)
    one = single[rows.row[:size]] & ~automaton.final
    states = np.flatnonzero(one)
    first = np.zeros(takes.shape[1], np.uint8)
    first[classes] = np.arange(256)
    kind = rows.row[states]
    byte, step = first[column[kind]], rows.kinds[kind, column[kind]]
    then = np.where(step & 1, 0, states) + (step >> 1)
    place = np.full(len(one) + 1, len(states))
    place[states] = np.arange(len(states))
    after = place[then]  # the last one: no text
    texts, ends = _alike(byte, after, then)
    _, at = np.unique(texts, return_index=True)
    entered = np.zeros(len(one) + 1, np.bool_)  # the last one: of no way
    entered[following[~one]] = True
    entered[rows.returns] = True
    entered[0] = True
    return ForcedTexts(
        _packed(states),
        _packed(texts),
        _packed(ends),
        byte[at].tobytes(),
        _packed(np.append(texts, -1)[after[at]]),
        _packed(np.unique(texts[entered[states]])),
    )


def _alike(byte: NDArray[np.uint8], after: Numbers, then: Numbers) -> tuple[Numbers, Numbers]:
    """For each state the number of its text, and the state behind that. `after`: which of these states
    follows, their number where none does; `then`: the same among all.

    From the hash, the length, and the end of 1, 2, 4, .. bytes of each.
    """
    count = len(byte)
    jump, power = np.append(after, count), np.append(np.full(count, _FACTOR), np.uint64(1))
    code, end = np.append(byte.astype(np.uint64) + np.uint64(1), np.uint64(0)), np.append(then, -1)
    for _ in range(count.bit_length() + 1):
        going = jump < count
        if not going.any():
            break
        end = np.where(going, end[jump], end)
        code = code + power * code[jump]
        power = power * power[jump]
        jump = jump[jump]
    _, first, texts = np.unique(code[:-1], return_index=True, return_inverse=True)
    rests = np.append(texts, -1)[after]
    one = first[texts]  # of each text the first state
    if (byte != byte[one]).any() or (rests != rests[one]).any():  # two hashes of 64 bits were equal
        texts = np.arange(count)
    return texts, end[:-1]


def _packed(numbers: NDArray[np.integer]) -> bytes:
    return numbers.astype("<i4").tobytes()
