"""Ranks as threads of one process: they talk as processes do, and torch is imported once."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import msgspec
import torch

from ramify.gpu.executors.base import Executor, Follower
from ramify.gpu.ranks.ring import GroupMemory, RankPlace
from ramify.gpu.startup.load import load_executor, load_rank
from ramify.protocol.config import ModelConfig


@contextmanager
def ranked(config: ModelConfig) -> Iterator[Any]:
    """Rank 0's executor. Raises what any rank raised, while they load or at the end."""
    count = config.tensor_parallel
    config = msgspec.structs.replace(config, threads=1)
    if count == 1:
        executor = load_executor(config, lambda what, share: None)
        yield executor
        executor.close()
        return
    told: SimpleQueue[Executor | BaseException] = SimpleQueue()

    def load(place: RankPlace) -> Any:
        return load_rank(config, lambda what, share: None, place)

    def lead(place: RankPlace) -> None:
        try:
            told.put(load(place))
        except BaseException as error:
            told.put(error)

    def follow(place: RankPlace) -> None:
        try:
            follower = load(place)
            assert isinstance(follower, Follower)
            follower.follow(lambda: None)
            follower.close()
        except BaseException as error:
            told.put(error)

    torch.set_num_threads(1)  # of this thread: it has rank 0 compute
    with GroupMemory(count) as shared:
        places = [own_place(place) for place in shared.places]
        threads = [
            threading.Thread(target=follow if place.rank else lead, args=(place,), daemon=True)
            for place in places
        ]
        for thread in threads:
            thread.start()
        executor = told.get()  # or the first error: rank 0 may wait for that rank for ever
        if isinstance(executor, BaseException):
            raise executor
        try:
            yield executor
        finally:
            executor.close()
            for thread in threads:
                thread.join(60)
    if not told.empty():
        error = told.get()
        assert isinstance(error, BaseException)
        raise error


def own_place(place: RankPlace) -> RankPlace:
    """With descriptors that the rank may close.

    That of the store stays open: torch opens the file again by this number when the store is collected,
    whatever the number stands for then.
    """
    store, ring, *bells = (os.dup(descriptor) for descriptor in place.descriptors)
    return RankPlace(place.rank, place.ranks, store, ring, bells)
