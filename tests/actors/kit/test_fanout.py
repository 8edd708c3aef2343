"""FanOut: slices, order, merging while waiting, addressees that are gone or full."""

import asyncio

from ramify.actors.kit.fanout import FanOut, Router
from ramify.actors.kit.mailbox import Mailbox


class Post:
    """Mailboxes of addressees 0..n-1, and what they hold."""

    def __init__(self, addressees: int, width: int, capacity: int = 100) -> None:
        self.router: Router[str] = Router("test")
        self.boxes = [Mailbox[str](str(key), capacity) for key in range(addressees)]
        for key, box in enumerate(self.boxes):
            self.router.add(key, box)
        self.fan_out = FanOut(self.router, width)

    def send(self, *keys: int, text: str = "x") -> None:
        for key in keys:
            self.fan_out.put([(key, text)])
        self.fan_out.start()

    @property
    def held(self) -> list[int]:
        return [len(box) for box in self.boxes]


async def turn() -> None:
    """One turn of the loop."""
    await asyncio.sleep(0)


async def test_a_few_are_told_at_once():
    post = Post(3, width=4)
    post.send(0, 1, 2)
    assert post.held == [1, 1, 1]
    assert len(post.fan_out) == 0


async def test_the_rest_in_later_turns():
    post = Post(5, width=2)
    post.send(0, 1, 2, 3, 4)
    assert post.held == [1, 1, 0, 0, 0]
    await turn()
    assert post.held == [1, 1, 1, 1, 0]
    await turn()
    assert post.held == [1, 1, 1, 1, 1]


async def test_others_run_between_slices():
    post = Post(4, width=1)
    post.send(0, 1, 2, 3)
    seen: list[int] = []
    asyncio.get_running_loop().call_soon(lambda: seen.append(sum(post.held)))
    await turn()
    assert seen == [2]


async def test_what_comes_meanwhile_joins_in_order():
    post = Post(3, width=1)
    post.send(0, 1, 2, text="first")
    post.send(2, 1, 0, text="second")  # nothing is sent beside the slice of this turn
    assert post.held == [1, 0, 0]
    for _ in range(3):
        await turn()
    assert [box.drain_nowait() for box in post.boxes] == [["first", "second"]] * 3


async def test_one_that_is_gone_is_skipped():
    post = Post(3, width=1)
    post.send(0, 1, 2)
    post.router.remove(1)
    for _ in range(2):
        await turn()
    assert post.held == [1, 0, 1]


async def test_a_full_mailbox_gets_the_rest_later():
    post = Post(2, width=2, capacity=2)
    for text in ("a", "b", "c"):
        post.fan_out.put([(0, text)])
    post.fan_out.put([(1, "d")])
    post.fan_out.start()
    assert post.held == [2, 1]
    assert post.boxes[0].drain_nowait() == ["a", "b"]
    await turn()
    assert post.boxes[0].drain_nowait() == ["c"]
    assert len(post.fan_out) == 0


async def test_flush_sends_everything_and_stops():
    post = Post(4, width=1)
    post.send(0, 1, 2, 3)
    post.fan_out.flush()
    assert post.held == [1, 1, 1, 1]
    await turn()
    assert post.held == [1, 1, 1, 1]


async def test_it_says_when_nothing_waits_any_more():
    post = Post(3, width=2)
    emptied: list[list[int]] = []
    post.fan_out = FanOut(post.router, 2, lambda: emptied.append(post.held))
    post.send(0, 1, 2)
    assert emptied == []
    await turn()
    assert emptied == [[1, 1, 1]]
