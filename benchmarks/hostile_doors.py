"""Hostile HTTP bodies and WebSocket messages at the doors of OpenAI's, Anthropic's and Ollama's APIs.

    python benchmarks/hostile_doors.py [--requests 20000] [--seed 0] [--gateways 0] [--json FILE]

A real engine with the fake executor runs in a process of its own and checks its KV and cache all the
time. Attackers send requests that were valid before something in them was changed (types, nesting,
sizes, broken JSON, bytes), heads that lie about the body, two requests on one connection, bodies that
stop half-way, and connections that are cut, half closed or not read. Others open /v1/responses as a
WebSocket and send hostile messages, fragments and frames that break the protocol.

Every error must have the shape of the API that was asked, and none may be the server's fault (500). In
between, a control client asks a greedy question whose answer is known. At the end no session, task,
socket or file of the attack may be left. The exit code is 1 if any of this does not hold.
"""

import argparse
import asyncio
import http.client
import json
import random
import struct
import sys
import time
from collections import Counter
from typing import Any

from fake_server import FakeServer
from report import headline, machine, write_json

from ramify.clients.bench.websocket import CLOSE, PING, TEXT, FrameReader, client_frame

HANDSHAKE = (
    "GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
POST = (
    "POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    "Connection: close\r\nContent-Length: {length}\r\n\r\n"
)
PATIENCE_S = 60.0
LARGEST = 300_000  # bytes of a hostile text
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SERVED = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/api/chat", "/api/generate",
    MESSAGES, COUNT,
)  # fmt: skip
GETS = (
    "/v1/models", "/v1/models/x", "/v1/responses/x", "/api/tags", "/api/x", "/v1/embeddings",
    "/v1/messages/x",
)  # fmt: skip
OPENAI_ERROR = {"message", "type", "param", "code"}
LAST = "Connection: close\r\n"
VERSION = "anthropic-version: 2023-06-01\r\n"


