"""Sets of characters against Python's own characters, one by one."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.grammar.characters import ANY, Ranges, byte_tree, complement, ignore_case, ranges

CODES = st.one_of(
    st.integers(0, 0x10FFFF),
    st.sampled_from([0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000]),
)
SETS = st.lists(st.tuples(CODES, CODES).map(lambda pair: (min(pair), max(pair))), max_size=4)


def holds(chars: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in chars)


def spelled(chars: Ranges, data: bytes) -> bool:
    tree = byte_tree(chars)
    state = 0
    for at, byte in enumerate(data):
        edges = [target for low, high, target in tree[state] if low <= byte <= high]
        assert len(edges) <= 1
        if not edges:
            return False
        if edges[0] < 0:
            return at == len(data) - 1
        state = edges[0]
    return False


@settings(max_examples=200, deadline=None)
@given(SETS, st.lists(CODES, max_size=8))
def test_a_set_and_its_bytes(pairs: list[tuple[int, int]], codes: list[int]) -> None:
    chars = ranges(pairs)
    assert all(a[1] + 1 < b[0] for a, b in itertools.pairwise(chars) if a[1] != 0xD7FF)
    for code in [*codes, *(c for pair in pairs for c in pair)]:
        if 0xD800 <= code < 0xE000:
            assert not holds(chars, code)
            continue
        expected = any(low <= code <= high for low, high in pairs)
        assert holds(chars, code) == expected
        assert holds(complement(chars), code) != expected
        assert spelled(chars, chr(code).encode()) == expected
        assert spelled(complement(chars), chr(code).encode()) != expected


def test_the_ends_of_each_length() -> None:
    for code in (0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF):
        assert spelled(ANY, chr(code).encode())
        assert spelled(((code, code),), chr(code).encode())
    for data in (
        b"\xc0\x80",
        b"\xe0\x9f\xbf",
        b"\xed\xa0\x80",
        b"\xf0\x8f\xbf\xbf",
        b"\xf4\x90\x80\x80",
        b"\x80",
    ):
        assert not spelled(ANY, data)


def test_ignore_case_is_ascii() -> None:
    assert ignore_case(ranges([(0x61, 0x63), (0xE9, 0xE9)])) == ranges(
        [(0x41, 0x43), (0x61, 0x63), (0xE9, 0xE9)]
    )
    assert ignore_case(ranges([(0x30, 0x5A)])) == ranges([(0x30, 0x5A), (0x61, 0x7A)])
