"""The Python client against a real server: what `ramify.clients` promises, over sockets that break."""

import asyncio
from typing import Any

import ramify
import ramify.clients
from ramify.clients.commands.branch_transcript import before_answer, groups, of_turns
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import Generate

SLOW = {"step_seconds": 0.002}
GREEDY = {"temperature": 0.0, "max_tokens": 40}


async def test_a_chat_a_fork_and_a_rollback(serving: Any, executor: str) -> None:
    async with (
        serving(executor=executor) as served,
        ramify.clients.connect(served.engine.url) as session,
    ):
        oracle = served.oracle
        main = session.main
        first = oracle.turn("Capital of France?")
        text = ""
        async for delta in main.chat("Capital of France?", **GREEDY):
            text += delta.text
        answer = oracle.output(first, 40)
        assert text == oracle.text(answer)
        await main.say("And Spain?")
        second = oracle.next_turn([*first, *answer], "And Spain?")
        children = await main.fork("a", "b")
        results = await asyncio.gather(*(child.generate(**GREEDY) for child in children))
        assert {result.text for result in results} == {oracle.text(oracle.output(second, 40))}
        await main.rollback(turns=2)
        assert main.position == 0
        await children[1].drop()
        assert sorted(branch.name for branch in session.branches) == ["a", "main"]


async def test_drops_lose_and_double_nothing(serving: Any, executor: str) -> None:
    async with serving(executor=executor, fake=SLOW) as served:
        async with ramify.clients.connect(served.engine.url) as session:
            oracle = served.oracle
            text, drops = "", 0
            async for delta in session.main.chat("a long story", temperature=0.0, max_tokens=400):
                text += delta.text
                if len(text) > 100 * (drops + 1) and drops < 3:
                    served.drop_connections()
                    drops += 1
            assert drops == 3
            assert text == oracle.text(oracle.output(oracle.turn("a long story"), 400))


async def test_log_probabilities_of_what_is_appended(serving: Any) -> None:
    async with serving() as served, ramify.clients.connect(served.engine.url) as session:
        ok = await session.main.append("Once upon a time", logprobs=True)
        tokens = served.oracle.tokenizer.encode("Once upon a time")
        scores = served.oracle.model.expected_scores(tokens, range(len(tokens) - 1), tokens[1:])
        entries = ok.result["logprobs"]
        assert [entry["token"] for entry in entries] == tokens
        assert [entry["logprob"] for entry in entries] == [None, *scores]
        assert [len(entry.get("top", ())) for entry in entries] == [0, *[1] * len(scores)]
        again = await session.main.append(tokens=tokens[1:3], logprobs=2)
        assert [len(entry["top"]) for entry in again.result["logprobs"]] == [2, 2]


async def test_a_program_in_a_frame(serving: Any, executor: str) -> None:
    """Fork, generate, join and prune: one frame, whatever happens to the connection."""
    async with (
        serving(executor=executor, fake=SLOW) as served,
        ramify.clients.connect(served.engine.url) as session,
    ):
        names = ["a", "b", "c"]
        handles = await session.send(
            [
                {"type": "append", "text": "hello"},
                {"type": "fork", "as": names},
                {"type": "append", "branch": "b", "text": " you"},
                {"type": "generate", "branch": names, **GREEDY},
                {"type": "join", "from": ["a", "b"], "role": None, "each": "[{i}:{text}]"},
                {"type": "generate", **GREEDY},
            ]
        )
        thoughts, last = handles[3], handles[5]
        assert isinstance(thoughts, list)
        assert isinstance(last, ramify.Generation)
        served.drop_connections()
        texts = {each.branch: each.text for each in await asyncio.gather(*thoughts)}
        result = await last
        state = await session.main.tree(text=True)
        said = "".join(turn.text or "" for turn in state.turns or [])
        joined = f"[1:{texts['a']}][2:{texts['b']}]"
        assert said == f"hello{joined}{result.text}"
        assert sorted(branch.name for branch in session.branches) == ["c", "main"]


