"""Who has which part, and who goes for a new one."""

import random
from itertools import pairwise

from ramify.gpu.constraints.arena import Arena


def test_the_longest_unused_goes_first() -> None:
    arena = Arena(10)
    assert [arena.take(key, 4) for key in (1, 2)] == [0, 4]
    arena.use(1)
    arena.leave(1)  # 2 is the longest unused now
    assert arena.take(3, 4) == 4
    assert arena.find(2) is None
    assert arena.find(1) == 0


def test_what_is_used_stays() -> None:
    arena = Arena(10)
    arena.take(1, 4)
    arena.use(1)
    arena.take(2, 6)
    assert arena.take(3, 7) is None
    assert arena.find(2) == 4
    assert arena.take(3, 5) == 4
    arena.forget(3)
    arena.leave(1)
    assert arena.take(4, 10) == 0
    assert arena.used == 10


def test_parts_never_overlap() -> None:
    dice = random.Random(1)
    arena, users = Arena(50), dict[int, int]()
    for key in range(500):
        size = dice.randint(1, 30)
        if arena.take(key, size) is None:
            assert users
        for own in [*users, key]:
            if arena.find(own) is not None and dice.random() < 0.4:
                arena.use(own)
                users[own] = users.get(own, 0) + 1
            elif users.get(own):
                arena.leave(own)
                users[own] -= 1
        users = {own: count for own, count in users.items() if count}
        assert all(arena.find(own) is not None for own in users)
        parts = sorted((part.start, part.start + part.size) for part in arena._parts.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(parts))
        assert not parts or parts[-1][1] <= 50
