"""Programs on a server of ours, in each of the ways that are compared: all at once, and timed."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import count as counting

import msgspec
from program_runs import Roots, Words, drop, on_branches, on_prompts
from program_suite import Work

from ramify.clients import connect
from ramify.clients.handles import Session


def salts() -> Iterator[list[int]]:
    """Two tokens that no call before had."""
    for number in counting():
        yield [300 + number // 7000, 300 + number % 7000]


def marked(work: Work, mark: str) -> Work:
    """The same program behind a text of its own, so that it finds nothing of an earlier run."""
    calls = [
        msgspec.structs.replace(call, text=f"Run {mark}.\n{call.text}") if call.parent is None else call
        for call in work.calls
    ]
    return Work(work.program, calls)


async def whole(url: str, some: Sequence[Work], how: str, words: Words) -> list[float]:
    """Run them at once, each in a session of its own; the seconds that each one took."""
    salt = salts() if how == "no cache" else None
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(connect(url, tokens=True)) for _ in some]

        async def one(session: Session, work: Work) -> float:
            begin = time.perf_counter()
            if how == "branches":
                await drop(session, await on_branches(session, work))
            else:
                await on_prompts(Roots(session, salt), work, words)
            return time.perf_counter() - begin

        return list(await asyncio.gather(*map(one, sessions, some)))
