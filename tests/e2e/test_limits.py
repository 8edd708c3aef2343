"""Every limit, and every kind of bad input: a clear error for that client, nothing for the others.

In each test another client chats all the time and checks its text; at the end of each `serving`
looks for pages, tasks, threads and file descriptors that were left behind.
"""

import asyncio
import json
import os
import struct
from typing import Any

import pytest
import websockets

SLOW = {"step_seconds": 0.002}


async def refused(peer: Any, op: dict[str, Any], code: str) -> dict[str, Any]:
    await peer.send(op)
    error = await peer.next("error")
    assert error["code"] == code, error
    if "id" in op and isinstance(op["id"], int) and op["id"] >= 0:
        assert error["id"] == op["id"]
    return error


async def test_bad_values_name_the_field(serving: Any) -> None:
    table: list[tuple[dict[str, Any], str]] = [
        ({"type": "generate", "temperature": -1}, "$.temperature"),
        ({"type": "generate", "temperature": "hot"}, "$.temperature"),
        ({"type": "generate", "top_p": 0}, "$.top_p"),
        ({"type": "generate", "top_k": -1}, "$.top_k"),
        ({"type": "generate", "min_p": 2}, "$.min_p"),
        ({"type": "generate", "max_tokens": 0}, "$.max_tokens"),
        ({"type": "generate", "repetition_penalty": 0}, "$.repetition_penalty"),
        ({"type": "generate", "frequency_penalty": 3}, "$.frequency_penalty"),
        ({"type": "generate", "seed": -1}, "$.seed"),
        ({"type": "generate", "stop": [""]}, "$.stop[0]"),
        ({"type": "generate", "stop": ["x"] * 17}, "$.stop"),
        ({"type": "generate", "logprobs": 21}, "$.logprobs"),
        ({"type": "generate", "priority": 9}, "$.priority"),
        ({"type": "generate", "deadline_ms": 0}, "$.deadline_ms"),
        ({"type": "generate", "n": 2, "as": ["one"]}, "$.as"),
        ({"type": "generate", "tempurature": 1}, "$.tempurature"),
        ({"type": "generate", "branch": "no spaces"}, "$.branch"),
        ({"type": "generate", "branch": ["main", "main"]}, "$.branch"),
        ({"type": "append"}, "$.text"),
        ({"type": "append", "text": "a", "tokens": [1]}, "$.tokens"),
        ({"type": "append", "messages": [{"role": "king", "content": "x"}]}, "$.messages[0].role"),
        ({"type": "append", "tokens": [-1]}, "$.tokens[0]"),
        ({"type": "fork", "as": []}, "$.as"),
        ({"type": "rollback"}, "$.to"),
        ({"type": "set", "branch": "main", "retain_s": -1}, "$.retain_s"),
        ({"type": "conjure"}, "$.type"),
    ]
    async with serving() as served, served.undisturbed(), served.connect() as peer:
        await peer.open({"type": "append", "id": 0, "text": "base"})
        await peer.terminal(0)
        for ident, (op, path) in enumerate(table, 1):
            error = await refused(peer, {"id": ident, **op}, "bad_request")
            assert error["details"]["path"] == path, (op, error)
            assert path in error["message"]
        await peer.send({"type": "generate", "id": "seven"})
        assert (await peer.next("error"))["details"]["path"] == "$.id"
        await peer.send({"type": "open", "client": "again"})
        assert (await peer.next("error"))["code"] == "bad_request"
        await peer.send({"type": "generate", "id": 100, "max_tokens": 3})  # none of the ids was used up
        assert (await peer.terminal(100))["reason"] == "length"


