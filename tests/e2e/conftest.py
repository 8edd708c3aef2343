"""A real engine on a real socket, a client written from docs/protocol.md, and an oracle.

`serving` runs an engine and checks what it leaves behind: no referenced page, no session, no task,
no socket, no thread of its executor. `Peer` knows the protocol page and nothing of Ramify's code.
`Oracle` knows what the fake model says after given tokens, so that every text can be checked.
"""

import asyncio
import gc
import json
import os
import re
import shutil
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import websockets
from transformers import LlamaConfig, LlamaForCausalLM
from websockets.asyncio.client import ClientConnection

from ramify.actors.cache import on_disk
from ramify.actors.cache.on_disk import OnDisk
from ramify.actors.engine import Engine, EngineFailed, running_engine
from ramify.actors.executor.spec import ExecutorSpec, FakeSpec
from ramify.actors.scheduler.loads import KvLoads
from ramify.actors.tokenizer import Tokenizer
from ramify.clients.bench.server import served
from ramify.gpu.executors.fake_model import FakeModel
from ramify.protocol.config import (
    EngineConfig,
    Limits,
    ModelConfig,
    ReplicasConfig,
    ScheduleConfig,
    ServerConfig,
)
from ramify.protocol.errors import RamifyError
from ramify.protocol.sampling import SamplingParams

PATIENCE = 60.0  # seconds; the machine may be busy
EOS = 2
VOCAB = 384
FIRST = 3  # the fake model samples no special token but EOS
WORKERS = ("AnyIO worker thread", "asyncio_")  # thread pools that outlive a call by design

Message = dict[str, Any]
Found = Callable[[Message], bool]


