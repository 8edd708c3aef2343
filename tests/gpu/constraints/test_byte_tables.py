"""Tables of bytes say what the automaton over tokens says."""

import numpy as np
import pytest

from ramify.actors.grammar.automaton import Automaton as Machine
from ramify.gpu.constraints.byte_tables import HEADER, byte_tables, token_bytes, words_of
from ramify.gpu.constraints.token_automaton import TokenAutomaton
from ramify.gpu.constraints.vocabulary import Vocabulary


def test_each_token_is_found_with_its_bytes(vocabulary: Vocabulary) -> None:
    tables = token_bytes(vocabulary)
    assert sorted(tables.ids.tolist()) == list(range(vocabulary.size))
    assert (tables.places[tables.ids] == np.arange(vocabulary.size)).all()
    assert sorted(tables.ids[: tables.stops].tolist()) == list(vocabulary.stop_ids)
    for token in range(vocabulary.size):
        place, data = int(tables.places[token]), bytearray()
        for first, base in zip(tables.first.tolist(), tables.base.tolist(), strict=True):
            if place >= first:
                data.append(tables.bytes[base + place])
        known = vocabulary.tokens[token] if token < len(vocabulary.tokens) else b""
        assert bytes(data) == (b"" if token in vocabulary.stop_ids else known)


def test_an_automaton_as_words(vocabulary: Vocabulary) -> None:
    made = Machine.from_regex(r'\{"name": (none|no)\}')
    machine = TokenAutomaton(vocabulary, made.next, made.classes, made.final)
    words = byte_tables(machine)
    assert words is not None
    assert len(words) == words_of(machine)
    columns, end = words[:2].tolist()
    assert (columns, end) == (made.next.shape[1], machine.end)
    known = words[HEADER + 256 :][: end + 1]
    for state in range(end):
        token = machine.forced_token(state)
        assert known[state] >> 1 == (0 if token is None else token + 1)
        assert bool(known[state] & 1) == machine.is_final(state)
    assert known[end] == 1
    assert known[0] >> 1  # the text begins with one that is forced
    table = words[HEADER + 256 + end + 1 :].reshape(end + 1, columns)
    assert (table[:end] == made.next).all()
    assert (table[end] == -1).all()


def test_too_much_forced_text(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Machine.from_regex("abcdefgh")
    machine = TokenAutomaton(vocabulary, made.next, made.classes, made.final)
    monkeypatch.setattr("ramify.gpu.constraints.byte_tables.MOST_FORCED_STATES", 7)
    assert byte_tables(machine) is None