async def test_an_error_names_the_path_in_the_frame_that_the_client_sent(serving: Any) -> None:
    """The gateway takes pings and `open` for itself; what it hands on keeps its place."""
    bad, good = {"type": "rollback", "id": 1}, {"type": "append", "id": 2, "text": "x"}
    ping, opening = {"type": "ping", "n": 7}, {"type": "open"}
    frames: list[tuple[Any, str]] = [
        (bad, "$.to"),
        ([bad], "$[0].to"),
        ([ping, bad, good], "$[1].to"),
        ([ping, {**good, "id": 0}, ping, ping, bad, ping], "$[4].to"),
        ([opening, bad], "$[1].to"),
        ([opening, ping, bad], "$[2].to"),
        ([ping, ping, opening, ping, bad, good], "$[4].to"),
        ({"type": "open", "key": "k"}, "$.key"),
        ([{"type": "open", "key": "k"}], "$[0].key"),
        ([ping, {"type": "open", "key": "k"}], "$[1].key"),
    ]
    async with serving() as served, served.undisturbed():
        for frame, path in frames:
            async with served.connect() as peer:
                messages = frame if isinstance(frame, list) else [frame]
                if not any(each["type"] == "open" for each in messages):
                    await peer.open()
                await peer.ws.send(json.dumps(frame))
                error = await peer.until(lambda m: m["type"] == "error" and m["code"] == "bad_request")
                assert error["details"]["path"] == path, frame
                pongs = [each["n"] for each in peer.log if each["type"] == "pong"]
                assert pongs == [each["n"] for each in messages if each["type"] == "ping"]


async def test_bad_requests_to_branches(serving: Any) -> None:
    async with serving() as served, served.undisturbed(), served.connect() as peer:
        await peer.open({"type": "append", "id": 1, "text": "base"})
        where = (await peer.terminal(1))["position"]
        await refused(peer, {"type": "generate", "id": 2, "branch": "nowhere"}, "no_branch")
        await refused(peer, {"type": "append", "id": 3, "branch": "nowhere", "text": "x"}, "no_branch")
        await refused(peer, {"type": "drop", "id": 4, "branch": "nowhere"}, "no_branch")
        await refused(peer, {"type": "fork", "id": 5, "as": ["main"]}, "exists")
        await refused(peer, {"type": "fork", "id": 6, "as": ["x"], "at": where + 1}, "bad_request")
        await refused(peer, {"type": "rollback", "id": 7, "to": where + 1}, "bad_request")
        await refused(peer, {"type": "rollback", "id": 8, "turns": 2}, "bad_request")
        await refused(peer, {"type": "append", "id": 9, "text": "x", "expect": where + 1}, "conflict")
        await refused(peer, {"type": "append", "id": 10, "tokens": [384]}, "bad_request")
        await peer.send({"type": "fork", "id": 11, "branch": None, "as": ["void"]})
        await peer.terminal(11)
        await refused(peer, {"type": "generate", "id": 12, "branch": "void"}, "bad_request")
        await refused(peer, {"type": "join", "id": 13, "from": ["nowhere"]}, "no_branch")
        empty = {"type": "select", "id": 14, "branch": "void", "choices": ["a"]}
        await refused(peer, empty, "bad_request")
        broken = {"type": "generate", "id": 15, "constraint": {"regex": "("}}
        await refused(peer, broken, "bad_constraint")
        await refused(
            peer, {"type": "set", "id": 16, "branch": "main", "persist": "lazy"}, "unsupported"
        )
        assert (await peer.tree(17))["main"] == served.oracle.tokenizer.encode("base")


async def test_a_wrong_message_spoils_the_whole_frame(serving: Any) -> None:
    async with serving() as served, served.undisturbed(), served.connect() as peer:
        await peer.open()
        good = {"type": "append", "id": 1, "text": "x"}
        await peer.send(good, {"type": "generate", "id": 2, "temperature": -1})
        error = await peer.terminal(2)
        assert (error["code"], error["details"]["path"]) == ("bad_request", "$[1].temperature")
        assert (await peer.terminal(1))["code"] == "skipped"
        assert (await peer.tree(3))["main"] == []
        await peer.send(
            {"type": "generate", "id": 4, "branch": "nowhere"},
            {"type": "append", "id": 5, "branch": "nowhere", "text": "x"},
            {"type": "append", "id": 6, "text": "unharmed"},
        )
        assert (await peer.terminal(4))["code"] == "no_branch"
        assert (await peer.terminal(5))["code"] == "skipped"
        assert (await peer.terminal(6))["type"] == "ok"


