"""Floods: what do others wait for their first token while one client sends all that it can?

For each flood it starts `ramify serve` (flags after `--`), then opens `--sockets` sockets in a process
of its own that send without end, and meanwhile another client generates short answers, one after the
other, and notes its time to first token. A flooding socket that the server closes is opened again after
`--again` seconds, as a client that is out of order would.

| column | meaning |
|---|---|
| ttft p50, max | of the other client, in ms |
| turns | answers that it got in the time |
| opened | sockets of the flood; more than `--sockets`: the server closed some |
| codes | with which close codes |
| sent | bytes of the flood that the kernel took |

It does not know how the server defends itself: to compare, run it with another checkout first on
PYTHONPATH.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from load import upgrade_request
from report import headline, machine, percentile, write_json
from websockets.asyncio.client import connect

from ramify.clients.bench.server import served

MIB = 1 << 20
GIVE_UP_S = 60.0  # a turn that takes longer counts as this, and ends the measurement


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


def message(value: Any) -> bytes:
    return frame(1, json.dumps(value).encode())


def append(ident: int, size: int) -> bytes:
    words = "the quick brown fox jumps over the lazy dog "
    text = (words * (size // len(words) + 1))[: size - 100]
    return message({"type": "append", "id": ident, "text": text})


FLOODS: dict[str, tuple[bytes, bytes]] = {  # what comes once, what is repeated
    "nothing": (b"", b""),
    "empty fragments": (frame(1, b"", fin=False), frame(0, b"", fin=False) * 40_000),
    "fragments of a byte": (frame(1, b'"', fin=False), frame(0, b"x", fin=False) * 40_000),
    "unsolicited pongs": (b"", frame(10) * 40_000),
    "pings": (b"", frame(9, b"?") * 40_000),
    "small messages": (b"", message({"type": "ping"}) * 10_000),
    "appends of 1 MB": (b"", append(1, MIB - 200)),
    "messages that do not fit": (b"", message([{"type": "tree", "id": 1}] * 30_000)),
}


def flood(port: int, name: str, sockets: int, seconds: float, again: float, report: Connection) -> None:
    """In a process of its own: fill all sockets until the time is over."""
    once, repeated = FLOODS[name]
    codes: Counter[str] = Counter()
    opened = sent = 0
    until = time.monotonic() + seconds
    live: dict[socket.socket, memoryview] = {}
    due = [0.0] * sockets
    while time.monotonic() < until:
        while due and due[0] <= time.monotonic():
            due.pop(0)
            sock = _attach(port)
            opened += 1
            sock.sendall(once)
            sock.setblocking(False)
            live[sock] = memoryview(repeated)
        for sock, rest in list(live.items()):
            try:
                code = _read(sock)
                count = sock.send(rest) if code is None else 0
            except BlockingIOError:
                continue
            except OSError as error:
                code = type(error).__name__
            if code is not None:
                codes[code] += 1
                sock.close()
                del live[sock]
                due.append(time.monotonic() + again)
                continue
            sent += count
            live[sock] = rest[count:] or memoryview(repeated)
        time.sleep(0.001)
    report.send((opened, sent, dict(codes)))
    for sock in live:
        sock.close()


def _attach(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=30)
    sock.sendall(upgrade_request(port) + message({"type": "open", "client": "flood"}))
    seen = b""
    while b'"type":"state"' not in seen:
        more = sock.recv(1 << 16)
        if not more:
            raise ConnectionError(seen[:200])
        seen += more
    return sock


def _read(sock: socket.socket) -> str | None:
    """Take what the server says, so that it is no slow reader; the close code if it closes."""
    try:
        data = sock.recv(1 << 16)
    except BlockingIOError:
        return None
    if not data:
        return "end"
    at = data.rfind(b"\x88")  # a close frame is the last that comes
    if at >= 0 and len(data) - at >= 4 and data[at + 1] == len(data) - at - 2:
        return str(struct.unpack("!H", data[at + 2 : at + 4])[0])
    return None


async def control(url: str, seconds: float, begin: Callable[[], None]) -> list[float]:
    """Seconds to the first token of each short answer, from a second after `begin` on."""
    times: list[float] = []
    async with connect(url, max_size=None, ping_interval=None) as ws:
        await ws.send(json.dumps({"type": "open", "client": "control"}))
        await ws.recv()
        begin()
        await asyncio.sleep(1.0)
        end = time.monotonic() + seconds
        ident = 0
        while time.monotonic() < end:
            ident += 3
            start = time.monotonic()
            await ws.send(
                json.dumps(
                    [
                        {"type": "append", "id": ident, "text": f"Question {ident}: "},
                        {"type": "generate", "id": ident + 1, "max_tokens": 4, "ignore_eos": True},
                        {"type": "rollback", "id": ident + 2, "to": 0},
                    ]
                )
            )
            first = None
            done = False
            while not done:
                try:
                    found = json.loads(await asyncio.wait_for(ws.recv(), GIVE_UP_S))
                except TimeoutError:
                    return [*times, GIVE_UP_S]
                for one in found if isinstance(found, list) else [found]:
                    if first is None and one["type"] == "delta":
                        first = time.monotonic() - start
                    assert one["type"] != "error", one
                    done = done or (one["type"] == "ok" and one["id"] == ident + 2)
            times.append(first if first is not None else time.monotonic() - start)
            await asyncio.sleep(0.02)
    return times


def measure(url: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One flood."""
    port = urlsplit(url).port
    assert port is not None
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    sender = spawn.Process(
        target=flood,
        args=(
            port,
            name,
            args.sockets if name != "nothing" else 0,
            args.seconds + 1,
            args.again,
            theirs,
        ),
    )
    try:
        times = asyncio.run(control(url, args.seconds, sender.start))
        opened, sent, codes = ours.recv() if ours.poll(30) else (0, 0, {})
    finally:
        if sender.pid is not None:
            sender.kill()
            sender.join()
    return {"flood": name, "ttft": times, "opened": opened, "sent": sent, "codes": codes}


COLUMNS = f"{'flood':26}{'ttft p50':>10}{'max ms':>10}{'turns':>7}{'opened':>8}{'sent MiB':>10}  codes"


def row(result: dict[str, Any]) -> str:
    """One flood's line."""
    codes = " ".join(f"{code}:{count}" for code, count in sorted(result["codes"].items())) or "-"
    return (
        f"{result['flood']:26}{1e3 * percentile(result['ttft'], 50):10.0f}"
        f"{1e3 * max(result['ttft']):10.0f}{len(result['ttft']):7}{result['opened']:8}"
        f"{result['sent'] / MIB:10.1f}  {codes}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sockets", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--again", type=float, default=0.5)
    parser.add_argument("--only", action="append", choices=list(FLOODS))
    parser.add_argument("--json")
    parser.add_argument("flags", nargs="*", help="of `ramify serve`, after --")
    args = parser.parse_args()
    about = machine()
    print(headline(about))
    results: list[dict[str, Any]] = []
    print(COLUMNS)
    for name in args.only or FLOODS:
        with served(args.flags, None) as server:  # a fresh one: the last may not be done with its flood
            results.append(measure(server.url, name, args))
        print(row(results[-1]), flush=True)
    write_json(args.json, about, results)


if __name__ == "__main__":
    main()
