"""Ranks as threads of one process: they talk as processes do, and torch is imported once."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from ramify.gpu.executors.base import Follower
from ramify.gpu.ranks.ring import GroupMemory, RankPlace
from ramify.gpu.startup.load import load_executor, load_rank
from ramify.protocol.config import ModelConfig


@contextmanager
def ranked(config: ModelConfig) -> Iterator[Any]:
    """Rank 0's executor. `followers`, in the order of their ranks, tell how the others ended."""
    count = config.tensor_parallel
    config = msgspec.structs.replace(config, threads=1)
    if count == 1:
        executor = load_executor(config, lambda what, share: None)
        yield executor
        executor.close()
        return
    errors: list[BaseException] = []

    def follow(place: RankPlace) -> None:
        try:
            follower = load_rank(config, lambda what, share: None, place)
            assert isinstance(follower, Follower)
            follower.follow(lambda: None)
            follower.close()
        except BaseException as error:
            errors.append(error)

    with GroupMemory(count) as shared:
        places = [own_place(place) for place in shared.places]
        threads = [threading.Thread(target=follow, args=(place,), daemon=True) for place in places[1:]]
        for thread in threads:
            thread.start()
        executor = None
        try:
            executor = load_rank(config, lambda what, share: None, places[0])
            yield executor
        finally:
            if executor is not None:
                executor.close()
                for thread in threads:
                    thread.join(60)
    if errors:
        raise errors[0]


def own_place(place: RankPlace) -> RankPlace:
    """With descriptors that the rank may close.

    That of the store stays open: torch opens the file again by this number when the store is collected,
    whatever the number stands for then.
    """
    store, ring, *bells = (os.dup(descriptor) for descriptor in place.descriptors)
    return RankPlace(place.rank, place.ranks, store, ring, bells)