async def test_over_long_input_and_a_full_context(serving: Any) -> None:
    async with serving(fake={"context": 128}) as served:
        async with served.undisturbed(), served.connect() as peer:
            state = await peer.open({"type": "append", "id": 1, "text": "base"})
            assert state["server"]["context"] == 128
            error = await refused(peer, {"type": "append", "id": 2, "tokens": [5] * 128}, "too_long")
            assert error["details"]["max"] == 128
            error = await refused(peer, peer.user(3, "long text " * 10_000), "too_long")
            assert error["details"]["max"] == 128
            await peer.send(peer.greedy(4, max_tokens=1000))
            done = await peer.terminal(4)
            base = served.oracle.tokenizer.encode("base")
            assert (done["reason"], done["position"]) == ("length", 128)
            assert peer.text() == served.oracle.text(served.oracle.output(base, 128 - len(base)))
            await refused(peer, peer.greedy(5), "too_long")
            await refused(peer, {"type": "append", "id": 6, "text": "x"}, "too_long")
            await peer.send({"type": "rollback", "id": 7, "to": 10})
            assert (await peer.terminal(7))["position"] == 10
            peer.truncate("main", 10)
            await peer.send(peer.greedy(8, max_tokens=3))
            assert (await peer.terminal(8))["position"] == 13


async def test_an_overloaded_queue(serving: Any) -> None:
    """`max_waiting` requests wait at most; the next is told to come back later."""
    async with serving(schedule={"max_waiting": 4}, fake={"max_rows": 2, **SLOW}) as served:
        async with served.connect() as peer:
            names = [f"b{i}" for i in range(12)]
            await peer.open({"type": "append", "id": 1, "text": "base"})
            await peer.terminal(1)
            await peer.send(
                {"type": "fork", "id": 2, "as": names}, peer.greedy(3, branch=names, max_tokens=30)
            )
            ends = await peer.terminals(3, names)
            over = [m for m in ends.values() if m["type"] == "error"]
            assert over
            assert all(m["code"] == "overloaded" and m["retry_ms"] > 0 for m in over)
            expected = served.oracle.text(
                served.oracle.output(served.oracle.tokenizer.encode("base"), 30)
            )
            served_names = [name for name, m in ends.items() if m["type"] == "done"]
            assert served_names
            assert all(peer.text(name) == expected for name in served_names)
            again = next(name for name in names if name not in served_names)
            await peer.send(peer.greedy(4, branch=again, max_tokens=30))
            assert (await peer.terminal(4))["reason"] == "length"
            assert peer.text(again) == expected


async def test_branches_n_and_ops_have_limits(serving: Any) -> None:
    limits = {"branches": 5, "n": 3, "ops_per_frame": 8, "ops_in_flight": 6}
    async with serving(limits=limits, fake=SLOW) as served:
        async with served.undisturbed(), served.connect() as peer:
            state = await peer.open({"type": "append", "id": 1, "text": "base"})
            assert state["limits"]["branches"] == 5
            error = await refused(peer, {"type": "fork", "id": 2, "as": list("abcde")}, "limit")
            assert error["details"]["max"] == 5
            error = await refused(peer, {"type": "generate", "id": 3, "n": 4}, "limit")
            assert error["details"]["max"] == 3
            await peer.send(*({"type": "tree", "id": i} for i in range(10, 19)))
            error = await peer.terminal(17)  # as many replies as a frame may have ops
            assert (error["code"], error["details"]["max"]) == ("limit", 8)
            assert (await peer.terminal(10))["code"] == "limit"
            await peer.send(peer.greedy(20, max_tokens=1000))
            await peer.send(*({"type": "append", "id": i, "text": "x"} for i in range(21, 28)))
            error = await peer.next("error")
            assert (error["code"], error["details"]["max"]) == ("limit", 6)
            await peer.send({"type": "cancel", "id": 40})
            assert (await peer.terminal(20))["reason"] == "cancelled"


async def test_generations_over_the_session_limit_wait(serving: Any) -> None:
    async with serving(limits={"running": 2}, fake=SLOW) as served:
        async with served.undisturbed(), served.connect() as peer:
            names = [f"b{i}" for i in range(7)]
            await peer.open(
                {"type": "append", "id": 1, "text": "base"},
                {"type": "fork", "id": 2, "as": names},
                peer.greedy(3, branch=names, max_tokens=10),
            )
            ends = await peer.terminals(3, names)
            assert {m["reason"] for m in ends.values()} == {"length"}
            assert len({peer.text(name) for name in names}) == 1