def model_of(port: int, **headers: str) -> str:
    """The name of what is served."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/v1/models", headers=headers)
    name = str(json.loads(connection.getresponse().read())["data"][0]["id"])
    connection.close()
    return name


def valid(path: str, model: str, random_: random.Random) -> dict[str, Any]:
    """A request that could be served."""
    hello = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "Ho"}]},
    ]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    function = {"name": "f", "description": "d", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    match path:
        case "/v1/chat/completions":
            named = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
            more: dict[str, Any] = {
                "messages": [*hello, hello[0]], "max_tokens": 9, "n": 2, "tools": tools, "seed": 1,
                "logprobs": True, "top_logprobs": 2, "stop": ["x"], "reasoning_effort": "low",
                "parallel_tool_calls": False, "stream_options": {"include_usage": True},
                "response_format": named,
            }  # fmt: skip
        case "/v1/completions":
            more = {"prompt": ["Hi", "Ho"], "max_tokens": 9, "logprobs": 2, "n": 2}
        case "/v1/responses":
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
            call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
            output = {"type": "function_call_output", "call_id": "c", "output": "1"}
            more = {
                "input": [item, call, output], "max_output_tokens": 9, "instructions": "Be.",
                "store": False, "tools": [{"type": "function", **function}], "metadata": {"a": "b"},
                "temperature": 0.5, "reasoning": {"effort": "low", "summary": "auto"},
                "text": {"format": {"type": "json_schema", "name": "s", "schema": schema}},
                "previous_response_id": "resp_x",
            }  # fmt: skip
            if random_.random() < 0.7:
                del more["previous_response_id"]
        case "/v1/messages" | "/v1/messages/count_tokens":
            mark = {"type": "ephemeral"}
            thought = {"type": "thinking", "thinking": "hm", "signature": "x" * 56}
            use = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
            result = {
                "type": "tool_result",
                "tool_use_id": "t",
                "content": [{"type": "text", "text": "1"}],
            }
            more = {
                "messages": [
                    hello[0],
                    {"role": "assistant", "content": [thought, {"type": "text", "text": "Ho"}, use]},
                    {"role": "user", "content": [result, {"type": "text", "text": "?"}]},
                    {"role": "system", "content": "Be."},
                ],
                "max_tokens": 2048,
                "system": [{"type": "text", "text": "Be.", "cache_control": mark}],
                "tools": [{"name": "f", "description": "d", "input_schema": schema}],
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "output_config": {"effort": "medium"},
                "stop_sequences": ["x"],
                "metadata": {"user_id": "u"},
            }
            if path == COUNT:
                del more["max_tokens"], more["stop_sequences"], more["metadata"]
        case "/api/chat":
            more = {
                "messages": [hello[0]],
                "tools": tools,
                "format": schema,
                "think": "low",
                "options": {"num_predict": 9, "seed": 1},
            }
        case _:
            more = {"prompt": "Hi", "system": "Be.", "options": {"num_predict": 9, "stop": ["x"]}}
    keep = {"messages", "prompt", "input", "max_tokens", "max_output_tokens", "options"}
    chosen = {key: value for key, value in more.items() if key in keep or random_.random() < 0.3}
    if "logprobs" not in chosen:
        chosen.pop("top_logprobs", None)
    stream = random_.random() < 0.5
    if not stream:
        chosen.pop("stream_options", None)
    streams = {} if path == COUNT else {"stream": stream}
    return {"model": model, **json.loads(json.dumps(chosen)), **streams}


def hostile_value(random_: random.Random) -> Any:
    """Something that belongs nowhere."""
    deep: Any = "x"
    for _ in range(random_.choice((3, 40, 400))):
        deep = [deep] if random_.random() < 0.5 else {"a": deep}
    return random_.choice(
        (
            None, True, -1, 0, 2**31, 2**63, -(2**70), 1.5, 1e308, "", "\x00", "é" * 300, "😀" * 2000,
            "x" * random_.choice((300, 5_000, LARGEST)), [], {}, [None] * 2000, [[]] * 500,
            {str(i): i for i in range(500)}, deep, "resp_" + "A" * 200, {"type": "image_url"},
            ["x"] * 65, {"type": "object", "properties": {"p" * 9: {"$ref": "#"}}}, {"role": "user"},
            [[0, 1]], "json",
        )
    )  # fmt: skip


def changed(value: Any, random_: random.Random) -> Any:
    """One place in it is another one now."""
    if isinstance(value, dict) and value and random_.random() < 0.85:
        key = random_.choice(list(value))
        match random_.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, random_.choice(("frobnicate", "", "x" * 999)): hostile_value(random_)}
            case _:
                return {**value, key: changed(value[key], random_)}
    if isinstance(value, list) and value and random_.random() < 0.7:
        i = random_.randrange(len(value))
        if random_.random() < 0.1:
            return value * random_.choice((2, 50))
        return [*value[:i], changed(value[i], random_), *value[i + 1 :]]
    return hostile_value(random_)


def body_of(value: Any, random_: random.Random) -> bytes:
    """As JSON, sometimes broken."""
    data = json.dumps(value, ensure_ascii=random_.random() < 0.5).encode(errors="surrogatepass")
    match random_.randrange(20):
        case 0:
            return data[: random_.randrange(len(data) + 1)]
        case 1:
            i = random_.randrange(len(data))
            return data[:i] + bytes((random_.randrange(256),)) + data[i + 1 :]
        case 2:
            return random_.choice(
                (b"", b"\xff\xfe", b"[" * 100_000, b"NaN", b"null", b'{"model":' * 3000)
            )
    return data


class DoorCampaign:
    """Counts what came back, and what must not have."""

    def __init__(self, port: int, model: str, seed: int) -> None:
        self.port = port
        self.model = model
        self.random = random.Random(seed)
        self.answers: Counter[str] = Counter()
        self.faults: list[str] = []

    async def http(self) -> None:
        """One request, or what looks like one."""
        random_ = self.random
        path = random_.choice(SERVED)
        asked = valid(path, self.model, random_)
        if random_.random() < 0.8:
            asked = changed(asked, random_)
        body = body_of(asked, random_)
        length = len(body) + random_.choice((0,) * 12 + (1, 50, -1))
        head = POST.format(path=path, port=self.port, length=max(0, length))
        if path in (MESSAGES, COUNT) and random_.random() < 0.95:
            head = head.replace("Content-Type", VERSION + "Content-Type")
        way = random_.randrange(16)
        if way == 0:
            path = random_.choice(GETS)
            head, body = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n{LAST}\r\n", b""
        elif way == 1:
            head = head.replace(
                "Content-Length", random_.choice(("X-Length", "Content-length: 5\r\nContent-Length"))
            )
        elif way == 2:
            head = head.replace(f"Content-Length: {max(0, length)}", "Transfer-Encoding: chunked")
            body = b"%x\r\n%b\r\n" % (len(body), body) + random_.choice((b"0\r\n\r\n", b"zz\r\n", b""))
        elif way == 3:
            head = head.replace("\r\n\r\n", "\r\nX: " + "y" * random_.choice((100, 20_000)) + "\r\n\r\n")
        data = head.encode() + body
        if way == 4:
            data = data.replace(LAST.encode(), b"", 1) + data  # pipelined
        await self.exchange(path, data, length > len(body) or way == 2)

    async def exchange(self, path: str, data: bytes, waits: bool) -> None:
        random_ = self.random
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = b""
        try:
            way = random_.randrange(10)
            if way == 0:  # cut before all is sent
                writer.write(data[: random_.randrange(len(data))])
                await writer.drain()
            elif way == 1:  # byte by byte, for a while
                for i in range(min(len(data), 40)):
                    writer.write(data[i : i + 1])
                    await asyncio.sleep(0)
                writer.write(data[40:])
                answer = await self.read(reader, waits, asked=data)
            elif way == 2:  # half closed
                writer.write(data)
                writer.write_eof()
                answer = await self.read(reader, waits=False, asked=data)
            elif way == 3:  # read a little, then go with a reset
                writer.write(data)
                await self.read(reader, waits=True, most=20, patience=0.05)
                sock = writer.get_extra_info("socket")
                sock.setsockopt(1, 13, struct.pack("ii", 1, 0))
            elif way == 4:  # not read for a while
                writer.write(data)
                await asyncio.sleep(0.2)
                answer = await self.read(reader, waits, asked=data)
            else:
                writer.write(data)
                answer = await self.read(reader, waits, asked=data)
        except (ConnectionError, TimeoutError) as error:
            self.answers[type(error).__name__] += 1
        finally:
            writer.close()
        if answer:
            self.judge(path, answer)

    async def read(
        self,
        reader: asyncio.StreamReader,
        waits: bool,
        *,
        most: int = -1,
        patience: float = PATIENCE_S,
        asked: bytes = b"",
    ) -> bytes:
        """To the end. `waits`: the server waits for more, so what has come is all that comes."""
        try:
            async with asyncio.timeout(0.3 if waits and patience > 1 else patience):
                return await reader.read(most)
        except TimeoutError:
            if not waits:
                self.faults.append(f"no answer came to {len(asked)} bytes: {asked[:400]!r}")
            return b""

    def judge(self, path: str, answer: bytes) -> None:
        while answer.startswith(b"HTTP/1.1 100 "):
            answer = answer.partition(b"\r\n\r\n")[2]
        head, _, body = answer.partition(b"\r\n\r\n")
        if not head:
            return
        status = int(head.split(b" ", 2)[1])
        self.answers[str(status)] += 1
        if status >= 500 and status not in (503, 504, 529):
            self.faults.append(f"{path}: {answer[:300]!r}")
        if status < 400 or b"chunked" in head:
            return
        try:
            told = json.JSONDecoder().raw_decode(body.decode())[0]  # another answer may follow
            error = told["error"]
            if path.startswith("/api/"):
                fits = isinstance(error, str)
            elif path.startswith(MESSAGES):
                fits = told["type"] == "error" and set(error) >= {"message", "type"}
            else:
                fits = set(error) >= OPENAI_ERROR
        except (ValueError, KeyError, TypeError):
            fits = False
        if not fits:
            self.faults.append(f"{path}: not the shape of its API: {body[:200]!r}")

    async def websocket(self) -> None:
        """A socket, and some messages on it."""
        random_ = self.random
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        frames = FrameReader()
        try:
            writer.write(HANDSHAKE.format(path="/v1/responses", port=self.port).encode())
            if not (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101"):
                self.faults.append("no WebSocket was opened")
                return
            for _ in range(random_.randrange(1, 12)):
                writer.write(self.frames())
                if random_.random() < 0.5:
                    await self.events(reader, frames, 0.02)
            if random_.random() < 0.7:
                await self.events(reader, frames, 0.3)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.answers["websocket cut"] += 1
        finally:
            writer.close()

    def frames(self) -> bytes:
        random_ = self.random
        asked = valid("/v1/responses", self.model, random_)
        del asked["stream"]
        event: Any = {"type": "response.create", "stream_id": random_.choice("abcdefgh"), **asked}
        match random_.randrange(12):
            case 0:
                kind = random_.choice(("response.cancel", "response.steer", "x"))
                event = {"type": kind, "stream_id": "a"}
            case 1:
                event = hostile_value(random_)
            case 2 | 3 | 4:
                pass
            case _:
                event = changed(event, random_)
        data = body_of(event, random_)
        match random_.randrange(24):
            case 0:
                return random_.randbytes(random_.randrange(1, 400))  # no frame at all
            case 1:
                return client_frame(data, PING) if len(data) < 126 else client_frame(data[:120], PING)
            case 2:
                return client_frame(data, 2)  # binary
            case 3:
                half = len(data) // 2
                first = bytearray(client_frame(data[:half], TEXT))
                first[0] &= 0x7F
                return bytes(first) + client_frame(data[half:], 0)
            case 4:
                return client_frame(struct.pack("!H", 1000), CLOSE)
        return client_frame(data, TEXT)

    async def events(self, reader: asyncio.StreamReader, frames: FrameReader, patience: float) -> None:
        until = time.monotonic() + patience
        while (left := until - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    data = await reader.read(1 << 16)
            except TimeoutError:
                return
            if not data:
                return
            for opcode, payload in frames.feed(data):
                if opcode == CLOSE:
                    self.answers[f"close {int.from_bytes(payload[:2])}"] += 1
                    return
                if opcode != TEXT:
                    continue
                event = json.loads(payload)
                self.answers[event["type"]] += 1
                if event["type"] == "error" and not event["status"] < 500:
                    if event["status"] not in (503, 504):
                        self.faults.append(f"websocket: {payload[:300]!r}")
                elif event["type"] == "error" and not set(event["error"]) >= OPENAI_ERROR:
                    self.faults.append(f"websocket: not the shape of its API: {payload[:200]!r}")

    async def control(self) -> str:
        """A question that is answered the same each time."""
        asked = {
            "model": self.model,
            "messages": [{"role": "user", "content": "Control"}],
            "temperature": 0,
        }
        body = json.dumps({**asked, "max_tokens": 12}).encode()
        head = POST.format(path=SERVED[0], port=self.port, length=len(body)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head + body)
        answer = await self.read(reader, waits=False, asked=head + body)
        writer.close()
        try:
            return str(json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"])
        except (ValueError, KeyError):
            return f"no answer: {answer[:200]!r}"


async def attack(
    server: FakeServer, model: str, requests: int, seed: int
) -> tuple[Counter[str], list[str]]:
    campaign = DoorCampaign(server.port, model, seed)
    known = await campaign.control()
    before = await settled(server)
    done = 0
    while done < requests:
        count = min(24, requests - done)
        done += count
        ways = [campaign.websocket() if i % 4 == 0 else campaign.http() for i in range(count)]
        await asyncio.gather(*ways)
        if done % 240 == 0 and (said := await campaign.control()) != known:
            campaign.faults.append(f"the control client got {said!r} instead of {known!r}")
    if (said := await campaign.control()) != known:
        campaign.faults.append(f"the control client got {said!r} instead of {known!r}")
    after = await settled(server)
    for name in ("sessions", "sockets", "running", "tasks", "fds"):
        if after[name] > before[name]:
            campaign.faults.append(f"{after[name]} {name} are left, {before[name]} were there before")
    if after["kv"][2]:
        campaign.faults.append(f"{after['kv'][2]} pages are still referenced")
    return campaign.answers, campaign.faults


async def settled(server: FakeServer) -> dict[str, Any]:
    """When nothing runs, and sessions without sockets had time to expire."""
    state = server.snapshot()
    for _ in range(40):
        await asyncio.sleep(0.5)
        state = server.snapshot()
        if not (state["sessions"] or state["running"] or state["sockets"]):
            await asyncio.sleep(6.0)  # connections that were told to close have so long
            return server.snapshot()
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gateways", type=int, default=0)
    parser.add_argument("--json", help="write what was found to this file")
    options = parser.parse_args()
    about = machine()
    print(headline(about), flush=True)
    with FakeServer(step_ms=0, ttl=1, verify=1, gateways=options.gateways) as server:
        model = model_of(server.port)
        answers, faults = asyncio.run(attack(server, model, options.requests, options.seed))
    for name, count in sorted(answers.items()):
        print(f"{count:8} {name}")
    for fault, count in Counter(faults).most_common(20):
        print(f"FAULT x{count}: {fault}")
    write_json(options.json, about, {"answers": answers, "faults": faults})
    print(f"{options.requests} requests and sockets, {len(faults)} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
