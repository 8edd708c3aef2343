"""Lists of different values out of a finite set, in any order. Pure."""

from math import comb

import numpy as np

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.schema.strings import from_table

_MAX_STATES = 20_000


def longest(texts: list[bytes]) -> int:
    """How many items a list of different `texts` may have, so that its automaton stays small."""
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
