"""Where sessions go, in simulated time: the real router, scheduler and cache; devices are a table.

    python benchmarks/routing_sim.py mooncake --replicas 16 --load 0.95 --policies ours cache_aware

Step times are those of Llama-3.1-8B on an H200 (as in `schedule_sim.py`). So that a thousand replicas
fit into a Python process, tokens are scaled: `SCALE` tokens of a trace are one token here, a block of
512 is one block of the router, and a step's time is that of `SCALE` steps with `SCALE` times the prompt
tokens, context and pool. A hit is as long and a prefill takes as long as it would; what gets coarser is
when a request may join a batch. The scheduler's `LOT` is scaled, too.

Load: `--load` 0.7 means 70% of the requests a second that the cluster serves, with our router, when
more come than it can serve (`--busy`: seconds of one replica that a request takes then; measured first
where it is not given). Each policy gets the same arrivals. Larger clusters get several copies of a
trace, with prompts of their own, each shifted in time: `--copies`. `--seed` takes another part of the
trace and moves each arrival by up to 0.1 s.

`--light` replaces schedulers and caches by a model (`routing_light.py`): for 128 and 1,000 replicas.

Not simulated: sockets, tokenizing, the network's delays but for `REPORT` (reports of load, KV events).
"""

import argparse
import heapq
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from routing_light import LightReplica
from routing_peers import PEERS, Peer
from schedule_sim import ALONE, BESIDE, PROMPTS

from ramify.actors.cache.cache import RadixCache
from ramify.actors.kit.blocks import BlockHasher
from ramify.actors.routing.router import Policy, ReplicaRouter
from ramify.actors.scheduler import core as scheduler_core
from ramify.actors.scheduler import prompts as scheduler_prompts
from ramify.actors.scheduler.core import Scheduler
from ramify.protocol import messages as m
from ramify.protocol.cluster import LOT, KvEvents, ListenKv, ReplicaLoad
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.plan import ExecutorInfo, StepPlan, StepResult, pack, unpack
from ramify.protocol.sampling import SamplingParams

DATA = Path(__file__).resolve().parent.parent.parent / "shared/data/workloads"
SCALE = 8
BLOCK = 512  # tokens of a trace's block
REPORT = 0.1  # seconds between a replica's reports of load, with its KV events; peers scrape in 0.05
SAMPLE = 0.5  # seconds between samples of the queues
_OUTPUT = 1 << 30  # tokens from there on are outputs: no prompt has them


@dataclass
class Request:
    number: int
    arrives: float
    blocks: list[int]
    prompt: int  # tokens, scaled
    output: int
    session: int
    tenant: int
    replica: int = -1
    first: float = -1.0
    ended: float = -1.0
    cached: int = 0
    computed: int = 0
    missed: int = 0  # blocks, as the gateway believed


def step_seconds(prompt: int, decodes: int, context: int) -> float:
    """Of `SCALE` real steps that together do what one does here."""
    if not prompt and not decodes:
        return 0.0
    decode = 4.25 + 0.009 * decodes + 0.0000312 * SCALE * context
    if not decodes:
        return float(np.interp(SCALE * prompt, PROMPTS, ALONE)) / 1e3
    if not prompt:
        return SCALE * decode / 1e3
    alone = float(np.interp(prompt, PROMPTS, ALONE))
    beside = float(np.interp(prompt, PROMPTS, BESIDE))
    mixed = alone + (0.3 + 0.7 * decodes / 62) * (beside - alone)
    return SCALE * max(mixed, decode) / 1e3


def schedule_config() -> ScheduleConfig:
    """The defaults, with scaled tokens."""
    known = ScheduleConfig()
    return ScheduleConfig(
        itl_target_ms=SCALE * known.itl_target_ms,
        mixed_tokens=known.mixed_tokens // SCALE,
        ahead_tokens=known.ahead_tokens // SCALE,
        max_waiting=1 << 20,
    )


