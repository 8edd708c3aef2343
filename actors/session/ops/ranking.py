"""How `prune` compares what branches generated: numbers, votes, log-probabilities. Pure.

What it reads of a text is bounded, so that many long ones cost little.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence

READ = 4096  # characters of a text that count: the last ones for a number, the first ones for a vote

_NUMBER = re.compile(
    r"(?<![\w.])([-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+|(?=\.[0-9]))(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)"
    r"(?:\s*(?:/|out of)\s*[0-9]+)?"
)
_EDGES = " .,;:!?\"'`*_()[]{}"


def number_in(text: str) -> float | None:
    """The last number in `text`; of "7/10" and "7 out of 10" that is 7. None without any."""
    found: str | None = None
    for match in _NUMBER.finditer(text[-READ:]):
        found = match[1]
    return None if found is None else _finite(float(found.replace(",", "")))


def vote_of(text: str) -> str:
    """`text` as it is compared: without case, punctuation at its ends and the length of blanks.

    Numbers that are equal are the same vote. "" is none.
    """
    plain = " ".join(text[:READ].split()).casefold().strip(_EDGES)
    match = _NUMBER.fullmatch(plain)
    value = _finite(float(match[1].replace(",", ""))) if match is not None else None
    return plain if value is None else repr(value)


def votes(texts: Sequence[str]) -> list[int | None]:
    """How many of `texts` say the same as each; None for those that say nothing."""
    every = [vote_of(text) for text in texts]
    counts = Counter(every)
    return [counts[vote] if vote else None for vote in every]


def best_first(scores: Sequence[float | None], votes: Sequence[str] = ()) -> list[int]:
    """Indices, the best score first; of equal ones the first. Those without a score come last.

    `votes`: who says what another one said before comes behind all who do not.
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
