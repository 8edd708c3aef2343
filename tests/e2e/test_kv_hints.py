"""Hints for KV on each door: done, told, bounded, and harmless where they are odd."""

import json
from typing import Any

import httpx2
import pytest
import websockets

import ramify.clients
from ramify.clients.errors import BadRequest

VERSION = {"anthropic-version": "2023-06-01"}
DOORS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
]
ASKED = "What is a radix tree? " * 4


def envelope(*actions: tuple[str, dict[str, Any]], **fields: Any) -> dict[str, Any]:
    made = [
        {"action_id": f"a{i}", "action_type": kind, "action_version": "1.0", "payload": payload}
        for i, (kind, payload) in enumerate(actions)
    ]
    return {"protocol_version": "0.1", "message_id": "turn-1", "actions": made} | fields


def body_of(door: str, model: str, text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    if door == "/v1/responses":
        return {"model": model, "input": text, "max_output_tokens": 4, "store": False, **more}
    if door == "/v1/completions":
        return {"model": model, "prompt": text, "max_tokens": 4, **more}
    if door.startswith("/api"):
        told = {"prompt": text} if door == "/api/generate" else {"messages": messages}
        return {"model": model, "stream": False, "options": {"num_predict": 4}, **told, **more}
    return {"model": model, "messages": messages, "max_tokens": 4, **more}


class Client:
    def __init__(self, http: httpx2.AsyncClient) -> None:
        self.http = http
        self.model = ""

    async def ask(self, door: str, text: str = ASKED, status: int = 200, **more: Any) -> Any:
        if not self.model:
            self.model = (await self.http.get("/v1/models")).json()["data"][0]["id"]
        answer = await self.http.post(door, json=body_of(door, self.model, text, **more))
        assert answer.status_code == status, answer.text
        return answer.json()

    async def cached(self, text: str = ASKED) -> int:
        usage = (await self.ask("/v1/chat/completions", text))["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    async def crowd(self) -> None:
        """Fill the pool."""
        for i in range(20):
            await self.ask("/v1/chat/completions", f"{i} fills it. " * 8)


def client_of(served: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=served.http, headers=VERSION, trust_env=False)


@pytest.mark.parametrize("door", DOORS)
async def test_each_door_says_what_it_did(serving: Any, door: str) -> None:
    """The text is kept while others fill the pool; what is odd is rejected, and harms nothing."""
    async with serving(fake={"pages": 600}) as served, client_of(served) as http:
        client = Client(http)
        asked = envelope(
            ("kv.pin", {"duration": 60}), ("kv.share", {}), ("kv.fly", {}), ("kv.prefetch", {})
        )
        told = (await client.ask(door, kv_hints=asked))["kv_hints"]
        assert (told["protocol_version"], told["message_id"]) == ("0.1", "turn-1")
        assert [each["action_id"] for each in told["outcomes"]] == ["a0", "a1", "a2", "a3"]
        assert [each["outcome"] for each in told["outcomes"]] == [
            "accepted", "accepted", "rejected", "accepted",
        ]  # fmt: skip
        if door not in ("/v1/completions",):  # its prompt has no template
            await client.crowd()
            assert await client.cached() >= told["outcomes"][0]["tokens"] - 20


@pytest.mark.parametrize("demotes", [True, False])
async def test_what_is_demoted_goes_before_what_is_older(serving: Any, demotes: bool) -> None:
    async with serving(fake={"pages": 600}) as served, client_of(served) as http:
        client, older = Client(http), "Older. " * 16
        await client.ask("/v1/chat/completions", older)
        more: dict[str, Any] = {"kv_hints": envelope(("kv.demote", {}))} if demotes else {}
        await client.ask("/v1/chat/completions", **more)
        for i in range(9):
            await client.ask("/v1/chat/completions", f"{i} fills it. " * 5)
        assert (await client.cached(older) > 80) == demotes
        assert await client.cached() < 40  # of 79: it is gone, or has been for the older one


@pytest.mark.parametrize("door", DOORS)
async def test_a_stream_tells_it_at_its_end(serving: Any, door: str) -> None:
    async with serving() as served, client_of(served) as http:
        client = Client(http)
        await client.ask(door)
        more = {"stream": True, "kv_hints": envelope(("kv.retain", {}))}
        if door.startswith("/v1/c"):
            more["stream_options"] = {"include_usage": True}
        body = body_of(door, client.model, ASKED) | more
        text = (await http.post(door, json=body)).text
        assert '"outcome":"accepted"' in text
        assert text.index('"outcome"') > len(text) // 2


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("odd", "named"),
    [
        ({"protocol_version": "9"}, "protocol_version"),
        ({"actions": [{}] * 17}, "actions"),
        ({"actions": [{"action_id": "a"}]}, "action_type"),
        ({"actions": None}, "actions"),
        ({"message_id": "m" * 257}, "message_id"),
        ({"more": 1}, "more"),
    ],
)
async def test_an_envelope_that_is_none_is_refused(
    serving: Any, door: str, odd: dict[str, Any], named: str
) -> None:
    async with serving() as served, client_of(served) as http:
        client = Client(http)
        refused = await client.ask(door, status=400, kv_hints=envelope() | odd)
        assert named in str(refused)
        deep: Any = {}
        for _ in range(40):
            deep = {"x": deep}
        assert "payload" in str(await client.ask(door, status=400, kv_hints=envelope(("kv.pin", deep))))


async def test_a_share_is_not_exceeded_and_that_is_told(serving: Any) -> None:
    schedule = {"retain_share": 10, "retain_leases": 2}
    async with serving(fake={"pages": 600}, schedule=schedule) as served, client_of(served) as http:
        client = Client(http)
        asked = envelope(("kv.pin", {"end": 30}), ("kv.pin", {"duration": 60}), ("kv.pin", {"end": 5}))
        told = (await client.ask("/v1/messages", kv_hints=asked))["kv_hints"]["outcomes"]
        assert [each["outcome"] for each in told] == ["accepted", "clipped", "rejected"]
        assert (told[0]["tokens"], told[1]["tokens"]) == (30, 60)
        mark = {"type": "ephemeral"}
        short = await client.ask("/v1/messages", "Other. " * 30, cache_control=mark)
        assert short["ramify_retention"]["outcome"] == "rejected"
        assert "ramify_retention" not in await client.ask("/v1/messages", "Other. " * 30)


async def test_on_our_own_protocol(serving: Any) -> None:
    async with serving(fake={"pages": 600}) as served, client_of(served) as http:
        async with ramify.clients.connect(served.engine.url) as session:
            branch = session.main
            await branch.append(messages=[{"role": "user", "content": ASKED}])
            reply = await branch.set(hints=envelope(("kv.prefetch", {}), ("kv.pin", {"end": 40})))
            told = (reply.result or {})["kv_hints"]["outcomes"]
            assert told[0]["outcome"] in ("accepted", "deferred")
            assert (told[1]["outcome"], told[1]["tokens"]) == ("accepted", 40)
            done = await branch.generate(max_tokens=4)
            assert done.usage.prompt > 40
            with pytest.raises(BadRequest, match="protocol_version"):
                await branch.set(hints={"protocol_version": "2"})
        client = Client(http)
        await client.crowd()
        assert 0 < await client.cached() <= 60  # the session is over, and the pin is not


@pytest.mark.parametrize("layout", [{"gateways": 2}, {"replicas": 2}])
async def test_in_other_layouts(serving: Any, layout: dict[str, int]) -> None:
    async with serving(**layout) as served, client_of(served) as http:
        client = Client(http)
        told = (await client.ask("/v1/messages", kv_hints=envelope(("kv.pin", {}))))["kv_hints"]
        assert told["outcomes"][0]["outcome"] == "accepted"


async def test_at_the_door_of_the_ai_sdk(serving: Any) -> None:
    """In its own spelling, in the metadata of an answer's end; retention where it falls short."""
    told: dict[str, Any] = {}

    async def ask(socket: Any, parts: list[str], **body: Any) -> dict[str, Any]:
        messages = [
            {"id": f"m{i}", "role": "user", "parts": [{"type": "text", "text": each}]}
            for i, each in enumerate(parts)
        ]
        more = {"trigger": "submit-message", "messages": messages, "headers": {}}
        body = {"temperature": 0, "maxOutputTokens": 4, **body}
        await socket.send(
            json.dumps({"type": "send", "requestId": "r", "id": "c", "body": body, **more})
        )
        while True:
            frame = json.loads(await socket.recv())
            if frame["type"] == "chunk" and frame["chunk"]["type"] == "finish":
                told.clear()
                told.update(frame["chunk"]["messageMetadata"])
            elif frame["type"] in ("end", "error"):
                return dict(frame)

    schedule = {"retain_share": 20}
    async with serving(fake={"pages": 600}, schedule=schedule) as served, client_of(served) as http:
        client = Client(http)
        async with websockets.connect(f"ws://127.0.0.1:{served.engine.port}/v1/ai") as socket:
            await ask(socket, [ASKED], promptCacheKey="ours")
            assert told["ramifyCacheMiss"]["reason"] == "new"
            assert "ramifyRetention" not in told
            await client.crowd()
            assert await client.cached() > 70
            await ask(socket, [ASKED], kvHints=envelope(("kv.pin", {"end": 10}), ("kv.fly", {})))
            assert [each["outcome"] for each in told["kvHints"]["outcomes"]] == ["accepted", "rejected"]
            await ask(socket, ["Other. " * 60], promptCacheRetention="24h")
            assert told["ramifyRetention"]["outcome"] == "clipped"
            for body in ({"promptCacheRetention": "1y"}, {"kvHints": {"protocol_version": "2"}}):
                end = await ask(socket, [ASKED], **body)
                assert next(iter(body)) in end["errorText"]


SYSTEM = "You are an agent that reads before it writes. " * 2
MARK = {"type": "ephemeral", "ttl": "1h"}
NAMED = {"name": "read", "description": "Reads a file.", "input_schema": {"type": "object"}}


def blocks(*texts: str, marked: int = -1) -> list[dict[str, Any]]:
    """`marked`: the number of the block with a breakpoint; -1: none has one."""
    return [
        {"type": "text", "text": text, **({"cache_control": MARK} if i == marked else {})}
        for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["system", "tools", "block"])
async def test_a_breakpoint_keeps_what_stands_before_it(serving: Any, where: str, stream: bool) -> None:
    """And not what follows: others fill the pool, and the next question finds just that much."""
    async with serving(fake={"pages": 600}) as served, client_of(served) as http:
        client = Client(http)
        tool = {**NAMED, **({"cache_control": MARK} if where == "tools" else {})}
        more: dict[str, Any] = {
            "system": blocks(SYSTEM, marked=0 if where == "system" else -1),
            "tools": [tool],
        }

        async def asked(question: str) -> Any:
            content = blocks("One file. " * 6, question, marked=0 if where == "block" else -1)
            more["messages"] = [{"role": "user", "content": content}]
            return await client.ask("/v1/messages", **more)

        await client.ask("/v1/models", status=405)  # to know the model
        body = body_of("/v1/messages", client.model, "") | more | {"stream": stream}
        content = blocks("One file. " * 6, "And? " * 20, marked=0 if where == "block" else -1)
        body["messages"] = [{"role": "user", "content": content}]
        answer = (await http.post("/v1/messages", json=body)).text
        told = json.loads(
            answer[answer.index('{"outcome"') : answer.index("]}", answer.index("breakp")) + 2]
        )
        assert told["outcome"] == "accepted"
        (kept,) = told["breakpoints"]
        assert kept["duration"] == 3600.0
        await client.crowd()
        found = (await asked("Other? " * 3))["usage"]["cache_read_input_tokens"]
        assert kept["tokens"] <= found <= kept["tokens"] + 12


async def test_four_breakpoints_each_as_long_as_it_says(serving: Any) -> None:
    async with serving(fake={"pages": 600}, schedule={"retain_share": 20}) as served:
        async with client_of(served) as http:
            client = Client(http)
            short = {"type": "ephemeral"}
            more: dict[str, Any] = {
                "system": [*blocks("Part one. ", marked=0), *blocks("Part two. ", marked=0)],
                "tools": [{**NAMED, "cache_control": MARK}],
                "messages": [
                    {"role": "user", "content": [{**blocks("Go on. " * 60)[0], "cache_control": short}]}
                ],
            }
            told = (await client.ask("/v1/messages", **more))["ramify_retention"]
            assert [each["duration"] for each in told["breakpoints"]] == [3600.0, 3600.0, 3600.0, 300.0]
            tools, first, second, end = (each["tokens"] for each in told["breakpoints"])
            assert first < second == tools < end
            assert (told["outcome"], told["breakpoints"][3]["outcome"]) == ("clipped", "clipped")
            more["system"] += blocks("Part three. ", marked=0)
            refused = await client.ask("/v1/messages", status=400, **more)
            assert "more than 4" in str(refused)


async def test_marks_of_an_append(serving: Any) -> None:
    """On our own protocol: the positions of places in messages, which leases can name."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One. Two."}]
    marks = [{"message": 1}, {"message": 1, "at": 4}, {"message": 0, "at": 9}, {"message": 1, "at": 99}]
    async with serving() as served, served.connect() as peer:
        await peer.open({"type": "append", "id": 1, "messages": messages, "marks": marks})
        found = (await peer.terminal(1))["result"]["marks"]
        texts = [
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne.",
            "<|im_start|>system\nBe brief.",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne. Two.",
        ]
        assert found == [len(served.oracle.tokenizer.encode(text)) for text in texts]
        await peer.send({"type": "append", "id": 2, "messages": messages[1:], "marks": [{"message": 1}]})
        assert (await peer.terminal(2))["details"]["path"].endswith("marks")
        await peer.send({"type": "append", "id": 3, "messages": messages[1:], "marks": [{"message": 0}]})
        assert (await peer.terminal(3))["result"]["marks"] == [None]  # of a first append alone
