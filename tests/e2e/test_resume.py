"""Lost connections: what was missed comes once, nothing is run twice, and `detach` is obeyed."""

import asyncio
from typing import Any

SLOW = {"step_seconds": 0.002}


def login(state: dict[str, Any]) -> dict[str, Any]:
    return {"session": state["session"], "key": state["key"]}


async def test_resume_again_and_again_in_mid_stream(serving: Any, placement: dict[str, Any]) -> None:
    async with serving(**placement, fake=SLOW) as served:
        oracle = served.oracle
        expected = oracle.output(oracle.turn("long"), 300)
        async with served.connect() as peer:
            state = await peer.open(peer.user(1, "long"), peer.greedy(2, max_tokens=300), tokens=True)
            await peer.next("delta")
            peer.abort()
        done = None
        drops = 0
        while done is None:
            async with served.connect("msgpack" if drops % 2 else "json") as again:
                again.follow(peer)
                back = await again.open(**login(state), **peer.seen, tokens=True)
                assert back["resumed"]
                assert "cold" not in back
                running = {b["branch"]: b.get("running") for b in back["branches"]}
                for _ in range(4):
                    message = await again.next("delta", "done")
                    if message["type"] == "done":
                        done = message
                        break
                else:
                    assert running["main"] == 2
                    again.abort()
                    drops += 1
                peer = again
        assert drops > 3
        assert peer.tokens["main"] == expected
        assert peer.text() == oracle.text(expected)
        assert (done["id"], done["reason"]) == (2, "length")


async def test_what_ended_while_away_comes_with_its_done(
    serving: Any, placement: dict[str, Any]
) -> None:
    async with serving(**placement, fake=SLOW) as served:
        oracle = served.oracle
        async with served.connect() as peer:
            state = await peer.open(peer.user(1, "long"), peer.greedy(2, max_tokens=40))
            await peer.next("delta")
            peer.abort()
        await served.quiet()
        async with served.connect() as again:
            again.follow(peer)
            await again.open(**login(state), **peer.seen)
            done = await again.terminal(2)
            assert done["reason"] == "length"
            assert again.text() == oracle.text(oracle.output(oracle.turn("long"), 40))
            deltas = [m for m in again.log if m["type"] == "delta"]
            assert len(deltas) == 1  # merged


async def test_a_page_refresh_replays_the_running_answer(
    serving: Any, placement: dict[str, Any]
) -> None:
    async with serving(**placement, fake=SLOW) as served:
        oracle = served.oracle
        async with served.connect() as peer:
            state = await peer.open()
            await peer.say(1, "first", max_tokens=5)
            await peer.send(peer.user(3, "long"), peer.greedy(4, max_tokens=200))
            await peer.next("delta")
            peer.abort()
        async with served.connect() as fresh:
            back = await fresh.open(**login(state))
            shown = back["branches"][0]
            assert (back["op"], shown["running"]) == (4, 4)
            await fresh.terminal(4)
            first = oracle.turn("first")
            prompt = oracle.next_turn([*first, *oracle.output(first, 5)], "long")
            assert shown["started_at"] == len(prompt)
            assert fresh.text() == oracle.text(oracle.output(prompt, 200))


async def test_truncate_after_a_rollback_while_away(serving: Any, placement: dict[str, Any]) -> None:
    async with serving(**placement) as served, served.connect() as other:
        oracle = served.oracle
        async with served.connect() as peer:
            state = await peer.open()
            await peer.say(1, "one", max_tokens=6)
            kept = peer.text()
            await peer.say(3, "two", max_tokens=6)
            peer.abort()
        await other.open(client="other", **login(state))
        await other.send({"type": "rollback", "id": 1, "turns": 1})
        back = (await other.terminal(1))["position"]
        await other.say(2, "three", max_tokens=6)
        async with served.connect() as again:
            again.follow(peer)
            await again.open(**login(state), **peer.seen)
            delta = await again.next("delta")
            assert delta["truncate"] == back
            first = oracle.turn("one")
            prompt = oracle.next_turn([*first, *oracle.output(first, 6)], "three")
            assert again.text() == kept + oracle.text(oracle.output(prompt, 6))


async def test_the_same_client_takes_over(serving: Any, placement: dict[str, Any]) -> None:
    """The old socket closes with 4409, and between the two nothing is lost or doubled."""
    async with serving(**placement, fake=SLOW) as served:
        expected = served.oracle.output(served.oracle.turn("long"), 150)
        async with served.connect() as old, served.connect("msgpack") as new:
            state = await old.open(old.user(1, "long"), old.greedy(2, max_tokens=150), tokens=True)
            await old.next("delta")
            new.follow(old)
            await new.open(**login(state), **old.seen, tokens=True)
            assert await old.closed() == 4409
            assert (await new.terminal(2))["reason"] == "length"
            assert new.tokens["main"] == expected
            assert old.tokens["main"] == expected[: len(old.tokens["main"])]


async def test_ops_that_are_sent_again_run_once(serving: Any, placement: dict[str, Any]) -> None:
    async with serving(**placement, fake=SLOW) as served:
        async with served.connect() as peer:
            program = [peer.user(1, "hi"), peer.greedy(2, max_tokens=50)]
            state = await peer.open(*program)
            await peer.next("delta")
            peer.abort()
        async with served.connect() as again:
            again.follow(peer)
            await again.open(*program, **login(state), **peer.seen)
            assert (await again.terminal(1))["position"] == len(served.oracle.turn("hi"))
            done = await again.terminal(2)
            await again.send(*program)
            repeated = await again.until(lambda m: m["type"] == "done")
            assert repeated.pop("text") == again.text()  # sent again, it carries the whole text
            assert repeated == done
            branch = (await again.tree(3))["main"]
            prompt = served.oracle.turn("hi")
            assert branch == [*prompt, *served.oracle.output(prompt, 50)]


