"""How requests share a GPU, in simulated time: the engine's scheduler and cache, a clock that jumps.

The scheduler's core and the radix cache are the real ones; the executor is a table of step times
measured on a GPU. A run of 64 sessions x 8 turns takes some seconds of one core, whatever the GPU
would take, and comes out the same each time. So policies are compared here first; a GPU then has to
confirm. Not simulated: sampling, the event loops' own work beyond fixed delays, sockets, and that a
prompt token costs more attention behind a long prefix.

    chat        conversations as of `ramify bench chat`; `--append-ahead MS` sends each input earlier
    throughput  256 requests at once, 100-1024 tokens in and out, as of `ramify bench throughput`
    prompts     16 sessions with short prompts and pauses, beside sessions with long prompts
    newcomer    5 clients hold all rows with long generations; others come for one short answer
    crowd       60 sessions of one client ask for more KV than the pool holds, again and again
    rounds      64 streams come at once, some times over, on a machine whose steps scatter (`--noise`)

    python benchmarks/schedule_sim.py chat --append-ahead 300 --itl-target-ms 15
    python benchmarks/schedule_sim.py prompts --long 60000 --long-sessions 2
    python benchmarks/schedule_sim.py newcomer --owners
    python benchmarks/schedule_sim.py crowd --cpu --pages 4096 --rows 64 --context 2048 --seconds 300
    python benchmarks/schedule_sim.py rounds --cpu --noise 1.0 --seeds 1000

`rounds` with `--seeds N` runs N times with each `--noise`, and says in how many of them a round stalled:
until its last first token a step took fewer than `STALL` prompt tokens. With noise x a step lasts
exp(x * normal) times as long, and in bursts of up to a second, every five seconds, 1 + 10 x times that.
"""

import argparse
import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from ramify.actors.cache.cache import RadixCache
from ramify.actors.scheduler.core import Scheduler
from ramify.protocol import messages as m
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.plan import ExecutorInfo, StepPlan, StepResult, pack, unpack
from ramify.protocol.sampling import SamplingParams

# Milliseconds. A frame from a client to the scheduler and back; between scheduler and executor.
INWARD, OUTWARD, LINK = 1.2, 0.8, 0.1
FRAME = 0.06  # a client's work for each frame that it sends
HOST_GRAPH, HOST_EAGER = 1.0, 14.0  # what launching a step takes its host

# Llama-3.1-8B on an H200, prefixes of 700 tokens, decodes at context 800 (docs/log/scheduling.md):
# steps of so many prompt tokens, with no decodes and with 62 of them.
PROMPTS = [0, 64, 128, 192, 256, 320, 384, 512, 768, 1024, 2048, 4096, 8192, 16384]
ALONE = [4.2, 5.2, 5.87, 6.99, 8.04, 9.34, 10.3, 13.0, 18.5, 24.4, 46.8, 93.5, 188.0, 376.0]
EXTEND_SIZES = [16, 32, 64, *range(128, 513, 64)]  # that the H200 captures for this model
BESIDE = [6.37, 7.86, 9.04, 10.0, 11.6, 12.9, 14.3, 17.0, 22.4, 28.1, 50.0, 97.0, 191.5, 380.0]


@dataclass
class StepWork:
    """Of a step: tokens in so many extends, and decodes over so many tokens."""

    prompt: int = 0
    runs: int = 0
    decodes: int = 0
    context: int = 0


STALL = 64  # tokens: four times the least that a step may take
STREAMS = 64
MARKS = ("p50", 0.5), ("p90", 0.9), ("max", 1.0)
CPU = (
    5.0,
    0.3,
    0.15,
)  # milliseconds of a step, of each decode and prompt token: a small model on two cores


class Noise:
    """How many times longer than it should a step takes that begins at `now` (milliseconds)."""

    def __init__(self, size: float, dice: random.Random) -> None:
        self._size = size
        self._dice = dice
        self._burst = False
        self._until = 0.0

    def factor(self, now: float) -> float:
        if not self._size:
            return 1.0
        while now >= self._until:  # a tenth of the time is somebody else's
            self._burst = not self._burst
            self._until += self._dice.uniform(0.0, 1000.0 if self._burst else 9000.0)
        burst = 1 + 10 * self._size if self._burst else 1.0
        return burst * math.exp(self._size * self._dice.gauss(0.0, 1.0))


