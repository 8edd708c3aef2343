"""Sessions with much to do take turns: one in a turn of the loop, and others run in between."""

import asyncio
from unittest.mock import Mock

import pytest

from ramify.actors.kit.turns import Turns


async def test_they_take_turns_and_others_run_in_between() -> None:
    turns, told = Turns(), []

    async def busy(name: str) -> None:
        for _ in range(3):
            await turns.next()
            told.append(name)

    async def other() -> None:
        for _ in range(8):
            await asyncio.sleep(0)
            told.append(".")

    async with asyncio.TaskGroup() as group:
        for task in (busy("a"), busy("b"), other()):
            group.create_task(task)
    said = "".join(told)
    assert said.replace(".", "") == "ababab"
    assert "ab" not in said[:8], "two had their turn in one turn of the loop"


async def test_one_that_is_cancelled_keeps_nobody_waiting() -> None:
    turns = Turns()
    first = asyncio.ensure_future(turns.next())
    second = asyncio.ensure_future(turns.next())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, 60)


async def test_one_that_fails_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, loop = Turns(), asyncio.get_running_loop()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "call_soon", Mock(side_effect=MemoryError))
        failing = turns.next()
        with pytest.raises(MemoryError):
            failing.send(None)
    await asyncio.wait_for(turns.next(), 60)
