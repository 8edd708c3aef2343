"""Chats and trees over a socket, with both placements of the executor and both codecs.

The fake model makes every answer predictable from the branch's tokens: a wrong page, a wrong
position or a neighbour's token changes the text.
"""

import asyncio
from typing import Any

import pytest

CODECS = pytest.mark.parametrize("codec", ["json", "msgpack"])
SLOW = {"step_seconds": 0.002}  # long enough for the client to act in mid-stream


@CODECS
async def test_a_turn_computes_what_is_new_and_one_more(serving: Any, executor: str, codec: str) -> None:
    async with serving(executor=executor, eos_every=40) as served, served.connect(codec) as peer:
        oracle = served.oracle
        state = await peer.open()
        assert state["branches"] == [{"branch": "main", "position": 0, "resident": 0}]
        assert peer.ws.subprotocol == f"ramify.v1+{codec}"
        branch: list[int] = []
        shown = ""
        for turn, content in enumerate(["Capital of France?", "And Spain?", "Äpfel, 東京, 🙂"]):
            before = len(branch)
            prompt = oracle.next_turn(branch, content) if branch else oracle.turn(content)
            done = await peer.say(2 * turn + 1, content, max_tokens=64)
            answer = oracle.output(prompt, 64)
            shown += oracle.text(answer)
            assert peer.text() == shown
            assert done["usage"]["prompt"] == len(prompt)
            assert done["usage"]["cached"] == max(0, before - 1)  # the last one was never run
            assert done["usage"]["computed"] == len(prompt) - done["usage"]["cached"]
            assert done["usage"]["output"] == len(answer)
            assert done["reason"] == ("stop" if answer[-1] == 2 else "length")
            branch = [*prompt, *answer]
            assert done["position"] == len(branch) == peer.position["main"]
        assert (await peer.tree(99))["main"] == branch


@CODECS
async def test_a_program_in_one_frame(serving: Any, placement: dict[str, Any], codec: str) -> None:
    """open + append + fork x3 + generate on a list + rollback: one round trip."""
    async with serving(**placement) as served, served.connect(codec) as peer:
        oracle = served.oracle
        await peer.open(
            peer.user(1, "Plan a 1-day trip."),
            {"type": "fork", "id": 2, "as": ["a", "b", "c"]},
            {"type": "generate", "id": 3, "branch": ["a", "b", "c"], "max_tokens": 20, "seed": 7},
            {"type": "rollback", "id": 4, "turns": 1},
            peer.user(5, "Merge."),
            peer.greedy(6),
        )
        done = await peer.terminals(3, ["a", "b", "c"])
        prompt = oracle.turn("Plan a 1-day trip.")
        for i, name in enumerate("abc"):
            assert peer.text(name) == oracle.text(oracle.output(prompt, 20, seed=7 + i))
            assert done[name]["usage"]["prompt"] == len(prompt)
        computed = sorted(d["usage"]["computed"] for d in done.values())
        assert computed[:2] == [1, 1]  # the shared prompt was computed once
        main = await peer.terminal(6)
        assert (await peer.terminal(4))["position"] == 0
        merged = oracle.turn("Merge.")
        assert main["usage"]["prompt"] == len(merged)
        assert peer.text() == oracle.text(oracle.output(merged))


async def test_forks_in_the_middle_and_new_roots(serving: Any, executor: str) -> None:
    async with serving(executor=executor) as served, served.connect() as peer:
        oracle = served.oracle
        text = "The quick brown fox jumps over the lazy dog."
        tokens = oracle.tokenizer.encode(text)
        await peer.open(
            {"type": "append", "id": 1, "text": text},
            {"type": "fork", "id": 2, "as": ["half"], "at": 5},
            {"type": "fork", "id": 3, "branch": None, "as": ["other"]},
            {"type": "append", "id": 4, "branch": ["half", "other"], "tokens": [40, 41]},
            peer.greedy(5, branch=["main", "half", "other"], max_tokens=10),
        )
        await peer.terminals(5, ["main", "half", "other"])
        assert peer.text("main") == oracle.text(oracle.output(tokens, 10))
        assert peer.text("half") == oracle.text(oracle.output([*tokens[:5], 40, 41], 10))
        assert peer.text("other") == oracle.text(oracle.output([40, 41], 10))
        tree = await peer.tree(6)
        assert tree["half"][:7] == [*tokens[:5], 40, 41]


