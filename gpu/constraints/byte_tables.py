"""Tables with which a device follows automata on its own, of int32 and of bytes. Pure; numpy only.

A device does not need the masks of all states, which take a walk down the token tree each and far more
memory than the automaton: it makes those that a step needs, by sending the bytes of all tokens through
the automaton at once. So a table is the compiled automaton (see `byte_automaton`), and the token of each
state whose text is forced (see `forced`).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.gpu.constraints.token_automaton import TokenAutomaton
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.constraints import WORDS_HEADER

KNOWN = WORDS_HEADER + 256  # words before the entries of states
MOST_FORCED_STATES = 16_384  # each may have a text of its own to spell


class TokenBytes(NamedTuple):
    """The bytes of all tokens, in an order in which neighbours have equally many.

    Tokens have *places*: first the stop ids, then ids that no text has, then the others by length and
    bytes. `ids` int32 [size]: the token at each place; `places` int32 [size]: where each is.
    Byte d of the token at place p is `bytes`[base[d] + p], if `first`[d] <= p < size; `first` and `base`
    int32 [longest + 1], and first[longest] = size.
    """

    ids: NDArray[np.int32]
    places: NDArray[np.int32]
    first: NDArray[np.int32]
    base: NDArray[np.int32]
    bytes: NDArray[np.uint8]
    stops: int


def token_bytes(vocabulary: Vocabulary) -> TokenBytes:
    """Make the tables of a vocabulary."""
    size, stops = vocabulary.size, set(vocabulary.stop_ids)
    texts = [b"" if i in stops else data for i, data in enumerate(vocabulary.tokens[:size])]
    texts += [b""] * (size - len(texts))
    order = sorted(range(size), key=lambda i: (len(texts[i]), i not in stops, texts[i], i))
    lengths = np.array([len(texts[i]) for i in order], dtype=np.int64)
    longest = int(lengths.max(initial=0))
    first = np.searchsorted(lengths, np.arange(longest + 1), side="right")
    joined = np.frombuffer(b"".join(texts[i] for i in order), np.uint8)
    starts = np.cumsum(lengths) - lengths
    counts = np.append(0, size - first[:longest])
    columns = [joined[starts[first[d] :] + d] for d in range(longest)]
    ids = np.array(order, dtype=np.int32)
    places = np.empty(size, dtype=np.int32)
    places[ids] = np.arange(size, dtype=np.int32)
    base = np.cumsum(counts)[: longest + 1] - first
    text = np.concatenate(columns) if columns else np.zeros(1, np.uint8)
    return TokenBytes(ids, places, first.astype(np.int32), base.astype(np.int32), text, len(stops))


def can_be_tables(machine: TokenAutomaton) -> bool:
    """Whether forced text can be spelled beforehand: it could be too long."""
    return len(machine.forced_states()) <= MOST_FORCED_STATES


def byte_tables(machine: TokenAutomaton, into: NDArray[np.int32]) -> None:
    """Write an automaton `into` an array that may be longer: its words, with the entry of each state,
    and of the end, replaced by 2 * (its forced token + 1) + (whether the output may end there).
    """
    words = machine.automaton.words
    into[: len(words)] = words
    states, tokens = machine.forced_tokens()
    into[KNOWN + states] += 2 * (tokens + 1)
