"""Block hashes equal their definition, in plain integers, however a chain is cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.actors.kit import blocks
from ramify.actors.kit.blocks import BlockHasher, seed

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def weights(count: int) -> list[int]:
    return [mix(i * 0x9E3779B97F4A7C15 & MASK) | 1 for i in range(1, count + 1)]


def by_definition(state: int, tokens: list[int], size: int) -> list[int]:
    found = []
    for k in range(len(tokens) // size):
        block = tokens[k * size : (k + 1) * size]
        total = sum(t * w for t, w in zip(block, weights(size), strict=True))
        state = 0xD6E8FEB86659FD93 * (state + mix(total + 0x9E3779B97F4A7C15 & MASK)) & MASK
        found.append(state)
    return found


@given(st.lists(st.integers(0, 2**31 - 1), max_size=90), st.integers(1, 9), st.integers(0, MASK))
def test_a_chain_is_what_it_says(tokens: list[int], size: int, state: int) -> None:
    found = BlockHasher(size).chain(state, np.array(tokens, dtype=np.int32))
    assert found.tolist() == by_definition(state, tokens, size)


@given(st.lists(st.integers(0, 5), min_size=8, max_size=80), st.integers(0, 80))
def test_a_chain_goes_on_from_any_block(tokens: list[int], cut: int) -> None:
    hasher = BlockHasher(4)
    array = np.array(tokens, dtype=np.int32)
    whole = hasher.chain(seed("a"), array)
    at = min(cut // 4, len(whole))
    first, second = hasher.chain(seed("a"), array[: 4 * at]), whole[at:]
    state = int(first[-1]) if at else seed("a")
    assert first.tolist() == whole[:at].tolist()
    assert hasher.chain(state, array[4 * at :]).tolist() == second.tolist()


def test_long_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the table of powers."""
    tokens = np.arange(4 * 100, dtype=np.int32)
    whole = BlockHasher(4).chain(7, tokens)
    monkeypatch.setattr(blocks, "_RUN", 7)
    assert BlockHasher(4).chain(7, tokens).tolist() == whole.tolist()


def test_several_runs_at_once() -> None:
    hasher = BlockHasher(4)
    arrays = [np.arange(n, dtype=np.int32) for n in (0, 3, 4, 17)]
    found = hasher.chains(list(enumerate(arrays)))
    assert [each.tolist() for each in found] == [
        hasher.chain(i, array).tolist() for i, array in enumerate(arrays)
    ]
    assert hasher.chains([(1, arrays[0])])[0].tolist() == []


def test_namespaces_and_order_matter() -> None:
    hasher = BlockHasher(2)
    ab, ba = (np.array(t, dtype=np.int32) for t in ([1, 2, 3, 4], [3, 4, 1, 2]))
    found = [hasher.chain(seed(name), t)[-1] for name in ("", "x") for t in (ab, ba)]
    assert len(set(found)) == 4


def test_a_block_has_tokens() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockHasher(0)
