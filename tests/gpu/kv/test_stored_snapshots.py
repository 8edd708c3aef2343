"""States and windows that left for host memory: conversations in a tiny pool, as in a roomy one.

With blocks that are lost on the way it is that of two ranks, each of which has its part of a block.
"""

import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.actors.cache.cache import RadixCache
from ramify.actors.cache.stored_snapshots import snapshot_part
from ramify.actors.cache.windows import windows_of
from ramify.actors.scheduler.core import Scheduler
from ramify.actors.scheduler.loads import KvLoads
from ramify.gpu.kv.blocks import HostBlocks
from ramify.gpu.kv.states import StateLayout
from ramify.gpu.startup.load import load_executor
from ramify.protocol import messages as m
from ramify.protocol.config import ModelConfig, ScheduleConfig
from ramify.protocol.plan import STATE, MovedBlock, pack, unpack
from ramify.protocol.sampling import SamplingParams
from tests.actors.cache.integrity import check
from tests.gpu.executors.test_ranks import save
from tests.gpu.kv.test_blocks import KEY, LAYOUTS, filled
from tests.gpu.ranked import ranked

TURNS, ANSWER, RANKS = 2, 5, 2
TINY = {"kv_tokens": 320, "kv_host": 32 << 20, "max_rows": 2, "step_tokens": 64}
ROOMY = {"kv_tokens": 4096, "max_rows": 2, "step_tokens": 64}
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("hybrids", "qwen3_5", {"state_slots": 9}, {"state_slots": 64}),
    ("hybrids", "falcon_h1-gate first", {"state_slots": 9}, {"state_slots": 64}),
    ("families", "gemma3", {"window_tokens": 240}, {"window_tokens": 2048}),
]


class Engine:
    """Scheduler, cache and an executor without loops."""

    def __init__(self, executor: Any) -> None:
        info, config = executor.info, ScheduleConfig()
        self.executor, self.scheduler = executor, Scheduler(info, config)
        self.cache = RadixCache(
            info.pages, state_slots=info.state_slots, windows=windows_of(info, config.in_flight),
            host_blocks=info.host_blocks, part=snapshot_part(info),
        )  # fmt: skip
        self.flips = 0
        self.output: list[int] = []
        self.ended: m.Finished | None = None

    def generate(self, request: int, branch: int, prompt: int) -> m.Finished:
        self.output, self.ended = [], None
        submit = m.Submit(request, branch, prompt, ANSWER, SamplingParams(temperature=0.0))
        events: deque[m.SchedulerEvent] = deque([submit])
        while events:
            self.scheduler.handle(events.popleft(), 0.0)
            while (plan := self.scheduler.plan()) is not None:
                for block in plan.loads[: self.flips]:
                    self.executor._blocks.bytes[block.slot, 0] ^= 1
                    self.flips -= 1
                events.append(self.executor.launch(plan).result())
            if (settle := self.scheduler.settle(0.0)) is not None:
                events.append(self.cache.settle(settle))
                check(self.cache)
            for _, told in self.scheduler.deliver():
                for progress in told.progress:
                    self.output += unpack(progress.tokens)
                for self.ended in told.finished:
                    pass
        assert self.ended is not None
        return self.ended


def talk(engine: Engine) -> tuple[list[list[int]], int]:
    """Conversations in turn, each of which finds the pool full of others; a fork, and a rollback. All
    that was answered, and the tokens that were computed.
    """
    dice, answers, computed = random.Random(1), [], 0
    branches = dict.fromkeys(range(1, 5), 0)
    for branch in branches:
        engine.cache.open_branch(m.OpenBranch(branch))
    request = 100
    for turn in range(TURNS + 1):
        if turn == TURNS:
            engine.cache.fork_branch(m.ForkBranch(1, [9], branches[1] - 20))
            engine.cache.move_branch(m.MoveBranch(2, branches[2] - 30))
            branches |= {9: branches[1] - 20, 2: branches[2] - 30}
        for branch in branches:
            tokens = [dice.randrange(2, 160) for _ in range(37 if turn else 111)]
            engine.cache.extend_branch(m.ExtendBranch(branch, pack(tokens)))
            request += 1
            branches[branch] += len(tokens)
            before = engine.executor.counters.tokens
            ended = engine.generate(request, branch, branches[branch])
            branches[branch] += len(engine.output)
            assert ended.reason in ("length", "stop"), ended
            answers.append(engine.output)
            computed += engine.executor.counters.tokens - before
    return answers, computed