@pytest.fixture(scope="session", autouse=True)
def _processes(children_are_forked: None, caches_are_checked: None) -> None: ...


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The references are tiny: threads that wait for each other take several times as long as one."""
    torch.set_num_threads(1)


def pause(rounds: int) -> float:
    """Seconds for one that goes round until something else ends: the longer that takes, the seldomer."""
    return min(0.1, 0.005 * rounds)


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that no message tells."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what


# --- the client -----------------------------------------------------------------------------------


class Peer:
    """One WebSocket. Messages are read when a test asks for one; deltas are added up.

    `text`, `position`, `tokens`: of each branch, from deltas alone. `log`: every message, in order.
    """

    def __init__(self, ws: ClientConnection, codec: str) -> None:
        self.ws = ws
        self.codec = codec
        self.log: list[Message] = []
        self.frames = 0
        self.position: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.revision = 0
        self._chunks: dict[str, list[tuple[int, str]]] = {}
        self._seen = 0

    def text(self, branch: str = "main") -> str:
        return "".join(text for _, text in self._chunks.get(branch, ()))

    @property
    def seen(self) -> Message:
        """`have` and `revision` for an `open` that resumes."""
        return {"have": dict(self.position), "revision": self.revision}

    @staticmethod
    def user(ident: int, content: str, **fields: Any) -> Message:
        """An `append` of a user's turn."""
        messages = [{"role": "user", "content": content}]
        return {"type": "append", "id": ident, "messages": messages, **fields}

    @staticmethod
    def greedy(ident: int, **fields: Any) -> Message:
        """A `generate` of 32 tokens."""
        return {"type": "generate", "id": ident, "temperature": 0, "max_tokens": 32, **fields}

    async def send(self, *messages: Message) -> None:
        """One frame."""
        frame = messages[0] if len(messages) == 1 else list(messages)
        await self.ws.send(
            msgspec.msgpack.encode(frame) if self.codec == "msgpack" else json.dumps(frame)
        )

    async def until(self, found: Found) -> Message:
        """The next message that fits; those before it were passed over (see `log`)."""
        async with asyncio.timeout(PATIENCE):
            while True:
                while self._seen < len(self.log):
                    message = self.log[self._seen]
                    self._seen += 1
                    if found(message):
                        return message
                await self.receive()

    async def terminal(self, ident: int, branch: str | None = None) -> Message:
        """The terminal reply of an op, whether it came already or not."""

        def fits(m: Message) -> bool:
            return (
                m["type"] in ("ok", "done", "error", "state")
                and m.get("id") == ident
                and (branch is None or m.get("branch") == branch)
            )

        for message in self.log:
            if fits(message):
                return message
        return await self.until(fits)

    async def terminals(self, ident: int, branches: Sequence[str]) -> dict[str, Message]:
        return {name: await self.terminal(ident, name) for name in branches}

    async def next(self, *types: str) -> Message:
        return await self.until(lambda m: m["type"] in types)

    async def open(self, *ops: Message, **fields: Any) -> Message:
        """`open`, with the first ops in the same frame; returns the `state`."""
        await self.send({"type": "open", "client": "peer", **fields}, *ops)
        state = await self.next("state", "error")
        assert state["type"] == "state", state
        return state

    async def say(self, ident: int, content: str, branch: str = "main", **sampling: Any) -> Message:
        """A chat turn as ops `ident` and `ident + 1`; returns its `done`."""
        await self.send(
            self.user(ident, content, branch=branch), self.greedy(ident + 1, branch=branch, **sampling)
        )
        return await self.terminal(ident + 1, branch)

    async def tree(self, ident: int) -> dict[str, list[int]]:
        """The tokens of each branch, in as many answers as it takes; their ids are `ident` and above."""
        turns: dict[str, list[Message]] = {}
        shared: dict[str, tuple[str, int]] = {}  # its first turns are its parent's, up to a position
        after: Message | None = None
        while True:
            await self.send({"type": "tree", "id": ident, "tokens": True, "after": after})
            state = await self.terminal(ident)
            assert state["type"] == "state", state
            for branch in state["branches"]:
                turns.setdefault(branch["branch"], []).extend(branch.get("turns", ()))
                if "turns_from" in branch:
                    shared[branch["branch"]] = branch["parent"], branch["turns_from"]
            after = state.get("next")
            if after is None:
                break
            ident += 1

        def whole(name: str) -> list[Message]:
            if name not in shared:
                return turns[name]
            parent, upto = shared[name]
            return [turn for turn in whole(parent) if turn["end"] <= upto] + turns[name]

        return {name: [t for turn in whole(name) for t in turn["tokens"]] for name in turns}

    async def nothing_runs(self) -> None:
        """Wait until no generation of the session runs or waits."""
        ident = 1 << 20
        while True:
            await self.send({"type": "tree", "id": ident})
            if not any("running" in b for b in (await self.terminal(ident))["branches"]):
                return
            ident += 1

    async def closed(self) -> int:
        """Read on until the server closes; returns the close code."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    await self.receive()
                except websockets.ConnectionClosed:
                    assert self.ws.close_code is not None
                    return self.ws.close_code

    async def receive(self) -> None:
        data = await self.ws.recv()
        assert isinstance(data, bytes) == (self.codec == "msgpack")
        frame = msgspec.msgpack.decode(data) if isinstance(data, bytes) else json.loads(data)
        self.frames += 1
        for message in frame if isinstance(frame, list) else [frame]:
            self.log.append(message)
            self._note(message)

    def _note(self, message: Message) -> None:
        """What a client keeps: positions, texts, the revision."""
        self.revision = max(self.revision, message.get("revision", 0))
        if message["type"] != "delta":
            return
        name = message["branch"]
        chunks = self._chunks.setdefault(name, [])
        cut = message.get("truncate")
        if cut is not None:
            self.truncate(name, cut)
        elif message["position"] <= self.position.get(name, -1):
            raise AssertionError(f"{name} went back to {message} without truncate")
        chunks.append((message["position"], message["text"]))
        self.position[name] = message["position"]
        self.tokens.setdefault(name, []).extend(message.get("tokens", ()))

    def follow(self, earlier: "Peer") -> "Peer":
        """Go on with what an earlier socket of the same client had received."""
        self._chunks = {name: list(chunks) for name, chunks in earlier._chunks.items()}
        self.position = dict(earlier.position)
        self.tokens = {name: list(tokens) for name, tokens in earlier.tokens.items()}
        self.revision = earlier.revision
        return self

    def abort(self) -> None:
        """Drop the connection without a word: the server's next write meets a reset."""
        sock = self.ws.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.ws.transport.abort()

    def truncate(self, name: str, to: int) -> None:
        """Cut the branch's text back to position `to`."""
        chunks = self._chunks.setdefault(name, [])
        while chunks and chunks[-1][0] > to:
            chunks.pop()
        self.position[name] = to


@asynccontextmanager
async def socket_to(url: str, codec: str | None = None, **options: Any) -> AsyncIterator[Peer]:
    """Connect. `options`: of `websockets.connect`."""
    async with websockets.connect(url, max_size=None, open_timeout=PATIENCE, **options) as ws:
        yield Peer(ws, codec or "json")


