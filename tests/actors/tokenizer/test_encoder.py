"""The queue for long texts: bounded, fair, off the loop."""

import asyncio
import threading
from typing import Any

import pytest

from ramify.actors.tokenizer.encoder import Encoder, Job, Turnstile
from ramify.protocol.errors import Overloaded


def order(items: list[tuple[str, int, str]]) -> list[str]:
    queue: Turnstile[str] = Turnstile()
    for owner, session, item in items:
        queue.put(owner, session, item)
    taken = []
    while queue:
        item = queue.take()
        assert item is not None
        taken.append(item)
    return taken


def test_sessions_of_an_owner_take_turns_and_so_do_owners() -> None:
    long = [("a", 1, f"a1{i}") for i in range(3)] + [("a", 2, "a20"), ("a", 3, "a30")]
    assert order([*long, ("b", 4, "b40"), ("b", 4, "b41")]) == [
        *("a10", "b40", "a20", "b41", "a30", "a11", "a12")
    ]


def test_a_session_that_goes_takes_its_own_along() -> None:
    queue: Turnstile[str] = Turnstile()
    queue.put("a", 1, "x")
    queue.put("a", 2, "y")
    assert queue.drop("a", 1) == ["x"]
    assert queue.drop("a", 7) == []
    assert queue.take() == "y"
    assert not queue
    assert queue.take() is None


class Gate:
    """Jobs that run until they are let go; what became of each."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun: list[str] = []
        self.ends: list[tuple[Any, BaseException | None]] = []
        self.threads: set[int] = set()

    def job(self, name: str, size: int = 1, error: BaseException | None = None) -> Job[str]:
        def run() -> str:
            self.threads.add(threading.get_ident())
            self.begun.append(name)
            self.go.wait(10)
            if error is not None:
                raise error
            return name

        return Job(size, run, lambda result, error: self.ends.append((result, error)))


async def settle(gate: Gate, count: int) -> None:
    for _ in range(1000):
        if len(gate.ends) >= count:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(gate.ends)


async def test_results_and_errors_come_back_on_the_loop() -> None:
    encoder, gate = Encoder(threads=1), Gate()
    gate.go.set()
    failure = ValueError("no")
    encoder.submit("", 1, gate.job("one"))
    encoder.submit("", 1, gate.job("two", error=failure))
    await settle(gate, 2)
    assert gate.ends == [("one", None), (None, failure)]
    assert threading.get_ident() not in gate.threads
    encoder.close()


async def test_what_waits_is_bounded_and_what_is_alone_always_passes() -> None:
    encoder, gate = Encoder(threads=1, most=10), Gate()
    encoder.submit("", 1, gate.job("running", size=100))
    encoder.submit("", 2, gate.job("first", size=100))  # nothing waits yet
    with pytest.raises(Overloaded) as refused:
        encoder.submit("", 3, gate.job("second", size=1))
    assert refused.value.retry_ms
    encoder.forget("", 2)
    encoder.submit("", 3, gate.job("third", size=10))
    gate.go.set()
    await settle(gate, 2)
    assert [result for result, _ in gate.ends] == ["running", "third"]
    encoder.close()


@pytest.mark.parametrize("owner", ["a", ""])
async def test_nobody_takes_all_the_room(owner: str) -> None:
    """Half of what others leave: sessions of a credential count together, others each for itself."""
    encoder, gate = Encoder(threads=1, most=100), Gate()
    encoder.submit("", 1, gate.job("running"))
    encoder.submit(owner, 2, gate.job("mine", size=30))
    encoder.submit(owner, 2, gate.job("mine too", size=20))
    with pytest.raises(Overloaded):
        encoder.submit(owner, 2 if owner == "" else 3, gate.job("more", size=1))
    encoder.submit("b", 4, gate.job("another's", size=20))
    encoder.forget(owner, 2)
    encoder.submit(owner, 2, gate.job("again", size=40))
    gate.go.set()
    await settle(gate, 3)
    assert [result for result, _ in gate.ends] == ["running", "another's", "again"]
    assert not encoder._sizes
    encoder.close()


async def test_a_session_with_much_to_do_holds_nobody_up() -> None:
    encoder, gate = Encoder(threads=1), Gate()
    for number in range(5):
        encoder.submit("", 1, gate.job(f"long {number}"))
    encoder.submit("", 2, gate.job("short"))
    gate.go.set()
    await settle(gate, 6)
    assert [result for result, _ in gate.ends].index("short") <= 2
    encoder.close()


async def test_nobody_takes_all_threads_that_are_shared() -> None:
    """Half of what others leave, rounded up; the rest goes to who comes."""
    encoder, gate = Encoder(threads=4, shared=True), Gate()
    for number in range(5):
        encoder.submit("a", number, gate.job(f"a{number}"))
    for session, owner in enumerate(("b", "b", "", ""), 7):
        encoder.submit(owner, session, gate.job(f"{owner}{session}"))
    for _ in range(10_000):
        if len(gate.begun) == 4:
            break
        await asyncio.sleep(0.001)
    assert sorted(gate.begun) == ["9", "a0", "a1", "b7"]
    gate.go.set()
    await settle(gate, 9)
    encoder.close()


async def test_nothing_is_begun_after_close() -> None:
    encoder, gate = Encoder(threads=1), Gate()
    encoder.submit("", 1, gate.job("running"))
    encoder.submit("", 1, gate.job("waiting"))
    encoder.close()
    gate.go.set()
    await settle(gate, 1)
    await asyncio.sleep(0)
    assert [result for result, _ in gate.ends] == ["running"]
