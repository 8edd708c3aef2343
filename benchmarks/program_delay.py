"""`programs.py delay`: what a slow link costs a program."""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from program_base import MODEL, ROOMY, counted, works
from program_runs import Roots, Words, drop, on_branches, on_prompts
from report import table, write_json

from ramify.clients import connect


@asynccontextmanager
async def slow_link(url: str, one_way_s: float) -> AsyncIterator[str]:
    """A WebSocket address whose bytes take `one_way_s` longer in each direction."""
    address = urlsplit(url)
    carriers: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def read() -> None:
            while data := await reader.read(1 << 16):
                waiting.put_nowait((clock() + one_way_s, data))
            waiting.put_nowait((clock(), b""))

        reading = asyncio.create_task(read())
        try:
            while True:
                due, data = await waiting.get()
                await asyncio.sleep(max(0.0, due - clock()))
                if not data:
                    break
                writer.write(data)
        finally:
            reading.cancel()
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, out = await asyncio.open_connection(address.hostname, address.port)
        for each in (carry(reader, out), carry(back, writer)):
            carriers.add(asyncio.create_task(each))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        try:
            yield f"ws://127.0.0.1:{port}{address.path}"
        finally:
            for carrier in carriers:
                carrier.cancel()
            await asyncio.gather(*carriers, return_exceptions=True)


async def over_link(name: str, options: argparse.Namespace, ms: float, words: Words) -> list[float]:
    """Seconds of one program as branches and as whole prompts, both warm: of the fastest run."""
    takes: list[list[float]] = [[], []]
    async with (
        counted(ROOMY) as engine,
        slow_link(engine.url, ms / 2e3) as url,
        connect(url, tokens=True) as session,
    ):
        for number in range(options.repeat + 1):
            (work,) = works(options, 4000, number)[name]
            begin = time.perf_counter()
            ran = await on_branches(session, work)
            takes[0].append(time.perf_counter() - begin)
            await drop(session, ran)
            begin = time.perf_counter()
            await on_prompts(Roots(session), work, words)
            takes[1].append(time.perf_counter() - begin)
    return [min(each[1:]) for each in takes]


def delay(options: argparse.Namespace) -> int:
    words, rows, results = Words(MODEL), [], []
    options.programs = 1
    for name in options.only:
        near = asyncio.run(over_link(name, options, 0.0, words))
        far = asyncio.run(over_link(name, options, options.ms, words))
        trips = [(b - a) * 1e3 / options.ms for a, b in zip(near, far, strict=True)]
        results.append({"program": name, "near_s": near, "far_s": far, "trips": trips})
        rows.append([name, *(f"{b:.3f} ({a:.3f})" for a, b in zip(near, far, strict=True))])
        rows[-1] += [f"{count:.1f}" for count in trips]
        print(f"{name}: {trips[0]:.1f} and {trips[1]:.1f} round trips", flush=True)
    heads = ["program", "branches s (near)", "prompts s (near)", "trips", "trips"]
    print(table(heads, rows))
    write_json(options.json, options.about, results)
    return 0