@pytest.fixture
def peers() -> Callable[..., AbstractAsyncContextManager[Peer]]:
    """`async with peers(url) as peer`, for a server that runs elsewhere."""
    return socket_to


# --- the oracle ------------------------------------------------------------------------------------


class Oracle:
    """What the fake model says, and how the test's chat template (ChatML) is put together."""

    def __init__(self, folder: Path, eos_every: int) -> None:
        self.tokenizer = Tokenizer.load(folder)
        self.model = FakeModel(vocab_size=VOCAB, eos=EOS, first=FIRST, eos_every=eos_every)
        self.newline = self.tokenizer.encode("\n")

    def turn(self, content: str, role: str = "user") -> list[int]:
        """A turn on an empty branch or behind a complete turn, and the generation prompt."""
        return self.tokenizer.encode(f"<|im_start|>{role}\n{content}<|im_end|>\n<|im_start|>assistant\n")

    def output(
        self, tokens: Sequence[int], n: int = 32, *, seed: int | None = None, eos: bool = True
    ) -> list[int]:
        """What is generated after `tokens`; the last one is EOS if that stopped it. Greedy or seeded."""
        sampling = None if seed is None else SamplingParams(temperature=1.0, seed=seed)
        return self.model.expected(tokens, n, eos={EOS} if eos else None, sampling=sampling)

    def next_turn(self, tokens: Sequence[int], content: str) -> list[int]:
        """The branch after another turn of the user's. `tokens`: up to the last answer's end."""
        end = self.newline if tokens[-1] == EOS else self.tokenizer.encode("<|im_end|>\n")
        return [*tokens, *end, *self.turn(content)]

    def text(self, tokens: Sequence[int]) -> str:
        """As clients see it: control tokens have no text."""
        return self.tokenizer.decode(tokens)


# --- the server --------------------------------------------------------------------------------------