async def test_rename_drop_meta_and_retain(serving: Any, executor: str) -> None:
    async with serving(executor=executor) as served, served.connect() as peer:
        await peer.open(
            peer.user(1, "hello"),
            {"type": "fork", "id": 2, "as": ["x", "y"]},
            {"type": "set", "id": 3, "branch": "x", "name": "z", "meta": {"k": [1]}, "retain_s": 60},
            {"type": "drop", "id": 4, "branch": ["y"]},
            {"type": "set", "id": 5, "meta": {"title": "t"}},
            peer.greedy(6, branch="z", max_tokens=4),
        )
        assert (await peer.terminal(6))["branch"] == "z"
        await peer.send({"type": "tree", "id": 7})
        state = await peer.terminal(7)
        assert state["meta"] == {"title": "t"}
        branches = {b["branch"]: b for b in state["branches"]}
        assert sorted(branches) == ["main", "z"]
        assert branches["z"]["parent"] == "main"
        assert branches["z"]["meta"] == {"k": [1]}
        assert branches["z"]["retain_s"] == 60
        await peer.send(peer.greedy(8, branch="y"))
        assert (await peer.terminal(8))["code"] == "no_branch"


@CODECS
async def test_rollback_then_the_same_answer(serving: Any, executor: str, codec: str) -> None:
    """Warm = cold: what comes again is the same, and is cached."""
    async with serving(executor=executor) as served, served.connect(codec) as peer:
        await peer.open()
        await peer.say(1, "one")
        second = await peer.say(3, "two three")
        text = peer.text()
        await peer.send({"type": "rollback", "id": 5, "turns": 1})
        back = await peer.terminal(5)
        peer.truncate("main", back["position"])
        again = await peer.say(6, "two three")
        assert peer.text() == text
        assert again["position"] == second["position"]
        assert again["usage"]["cached"] >= second["usage"]["prompt"] - 1  # even the question has KV


async def test_cancel_in_mid_stream_then_append_at_once(serving: Any, placement: dict[str, Any]) -> None:
    async with serving(**placement, fake=SLOW) as served, served.connect() as peer:
        oracle = served.oracle
        await peer.open(peer.user(1, "count"), peer.greedy(2, max_tokens=3000), tokens=True)
        await peer.next("delta")
        await peer.send(
            {"type": "cancel", "id": 3}, peer.user(4, "enough"), peer.greedy(5, max_tokens=8)
        )
        assert (await peer.terminal(3))["result"] == {"cancelled": [2]}
        done = await peer.terminal(2)
        assert done["reason"] == "cancelled"
        assert await peer.terminal(5)
        prompt = oracle.turn("count")
        said = done["usage"]["output"]
        assert 0 < said < 3000
        assert done["position"] == len(prompt) + said
        first = oracle.output(prompt, said)
        second = oracle.output(oracle.next_turn([*prompt, *first], "enough"), 8)
        assert peer.tokens["main"] == [*first, *second]
        assert peer.text() == oracle.text(first) + oracle.text(second)


async def test_cancel_of_queued_ops(serving: Any, executor: str) -> None:
    async with serving(executor=executor, fake=SLOW) as served, served.connect() as peer:
        await peer.open(
            peer.user(1, "count"),
            peer.greedy(2, max_tokens=3000),
            peer.user(3, "never"),
            peer.user(4, "but this"),
            peer.greedy(5, max_tokens=3),
        )
        await peer.next("delta")
        await peer.send({"type": "cancel", "id": 6, "ops": [3, 2]})
        assert (await peer.terminal(6))["result"] == {"cancelled": [2, 3]}
        assert (await peer.terminal(3))["code"] == "cancelled"
        assert (await peer.terminal(2))["reason"] == "cancelled"
        assert (await peer.terminal(4))["type"] == "ok"
        assert (await peer.terminal(5))["reason"] == "length"


async def test_stop_strings_and_stop_tokens(serving: Any, executor: str) -> None:
    """The branch ends with exactly the text that was shown."""
    async with serving(executor=executor) as served, served.connect() as peer:
        oracle = served.oracle
        tokens = oracle.tokenizer.encode("tell")
        output = oracle.output(tokens, 40)
        text = oracle.text(output)
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        await peer.open(
            {"type": "append", "id": 1, "text": "tell"},
            {"type": "fork", "id": 2, "as": ["id"]},
            peer.greedy(3, stop=["no such string", stop], max_tokens=40),
            peer.greedy(4, branch="id", stop_token_ids=[output[7]], max_tokens=40),
        )
        done = await peer.terminal(3)
        assert (done["reason"], done["stop"]) == ("stop", stop)
        assert peer.text() == text[: text.index(stop)]
        done = await peer.terminal(4)
        kept = output[: output.index(output[7])]
        assert (done["reason"], done["stop"]) == ("stop", output[7])
        assert peer.text("id") == oracle.text(kept)
        tree = await peer.tree(5)
        assert oracle.text(tree["main"]) == "tell" + peer.text()
        assert tree["id"] == [*tokens, *kept]