def settings(options: argparse.Namespace) -> tuple[ExecutorInfo, ScheduleConfig]:
    """Of a replica, in scaled tokens."""
    info = ExecutorInfo(
        model="sim", architecture="", parameters=0, vocab_size=1 << 31,
        context=1 << 20, page_size=1, pages=options.pool // SCALE, max_rows=options.rows,
        step_tokens=8192 // SCALE, device="", dtype="", attention="", eos_token_ids=[],
        kv_bytes_per_token=1, load_seconds=0.0,
    )  # fmt: skip
    return info, schedule_config()


class Replica:
    """The real scheduler and cache."""

    def __init__(self, sim: "Simulation", number: int) -> None:
        info, config = settings(sim.options)
        self.sim, self.number = sim, number
        self.core = Scheduler(info, config)
        self.cache = RadixCache(info.pages)
        self.free_at = 0.0
        self.busy = 0.0
        self.lengths: dict[int, int] = {}
        self.dirty = True
        self.heard: dict[int, int] = {}  # by router
        self.outputs = number << 20

    def submit(self, request: Request, front: int) -> None:
        sim = self.sim
        branch = ident = request.number + 1 << 32
        self.cache.open_branch(m.OpenBranch(branch, str(request.tenant)))
        self.cache.extend_branch(m.ExtendBranch(branch, sim.tokens(request)))
        self.heard[front] = self.heard.get(front, 0) + 1
        sampling = SamplingParams()
        self.turn(m.Submit(ident, branch, request.prompt, request.output, sampling, arrived=sim.now))

    def turn(self, event: m.SchedulerEvent) -> None:
        sim, core = self.sim, self.core
        self.dirty = True
        core.handle(event, sim.now)
        while True:
            while (plan := core.plan()) is not None:
                self.run(plan)
            settle = core.settle(sim.now)
            for _, tokens in core.deliver():
                self.told(tokens)
            if settle is None:
                return
            core.handle(self.cache.settle(settle, sim.now), sim.now)

    def told(self, tokens: m.Tokens) -> None:
        sim = self.sim
        for progress in tokens.progress:
            request = sim.requests[(progress.request >> 32) - 1]
            if request.first < 0:
                request.first = sim.now
                sim.started(request)
        for finished in tokens.finished:
            request = sim.requests[(finished.request >> 32) - 1]
            if finished.reason == "error":
                raise RuntimeError(finished.message)
            request.ended = sim.now
            request.cached, request.computed = finished.cached, finished.computed
            self.cache.drop_branches(m.DropBranches([finished.request]))
            sim.ended(request)

    def run(self, plan: StepPlan) -> None:
        """The executor: one step after the other."""
        prompt = context = decodes = 0
        rows: list[int] = []
        for opened in plan.opens:
            self.lengths[opened.row] = opened.cached
        for extend in plan.extends:
            size = len(extend.tokens) // 4
            self.lengths[extend.row] += size
            prompt += size
            if extend.sample:
                rows.append(extend.row)
        for row in unpack(plan.decodes):
            rows.append(row)
            self.lengths[row] += 1
            decodes += 1
            context += self.lengths[row]
        took = step_seconds(prompt, decodes, context)
        sim = self.sim
        self.free_at = max(sim.now, self.free_at) + took
        self.busy += took
        first = _OUTPUT + self.outputs
        self.outputs += len(rows)
        tokens = pack(range(first, first + len(rows)))
        result = StepResult(plan.step, pack(rows), tokens, prompt + decodes, round(1e6 * took))
        sim.at(self.free_at, lambda: self.turn(result))

    def load(self) -> ReplicaLoad:
        return self.core.load()

    def listen(self, front: int) -> list[KvEvents]:
        return self.cache.listen_kv(ListenKv(front + 1))

    def news(self) -> list[KvEvents]:
        found: list[KvEvents] = []
        while self.cache.pending_news:
            found += self.cache.news()
        return found

    @property
    def running(self) -> int:
        return self.core.running

    @property
    def waiting(self) -> int:
        return self.core.waiting

    @property
    def kv(self) -> float:
        return self.cache.referenced / self.cache.total