class Served:
    """A running engine, ways to connect to it, and what to compare with."""

    def __init__(self, engine: Engine, oracle: Oracle) -> None:
        self.engine = engine
        self.oracle = oracle
        self.http = engine.url.replace("ws://", "http://").removesuffix("/v1/ws")

    @asynccontextmanager
    async def connect(self, codec: str | None = None, **options: Any) -> AsyncIterator[Peer]:
        """A socket. Without `codec` no subprotocol is offered."""
        offered = None if codec is None else [f"ramify.v1+{codec}"]
        options = {"subprotocols": offered} | options
        async with socket_to(self.engine.url, codec, **options) as peer:
            yield peer

    @asynccontextmanager
    async def undisturbed(self) -> AsyncIterator[None]:
        """Meanwhile another client chats again and again, and gets exactly what it should."""
        stop = asyncio.Event()
        chatting = asyncio.create_task(self._chat_until(stop))
        try:
            yield
        finally:
            stop.set()
            turns = await chatting
        assert turns > 0

    async def _chat_until(self, stop: asyncio.Event) -> int:
        prompt = self.oracle.turn("Do not disturb.")
        text = self.oracle.text(self.oracle.output(prompt, 40))
        turns = 0
        async with self.connect() as peer:
            await peer.open(client="bystander")
            while not (turns and stop.is_set()):
                shown = len(peer.text())
                done = await peer.say(3 * turns + 1, "Do not disturb.", max_tokens=40)
                assert done["reason"] == "length", done
                assert peer.text()[shown:] == text
                await peer.send({"type": "rollback", "id": 3 * turns + 3, "to": 0})
                assert (await peer.terminal(3 * turns + 3))["type"] == "ok"
                peer.position.clear()
                turns += 1
                await asyncio.sleep(pause(turns))
            await peer.send({"type": "close", "id": 3 * turns + 4})
            assert await peer.closed() == 1000
        return turns

    async def request(
        self, method: str, path: str, headers: Mapping[str, str] = {}, host: str | None = None
    ) -> tuple[int, Any]:
        """An HTTP request: status, and the body (parsed if it is JSON)."""
        name = host if host is not None else f"127.0.0.1:{self.engine.port}"
        lines = [f"{method} {path} HTTP/1.1", f"Host: {name}", "Connection: close"]
        lines += [f"{key}: {value}" for key, value in headers.items()]
        answer = await self.tcp("\r\n".join([*lines, "", ""]).encode())
        head, _, body = answer.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        return status, json.loads(body) if b"application/json" in head else body.decode()

    async def tcp(self, data: bytes, *, half_close: bool = False) -> bytes:
        """Send bytes on a bare connection and return everything that comes back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.engine.port)
        try:
            writer.write(data)
            if half_close:
                writer.write_eof()
            async with asyncio.timeout(PATIENCE):
                return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    def unsent(self) -> int:
        """The most bytes that wait for one socket, inside this process."""
        connections: Any = self.engine.front.gateway.hub.connections.values()
        return max(c._transport.get_write_buffer_size() for c in connections)

    def drop_connections(self) -> None:
        """Cut every connection, as a broken network does."""
        for connection in list(self.engine.front.gateway.hub.connections.values()):
            connection.abort()

    async def quiet(self) -> None:
        """Wait until nothing runs; then every page must be free or evictable."""
        engine = self.engine
        cache = engine.cache
        metrics = engine.metrics
        idle = 0
        elsewhere = engine.layout.gateways or cache is None
        while idle < (20 if elsewhere else 1):  # more may be on its way to the core
            await eventually(lambda: not metrics.running + metrics.waiting, "generations still run")
            idle += 1
            await asyncio.sleep(0.005 if elsewhere else 0)
            if metrics.running + metrics.waiting:
                idle = 0
        if cache is None:  # in replicas, whose reports are 0.25 s old at most
            await eventually(lambda: not engine.metrics.kv_in_use, "pages are still referenced")
            return
        await eventually(lambda: not cache.runs, "requests still run")
        cache.residency.release_kept()  # of deep paths
        assert cache.referenced == 0, "pages are still referenced"
        assert cache.free + cache.evictable == cache.total

    async def sampled(self) -> float:
        """Tokens so far, of all replicas that have reported."""
        text = (await self.request("GET", "/metrics"))[1]
        counts = re.findall(r"^ramify_sampled_tokens_total(?:{.*})? (\S+)", text, re.MULTILINE)
        return sum(map(float, counts))

    async def goes_on(self, tokens: int) -> None:
        """Wait until so many more tokens have been generated."""
        enough = await self.sampled() + tokens
        async with asyncio.timeout(PATIENCE):
            while await self.sampled() < enough:
                await asyncio.sleep(0.01)

    async def until_alone(self, *, sessions: int = 1, sockets: int | None = None) -> None:
        """Wait until only `sessions` sessions are left, or `sockets` sockets."""
        if sockets is not None:
            await eventually(lambda: self.engine.metrics.open_sockets == sockets, "sockets stay open")
        else:
            await eventually(lambda: self.engine.metrics.live_sessions <= sessions, "sessions stay")

    async def deserted(self) -> None:
        """Wait until every socket and session is gone."""
        await eventually(lambda: self.engine.metrics.open_sockets == 0, "sockets stay open")
        await eventually(lambda: self.engine.metrics.live_sessions == 0, "sessions stay")


Serving = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV in host memory or on the disk is loaded, and waited for, however busy the processor is."""
    for of in (OnDisk, KvLoads):
        monkeypatch.setattr(of, "pays", lambda self, rate: True)
        monkeypatch.setattr(of, "cost", lambda self, rate: 0)
    monkeypatch.setattr(on_disk, "SHORTEST", PATIENCE)
    monkeypatch.setattr(on_disk, "LONGEST", PATIENCE)


@pytest.fixture
def serving(tokenizer_folder: Path) -> Serving:
    """`async with serving(...) as served`: keywords are fields of the configurations, see below."""

    def _replicas(given: int | Mapping[str, Any]) -> ReplicasConfig | None:
        fields = {"count": given} if isinstance(given, int) else dict(given)
        return ReplicasConfig(**fields) if given else None

    @asynccontextmanager
    async def run(
        *,
        executor: str = "thread",
        gateways: int = 0,
        replicas: int | Mapping[str, Any] = 0,
        model: Mapping[str, Any] = {},
        server: Mapping[str, Any] = {},
        limits: Mapping[str, Any] = {},
        schedule: Mapping[str, Any] = {},
        fake: Mapping[str, Any] = {},
        eos_every: int = 0,
        spec: ExecutorSpec | None = None,
        real: bool = False,
        step_timeout_s: float | None = None,
        idle_at_end: bool = True,
        alone: bool = True,
    ) -> AsyncIterator[Served]:
        """`fake`: settings of FakeExecutor. `real`: run the model folder instead of the fake.

        `idle_at_end`: wait for running generations before the engine is stopped. `alone`: what is left
        behind is looked for, which another server beside this one would be.
        """
        config = EngineConfig(
            model=ModelConfig(**{"path": tokenizer_folder} | dict(model)),
            server=ServerConfig(**{"port": 0, "grace_s": 0.5} | dict(server)),
            limits=Limits(**{"ops_per_second": 10_000, "ops_burst": 10_000} | dict(limits)),
            schedule=ScheduleConfig(**schedule),
            executor=executor,
            gateways=gateways,
            replicas=_replicas(replicas),
            step_timeout_s=step_timeout_s,
        )
        if spec is None and not real:
            spec = FakeSpec(
                settings={"verify": True} | dict(fake),
                model={"vocab_size": VOCAB, "eos": EOS, "first": FIRST, "eos_every": eos_every},
            )
        oracle = Oracle(config.model.path, eos_every)
        before = Resources()
        try:
            async with running_engine(config, spec=spec) as engine:
                yield Served(engine, oracle)
                if idle_at_end:
                    await Served(engine, oracle).quiet()
        except EngineFailed:
            await before.returned()
            raise
        if alone:
            await before.returned()

    return run


