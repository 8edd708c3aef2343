"""How much longer do 32 text streams wait between tokens while 20 pictures a second arrive?

    python benchmarks/picture_gaps.py [--rounds 5] [--seconds 4] [--step-ms 12] [--look-ms 16]
                                      [--prompt-us 0]
    python benchmarks/picture_gaps.py --port PORT       # a server that runs, instead of the fake one

A real engine with the fake executor in a process of its own: a step takes `--step-ms` and `--prompt-us`
for each prompt token; beside the steps a tower takes `--look-ms` for each picture. Phases take turns:
the streams alone, with 20 texts a second, with 20 pictures a second. Each text and picture is new, of
about 256 tokens, from a client of its own who asks for one token and leaves. A picture is a JPEG of
512 x 512 pixels, as base64 in JSON.

    p50, ...  of the gaps between two frames of a stream, ms at the client, which shares the cores
    over      a phase's p99 over that of the streams alone in the same round
    first     what those clients waited for their token, ms
    longest   callback of the server's event loop, ms of its CPU time
    cpu       ms of the event loop for each arrival, beyond what the streams alone take

Of each: the median of the rounds (least-most).
"""

import argparse
import asyncio
import base64
import io
import itertools
import json
import random
import string
from contextlib import nullcontext
from typing import Any

import numpy as np
from fake_server import FakeServer
from load import ChunkRecorder
from PIL import Image
from report import headline, machine, percentile, spread, table

from ramify.protocol.pictures import MARK

STREAMS, PER_SECOND, TOKENS, PHASES = 32, 20, 256, ("alone", "texts", "pictures")
_dice, _noise = random.Random(0), np.random.default_rng(0)


def picture() -> str:
    """One that was never sent: smooth, with some noise, as photographs are."""
    ramps = np.linspace(_noise.uniform(0, 99, 6), _noise.uniform(99, 230, 6), 512)
    values = ramps[:, None, :3] / 2 + ramps[None, :, 3:] / 2 + _noise.normal(0, 8, (512, 512, 1))
    out = io.BytesIO()
    Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=85)
    return base64.b64encode(out.getvalue()).decode()


async def asking(port: int, mark: bytes, tokens: int, **shown: Any) -> tuple[ChunkRecorder, Any]:
    """A client that asks for so many tokens, and what returns when `mark` has come."""
    append, more = {"type": "append", "id": 1, **shown}, {"max_tokens": tokens, "ignore_eos": True}
    ops = [{"type": "open", "client": "load"}, append, {"type": "generate", "id": 2, **more}]
    data = json.dumps(ops).encode()
    socket = await ChunkRecorder.connect(port)
    came = asyncio.ensure_future(socket.until(mark))
    await asyncio.sleep(0)
    socket.write(data)
    return socket, came


async def visit(port: int, shown: dict[str, Any]) -> float:
    """A client for one token: how long it waited, in ms."""
    socket, came = await asking(port, b'"type":"done"', 1, **shown)
    await came
    waited = 1e3 * (socket.chunks[-1][0] - socket.sent_at)
    await socket.end_session()
    return waited


async def phase(
    port: int, name: str, seconds: float, step_ms: float, server: FakeServer | None
) -> dict[str, float]:
    count = 0 if name == "alone" else int(seconds * PER_SECOND)
    texts = [
        "".join(_dice.choices(string.ascii_lowercase, k=2 * TOKENS)) for _ in range(count + STREAMS)
    ]
    shown: list[dict[str, Any]] = [{"text": text} for text in texts[:count]]
    if name == "pictures":
        shown = [{"text": MARK, "images": [picture()]} for _ in range(count)]
    most, streams = int(1300 * seconds / step_ms), list[ChunkRecorder]()
    for text in texts[count:]:
        socket, begun = await asking(port, b'"type":"delta"', most, text=text[:9])
        await begun
        streams.append(socket)
    loop, visits = asyncio.get_running_loop(), list[asyncio.Task[float]]()
    before = server.snapshot() if server is not None else {}
    begin = loop.time()
    for i, each in enumerate(shown):
        await asyncio.sleep(begin + i / PER_SECOND - loop.time())
        visits.append(asyncio.create_task(visit(port, each)))
    await asyncio.sleep(begin + seconds - loop.time())
    end, after = loop.time(), server.snapshot() if server is not None else {}
    waits, gaps = await asyncio.gather(*visits), list[float]()
    for socket in streams:
        times = [when for when, _ in socket.chunks if begin <= when <= end]
        gaps += [1e3 * (b - a) for a, b in itertools.pairwise(times)]
        await socket.end_session()
    found = {"p50": percentile(gaps, 50), "p99": percentile(gaps, 99), "max": max(gaps)}
    if waits:
        found["first"] = percentile(waits, 50)
    if server is not None:
        found["longest"] = 1e3 * after["longest"]
        found["cpu"] = 1e3 * (after["loop_cpu"] - before["loop_cpu"])
    return found


async def measure(options: argparse.Namespace, port: int, server: FakeServer | None) -> None:
    rounds = list[dict[str, dict[str, float]]]()
    for i in range(-1, options.rounds):  # the first one warms up; each begins with another phase
        order, seconds = PHASES[i % 3 :] + PHASES[: i % 3], options.seconds if i >= 0 else 1.0
        found = {name: await phase(port, name, seconds, options.step_ms, server) for name in order}
        alone = dict(found["alone"])
        for each in found.values():
            each["over"] = each["p99"] / alone["p99"]
            each["cpu"] = (each.get("cpu", 0.0) - alone.get("cpu", 0.0)) / seconds / PER_SECOND
        rounds += [found] if i >= 0 else []
    head, rows = ["p50", "p99", "max", "over", "first", "longest", "cpu"], list[list[str]]()
    for name in PHASES:
        told = [spread([each[name].get(key, 0.0) for each in rounds]) for key in head]
        rows.append([name, *("{median:.2f} ({min:.2f}-{max:.2f})".format(**each) for each in told)])
    print(table(["phase", *head], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    for flag, value in (("seconds", 4.0), ("step-ms", 12.0), ("look-ms", 16.0), ("prompt-us", 0.0)):
        parser.add_argument(f"--{flag}", type=float, default=value)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    print(headline(machine()), flush=True)
    times = {name: getattr(options, name) for name in ("step_ms", "look_ms", "prompt_us")}
    with nullcontext() if options.port else FakeServer(executor="process", **times) as server:
        asyncio.run(measure(options, server.port if server else options.port, server))


if __name__ == "__main__":
    main()