@dataclass
class CpuDevice:
    """A step's parts add up, and its host is itself."""

    def step(self, work: StepWork) -> tuple[float, float]:
        base, decode, prompt = CPU
        return base + decode * work.decodes + prompt * work.prompt, 0.05


@dataclass
class Device:
    """`graph_lines`: up to so many a step with extends is a CUDA graph, as `rehearsal` finds out."""

    graph_lines: int

    def step(self, work: StepWork) -> tuple[float, float]:
        """Milliseconds of the device and of its host."""
        if not work.prompt and not work.decodes:
            return 0.05, 0.05
        if not work.prompt:
            return 4.25 + 0.009 * work.decodes + 0.0000312 * work.context, HOST_GRAPH
        alone, beside = (float(np.interp(work.prompt, PROMPTS, times)) for times in (ALONE, BESIDE))
        share = 0.3 + 0.7 * work.decodes / 62 if work.decodes else 0.0
        graph = work.prompt + work.decodes <= self.graph_lines and work.runs <= 32
        return alone + share * (beside - alone), HOST_GRAPH if graph else HOST_EAGER


@dataclass
class SimulatedAnswer:
    """One generation as its client sees it. Times in milliseconds."""

    branch: int
    sent: float
    done: Callable[["SimulatedAnswer"], None]
    arrivals: list[float] = field(default_factory=list)
    steps: int = 0  # that were begun before it came
    waited: int = 0  # steps that were begun until its first token

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.arrivals)]


