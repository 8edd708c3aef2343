"""Frames with hostile values at a real server, while another client chats. Does anybody else notice?

    python benchmarks/hostile_frames.py [--frames 200000] [--seed 0] [--gateways 0] [--json FILE]

A `ramify serve` runs a tiny random Llama (or `--model DIR`; flags after `--` go to the server). Another
process attacks it over `--sockets` sockets, half of them JSON, half msgpack: frames from
`tests/e2e/hostile.py`, fragments, floods beyond the limits and slow ones within them, sockets cut in
mid-frame, resumes by key and by view key. Attackers and control client have different tokens, so limits
of a credential apply to the attackers alone.

The control client, in this process, has a connection of its own. It asks short greedy questions whose
answers were noted before the attack, over one socket and, each tenth time, over a new one.

The exit code is 1 if
- the control client waited over `--patience` seconds (1) for a first token or between two, or got
  another answer,
- the server's memory (proportional set size of all its processes but compile workers, whose jobs come
  and go) grew by more than 5% from the middle to the end,
- its log holds a traceback, it does not answer at the end, or SIGTERM does not end it with code 0.

Then the seed and the last frames of each socket are printed. The frames follow from the seed and from
what the server had answered (sessions to resume), so a run with `--sockets 1` repeats best.
"""

import argparse
import asyncio
import base64
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
from report import headline, machine, percentile, table, write_json

from ramify.clients.bench.websocket import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    FrameReader,
    client_frame,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.conftest import write_tokenizer
from tests.e2e.hostile import MIXES, Codec, Hostile, HostileFrame, Memory, Mood

CONTROL, ATTACKERS = "control-token", [f"attack-token-{i}" for i in range(4)]
GROWTH = 0.05  # of the memory in the middle of the run, at most
QUESTIONS = 24
ANSWER = 16  # tokens
GREEDY = {"temperature": 0, "ignore_eos": True}
STARTING_S, STOPPING_S, GIVE_UP_S = 120.0, 60.0, 30.0
KEPT = 12  # frames of a socket that are printed after a failure
BACKLOG = 1 << 20  # bytes of an attacker's socket that wait to be sent
_PROGRAM = re.compile(r"-m ramify\.(?:\w+\.)*(\w+)")
_READY = re.compile(r"ready: ws://[^:]+:(\d+)")


# --- one WebSocket ------------------------------------------------------------------------------------


