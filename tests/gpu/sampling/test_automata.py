"""Masks and states on the device against `TokenAutomaton`, in Triton's interpreter or on a GPU."""

from typing import Any

import numpy as np
import pytest
import torch

from ramify.actors.grammar.automaton import Automaton as Machine
from ramify.actors.grammar.schema.lower import lower
from ramify.gpu.constraints.token_automaton import TokenAutomaton
from ramify.gpu.constraints.vocabulary import Vocabulary
from tests.gpu.constraints.machines import machine_of

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", minversion=None if CUDA else "3.7")

DEVICE = torch.device("cuda" if CUDA else "cpu")
STOPS = [2, 5]
TEXTS = [
    *(bytes([byte]) for byte in range(32, 127)), b"ab", b"abc", b'{"', b'":', b"name", b"no", b"none",
    b"]]", b"}]", b"]}}", b"[[[", b'":[{"', b"[]", b"},{",
    b"  ", b"    ", b"x" * 21, "é".encode(), b"\xc3", b"\xa9", b"ab",
]  # fmt: skip
PATTERNS = [r'\{"name": "[a-zé]{0,30}"\}', "(no|none)", "[ -~]*", r"x{21,50}", "ab"]
KIND = 15


def vocabulary() -> Vocabulary:
    tokens = [b"", b"", b"never", b"", b"", b"stop", *TEXTS]
    known = {data: i for i, data in enumerate(tokens) if i > 5}

    def encode(text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            longest = max((own for own in known if data.startswith(own)), key=len)
            ids.append(known[longest])
            data = data[len(longest) :]
        return ids

    return Vocabulary(tokens, STOPS, encode, len(tokens) + 3)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        monkeypatch.setattr("ramify.gpu.sampling.triton_automata._BLOCK", 64)


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    return vocabulary()


def compiled(pattern: str, words: Vocabulary) -> TokenAutomaton:
    made = Machine.from_regex(pattern)
    return machine_of(words, made)


def asks_for(lines: list[tuple[int, int, int]]) -> torch.Tensor:
    """(line, row, kind) each."""
    asks = np.zeros((len(lines), 16), dtype=np.int32)
    for ask, (line, row, kind) in zip(asks, lines, strict=True):
        ask[0], ask[1], ask[KIND] = line, row, kind
    return torch.from_numpy(asks).to(DEVICE)


def followed_by(asks: torch.Tensor, states: list[int]) -> Any:
    from ramify.gpu.sampling.automata import Followed

    given = torch.tensor(states, dtype=torch.int32, device=DEVICE)
    return Followed(asks, given, torch.zeros_like(given))


def flags(masks: Any, size: int) -> np.ndarray[Any, Any]:
    """bool [N, size], by token."""
    bits = np.unpackbits(masks.words.cpu().numpy().view(np.uint8), axis=1, bitorder="little")
    return bits[:, masks.places.cpu().numpy()[:size]].astype(np.bool_)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_and_states(pattern: str, words: Vocabulary) -> None:
    from ramify.gpu.sampling.automata import DeviceAutomata

    machine = compiled(pattern, words)
    rows = DeviceAutomata(machine.end + 2, words.size, DEVICE, 1 << 20)
    other = compiled("[0-9]+", words)
    rows.put(7, other)
    rows.put(8, machine)
    assert rows.open(machine.end + 1, 7, 0)  # lies before the other one
    for state in range(machine.end + 1):
        assert rows.open(state, 8, state)
    rows.upload(0)
    states = list(range(machine.end + 1))
    asks = asks_for([(state, state, 0) for state in states])
    followed = followed_by(asks, [-1] * len(states))
    masks = rows.masks(followed, torch.zeros((1, words.words), dtype=torch.int32, device=DEVICE))
    found = flags(masks, words.size)
    for state in states:
        assert found[state].tolist() == words.unpack(machine.mask(state)).tolist(), state
    assert followed.counts.tolist() == found.sum(axis=1).tolist()
    # each legal token leads where the automaton says
    at = list(states)
    for token in range(-1, words.size):
        takes = [state for state in states if token < 0 or found[state, token]]
        if not takes:
            continue
        some = followed_by(asks_for([(line, state, 0) for line, state in enumerate(takes)]), takes)
        sampled = torch.full((len(takes),), token, dtype=torch.int32, device=DEVICE)
        forced = torch.full((len(states),), 9, dtype=torch.int32, device=DEVICE)
        rows.advance(some, sampled, None, forced)
        for state in takes:
            at[state] = machine.advance(state, token) if token >= 0 else state
        assert rows.states.tolist()[: len(states)] == at
        assert forced.tolist()[: len(takes)] == [0] * len(takes)  # of counts that are zeros
        at = list(states)
        rows.states[: len(states)] = torch.tensor(states, dtype=torch.int32)


def test_values_that_no_schema_describes() -> None:
    """Masks and ways in and out of them, at all depths, beside a row without such values."""
    from ramify.gpu.sampling.automata import DeviceAutomata

    spans = [data for data in TEXTS if len(data) > 1]
    tokens = [b"", b"", b"never", b"", b"", b"stop", *(bytes([byte]) for byte in range(256)), *spans]
    words = Vocabulary(tokens, STOPS, lambda text: [6 + byte for byte in text.encode()], len(tokens) + 3)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array"}, "b": {"type": "object", "required": ["c"]}},
        "required": ["a", "b"],
    }
    machine = machine_of(words, lower(schema, letters=True).automaton)
    texts = [
        b'{"a":[[', b'{"a":[[[]', b'{"a":[{"x":{"y":[1', b'{"a":[{"x":[["', b'{"a":[{"x":[[{}',
        b'{"a":[[tr', b'{"a":[],"b":{"c":{', b'{"a":[],"b":{"c":{"n":[{', b'{"a":[],"b":{"c":[1.5',
        b'{"a":[' + b"[" * 40,
    ]  # fmt: skip
    automaton, states = machine.automaton, {0}
    for text in texts:
        state = 0
        for byte in text:
            following = automaton.over(state, byte)
            if following < 0:
                break  # too deep
            state = following
        states.add(state)
    assert max(states) >> automaton.layout.shift >= 1 << automaton.layout.depth - 1
    order = [*sorted(states), machine.end]
    rows = DeviceAutomata(len(order) + 1, words.size, DEVICE, 1 << 20)
    rows.put(7, other := compiled("[0-9]+", words))
    rows.put(8, machine)
    assert rows.open(len(order), 7, 0)
    for row, state in enumerate(order):
        assert rows.open(row, 8, state)
    rows.upload(0)
    count = len(order) + 1
    followed = followed_by(asks_for([(row, row, 0) for row in range(count)]), [-1] * count)
    masks = rows.masks(followed, torch.zeros((1, words.words), dtype=torch.int32, device=DEVICE))
    found = flags(masks, words.size)
    for row, state in enumerate(order):
        assert found[row].tolist() == words.unpack(machine.mask(state)).tolist(), state
    assert found[len(order)].tolist() == words.unpack(other.mask(0)).tolist()
    for token in range(words.size):
        rows.states[: len(order)] = torch.tensor(order, dtype=torch.int32)
        sampled = torch.full((count,), token, dtype=torch.int32, device=DEVICE)
        rows.advance(followed, sampled, None, torch.zeros_like(sampled))
        behind = rows.states.tolist()
        for row, state in enumerate(order):
            if found[row, token]:
                assert behind[row] == machine.advance(state, token), (state, token)