@pytest.fixture
def openai_of() -> Callable[..., AbstractAsyncContextManager[tuple[Any, str]]]:
    """`async with openai_of(served) as (client, model)`: the real `openai` client, which tries once."""
    from openai import AsyncOpenAI

    @asynccontextmanager
    async def client_of(served: Served, key: str = "none") -> AsyncIterator[tuple[Any, str]]:
        base_url = f"{served.http}/v1"
        async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            (model,) = (await client.models.list()).data
            yield client, model.id

    return client_of


Starting = Callable[..., Awaitable[RamifyError]]


@pytest.fixture
def starting(tokenizer_folder: Path) -> Starting:
    """`error = await starting(kind, ...)`: an engine that cannot be started, and leaves nothing."""

    async def run(
        kind: type[RamifyError],
        *,
        path: Path | None = None,
        port: int = 0,
        executor: Any = "thread",
        gateways: int = 0,
    ) -> RamifyError:
        """`path`: a model folder to load; without it the fake model runs."""
        config = EngineConfig(
            model=ModelConfig(path=path or tokenizer_folder, device="cpu", threads=1),
            server=ServerConfig(port=port),
            executor=executor,
            gateways=gateways,
        )
        before = Resources()
        with pytest.raises(kind) as caught:
            async with running_engine(config, spec=None if path else FakeSpec()):
                pass
        await before.returned()
        return caught.value

    return run


@pytest.fixture(scope="session")
def llama_folder(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights, float32, 512 tokens of context."""
    folder = tmp_path_factory.mktemp("llama") / "tiny"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, folder)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=EOS,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bundled() -> Iterator[str]:
    """The address of a `ramify serve` that has the bundled model, for all who change nothing of it."""
    flags = ["--device=cpu", "--threads=1", "--kv-tokens=60000", "--session-ttl=60"]
    with served(flags, None) as server:
        yield server.url


class Resources:
    """What an engine may hold only while it runs."""

    def __init__(self) -> None:
        self.tasks = asyncio.all_tasks()
        self.threads = self._threads()
        self.fds = self._fds()

    async def returned(self) -> None:
        """Everything that was taken since has been given back."""
        await eventually(lambda: asyncio.all_tasks() <= self.tasks, "tasks stay")
        await eventually(lambda: self._threads() <= self.threads, "threads stay")
        if not self._fds() <= self.fds:
            gc.collect()
            await eventually(lambda: self._fds() <= self.fds, "file descriptors stay")

    @staticmethod
    def _threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if not t.name.startswith(WORKERS)}

    @staticmethod
    def _fds() -> set[str]:
        """Sockets, pipes and the like by inode, so that a number used anew does not hide one."""
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:  # the listing's own
                continue
        return {target for target in found if not target.startswith("/dev/")}


@pytest.fixture(params=["thread", "process"])
def executor(request: pytest.FixtureRequest) -> str:
    """Where the executor runs: tests that use this run with both."""
    placement: str = request.param
    return placement


PLACEMENTS = {
    "thread": {"executor": "thread"},
    "process": {"executor": "process"},
    "gateways": {"executor": "thread", "gateways": 2},
    "replicas": {"executor": "thread", "replicas": 1},
}


@pytest.fixture(params=list(PLACEMENTS))
def placement(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What runs in processes of its own: for `serving(**placement)`."""
    return PLACEMENTS[request.param]