class FrameSocket(asyncio.Protocol):
    """A WebSocket. `receive(messages)` gets each frame that parses; `closed` is set at the end."""

    def __init__(self, receive: Any, codec: Codec) -> None:
        self.closed = asyncio.Event()
        self.code: int | None = None
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport
        self._receive = receive
        self._decode = (msgspec.json if codec == "json" else msgspec.msgpack).Decoder().decode
        self._head = b""
        self._reader: FrameReader | None = None

    @classmethod
    async def connect(cls, port: int, codec: Codec, token: str, receive: Any) -> "FrameSocket":
        """Raises OSError if the server refuses."""
        loop = asyncio.get_running_loop()
        _, self = await loop.create_connection(lambda: cls(receive, codec), "127.0.0.1", port)
        key = base64.b64encode(bytes(16)).decode()
        self.transport.write(
            f"GET /v1/ws HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: Upgrade\r\n"
            f"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n"
            f"Sec-WebSocket-Protocol: ramify.v1+{codec}\r\n"
            f"Authorization: Bearer {token}\r\n\r\n".encode()
        )
        if not await self.ready:
            raise ConnectionError(self._head[:80].decode("latin-1"))
        return self

    def send(self, data: bytes, opcode: int) -> None:
        self.write(client_frame(data, opcode))

    def write(self, data: bytes) -> None:
        """Bytes as they are, unless the server has gone."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self._reader is None:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            if not head.startswith(b"HTTP/1.1 101"):
                self.transport.abort()
                return
            self._reader = FrameReader()
            self.ready.set_result(True)
        for opcode, payload in self._reader.feed(data):
            if opcode in (TEXT, BINARY):
                frame = self._decode(payload)
                self._receive(frame if isinstance(frame, list) else [frame])
            elif opcode == PING:
                self.transport.write(client_frame(payload, PONG))
            elif opcode == CLOSE:
                self.code = int.from_bytes(payload[:2]) if len(payload) >= 2 else 1005
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ready.done():
            self.ready.set_result(False)
        self.closed.set()


# --- the attack ---------------------------------------------------------------------------------------


class Attack:
    """All hostile sockets. `sent` frames of `target`; `last`: what each socket sent at the end."""

    def __init__(self, port: int, seed: int, sockets: int, target: int) -> None:
        self.counts: Counter[str] = Counter()
        self.sent = 0
        self.last: dict[int, deque[tuple[int, str, bytes]]] = {}
        self._port, self._seed, self._sockets, self._target = port, seed, sockets, target

    async def run(self) -> None:
        """Until all frames are sent. Raises OSError if the server has gone."""
        async with asyncio.TaskGroup() as group:
            for index in range(self._sockets):
                group.create_task(self._attacker(index))

    async def _attacker(self, index: int) -> None:
        rng = random.Random(self._seed * 1000 + index)
        codec: Codec = "json" if index % 2 == 0 else "msgpack"
        memory = Memory()
        hostile = Hostile(rng, codec, memory)
        last = self.last.setdefault(index, deque(maxlen=KEPT))
        refused = 0
        while self.sent < self._target:
            try:
                socket = await FrameSocket.connect(
                    self._port,
                    codec,
                    ATTACKERS[index % len(ATTACKERS)],
                    lambda ms: self._take(memory, ms),
                )
                refused = 0
            except OSError as error:
                self.counts[f"refused {str(error)[:20]!r}"] += 1
                refused += 1
                if refused * 0.1 > GIVE_UP_S:
                    raise
                await asyncio.sleep(0.1)
                continue
            self.counts["connected"] += 1
            try:
                await self._life(index, hostile, socket, last)
            finally:
                if not socket.closed.is_set():
                    socket.transport.abort()
            self.counts[f"close {socket.code}"] += 1

    async def _life(
        self, index: int, hostile: Hostile, socket: FrameSocket, last: "deque[tuple[int, str, bytes]]"
    ) -> None:
        """One connection, from `open` to whatever ends it."""
        rng = hostile.random
        hostile.mix = rng.choice(MIXES)
        mood: Mood = rng.choices(["plain", "edge", "wild"], [6, 2, 2])[0]  # type: ignore[assignment]
        client = f"client-{index}-{rng.randrange(3)}"
        self._send(socket, hostile.encode(hostile.opening(client, mood)), last)
        if mood != "plain":  # it was refused, perhaps
            self._send(socket, hostile.encode(hostile.opening(client, "plain")), last)
        pause = rng.choice([0.0, 0.0, 0.02, 0.05])  # beyond the limits, or within them
        for _ in range(rng.choice([3, 30, 300, 1000])):
            if socket.closed.is_set() or self.sent >= self._target:
                return
            self._send(socket, hostile.frame(), last)
            if rng.random() < 0.01:
                self._odd(rng, socket)
            await asyncio.sleep(pause)
            waited = 0
            while socket.transport.get_write_buffer_size() > BACKLOG and not socket.closed.is_set():
                await asyncio.sleep(0.05)
                waited += 1
                if waited > 400:  # it reads nothing any more
                    self.counts["never read"] += 1
                    return
        end = rng.randrange(4)
        if end == 0:  # half a WebSocket frame
            socket.write(client_frame(hostile.frame().data)[:-1])
            await asyncio.sleep(0)
        elif end == 1:
            socket.send(struct.pack("!H", rng.choice([0, 1000, 1005, 4409, 65535])) + b"\xff", CLOSE)
        elif end == 2:
            socket.send(rng.randbytes(3), 0x3)  # a reserved opcode
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(socket.closed.wait(), rng.random())

    def _odd(self, rng: random.Random, socket: FrameSocket) -> None:
        """What the WebSocket layer itself has to stand."""
        match rng.randrange(5):
            case 0:
                for _ in range(200):
                    socket.send(b"", PONG)
            case 1:
                for _ in range(50):
                    socket.send(rng.randbytes(125), PING)
            case 2:  # a fragmented message that never ends, of empty fragments
                socket.write(bytes([TEXT, 0x80, 0, 0, 0, 0]))
                for _ in range(200):
                    socket.write(bytes([CONTINUATION, 0x80, 0, 0, 0, 0]))
                socket.send(b"{}", CONTINUATION)
            case 3:
                socket.transport.pause_reading()
                asyncio.get_running_loop().call_later(rng.random() * 3, _resume, socket)
            case _:
                socket.send(b"x" * (1 << 20), TEXT)

    def _send(
        self, socket: FrameSocket, frame: HostileFrame, last: "deque[tuple[int, str, bytes]]"
    ) -> None:
        last.append((self.sent, "binary" if frame.binary else "text", frame.data))
        socket.send(frame.data, BINARY if frame.binary else TEXT)
        self.sent += 1

    def _take(self, memory: Memory, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            memory.take(message)
            kind = message["type"]
            self.counts[f"error {message['code']}" if kind == "error" else kind] += 1


def _resume(socket: FrameSocket) -> None:
    if not socket.transport.is_closing():
        socket.transport.resume_reading()


async def attack(options: argparse.Namespace) -> int:
    """The attacking process: progress as JSON lines on standard output; ends when its parent does."""
    campaign = Attack(options.port, options.seed, options.sockets, options.frames)
    running = asyncio.create_task(campaign.run())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, running.cancel)
    failed = 0
    while not running.done():
        await asyncio.wait([running], timeout=0.5)
        try:
            print(json.dumps({"sent": campaign.sent, "counts": campaign.counts}), flush=True)
        except BrokenPipeError:  # its parent was killed
            os._exit(1)
    try:
        await running
    except BaseException as error:
        failed = 1
        print(json.dumps({"error": repr(error)}), flush=True)
    frames = {
        str(index): [(n, kind, data[:400].decode("latin-1")) for n, kind, data in last]
        for index, last in campaign.last.items()
    }
    print(json.dumps({"last": frames}), flush=True)
    return failed


# --- the control client ------------------------------------------------------------------------------


@dataclass
class Control:
    """A client that must not notice. `waits`: seconds to a first token, `gaps` between two."""

    port: int
    waits: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    opens: list[float] = field(default_factory=list)
    known: dict[int, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    socket: FrameSocket | None = None
    _inbox: "asyncio.Queue[tuple[float, dict[str, Any]]]" = field(default_factory=asyncio.Queue)
    _ident: int = 0

    async def ask(self, number: int) -> str:
        """A question's answer. Raises TimeoutError, ConnectionError."""
        if self.socket is None or self.socket.closed.is_set():
            begin = time.perf_counter()
            self._inbox, self._ident = asyncio.Queue(), 0
            self.socket = await FrameSocket.connect(self.port, "json", CONTROL, self._receive)
            self._tell({"type": "open", "client": f"control-{begin}"})
            await self._until("state")
            self.opens.append(time.perf_counter() - begin)
        words = f"Question {number}: what is {number} and {number * 7}?"
        self._ident += 3
        self._tell(
            {"type": "rollback", "id": self._ident, "to": 0},
            {"type": "append", "id": self._ident + 1, "text": words},
            {"type": "generate", "id": self._ident + 2, "max_tokens": ANSWER, **GREEDY},
        )
        last, text, first = time.perf_counter(), "", True
        while True:
            at, message = await self._next()
            if message["type"] == "delta":
                (self.waits if first else self.gaps).append(at - last)
                last, first = at, False
                text += message["text"]
            elif message["type"] == "done" and message["id"] == self._ident + 2:
                self.gaps.append(at - last)
                if message["reason"] != "length":
                    raise ConnectionError(f"the answer ended early: {message}")
                return text
            elif message["type"] == "error":
                raise ConnectionError(f"an error: {message}")

    async def renew(self) -> None:
        """The next question goes over a new socket."""
        if self.socket is not None:
            self._tell({"type": "close", "id": self._ident + 3})
            with suppress(TimeoutError):
                await asyncio.wait_for(self.socket.closed.wait(), 1.0)
            if not self.socket.closed.is_set():
                self.socket.transport.abort()
        self.socket = None

    async def learn(self) -> None:
        """The answers of an idle server."""
        for number in range(QUESTIONS):
            self.known[number] = await self.ask(number)
        for number in range(QUESTIONS):
            if await self.ask(number) != self.known[number]:
                raise ConnectionError(f"question {number} has two answers on an idle server")
        await self.renew()
        self.waits.clear()
        self.gaps.clear()
        self.opens.clear()

    async def keep_asking(self, stop: asyncio.Event) -> None:
        """Until `stop`. What goes wrong is noted; after three faults in a row it gives up."""
        asked = faults = 0
        rng = random.Random(0)
        while not stop.is_set() and faults < 3:
            number = rng.randrange(QUESTIONS)
            try:
                async with asyncio.timeout(GIVE_UP_S):
                    answer = await self.ask(number)
                if answer != self.known[number]:
                    self.wrong.append(f"question {number}: {answer!r}, not {self.known[number]!r}")
                faults = 0
            except (OSError, TimeoutError) as error:
                self.wrong.append(f"question {number} had no answer: {error!r}")
                faults += 1
                self.socket = None
            asked += 1
            if asked % 10 == 0 and self.socket is not None:
                await self.renew()
            await asyncio.sleep(0.02)

    def _tell(self, *messages: dict[str, Any]) -> None:
        assert self.socket is not None
        self.socket.send(json.dumps(messages).encode(), TEXT)

    def _receive(self, messages: list[dict[str, Any]]) -> None:
        now = time.perf_counter()
        for message in messages:
            self._inbox.put_nowait((now, message))

    async def _next(self) -> tuple[float, dict[str, Any]]:
        assert self.socket is not None
        while True:
            with suppress(TimeoutError):
                return await asyncio.wait_for(self._inbox.get(), 0.5)
            if self.socket.closed.is_set() and self._inbox.empty():
                raise ConnectionError(f"the server closed the socket ({self.socket.code})")

    async def _until(self, kind: str) -> None:
        while True:
            _, message = await self._next()
            if message["type"] == kind:
                return
            if message["type"] == "error":
                raise ConnectionError(f"an error: {message}")