@dataclass
class View:
    """What gateways of peers know."""

    count: int
    in_flight: np.ndarray = field(init=False)
    started: np.ndarray = field(init=False)
    waiting: np.ndarray = field(init=False)
    kv: np.ndarray = field(init=False)
    prefill_blocks: np.ndarray = field(init=False)
    decode_blocks: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        for name in ("in_flight", "started", "waiting", "kv", "prefill_blocks", "decode_blocks"):
            setattr(self, name, np.zeros(self.count))


class Ours:
    """`fronts` routers, which take turns; each knows what it has sent, and all replicas' reports.

    `sessions`: a conversation stays where it is, and moves if that one is `hot`; else each request is
    placed as if it were new.
    """

    def __init__(self, sim: "Simulation", *, sessions: bool, policy: Policy) -> None:
        self.sim, self.sessions = sim, sessions
        self.routers = [ReplicaRouter(policy, seed=front) for front in range(sim.options.fronts)]
        self.at: dict[int, tuple[int, float]] = {}  # session: its replica, since when
        self.moves = self.violations = 0
        self.seconds: list[float] = []
        for replica in sim.replicas:
            for front, router in enumerate(self.routers):
                router.joined(replica.number)
                for event in replica.listen(front):
                    router.events(replica.number, event)

    def choose(self, request: Request) -> int:
        sim = self.sim
        front = request.number % len(self.routers)
        router = self.routers[front]
        tokens, namespace = sim.tokens(request), str(request.tenant)
        begin = time.perf_counter()
        placement = None
        at = self.at.get(request.session) if self.sessions else None
        bound = router.bound
        if at is None or router.hot(at[0], at[2], sim.now, since=at[1]):
            placement = router.place(namespace, tokens, sim.now)
            assert placement is not None
            self.moves += at is not None and placement.replica != at[0]
        self.seconds.append(time.perf_counter() - begin)
        if placement is not None:
            chosen, computes, ticket = placement.replica, placement.computes, placement.ticket
            if router.work(chosen) - computes > bound + 1e-6:
                self.violations += 1
            self.at[request.session] = chosen, sim.now, request.prompt
        else:
            chosen, ticket = at[0], 0
            computes = max(0, request.prompt - at[2])
            self.at[request.session] = chosen, at[1], request.prompt
        router.sent(chosen, computes, sim.now, ticket, holds=request.prompt)
        return chosen

    def report(self, replica: Replica | LightReplica) -> None:
        """Its KV events, and its load as each router hears it."""
        for event in replica.news():
            for router in self.routers:
                assert router.events(replica.number, event)
        load = replica.load()
        for front, router in enumerate(self.routers):
            heard = replica.heard.get(front, 0)
            router.update(replica.number, replace(load, heard=heard), self.sim.now)


