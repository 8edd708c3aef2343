"""How requests share a GPU, in simulated time: the engine's scheduler and cache, a clock that jumps.

The scheduler's core and the radix cache are the real ones; the executor is a table of step times
measured on a GPU, and clients are conversations as of `ramify bench chat`. A run of 64 sessions x 8
turns takes some seconds of one core, whatever the GPU would take, and comes out the same each
time. So policies are compared here first; a GPU then has to confirm. Not simulated: sampling, the
event loops' own work beyond fixed delays, sockets.

    python benchmarks/schedule_sim.py --append-ahead 300 --mixed-tokens 1024
"""

import argparse
import heapq
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
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

# Llama-3.1-8B on an H200, prefixes of 700 tokens, decodes at context 800 (docs/log.md): steps of
# so many prompt tokens, with no decodes and with 62 of them.
PROMPTS = [0, 64, 128, 192, 256, 320, 384, 512, 768, 1024, 2048, 4096, 8192, 16384]
ALONE = [4.2, 5.2, 5.87, 6.99, 8.04, 9.34, 10.3, 13.0, 18.5, 24.4, 46.8, 93.5, 188.0, 376.0]
BESIDE = [6.37, 7.86, 9.04, 10.0, 11.6, 12.9, 14.3, 17.0, 22.4, 28.1, 50.0, 97.0, 191.5, 380.0]


@dataclass
class Work:
    """Of a step: tokens in so many extends, and decodes over so many tokens."""

    prompt: int = 0
    runs: int = 0
    decodes: int = 0
    context: int = 0


@dataclass
class Device:
    """`graph_lines`: up to so many a step with extends is a CUDA graph, as `rehearsal` finds out."""

    graph_lines: int

    def step(self, work: Work) -> tuple[float, float]:
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
class Session:
    number: int
    turn: int = 0
    position: int = 0
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)