# --- the server --------------------------------------------------------------------------------------


class HostileServer:
    """A `ramify serve` in a process group of its own; its log goes to a file."""

    def __init__(self, model: Path, log: Path, options: argparse.Namespace) -> None:
        self.log = log
        command = [sys.executable, "-m", "ramify.clients.cli", "serve", "--port", "0"]
        command += ["--model", str(model), "--session-ttl", "5", "--kv-tokens", "20000"]
        command += ["--gateways", str(options.gateways)]
        for token in [CONTROL, *ATTACKERS]:
            command += ["--auth-token", token]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, *options.flags], stdout=subprocess.PIPE, stderr=file, text=True
            )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := _READY.match(line):
                self.port = int(found[1])
                break
        else:
            sys.exit(f"the server did not start:\n{log.read_text()}")

    def memory(self) -> float:
        """MiB of all its processes but compile workers, shared pages counted once."""
        return sum(mib for name, mib in self.parts() if name != "compile_program")

    def parts(self) -> list[tuple[str, float]]:
        """MiB of each of its processes, by the name of its program."""
        found = []
        with suppress(psutil.Error):
            root = psutil.Process(self.process.pid)
            for each in [root, *root.children(recursive=True)]:
                with suppress(psutil.Error):
                    named = _PROGRAM.search(" ".join(each.cmdline()))
                    mib = each.memory_full_info().pss / 2**20
                    found.append((named[1] if named is not None else "", mib))
        return found

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> int | None:
        """SIGTERM; the exit code, or None if it had to be killed."""
        self.process.terminate()
        try:
            return self.process.wait(STOPPING_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.process.kill()
            self.process.wait()

    def faults(self) -> list[str]:
        """What the log should not hold: tracebacks, and the lines before them."""
        lines = self.log.read_text(errors="replace").splitlines()
        found = [i for i, line in enumerate(lines) if "Traceback" in line or "Error:" in line]
        return ["\n".join(lines[max(0, i - 2) : i + 12]) for i in found[:3]]


def tiny_model(folder: Path) -> Path:
    """A Llama with random weights and 512 tokens of context, and the tests' tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    write_tokenizer(folder)
    (folder / "config.json").unlink()
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=384, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1,
        bos_token_id=None, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


# --- the campaign ------------------------------------------------------------------------------------


async def campaign(
    server: HostileServer, options: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what is wrong with them."""
    control = Control(server.port)
    await control.learn()
    stop = asyncio.Event()
    asking = asyncio.create_task(control.keep_asking(stop))
    attacker = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--attack", "--port", str(server.port), "--seed", str(options.seed),
        "--sockets", str(options.sockets), "--frames", str(options.frames),
        stdout=asyncio.subprocess.PIPE, limit=1 << 26,
    )  # fmt: skip
    assert attacker.stdout is not None
    wrong: list[str] = []
    memory: dict[int, float] = {}
    parts: dict[int, list[tuple[str, float]]] = {}
    counts: dict[str, int] = {}
    last: dict[str, list[Any]] = {}
    begin = shown = time.perf_counter()
    sent = 0
    try:
        async for line in attacker.stdout:
            report = json.loads(line)
            last = report.get("last", last)
            if "error" in report:
                wrong.append(f"the attack ended early: {report['error']}")
            if "sent" in report:
                sent, counts = report["sent"], report["counts"]
                for share in (10, 25, 50, 75, 100):
                    if share not in memory and sent >= options.frames * share / 100:
                        memory[share] = server.memory()
                        parts[share] = server.parts()
                if time.perf_counter() - shown > 10:
                    shown = time.perf_counter()
                    print(
                        f"{shown - begin:6.0f} s  {sent:7} frames  {server.memory():7.1f} MiB  "
                        f"slowest {max([*control.waits, *control.gaps], default=0):.3f} s  "
                        f"wrong {len(control.wrong)}",
                        flush=True,
                    )
            if (asking.done() or not server.lives) and attacker.returncode is None:
                with suppress(ProcessLookupError):
                    attacker.terminate()
        await attacker.wait()
        seconds = time.perf_counter() - begin
        stop.set()
        await asking
        wrong += control.wrong
        control.wrong = []
        if server.lives:  # all attackers are gone: it answers as before
            for number in range(QUESTIONS):
                if await control.ask(number) != control.known[number]:
                    wrong.append(f"question {number} has another answer at the end")
            await control.renew()
    except (OSError, TimeoutError) as error:
        wrong.append(f"at the end: {error!r}")
    finally:
        if attacker.returncode is None:
            attacker.kill()
            await attacker.wait()
    if not server.lives:
        wrong.append(f"the server ended with code {server.process.returncode}")
    slowest = max([*control.waits, *control.gaps, *control.opens], default=0.0)
    if slowest > options.patience:
        wrong.append(f"the control client waited {slowest:.2f} s")
    if 50 in memory and 100 in memory and memory[100] > memory[50] * (1 + GROWTH):
        wrong.append(f"memory grew from {memory[50]:.1f} to {memory[100]:.1f} MiB")
    figures: dict[str, Any] = {
        "seed": options.seed,
        "gateways": options.gateways,
        "frames": sent,
        "seconds": round(seconds, 1),
        "control answers": len(control.waits),
        "memory_mib": {f"{share}%": round(mib, 1) for share, mib in memory.items()},
        "counts": counts,
    }
    for share in (50, 100):
        found = ", ".join(f"{name} {mib:.0f}" for name, mib in parts.get(share, []))
        figures[f"processes_mib {share}%"] = found
    for name, values in (("open", control.opens), ("ttft", control.waits), ("gap", control.gaps)):
        figures[f"{name}_ms"] = {
            f"p{p:g}": round(percentile(values, p) * 1e3, 1) for p in (50, 99, 100) if values
        }
    if wrong and last:
        figures["last_frames"] = last
    return figures, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gateways", type=int, default=0, help="processes")
    parser.add_argument("--sockets", type=int, default=12, help="of the attackers, at once")
    parser.add_argument("--patience", type=float, default=1.0, help="seconds for the control client")
    parser.add_argument("--model", type=Path, help="a model folder (default: a tiny random Llama)")
    parser.add_argument("--keep-log", type=Path, help="copy the server's log to this file")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--attack", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="after `--`: flags of `ramify serve`")
    options = parser.parse_args()
    if options.attack:
        sys.exit(asyncio.run(attack(options)))
    about = machine()
    print(headline(about), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or tiny_model(folder / "tiny")
        server = HostileServer(model, folder / "log", options)
        try:
            figures, wrong = asyncio.run(campaign(server, options))
        finally:
            code = server.stop()
            if options.keep_log is not None:
                shutil.copy(server.log, options.keep_log)
        if code != 0:
            wrong.append(f"after SIGTERM the exit code was {code}")
        wrong += [f"in the log:\n{fault}" for fault in server.faults()]
    last = figures.pop("last_frames", {})
    rows = [[key, json.dumps(value)] for key, value in figures.items() if key != "counts"]
    rows += [[key, f"{count:,}"] for key, count in sorted(figures["counts"].items())]
    print(table(["", ""], rows))
    for line in wrong[:20]:
        print("WRONG:", line)
    for index, frames in last.items():
        print(f"--- socket {index}, seed {options.seed}: its last frames")
        for number, kind, data in frames:
            print(f"{number:7} {kind:6} {data!r}")
    write_json(options.json, about, {"figures": figures, "wrong": wrong, "last": last})
    sys.stdout.flush()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