async def test_detach_cancel(serving: Any, placement: dict[str, Any]) -> None:
    async with serving(**placement, fake=SLOW) as served:
        async with served.connect() as peer:
            state = await peer.open(
                peer.user(1, "long"),
                peer.greedy(2, max_tokens=3000),
                peer.user(3, "queued"),
                detach="cancel",
            )
            await peer.next("delta")
            peer.abort()
        await served.quiet()
        async with served.connect() as again:
            again.follow(peer)
            await again.open(**login(state), **peer.seen, detach="cancel")
            done = await again.terminal(2)
            assert done["reason"] == "cancelled"
            await again.send(again.user(3, "queued"))
            assert (await again.terminal(3))["type"] == "ok"  # generations end; what was queued runs


async def test_detach_pause_goes_on_exactly(serving: Any, placement: dict[str, Any]) -> None:
    async with serving(**placement, fake=SLOW) as served:
        prompt = served.oracle.turn("long")
        expected = served.oracle.output(prompt, 120, seed=9)
        generate = {"type": "generate", "id": 2, "seed": 9, "max_tokens": 120}
        async with served.connect() as peer:
            opening = {"detach": "pause", "tokens": True}
            state = await peer.open(peer.user(1, "long"), generate, **opening)
            await peer.next("delta")
            peer.abort()
        await served.quiet()  # it stopped
        async with served.connect() as again:
            again.follow(peer)
            back = await again.open(**login(state), **peer.seen, **opening)
            assert back["branches"][0]["position"] < len(prompt) + 120
            done = await again.terminal(2)
            assert (done["reason"], done["usage"]["output"]) == ("length", 120)
            assert again.tokens["main"] == expected


async def test_a_session_without_sockets_expires(serving: Any, placement: dict[str, Any]) -> None:
    async with serving(**placement, fake=SLOW) as served:
        async with served.connect() as peer:
            state = await peer.open(peer.user(1, "bye"), peer.greedy(2, max_tokens=3000), ttl_s=0.05)
            await peer.next("delta")
            peer.abort()
        await served.until_alone(sockets=0)
        await served.goes_on(40)  # longer than ttl_s, but it generates
        async with served.connect() as again:
            await again.open(**login(state), ttl_s=0.05)
            await again.send({"type": "cancel", "id": 3, "branch": "main"})
            assert (await again.terminal(2))["reason"] == "cancelled"
        await served.deserted()
        async with served.connect() as late:
            await late.send({"type": "open", "client": "peer", **login(state)})
            assert (await late.next("error"))["code"] == "no_session"


async def test_credit_and_tick_merge_deltas(serving: Any, placement: dict[str, Any]) -> None:
    async with serving(**placement, fake=SLOW) as served, served.connect() as peer:
        oracle = served.oracle
        prompt = oracle.turn("paced")
        text = oracle.text(oracle.output(prompt, 100))
        await peer.open(
            {"type": "credit", "branch": "main", "upto": len(prompt) + 10},
            peer.user(1, "paced"),
            peer.greedy(2, max_tokens=100),
            tick_ms=1_500,  # longer than ten tokens take: the first delta, then none before the end
        )
        await peer.nothing_runs()
        assert peer.position["main"] <= len(prompt) + 10
        assert text.startswith(peer.text())
        assert sum(m["type"] == "delta" for m in peer.log) <= 2
        await peer.send({"type": "credit", "branch": "main", "upto": 1 << 40})
        await peer.terminal(2)
        assert peer.text() == text
        assert sum(m["type"] == "delta" for m in peer.log) <= 3


async def test_a_storm_of_reconnects(serving: Any) -> None:
    """Twenty sessions whose clients all drop and come back at once, several times."""
    async with serving(fake=SLOW) as served:
        oracle = served.oracle

        async def client(number: int) -> None:
            prompt = oracle.turn(f"storm {number}")
            text = oracle.text(oracle.output(prompt, 120))
            async with served.connect() as peer:
                state = await peer.open(peer.user(1, f"storm {number}"), peer.greedy(2, max_tokens=120))
                peer.abort()
            for _ in range(3):
                async with served.connect() as again:
                    again.follow(peer)
                    await again.open(**login(state), **peer.seen)
                    again.abort()
                    peer = again
            async with served.connect() as again:
                again.follow(peer)
                await again.open(**login(state), **peer.seen)
                await again.terminal(2)
                assert again.text() == text
                await again.send({"type": "close", "id": 3})
                await again.closed()

        await asyncio.gather(*(client(number) for number in range(20)))
        await served.deserted()


async def test_a_client_without_a_name_is_given_one(serving: Any, placement: dict[str, Any]) -> None:
    """One line is a chat; with the name of its `state` a client that comes back has its op ids."""
    async with serving(**placement) as served:
        async with served.connect() as peer, served.connect() as other:
            await peer.send({"type": "open"}, peer.user(1, "hi"), peer.greedy(2, max_tokens=5))
            state = await peer.next("state")
            await peer.terminal(2)
            again = {key: state[key] for key in ("session", "key", "client")}
            await other.send({"type": "open", "session": state["session"], "key": state["key"]})
            second = await other.next("state")
            assert second["client"] not in ("", state["client"])
            assert second.get("op") == 0
            peer.abort()
        async with served.connect() as peer:
            back = await peer.open(**again)
            assert back["client"] == state["client"]
            assert back["op"] == 2
            await peer.send(peer.greedy(2, max_tokens=5))  # it is not run again
            assert (await peer.terminal(2))["usage"]["output"] == 5
