"""Stores of every kind, against real servers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ramify.actors.store.base import Store
from ramify.actors.store.opening import open_store
from ramify.protocol.saved import Changes


def changes(
    session: str = "s_1",
    put: dict[str, bytes] | None = None,
    drop: list[str] | None = None,
    *,
    owner: str = "me",
    size: int | None = None,
    used: float = 1.0,
    expires: float | None = None,
    busy: bool = False,
    live: bool = False,
    sync: bool = False,
    fence: int = 1,
    count: int = 0,
    whole: bool = True,
) -> Changes:
    """As a server writes them that has made the session. `size`: None: there was nothing before."""
    put = {"head": b"h"} if put is None else put
    size = sum(map(len, put.values())) if size is None else size
    return Changes(
        session, owner, put, drop or [], size, used, expires, busy, live, sync, fence, count, whole
    )


@pytest.fixture(params=["file", "postgres", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where an empty store of each kind can be."""
    if request.param == "file":
        return str(tmp_path / "deep" / "s.db")
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def opened(place: str) -> Iterator[Callable[..., Any]]:
    """`opened()`: the store at `place`, once more each time, as another process would have it."""
    stores: list[Store] = []

    def another(**settings: Any) -> Store:
        stores.append(open_store(place, **settings))
        return stores[-1]

    yield another
    for store in stores:
        store.close()
