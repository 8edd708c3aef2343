"""Coding agents in a pool too small for all of them, in simulated time: the cliff, and what mends it.

The scheduler's core and the radix cache are the real ones, as in `schedule_sim.py`; steps take what
the pool's device is said to do. Sessions are recorded ones, in a closed loop: the next turn is sent
after the recorded pause (at most 300 s) behind an answer. A session that is over makes room for another.

One token here stands for 16: pools, prompts, outputs and rates are a sixteenth. A step with decodes
lasts as long as 16 and takes the prompt tokens of 16. So the quantum is 4 steps and the target of steps
320 ms. The lots of the prompt queue stay 2,048 tokens, which stand for 32,768.

    python benchmarks/agents.py agent_sessions.jsonl --pool hybrid --sessions 16 96
    python benchmarks/agents.py agent_sessions.jsonl --only ours --tenant

`--real`: the same sessions against a real server with the bundled model on this CPU, a server for each
policy. One token stands for 64, a second of pause for `--pause` ones; each place plays `--turns`. What
is computed and found hardly depends on the machine's load; waits do.

    python benchmarks/agents.py agent_sessions.jsonl --real --sessions 16 --pages 8192

Policies: `lru`, by request: whoever comes is admitted when pages can be had, whatever others have
begun, and no run gives pages to others for fairness; `ours`: the scheduler as it is. A newcomer with
1,024 tokens comes every 30 s. Each place for a session plays the same ones under both policies.
`--host`: so many real tokens of KV in host memory; a block is 1,024 of them, and loads hold up steps.
(With `--real`: bytes, `--kv-host`.)
Columns: `all`, turns since the start; `hit`, of the tokens that the turn before could have left; waits
in seconds until the first token; `share`: the waiting of the place that waited most, over the mean.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice, product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from fake_server import BUNDLED
from report import machine, table, write_json
from schedule_sim import SimulatedAnswer, Simulation, StepWork
from websockets.asyncio.client import connect

from ramify.actors.engine import running_engine
from ramify.actors.kit.log import configure
from ramify.actors.scheduler.active import ActiveSessions
from ramify.actors.scheduler.admission import Admission
from ramify.protocol import messages as m
from ramify.protocol.cluster import BLOCK
from ramify.protocol.config import (
    EngineConfig,
    LogConfig,
    ModelConfig,
    ScheduleConfig,
    ServerConfig,
)  # fmt: skip
from ramify.protocol.plan import StepPlan

BESIDE = 32  # blocks that leave in the time of a step
SCALE = 16  # real tokens that one token here stands for
PAUSE = 300.0  # seconds at most
CONTEXT = 262_144  # real tokens: a session is over before its first prompt that is longer
NEWCOMER = 1024, 64  # real tokens of its prompt and answer
EVERY = 30.0  # seconds between two newcomers
COLUMNS = (
    "pool", "sessions", "host", "policy", "turns/min", "all", "hit", "TTFT p50", "p95", "newcomer",
    "share", "twice", "retracted",
)  # fmt: skip


@dataclass(frozen=True)
class Pool:
    """Real tokens, prompt tokens a second; milliseconds of a decode, and for a token of context; tokens
    a second of a copy from host memory.
    """

    tokens: int
    prefill: float
    decode: float
    context: float
    load: float

    def step(self, work: StepWork) -> tuple[float, float]:
        """Milliseconds of the device and of its host."""
        prompt = 1e3 * work.prompt * SCALE / self.prefill
        decode = self.decode + self.context * work.context * SCALE if work.decodes else 0.0
        return max(0.05, prompt + decode * SCALE), 0.05


POOLS = {
    "llama": Pool(850_000, 41_000.0, 8.0, 0.000031, 380_000.0),
    "hybrid": Pool(3_000_000, 70_000.0, 8.0, 0.000008, 1_500_000.0),
}


@dataclass(frozen=True)
class Turn:
    """`shared` tokens of the prompt of turn `parent`, then new ones. `pause`: seconds before it."""

    parent: int
    shared: int
    prompt: int
    output: int
    pause: float


@dataclass(frozen=True)
class Recorded:
    head: tuple[int, int]  # which system prompt and tools: sessions with the same share them
    turns: list[Turn]


def read(path: Path, scale: int = SCALE) -> list[Recorded]:
    """The sessions of a file, in tokens of which each stands for `scale`."""
    found = []
    for line in path.read_text().splitlines():
        each = json.loads(line)
        if "turns" not in each:
            continue
        turns = []
        for _, parent, shared, prompt, output, pause, _ in each["turns"]:
            if prompt > CONTEXT:
                break
            size = max(1, prompt // scale)
            shared = min(shared // scale, size - 1)
            turns.append(Turn(parent, shared, size, max(1, output // scale), min(PAUSE, pause)))
        if turns:
            found.append(Recorded((each["system"], each["tools"]), turns))
    return found


def wanted(recorded: list[Recorded]) -> float:
    """Real tokens of a session's prompt, the mean over all turns: what it wants of a pool."""
    return SCALE * statistics.fmean(turn.prompt for each in recorded for turn in each.turns)