class Simulation:
    """Events in order of their time, in milliseconds."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        info = ExecutorInfo(
            model="sim", architecture="", parameters=0, vocab_size=10_000, context=options.context,
            page_size=1, pages=options.pages, max_rows=options.rows, step_tokens=options.step_tokens,
            device="cpu" if options.cpu else "", dtype="", attention="", eos_token_ids=[],
            kv_bytes_per_token=1, load_seconds=0.0, extend_sizes=[] if options.cpu else EXTEND_SIZES,
            host_blocks=getattr(options, "host", 0),
        )  # fmt: skip
        names = "itl_target_ms", "mixed_tokens", "ahead_tokens", "quantum_steps"
        config = ScheduleConfig(**{name: getattr(options, name) for name in names})
        self.core = Scheduler(info, config)
        self.cache = RadixCache(info.pages, host_blocks=info.host_blocks)
        self.device = CpuDevice() if options.cpu else Device(options.graph_lines)
        self.dice = random.Random(options.seed)
        self.noise = Noise(options.noise[0], random.Random(options.seed + 1))
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.requests: dict[int, SimulatedAnswer] = {}
        self.delivered = 0
        self.client_free = 0.0
        # the executor
        self.plans: deque[StepPlan] = deque()
        self.pending: deque[tuple[float, StepResult]] = deque()
        self.host_free = self.device_free = 0.0
        self.lengths: dict[int, int] = {}
        self.idle = 0.0
        self.steps: list[tuple[float, StepWork, float]] = []  # begin, work, milliseconds

    def at(self, time: float, act: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, act))

    def run(self) -> None:
        while self.events:
            self.now, _, act = heapq.heappop(self.events)
            act()

    # --- clients ---

    def send(self, act: Callable[[], None]) -> float:
        """One frame; returns when it left."""
        self.client_free = max(self.now, self.client_free) + FRAME
        self.at(self.client_free + INWARD, act)
        return self.client_free - FRAME

    def open(self, branch: int) -> None:
        self.cache.open_branch(m.OpenBranch(branch))

    def append(self, branch: int, count: int) -> None:
        tokens = pack(self.dice.choices(range(10_000), k=count))
        self.cache.extend_branch(m.ExtendBranch(branch, tokens))

    def submit(
        self,
        answer: SimulatedAnswer,
        session: int,
        prompt: int,
        output: int,
        priority: int = 0,
        owner: str = "",
    ) -> None:
        self.count += 1
        request = (session << 32) + self.count
        self.requests[request] = answer
        answer.steps = len(self.steps)
        self.turn(
            m.Submit(
                request, answer.branch, prompt, output, SamplingParams(), priority=priority,
                arrived=self.now, owner=owner,
            )
        )  # fmt: skip

    def told(self, tokens: m.Tokens) -> None:
        for progress in tokens.progress:
            answer = self.requests[progress.request]
            if not answer.arrivals:
                answer.waited = len(self.steps) - answer.steps
            count = len(progress.tokens) // 4
            answer.arrivals += [self.now] * count
            self.delivered += count
        for finished in tokens.finished:
            answer = self.requests.pop(finished.request)
            if finished.output:
                answer.done(answer)

    # --- the engine ---

    def turn(self, event: m.SchedulerEvent) -> None:
        """As `SchedulerActor` does."""
        core, seconds = self.core, self.now / 1e3
        core.handle(event, seconds)
        while (plan := core.plan()) is not None:
            self.at(self.now + LINK, lambda plan=plan: self.planned(plan))  # type: ignore[misc]
        if (settle := core.settle(seconds)) is not None:
            answer = self.cache.settle(settle, seconds)
            self.at(self.now + LINK, lambda: self.turn(answer))
        for _, tokens in core.deliver():
            self.at(self.now + OUTWARD, lambda tokens=tokens: self.told(tokens))  # type: ignore[misc]

    def planned(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.at(max(self.now, self.host_free), self.launch)

    def launch(self) -> None:
        """The executor's loop: at most two steps on the device."""
        if self.now < self.host_free:
            self.at(self.host_free, self.launch)
            return
        while self.pending and self.pending[0][0] <= self.now:
            _, result = self.pending.popleft()
            self.at(self.now + LINK, lambda result=result: self.turn(result))  # type: ignore[misc]
        if len(self.pending) == 2 or (self.pending and not self.plans):
            self.at(self.pending[0][0], self.launch)
        elif self.plans:
            plan = self.plans.popleft()
            work, rows = self.apply(plan)
            moves = self.moves(plan)
            end = self.issue(work, moves)
            tokens = pack(self.dice.choices(range(1, 10_000), k=len(rows)))
            micros = round(1e3 * self.steps[-1][2])
            result = StepResult(
                plan.step, pack(rows), tokens, work.prompt + work.decodes, micros,
                load_us=round(1e3 * moves),
            )  # fmt: skip
            self.pending.append((end, result))
            self.at(self.host_free, self.launch)

    def apply(self, plan: StepPlan) -> tuple[StepWork, list[int]]:
        """What the plan runs, and the rows that it samples."""
        for opened in plan.opens:
            self.lengths[opened.row] = opened.cached
        work, rows = StepWork(), []
        for extend in plan.extends:
            size = len(extend.tokens) // 4
            self.lengths[extend.row] += size
            if extend.sample:
                rows.append(extend.row)
            if extend.sample and size == 1:  # the executor makes it a decode
                work.decodes += 1
                work.context += self.lengths[extend.row]
            else:
                work.prompt, work.runs = work.prompt + size, work.runs + 1
        for row in unpack(plan.decodes):
            rows.append(row)
            self.lengths[row] += 1
            work.decodes += 1
            work.context += self.lengths[row]
        return work, rows

    def moves(self, plan: StepPlan) -> float:
        """Milliseconds that the plan's copies between tiers hold up its step."""
        return 0.0

    def issue(self, work: StepWork, moves: float = 0.0) -> float:
        """Launch a step now; when it is over."""
        device, host = self.device.step(work)
        device = device * self.noise.factor(self.now) + moves
        begin = max(self.device_free, self.now + min(host, 0.5))
        end = max(begin + device, self.now + host)
        self.idle += begin - self.device_free
        self.device_free, self.host_free = end, self.now + host
        self.steps.append((begin, work, end - begin))
        return end

    def report(self) -> str:
        core = self.core
        computed = sum(work.prompt + work.decodes for _, work, _ in self.steps)
        causes = ", ".join(f"{count} for {cause}" for cause, count in core.lifecycle.retractions.items())
        return (
            f"{1e3 * self.delivered / self.now:.0f} tok/s; {len(self.steps)} steps, "
            f"device idle {self.idle:.0f} of {self.now:.0f} ms; retracted: {causes or 'none'}, "
            f"computed twice: {core.lifecycle.computed_twice} of {self.delivered} tokens; "
            f"computed / delivered: {computed / max(1, self.delivered):.2f}"
        )


