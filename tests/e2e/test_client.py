"""The Python client against a real server: what `ramify.clients` promises, over sockets that break."""

import asyncio
from typing import Any

import ramify
import ramify.clients
from ramify.clients.commands.conversation import before_answer
from ramify.clients.commands.transcript import groups, of_turns
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
