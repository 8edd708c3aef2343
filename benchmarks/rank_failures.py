"""Ranks that are killed, stopped or out of memory in mid-stream: does the answer go on?

    python benchmarks/rank_failures.py [--ranks 2] [--times 50] [--seed 0] [--model DIR]

A server of several ranks on this CPU streams an answer to one client after the other. At a random token
a random rank meets its fate. The server has to start its ranks again and to finish the answer, in the
same session. SIGSTOP is found out by `--step-timeout`. Out of memory: the rank's address space may not
grow from there on. The exit code is 1 if an answer ended otherwise.
"""

import argparse
import asyncio
import os
import random
import re
import resource
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import ramify

ROOT = Path(__file__).parents[1]
FATES = ("kill", "stop", "memory")
TOKENS, PATIENCE_S = 120, 120.0


def ranks_of(server: int) -> dict[int, int]:
    """Processes by rank, of those that are there."""
    found: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rsplit(")", 1)[1].split()[1])
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == server and b"executor_program" in command:
            pid = int(status.parent.name)
            found[len(found)] = pid
    return dict(enumerate(sorted(found.values())))  # started in their order


def meet(fate: str, pid: int) -> None:
    if fate == "memory":
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
        # what it may have spared is taken from it by the next large step
    else:
        os.kill(pid, signal.SIGKILL if fate == "kill" else signal.SIGSTOP)


async def one(url: str, server: int, fate: str, dice: random.Random) -> tuple[bool, bool, float]:
    """Whether the answer was whole, whether ranks were replaced, and the longest pause in it."""
    at, before = dice.randrange(5, TOKENS // 2), ranks_of(server)
    victim = before[dice.randrange(len(before))]
    async with ramify.connect(url) as session:
        branch, seen, last, longest = session.main, 0, time.monotonic(), 0.0
        await branch.append("Once upon a time " * 40)
        running = branch.generate(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        async for _ in running:
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            seen += 1
            if seen == at:
                meet(fate, victim)
                if fate == "memory":  # a long prompt needs more than it has
                    other = (await branch.fork("long"))[0]
                    await other.append("A dragon and a fox. " * 150)
                    asking = asyncio.ensure_future(other.generate(max_tokens=1))
        done = await running
        if fate == "memory":
            await asking
    return done.usage.output == TOKENS, ranks_of(server) != before, longest


async def campaign(asked: argparse.Namespace) -> int:
    command = [
        sys.executable, "-m", "ramify.clients.cli", "serve", "--model", str(asked.model), "--port", "0",
        "--device", "cpu", "--quantization", "none", "--threads", "1", "--store", "none",
        "--tensor-parallel", str(asked.ranks), "--step-timeout", "4",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    said, dice, counts, pauses, wrong = "", random.Random(asked.seed), Counter[str](), list[float](), 0
    try:
        while (ready := re.search(r"ready: (ws://\S+)", said)) is None:
            said += (await process.stdout.readline()).decode()
        reading = asyncio.ensure_future(process.stdout.read())
        for number in range(asked.times):
            fate = FATES[number % len(FATES)]
            async with asyncio.timeout(PATIENCE_S):
                whole, replaced, pause = await one(ready[1], process.pid, fate, dice)
            counts[f"{fate}: ranks replaced" if replaced else f"{fate}: survived"] += 1
            pauses.append(pause)
            wrong += not whole
            print(number, fate, "whole" if whole else "CUT", f"longest pause {pause:.1f} s", flush=True)
        print(dict(counts), f"{wrong} cut; pauses: median {statistics.median(pauses):.1f} s")
    finally:
        process.terminate()
        await process.wait()
    print(*[line for line in (await reading).decode().splitlines() if "rank" in line][-3:], sep="\n")
    return int(wrong > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=ROOT / "gpu/default_model")
    sys.exit(asyncio.run(campaign(parser.parse_args())))
