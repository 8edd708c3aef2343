"""What forks, edits and next turns find of a branch of 64k tokens: the fork table, in tokens.

The scheduler and the cache are the real ones; the executor is the fake, which checks that each step of a
model with fixed states (delta net, Mamba) or windows reads what belongs to just its row's tokens. Counts
only, no time and no GPU. A cell is what a request found, over what it could have found: the longest
prefix of its prompt that was computed before. The rest, at most R, is replayed.

    python benchmarks/fork_hits.py
    python benchmarks/fork_hits.py --slots 1280 320 128 --windows 1024:114688 128:72800
    python benchmarks/fork_hits.py --memory     # 64 sessions of 32k tokens, in layouts of five models

The branch is an agent's: system and tools, then turns of a tool's result, thinking and an answer.

    next turn         a message behind the last answer
    fork at 8k        at a position that no op ended at, with a message of its own; then a second child
    edit              the last message changes at 60 % of its length
    no thinking       the next turn, where the template leaves out what was thought in the last one
    90 % taken        the same five, after other sessions have used 90 % of the pool

`--host 20000`: what leaves the pool goes to so many blocks of host memory, two for a state.
`--drafts 3`: the same while rows run up to three guesses a step, seven of ten of them right.
"""

import argparse
import random
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ramify.actors.cache.cache import RadixCache
from ramify.actors.cache.node import common_prefix
from ramify.actors.cache.stored_snapshots import snapshot_part
from ramify.actors.cache.windows import windows_of
from ramify.actors.scheduler.core import Scheduler
from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.executors.fake_model import FakeModel
from ramify.protocol import messages as m
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.plan import pack, unpack
from ramify.protocol.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.actors.cache.integrity import check

POOL = 655_360  # tokens
SYSTEM, MESSAGE, HEADER, OUTPUT, THOUGHT = 3_000, 1_500, 5, 500, 300  # tokens
BRANCH = 64_000
FORK = 8_000
OTHERS = 8_000  # tokens of each other session
REPLAY = 512
SHORT = 32  # tokens of an answer where only memory is measured


@dataclass
class Branch:
    number: int
    tokens: list[int] = field(default_factory=list)


class Engine:
    """The cores without loops. `forms`: of `FakeExecutor`; none: a model with full attention only."""

    def __init__(self, forms: dict[str, int], pages: int = POOL, seed: int = 0, drafts: int = 0) -> None:
        model, config = FakeModel(vocab_size=10_000, eos_every=0), ScheduleConfig()
        self.executor = FakeExecutor(
            model, verify=False, pages=pages, context=1 << 17, max_rows=8, step_tokens=2048,
            drafts=drafts, acceptance=0.7, step_seconds=1e-6 * (drafts > 0), **forms,
        )  # fmt: skip
        info = self.executor.info
        windows = windows_of(info, config.in_flight)
        self.cache = RadixCache(
            info.pages, state_slots=info.state_slots, windows=windows, host_blocks=info.host_blocks,
            part=snapshot_part(info),
        )  # fmt: skip
        self.scheduler = Scheduler(info, config)
        self.dice = random.Random(seed)
        self.computed: list[np.ndarray] = []  # of the branch that is measured
        self._count = 0
        self._finished: dict[int, m.Finished] = {}
        self._output: dict[int, list[int]] = {}

    def open(self) -> Branch:
        self._count += 1
        branch = Branch(1 << 32 | self._count)
        self.cache.open_branch(m.OpenBranch(branch.number))
        return branch

    def fork(self, branch: Branch, at: int) -> Branch:
        self._count += 1
        child = Branch(1 << 32 | self._count, branch.tokens[:at])
        self.cache.fork_branch(m.ForkBranch(branch.number, [child.number], at))
        return child

    def append(self, branch: Branch, tokens: list[int]) -> None:
        branch.tokens += tokens
        self.cache.extend_branch(m.ExtendBranch(branch.number, pack(tokens)))

    def text(self, count: int) -> list[int]:
        return self.dice.choices(range(1, 10_000), k=count)

    def generate(self, branch: Branch, tokens: int = OUTPUT, *, note: bool = True) -> m.Finished:
        """One answer. `note`: what it computed counts as what later prompts could find."""
        self._count += 1
        request = 1 << 32 | self._count
        sampling = SamplingParams(temperature=0.0)
        submit = m.Submit(request, branch.number, len(branch.tokens), tokens, sampling)
        self._run(submit)
        branch.tokens += self._output.pop(request)
        if note:
            self.computed.append(np.array(branch.tokens[:-1], dtype=np.int32))
        return self._finished.pop(request)

    def _run(self, *events: m.SchedulerEvent) -> None:
        replies: deque[m.SchedulerEvent] = deque(events)
        while replies:
            self.scheduler.handle(replies.popleft(), 0.0)
            while (plan := self.scheduler.plan()) is not None:
                replies.append(self.executor.launch(plan).result())
            if (settle := self.scheduler.settle(0.0)) is not None:
                replies.append(self.cache.settle(settle))
            for _, told in self.scheduler.deliver():
                for progress in told.progress:
                    self._output.setdefault(progress.request, []).extend(unpack(progress.tokens))
                for finished in told.finished:
                    self._finished[finished.request] = finished

    def could(self, branch: Branch) -> int:
        """Tokens of the branch that were computed before; the last one is always run."""
        tokens = np.array(branch.tokens[:-1], dtype=np.int32)
        return max(common_prefix(tokens, other) for other in self.computed)


