"""What of the server's CPU can clients without a token take? HTTP and WebSockets in every bad shape.

    python benchmarks/hostile_strangers.py [--seconds 6] [--sockets 1 32] [--only NAME] [--gateways 0]
                                           [--open] [--json FILE]

A real engine with the fake executor runs in a process of its own and accepts one token (`--open`: none).
For each shape, processes of their own send it as fast as the server reads, on one socket and on many; a
socket that was answered or cut is opened again at once. All floods come from one address, 127.0.0.2.
Meanwhile a control client with the token asks a greedy question whose answer is known, again and again.

    cpu          CPU time of the server over wall time, less that without a flood and as many questions
    control max  the slowest answer of the control client, in ms of wall time
    asked        questions that it asked
    opened       connections that the flood made
    sent         bytes of the flood that the kernel took

The exit code is 1 if the control client got a wrong answer or one after more than a second, or if one
socket cost more than a tenth of a core, or than 60 us for each connection. It does not know how the
server defends itself: to compare, run it with another checkout first on PYTHONPATH.
"""

import argparse
import contextlib
import http.client
import json
import multiprocessing
import selectors
import socket
import struct
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from fake_server import FakeServer
from hostile_doors import HANDSHAKE, model_of
from report import headline, machine, table, write_json

TOKEN = "campaign"
MOST_PART = 0.1  # of a core, for one socket
REFUSED_S = 60e-6  # ... or so much for each of its connections: the kernel's part is most of it
MOST_WAIT_S = 1.0  # of the control client for an answer
PAUSE_S = 0.02  # between two questions
CHAT = "/v1/chat/completions"
CHUNKED = "Transfer-Encoding: chunked\r\n"


def frame(opcode: int, payload: bytes = b"", fin: bool = True) -> bytes:
    """A client's frame; the mask is zero, so the payload stays as it is."""
    first, size = (0x80 if fin else 0) | opcode, len(payload)
    if size < 126:
        head = struct.pack("!BB", first, 0x80 | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", first, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", first, 0x80 | 127, size)
    return head + b"\0\0\0\0" + payload


class FloodShape(NamedTuple):
    """What a socket of a flood sends: `once`, then `again` without end. `step`: bytes a send, 0: all.

    `shut`: it closes its half after `once`. `leaves`: it closes when all is sent once.
    """

    once: bytes
    again: bytes = b""
    step: int = 0
    shut: bool = False
    leaves: bool = False


def _post(port: int, more: str) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer wrong\r\n{more}\r\n"
    return head.encode()


