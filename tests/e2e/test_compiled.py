"""Programs three ways: step by step, as one frame, and as raw frames; and what one frame saves."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import connect as dial
from websockets.asyncio.server import ServerConnection, serve

from ramify.clients import connect
from ramify.clients.program import AsyncState, NotOneFrame, State, assistant, gen, program, select, user
from ramify.protocol.errors import RamifyError

MODES = (False, "auto", True)


def at(served: Any) -> str:
    return f"ws://127.0.0.1:{served.engine.port}/v1/ws"


class Counted:
    """A way to a server that counts round trips: frames that were sent after something new was heard."""

    def __init__(self) -> None:
        self.trips = 0
        self.frames = 0
        self._heard = True

    async def carry(self, client: ServerConnection, url: str) -> None:
        assert client.subprotocol is not None
        async with dial(url, subprotocols=[client.subprotocol]) as server:

            async def up() -> None:
                async for data in client:
                    self.frames += 1
                    self.trips += self._heard
                    self._heard = False
                    await server.send(data)

            async def down() -> None:
                async for data in server:
                    self._heard = True
                    await client.send(data)

            done, left = await asyncio.wait(
                [asyncio.create_task(up()), asyncio.create_task(down())],
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in left:
                task.cancel()
            await asyncio.gather(*done, *left, return_exceptions=True)


@asynccontextmanager
async def counted(url: str) -> AsyncIterator[tuple[Counted, str]]:
    way = Counted()
    async with serve(
        lambda client: way.carry(client, url),
        "127.0.0.1",
        0,
        select_subprotocol=lambda _, offered: offered[0],
    ) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield way, f"ws://127.0.0.1:{port}/v1/ws"


@program
def thoughts(s: State, question: str, depth: int = 2) -> str:
    """A tree of thought: each level keeps the best of three."""
    s += user(question)
    for level in range(depth):
        forks = s.fork(3)
        for i, fork in enumerate(forks):
            fork += assistant(f"Step {level}.{i}: ", gen("thought", max_tokens=6, logprobs=1))
        forks.adopt()
        s += user("Go on.")
    s += assistant(gen("answer", max_tokens=5))
    return s["answer"]


@program
def beam(s: State, question: str) -> list[str]:
    s += user(question)
    forks = s.fork(4)
    for i, fork in enumerate(forks):
        fork += assistant(f"{i}", gen("first", max_tokens=4, logprobs=1))
    best = forks.prune(2)
    for each in best:
        each += user("More") + assistant(gen("second", max_tokens=4))
    return [f"{each['first']}|{each['second']}|{each.text()}" for each in best]


@program
def drafts(s: State, question: str) -> str:
    s += user(question)
    forks = s.fork(3, hidden=True)
    for i, fork in enumerate(forks):
        fork += assistant(f"{i}:", gen("draft", max_tokens=4))
    forks.join(prefix="Drafts:\n", each="{i}. {text}\n", suffix="Merge.")
    s += assistant(gen("answer", max_tokens=5))
    return s["answer"]


@program
def joined(s: State, question: str) -> str:
    s += user(question)
    forks = s.fork(2)
    for i, fork in enumerate(forks):
        fork += assistant(f"{i}:", gen("draft", max_tokens=4))
    forks.join(each="{i}. {text}\n")
    s += assistant(gen("answer", max_tokens=5))
    return s.text()


@program
def judged(s: State, question: str) -> str:
    s += user(question)
    forks = s.fork(2)
    for i, fork in enumerate(forks):
        fork += assistant(f"{i}:", gen("way", max_tokens=4))
    judges = [fork.fork(1)[0] for fork in forks]
    for judge in judges:
        judge += user("Mark it.") + assistant(gen("mark", max_tokens=4, logprobs=1))
    forks.adopt(judges=judges)
    s += user("Why?") + assistant(gen("why", max_tokens=4))
    return f"{s['way']}|{s['why']}"


@program
async def chosen(s: AsyncState, question: str) -> tuple[str, str]:
    s += user(question) + assistant("I say ", select("city", choices=["Rome", "Oslo", "Lima"]))
    s += user("And?") + assistant(gen("rest", max_tokens=4))
    return await s["city"], await s["rest"]


@program
async def by_vote(s: AsyncState, question: str) -> str:
    s += user(question)
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        fork += assistant(f"{i % 2}", gen("vote", max_tokens=3))
    forks.adopt(by="vote")
    return await s["vote"]


@pytest.mark.parametrize(
    "one", [thoughts, beam, drafts, joined, judged, chosen, by_vote], ids=lambda p: p.__name__
)
async def test_a_program_gives_the_same_in_each_way(serving: Any, one: Any) -> None:
    async with serving() as served, connect(at(served)) as session:
        runs = [
            await one.using(session=session, temperature=0.0, compiled=mode).arun("Why?")
            for mode in MODES
        ]
        first = runs[0]
        for run in runs[1:]:
            assert run.value == first.value
            assert run.messages == first.messages
            assert {n: r.text for n, r in run.results.items()} == {
                n: r.text for n, r in first.results.items()
            }
        assert first.value
        graph = await one.atrace("Why?")
        assert len(graph.ops) > 3
        await served.quiet()


async def test_the_same_frame_by_hand(serving: Any) -> None:
    """What `trace` shows, sent as one raw frame, says the same."""
    async with serving() as served, connect(at(served)) as session:
        for one in (thoughts, joined, judged):
            run = await one.using(session=session, temperature=0.0).arun("Why?")
            graph = await one.using(temperature=0.0).atrace("Why?")
            handles = await session.send(graph.ops)
            results = [await handle for handle in handles]  # type: ignore[misc]
            texts = {
                name: result.text
                for name, result in zip(graph.names, results, strict=True)
                if name is not None
            }
            last = list(run.results)[-1]
            assert texts[last] == run.results[last].text
            await session.branch("program").drop()


async def test_a_compiled_tree_of_thought_is_one_round_trip(serving: Any) -> None:
    async with serving() as served, counted(at(served)) as (way, url), connect(url) as session:
        trips: dict[Any, int] = {}
        frames: dict[Any, int] = {}

        @program
        def noted(s: State, mode: Any) -> str:
            before = way.trips
            answer = thoughts(s, "Why?", 3)
            trips[mode] = way.trips - before
            return answer

        for mode in MODES:
            await session.tree()  # what an earlier run sent without waiting is through
            before = way.frames
            await noted.using(session=session, temperature=0.0, compiled=mode).arun(mode)
            await session.tree()
            frames[mode] = way.frames - before - 1
        assert frames["auto"] == frames[True] == 2  # the program, and the drop that nobody waits for
        assert trips["auto"] == trips[True] == 1
        assert trips[False] >= 10


@program
def wide(s: State, question: str, width: int, depth: int) -> str:
    """Tree of thought: each of `width` states has as many proposals, judged; the best goes on."""
    s += user(question)
    states = [s]
    for level in range(depth):
        kept: list[State] = []
        for state in states:
            forks, judges = state.fork(width), []
            for fork in forks:
                fork += assistant("Step:", gen("step", max_tokens=2, ignore_eos=True))
                (judge,) = fork.fork(1)
                judge += user("Good?") + assistant(select("mark", choices=["1", "2", "3"]))
                judges.append(judge)
            kept += forks.prune(1 if level else width, by="number", judges=judges)
        states = kept
    return states[0].text()


async def test_a_tree_of_thought_of_the_papers_size_is_one_frame(serving: Any) -> None:
    """Five wide and three deep, 55 proposals."""
    async with serving() as served, counted(at(served)) as (way, url), connect(url) as session:
        before = way.frames
        graph = wide.trace("Why?", 5, 3)
        assert graph.whole
        run = await wide.using(session=session, temperature=0.0, compiled=True).arun("Why?", 5, 3)
        await session.tree()
        assert run.value.count("Step:") == 3
        assert way.frames - before == 3  # the program, the drop that nobody waits for, and `tree`


async def test_what_needs_a_second_frame_says_where(serving: Any) -> None:
    @program
    async def reads(s: AsyncState) -> str:
        s += user("Q") + assistant(gen("a", max_tokens=3))
        if "x" in await s["a"]:
            s += user("x")
        s += user("again") + assistant(gen("b", max_tokens=3))
        return await s["b"]

    async with serving() as served, connect(at(served)) as session:
        values = [
            (await reads.using(session=session, temperature=0.0, compiled=mode).arun()).value
            for mode in (False, "auto")
        ]
        assert values[0] == values[1]
        with pytest.raises(NotOneFrame, match=r"\.py:\d+ does not fit .* at .*test_compiled"):
            await reads.using(session=session, compiled=True).arun()
        graph = await reads.atrace()
        assert not graph.whole
        assert "Python uses the text of 'a'" in graph.stops[0]
        assert "test_compiled.py:" in graph.stops[0]


async def test_a_failing_source_loses_and_a_failing_step_skips_what_needs_it(serving: Any) -> None:
    @program
    async def one_fails(s: AsyncState, by: Any) -> str:
        s += user("Q")
        forks = s.fork(2)
        forks[0] += assistant(gen("a", max_tokens=3, stop_token_ids=[3], logprobs=1, expect=1))
        forks[1] += assistant(gen("a", max_tokens=3, logprobs=1))
        if by is None:
            forks.join()
        else:
            forks.adopt(by=by)
        s += user("R") + assistant(gen("b", max_tokens=3))
        return await s["b"]

    async with serving() as served, connect(at(served)) as session:
        for mode in MODES:
            here = one_fails.using(session=session, temperature=0.0, compiled=mode)
            assert (await here.arun("logprob")).value
            with pytest.raises(RamifyError, match="position"):
                await here.arun(None)
        await session.main.say("still here")


async def test_leaving_early_cancels_the_whole_program(serving: Any) -> None:
    @program
    async def wide(s: AsyncState) -> None:
        s += user("Q")
        for fork in s.fork(12):
            fork += assistant(gen("a", max_tokens=10_000)) + user("R") + assistant(gen("b"))

    async with serving(fake={"step_seconds": 0.001}) as served, connect(at(served)) as session:
        for mode in MODES:
            stream = wide.using(session=session, compiled=mode).astream()
            async for _ in stream:
                break
            await stream.aclose()
            await served.quiet()
            assert {b.name for b in session.branches} == {"main"}


async def test_a_lost_connection_resumes(serving: Any) -> None:
    async with serving(fake={"step_seconds": 0.002}) as served, connect(at(served)) as session:
        expected = await thoughts.using(session=session, temperature=0.0).arun("Why?")
        lost = 0
        pieces = thoughts.using(session=session, temperature=0.0, compiled=True).astream("Why?")
        async for piece in pieces:
            if lost < 3 and piece.name == "thought":
                lost += 1
                session.link.abort()
        again = await thoughts.using(session=session, temperature=0.0, compiled=True).arun("Why?")
        assert again.value == expected.value
        assert lost == 3


async def test_a_program_that_is_too_big_for_a_frame_goes_in_several(serving: Any) -> None:
    @program
    async def many(s: AsyncState, count: int) -> list[str]:
        s += user("Q")
        forks = s.fork(count)
        for fork in forks:
            fork += assistant(gen("a", max_tokens=1)) + user("R") + assistant(gen("b", max_tokens=1))
        return await forks.values("b")

    async with serving() as served, connect(at(served)) as session:
        run = await many.using(session=session, temperature=0.0).arun(180)
        assert len(run.value) == 180
        with pytest.raises(RamifyError, match="one frame"):
            await many.using(session=session, compiled=True).arun(180)


async def test_an_async_program_that_waits_has_sent_what_it_added(
    serving: Any,
) -> None:
    seen = asyncio.Event()

    @program
    async def waits(s: AsyncState) -> str:
        s += user("Q") + assistant(gen("a", max_tokens=3))
        await asyncio.wait_for(seen.wait(), 60)
        return await s["a"]

    async with serving() as served, connect(at(served)) as session:
        async for _ in waits.using(session=session).astream():
            seen.set()
        assert seen.is_set()


@program
async def wild(s: AsyncState, seed: int) -> list[str]:
    """Whatever the language has, in an order that the seed says; a few texts are read on the way."""
    dice = random.Random(seed)
    s += user(f"Seed {seed}")
    states = [s]
    read: list[str] = []

    def talk(state: AsyncState, say: str) -> None:
        turn = assistant(say, gen("x", max_tokens=dice.randint(1, 5), logprobs=1))
        if dice.random() < 0.3:
            turn = assistant(say, gen("y", max_tokens=2), ", ", select("x", choices=["ab", "abc", "d"]))
        state += user(say) + turn

    for step in range(8):
        state = dice.choice(states)
        match dice.choice(["talk", "talk", "beam", "adopt", "join", "read", "raw"]):
            case "talk":
                talk(state, f"t{step}")
            case "raw":
                state += f"<raw {step}>"
            case "read" if "x" in state:
                read.append(await state["x"])
            case "read":
                state.flush()
            case how:
                forks = state.fork(dice.randint(2, 4))
                for i, fork in enumerate(forks):
                    fork += user(f"{how}{i}") + assistant(gen("x", max_tokens=2 + i, logprobs=1))
                if how == "join":
                    forks.join(role=dice.choice(["user", None]), each="{i}:{text};")
                elif how == "adopt":
                    forks.adopt(by=dice.choice(["vote", "logprob"]))
                else:
                    states += forks.prune(2, by=dice.choice(["vote", "logprob"]))
    for state in states:
        talk(state, "end")
    return [*read, *[await state.text() for state in states]]


@pytest.mark.parametrize("seed", range(8))
async def test_a_random_program_gives_the_same_in_each_way(serving: Any, seed: int) -> None:
    async with serving() as served, connect(at(served)) as session:
        here = wild.using(session=session, temperature=0.0)
        eager = await here.using(compiled=False).arun(seed)
        framed = await here.arun(seed)
        assert framed.value == eager.value
        assert framed.messages == eager.messages
        await session.tree()  # the drop of the second run is through
        assert {b.name for b in session.branches} == {"main"}


async def test_a_beam_is_joined_at_once_and_kept_children_go_on(serving: Any) -> None:
    shown: list[tuple[list[Any], str]] = []

    @program
    async def kept(s: AsyncState) -> list[str]:
        s += user("Q")
        forks = s.fork(3)
        for i, fork in enumerate(forks):
            fork += assistant(f"{i}:", gen("a", max_tokens=2 + i, logprobs=1))
        best = forks.prune(2)
        best.join(each="{text}|", keep=True)
        best[1] += user("More") + assistant(gen("b", max_tokens=2))
        with pytest.raises(TypeError, match="went into a join or a prune"):
            forks[0] += "x"
        with pytest.raises(KeyError, match="nothing is called 'z' here; there is a, b"):
            best[1]["z"]
        await s.finish()
        state = await session.branch(s.branch).tree(text=True)
        turns = [m.content for turn in state.turns or () for m in turn.messages or ()]
        shown.append((turns, (await s.messages())[-1].content))
        return [*await best.values("a"), await best[1]["b"]]

    async with serving() as served, connect(at(served)) as session:
        for mode in (False, "auto"):
            run = await kept.using(session=session, temperature=0.0, compiled=mode).arun()
            turns, told = shown[-1]
            assert turns[-1] == told == f"{run.value[0]}|{run.value[1]}|"
        assert shown[0] == shown[1]


async def test_the_first_one_wins(serving: Any) -> None:
    @program
    async def race(s: AsyncState) -> str:
        s += user("Q")
        forks = s.fork(3)
        for fork, tokens in zip(forks, (400, 3, 400), strict=True):
            fork += assistant(gen("a", max_tokens=tokens, ignore_eos=True))
        forks.adopt(by="first")
        return await s["a"]

    async with serving() as served, connect(at(served)) as session:
        run = await race.using(session=session, temperature=0.0, compiled=True).arun()
        assert run.results["a"].usage.output == 3
        await served.quiet()
