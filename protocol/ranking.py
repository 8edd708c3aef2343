"""How `prune` compares generated texts: numbers, votes, log-probabilities. Pure.

The server uses it, and clients whose endpoint has no `prune`. It reads a bounded part of each text, so
many long ones cost little.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence

READ = 4096  # characters of a text that count: the last ones for a number, the first ones for a vote
LONGEST = 128  # characters of a number, with what stands around it
_DIGITS = "0123456789"

_NUMBER = re.compile(
    r"(?<![\w.])([-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+|(?=\.[0-9]))(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)"
    r"(?:\s*(?:/|out of)\s*[0-9]+)?"
)
_EDGES = " .,;:!?\"'`*_()[]{}"


def number_in(text: str) -> float | None:
    """The last number in `text`; of "7/10" and "7 out of 10" that is 7. None without any."""
    text = text[-READ:]
    end = max(map(text.rfind, _DIGITS)) + 1
    begin = max(0, end - LONGEST)
    found: str | None = None
    for match in _NUMBER.finditer(text[begin:end]):
        found = match[1] if match.start() or not begin else None  # None: it may have begun before
    return None if found is None else _finite(float(found.replace(",", "")))


def vote_of(text: str) -> str:
    """`text` as it is compared: without case, punctuation at its ends and the length of blanks.

    Numbers that are equal are the same vote. "" is none.
    """
    plain = " ".join(text[:READ].split()).casefold().strip(_EDGES)
    match = _NUMBER.fullmatch(plain) if len(plain) < LONGEST else None
    value = _finite(float(match[1].replace(",", ""))) if match is not None else None
    return plain if value is None else repr(value)


def votes(said: Sequence[str]) -> list[int | None]:
    """For each vote, the number of equal votes. None for an empty one."""
    counts = Counter(said)
    return [counts[vote] if vote else None for vote in said]


def best_first(scores: Sequence[float | None], votes: Sequence[str] = ()) -> list[int]:
    """Indices, the best score first; of equal ones the first. Those without a score come last.

    `votes`: a vote that repeats an earlier one comes behind all that do not.
    """
    seen: set[str] = set()
    repeats = [False] * len(scores)
    for i, vote in enumerate(votes):
        repeats[i] = vote in seen
        seen.add(vote)

    def place(i: int) -> tuple[bool, bool, float]:
        score = scores[i]
        return score is None, repeats[i], -score if score is not None else 0.0

    return sorted(range(len(scores)), key=place)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
