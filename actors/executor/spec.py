"""Which executor to make: a value that can be sent to another process.

Heavy modules (torch) are imported only where the executor is made. This file does not know
threads, processes or event loops.
"""

import importlib
from collections.abc import Callable
from typing import Any

import msgspec

from ramify.gpu.executors.base import Executor
from ramify.protocol.config import ModelConfig

ProgressCallback = Callable[[str, float], None]
"""Called with what is being done and how far it is, 0.0 to 1.0."""


class ModelSpec(msgspec.Struct, frozen=True, tag=True):
    """Load a checkpoint."""

    config: ModelConfig


class FactorySpec(msgspec.Struct, frozen=True, tag=True):
    """Call `factory`, "package.module:name", with `settings` as keywords.

    For benchmarks and tests, and for an executor on other hardware than torch serves. Never made
    from anything that a client sent.
    """

    factory: str
    settings: dict[str, Any] = {}


class FakeSpec(msgspec.Struct, frozen=True, tag=True):
    """No checkpoint: `ramify.gpu.executors.fake`, whose tokens are known.

    `settings`: keywords of FakeExecutor, beside `model`; `model`: keywords of FakeModel.
    """

    settings: dict[str, int | float | bool] = {}
    model: dict[str, int] = {}


ExecutorSpec = ModelSpec | FakeSpec | FactorySpec


def build(spec: ExecutorSpec, progress: ProgressCallback) -> Executor:
    """Make the executor, in the thread that will run it (torch settings are per thread).

    Raises ModelError and ConfigError for what the user can mend; whatever else the factory raises.
    """
    match spec:
        case ModelSpec(config):
            from ramify.gpu.startup.load import load_executor

            return load_executor(config, progress)
        case FakeSpec(settings, model):
            from ramify.gpu.executors.fake import FakeExecutor, FakeModel

            fake: Any = FakeExecutor  # the settings are checked by the call, not by types
            made: Executor = fake(FakeModel(**model), **settings)
            return made
        case FactorySpec(factory, settings):
            module, _, name = factory.partition(":")
            executor: Executor = getattr(importlib.import_module(module), name)(**settings)
            return executor
