"""The CPU side by side with llama.cpp: the same GGUF files, taking turns in one run.

    python benchmarks/llama_cpp.py --binaries FOLDER [--files FOLDER] [--parts speed start]
        [--shapes qwen3-0.6b qwen3-1.7b] [--kinds Q4_K_M Q8_0] [--threads N] [--repeat 3] [--steps 16]
        [--json FILE]

FOLDER of --binaries holds llama.cpp's `llama-batched-bench`, `llama-bench` and `llama-server`. Files
that --files lacks are made there, of random blocks (`gguf_shapes.py`). `speed`: decode at 1, 4 and 8
streams behind 64 tokens each, and a prompt of 512; ours by the executor alone, theirs by their own
benchmarks. Each repetition starts both programs anew. With --threads 1 rates are those of CPU time, of
theirs by the share of a core that the program had as a whole, so neighbours count less. `start`: whole
servers until they are ready, seconds on the clock and of CPU, then memory: the processes' own, and the
file's pages that they have mapped.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from cpu_decode import decode, prefill
from gguf_shapes import KINDS, SHAPES, write
from report import headline, machine, spread, table, write_json

from ramify.clients.bench.server import served
from ramify.gpu.startup.load import load_executor
from ramify.protocol.config import ModelConfig

STREAMS = (1, 4, 8)
CONTEXT, PROMPT = 64, 512
_SLOTS = CONTEXT * 8 * 3
Rates = dict[str, float]


def of_ours(model: Path, threads: int, steps: int) -> Rates:
    """Tokens a second by what is measured, in this process."""
    config = ModelConfig(path=model, device="cpu", threads=threads, kv_tokens=_SLOTS)
    executor = load_executor(config, lambda what, done: None)
    clock, found = time.process_time if threads == 1 else time.perf_counter, {}
    for streams in STREAMS:
        seconds = sum(decode(executor, streams, CONTEXT, steps, clock))
        found[f"decode {streams}"] = streams * steps / seconds
    found[f"prompt {PROMPT}"] = PROMPT / prefill(executor, PROMPT, clock)
    executor.close()
    return found


def _ours(model: Path, options: argparse.Namespace) -> Rates:
    own = [sys.executable, __file__, "--ours", str(model), "--threads", str(options.threads)]
    done = subprocess.run([*own, "--steps", str(options.steps)], capture_output=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _theirs(file: Path, options: argparse.Namespace) -> Rates:
    common = ["-m", str(file), "-t", str(options.threads)]
    batched = [
        options.binaries / "llama-batched-bench", *common, "-c", str(_SLOTS), "-npp", str(CONTEXT),
        "-ntg", str(options.steps), "-npl", ",".join(map(str, STREAMS)), "--output-format", "jsonl",
    ]  # fmt: skip
    output, share = _run(batched, options.threads)
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    found = {f"decode {row['pl']}": row["speed_tg"] / share for row in rows}
    prompt = [options.binaries / "llama-bench", *common, "-p", str(PROMPT), "-n", "0", "-r", "1"]
    output, share = _run([*prompt, "-o", "json"], options.threads)
    return found | {f"prompt {PROMPT}": json.loads(output)[0]["avg_ts"] / share}


def _run(command: list[Any], threads: int) -> tuple[str, float]:
    """What a program writes, and its share of a core, if it has one thread."""
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return output, cpu / (time.perf_counter() - begin) if threads == 1 else 1.0


def speed(file: Path, options: argparse.Namespace) -> list[list[str]]:
    """Rows of a table; raw rates go into `options.raw`."""
    ours, theirs = [], []
    for _ in range(options.repeat):
        theirs.append(_theirs(file, options))
        ours.append(_ours(file, options))
    options.raw[f"{file.stem}, speed"] = {"ours": ours, "llama.cpp": theirs}
    return [
        [file.stem, what, *(_cell([one[what] for one in some]) for some in (ours, theirs)),
         f"{_median(ours, what) / _median(theirs, what):.2f}"]
        for what in ours[0]
    ]  # fmt: skip


def _median(found: list[Rates], what: str) -> float:
    return spread([one[what] for one in found])["median"]


def _cell(rates: list[float]) -> str:
    found = spread(rates)
    return f"{found['median']:.1f} ({found['min']:.1f}-{found['max']:.1f})"


# --- whole servers ---


def _family(pid: int) -> list[int]:
    """A process and all that it started."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, task.read_text().split())
    return found


def _state(pid: int, file: Path) -> Rates:
    """CPU seconds and MiB of a server: its own memory, and pages of `file`."""
    cpu, own, mapped = 0.0, 0, 0
    for each in _family(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()
        cpu += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        area = ""
        for line in Path(f"/proc/{each}/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-", line):
                area = line
            elif line.startswith("Pss:"):
                kib = int(line.split()[1])
                own, mapped = (own, mapped + kib) if str(file) in area else (own + kib, mapped)
    return {"cpu": cpu, "own MiB": own / 1024, "mapped MiB": mapped / 1024}


def _start_ours(file: Path, options: argparse.Namespace) -> Rates:
    flags = ["--model", str(file), "--store", "none", "--threads", str(options.threads)]
    with served([*flags, "--kv-tokens", str(_SLOTS)], None) as server:
        return {"ready": server.ready_s} | _state(server.pid, file)


def _start_theirs(file: Path, options: argparse.Namespace) -> Rates:
    port, begin = "8793", time.perf_counter()
    command = [options.binaries / "llama-server", "-m", file, "-c", str(_SLOTS), "-t",
               str(options.threads), "--port", port]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            with suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            if process.poll() is not None:
                raise SystemExit("llama-server ended before it was ready")
            time.sleep(0.02)
        return {"ready": time.perf_counter() - begin} | _state(process.pid, file)
    finally:
        process.kill()
        process.wait()


def start(file: Path, options: argparse.Namespace) -> list[list[str]]:
    ours, theirs = [], []
    for _ in range(options.repeat):
        theirs.append(_start_theirs(file, options))
        ours.append(_start_ours(file, options))
    options.raw[f"{file.stem}, start"] = {"ours": ours, "llama.cpp": theirs}
    size = file.stat().st_size / 2**20
    return [
        [f"{file.stem} ({size:.0f} MiB)", what,
         *(_cell([one[what] for one in some]) for some in (ours, theirs)),
         f"{_median(ours, what) / max(0.01, _median(theirs, what)):.2f}"]
        for what in ours[0]
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--binaries", type=Path)
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "qwen3-1.7b"], choices=SHAPES)
    parser.add_argument("--kinds", nargs="+", default=["Q4_K_M", "Q8_0"], choices=KINDS)
    parser.add_argument("--parts", nargs="+", default=["speed", "start"], choices=["speed", "start"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--json", help="write all runs to this file")
    parser.add_argument("--ours", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours is not None:
        print(json.dumps(of_ours(options.ours, options.threads, options.steps)))
        return
    if options.binaries is None:
        parser.error("--binaries FOLDER is missing: where llama.cpp was built")
    about = machine(["ramify", "torch", "llvmlite"])
    print(headline(about), flush=True)
    options.raw = {}
    for shape in options.shapes:
        for kind in options.kinds:
            file = write(shape, kind, options.files / f"{shape}-{kind}.gguf")
            for part in options.parts:
                rows = speed(file, options) if part == "speed" else start(file, options)
                print(table(["file", "what", "ours", "llama.cpp", "ratio"], rows), flush=True)
    print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    write_json(options.json, about, options.raw)


if __name__ == "__main__":
    main()