async def test_the_best_of_a_beam(serving: Any) -> None:
    async with serving() as served, ramify.connect(served.engine.url) as session:
        await session.main.append("hello")
        thoughts = session.main.generate(n=4, max_tokens=4, temperature=1.0, seed=1, logprobs=1)
        results = await asyncio.gather(*thoughts)
        means = {result.branch: result.mean_logprob for result in results}
        beam = await session.prune([*means], into=["one", "two"])
        assert beam.scores == means
        assert [branch.name for branch in beam.branches] == ["one", "two"]
        assert beam.kept == sorted(means, key=lambda name: -(means[name] or 0.0))[:2]
        assert sorted(beam.dropped) == sorted(means)
        best = await session.main.prune(*beam.branches, by="vote")
        assert [branch.name for branch in best.branches] == ["main"]
        assert session.main.position == 7
        assert (await session.main.generate(**GREEDY)).reason == "length"

    async with serving() as served:

        def again() -> list[str]:
            with ramify.connect_sync(served.engine.url) as session:
                session.main.append("hello")
                children = session.main.fork("a", "b")
                for child in children:
                    child.generate(max_tokens=4).result()
                session.main.prune(*children, by="first")
                children = session.main.fork("a", "b")
                session.main.join(*children, role=None, prefix="x", each="")
                session.cancel(subtree=True)
                return [branch.name for branch in session.branches]

        assert await asyncio.to_thread(again) == ["main"]


async def test_a_subtree_is_cancelled(serving: Any) -> None:
    async with serving(fake=SLOW) as served, ramify.connect(served.engine.url) as session:
        await session.main.append("hello")
        handles = await session.send(
            [
                {"type": "fork", "as": ["a", "b"]},
                {"type": "generate", "branch": ["a", "b"], "max_tokens": 2000, "ignore_eos": True},
                {"type": "prune", "from": ["a", "b"], "into": "main"},
                {"type": "generate"},
            ]
        )
        running = handles[1]
        assert isinstance(running, list)
        await anext(running[0])
        await session.main.cancel(subtree=True)
        assert [(await each).reason for each in running] == ["cancelled", "cancelled"]
        codes = []
        for handle in handles[2:]:
            assert not isinstance(handle, list)
            try:
                await handle
            except RamifyError as error:
                codes.append(error.code)
        assert codes == ["cancelled", "cancelled"]
        assert (await session.branch("a").generate(max_tokens=2, ignore_eos=True)).reason == "length"


async def test_errors_of_the_server_are_exceptions(serving: Any) -> None:
    async with serving() as served, ramify.clients.connect(served.engine.url) as session:
        caught = None
        try:
            await session.branch("nowhere").generate(**GREEDY)
        except RamifyError as error:
            caught = error
        assert caught is not None
        assert caught.code == "no_branch"
        assert "nowhere" in caught.message


async def test_the_synchronous_facade(serving: Any) -> None:
    async with serving() as served:

        def chat() -> str:
            with ramify.clients.connect_sync(served.engine.url) as session:
                return "".join(delta.text for delta in session.main.chat("hello", **GREEDY))

        text = await asyncio.to_thread(chat)
        assert text == served.oracle.text(served.oracle.output(served.oracle.turn("hello"), 40))


async def test_a_conversation_can_be_told_again(serving: Any) -> None:
    """What `tree` shows of a chat are its messages, and appended anew they make the same branch."""
    async with serving() as served, ramify.connect(served.engine.url) as session:
        main = session.main
        await main.say("be brief", role="system")
        for text in ("hello", "more <|im_end|>"):
            result = await main.chat(text, **GREEDY)
        said = of_turns((await main.tree(text=True)).turns or [])
        assert not said.raw
        roles = [message.role for message in said.messages]
        assert roles == ["system", "user", "assistant", "user", "assistant"]
        assert said.messages[-1].content == result.text
        (again,) = await session.root("again")
        for group in groups(said.messages):
            await again.append(messages=group)
        assert of_turns((await again.tree(text=True)).turns or []).messages == said.messages
        await again.rollback(turns=1)
        left = of_turns((await again.tree(text=True)).turns or []).messages
        assert left == said.messages[:3]
        ops = before_answer("main", (await main.tree(text=True)).turns or [])
        *_, retried = await session.send([*ops, Generate(id=0, **GREEDY)])
        assert isinstance(retried, ramify.Generation)
        assert (await retried).text == result.text
