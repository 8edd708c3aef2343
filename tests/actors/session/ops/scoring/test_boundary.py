"""Texts behind a branch in the tokens of the whole, scored from the first one that differs."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.session.branches.branch import SessionBranch, input_segment
from ramify.actors.session.branches.segments import Tail
from ramify.actors.session.ops.scoring.selection import WINDOW, join_texts


@pytest.fixture(scope="session")
def branch(tokenizer: Any) -> Callable[..., SessionBranch]:
    """branch(text or tokens, ...): segments one after the other, each tokenized alone."""

    def make(*parts: Any) -> SessionBranch:
        made = SessionBranch("b", 1)
        for part in parts:
            tokens = tokenizer.encode(part) if isinstance(part, str) else part
            input_segment(made, tokens, "", tail=Tail.RAW)
        return made

    return make


def whole(tokenizer: Any, branch: SessionBranch, joined: Any, text: str, which: int = 0) -> None:
    """Kept and new tokens together say the whole text."""
    tokens = [*branch.tokens()[: joined.at], *joined.tokens[which]]
    assert tokenizer.decode(tokens) == tokenizer.decode(branch.tokens()) + text


def test_a_text_that_does_not_change_the_branch(branch: Any, tokenizer: Any) -> None:
    b = branch("hello world")
    joined = join_texts(tokenizer, b, [" one", " two"])
    assert (joined.at, joined.tail) == (b.position, "")
    assert [list(t) for t in joined.tokens] == [tokenizer.encode(" one"), tokenizer.encode(" two")]


def test_a_word_that_is_continued(branch: Any, tokenizer: Any) -> None:
    """One token spans the border; the other choice is scored from the same position on."""
    b = branch("hello", " wor")
    joined = join_texts(tokenizer, b, ["ld", " one"])
    kept = b.tokens()[: joined.at]
    assert joined.tail == "r"
    assert [*kept, *joined.tokens[0]] == tokenizer.encode("hello world")
    assert [*kept, *joined.tokens[1]] == tokenizer.encode("hello wor one")
    assert joined.tokens[1][0] == b.tokens()[joined.at]


def test_tokens_that_are_not_the_tokenizers_stay(branch: Any, tokenizer: Any) -> None:
    """What was sampled, or given as tokens, may spell a text in a way of its own."""
    letters = [t for letter in "hello world" for t in tokenizer.encode(letter)]
    b = branch(letters)
    joined = join_texts(tokenizer, b, [" one"])
    assert joined.at == len(letters)
    assert list(joined.tokens[0]) == tokenizer.encode(" one")


def test_nothing_is_joined_across_a_control_token(branch: Any, tokenizer: Any) -> None:
    b = branch("hello<|im_end|>", "wor")
    joined = join_texts(tokenizer, b, ["ld"])
    assert [*b.tokens()[: joined.at], *joined.tokens[0]] == tokenizer.encode("hello<|im_end|>world")
    b = branch("hello wor<|im_end|>")
    joined = join_texts(tokenizer, b, ["ld"])
    assert (joined.at, list(joined.tokens[0])) == (b.position, tokenizer.encode("ld"))


def test_control_tokens_in_a_choice_stay_text(branch: Any, tokenizer: Any) -> None:
    joined = join_texts(tokenizer, branch("hello"), ["<|im_end|>"])
    assert not set(joined.tokens[0]) & tokenizer.special_ids
    assert tokenizer.decode(joined.tokens[0]) == "<|im_end|>"


def test_half_of_a_character_is_no_text(branch: Any, tokenizer: Any) -> None:
    cut = tokenizer.encode("hello 🙂")[:-1]
    b = branch(cut)
    rest = join_texts(tokenizer, b, ["one"])
    assert (rest.at, list(rest.tokens[0])) == (b.position, tokenizer.encode("one"))


def test_the_first_token_stays(branch: Any, tokenizer: Any) -> None:
    b = branch("w")
    assert b.position == 1
    joined = join_texts(tokenizer, b, ["orld"])
    assert joined.at == 1


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_text(tokenizer: Any, branch: Any, data: st.DataObject) -> None:
    letters = st.text(st.sampled_from("helo wrd1-Ä東🙂.\n"), min_size=1, max_size=12)
    parts = data.draw(st.lists(letters, min_size=1, max_size=5))
    texts = data.draw(st.lists(letters, min_size=1, max_size=4))
    b = branch(*parts)
    joined = join_texts(tokenizer, b, texts)
    assert max(1, b.position - WINDOW) <= joined.at <= b.position
    assert joined.tail == tokenizer.decode(b.tokens()[joined.at :])
    for i, text in enumerate(texts):
        whole(tokenizer, b, joined, text, i)
    if joined.at < b.position:  # somebody's text asks for it
        own = b.tokens()[joined.at :]
        assert any(t[: len(own)] != own for t in joined.tokens)
    if len(parts) == 1 and b.position <= WINDOW:
        for i, text in enumerate(texts):
            tokens = [*b.tokens()[: joined.at], *joined.tokens[i]]
            assert tokens[1:] == tokenizer.encode(parts[0] + text)[1:] or joined.at == 1


class Letters:
    """A tokenizer whose tokens are characters, and notes what it is asked. `lower`: it changes texts."""

    def __init__(self, *, lower: bool = False, added: str = "") -> None:
        self.token_bytes = [chr(i).encode("latin-1") for i in range(256)]
        self.asked: list[tuple[str, int | None]] = []
        self._lower = lower
        self._added = added

    def encode(self, text: str, *, special: bool, after: int | None) -> list[int]:
        assert not special
        self.asked.append((text, after))
        return [ord(c) for c in (text.lower() if self._lower else text)]

    def decode(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))

    def is_added(self, token: int) -> bool:
        return chr(token) in self._added


def lettered(*parts: str) -> SessionBranch:
    made = SessionBranch("b", 1)
    for part in parts:
        input_segment(made, [ord(c) for c in part], "", tail=Tail.RAW)
    return made


@pytest.mark.parametrize(
    ("parts", "added", "own", "before"),
    [
        (["abcd"], "", "bcd", "a"),
        (["ab", "cde"], "", "bcde", "a"),
        (["abc", "d"], "", "bcd", "a"),
        (["ab", "x", "cd"], "x", "cd", "x"),
        (["abx"], "x", "", "x"),
        (["a" * 10, "b" * 10], "", "a" * 6 + "b" * 10, "a"),
        (["a"], "", "", "a"),
        ([], "", "", None),
    ],
)
def test_the_end_that_is_tokenized_again(
    parts: list[str], added: str, own: str, before: str | None
) -> None:
    """Its last 16 tokens, up to a control token, without the branch's first."""
    tokenizer: Any = Letters(added=added)
    joined = join_texts(tokenizer, lettered(*parts), ["yz"])
    after = None if before is None else ord(before)
    assert tokenizer.asked == ([(own, after)] if own else []) + [(own + "yz", after)]
    assert joined.at == len("".join(parts))
    assert (joined.tail, list(joined.own)) == ("", [])
    assert [list(each) for each in joined.tokens] == [[ord("y"), ord("z")]]