class Simulation:
    def __init__(self, options: argparse.Namespace, name: str, requests: list[Request]) -> None:
        self.options, self.name = options, name
        scheduler_prompts.LOT = scheduler_core.LOT = LOT // SCALE
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.requests = requests
        self.left = len(requests)
        self.replicas: list[Replica | LightReplica]
        if options.light:
            info, config = settings(options)
            hasher = BlockHasher()
            self.replicas = [
                LightReplica(self, number, info, config, step_seconds, hasher, LOT // SCALE)
                for number in range(options.replicas)
            ]
        else:
            self.replicas = [Replica(self, number) for number in range(options.replicas)]
        self.view = View(options.replicas)
        self.queues: list[tuple[float, float]] = []  # mean and most queued tokens
        self.ours: Ours | None = None
        self.peer: Peer | None = None
        if name.startswith("ours"):
            policy = Policy(**{"lot": LOT // SCALE, **json.loads(options.policy or "{}")})
            self.ours = Ours(self, sessions="sessions" in name, policy=policy)
        else:
            tree = options.tree * options.pool // BLOCK
            self.peer = PEERS[name](self.view, options.seed, tree)

    def at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (moment, next(self.count), act))

    def tokens(self, request: Request) -> bytes:
        """One number for all tokens of a block."""
        array = np.repeat(np.array(request.blocks, dtype=np.int32), BLOCK // SCALE)
        return array[: request.prompt].tobytes()

    def run(self) -> None:
        if self.requests:
            self.at(self.requests[0].arrives, lambda: self.arrive(0))
        self.at(0.0, self.report)
        self.at(0.0, self.sample)
        while self.left:
            self.now, _, act = heapq.heappop(self.events)
            act()

    def arrive(self, number: int) -> None:
        request = self.requests[number]
        if number + 1 < len(self.requests):
            self.at(self.requests[number + 1].arrives, lambda: self.arrive(number + 1))
        front = 0
        if self.ours is not None:
            front = request.number % len(self.ours.routers)
            request.replica = self.ours.choose(request)
        elif self.peer is not None:
            depths = None
            if self.options.track:
                depths = self.peer.sent.depths(request.blocks, self.view.count)
            request.replica = self.peer.choose(request)
            if depths is not None:
                request.missed = len(request.blocks) - int(depths[request.replica])
        view = self.view
        view.in_flight[request.replica] += 1
        view.prefill_blocks[request.replica] += request.missed
        view.decode_blocks[request.replica] += len(request.blocks)
        self.replicas[request.replica].submit(request, front)

    def started(self, request: Request) -> None:
        self.view.started[request.replica] += 1
        self.view.prefill_blocks[request.replica] -= request.missed

    def ended(self, request: Request) -> None:
        self.left -= 1
        self.view.in_flight[request.replica] -= 1
        self.view.started[request.replica] -= 1
        self.view.decode_blocks[request.replica] -= len(request.blocks)

    def report(self) -> None:
        for replica in self.replicas:
            if replica.dirty:
                replica.dirty = False
                if self.ours is not None:
                    self.ours.report(replica)
                else:
                    self.view.waiting[replica.number] = replica.waiting
                    self.view.kv[replica.number] = replica.kv
        self.at(self.now + (REPORT if self.ours is not None else REPORT / 2), self.report)

    def sample(self) -> None:
        queued = [replica.load().queued if replica.running else 0 for replica in self.replicas]
        self.queues.append((statistics.fmean(queued), max(queued)))
        self.at(self.now + SAMPLE, self.sample)

    def row(self, wall: float) -> dict[str, float | str]:
        done = sorted(self.requests, key=lambda r: r.ended)
        skip = [r for r in self.requests if r.arrives >= self.options.warm * self.requests[-1].arrives]
        ttft = np.array([r.first - r.arrives for r in skip])
        prompt = sum(r.prompt for r in skip)
        hit = sum(r.cached for r in skip) / prompt
        last = self.requests[-1].arrives
        mean = statistics.fmean(q[0] for q in self.queues)
        most = statistics.fmean(q[1] for q in self.queues)
        found: dict[str, float | str] = {
            "policy": self.name,
            "hit": round(100 * hit, 1),
            "p50": round(1e3 * float(np.percentile(ttft, 50))),
            "p90": round(1e3 * float(np.percentile(ttft, 90))),
            "p99": round(1e3 * float(np.percentile(ttft, 99))),
            "mean": round(1e3 * float(ttft.mean())),
            "req_s": round(len(done) / done[-1].ended, 2),
            "late_s": round(done[-1].ended - last, 1),
            "busy": round(100 * sum(r.busy for r in self.replicas) / len(self.replicas) / self.now, 1),
            "imbalance": round(most / mean, 2) if mean else 0.0,
            "worst_s": round(float(ttft.max()), 1),
            "wall": round(wall),
        }
        if self.ours is not None:
            micros = 1e6 * statistics.median(self.ours.seconds)
            found |= {"us": round(micros), "moves": self.ours.moves, "over": self.ours.violations}
        return found


# --- loads ----------------------------------------------------------------------------------


def mooncake(options: argparse.Namespace, name: str) -> list[tuple[float, list[int], int, int, int]]:
    """(arrives, blocks, prompt, output, tenant), times of the trace."""
    found = []
    for line in (DATA / f"trace_mooncake_{name}.jsonl").open():
        row = json.loads(line)
        prompt = min(row["input_length"], options.pool // 2)
        found.append((row["timestamp"] / 1e3, row["hash_ids"], prompt, row["output_length"], 0))
    return found


def azure(options: argparse.Namespace, name: str) -> list[tuple[float, list[int], int, int, int]]:
    """Arrivals and sizes only are known: each prompt is its own, behind one of 64 system prompts of a
    block (by Zipf's law), each with a tenant of its own."""
    dice = random.Random(options.seed)
    fresh = itertools.count(1000)
    weights = [1 / (i + 1) for i in range(64)]
    found = []
    begin = None
    for line in (DATA / f"trace_azure_{name}.jsonl").open():
        row = json.loads(line)
        clock = row["timestamp"].split()[1].split(":")
        moment = 3600 * int(clock[0]) + 60 * int(clock[1]) + float(clock[2])
        begin = moment if begin is None else begin
        app = dice.choices(range(64), weights)[0]
        prompt = row["input_tokens"] + BLOCK
        blocks = [app, *(next(fresh) for _ in range(-(-row["input_tokens"] // BLOCK)))]
        found.append((moment - begin, blocks, prompt, max(1, row["output_tokens"]), app))
    return found


def hot(options: argparse.Namespace, name: str) -> list[tuple[float, list[int], int, int, int]]:
    """One prefix of 16,384 tokens is in 60% of the requests, with 1,024 tokens of their own; others
    share nothing, 2,048 to 8,192 tokens."""
    dice = random.Random(options.seed)
    fresh = itertools.count(1000)
    found = []
    for i in range(4000):
        if dice.random() < 0.6:
            blocks = [*range(32), next(fresh), next(fresh)]
        else:
            blocks = [next(fresh) for _ in range(dice.randint(4, 16))]
        found.append((float(i), blocks, BLOCK * len(blocks), dice.randint(50, 300), 0))
    return found


def slow(options: argparse.Namespace, name: str) -> list[tuple[float, list[int], int, int, int]]:
    """Bursts of 40 prompts: one in ten has 60,000 tokens, which take 1.4 s; conversations of 4 turns."""
    dice = random.Random(options.seed)
    fresh = itertools.count(1000)
    found = []
    talks: list[list[int]] = []
    for i in range(4000):
        if talks and dice.random() < 0.6:
            blocks = [*talks.pop(dice.randrange(len(talks))), next(fresh), next(fresh)]
        else:
            blocks = [next(fresh) for _ in range(118 if dice.random() < 0.1 else dice.randint(2, 8))]
        if dice.random() < 0.75:
            talks.append(blocks)
        found.append((float(i // 40 * 40), blocks, BLOCK * len(blocks), dice.randint(50, 300), 0))
    return found


def misses(options: argparse.Namespace, name: str) -> list[tuple[float, list[int], int, int, int]]:
    """Half of the requests are agents' turns on long prefixes (large trees), half are short one-off
    questions with long answers (small trees, much to decode)."""
    dice = random.Random(options.seed)
    fresh = itertools.count(1000)
    talks = [[next(fresh) for _ in range(40)] for _ in range(4 * options.replicas)]
    found = []
    for i in range(4000):
        if dice.random() < 0.5:
            which = dice.randrange(len(talks))
            talks[which] = blocks = [*talks[which][:100], next(fresh)]
            output = 60
        else:
            blocks, output = [next(fresh)], dice.randint(400, 1200)
        found.append((float(i), blocks, BLOCK * len(blocks), output, 0))
    return found


LOADS = {
    "mooncake": (mooncake, "conversation"),
    "synthetic": (mooncake, "synthetic"),
    "azure-code": (azure, "code"),
    "azure-conv": (azure, "conv"),
    "hot": (hot, ""),
    "slow": (slow, ""),
    "misses": (misses, ""),
}


def requests_of(options: argparse.Namespace) -> list[Request]:
    make, name = LOADS[options.workload]
    rows = make(options, name)
    count = options.requests or len(rows)
    begin = options.seed * len(rows) // 6 % max(1, len(rows) - count + 1)
    rows = rows[begin : begin + count]
    jitter = random.Random(options.seed)
    span = rows[-1][0] - rows[0][0] or 1.0
    shift = max(max(row[1]) for row in rows) + 1
    merged = []
    for copy in range(options.copies):
        offset = copy / options.copies
        for i, (moment, blocks, prompt, output, tenant) in enumerate(rows):
            at = ((moment - rows[0][0]) / span + offset) % 1.0 if options.copies > 1 else (
                (moment - rows[0][0]) / span
            )  # fmt: skip
            mine = blocks if not copy else [block + copy * shift for block in blocks]
            merged.append((at, copy, i, mine, prompt, output, tenant + 1000 * copy))
    merged.sort(key=lambda row: row[:3])
    duration = len(merged) * options.busy / (options.load * options.replicas)
    if options.seed:  # within 0.1 s
        merged = [(max(0.0, row[0] + jitter.uniform(-0.1, 0.1) / duration), *row[1:]) for row in merged]
        merged.sort(key=lambda row: row[:3])
    found: list[Request] = []
    talks: dict[int, int] = {}  # last whole block: session
    sessions = itertools.count()
    for number, (at, _, _, blocks, prompt, output, tenant) in enumerate(merged):
        size, out = max(1, prompt // SCALE), max(1, round(output / SCALE))
        session = -1
        for block in reversed(blocks[1:]):  # the first one is everybody's
            if block in talks:
                session = talks[block]
                break
        if session < 0:
            session = next(sessions)
        whole = prompt // BLOCK
        if whole > 1:
            talks[blocks[whole - 1]] = session
        found.append(Request(number, at * duration, blocks, size, out, session, tenant))
    return found


def capacity(options: argparse.Namespace) -> float:
    """Seconds of a replica that a request takes when all are overloaded, with our router."""
    asked, options.busy = options.load, 0.02
    for options.load in (1.0, 1.5):  # all at once; then half as many again as it served then
        sim = Simulation(options, "ours-sessions", requests_of(options))
        sim.run()
        ends = sorted(request.ended for request in sim.requests)
        low, high = len(ends) // 4, 3 * len(ends) // 4
        options.busy = options.replicas * (ends[high] - ends[low]) / (high - low)
    options.load = asked
    return options.busy


def arguments(about: str, **other: int) -> argparse.ArgumentParser:
    """What a run is made of. `other`: defaults that are not those of the simulation."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("workload", choices=sorted(LOADS))
    everyone = ["ours", "ours-sessions", *PEERS]
    parser.add_argument("--policies", nargs="+", choices=everyone, default=everyone)
    parser.add_argument("--policy", help="JSON with other weights for ours", default="")
    for name, value in (
        ("replicas", 4), ("copies", 1), ("requests", 0), ("pool", 600_000), ("rows", 256),
        ("fronts", 2), ("seed", 0), ("tree", 2),
    ):  # fmt: skip
        default = other.get(name, value)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default {default})")
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--busy", type=float, default=0.0, help="seconds; 0: measured by one run")
    parser.add_argument("--warm", type=float, default=0.2, help="share that is not counted")
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--light", action="store_true", help="model schedulers and caches, see above")
    options = parser.parse_args()
    options.track = False
    if not options.busy:
        options.busy = capacity(options)
        print(f"work of a request: {options.busy:.3f} s of a replica", flush=True)
    rows = []
    head = None
    for name in options.policies:
        options.track = name == "dynamo"
        begin = time.perf_counter()
        sim = Simulation(options, name, requests_of(options))
        sim.run()
        row = sim.row(time.perf_counter() - begin)
        rows.append(row)
        if head is None:
            head = list(row)
            print(" | ".join(head), flush=True)
        print(" | ".join(f"{row.get(key, '')}" for key in dict.fromkeys([*head, *row])), flush=True)
    if options.json:
        shown = {key: str(value) for key, value in vars(options).items()}
        options.json.write_text(json.dumps({"options": shown, "rows": rows}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