async def test_attachments_have_a_limit(serving: Any) -> None:
    async with serving(limits={"attachments": 2}) as served, served.undisturbed():
        async with served.connect() as one, served.connect() as two, served.connect() as three:
            state = await one.open()
            login = {"session": state["session"], "key": state["key"]}
            await two.open(**login, client="two")
            await three.send({"type": "open", "client": "three", **login})
            assert (await three.next("error"))["code"] == "limit"
            assert await three.closed() == 4403
            assert (await one.say(1, "fine", max_tokens=3))["reason"] == "length"


async def test_wrong_keys_and_sessions(serving: Any) -> None:
    async with serving() as served, served.undisturbed():
        async with served.connect() as peer, served.connect() as thief:
            state = await peer.open()
            login = {"type": "open", "client": "thief", "session": state["session"]}
            for key in (None, "", "k_wrong", state["key"][:-1]):
                await thief.send(login | ({} if key is None else {"key": key}))
                assert (await thief.next("error"))["code"] == "forbidden"
            await thief.send(login | {"session": "s_unknown", "key": state["key"]})
            assert (await thief.next("error"))["code"] == "no_session"
            await thief.send({"type": "open", "client": "thief", "model": "gpt"})
            assert (await thief.next("error"))["code"] == "bad_request"
            await thief.send({"type": "append", "id": 1, "text": "x"})
            assert (await thief.next("error"))["code"] == "bad_request"
            await thief.open()


async def test_frames_that_are_too_big(serving: Any) -> None:
    async with serving(limits={"frame_bytes": 4096}) as served, served.undisturbed():
        async with served.connect() as peer:
            await peer.open()
            await peer.send({"type": "append", "id": 1, "text": "x" * 5000})
            assert await peer.closed() == 1009
        async with served.connect() as peer:  # in fragments, none of which is too big
            await peer.open()
            with pytest.raises(websockets.ConnectionClosed):
                await peer.ws.send(["x" * 1000] * 50)
                await peer.ws.wait_closed()
                await peer.ws.send("x")
            assert peer.ws.close_code == 1009


async def test_frames_that_do_not_parse(serving: Any) -> None:
    async with serving() as served, served.undisturbed():
        async with served.connect() as peer:
            await peer.open()
            for data in ("{", '[{"type"', "nonsense"):
                await peer.ws.send(data)
                error = await peer.next("error")
                assert error["code"] == "bad_request"
                assert "id" not in error
            assert await peer.closed() == 4400
        async with served.connect() as peer:
            await peer.open()
            for data in ("[]", "7", "null", '"open"', "[[]]", '{"type": 5}', "[" * 5000):
                await peer.ws.send(data)
                assert (await peer.next("error"))["code"] == "bad_request"
            await peer.say(1, "still here", max_tokens=2)
        async with served.connect("msgpack") as peer:
            await peer.open()
            for data in (b"\xc1", b"\x92\x01", b"\xff" * 100):
                await peer.ws.send(data)
                assert (await peer.next("error"))["code"] == "bad_request"


async def test_frames_of_the_wrong_kind(serving: Any) -> None:
    async with serving() as served, served.undisturbed():
        async with served.connect() as peer:
            await peer.ws.send(b"{}")
            assert await peer.closed() == 1003
        async with served.connect("msgpack") as peer:
            await peer.ws.send("{}")
            assert await peer.closed() == 1003
        async with served.connect() as peer:
            await peer.open()
            await peer.ws.send(b"\xff\xfe", text=True)
            assert await peer.closed() == 1007
        async with served.connect() as peer:
            await peer.open()
            peer.ws.transport.write(b"\xf3\x80\x00\x00\x00\x00")  # reserved bits
            assert await peer.closed() == 1002
        with pytest.raises(websockets.InvalidStatus) as refusal:
            async with served.connect(subprotocols=["graphql-ws"]):
                pass
        assert refusal.value.response.status_code == 400
        assert b"ramify.v1+json" in refusal.value.response.body