def test_an_end_that_begins_inside_a_character_is_left_as_it_is() -> None:
    tokenizer: Any = Letters()
    b = lettered("a\x80\x81bc")
    join_texts(tokenizer, b, ["d"])
    assert tokenizer.asked == [("bc", 0x81), ("bcd", 0x81)]
    low, high = lettered("a\x7fb"), lettered("a\xc0")
    for each in (low, high):
        tokenizer.asked.clear()
        join_texts(tokenizer, each, ["d"])
        assert tokenizer.asked[-1] == (("\x7fbd", ord("a")) if each is low else ("d", 0xC0))


def test_an_end_that_the_tokenizer_changes_is_left_as_it_is() -> None:
    tokenizer: Any = Letters(lower=True)
    b = lettered("xAB")
    joined = join_texts(tokenizer, b, ["c"])
    assert tokenizer.asked == [("AB", ord("x")), ("c", ord("B"))]
    assert (joined.at, joined.tail) == (3, "")
    assert [list(each) for each in joined.tokens] == [[ord("c")]]


class Pairs(Letters):
    """It has one token for "bd" too."""

    def __init__(self) -> None:
        super().__init__()
        self.token_bytes.append(b"bd")

    def encode(self, text: str, *, special: bool, after: int | None) -> list[int]:
        found = super().encode(text, special=special, after=after)
        return [256, *found[2:]] if text.startswith("bd") else found


def test_a_text_that_changes_all_of_the_end_keeps_none_of_it() -> None:
    tokenizer: Any = Pairs()
    joined = join_texts(tokenizer, lettered("ab"), ["d", "e"])
    assert (joined.at, joined.tail, list(joined.own)) == (1, "b", [ord("b")])
    assert [list(each) for each in joined.tokens] == [[256], [ord("b"), ord("e")]]