def chat(sim: Simulation, options: argparse.Namespace) -> Callable[[], str]:
    """`options.sessions` conversations of `options.turns` turns."""
    answers: list[SimulatedAnswer] = []
    turns = [0] * options.sessions
    positions = [0] * options.sessions

    def next_turn(number: int) -> None:
        if turns[number] == options.turns:
            return
        turns[number] += 1
        answer = SimulatedAnswer(number + 1, 0.0, finish)
        if not options.append_ahead:
            answer.sent = sim.send(lambda: arrive(answer, append=True, output=True))
            return
        sim.send(lambda: arrive(SimulatedAnswer(number + 1, 0.0, finish), append=True, output=False))

        def later() -> None:
            answer.sent = sim.send(lambda: arrive(answer, append=False, output=True))

        sim.at(sim.now + options.append_ahead, later)

    def arrive(answer: SimulatedAnswer, *, append: bool, output: bool) -> None:
        number = answer.branch - 1
        if append:
            sim.append(answer.branch, options.input)
            positions[number] += options.input
        size, priority = (options.output, 0) if output else (0, -8)
        sim.submit(answer, answer.branch, positions[number], size, priority)

    def finish(answer: SimulatedAnswer) -> None:
        answers.append(answer)
        positions[answer.branch - 1] += options.output
        next_turn(answer.branch - 1)

    for number in range(options.sessions):
        sim.open(number + 1)
        begin = sim.dice.uniform(0.0, options.spread)
        sim.at(begin, lambda number=number: next_turn(number))  # type: ignore[misc]
    return lambda: _latencies(answers)


def throughput(sim: Simulation, options: argparse.Namespace) -> Callable[[], str]:
    """All requests at once, from 32 sessions."""
    answers: list[SimulatedAnswer] = []
    for number in range(options.requests):
        sim.open(number + 1)
        answer = SimulatedAnswer(number + 1, 0.0, answers.append)
        size, output = (sim.dice.randint(100, 1024) for _ in range(2))
        sim.append(answer.branch, size)
        answer.sent = sim.send(
            lambda answer=answer, size=size, output=output: sim.submit(  # type: ignore[misc]
                answer, answer.branch % 32 + 1, size, output
            )
        )
    return lambda: _latencies(answers)


def prompts(sim: Simulation, options: argparse.Namespace) -> Callable[[], str]:
    """Short prompts with pauses beside long ones, each session one after the other."""
    until = 1e3 * options.seconds
    shorts: list[SimulatedAnswer] = []
    longs: list[SimulatedAnswer] = []

    def begin(session: int, size: int, output: int, pause: float, into: list[SimulatedAnswer]) -> None:
        if sim.now >= until:
            return
        sim.count += 1
        branch = sim.count
        sim.open(branch)
        sim.append(branch, size)

        def finish(answer: SimulatedAnswer) -> None:
            into.append(answer)
            sim.cache.drop_branches(m.DropBranches([branch]))
            rest = sim.dice.expovariate(1 / pause) if pause else 0.0
            sim.at(sim.now + rest, lambda: begin(session, size, output, pause, into))

        answer = SimulatedAnswer(branch, 0.0, finish)
        priority = options.short_priority if into is shorts else options.long_priority
        answer.sent = sim.send(lambda: sim.submit(answer, session, size, output, priority))

    for number in range(options.short_sessions):
        start = sim.dice.uniform(0.0, 500.0)
        sim.at(start, lambda number=number: begin(number + 1, 128, 32, 400.0, shorts))  # type: ignore[misc]
    for number in range(options.long_sessions):
        sim.at(0.0, lambda number=number: begin(number + 901, options.long, 16, 0.0, longs))  # type: ignore[misc]
    return lambda: (
        f"short: {_latencies(shorts)}\nlong:  {_latencies(longs) if len(longs) > 1 else 'none'}"
    )