def turn(engine: Engine, branch: Branch, *, note: bool = True) -> None:
    engine.append(branch, engine.text(MESSAGE))
    engine.append(branch, engine.text(HEADER))
    engine.generate(branch, note=note)


def build(engine: Engine, length: int, *, note: bool = True) -> Branch:
    """System and tools, then turns, up to about `length` tokens."""
    branch = engine.open()
    engine.append(branch, engine.text(SYSTEM))
    while len(branch.tokens) < length:
        turn(engine, branch, note=note)
    return branch


def cases(engine: Engine, branch: Branch) -> dict[str, tuple[int, int]]:
    """Found and possible tokens of each case."""
    table: dict[str, tuple[int, int]] = {}

    def ask(name: str, child: Branch) -> None:
        possible = engine.could(child)
        table[name] = engine.generate(child, 8).cached, possible

    end = len(branch.tokens)
    child = engine.fork(branch, end)
    engine.append(child, engine.text(MESSAGE))
    ask("next turn", child)
    for name in ("fork at 8k", "its second child"):
        child = engine.fork(branch, FORK)
        engine.append(child, engine.text(100))
        ask(name, child)
    start = end - OUTPUT - HEADER - MESSAGE  # of the last message
    child = engine.fork(branch, start)
    same = branch.tokens[start : start + MESSAGE * 6 // 10]
    engine.append(child, same + engine.text(MESSAGE - len(same)))
    engine.append(child, engine.text(HEADER))
    ask("edit", child)
    child = engine.fork(branch, end - OUTPUT - 2)  # the last two tokens of the header begin the thinking
    answer = branch.tokens[end - OUTPUT + THOUGHT :]
    engine.append(child, answer + engine.text(MESSAGE))
    ask("no thinking", child)
    return table


def measure(forms: dict[str, int], drafts: int = 0) -> dict[str, tuple[int, int]]:
    engine = Engine(forms, drafts=drafts)
    branch = build(engine, BRANCH)
    table = cases(engine, branch)
    crowded = Engine(forms, drafts=drafts)
    branch = build(crowded, BRANCH)
    while crowded.cache.free > POOL // 10:
        build(crowded, OTHERS, note=False)
    table |= {f"{name}, 90 % taken": cell for name, cell in cases(crowded, branch).items()}
    for each in (engine, crowded):
        check(each.cache)
        assert each.executor.drafts.drafted > 0 or not drafts
    return table


# bytes from the fields of configs, KV in bf16 and states in float32: of a token's KV in full layers; a
# window in tokens, and of a token's KV in layers that have it; of a state
LAYOUTS = {
    "Qwen3-8B": (36 * 2 * 8 * 128 * 2, 0, 0, 0),
    "Gemma-4-31B": (10 * 4 * 512 * 2 * 2, 1024, 50 * 16 * 256 * 2 * 2, 0),
    "gpt-oss-20b": (12 * 8 * 64 * 2 * 2, 128, 12 * 8 * 64 * 2 * 2, 0),
    "Qwen3.6-27B": (64 << 10, 0, 0, 151_000_000),
    "Qwen3.6-35B-A3B": (20 << 10, 0, 0, 63_000_000),
}


def memory(name: str, sessions: int = 64, tokens: int = 32_768) -> str:
    """A pool of little more than the sessions: what do they find, in two turns each?"""
    token, window, windowed, state = LAYOUTS[name]
    least = sessions * (tokens * token + max(0, window - 1) * windowed + state)
    pages, slots = sessions * tokens + MESSAGE + SHORT, (sessions + 12) * (state > 0)
    window_pages = ((sessions + 9) * window + 2048) * (window > 0)
    given = pages * token + window_pages * windowed + slots * state
    engine = Engine({"window": window, "window_pages": window_pages, "state_slots": slots}, pages)
    branches = [engine.open() for _ in range(sessions)]
    for branch in branches:
        engine.append(branch, engine.text(tokens - 2 * (MESSAGE + SHORT) - SHORT))
        engine.generate(branch, SHORT, note=False)
    lost = []
    for branch in branches * 2:
        had = len(branch.tokens) - 1
        engine.append(branch, engine.text(MESSAGE))
        lost.append(had - engine.generate(branch, SHORT, note=False).cached)
    check(engine.cache)
    whole = sessions * tokens * (token + windowed)
    return (
        f"{name:18}{least / 2**30:>9.1f}{given / 2**30:>9.1f}{given / least - 1:>8.1%}"
        f"{whole / given:>10.2f}{sum(lost) / len(lost):>10.0f}{max(lost):>8}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="*", default=[1280, 320], help="state slots")
    parser.add_argument("--windows", nargs="*", default=["1024:114688"], help="window:pages")
    parser.add_argument("--drafts", type=int, default=0, help="guesses of a row in a step")
    parser.add_argument("--host", type=int, default=0, help="blocks of host memory for KV and snapshots")
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    if options.memory:
        print(f"{'64 x 32k':18}{'least':>9}{'given':>9}{'more':>8}{'all full':>10}{'replayed':>10}")
        for name in LAYOUTS:
            print(memory(name), flush=True)
        print("GiB; all full: all layers' KV of all tokens, over what is given; replayed: mean, most")
        return
    every = {"full": dict[str, int]()}
    every |= {f"fixed, {slots} slots": {"state_slots": slots} for slots in options.slots}
    for window, pages in (map(int, each.split(":")) for each in options.windows):
        every[f"window {window}, {pages}"] = {"window": window, "window_pages": pages}
    host = {"host_blocks": options.host} if options.host else {}
    tables = {name: measure(forms | host, options.drafts) for name, forms in every.items()}
    print(f"{'':32}" + "".join(f"{name:>26}" for name in tables))
    for case in tables["full"]:
        cells = ""
        for table in tables.values():
            found, possible = table[case]
            cells += f"{found:>9} / {possible} {possible - found:>5}" + " !"[possible - found > REPLAY]
        print(f"{case:32}{cells}")
    print(f"found / possible, replayed; !: more than {REPLAY}")


if __name__ == "__main__":
    main()
