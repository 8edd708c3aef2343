"""`select` in the clients and in the program language, on a real engine with a fake model."""

import asyncio
from typing import Any

import pytest

from ramify.clients import connect, connect_sync
from ramify.clients.program import State, assistant, gen, program, select, user
from ramify.protocol.errors import BadRequest, Cancelled

CHOICES = ["Paris", "Madrid", "one two"]


def at(served: Any) -> str:
    return f"ws://127.0.0.1:{served.engine.port}/v1/ws"


async def test_a_handle(serving: Any) -> None:
    async with serving() as served, connect(at(served)) as session:
        main = session.main
        await main.append("Capital of France?")
        selection = main.select(CHOICES, method="greedy_token_selection", expect=main.position)
        shown = "".join([delta.text async for delta in selection])
        result = await selection
        assert result.choice is not None
        assert shown == result.text == CHOICES[result.choice]
        assert len(result.scores or ()) == len(CHOICES)
        assert main.position == result.position
        with pytest.raises(BadRequest, match="choices"):
            await main.select(["a", ""])
        # in a frame with others, on several branches
        handles = await session.send(
            [
                {"type": "fork", "as": ["a", "b"]},
                {"type": "select", "branch": ["a", "b"], "choices": CHOICES},
            ]
        )
        both = handles[1]
        assert isinstance(both, list)
        results = await asyncio.gather(*both)
        assert results[0].text == results[1].text
        assert [r.scores for r in results] == [results[0].scores] * 2


async def test_a_word_that_a_choice_completes(serving: Any) -> None:
    """The client's position and text are right, though the branch's last token was replaced."""
    async with serving() as served, connect(at(served), tokens=True) as session:
        main = session.main
        await main.append("hello wor")
        result = await main.select(["ld"])
        assert result.text == "ld"
        turns = (await main.tree(text=True)).turns
        assert turns is not None
        assert "".join(turn.text or "" for turn in turns) == "hello world"
        assert main.position == turns[-1].end == result.position


async def test_cancelled(serving: Any) -> None:
    """The task that waits is cancelled: so is the selection."""
    async with serving(fake={"step_seconds": 0.02, "step_tokens": 16, "max_rows": 4}) as served:
        async with connect(at(served)) as session:
            await session.main.append("one two three four " * 20)
            before = session.main.position
            selection = session.main.select([f"{i}, {i}" for i in range(500)])
            await asyncio.sleep(0)
            selection.cancel()
            with pytest.raises(Cancelled):
                await selection
            assert (await session.main.tree()).position == before
            assert (await session.main.select(["a", "b"])).choice in (0, 1)


async def test_without_await(serving: Any) -> None:
    async with serving() as served:

        def work() -> Any:
            with connect_sync(at(served)) as session:
                session.main.append("Capital?")
                return session.main.select(CHOICES).result()

        result = await asyncio.to_thread(work)
        assert result.text in CHOICES


@program
def guide(s: State, country: str) -> list[str]:
    s += user(f"Where in {country}?")
    s += assistant("In ", select("city", choices=CHOICES), ": ", gen("why", max_tokens=5), ".")
    s += user("And?") + assistant(select("again", choices=("yes", "no")))
    return [s["city"], s["why"], s["again"]]


@program
def raw(s: State) -> str:
    s += "Q: one or two? A:" + select("which", [" one", " two"]) + "\nB:" + gen("rest", max_tokens=4)
    forks = s.fork(2)
    for fork in forks:
        fork += select("end", ["x", "y", "z"])
    assert forks.values("end")[0] == forks.values("end")[1]
    return s["which"]


async def test_in_a_program(serving: Any) -> None:
    async with serving() as served:
        run = await guide.using(at(served), temperature=0.0).arun("Spain")
        assert run.value == [run["city"], run["why"], run["again"]]
        assert run["city"] in CHOICES
        result = run.results["city"]
        assert result.choice is not None
        assert (result.text, len(result.scores or ())) == (CHOICES[result.choice], 3)
        assert [(m.role, m.content) for m in run.messages] == [
            ("user", "Where in Spain?"),
            ("assistant", f"In {run['city']}: {run['why']}."),
            ("user", "And?"),
            ("assistant", run["again"]),
        ]
        assert (await raw.using(at(served), temperature=0.0).arun()).value in (" one", " two")
        async for piece in guide.using(at(served), temperature=0.0).astream("Spain"):
            if piece.name == "again":
                assert piece.text == run["again"]


async def test_the_same_as_frames(serving: Any) -> None:
    """A program's ops are those that the protocol's page shows."""
    async with serving() as served, served.connect() as peer:
        run = await raw.using(at(served), temperature=0.0).arun()
        await peer.open(
            {"type": "append", "id": 1, "text": "Q: one or two? A:"},
            {"type": "select", "id": 2, "choices": [" one", " two"]},
            {"type": "append", "id": 3, "text": "\nB:"},
            peer.greedy(4, max_tokens=4),
        )
        done = await peer.terminal(2)
        await peer.terminal(4)
        assert done["text"] == run.value
        assert done["scores"] == run.results["which"].scores
        assert peer.text() == run["which"] + run["rest"]
