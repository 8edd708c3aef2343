"""What a device reads leads where the automaton leads; each text that must follow is told once."""

import numpy as np
import pytest

from ramify.actors.grammar import automaton_words as words
from ramify.actors.grammar import forced_texts as texts_module
from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.automaton_words import rows_of, words_of
from ramify.actors.grammar.forced_texts import forced_texts
from ramify.protocol.constraints import NO_STEP, WORDS_HEADER

PATTERNS = [
    "(no|none)",
    '"[a-z]{0,300}","[a-z]{0,300}",(?:true|false)',
    r'\{"a":"(?:[a-f]|\\u00[0-9a-f]{2}){0,40}","a":"(?:[a-f]|\\u00[0-9a-f]{2}){3,9}x"\}',
    "(?:é|中)(?:国国|國)[xy]",
    "(?:xy){130}z|no",
]


def followed(automaton: Automaton) -> np.ndarray:
    """The transitions that the words say."""
    data = words_of(automaton, rows_of(automaton))
    columns, states, rows = data[:3].tolist()
    behind = WORDS_HEADER + 256
    assert (data[WORDS_HEADER:behind] == automaton.classes).all()
    assert data[behind : behind + states + 1].tolist() == [*automaton.final.astype(int).tolist(), 1]
    begins = data[behind + states + 1 :][: states + 1]
    steps = data[behind + 2 * (states + 1) :]
    assert len(steps) == rows * columns
    table = steps[begins[:, None] + np.arange(columns)]
    assert (table[states] == NO_STEP).all()
    here = np.arange(states + 1)[:, None]
    return np.maximum(np.where(table & 1, 0, here) + (table >> 1), -1)[:states]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_step(pattern: str) -> None:
    made = Automaton.from_regex(pattern)
    assert (followed(made) == made.next).all()


def test_equal_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "hashes", lambda rows: np.zeros(len(rows), np.uint64))
    monkeypatch.setattr(texts_module, "_FACTOR", np.uint64(0))
    for pattern in PATTERNS:
        made = Automaton.from_regex(pattern)
        assert (followed(made) == made.next).all()
        check_texts(made)


def test_many_ways_to_one_state_are_one_row() -> None:
    made = Automaton.from_regex(PATTERNS[1])
    assert len(made) > 600
    assert words_of(made, rows_of(made))[2] < 30


def check_texts(made: Automaton) -> dict[int, bytes]:
    """The texts as they are told, against a walk from each state. Returns them."""
    found = forced_texts(made, rows_of(made))
    states, texts, ends, rests = (
        np.frombuffer(data, "<i4").tolist()
        for data in (found.states, found.texts, found.ends, found.rests)
    )
    single = np.bincount(made.classes) == 1
    known: dict[int, bytes] = {}
    forced = dict(zip(states, zip(texts, ends, strict=True), strict=True))
    entered = {0}
    for state in range(len(made)):
        data, at = bytearray(), state
        while not made.final[at]:
            ways = np.flatnonzero(made.next[at] >= 0)
            if len(ways) != 1 or not single[ways[0]]:
                break
            data.append(int(np.flatnonzero(made.classes == ways[0])[0]))
            at = int(made.next[at, ways[0]])
        assert bool(data) == (state in forced)
        if not data:
            entered |= set(made.next[state].tolist())
            continue
        text, end = forced[state]
        told, here = bytearray(), text
        while here >= 0:
            told.append(found.heads[here])
            here = rests[here]
        assert (bytes(told), end) == (bytes(data), at)
        known[text] = bytes(data)
    entries = {forced[state][0] for state in entered if state in forced}
    assert set(np.frombuffer(found.entries, "<i4").tolist()) == entries
    return known


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_that_must_follow(pattern: str) -> None:
    known = check_texts(Automaton.from_regex(pattern))
    assert len(set(known.values())) == len(known)
