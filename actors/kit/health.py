"""The health of the store: the store actor reports it; `/readyz`, `/metrics` and `/v1/info` show it."""

from collections.abc import Iterable

import msgspec


class StoreHealth(msgspec.Struct, frozen=True):
    """`error`: why nothing can be written now; None: it can be. `damaged`: sessions that cannot be
    written, because what the store has of them is damaged. `lost`: how often all of a session was saved
    again, because the store had lost some of it.
    """

    error: str | None = None
    damaged: int = 0
    lost: int = 0


def joined(healths: Iterable[StoreHealth]) -> StoreHealth:
    """The health over several processes that have sessions."""
    every = list(healths)
    return StoreHealth(
        next((each.error for each in every if each.error is not None), None),
        sum(each.damaged for each in every),
        sum(each.lost for each in every),
    )
