"""Row a of the GPU figures: many requests at once through the whole server, dummy weights, real shape.

    python benchmarks/gpu_serving.py --shape qwen3-0.6b --output FILE

256 requests, each with 100-1024 random input tokens and 100-1024 output tokens (seed 0), temperature
0.6, end tokens ignored, all sent at once over 32 WebSockets, 8 branches each. The server runs in
processes of its own (`ramify serve`, executor apart), the client here. Output tokens a second counts
from the first byte sent to the last `done`.
"""

import argparse
import asyncio
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import websockets
from gpu_decode import SHAPES

TOKENIZER = Path(__file__).resolve().parents[1] / "gpu/default_model"
PORT = 8799


def model_folder(shape: str) -> Path:
    """A config of the shape, and a tokenizer that nobody needs: prompts are token ids."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    return folder


def serve(folder: Path, device: str, more: list[str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "ramify.clients.cli", "serve", "--model", str(folder)]
    command += ["--load-format", "dummy", "--port", str(PORT), "--device", device, "--context", "4096"]
    command += ["--executor", "process", "--log-level", "warning", *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def wait_ready(server: "subprocess.Popen[bytes]") -> float:
    """Seconds until /readyz says so. Raises RuntimeError if the server ends instead."""
    begin = time.perf_counter()
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/readyz", timeout=2).close()
            return time.perf_counter() - begin
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"the server ended with {server.returncode}")


async def one_socket(program: list[dict[str, Any]], wanted: int, tokens: list[int]) -> list[float]:
    """Run one frame of ops; returns the times to the first token, in ms."""
    url = f"ws://127.0.0.1:{PORT}/v1/ws"
    firsts: list[float] = []
    async with websockets.connect(url, max_size=None, compression=None) as socket:
        await socket.send(json.dumps(program))
        while len(firsts) < wanted:
            frame = json.loads(await socket.recv())
            for message in frame if isinstance(frame, list) else [frame]:
                if message["type"] == "error":
                    raise RuntimeError(message["message"])
                if message["type"] == "done":
                    firsts.append(message["usage"]["ttft_ms"])
                    tokens.append(message["usage"]["output"])
    return firsts


async def run(requests: list[tuple[list[int], int]], sockets: int) -> dict[str, Any]:
    programs: list[list[dict[str, Any]]] = []
    for number in range(sockets):
        mine = requests[number::sockets]
        names = [f"b{i}" for i in range(len(mine))]
        ops: list[dict[str, Any]] = [{"type": "open", "client": f"bench-{number}"}]
        ops.append({"type": "fork", "id": 1, "branch": None, "as": names})
        for i, (name, (prompt, count)) in enumerate(zip(names, mine, strict=True)):
            ops.append({"type": "append", "id": 2 + 2 * i, "branch": name, "tokens": prompt})
            ops.append(
                {"type": "generate", "id": 3 + 2 * i, "branch": name, "max_tokens": count,
                 "temperature": 0.6, "ignore_eos": True, "seed": i}
            )  # fmt: skip
        programs.append(ops)
    tokens: list[int] = []
    begin = time.perf_counter()
    waits = [len(requests[n::sockets]) for n in range(sockets)]
    jobs = [one_socket(p, w, tokens) for p, w in zip(programs, waits, strict=True)]
    firsts = [each for part in await asyncio.gather(*jobs) for each in part]
    seconds = time.perf_counter() - begin
    if sum(tokens) != sum(count for _, count in requests):
        raise RuntimeError("tokens are missing")
    return {
        "tokens_per_s": sum(tokens) / seconds,
        "seconds": seconds,
        "ttft_ms_median": statistics.median(firsts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sockets", type=int, default=32)
    parser.add_argument("--output", type=Path)
    args, more = parser.parse_known_args()
    server = serve(model_folder(args.shape), args.device, more)
    try:
        report: dict[str, Any] = {"shape": args.shape, "ready_s": wait_ready(server), "runs": []}
        shortest = min(100, args.longest)
        top = min(10_000, SHAPES[args.shape]["vocab_size"] - 1)
        for repeat in range(args.repeats):
            dice = random.Random(repeat)  # other prompts each time: nothing is cached
            sizes = [(dice.randint(shortest, args.longest), dice.randint(shortest, args.longest))
                     for _ in range(args.requests)]  # fmt: skip
            requests = [
                ([dice.randint(0, top) for _ in range(length)], count) for length, count in sizes
            ]
            report["runs"].append(asyncio.run(run(requests, args.sockets)))
            print(report["runs"][-1], flush=True)
        report["tokens_per_s_median"] = statistics.median(r["tokens_per_s"] for r in report["runs"])
    finally:
        server.terminate()
        server.wait(30)
    print(json.dumps(report))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