def newcomer(sim: Simulation, options: argparse.Namespace) -> Callable[[], str]:
    """5 clients with 64 generations each and more waiting; every 300 ms somebody new."""
    others: list[SimulatedAnswer] = []
    new: list[SimulatedAnswer] = []
    until = 1e3 * options.seconds

    def crowd(number: int) -> None:
        if sim.now >= until:
            return
        sim.count += 1
        branch = sim.count
        sim.open(branch)
        sim.append(branch, 64)

        def finish(answer: SimulatedAnswer) -> None:
            others.append(answer)
            crowd(number)

        owner = "crowd" if options.owners else ""
        answer = SimulatedAnswer(branch, 0.0, finish)
        answer.sent = sim.send(
            lambda: sim.submit(answer, number + 1, 64, 1024, options.long_priority, owner)
        )

    def come(number: int) -> None:
        sim.count += 1
        branch = sim.count
        sim.open(branch)
        sim.append(branch, 128)
        answer = SimulatedAnswer(branch, 0.0, new.append)
        owner = f"new {number}" if options.owners else ""
        answer.sent = sim.send(
            lambda: sim.submit(answer, 1000 + number, 128, 32, options.short_priority, owner)
        )
        if sim.now + 300 < until:
            sim.at(sim.now + 300, lambda: come(number + 1))

    for number in range(5):
        for _ in range(64):
            sim.at(0.0, lambda number=number: crowd(number))  # type: ignore[misc]
    sim.at(1000.0, lambda: come(0))
    return lambda: (
        f"newcomers: {_latencies(new)}; steps until the first token {_spread([a.waited for a in new])}\n"
        f"the crowd: {_latencies(others)}"
    )


def crowd(sim: Simulation, options: argparse.Namespace) -> Callable[[], str]:
    """60 sessions, turns of 100 + 500 tokens on a branch until it is full; a newcomer each 2 seconds."""
    others: list[SimulatedAnswer] = []
    new: list[SimulatedAnswer] = []
    until = 1e3 * options.seconds

    def turn(session: int, branch: int, position: int) -> None:
        if sim.now >= until:
            return
        if position + 600 >= options.context:
            sim.cache.drop_branches(m.DropBranches([branch]))
            sim.count += 1
            branch, position = sim.count, 0
            sim.open(branch)
        sim.append(branch, 100)

        def finish(answer: SimulatedAnswer) -> None:
            others.append(answer)
            rest = sim.dice.expovariate(1 / options.think) if options.think else 0.0
            sim.at(sim.now + rest, partial(turn, session, branch, position + 600))

        answer = SimulatedAnswer(branch, sim.now, finish)
        sim.submit(answer, session, position + 100, 500, 0, f"own {session}" if options.own else "crowd")

    def come(number: int) -> None:
        sim.count += 1
        branch = sim.count
        sim.open(branch)
        sim.append(branch, 24)
        answer = SimulatedAnswer(branch, sim.now, new.append)
        sim.submit(answer, 1000 + number, 24, 4, 0, f"new {number}")
        if sim.now + 2000 < until:
            sim.at(sim.now + 2000, lambda: come(number + 1))

    for number in range(60):
        sim.count += 1
        branch = sim.count
        sim.open(branch)
        sim.at(0.0, partial(turn, number + 1, branch, 0))
    sim.at(5000.0, lambda: come(0))
    return lambda: (
        f"newcomers: {_latencies(new)}; the longest {max(a.ttft for a in new):.0f} ms\n"
        f"the crowd: {_latencies(others)}\n"
        f"seconds of a turn until its first token: {_marks([a.ttft for a in others])}; "
        f"until its last: {_marks([a.arrivals[-1] - a.sent for a in others])}; "
        f"its longest pause: {_marks([max(a.gaps) for a in others])}"
    )


class Rounds:
    """`options.turns` times `STREAMS` new prompts at once, each round when the one before it has ended.

    `waited`: of each round, the steps until the last first token.
    """

    def __init__(self, sim: Simulation, options: argparse.Namespace) -> None:
        self._sim = sim
        self._options = options
        self._left = 0
        self._rounds = 0
        self._answers: list[SimulatedAnswer] = []
        self.waited: list[int] = []
        self._begin()

    def _begin(self) -> None:
        sim, options = self._sim, self._options
        self._rounds += 1
        self._left = STREAMS
        for number in range(STREAMS):
            sim.count += 1
            branch = sim.count
            sim.open(branch)
            sim.append(branch, options.input)
            answer = SimulatedAnswer(branch, sim.now, self._finish)
            self._answers.append(answer)
            output = options.output + number % 8  # so that not all end at once
            act = partial(sim.submit, answer, self._rounds * STREAMS + number, options.input, output)
            sim.at(sim.now + sim.dice.uniform(0.0, 100.0), act)

    def _finish(self, answer: SimulatedAnswer) -> None:
        self._sim.cache.drop_branches(m.DropBranches([answer.branch]))
        self._left -= 1
        if not self._left:
            self.waited.append(max(each.waited for each in self._answers[-STREAMS:]))
            if self._rounds < self._options.turns:
                self._begin()

    def __call__(self) -> str:
        return f"{_latencies(self._answers)}; steps until a round's last first token {self.waited}"