async def test_logprobs_and_token_ids(serving: Any, executor: str) -> None:
    async with serving(executor=executor) as served, served.connect() as peer:
        await peer.open(peer.user(1, "hello"), peer.greedy(2, logprobs=2, max_tokens=12), tokens=True)
        done = await peer.terminal(2)
        entries = [e for m in peer.log if m["type"] == "delta" for e in m["logprobs"]]
        output = served.oracle.output(served.oracle.turn("hello"), 12)
        assert peer.tokens["main"] == output == [e["token"] for e in entries]
        assert all(e["top"][0] == [e["token"], e["logprob"]] and len(e["top"]) == 2 for e in entries)
        assert done["mean_logprob"] == pytest.approx(entries[0]["logprob"])


async def test_n_makes_children_with_seeds_of_their_own(serving: Any, executor: str) -> None:
    async with serving(executor=executor) as served, served.connect() as peer:
        oracle = served.oracle
        generate = {"type": "generate", "id": 2, "n": 3, "seed": 5, "max_tokens": 9}
        await peer.open(peer.user(1, "pick"), generate, {**generate, "id": 3, "n": 2, "as": ["l", "r"]})
        names = ["main.2.1", "main.2.2", "main.2.3"]
        await peer.terminals(2, names)
        await peer.terminals(3, ["l", "r"])
        prompt = oracle.turn("pick")
        for i, name in enumerate(names):
            assert peer.text(name) == oracle.text(oracle.output(prompt, 9, seed=5 + i))
        assert peer.text("l") == peer.text(names[0])
        assert peer.text("r") == peer.text(names[1])


async def test_quiet_brings_the_text_in_done(serving: Any, executor: str) -> None:
    async with serving(executor=executor) as served, served.connect() as peer:
        await peer.open(peer.user(1, "hush"), peer.greedy(2, quiet=True))
        done = await peer.terminal(2)
        assert done["text"] == served.oracle.text(served.oracle.output(served.oracle.turn("hush")))
        assert all(m["type"] != "delta" for m in peer.log)


async def test_a_deadline_ends_a_generation(serving: Any, executor: str) -> None:
    async with serving(executor=executor, fake=SLOW) as served, served.connect() as peer:
        await peer.open(peer.user(1, "slow"), peer.greedy(2, deadline_ms=60, max_tokens=3000))
        done = await peer.terminal(2)
        assert done["reason"] == "deadline"
        prompt = served.oracle.turn("slow")
        said = served.oracle.output(prompt, done["usage"]["output"])
        assert peer.text() == served.oracle.text(said)
        after = await peer.say(3, "go on", max_tokens=5)
        assert after["reason"] == "length"


async def test_priority_goes_first(serving: Any, executor: str) -> None:
    """One row: a higher priority takes it over, and a lower one waits for its end."""
    settings = {"max_rows": 1, "step_seconds": 0.001}
    async with serving(executor=executor, fake=settings) as served, served.connect() as peer:
        await peer.open(
            {"type": "append", "id": 1, "text": "base"},
            {"type": "fork", "id": 2, "as": ["first", "low", "high"]},
            peer.greedy(3, branch="first", max_tokens=60),
        )
        await peer.next("delta")
        await peer.send(
            peer.greedy(4, branch="low", priority=-5, max_tokens=5),
            peer.greedy(5, branch="high", priority=5, max_tokens=5),
        )
        await peer.terminal(4)
        ends = [m["branch"] for m in peer.log if m["type"] == "done"]
        assert ends == ["high", "first", "low"]
        base = served.oracle.tokenizer.encode("base")
        assert peer.text("first") == served.oracle.text(served.oracle.output(base, 60))


async def test_ignored_ends_and_going_on_after_length(serving: Any, executor: str) -> None:
    async with serving(executor=executor, eos_every=4) as served, served.connect() as peer:
        oracle = served.oracle
        prompt = oracle.turn("go")
        await peer.open(peer.user(1, "go"), peer.greedy(2, ignore_eos=True, max_tokens=20), tokens=True)
        await peer.terminal(2)
        await peer.send(peer.greedy(3, ignore_eos=True, max_tokens=20))
        assert (await peer.terminal(3))["usage"]["prompt"] == len(prompt) + 20
        output = oracle.output(prompt, 40, eos=False)
        assert 2 in output
        assert peer.tokens["main"] == output
        assert peer.text() == oracle.text(output)


