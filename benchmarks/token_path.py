"""Which way a token takes through the server: calls, moves between files, files.

    python benchmarks/token_path.py [--tokens 200] [--list [request]] [--json FILE]
    python benchmarks/token_path.py --layouts

A real engine with the fake executor runs in this process; one socket generates on one branch. Every
call of a Python function of ours on the event loop's thread is noted, so the figures are counts, not
clocks, and the same on every machine.

    a decoded token    from the executor's result to the frame on the socket, in steady state. The
                       next plan is sent on the way. The median over the tokens: every 16th token or
                       so costs more, because pages are asked for
    the first delta    from the frame with `append` and `generate` to the frame with the first delta
    a request          of two tokens that come one by one, from the frame with `generate` to the frame
                       with `done`. The calls that several have in common, as timers come between
    an OpenAI chat     from the HTTP request for a streamed chat completion to the first chunk of text

    calls    Python functions that are entered (a coroutine that goes on is entered again)
    moves    how often the next call is in another file than the one before
    files    how many files the calls are in

`--layouts` tells the way of a decoded token where it passes several processes: in each of them, from the
message that brings it to the end of what follows at once. `all` are all calls of the process, those for
credits and reports too, over the tokens.

`--list` prints the way of a median token, call by call, `--list request` that of a request. It does not
know what the calls are for.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import tempfile
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import CodeType

from call_tracer import (
    BEGIN,
    Figures,
    Tracer,
    Way,
    end_notes,
    figures,
    traced,
    traced_children,
    way,
)
from fake_server import write_model_folder
from load import ChunkRecorder

from ramify.actors.engine import running_engine
from ramify.actors.executor.spec import FakeSpec
from ramify.actors.executor.thread_executor import ThreadExecutor
from ramify.actors.gateway.port.tcp import TcpConnection
from ramify.actors.kit.log import configure
from ramify.protocol.config import EngineConfig, LogConfig, ModelConfig, ServerConfig
from ramify.protocol.replicas_config import ReplicasConfig

REQUESTS, TRIES = 5, 60  # whose calls in common are told; and to have so many
CHATS = 9  # and first deltas: what they have in common
STEP_SECONDS = 0.008  # long enough for a token to reach its socket before the next one comes

LAYOUTS = {"default": (0, 0), "--gateways 2": (2, 0), "--replicas 2": (0, 2), "both": (2, 2)}
ARRIVALS = ("ThreadExecutor._collect", "Link.data_received")  # what begins the way of a token
HANDLED = ("Planner.landed", "WebSocketConnection.flush")  # what no other way comes to
RESULT = ThreadExecutor._collect.__code__
FRAME = TcpConnection.data_received.__code__
DELTA = re.compile(rb'"type":"delta"')
CHUNK = re.compile(rb'"content":"[^"]')


def tokens(events: list[CodeType | bytes]) -> list[Way]:
    """One way for each result that reached a socket, up to the write."""
    starts = [i for i, event in enumerate(events) if event is RESULT]
    ways = []
    for start, following in pairwise(starts):
        for end in range(start, following):
            event = events[end]
            if isinstance(event, bytes) and b'"type":"delta"' in event:
                ways.append(way(events[start:end]))
                break
    return ways


def until(text: re.Pattern[bytes], events: list[CodeType | bytes]) -> Way:
    """From the first read to the first bytes with `text`."""
    start = next(i for i, event in enumerate(events) if event is FRAME)
    end = next(i for i, e in enumerate(events) if isinstance(e, bytes) and text.search(e))
    return way(events[start:end])


def requests(events: list[CodeType | bytes]) -> list[Way]:
    """One way for each frame that was followed by two results, each handled by itself, and a `done`."""
    ways = []
    start: int | None = None
    for i, event in enumerate(events):
        if event is FRAME:
            start = i
        elif start is not None and isinstance(event, bytes) and b'"type":"done"' in event:
            if sum(each is RESULT for each in events[start:i]) == 2:
                ways.append(way(events[start:i]))
            start = None
    return ways


def median(ways: list[Way]) -> Way:
    """The way with the median number of calls."""
    return sorted(ways, key=lambda way: len(way.calls))[(len(ways) - 1) // 2]


def in_common(ways: list[Way]) -> Way:
    """The calls that all ways have, each as often as all have it, in the order of the shortest."""
    shortest = min(ways, key=lambda way: len(way.calls)).calls
    left = Counter(shortest)
    for each in ways:
        left &= Counter(each.calls)
    return Way([call for call in shortest if left[call] and not left.subtract([call])])


async def chat(port: int) -> Way:
    """The way of an OpenAI chat."""
    body = {"model": "fake", "max_tokens": 8, "stream": True}
    body["messages"] = [{"role": "user", "content": "abcd"}]
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    tracer = Tracer()
    with tracer.tracing():
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        answer = await reader.read()
    writer.close()
    if b"[DONE]" not in answer:
        raise RuntimeError(f"no answer: {answer[:300]!r}")
    return until(CHUNK, tracer.events)


async def measure(folder: Path, count: int) -> tuple[Way, Way, Way, Way]:
    """The ways of a median token among `count`, a first delta, a request, and an OpenAI chat."""
    vocab, first = write_model_folder(folder)
    config = EngineConfig(
        model=ModelConfig(path=folder), server=ServerConfig(port=0, grace_s=1.0), executor="thread"
    )
    spec = FakeSpec(
        {"verify": False, "step_seconds": STEP_SECONDS}, {"vocab_size": vocab, "first": first, "eos": 2}
    )
    async with running_engine(config, spec=spec) as engine:
        socket = await ChunkRecorder.connect(engine.port)
        opened = asyncio.ensure_future(socket.until(b'"type":"ok"'))
        await asyncio.sleep(0)
        socket.send({"type": "open", "client": "way"}, {"type": "append", "id": 1, "text": "abcd" * 4})
        await opened
        await asyncio.sleep(20 * STEP_SECONDS)  # it is computed ahead
        tracer = Tracer()
        done = asyncio.ensure_future(socket.until_done(1))
        await asyncio.sleep(0)
        with tracer.tracing():
            socket.send(
                {"type": "append", "id": 2, "text": "dcba"},
                {"type": "generate", "id": 3, "max_tokens": count, "ignore_eos": True},
            )
            await done
        short, idents = Tracer(), itertools.count(4)
        for ident in itertools.islice(idents, TRIES):
            done = asyncio.ensure_future(socket.until_done(1))
            await asyncio.sleep(4 * STEP_SECONDS)  # nothing of the one before is under way
            with short.tracing():
                socket.send({"type": "generate", "id": ident, "max_tokens": 2, "ignore_eos": True})
                await done
            if len(requests(short.events)) == REQUESTS:
                break
        deltas = [until(DELTA, tracer.events)]
        for ident in itertools.islice(idents, 0, 2 * (CHATS - 1), 2):
            begun = Tracer()
            done = asyncio.ensure_future(socket.until_done(1))
            await asyncio.sleep(4 * STEP_SECONDS)
            with begun.tracing():
                socket.send(
                    {"type": "append", "id": ident, "text": "dcba"},
                    {"type": "generate", "id": ident + 1, "max_tokens": 2, "ignore_eos": True},
                )
                await done
            deltas.append(until(DELTA, begun.events))
        await socket.end_session()
        chats = [await chat(engine.port) for _ in range(CHATS)]
    found = tokens(tracer.events)
    if len(found) < count // 2:
        raise RuntimeError(f"{len(found)} of {count} tokens had a frame of their own: a busy machine")
    if not (shorts := requests(short.events)):
        raise RuntimeError(f"no request of {TRIES} had its tokens one by one: a busy machine")
    return median(found[8:]), in_common(deltas), in_common(shorts), in_common(chats)


async def measure_layout(folder: Path, count: int, gateways: int, replicas: int) -> dict[str, list[Way]]:
    """By process: the ways of its tokens, the last one all that it did. One stream of `count` tokens."""
    vocab, first = write_model_folder(folder)
    config = EngineConfig(
        model=ModelConfig(path=folder),
        server=ServerConfig(port=0, grace_s=1.0),
        executor="thread",
        gateways=gateways,
        replicas=ReplicasConfig(count=replicas) if replicas else None,
    )
    spec = FakeSpec(
        {"verify": False, "step_seconds": 4 * STEP_SECONDS},
        {"vocab_size": vocab, "first": first, "eos": 2},
    )
    here = Tracer()
    with traced_children(folder):
        async with running_engine(config, spec=spec) as engine:
            children = traced(folder)
            socket = await ChunkRecorder.connect(engine.port)
            opened = asyncio.ensure_future(socket.until(b'"type":"delta"', 8))
            await asyncio.sleep(0)
            append = {"type": "append", "id": 1, "text": "a" * 16}
            generate = {"type": "generate", "id": 2, "max_tokens": count + 100, "ignore_eos": True}
            socket.send({"type": "open", "client": "way"}, append, generate)
            await opened
            some = asyncio.ensure_future(socket.until(b'"type":"delta"', count))
            await asyncio.sleep(0)
            for child in children:
                os.kill(child, BEGIN)
            with here.tracing():
                await some
            every = await asyncio.to_thread(end_notes, folder, children) | {"engine": way(here.events)}
            await socket.end_session()
    return {name: [*_brought(taken), taken] for name, taken in every.items() if _brought(taken)}


def _brought(taken: Way) -> list[Way]:
    """The ways of the tokens of one process: of its results of steps, or of messages with tokens."""
    starts = [i for i, call in enumerate(taken.calls) if call.name in ARRIVALS] + [len(taken.calls)]
    found = [Way(taken.calls[a:b]) for a, b in pairwise(starts)]
    return [each for each in found if any(call.name in HANDLED for call in each.calls)]


def print_layouts(count: int) -> None:
    for name, (gateways, replicas) in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            ways = asyncio.run(measure_layout(Path(folder), count, gateways, replicas))
        parts = {process: median(found[:-1]) for process, found in ways.items()}
        total = Figures(
            sum(len(part.calls) for part in parts.values()),
            sum(part.moves for part in parts.values()) + len(parts) - 1,
            len({file for part in parts.values() for file in part.files}),
        )
        print(f"{name}: {total.calls} calls, {total.moves} moves, {total.files} files")
        for process, part in parts.items():
            of, all_calls = figures(part), len(ways[process][-1].calls) / count
            kind = "core" if any(call.name == "Planner.landed" for call in part.calls) else "front"
            kind = "both" if kind == "core" and "actors/gateway/actor.py" in part.files else kind
            print(f"    {kind}: {of.calls}, {of.moves}, {of.files}; all {all_calls:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument(
        "--list", nargs="?", const="token", choices=["token", "request"], help="print the calls of one"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layouts", action="store_true", help="a token's way in each layout")
    options = parser.parse_args()
    configure(LogConfig(level="warning"))
    if options.layouts:
        print_layouts(options.tokens)
        return
    with tempfile.TemporaryDirectory() as folder:
        token, delta, request, chatted = asyncio.run(measure(Path(folder), options.tokens))
    if options.list:
        for call in (token if options.list == "token" else request).calls:
            print(f"{call.file:42} {call.name}")
    ways = {"a decoded token": token, "the first delta": delta, "a request": request}
    for name, taken in (ways | {"an OpenAI chat": chatted}).items():
        found = figures(taken)
        print(f"{name}: {found.calls} calls, {found.moves} moves, {found.files} files")
    if options.json is not None:
        result = {
            "token": asdict(figures(token)) | {"way": [asdict(call) for call in token.calls]},
            "first_delta": asdict(figures(delta)) | {"in": delta.files},
            "chat": asdict(figures(chatted)) | {"in": chatted.files},
            "request": asdict(figures(request)) | {"way": [asdict(call) for call in request.calls]},
        }
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