@dataclass
class Place:
    """One of the sessions that there are at a time."""

    recorded: Iterator[Recorded]
    first: float  # part of its first session that was over before
    waited: list[float] = field(default_factory=list)


class AgentLoad:
    """Keeps so many sessions going, and measures what ends after the warm-up."""

    def __init__(
        self, sim: "AgentSimulation", recorded: list[Recorded], options: argparse.Namespace
    ) -> None:
        self._sim = sim
        self._options = options
        order = list(recorded)
        sim.dice.shuffle(order)
        self._serial = 0
        self._noise = np.random.default_rng(options.seed)
        own = [islice(cycle(order), number, None, options.count) for number in range(options.count)]
        self.places = [Place(each, sim.dice.random()) for each in own]
        self.newcomers: list[float] = []
        self.all = self.turns = self.found = self.could = 0
        self._since = 1e3 * options.warm_up
        self._until = 1e3 * (options.warm_up + options.seconds)
        for place in self.places:
            sim.at(sim.dice.uniform(0.0, 60e3), partial(self._begin, place))
        sim.at(60e3, self._come)

    def _begin(self, place: Place) -> None:
        self._serial += 1
        recorded = next(place.recorded)
        # Sessions of a running server are anywhere in their course, not all at their beginning.
        first, place.first = int(place.first * len(recorded.turns)), 0.0
        self._turn(place, self._serial, recorded, first, {})

    def _turn(
        self,
        place: Place,
        session: int,
        recorded: Recorded,
        number: int,
        prompts: dict[int, "np.ndarray"],
    ) -> None:
        sim = self._sim
        if sim.now >= self._until:
            return
        if number == len(recorded.turns):
            self._begin(place)
            return
        turn = recorded.turns[number]
        parent = prompts.get(turn.parent)
        if parent is None:  # the shared head
            begin = np.random.default_rng(recorded.head).integers(0, 10_000, sum(recorded.head) // SCALE)
            begin = begin[: turn.prompt - 1]
        else:
            begin = parent[: turn.shared]
        fresh = self._noise.integers(0, 10_000, turn.prompt - len(begin))
        prompts[number] = np.concatenate((begin, fresh)).astype(np.int32)
        for old in [each for each in prompts if each < number - 64]:
            del prompts[old]
        could = len(begin) if parent is not None else 0

        def done(answer: SimulatedAnswer) -> None:
            sim.cache.drop_branches(m.DropBranches([answer.branch]))
            self.all += 1
            if answer.sent >= self._since:
                self.turns += 1
                place.waited.append(answer.ttft / 1e3)
                self.could += could
                self.found += min(could, sim.cached.pop(answer.branch, 0))
            pause = recorded.turns[number + 1].pause if number + 1 < len(recorded.turns) else 0.0
            after = partial(self._turn, place, session, recorded, number + 1, prompts)
            sim.at(sim.now + 1e3 * pause, after)

        owner = "all" if self._options.tenant else ""
        self._send(session, prompts[number], turn.output, owner, done)

    def _send(self, session: int, prompt: "np.ndarray", output: int, owner: str, done: object) -> None:
        sim = self._sim
        sim.count += 1
        branch = sim.count
        sim.open(branch)
        sim.cache.extend_branch(m.ExtendBranch(branch, prompt.astype(np.int32).tobytes()))
        answer = SimulatedAnswer(branch, sim.now, done)  # type: ignore[arg-type]
        sim.submit(answer, session, len(prompt), output, 0, owner)

    def _come(self) -> None:
        sim = self._sim
        if sim.now >= self._until:
            return
        prompt = self._noise.integers(0, 10_000, NEWCOMER[0] // SCALE)

        def done(answer: SimulatedAnswer) -> None:
            sim.cache.drop_branches(m.DropBranches([answer.branch]))
            if answer.sent >= self._since:
                self.newcomers.append(answer.ttft / 1e3)

        self._serial += 1
        owner = f"new {self._serial}" if self._options.tenant else ""
        self._send(self._serial, prompt, NEWCOMER[1] // SCALE, owner, done)
        sim.at(sim.now + 1e3 * EVERY, self._come)


class AgentSimulation(Simulation):
    """`cached`: of each branch's last request, the tokens that had KV."""

    def __init__(self, options: argparse.Namespace, pool: Pool) -> None:
        super().__init__(options)
        self.device = pool  # type: ignore[assignment]
        self.dice = random.Random(options.seed)
        self.cached: dict[int, int] = {}
        self.burst = 0  # most blocks that a step saved
        self._launches: set[float] = set()  # times at which the executor's loop runs again

    def at(self, time: float, act: Callable[[], None]) -> None:
        """One run of the executor's loop at a time; else they grow in number where it is never idle."""
        if act == self.launch:
            if time in self._launches:
                return
            self._launches.add(time)
        super().at(time, act)

    def moves(self, plan: StepPlan) -> float:
        """Loads are taken to hold up the step that they belong to, saves where they are too many to
        leave beside it.
        """
        blocks = len(plan.loads) + max(0, len(plan.saves) - BESIDE)
        self.burst = max(self.burst, len(plan.saves))
        return 1e3 * blocks * BLOCK * SCALE / self.device.load

    def launch(self) -> None:
        self._launches.discard(self.now)
        super().launch()

    def told(self, tokens: m.Tokens) -> None:
        for finished in tokens.finished:
            self.cached[self.requests[finished.request].branch] = finished.cached
        super().told(tokens)


@contextmanager
def policed(policy: str) -> Iterator[None]:
    """Schedulers that are made inside admit by this policy."""
    make = Admission.__init__

    def any_length(self: Admission, *given: Any) -> None:
        make(self, *given)
        self._step = 1 << 40  # no prompt is long

    with ExitStack() as stack:
        if policy == "lru":
            stack.enter_context(patch.object(Admission, "__init__", any_length))
            stack.enter_context(patch.object(ActiveSessions, "over", lambda *_: False))
            for name in ("_waits_for_room", "_make_pages", "_find_pages"):
                stack.enter_context(patch.object(Admission, name, lambda *_: False))
        yield


def play(
    recorded: list[Recorded], name: str, count: int, host: int, policy: str, options: argparse.Namespace
) -> list[str]:
    """One row of the table. `host`: real tokens in host memory."""
    pool = POOLS[name]
    if options.part:
        pool = replace(pool, tokens=int(options.part * count * wanted(recorded)))
    sizes = {
        "count": count, "pages": pool.tokens // SCALE, "context": CONTEXT // SCALE + 4096,
        "rows": 256, "step_tokens": 2048, "mixed_tokens": 2048, "ahead_tokens": 512,
        "quantum_steps": 4, "itl_target_ms": 20.0 * SCALE, "graph_lines": 0, "cpu": False,
        "noise": [0.0], "host": host // SCALE // BLOCK,
    }  # fmt: skip
    with policed(policy):
        sim = AgentSimulation(argparse.Namespace(**{**vars(options), **sizes}), pool)
        load = AgentLoad(sim, recorded, argparse.Namespace(**{**vars(options), "count": count}))
        sim.run()
    waits = [wait for place in load.places for wait in place.waited]
    marks = statistics.quantiles(waits, n=20)
    places = [sum(place.waited) for place in load.places]
    lifecycle = sim.core.lifecycle
    return [
        f"{name} {pool.tokens / 1e6:.1f}M", str(count), f"{host / 1e6:.1f}M", policy,
        f"{60 * load.turns / options.seconds:.1f}", str(load.all),
        f"{load.found / max(1, load.could):.2f}", f"{marks[9]:.1f}", f"{marks[18]:.1f}",
        f"{max(load.newcomers, default=0.0):.1f}",
        f"{max(places) / max(1e-9, statistics.fmean(places)):.2f}",
        f"{lifecycle.computed_twice * SCALE / 1e6:.1f}M", str(sum(lifecycle.retractions.values())),
    ]  # fmt: skip


# --- for real ---------------------------------------------------------------------------------------

REAL_SCALE, REAL_CONTEXT, REAL_STEP = 64, 4096, 512
REAL_COLUMNS = (
    "sessions", "host", "policy", "turns", "prompts", "computed", "hit", "CPU, s", "seconds",
    "TTFT p50", "p95",
)  # fmt: skip


def serve(policy: str, pages: int, host: int, pipe: Connection) -> None:
    """A server in this process, until something comes; then its CPU time is told."""

    async def run() -> None:
        config = EngineConfig(
            model=ModelConfig(
                path=BUNDLED,
                context=REAL_CONTEXT,
                kv_tokens=pages,
                max_rows=32,
                step_tokens=REAL_STEP,
                kv_host=host,
            ),
            server=ServerConfig(port=0),
            schedule=ScheduleConfig(itl_target_ms=1000.0, quantum_steps=1),
            executor="thread",
        )
        async with running_engine(config) as engine:
            spent = time.process_time()
            pipe.send(engine.port)
            await asyncio.to_thread(pipe.recv)
            pipe.send(time.process_time() - spent)

    configure(LogConfig(level="warning"))
    with policed(policy):
        asyncio.run(run())


class RealPlace:
    """One session after the other, over a socket of ours each: a turn forks its parent."""

    def __init__(
        self, url: str, recorded: list[Recorded], seed: int, options: argparse.Namespace
    ) -> None:
        self._url, self._recorded, self._options = url, recorded, options
        self._dice = np.random.default_rng(seed)
        self.usages: list[tuple[dict[str, Any], int]] = []  # with what could have been found

    async def run(self) -> None:
        left, first = self._options.turns, self._dice.random()
        for recorded in cycle(self._recorded):
            begin = int(first * len(recorded.turns))
            turns = recorded.turns[begin : begin + left]
            async with connect(self._url, max_size=None) as socket:
                await socket.send(json.dumps({"type": "open", "client": "agent", "ttl_s": 0}))
                for number, turn in enumerate(turns, begin):
                    if number > begin:
                        await asyncio.sleep(turn.pause / self._options.pause)
                    await self._turn(socket, recorded, number, turn, known=turn.parent >= begin)
            left, first = left - len(turns), 0.0
            if not left:
                return

    async def _turn(
        self, socket: Any, recorded: Recorded, number: int, turn: Turn, *, known: bool
    ) -> None:
        name, ident = f"turn{number}", 3 * number + 1
        begin: list[int] = []
        if not known:  # the shared head
            head = np.random.default_rng(recorded.head).integers(
                10, 8000, sum(recorded.head) // REAL_SCALE
            )
            begin = head[: turn.prompt - 1].tolist()
        shared = turn.shared if known else len(begin)
        source, at = (f"turn{turn.parent}", shared) if known else ("main", 0)
        ops: list[dict[str, Any]] = [
            {"type": "fork", "id": ident, "branch": source, "at": at, "as": [name]}
        ]
        tokens = begin + self._dice.integers(10, 8000, turn.prompt - shared).tolist()
        ops.append({"type": "append", "id": ident + 1, "branch": name, "tokens": tokens})
        asked = {"max_tokens": turn.output, "ignore_eos": True, "temperature": 0}
        ops.append({"type": "generate", "id": ident + 2, "branch": name, **asked})
        await socket.send(json.dumps(ops))
        async for frame in socket:
            found = json.loads(frame)
            for event in found if isinstance(found, list) else [found]:
                if event["type"] == "error":
                    raise RuntimeError(str(event))
                if event["type"] == "done":
                    self.usages.append((event["usage"], shared if known else 0))
                    return


async def play_real(
    recorded: list[Recorded], count: int, host: int, policy: str, options: argparse.Namespace
) -> list[str]:
    """One row of the table: all places play their turns against a server of their own."""
    pipe, other = get_context("spawn").Pipe()
    server = get_context("spawn").Process(target=serve, args=(policy, options.pages, host, other))
    server.start()
    port = await asyncio.to_thread(pipe.recv)
    order = list(recorded)
    random.Random(options.seed).shuffle(order)
    url = f"ws://127.0.0.1:{port}/v1/ws"
    places = [RealPlace(url, order[i::count], options.seed + i, options) for i in range(count)]
    began = time.perf_counter()
    await asyncio.gather(*(place.run() for place in places))
    seconds = time.perf_counter() - began
    pipe.send(None)
    spent = await asyncio.to_thread(pipe.recv)
    server.join()
    usages = [each for place in places for each in place.usages]
    marks = statistics.quantiles([usage["ttft_ms"] / 1e3 for usage, _ in usages], n=20)
    found = sum(min(could, usage["cached"]) for usage, could in usages)
    prompts = sum(usage["prompt"] for usage, _ in usages)
    computed = sum(usage["prompt"] - usage["cached"] for usage, _ in usages)
    return [
        str(count), f"{host >> 20}M", policy, str(len(usages)), str(prompts), str(computed),
        f"{found / sum(could for _, could in usages):.2f}", f"{spent:.0f}", f"{seconds:.0f}",
        f"{marks[9]:.2f}", f"{marks[18]:.2f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="recorded sessions, a JSON line each")
    parser.add_argument("--pool", choices=sorted(POOLS), nargs="+", default=list(POOLS))
    parser.add_argument("--sessions", type=int, nargs="+", default=[16, 32, 48, 96, 128])
    parser.add_argument(
        "--host", type=int, nargs="+", default=[0], help="host memory in tokens, with --real in bytes"
    )
    parser.add_argument("--part", type=float, help="a pool of so much of what the sessions want")
    parser.add_argument("--only", choices=("lru", "ours"), nargs="+", default=["lru", "ours"])
    parser.add_argument("--tenant", action="store_true", help="all sessions have one credential")
    parser.add_argument("--seconds", type=float, default=1800.0, help="measured, in simulated time")
    parser.add_argument("--warm-up", type=float, default=600.0, help="seconds before that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the table there")
    parser.add_argument("--real", action="store_true", help="a real server, see the top")
    parser.add_argument("--pages", type=int, default=8192, help="tokens of its KV pool")
    parser.add_argument("--turns", type=int, default=20, help="of each place there")
    parser.add_argument("--pause", type=float, default=10.0, help="seconds of a pause for one there")
    options = parser.parse_args()
    recorded = read(options.file, REAL_SCALE if options.real else SCALE)
    rows: list[list[str]] = []
    if options.real:
        for count, host, policy in product(options.sessions, options.host, options.only):
            rows.append(asyncio.run(play_real(recorded, count, host, policy, options)))
            print(*rows[-1], sep="\t", flush=True)
        print(table(REAL_COLUMNS, rows))
        write_json(options.json, machine(), [dict(zip(REAL_COLUMNS, r, strict=True)) for r in rows])
        return
    for name in options.pool:
        for count, host, policy in product(options.sessions, options.host, options.only):
            rows.append(play(recorded, name, count, host, policy, options))
            print(*rows[-1], sep="\t", flush=True)
    print(table(COLUMNS, rows))
    write_json(options.json, machine(), [dict(zip(COLUMNS, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