async def test_a_second_client_sees_everything(serving: Any, placement: dict[str, Any]) -> None:
    """Deltas go to all, changes are events, `expect` compares and appends, the view key only views."""
    async with serving(**placement, fake=SLOW) as served:
        oracle = served.oracle
        async with served.connect() as peer, served.connect("msgpack") as other:
            state = await peer.open()
            login = {"session": state["session"], "client": "other"}
            await other.open(**login, key=state["key"])
            done = await peer.say(1, "both", max_tokens=12)
            event = await other.until(lambda m: m["type"] == "event" and m["op"] == "generate")
            assert event["by"] == "peer"
            assert other.text() == peer.text() == oracle.text(oracle.output(oracle.turn("both"), 12))
            await other.send(other.user(1, "late", expect=done["position"] - 1))
            assert (await other.terminal(1))["code"] == "conflict"
            await other.send(other.user(2, "in time", expect=done["position"]))
            assert (await other.terminal(2))["type"] == "ok"
            event = await peer.next("event")
            assert (event["op"], event["by"], event["branch"]) == ("append", "other", "main")

            async with served.connect() as viewer:
                seen = await viewer.open(**login | {"client": "eye"}, key=state["view_key"])
                assert "key" not in seen
                await viewer.send(viewer.user(1, "no"))
                assert (await viewer.terminal(1))["code"] == "forbidden"
                assert (await viewer.tree(2))["main"] == (await peer.tree(50))["main"]
                await viewer.send({"type": "ping", "n": 4})
                assert (await viewer.next("pong"))["n"] == 4
                await viewer.send({"type": "close", "id": 3})
                assert await viewer.closed() == 1000
            assert (await peer.say(60, "still here", max_tokens=3))["reason"] == "length"


async def test_close_ends_or_keeps_the_session(serving: Any, placement: dict[str, Any]) -> None:
    async with serving(**placement) as served:
        async with served.connect() as peer:
            state = await peer.open(peer.user(1, "keep"), peer.greedy(2, max_tokens=4))
            await peer.terminal(2)
            await peer.send({"type": "close", "id": 3, "keep": True})
            assert await peer.closed() == 1000
        login = {"session": state["session"], "key": state["key"]}
        async with served.connect() as peer, served.connect() as other:
            back = await peer.open(**login)
            assert back["resumed"]
            assert back["op"] == 3
            await other.open(**login, client="other")
            await peer.send({"type": "close", "id": 4})
            assert await peer.closed() == 1000
            assert await other.closed() == 1000
        async with served.connect() as peer:
            await peer.send({"type": "open", "client": "peer", **login})
            assert (await peer.next("error"))["code"] == "no_session"
            await peer.open(ttl_s=0)  # the same socket may open anew
        await served.deserted()


async def test_many_sessions_at_once(serving: Any, placement: dict[str, Any]) -> None:
    """Each gets its own text, with chunked prefill and more requests than rows."""
    settings = {"max_rows": 6, "step_tokens": 64}
    async with serving(**placement, fake=settings, eos_every=50) as served:

        async def chat(number: int) -> None:
            async with served.connect("msgpack" if number % 2 else "json") as peer:
                await peer.open()
                branch: list[int] = []
                text = ""
                for turn in range(3):
                    content = f"number {number} says {turn} " * (number + 1)
                    oracle = served.oracle
                    prompt = oracle.next_turn(branch, content) if branch else oracle.turn(content)
                    await peer.say(2 * turn + 1, content)
                    answer = oracle.output(prompt)
                    branch = [*prompt, *answer]
                    text += oracle.text(answer)
                    assert peer.text() == text

        await asyncio.gather(*(chat(number) for number in range(12)))


async def test_memory_pressure_changes_nothing(serving: Any, executor: str) -> None:
    """A pool much smaller than all branches: eviction and retraction, the same text, no error."""
    settings = {"pages": 400, "context": 380, "max_rows": 8}
    async with serving(executor=executor, fake=settings) as served:

        async def chat(number: int) -> None:
            async with served.connect() as peer:
                await peer.open()
                branch: list[int] = []
                text = ""
                for turn in range(3):
                    content = f"{number} {turn} and so on"
                    oracle = served.oracle
                    prompt = oracle.next_turn(branch, content) if branch else oracle.turn(content)
                    done = await peer.say(2 * turn + 1, content, max_tokens=60)
                    assert done["reason"] == "length", done
                    answer = oracle.output(prompt, 60)
                    branch = [*prompt, *answer]
                    text += oracle.text(answer)
                    assert peer.text() == text

        await asyncio.gather(*(chat(number) for number in range(8)))


async def test_pages_of_several_tokens(serving: Any, executor: str) -> None:
    async with serving(executor=executor, fake={"page_size": 16, "pages": 256}) as served:
        oracle = served.oracle
        async with served.connect() as peer:
            await peer.open()
            first = oracle.turn("a question that is long enough for more than a page, or two of them")
            await peer.say(1, "a question that is long enough for more than a page, or two of them")
            answer = oracle.output(first)
            second = oracle.next_turn([*first, *answer], "next")
            done = await peer.say(3, "next")
            cached = len(first) + len(answer) - 1
            assert done["usage"]["cached"] == cached - cached % 16
            assert peer.text() == oracle.text(answer) + oracle.text(oracle.output(second))
