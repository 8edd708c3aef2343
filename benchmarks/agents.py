"""Coding agents in a pool too small for all of them, in simulated time: the cliff, and what mends it.

The scheduler's core and the radix cache are the real ones, as in `schedule_sim.py`; steps take what
the pool's device is said to do. Sessions are recorded ones, in a closed loop: the next turn is sent
after the recorded pause (at most 300 s) behind an answer. A session that is over makes room for another.

One token here stands for 16: pools, prompts, outputs and rates are a sixteenth. A step with decodes
lasts as long as 16 and takes the prompt tokens of 16. So the quantum is 4 steps and the target of steps
320 ms. The lots of the prompt queue stay 2,048 tokens, which stand for 32,768.

    python benchmarks/agents.py agent_sessions.jsonl --pool hybrid --sessions 16 96
    python benchmarks/agents.py agent_sessions.jsonl --only ours --tenant

Policies: `lru`, by request: whoever comes is admitted when pages can be had, whatever others have
begun, and no run gives pages to others for fairness; `ours`: the scheduler as it is. A newcomer with
1,024 tokens comes every 30 s. Each place for a session plays the same ones under both policies.
Columns: `all`, turns since the start; `hit`, of the tokens that the turn before could have left; waits
in seconds until the first token; `share`: the waiting of the place that waited most, over the mean.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from unittest.mock import patch

import numpy as np
from report import machine, table, write_json
from schedule_sim import SimulatedAnswer, Simulation, StepWork

from ramify.actors.scheduler.active import ActiveSessions
from ramify.actors.scheduler.admission import Admission
from ramify.protocol import messages as m

SCALE = 16  # real tokens that one token here stands for
PAUSE = 300.0  # seconds at most
CONTEXT = 262_144  # real tokens: a session is over before its first prompt that is longer
NEWCOMER = 1024, 64  # real tokens of its prompt and answer
EVERY = 30.0  # seconds between two newcomers
COLUMNS = (
    "pool", "sessions", "policy", "turns/min", "all", "hit", "TTFT p50", "p95", "newcomer", "share",
    "twice", "retracted",
)  # fmt: skip


@dataclass(frozen=True)
class Pool:
    """Real tokens, prompt tokens a second; milliseconds of a decode, and for a token of context."""

    tokens: int
    prefill: float
    decode: float
    context: float

    def step(self, work: StepWork) -> tuple[float, float]:
        """Milliseconds of the device and of its host."""
        prompt = 1e3 * work.prompt * SCALE / self.prefill
        decode = self.decode + self.context * work.context * SCALE if work.decodes else 0.0
        return max(0.05, prompt + decode * SCALE), 0.05


POOLS = {
    "llama": Pool(850_000, 41_000.0, 8.0, 0.000031),
    "hybrid": Pool(3_000_000, 70_000.0, 8.0, 0.000008),
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


def read(path: Path) -> list[Recorded]:
    """The sessions of a file, in tokens of here."""
    found = []
    for line in path.read_text().splitlines():
        each = json.loads(line)
        if "turns" not in each:
            continue
        turns = []
        for _, parent, shared, prompt, output, pause, _ in each["turns"]:
            if prompt > CONTEXT:
                break
            size = max(1, prompt // SCALE)
            shared = min(shared // SCALE, size - 1)
            turns.append(Turn(parent, shared, size, max(1, output // SCALE), min(PAUSE, pause)))
        if turns:
            found.append(Recorded((each["system"], each["tools"]), turns))
    return found


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
        self._launches: set[float] = set()  # times at which the executor's loop runs again

    def at(self, time: float, act: Callable[[], None]) -> None:
        """One run of the executor's loop at a time; else they grow in number where it is never idle."""
        if act == self.launch:
            if time in self._launches:
                return
            self._launches.add(time)
        super().at(time, act)

    def launch(self) -> None:
        self._launches.discard(self.now)
        super().launch()

    def told(self, tokens: m.Tokens) -> None:
        for finished in tokens.finished:
            self.cached[self.requests[finished.request].branch] = finished.cached
        super().told(tokens)


def play(
    recorded: list[Recorded], name: str, count: int, policy: str, options: argparse.Namespace
) -> list[str]:
    """One row of the table."""
    pool = POOLS[name]
    sizes = {
        "count": count, "pages": pool.tokens // SCALE, "context": CONTEXT // SCALE + 4096,
        "rows": 256, "step_tokens": 2048, "mixed_tokens": 2048, "ahead_tokens": 512,
        "quantum_steps": 4, "itl_target_ms": 20.0 * SCALE, "graph_lines": 0, "cpu": False,
        "noise": [0.0],
    }  # fmt: skip
    sim = AgentSimulation(argparse.Namespace(**{**vars(options), **sizes}), pool)
    load = AgentLoad(sim, recorded, argparse.Namespace(**{**vars(options), "count": count}))
    if policy == "lru":
        with (
            patch.object(sim.core._admission, "_step", 1 << 40),  # no prompt is long
            patch.object(Admission, "_waits_for_room", lambda *_: False),
            patch.object(ActiveSessions, "over", lambda *_: False),
            patch.object(Admission, "_make_pages", lambda *_: False),
            patch.object(Admission, "_find_pages", lambda *_: False),
        ):
            sim.run()
    else:
        sim.run()
    waits = [wait for place in load.places for wait in place.waited]
    marks = statistics.quantiles(waits, n=20)
    places = [sum(place.waited) for place in load.places]
    return [
        name, str(count), policy, f"{60 * load.turns / options.seconds:.1f}", str(load.all),
        f"{load.found / max(1, load.could):.2f}", f"{marks[9]:.1f}", f"{marks[18]:.1f}",
        f"{max(load.newcomers, default=0.0):.1f}",
        f"{max(places) / max(1e-9, statistics.fmean(places)):.2f}",
        f"{sim.core.computed_twice * SCALE / 1e6:.1f}M", str(sum(sim.core.retractions.values())),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="recorded sessions, a JSON line each")
    parser.add_argument("--pool", choices=sorted(POOLS), nargs="+", default=list(POOLS))
    parser.add_argument("--sessions", type=int, nargs="+", default=[16, 32, 48, 96, 128])
    parser.add_argument("--only", choices=("lru", "ours"), nargs="+", default=["lru", "ours"])
    parser.add_argument("--tenant", action="store_true", help="all sessions have one credential")
    parser.add_argument("--seconds", type=float, default=1800.0, help="measured, in simulated time")
    parser.add_argument("--warm-up", type=float, default=600.0, help="seconds before that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the table there")
    options = parser.parse_args()
    recorded = read(options.file)
    rows = []
    for name in options.pool:
        for count in options.sessions:
            for policy in options.only:
                rows.append(play(recorded, name, count, policy, options))
                print(*rows[-1], sep="\t", flush=True)
    print(table(COLUMNS, rows))
    write_json(options.json, machine(), [dict(zip(COLUMNS, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