WORKLOADS = {
    "chat": chat, "throughput": throughput, "prompts": prompts, "newcomer": newcomer, "crowd": crowd,
    "rounds": Rounds,
}  # fmt: skip


def stalls(options: argparse.Namespace) -> None:
    """`rounds` with many seeds: how many of them stall, by noise."""
    shown = vars(options)

    def waited(noise: float, seed: int) -> list[int]:
        sim = Simulation(argparse.Namespace(**{**shown, "noise": [noise], "seed": seed}))
        rounds = Rounds(sim, options)
        sim.run()
        return rounds.waited

    usual, most = max(waited(0.0, 0)), STREAMS * options.input / STALL
    print(
        f"without noise: {usual} steps until a round's last first token; stalled: more than {most:.0f}"
    )
    seeds = range(options.seed, options.seed + options.seeds)
    for noise in options.noise:
        found = [max(waited(noise, seed)) for seed in seeds]
        bad = [seed for seed, steps in zip(seeds, found, strict=True) if steps > most]
        print(
            f"noise {noise}: {_spread(found)} max {max(found)}; stalled {len(bad)} {bad[:8]}", flush=True
        )


def _latencies(answers: list[SimulatedAnswer]) -> str:
    gaps = [gap for answer in answers for gap in answer.gaps]
    return f"TTFT {_spread([a.ttft for a in answers])}, ITL {_spread(gaps)} ms ({len(answers)})"


def _marks(values: Sequence[float]) -> str:
    """Milliseconds, in seconds."""
    found = sorted(values)
    shown = ", ".join(f"{name} {found[int(part * (len(found) - 1))] / 1e3:.1f}" for name, part in MARKS)
    return f"mean {statistics.fmean(found) / 1e3:.1f}, {shown}"


def _spread(values: Sequence[float]) -> str:
    marks = statistics.quantiles(values, n=100)
    shown = " ".join(f"p{percent} {marks[percent - 1]:.2f}" for percent in (50, 90, 99))
    return f"mean {statistics.fmean(values):.2f} {shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = ScheduleConfig()
    parser.add_argument("workload", choices=sorted(WORKLOADS), nargs="?", default="chat")
    for name, value in (
        ("sessions", 64), ("turns", 8), ("input", 128), ("output", 64), ("seed", 0),
        ("step-tokens", 8192), ("mixed-tokens", known.mixed_tokens),
        ("ahead-tokens", known.ahead_tokens), ("quantum-steps", known.quantum_steps),
        ("graph-lines", 576), ("rows", 512), ("pages", 600_000), ("context", 131_072),
        ("requests", 256), ("seconds", 20), ("long", 60_000), ("long-sessions", 1),
        ("short-sessions", 16), ("long-priority", 0), ("short-priority", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value, help=f"(default {value})")
    target = known.itl_target_ms
    parser.add_argument("--itl-target-ms", type=float, default=target, help=f"(default {target})")
    parser.add_argument("--append-ahead", type=float, default=0.0, metavar="MS")
    parser.add_argument("--spread", type=float, default=0.0, metavar="MS", help="of their starts")
    parser.add_argument("--owners", action="store_true", help="newcomer: the 5 have one credential")
    parser.add_argument("--own", action="store_true", help="crowd: each session is a client of its own")
    parser.add_argument("--think", type=float, default=0.0, metavar="MS", help="crowd: between turns")
    parser.add_argument("--steps", action="store_true", help="print every step")
    parser.add_argument("--cpu", action="store_true", help="steps of a small model on a CPU")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0], help="of the steps' times")
    parser.add_argument("--seeds", type=int, default=1, help="rounds: so many, from --seed on")
    options = parser.parse_args()
    if options.seeds > 1:
        stalls(options)
        return
    made = Simulation(options)
    report = WORKLOADS[options.workload](made, options)
    made.run()
    if options.steps:
        for begin, work, took in made.steps:
            what = f"{work.prompt:5} prompt tokens in {work.runs:3} + {work.decodes:3} decodes"
            print(f"{begin:9.2f} ms: {what}, {took:.2f} ms")
    print(report())
    print(made.report())


if __name__ == "__main__":
    main()