@pytest.mark.parametrize(("kind", "case", "few", "many"), CASES)
def test_as_without(
    kind: str,
    case: str,
    few: dict[str, Any],
    many: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KvLoads, "pays", lambda self, rate: True)
    monkeypatch.setattr(KvLoads, "cost", lambda self, rate: 0)
    settings = save(kind, case, tmp_path)
    found = []
    tries = [(ROOMY | many, 0, 1), (TINY | few, 0, 1), (TINY | few, 3, RANKS)]
    for sizes, flips, ranks in tries:
        config: dict[str, Any] = {"quantization": "none", "device": "cpu", **settings, **sizes}
        with ranked(ModelConfig(path=tmp_path, tensor_parallel=ranks, **config)) as executor:
            engine = Engine(executor)
            engine.flips = flips
            found.append(talk(engine))
            if sizes is not tries[0][0]:
                assert engine.cache.tiers(1)[1].hit_tokens > 300
                assert engine.flips == 0
    (wanted, least), (answers, computed), (third, again) = found
    assert answers == wanted == third
    assert computed < 2 * least
    assert again > computed  # what was flipped was computed


@pytest.mark.parametrize(("kind", "case", "few"), [each[:3] for each in CASES[::2]])
def test_branches_that_part_behind_one_block(
    kind: str, case: str, few: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their snapshots have as many tokens behind it, and each goes for itself."""
    monkeypatch.setattr(KvLoads, "pays", lambda self, rate: True)
    monkeypatch.setattr(KvLoads, "cost", lambda self, rate: 0)
    sizes: dict[str, Any] = {**TINY, "kv_host": 3 << 20, **few, **save(kind, case, tmp_path)}
    config = ModelConfig(path=tmp_path, quantization="none", device="cpu", **sizes)
    executor = load_executor(config, lambda what, share: None)
    engine, dice = Engine(executor), random.Random(1)
    shared = [dice.randrange(2, 160) for _ in range(111)]
    prompts = [shared + [dice.randrange(2, 160) for _ in range(9)] for _ in range(6)]
    others = [[dice.randrange(2, 160) for _ in range(240)] for _ in range(16)]
    cached = []
    for request, prompt in enumerate(prompts + others[:3] + prompts + others, 1):
        engine.cache.open_branch(m.OpenBranch(request))
        engine.cache.extend_branch(m.ExtendBranch(request, pack(prompt)))
        before = engine.executor.counters.tokens
        engine.generate(request, request, len(prompt))
        cached.append(len(prompt) + ANSWER - 1 - engine.executor.counters.tokens + before)
    assert min(cached[9:15]) >= len(shared)
    executor.close()


def test_every_bit_of_a_state_counts() -> None:
    """A state in parts, in two shapes; each comes back to another slot, or not at all."""
    pool = filled(LAYOUTS[0], 1)
    pool.states = StateLayout((((3, 5), (7,)), ((3, 5),), ((1500, 7),))).allocate(
        4, torch.device("cpu"), spare=1
    )
    for tensor in pool.states.memory:
        tensor[:, 1:] = torch.randn_like(tensor[:, 1:])
    blocks = HostBlocks(pool, 8)
    size = blocks.bytes.shape[1]
    count = -(-sum(each[:, 0].nbytes for each in pool.states.memory) // size)
    assert count > 4
    own = [
        [MovedBlock(number, KEY, pack([slot]), STATE, number) for number in range(count)]
        for slot in (1, 3)
    ]
    blocks.save(own[0])
    others = [tensor[:, 2:3].clone() for tensor in pool.states.memory]
    assert blocks.load(own[1]) == []
    for tensor, other in zip(pool.states.memory, others, strict=True):
        assert torch.equal(tensor[:, 1], tensor[:, 3])
        assert torch.equal(tensor[:, 2:3], other)
    blocks.bytes[2, 5] ^= 1
    assert blocks.load(own[1]) == [2]
