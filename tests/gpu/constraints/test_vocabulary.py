"""The tree of a vocabulary against the list of tokens."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.tokenizer import Tokenizer
from ramify.gpu.constraints.vocabulary import NAMELESS, Vocabulary

TOKENS = st.lists(st.text("abé", max_size=4).map(str.encode), max_size=30)


@settings(max_examples=200, deadline=None)
@given(TOKENS, st.sets(st.integers(0, 5)))
def test_each_token_is_the_way_to_its_node(tokens: list[bytes], stops: set[int]) -> None:
    tree = Vocabulary(tokens, stops, lambda text: [])
    tokens = tree.tokens  # NAMELESS where there were no bytes
    legal = {i for i in range(len(tokens)) if i not in stops}
    paths = {tokens[i][:n] for i in legal for n in range(len(tokens[i]) + 1)} | {b""}
    assert len(tree.byte) == len(paths)
    assert {path for path in paths if tree.find(path) < 0} == set()
    assert tree.find(b"zz") == -1
    twins = {tuple(pair) for pair in tree.twins.tolist()}
    for i in legal:
        first = int(tree.token[tree.find(tokens[i])])
        assert tokens[first] == tokens[i]
        assert first == min(j for j in legal if tokens[j] == tokens[i])
        assert first == i or (i, first) in twins
    assert int((tree.token >= 0).sum()) == len({tokens[i] for i in legal})
    for depth in range(len(tree.levels) - 1):
        for node in range(tree.levels[depth], tree.levels[depth + 1]):
            begin, count = int(tree.child[node]), int(tree.children[node])
            assert (tree.parent[begin : begin + count] == node).all()
    assert [bool(flag) for flag in tree.alone] == [
        bytes([b]) in {tokens[i] for i in legal} for b in range(256)
    ]


@settings(max_examples=100, deadline=None)
@given(TOKENS)
def test_preorder(tokens: list[bytes]) -> None:
    tree = Vocabulary(tokens, (), lambda text: [])
    order = tree.preorder
    path = bytearray()
    seen: list[tuple[bytes, int]] = []
    for node in range(1, len(order.byte)):
        del path[int(order.depth[node]) - 1 :]
        path.append(int(order.byte[node]))
        seen.append((bytes(path), node))
        assert order.token[node] == tree.token[tree.find(bytes(path))]
    assert [text for text, _ in seen] == sorted(text for text, _ in seen)
    for text, node in seen:
        inside = [other for below, other in seen if below.startswith(text)]
        assert order.end[node] == max(inside) + 1


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.randoms(use_true_random=False))
def test_masks_are_packed_and_unpacked(size: int, rng: random.Random) -> None:
    tree = Vocabulary([b"a"], (), lambda text: [], size=size)
    legal = tree.unpack(tree.pack(tree.unpack(tree.pack([True] * 0 or tree.alone[:0]))))
    assert not legal.any()
    legal[rng.randrange(size)] = True
    row = tree.pack(legal)
    assert len(row) == tree.words == -(-size // 32)
    assert (tree.unpack(row) == legal).all()
    assert [i for i in range(size) if (int(row[i // 32]) >> (i % 32)) & 1] == legal.nonzero()[0].tolist()


def test_what_is_no_text_has_a_name_that_no_text_has() -> None:
    tree = Vocabulary([b"a", b"", b"\xff<x>\xfe", b""], [3], lambda text: [], size=6)
    assert [tree.is_text(i) for i in range(-1, 7)] == [False, True, *[False] * 6]
    assert tree.tokens == [b"a", NAMELESS, b"\xff<x>\xfe", NAMELESS, NAMELESS, NAMELESS]
    assert tree.token[tree.find(NAMELESS)] == 1
    assert tree.twins.tolist() == [[4, 1], [5, 1]]  # a stop is none of them
    assert tree.unpack(tree.everything).all()


def test_twins_follow_the_first() -> None:
    tree = Vocabulary([b"a", b"b", b"a", b"", b"b"], (), lambda text: [])
    row = tree.pack(tree.unpack(tree.pack(tree.alone[:0])))
    row[0] = 1
    assert tree.unpack(tree.with_twins(row)).tolist() == [True, False, True, False, False]


def test_the_bytes_of_tokens_are_what_the_tokenizer_decodes(
    tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    """Any sequence of tokens: the decoded text is the bytes of the tokens, one behind the other."""
    rng = random.Random(1)
    legal = [i for i in range(vocabulary.size) if vocabulary.is_text(i)]
    assert not tokenizer.special_ids & set(legal)
    for _ in range(200):
        ids = rng.choices(legal, k=8)
        data = b"".join(vocabulary.tokens[i] for i in ids)
        assert tokenizer.decode(ids) == data.decode("utf-8", "replace")
        text = data.decode("utf-8", "ignore")
        assert b"".join(vocabulary.tokens[i] for i in vocabulary.encode(text)) == text.encode()
