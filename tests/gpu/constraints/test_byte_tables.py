"""Tables of bytes say what the automaton over tokens says."""

import numpy as np
import pytest

from ramify.actors.grammar.automaton import Automaton as Machine
from ramify.gpu.constraints.byte_tables import byte_tables, can_be_tables, token_bytes
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.constraints import WORDS_HEADER
from tests.gpu.constraints.machines import machine_of


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
    machine = machine_of(vocabulary, made)
    words = np.full(len(machine.automaton.words) + 5, -9, np.int32)
    byte_tables(machine, words)
    end = machine.end
    known = words[WORDS_HEADER + 256 :][: end + 1].copy()
    words[WORDS_HEADER + 256 :][: end + 1] &= 1
    assert words.tolist() == [*machine.automaton.words.tolist(), *[-9] * 5]
    for state in range(end):
        assert known[state] >> 1 in (0, 1 + (machine.forced_token(state) or -1))
        assert bool(known[state] & 1) == machine.is_final(state)
    assert known[end] == 1
    assert known[0] >> 1  # the text begins with one that is forced


def test_too_much_forced_text(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_of(vocabulary, Machine.from_regex("abcdefgh"))
    assert can_be_tables(machine)
    monkeypatch.setattr("ramify.gpu.constraints.byte_tables.MOST_FORCED_STATES", 7)
    assert not can_be_tables(machine)
