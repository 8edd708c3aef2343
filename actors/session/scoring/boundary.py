"""Text behind a branch, tokenized together with the branch's end. Pure.

Tokens do not end where texts do: " wor" and "ld" are one token in " world". So a text is scored in the
tokens that the tokenizer gives for the whole. The end of the branch is tokenized alone and with each
text; the branch keeps its own tokens up to where the two differ. What comes before stays as it is.

Nothing is joined across a control token, nor where the branch's end is no text by itself (half of a
character). The branch's first token stays, because something has to stand before what is scored.
"""

from array import array
from collections.abc import Sequence
from itertools import accumulate

from ramify.actors.session.branches.branch import Branch
from ramify.actors.session.branches.pending_appends import Joined
from ramify.actors.tokenizer import Tokenizer

WINDOW = 16  # tokens of the branch's end that a text may change


def join_texts(tokenizer: Tokenizer, branch: Branch, texts: Sequence[str]) -> Joined:
    """The tokens of each of `texts` behind the branch, all from the same position on.

    `Joined.at` is the first position at which one of them differs from the branch, or the branch's
    end. Strings that spell control tokens stay text. The branch must not change meanwhile.
    """
    own, before = _end(tokenizer, branch)
    text = _text(tokenizer, own)
    alone = tokenizer.encode(text, special=False, after=before) if text else []
    if _bytes(tokenizer, alone) != _bytes(tokenizer, own):  # a normalizer changed it
        own, before, text, alone = array("i"), own[-1] if own else before, "", []
    kept, found = len(own), list[tuple[int, list[int]]]()
    for added in texts:
        ids = tokenizer.encode(text + added, special=False, after=before)
        keep, first = _part(tokenizer, own, alone, ids)
        found.append((keep, ids[first:]))
        kept = min(kept, keep)
    return Joined(
        at=branch.position - len(own) + kept,
        own=own[kept:],
        tail=tokenizer.decode(own[kept:]),
        tokens=[own[kept:keep] + array("i", ids) for keep, ids in found],
    )


def _end(tokenizer: Tokenizer, branch: Branch) -> tuple["array[int]", int | None]:
    """The tokens at the branch's end that a text may change, and the one before them."""
    own: array[int] = array("i")
    before: int | None = None
    for segment in reversed(branch.segments):
        for i in range(len(segment.tokens) - 1, -1, -1):
            before = segment.tokens[i]
            if len(own) == WINDOW or segment.start + i == 0 or tokenizer.is_added(before):
                break
            own.append(before)
        else:
            continue
        break
    while own and _inside(tokenizer.token_bytes[own[-1]]):
        before = own.pop()
    own.reverse()
    return own, before


def _inside(token: bytes) -> bool:
    """Whether a token begins inside a character."""
    return token != b"" and token[0] & 0xC0 == 0x80


def _text(tokenizer: Tokenizer, tokens: "array[int]") -> str:
    """ "" if they are no text by themselves."""
    try:
        return _bytes(tokenizer, tokens).decode()
    except UnicodeDecodeError:
        return ""


def _bytes(tokenizer: Tokenizer, tokens: Sequence[int]) -> bytes:
    return b"".join(tokenizer.token_bytes[token] for token in tokens)


def _part(
    tokenizer: Tokenizer, own: Sequence[int], alone: Sequence[int], ids: Sequence[int]
) -> tuple[int, int]:
    """How many of `own` stay, and which of `ids` is the first behind them.

    `alone`: their text's tokens; where those agree with `ids`, the added text has changed nothing. They
    may differ from `own`, whose tokens need not be what the tokenizer makes of the text.
    """
    sizes = tokenizer.token_bytes
    ends = {end: i for i, end in enumerate(accumulate(len(sizes[t]) for t in own), 1)}
    best, at = (0, 0), 0
    for i, (one, other) in enumerate(zip(alone, ids, strict=False), 1):
        if one != other:
            break
        at += len(sizes[one])
        if at in ends:
            best = ends[at], i
    return best
