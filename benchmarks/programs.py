"""Whole programs: what they compute, how fast they are, against clients that know no branches.

    python benchmarks/programs.py count [--data FOLDER] [--programs 64] [--json FILE]
    python benchmarks/programs.py race  [--data FOLDER] [--programs 4] [--repeat 3] [--json FILE]
    python benchmarks/programs.py write FILE [--data FOLDER] [--programs 64] [--context 32768]
    python benchmarks/programs.py drive FILE --serve [--shape NAME] | --url WS | --sglang URL
                                           | --openai URL --model NAME
    python benchmarks/programs.py delay [--ms 80] [--repeat 3] [--json FILE]
    python benchmarks/programs.py steps [--repeat 3] [--json FILE]
    python benchmarks/programs.py batch [--programs 1000]

The programs are those of the SGLang paper (`program_suite.py` says what each one does), with the real
data sets of --data FOLDER, or with made-up words. Each has a session of its own.

count   The real engine and a model that is faked. `computed`: prompt tokens that the executor ran, by
        its own count, less what was decoded. `best`: the same for a cache that never forgets, by a
        plain trie over the token sequences (`program_optimum.py`). `sent`: what a stateless client
        sends. `hits`: the share of what could be found that was found. One program alone, all at once,
        and all at once in a KV pool of a quarter of the tokens that they hold together (but one that
        holds the longest of them). --sessions N: the programs share so many sessions.
race    The default model on a CPU, one server for all, programs a second: `branches`, programs in
        frames; `prompts`, a stateless client, cache on; `no cache`, the same with two tokens of its own
        before each call, so that nothing is found; `transformers`, `generate`, one program after the
        other, each round of it as one padded batch. All in float32, unless --quantization says what
        our server does. Median and range of --repeat; "over": the median of the ratio in each round,
        how many times as fast branches are.
write   Programs as JSON lines, for `drive`.
drive   The lines of FILE on a GPU or wherever: one alone, and all of a kind at once: seconds, output
        tokens a second. With a Ramify server both as branches and as a stateless client.
delay   One program alone over a link with so long a round trip, fake model: as branches, as a stateless
        client; "trips": what the link adds, in round trips, against the same without the link's delay.
steps   Steps that one program alone takes, fake model: as branches, as a stateless client.
batch   `run_batch` of so many programs, one of which fails, killed half-way and started again.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from program_base import CONTEXT, MODEL
from program_batch import batch, client
from program_count import count
from program_delay import delay
from program_drive import drive, write_file
from program_race import race
from program_steps import steps
from program_suite import PROGRAMS
from report import headline, machine

from ramify.actors.kit.log import LogConfig, configure
from ramify.clients.bench.session import BenchFailed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], programs: int) -> Any:
        made = commands.add_parser(name)
        made.set_defaults(run=run)
        made.add_argument("--programs", type=int, default=programs, help="of each kind")
        made.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
        made.add_argument("--data", type=Path, help="folder of the real data sets")
        made.add_argument("--json", help="write everything to this file")
        return made

    counting_flags = command("count", count, 64)
    counting_flags.add_argument("--sessions", type=int, help="default: one for each program")
    delaying = command("delay", delay, 1)
    delaying.add_argument("--ms", type=float, default=80.0, help="of a round trip")
    delaying.add_argument("--repeat", type=int, default=3)
    racing = command("race", race, 4)
    racing.add_argument("--repeat", type=int, default=3)
    racing.add_argument("--threads", type=int, default=1)
    racing.add_argument(
        "--quantization", default="none", help="of our server's weights; those of the peer have none"
    )
    writing = command("write", write_file, 64)
    writing.add_argument("file", type=Path)
    writing.add_argument("--context", type=int, default=CONTEXT, help="room of a program, in tokens")
    driving = commands.add_parser("drive")
    driving.set_defaults(run=drive)
    driving.add_argument("file", type=Path)
    where = driving.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--serve", action="store_true", help="start `ramify serve`; its flags come after --"
    )
    for kind in ("url", "sglang", "openai"):
        where.add_argument(f"--{kind}", metavar="URL")
    driving.add_argument("--shape", help="with --serve: random weights in this model's shape")
    driving.add_argument("--model", help="the model's name in requests (--openai)")
    driving.add_argument("--token", help="bearer token")
    driving.add_argument("--tokenizer", type=Path, default=MODEL, help="the served model's folder")
    driving.add_argument("--repeat", type=int, default=3)
    driving.add_argument("--seed", type=int, default=0, help="another one for a second run on a server")
    driving.add_argument("--json", help="write everything to this file")
    stepping = command("steps", steps, 1)
    stepping.add_argument("--repeat", type=int, default=3)
    command("batch", batch, 1000)
    other = commands.add_parser("client")
    other.set_defaults(run=client)
    other.add_argument("url")
    other.add_argument("file", type=Path)
    other.add_argument("programs", type=int)
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:end])
    options.flags = given[end + 1 :]
    configure(LogConfig(level="warning"))
    if options.run is not client:
        options.about = machine(["ramify", "torch", "transformers", "websockets"])
        print(headline(options.about), flush=True)
    try:
        code: int = options.run(options)
    except (BenchFailed, OSError) as error:
        print(f"programs.py: {error}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