def test_lines_of_all_kinds(words: Vocabulary) -> None:
    """A row with drafts, one with a mask of the host, one without a constraint."""
    from ramify.gpu.sampling.automata import DeviceAutomata

    machine = compiled("(no|none)?", words)
    rows = DeviceAutomata(5, words.size, DEVICE, 1 << 20)
    rows.put(1, machine)
    assert rows.open(3, 1, 0)
    rows.upload(0)
    n, o = words.tokens.index(b"n"), words.tokens.index(b"o")
    behind = machine.advance(0, n)
    final = machine.advance(behind, o)
    asks = asks_for([(1, 3, 0), (2, 3, 0), (3, 3, 0), (4, 0, 2), (6, 1, -1)])
    followed = followed_by(asks, [0, behind, final, -1, -1])
    host = np.zeros((2, words.words), dtype=np.int32)
    host[1] = words.pack(np.arange(words.size) == 90)
    masks = rows.masks(followed, torch.from_numpy(host).to(DEVICE))
    found = flags(masks, words.size)
    for line, state in enumerate((0, behind, final)):
        assert found[line].tolist() == words.unpack(machine.mask(state)).tolist()
    assert np.flatnonzero(found[3]).tolist() == [90]
    assert followed.counts.tolist()[3:] == [1, 0]
    # the second draft was refused: the row stands behind what line 2 sampled
    sampled = torch.tensor([0, n, STOPS[0], o, 90, 0, 7], dtype=torch.int32, device=DEVICE)
    kept = torch.tensor([1, 1, 0, 0, 1, 1, 1], dtype=torch.int32, device=DEVICE)
    kept[2], sampled[2] = 1, o
    forced = torch.full((7,), 9, dtype=torch.int32, device=DEVICE)
    rows.advance(followed, sampled, kept, forced)
    assert rows.states.tolist()[3] == final
    assert forced.tolist() == [9, 0, int(found[1].sum() == 1), 0, 1, 9, 9]


def test_what_does_not_fit(words: Vocabulary) -> None:
    from ramify.gpu.sampling.automata import DeviceAutomata

    machine = compiled("[a-z]{1,40}", words)
    rows = DeviceAutomata(4, words.size, DEVICE, 13 << 7)
    for ident in (1, 2, 3):
        rows.put(ident, machine)
    assert rows.open(0, 1, 0)
    assert rows.used_bytes == 12 << 7
    assert not rows.open(1, 2, 0)
    rows.close(0)
    assert rows.open(1, 2, 0)
    rows.put(4, compiled("[a-z]{1,400}", words))
    rows.close(1)
    assert not rows.open(2, 4, 0)
    assert rows.open(2, 2, 0)
    rows.close(2)
    rows.forget(2)
    assert rows.used_bytes == 0
    assert not rows.open(2, 2, 0)


def test_a_state_that_no_output_comes_to(words: Vocabulary) -> None:
    """Its forced token was not spelled beforehand: who stands there is followed on the host."""
    from ramify.gpu.sampling.automata import DeviceAutomata

    machine = compiled("(no|none)?", words)
    rows = DeviceAutomata(4, words.size, DEVICE, 1 << 20)
    rows.put(1, machine)
    state = machine.advance(0, words.tokens.index(b"n"))
    token = machine.forced_token(state)
    assert token is None or rows.open(0, 1, state, token)
    assert not rows.open(1, 1, state, words.tokens.index(b"z"))
