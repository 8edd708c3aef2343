"""Programs of the small language on a real engine with a fake model."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ramify.clients import connect
from ramify.clients.program import (
    AsyncState,
    Failed,
    Run,
    State,
    assistant,
    gen,
    program,
    system,
    user,
)
from ramify.protocol.errors import RamifyError


def outcome(result: Run[str] | Failed) -> str:
    return result.value if isinstance(result, Run) else str(result.error)


def at(served: Any) -> str:
    return f"ws://127.0.0.1:{served.engine.port}/v1/ws"


@program
def two_ways(s: State, question: str) -> list[str]:
    s += system("Be short.") + user(question)
    forks = s.fork(2)
    for number, fork in enumerate(forks):
        fork += assistant(f"{number}:", gen("way", max_tokens=4), ";", gen("end", max_tokens=3))
    return [f"{fork['way']}|{fork['end']}" for fork in forks]


@program
async def two_ways_async(s: AsyncState, question: str) -> list[str]:
    s += system("Be short.") + user(question)
    forks = s.fork(2)
    for number, fork in enumerate(forks):
        fork += assistant(f"{number}:", gen("way", max_tokens=4), ";", gen("end", max_tokens=3))
    ways, ends = await asyncio.gather(forks.values("way"), forks.values("end"))
    return [f"{way}|{end}" for way, end in zip(ways, ends, strict=True)]


@program
async def turns(s: AsyncState, count: int) -> str:
    for i in range(count):
        s += user(f"Question {i}") + assistant(gen("answer", max_tokens=5))
    return await s.text()


@program
def picky(s: State, word: str) -> str:
    if word == "bad":
        raise ValueError("a bad word")
    s += user(word) + assistant(gen("answer", max_tokens=3))
    return s["answer"]


async def test_a_plain_and_an_async_program_give_the_same_text_as_raw_frames(serving: Any) -> None:
    async with serving() as served, connect(at(served)) as session:
        plain = await two_ways.using(session=session, temperature=0.0).arun("Why?")
        asynchronous = await two_ways_async.using(session=session, temperature=0.0).arun("Why?")
        assert plain.value == asynchronous.value
        raw = []
        for i in range(2):
            (branch,) = await session.root(f"raw{i}")
            await branch.append(
                messages=[
                    {"role": "system", "content": "Be short."},
                    {"role": "user", "content": "Why?"},
                ]
            )
            await branch.append(f"{i}:")
            way = await branch.generate(max_tokens=4, temperature=0.0, keep_open=True)
            await branch.append(";")
            end = await branch.generate(max_tokens=3, temperature=0.0)
            raw.append(f"{way.text}|{end.text}")
        assert plain.value == raw
        assert {b.name for b in session.branches} == {"main", "raw0", "raw1"}  # theirs are dropped


async def test_values_results_text_and_messages(serving: Any) -> None:
    async with serving() as served, connect(at(served)) as session:
        run = await turns.using(session=session).arun(3)
        assert isinstance(run, Run)
        assert run["answer"] == run.results["answer"].text
        assert [m.role for m in run.messages] == ["user", "assistant"] * 3
        assert run.text() == run.value
        assert run.results["answer"].usage.cached > 0  # a turn computes its own tokens


async def test_the_branch_holds_what_the_template_renders(serving: Any) -> None:
    async with serving() as served, connect(at(served)) as session:
        seen: list[Any] = []

        @program
        async def shown(s: AsyncState) -> None:
            s += user("One") + assistant("A", gen("a", max_tokens=3), "B") + user("Two")
            await s.finish()
            seen.append(await session.branch(s.branch).tree(text=True))
            seen.append(await s.messages())

        await shown.using(session=session).arun()
        state, messages = seen
        text = "".join(turn.text or "" for turn in state.turns)
        found = [text.index(message.content) for message in messages]
        assert found == sorted(found)
        (branch,) = await session.root("whole")
        await branch.append(messages=messages)
        whole = await branch.tree(text=True)
        assert "".join(turn.text or "" for turn in whole.turns or ()) == text


@pytest.mark.parametrize("compiled", ["auto", False])
async def test_rollback_forgets_and_the_program_goes_on(serving: Any, compiled: Any) -> None:
    async with serving() as served, connect(at(served)) as session:

        @program
        async def again(s: AsyncState) -> tuple[str, str, str, str]:
            s += user("Q")
            mark = s.mark()
            s += assistant(gen("x", max_tokens=4))
            first = await s["x"]
            s.rollback(mark)
            s += assistant(gen("x", max_tokens=4))
            second = await s["x"]
            s.rollback(mark)  # as often as one likes
            assert "x" not in s
            s += assistant(gen("y", max_tokens=4))
            return first, second, await s["y"], await s.text()

        using = again.using(session=session, temperature=0.0, compiled=compiled)
        first, second, third, text = (await using.arun()).value
        assert first == second == third
        assert text == "Q" + third
        await session.tree()  # the drops are through
        assert [branch.name for branch in session.branches] == ["main"]


async def test_marks_in_one_frame(serving: Any) -> None:
    """Taken in the middle of a turn, gone back to twice; a child lives on; then all is cancelled."""
    async with serving() as served, connect(at(served)) as session:

        @program
        async def marks(s: AsyncState) -> tuple[list[str], list[str]]:
            s += user("Q") + assistant("A ", gen("x", max_tokens=4))
            s += "raw "
            mark = s.mark()
            s += gen("lost", max_tokens=9)
            child = s.fork(1)
            child[0] += gen("kept", max_tokens=3)
            s.rollback(mark)
            s += gen("y", max_tokens=4)
            inner = s.mark()
            s += user("And?") + assistant(gen("lost", max_tokens=2))
            s.rollback(inner)
            s += gen("z", max_tokens=4)
            names = [await s["x"], await s["y"], await s["z"], await child[0]["kept"]]
            return names, [await s.text(), await child[0].text()]

        @program
        async def without(s: AsyncState) -> str:
            s += user("Q") + assistant("A ", gen("x", max_tokens=4))
            s += "raw " + gen("y", max_tokens=4) + gen("z", max_tokens=4)
            return await s.text()

        using = marks.using(session=session, temperature=0.0, compiled=True)
        (x, y, z, kept), (text, child) = (await using.arun()).value
        plain = await without.using(session=session, temperature=0.0, compiled=True).arun()
        assert text == plain.value == f"QA {x}raw {y}{z}"
        assert child.endswith(kept)
        await session.tree()  # the drops are through
        assert [branch.name for branch in session.branches] == ["main"]


async def test_a_failure_ends_what_stands_behind_it(serving: Any) -> None:
    async with serving() as served, connect(at(served)) as session:

        @program
        async def long(s: AsyncState) -> None:
            s += gen("empty", max_tokens=2)  # nothing is there to go on from
            s += user("Q") + assistant(gen("after", max_tokens=2))
            with pytest.raises(RamifyError, match="empty"):
                await s["after"]
            with pytest.raises(KeyError, match="nothing is called 'other' here; there is empty, after"):
                s["other"]

        with pytest.raises(RamifyError, match="empty"):
            await long.using(session=session).arun()
        assert {b.name for b in session.branches} == {"main"}
        assert (await turns.using(session=session).arun(1))["answer"]


async def test_text_streams_and_leaving_early_cancels(serving: Any) -> None:
    async with serving(fake={"step_seconds": 0.001}) as served, connect(at(served)) as session:
        whole = await turns.using(session=session, temperature=0.0).arun(2)
        pieces = [p async for p in turns.using(session=session, temperature=0.0).astream(2)]
        assert "".join(p.text for p in pieces[-5:]).endswith(whole["answer"][-2:])
        assert {p.name for p in pieces} == {"answer"}
        stream = turns.using(session=session, max_tokens=10_000).astream(100)
        async for _ in stream:
            break
        await stream.aclose()
        await served.quiet()
        assert {b.name for b in session.branches} == {"main"}


async def test_a_batch_keeps_order_and_errors_and_goes_on_from_its_file(
    serving: Any, tmp_path: Path
) -> None:
    async with serving() as served:
        here = picky.using(at(served), temperature=0.0)
        items = [{"word": w} for w in ("one", "bad", "two")] * 7
        file = tmp_path / "results.jsonl"
        results = await here.arun_batch(items, concurrency=5, sockets=2, results=file)
        for item, result in zip(items, results, strict=True):
            if item["word"] == "bad":
                assert isinstance(result, Failed)
                assert str(result.error) == "a bad word"
            else:
                assert isinstance(result, Run)
        lines = file.read_bytes().splitlines(keepends=True)
        assert len(lines) == len(items)
        file.write_bytes(b"".join(lines[:10]) + lines[10][:20])  # killed in the middle of a line
        again = await here.arun_batch(items, results=file)
        assert list(map(outcome, again)) == list(map(outcome, results))
        with pytest.raises(ValueError, match="other items"):
            await here.arun_batch(items[1:], results=file)
        with pytest.raises(TypeError, match="item 0 does not fit picky"):
            await here.arun_batch([{"words": "x"}])
        await served.deserted()


async def test_runs_without_await_from_a_thread(serving: Any) -> None:
    async with serving() as served:
        here = two_ways.using(at(served), temperature=0.0)
        run = await asyncio.to_thread(here.run, "Why?")
        assert run.value == (await here.arun("Why?")).value
        pieces = await asyncio.to_thread(lambda: list(here.stream("Why?")))
        assert {p.name for p in pieces} == {"way", "end"}


async def test_a_batch_that_was_stopped_goes_on(serving: Any, tmp_path: Path) -> None:
    async with serving(fake={"step_seconds": 0.001}) as served:
        here = turns.using(at(served), temperature=0.0)
        items: list[dict[str, Any]] = [{"count": 1 + i % 3} for i in range(40)]
        file = tmp_path / "results.jsonl"
        batch = asyncio.create_task(here.arun_batch(items, concurrency=4, sockets=2, results=file))
        while not file.exists() or len(file.read_bytes().splitlines()) < 5:
            await asyncio.sleep(0)
        batch.cancel()
        await asyncio.gather(batch, return_exceptions=True)
        done = file.read_bytes().splitlines()
        assert 5 <= len(done) < len(items)
        results = await here.arun_batch(items, concurrency=4, sockets=2, results=file)
        lines = file.read_bytes().splitlines()
        assert lines[: len(done)] == done
        assert len(lines) == len(items)  # nothing ran twice
        assert all(isinstance(result, Run) for result in results)
        await served.deserted()


async def test_reordering_shares_more_and_changes_the_prompt(serving: Any) -> None:
    async with serving() as served, connect(at(served)) as session:
        rules = " ".join(f"Rule {i}." for i in range(20))

        @program
        def ask(s: State, question: str) -> str:
            s += user("Question: ", question, f"\n{rules}") + assistant(gen("a", max_tokens=3))
            return s["a"]

        cached = []
        for reorder in (False, True):
            using = ask.using(session=session, temperature=0.0, reorder=reorder)
            await using.arun(f"{reorder}, who?")
            run = await using.arun(f"{reorder}, why?")
            cached.append(run.results["a"].usage.cached)
            lines = [f"Question: {reorder}, why?", rules]
            assert run.messages[0].content == "\n".join(reversed(lines) if reorder else lines)
            assert run.text().endswith(run.value)
        assert cached[1] > cached[0] + 100