async def test_garbage_half_frames_and_resets(serving: Any) -> None:
    async with serving() as served, served.undisturbed():
        random = os.urandom(3000)
        assert b"400" in (await served.tcp(b"\x16\x03\x01" + random))[:40]  # a TLS hello
        assert b"400" in (await served.tcp(b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n"))[:40]
        assert b"431" in (await served.tcp(b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000))[:40]
        await served.tcp(b"GET /v1/ws HTT", half_close=True)
        for cut in (1, 3, 20):
            async with served.connect() as peer:
                program = [peer.user(1, "x"), peer.greedy(2, max_tokens=3000)]
                await peer.open(*program, detach="cancel", ttl_s=0)
                payload = json.dumps(peer.greedy(3)).encode()
                frame = b"\x81" + struct.pack("!B", 0x80 | len(payload)) + b"\0\0\0\0" + payload
                peer.ws.transport.write(frame[:cut])
                peer.abort()
        for _ in range(20):
            async with served.connect() as peer:
                await peer.send({"type": "open", "client": "gone", "detach": "cancel", "ttl_s": 0})
                peer.abort()
        await served.until_alone()


async def test_ten_thousand_ops(serving: Any) -> None:
    """More than a client may: refused frame by frame, then cut off."""
    async with serving(limits={"ops_per_second": 200, "ops_burst": 500}) as served, served.undisturbed():
        async with served.connect() as peer:
            await peer.open()
            with pytest.raises(websockets.ConnectionClosed):
                for first in range(1, 10_000, 250):
                    ops = [{"type": "append", "id": first + i, "text": "x"} for i in range(250)]
                    await peer.send(*ops)
                await peer.ws.wait_closed()
                await peer.send({"type": "ping"})
            assert await peer.closed() == 4429
            assert any(m["type"] == "error" and m["code"] == "limit" and m["retry_ms"] for m in peer.log)


async def test_ten_thousand_ops_that_are_allowed(serving: Any) -> None:
    limits = {"ops_in_flight": 100_000, "ops_burst": 100_000}
    async with serving(limits=limits, fake={"context": 16384}) as served, served.undisturbed():
        async with served.connect() as peer:
            await peer.open()
            for first in range(1, 10_000, 250):
                await peer.send(
                    *({"type": "append", "id": first + i, "tokens": [9]} for i in range(250))
                )
            assert (await peer.terminal(10_000))["position"] == 10_000
            assert (await peer.tree(10_001))["main"] == [9] * 10_000


async def test_a_client_that_never_reads(serving: Any) -> None:
    """Its deltas stop and memory does not grow; when it reads, it gets the rest, merged."""
    limits = {"queued_bytes": 16384}
    settings = {"verify": False, "context": 4096}
    async with serving(limits=limits, fake=settings) as served, served.undisturbed():
        async with served.connect(max_queue=1) as peer:
            names = [f"b{i}" for i in range(6)]
            state = await peer.open(
                {"type": "append", "id": 1, "text": "base"},
                {"type": "fork", "id": 2, "as": names},
                peer.greedy(3, branch=names, max_tokens=3000, logprobs=20),
            )
            async with served.connect() as watcher:  # of the same session, with no credit
                await watcher.open(
                    *({"type": "credit", "branch": name, "upto": 0} for name in names),
                    client="watcher",
                    session=state["session"],
                    key=state["key"],
                )
                await watcher.nothing_runs()
            assert served.unsent() < 8 * 16384
            ends = await peer.terminals(3, names)
            assert {m["reason"] for m in ends.values()} == {"length"}
            base = served.oracle.tokenizer.encode("base")
            text = served.oracle.text(served.oracle.output(base, 3000))
            assert all(peer.text(name) == text for name in names)
            assert sum(m["type"] == "delta" for m in peer.log) < 6 * 3000


async def test_replies_that_are_never_read_cut_the_socket_off(serving: Any) -> None:
    """An op that is sent again gets its reply again, which no queue of the session holds back."""
    settings = {"context": 8192}
    async with serving(limits={"queued_bytes": 8192}, fake=settings) as served, served.undisturbed():
        async with served.connect(max_queue=1) as peer:
            long = peer.greedy(2, quiet=True, max_tokens=6000)
            await peer.open({"type": "append", "id": 1, "text": "text"}, long)
            await peer.terminal(2)
            with pytest.raises(websockets.ConnectionClosed):
                for _ in range(5000):
                    await peer.send(long)
                await peer.closed()
                await peer.send({"type": "ping"})
            assert peer.ws.close_code == 1006


async def test_silence_has_a_limit(serving: Any) -> None:
    """No `open` in time, no pong in time: 4408."""
    settings = {"ping_interval_s": 0.1, "ping_timeout_s": 2.0}  # longer than a busy machine stalls
    async with serving(server=settings, limits={"open_timeout_s": 1}) as served, served.undisturbed():
        async with served.connect() as mute, served.connect() as dead:
            await dead.open()
            dead.ws.transport.pause_reading()  # so it answers no ping
            assert await mute.closed() == 4408
            await served.until_alone(sockets=1)
            dead.ws.transport.resume_reading()
            assert await dead.closed() == 4408


async def test_cancels_in_every_state(serving: Any) -> None:
    """Cancel, drop and disconnect over and over: nothing is left behind."""
    async with serving(fake={"max_rows": 4, "pages": 600, "context": 500, **SLOW}) as served:
        async with served.undisturbed():

            async def client(number: int) -> None:
                async with served.connect() as peer:
                    await peer.open(detach="cancel", ttl_s=0, client=f"c{number}")
                    for i in range(4):
                        first = 10 * i
                        await peer.send(
                            peer.user(first + 1, f"{number} {i}"),
                            {"type": "fork", "id": first + 2, "as": [f"x{i}", f"y{i}"]},
                            peer.greedy(first + 3, branch=["main", f"x{i}"], max_tokens=200),
                            {"type": "drop", "id": first + 4, "branch": f"y{i}"},
                        )
                        if i % 2:
                            await peer.terminal(first + 4)
                        await peer.send({"type": "cancel", "id": first + 5})
                        for name in ("main", f"x{i}"):
                            await peer.terminal(first + 3, name)
                        await peer.send({"type": "drop", "id": first + 6, "branch": f"x{i}"})
                    await peer.send(peer.greedy(99, max_tokens=200))
                    peer.abort()

            await asyncio.gather(*(client(number) for number in range(8)))
            await served.until_alone()


@pytest.mark.parametrize("codec", ["json", "msgpack"])
async def test_numbers_without_end_end_nobody(
    serving: Any, placement: dict[str, Any], codec: str
) -> None:
    """Integers over 64 bits, floats that no float32 holds, nesting: refused, in every placement."""
    table: list[tuple[dict[str, Any], str]] = [
        ({"type": "generate", "top_k": 2**64 - 1}, "$.top_k"),
        ({"type": "generate", "top_k": 2**31}, "$.top_k"),
        ({"type": "generate", "deadline_ms": 2**63}, "$.deadline_ms"),
        ({"type": "generate", "repetition_penalty": 1e-45}, "$.repetition_penalty"),
        ({"type": "generate", "temperature": 1e-45}, "$.temperature"),
        ({"type": "set", "meta": {"n": 2**64 - 1}}, "$.meta.n"),
        ({"type": "fork", "as": ["x"] * 40_000}, "$.as"),
        ({"type": "cancel", "branch": ["main"] * 1025}, "$.branch"),
    ]
    if codec == "json":
        table += [
            ({"type": "generate", "top_k": 10**30}, "$.top_k"),
            ({"type": "generate", "deadline_ms": 10**310}, "$.deadline_ms"),
            ({"type": "set", "meta": {"n": [10**30]}}, "$.meta.n[0]"),
        ]
    extremes = {
        "top_k": 2**31 - 1,
        "top_p": 1e-20,
        "temperature": 1e-30,
        "repetition_penalty": 0.01,
        "frequency_penalty": -2,
        "presence_penalty": 2,
        "min_p": 1,
        "seed": 2**63 - 1,
        "logprobs": 20,
        "deadline_ms": 2**31 - 1,
        "max_tokens": 5,
        "ignore_eos": True,
    }
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    async with serving(**placement) as served, served.undisturbed(), served.connect(codec) as peer:
        await peer.open({"type": "append", "id": 1, "text": "base"})
        await peer.terminal(1)
        for ident, (op, path) in enumerate(table, 2):
            error = await refused(peer, {"id": ident, **op}, "bad_request")
            assert error["details"]["path"] == path, (op, error)
        call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}
        await refused(peer, {"type": "append", "id": 50, "messages": [call]}, "bad_request")
        await peer.send({"type": "generate", "id": 51, **extremes})
        done = await peer.terminal(51)
        assert done["reason"] == "length"
        assert done["usage"]["output"] == 5