def _get(port: int, path: str, more: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{more}\r\n".encode()


def _upgrade(port: int, more: str = "") -> bytes:
    head = HANDSHAKE.format(path="/v1/ws", port=port)
    return (head.removesuffix("\r\n") + more + "\r\n").encode()


def shapes(port: int) -> dict[str, FloodShape]:
    """All floods, by name."""
    upgrade = _upgrade(port)
    items = "Sec-WebSocket-Extensions: x" + ";a" * 3900 + "\r\n"
    return {
        "nothing": FloodShape(b""),
        "chunks of a byte": FloodShape(_post(port, CHUNKED), b"1\r\nx\r\n" * 40_000),
        "chunk extensions": FloodShape(_post(port, CHUNKED), (b"1;" + b"e" * 1000 + b"\r\nx\r\n") * 200),
        "trailers": FloodShape(_post(port, CHUNKED) + b"0\r\n" + b"a:\r\n" * 3900 + b"\r\n"),
        "many headers": FloodShape(_get(port, "/", "a:\r\n" * 3900)),
        "folded headers": FloodShape(_get(port, "/", "a:\r\n" + " b\r\n" * 3900)),
        "a head byte by byte": FloodShape(_get(port, "/", "a: " + "x" * 15_000 + "\r\n"), step=1),
        "a body byte by byte": FloodShape(
            _post(port, "Content-Length: 60000\r\n"), b"x" * 60_000, step=1
        ),
        "a body without end": FloodShape(_post(port, "Content-Length: 999999999\r\n"), b"x" * (1 << 20)),
        "pipelined requests": FloodShape(b"", _get(port, "/healthz") * 1000),
        "idle connections": FloodShape(_get(port, "/healthz")),
        "requests": FloodShape(_get(port, "/healthz", "Connection: close\r\n")),
        "the page": FloodShape(_get(port, "/", "Connection: close\r\n")),
        "wrong tokens": FloodShape(_post(port, "Content-Length: 2\r\n") + b"{}"),
        "connections": FloodShape(b"", leaves=True),
        "half-closes": FloodShape(_get(port, "/healthz")[:-2], shut=True),
        "handshakes": FloodShape(upgrade, leaves=True),
        "handshakes with many items": FloodShape(_upgrade(port, items)),
        "pings": FloodShape(upgrade, frame(9, b"?") * 20_000),
        "fragments of a byte": FloodShape(
            upgrade + frame(1, b"[", fin=False), frame(0, b" ", fin=False) * 20_000
        ),
        "bytes of a frame": FloodShape(upgrade, frame(1, b" " * 8000), step=1),
        "messages without a token": FloodShape(upgrade, frame(1, b'{"type":"ping"}') * 5000),
    }


class Flood:
    """One socket of a flood."""

    def __init__(self, port: int, shape: FloodShape) -> None:
        self._shape = shape
        self.sock = socket.create_connection(("127.0.0.1", port), 10, ("127.0.0.2", 0))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self._rest = memoryview(shape.once or shape.again)
        self._shut = False
        self.sent = 0

    def push(self) -> bool:
        """Send what goes, and read what came. False: it is over."""
        with contextlib.suppress(BlockingIOError):
            while True:
                if not self.sock.recv(1 << 16):
                    return False
        with contextlib.suppress(BlockingIOError):
            if self._rest:
                count = self.sock.send(
                    self._rest[: self._shape.step] if self._shape.step else self._rest
                )
                self.sent += count
                self._rest = self._rest[count:]
        if self._rest:
            return True
        if self._shape.leaves:
            return False
        if self._shape.shut and not self._shut:
            self._shut = True
            self.sock.shutdown(socket.SHUT_WR)
        if self._shape.again and not self._shut:
            self._rest = memoryview(self._shape.again)
        return True


def flood(port: int, name: str, sockets: int, seconds: float, report: Connection) -> None:
    """In a process of its own: keep so many sockets busy until the time is over."""
    shape = shapes(port)[name]
    opened = sent = 0
    until = time.monotonic() + seconds
    live: dict[socket.socket, Flood] = {}
    with selectors.DefaultSelector() as selector:
        while time.monotonic() < until:
            while len(live) < sockets and time.monotonic() < until:
                try:
                    one = Flood(port, shape)
                except OSError:
                    time.sleep(0.01)
                    break
                opened += 1
                live[one.sock] = one
                selector.register(one.sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
            for key, _ in selector.select(0.01):
                one = live[key.fileobj]  # type: ignore[index]
                try:
                    goes_on = one.push()
                except OSError:
                    goes_on = False
                if not goes_on:
                    sent += one.sent
                    selector.unregister(one.sock)
                    del live[one.sock]
                    one.sock.close()
    report.send((opened, sent + sum(one.sent for one in live.values())))
    for sock in live:
        sock.close()


def control(port: int, seconds: float, known: str | None) -> tuple[list[float], list[str]]:
    """Questions, one after the other: how long each answer took, and what was said."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    times: list[float] = []
    said: list[str] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until or not said:
        begin = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            asked = {"messages": [{"role": "user", "content": "Control"}], "model": "", "max_tokens": 8}
            asked |= {"temperature": 0, "model": MODEL[port]}
            connection.request("POST", CHAT, json.dumps(asked), headers)
            answer = json.loads(connection.getresponse().read())
            said.append(answer["choices"][0]["message"]["content"])
        except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
            said.append(f"no answer: {error!r}")
        finally:
            connection.close()
        times.append(time.monotonic() - begin)
        time.sleep(PAUSE_S)
    return times, [one for one in said if known is not None and one != known] or said[:1]


MODEL: dict[int, str] = {}  # by the server's port


def measure(server: FakeServer, name: str, sockets: int, seconds: float, known: str) -> dict[str, Any]:
    """One flood."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    sender = spawn.Process(target=flood, args=(server.port, name, sockets, seconds + 1, theirs))
    if sockets:
        sender.start()
        time.sleep(1.0)  # it imports
    before, begin = server.snapshot(), time.monotonic()
    times, said = control(server.port, seconds, known)
    after, wall = server.snapshot(), time.monotonic() - begin
    opened, sent = ours.recv() if sockets and ours.poll(30) else (0, 0)
    if sockets:
        sender.join()
    cpu = after["cpu"] - before["cpu"] + sum(after["gateways"]) - sum(before["gateways"])
    wrong = [one for one in said if one != known]
    return {
        "flood": name,
        "sockets": sockets,
        "cpu": cpu / wall,
        "per_s": len(times) / wall,
        "max_s": max(times),
        "opened": opened,
        "sent": sent,
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--sockets", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--only", action="append")
    parser.add_argument("--gateways", type=int, default=0)
    parser.add_argument("--open", action="store_true", help="the server asks for no token")
    parser.add_argument("--json", help="write what was found to this file")
    options = parser.parse_args()
    about = machine()
    print(headline(about), flush=True)
    faults: list[str] = []
    results: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    settings: dict[str, Any] = {"token": TOKEN} if not options.open else {}
    with FakeServer(step_ms=0, ttl=1, gateways=options.gateways, **settings) as server:
        MODEL[server.port] = model_of(server.port, Authorization=f"Bearer {TOKEN}")
        known = control(server.port, 0.5, None)[1][0]
        quiet = measure(server, "nothing", 0, options.seconds, known)
        question = quiet["cpu"] / quiet["per_s"]
        for name in options.only or list(shapes(0))[1:]:
            for sockets in options.sockets:
                found = measure(server, name, sockets, options.seconds, known)
                found["cpu"] -= question * found["per_s"]
                results.append(found)
                most = max(MOST_PART, REFUSED_S * found["opened"] / (options.seconds + 1))
                if sockets == 1 and found["cpu"] > most and not options.open:
                    faults.append(f"{name}: one socket took {found['cpu']:.2f} of a core")
                if found["max_s"] > MOST_WAIT_S or found["wrong"]:
                    faults.append(
                        f"{name}, {sockets} sockets: {found['max_s']:.2f} s {found['wrong'][:1]}"
                    )
                row = [name, str(sockets), f"{found['cpu']:.1%}", f"{1e3 * found['max_s']:.0f}"]
                row += [f"{found['per_s']:.1f}", str(found["opened"])]
                rows.append([*row, f"{found['sent'] / (1 << 20):.2f}"])
                print("  ".join(rows[-1]), flush=True)
    print(f"a question costs {1e3 * question:.2f} ms of the server's CPU")
    columns = ["flood", "sockets", "cpu", "control max ms", "asked/s", "opened", "sent MiB"]
    print(table(columns, rows))
    for fault in faults:
        print(f"FAULT: {fault}")
    write_json(options.json, about, results)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
