"""Lists of different values that an automaton holds by itself, in any order. Pure.

Out of a finite set, or such as begin differently. And how many values there are.
"""

from math import comb

import numpy as np
from numpy.typing import NDArray

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.schema.strings import from_table

_MAX_STATES = 20_000
_MAX_APART = 6_000  # there may be many such lists in one schema


MOST_COUNTED = 10_000  # texts; more are as good as any number of them


def how_many(language: Automaton) -> int | None:
    """The texts of `language`; None if there are more than `MOST_COUNTED`, or no end of them."""
    bytes_of = np.bincount(language.classes, minlength=language.next.shape[1]).tolist()
    ways: dict[int, list[tuple[int, int]]] = {}  # of states looked at: few where texts have no end
    counts: dict[int, int] = {}
    open_now: set[int] = set()
    stack = [0]
    while stack:
        state = stack[-1]
        if state in counts:
            stack.pop()
        elif state not in open_now:
            open_now.add(state)
            row = language.next[state].tolist()
            ways[state] = [(target, bytes_of[c]) for c, target in enumerate(row) if target >= 0]
            for target, _ in ways[state]:
                if target in open_now:  # a way back: without useless states, there is no end of texts
                    return None
                if target not in counts:
                    stack.append(target)
        else:
            open_now.discard(state)
            stack.pop()
            own = int(language.final[state])
            counts[state] = own + sum(times * counts[target] for target, times in ways[state])
            if counts[state] > MOST_COUNTED:
                return None
    return counts[0]


def longest(texts: list[bytes]) -> int:
    """The most items that a list of different `texts` may have with a small automaton."""
    width = sum(map(len, texts)) + 2
    states = 0
    for items in range(len(texts)):
        states += comb(len(texts), items) * width
        if states > _MAX_STATES:
            return items
    return len(texts)


def different(texts: list[bytes], least: int, most: int, comma: bytes) -> Automaton:
    """Lists of at least `least` (1 or more) and at most `most` different `texts`, `comma` between them.

    A state is the set of texts that were used, and a node of their trie.
    """
    nodes: list[dict[int, int]] = [{}]
    ends: dict[int, int] = {}  # node: which text ends there
    for number, text in enumerate(texts):
        node = 0
        for byte in text:
            if byte not in nodes[node]:
                nodes[node][byte] = len(nodes)
                nodes.append({})
            node = nodes[node][byte]
        ends[node] = number
    sets: dict[int, int] = {0: 0}
    order = [0]
    width = len(nodes) + len(comma) - 1
    rows: list[dict[int, int]] = []
    final: list[bool] = []
    for used in order:
        base = len(rows)
        items = used.bit_count()
        rows.extend({byte: base + target for byte, target in node.items()} for node in nodes)
        rows.extend({byte: base + len(nodes) + i + 1} for i, byte in enumerate(comma[1:]))
        final.extend([False] * width)
        if len(comma) > 1:
            rows[-1] = {comma[-1]: base}
        for node, number in ends.items():
            bit = 1 << number
            if used & bit:
                continue
            final[base + node] = items + 1 >= least
            if items + 1 < most:
                following = used | bit
                if following not in sets:
                    sets[following] = len(order)
                    order.append(following)
                entry = sets[following] * width
                rows[base + node][comma[0]] = entry + (len(nodes) if len(comma) > 1 else 0)
    table = np.full((len(rows), 256), -1, np.int32)
    for state, row in enumerate(rows):
        table[state, list(row)] = list(row.values())
    return from_table(table, np.array(final, np.bool_))


def apart(item: Automaton, least: int, most: int | None, comma: bytes) -> tuple[Automaton, int]:
    """Lists of at least `least` (1 or more) texts of `item` that differ in how they begin, and how many
    there are at most; 1 where no two are known to be different values.

    Two texts that differ in the first character of the same string are different values. So a state is
    the set of groups (of letters, of digits, all others) that strings have begun with, and a state of
    `item`.
    """
    full = item.next[:, item.classes]
    prefix, branch = _common_beginning(full, item.final)
    ends = np.flatnonzero(item.final)
    if not _in_string(prefix) or (full[ends] >= 0).any():
        return item, 1
    legal = np.flatnonzero(full[branch] >= 0)
    groups = {byte: _group(byte) for byte in legal.tolist()}
    names = sorted(set(groups.values()))
    width = len(full) + len(comma) + len(prefix)
    room, sets = 1, 1 + len(names)
    while room < min(len(names), most or len(names)):
        sets += comb(len(names), room + 1)
        if sets * width > _MAX_APART:
            break
        room += 1
    if room == 1 or room < least:
        return item, 1
    return _lists_apart(full, item.final, prefix, branch, groups, names, least, room, comma), room


def _lists_apart(
    full: NDArray[np.int32],
    final: NDArray[np.bool_],
    prefix: bytes,
    branch: int,
    groups: dict[int, int],
    names: list[int],
    least: int,
    most: int,
    comma: bytes,
) -> Automaton:
    bits = {name: 1 << i for i, name in enumerate(names)}
    ahead = comma + prefix  # before the byte that tells
    width = len(full) + len(ahead) + 1  # a set's: its last item, then the way to the next one
    sets: dict[int, int] = {0: 0}
    order = [0]
    blocks: list[NDArray[np.int32]] = []
    flags: list[NDArray[np.bool_]] = []
    for used in order:
        base = sets[used] * width
        block = np.full((width, 256), -1, np.int32)
        count = used.bit_count()
        block[: len(full)] = np.where(full >= 0, full + base, -1)
        way = base + len(full)
        if count < most:
            block[np.flatnonzero(final), ahead[0]] = way + 1
            for i, byte in enumerate(ahead[1:], 1):
                block[len(full) + i, byte] = way + i + 1
            for byte, name in groups.items():
                if used & bits[name]:
                    continue
                following = used | bits[name]
                if following not in sets:
                    sets[following] = len(order)
                    order.append(following)
                block[len(full) + len(ahead), byte] = sets[following] * width + full[branch, byte]
        blocks.append(block)
        flags.append(np.append(final & (count >= max(least, 1)), np.zeros(len(ahead) + 1, np.bool_)))
    table, ended = np.concatenate(blocks), np.concatenate(flags)
    start = len(full) + len(comma)  # of the empty set: no comma before the first item
    order_of = np.arange(len(table))
    order_of[[0, start]] = order_of[[start, 0]]  # the start is state 0
    numbers = np.append(np.argsort(order_of), -1)
    return from_table(numbers[table[order_of]].astype(np.int32), ended[order_of])


def _common_beginning(full: NDArray[np.int32], final: NDArray[np.bool_]) -> tuple[bytes, int]:
    """The common prefix of all texts, and the state behind it."""
    prefix, state = bytearray(), 0
    while not final[state] and len(prefix) < len(full):
        ways = np.flatnonzero(full[state] >= 0)
        if len(ways) != 1:
            break
        prefix.append(int(ways[0]))
        state = int(full[state, ways[0]])
    return bytes(prefix), state


def _in_string(text: bytes) -> bool:
    """Whether JSON that begins with `text` is at the beginning of a string there."""
    quotes = text.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"')
    return text.endswith(b'"') and quotes % 2 == 1


def _group(byte: int) -> int:
    """Three letters of the alphabet each, without their case; three or four digits; 0: all others."""
    char = chr(byte).lower()
    if not char.isascii() or not char.isalnum():
        return 0
    return 1 + min(int(char) // 3, 2) if char.isdigit() else 10 + (ord(char) - ord("a")) // 3