class Simulation:
    """Events in order of their time, in milliseconds."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        info = ExecutorInfo(
            model="sim", architecture="", parameters=0, vocab_size=10_000, context=8192, page_size=1,
            pages=600_000, max_rows=512, step_tokens=options.step_tokens, device="", dtype="",
            attention="", eos_token_ids=[], kv_bytes_per_token=1, load_seconds=0.0,
        )  # fmt: skip
        config = ScheduleConfig(mixed_tokens=options.mixed_tokens, ahead_tokens=options.ahead_tokens)
        self.core = Scheduler(info, config)
        self.cache = RadixCache(info.pages)
        self.device = Device(options.graph_lines)
        self.dice = random.Random(options.seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        # the executor
        self.plans: deque[StepPlan] = deque()
        self.pending: deque[tuple[float, StepResult]] = deque()
        self.host_free = self.device_free = 0.0
        self.lengths: dict[int, int] = {}
        self.idle = 0.0
        self.steps: list[tuple[float, Work, float]] = []  # begin, work, milliseconds
        # the clients
        self.client_free = 0.0
        self.sessions = [Session(i) for i in range(options.sessions)]
        self.requests: dict[int, Session] = {}
        self.ttft: list[float] = []
        self.gaps: list[float] = []

    def at(self, time: float, act: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, act))

    def run(self) -> None:
        for session in self.sessions:
            self.cache.open_branch(m.OpenBranch(session.number + 1))
            begin = self.dice.uniform(0.0, self.options.spread)
            self.at(begin, lambda session=session: self.next_turn(session))  # type: ignore[misc]
        while self.events:
            self.now, _, act = heapq.heappop(self.events)
            act()

    # --- clients ---

    def send(self, act: Callable[[], None]) -> float:
        """One frame; returns when it left."""
        self.client_free = max(self.now, self.client_free) + FRAME
        self.at(self.client_free + INWARD, act)
        return self.client_free - FRAME

    def next_turn(self, session: Session) -> None:
        if session.turn == self.options.turns:
            return
        session.turn += 1
        if not self.options.append_ahead:
            session.sent = self.send(lambda: self.arrive(session, append=True, output=True))
            return
        self.send(lambda: self.arrive(session, append=True, output=False))

        def later() -> None:
            session.sent = self.send(lambda: self.arrive(session, append=False, output=True))

        self.at(self.now + self.options.append_ahead, later)

    def arrive(self, session: Session, *, append: bool, output: bool) -> None:
        if append:
            tokens = pack(self.dice.choices(range(10_000), k=self.options.input))
            self.cache.extend_branch(m.ExtendBranch(session.number + 1, tokens))
            session.position += self.options.input
        self.count += 1
        request = (session.number + 1 << 32) + self.count
        self.requests[request] = session
        self.turn(
            m.Submit(
                request, session.number + 1, session.position, self.options.output if output else 0,
                SamplingParams(), priority=0 if output else -8, arrived=self.now,
            )
        )  # fmt: skip

    def told(self, tokens: m.Tokens) -> None:
        for progress in tokens.progress:
            session = self.requests[progress.request]
            session.arrivals += [self.now] * (len(progress.tokens) // 4)
        for finished in tokens.finished:
            session = self.requests.pop(finished.request)
            if not finished.output:
                continue
            times, session.arrivals = session.arrivals, []
            session.position += finished.output
            self.ttft.append(times[0] - session.sent)
            self.gaps += [b - a for a, b in pairwise(times)]
            self.next_turn(session)

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
            end = self.issue(work)
            tokens = pack(self.dice.choices(range(1, 10_000), k=len(rows)))
            result = StepResult(plan.step, pack(rows), tokens, work.prompt + work.decodes, 0)
            self.pending.append((end, result))
            self.at(self.host_free, self.launch)

    def apply(self, plan: StepPlan) -> tuple[Work, list[int]]:
        """What the plan runs, and the rows that it samples."""
        for opened in plan.opens:
            self.lengths[opened.row] = opened.cached
        work, rows = Work(), []
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

    def issue(self, work: Work) -> float:
        """Launch a step now; when it is over."""
        device, host = self.device.step(work)
        begin = max(self.device_free, self.now + min(host, 0.5))
        end = max(begin + device, self.now + host)
        self.idle += begin - self.device_free
        self.device_free, self.host_free = end, self.now + host
        self.steps.append((begin, work, end - begin))
        return end

    def report(self) -> str:
        options = self.options
        tokens = options.sessions * options.turns * options.output
        return (
            f"{1e3 * tokens / self.now:.0f} tok/s, TTFT {_spread(self.ttft)}, "
            f"ITL {_spread(self.gaps)} ms; "
            f"{len(self.steps)} steps, device idle {self.idle:.0f} of {self.now:.0f} ms"
        )


def _spread(values: list[float]) -> str:
    marks = statistics.quantiles(values, n=100)
    shown = " ".join(f"p{percent} {marks[percent - 1]:.2f}" for percent in (50, 90, 99))
    return f"mean {statistics.fmean(values):.2f} {shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = ScheduleConfig()
    for name, value in (
        ("sessions", 64), ("turns", 8), ("input", 128), ("output", 64), ("seed", 0),
        ("step-tokens", 8192), ("mixed-tokens", known.mixed_tokens),
        ("ahead-tokens", known.ahead_tokens), ("graph-lines", 576),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value, help=f"(default {value})")
    parser.add_argument("--append-ahead", type=float, default=0.0, metavar="MS")
    parser.add_argument("--spread", type=float, default=0.0, metavar="MS", help="of their starts")
    parser.add_argument("--steps", action="store_true", help="print every step")
    options = parser.parse_args()
    made = Simulation(options)
    made.run()
    if options.steps:
        for begin, work, took in made.steps:
            what = f"{work.prompt:5} prompt tokens in {work.runs:3} + {work.decodes:3} decodes"
            print(f"{begin:9.2f} ms: {what}, {took:.2f} ms")
    print(made.report())


if __name__ == "__main__":
    main()
