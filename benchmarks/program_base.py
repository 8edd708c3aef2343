"""What the commands of `programs.py` share: the chosen programs, an engine for them, figures."""

import argparse
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path

from program_suite import Source, Work, build
from report import percentile

from ramify.actors.engine import Engine, running_engine
from ramify.actors.executor.spec import FakeSpec
from ramify.protocol.config import EngineConfig, Limits, ModelConfig, ServerConfig

MODEL = Path(str(files("ramify.gpu") / "default_model"))
CONTEXT = 1 << 15
ROOMY = 1 << 22  # token slots: nothing is ever evicted
FAST = 1_000_000  # ops a second: a benchmark is no flood


def works(options: argparse.Namespace, context: int, first: int = 0) -> dict[str, list[Work]]:
    """The chosen programs."""
    source = Source(options.data, context)
    numbers = range(first, first + options.programs)
    return {name: [build(name, number, source) for number in numbers] for name in options.only}


@asynccontextmanager
async def counted(pages: int, step_s: float = 0.0) -> AsyncIterator[Engine]:
    """An engine whose model is faked, with so many token slots and steps of so many seconds."""
    spec = FakeSpec(
        settings={"verify": False, "context": CONTEXT, "pages": pages, "step_seconds": step_s},
        model={"vocab_size": 8192, "eos": 2, "first": 300},
    )
    config = EngineConfig(
        model=ModelConfig(path=MODEL),
        server=ServerConfig(port=0, allowed_hosts=("127.0.0.1",)),
        limits=Limits(ops_per_second=FAST, ops_burst=FAST),
        executor="thread",
        gateways=0,
    )
    async with running_engine(config, spec=spec) as engine:
        yield engine


def spread(values: Sequence[float]) -> str:
    """Their median, and their range."""
    return f"{percentile(list(values), 50):.2f} ({min(values):.2f}-{max(values):.2f})"
