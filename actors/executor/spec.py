"""Which executor to make: a value that can be sent to another process.

Heavy modules (torch) are imported only where the executor is made. This file does not know
threads, processes or event loops.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.actors.layout import expects_cuda
from ramify.gpu.ranks.ring import RankPlace
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ConfigError

if TYPE_CHECKING:  # numpy, which whoever starts an executor may not need
    from ramify.gpu.executors.base import Executor, Follower

_TRACING = "torch._meta_registrations"  # shapes of operators' results, written in Python

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
    ranks: int = 1  # of several, each gets its `place` as well


class FakeSpec(msgspec.Struct, frozen=True, tag=True):
    """No checkpoint: `ramify.gpu.executors.fake`, whose tokens are known.

    `settings`: keywords of FakeExecutor, beside `model`; `model`: keywords of FakeModel.
    """

    settings: dict[str, int | float | bool] = {}
    model: dict[str, int] = {}


ExecutorSpec = ModelSpec | FakeSpec | FactorySpec


def ranks_of(spec: ExecutorSpec) -> int:
    """How many processes run one model."""
    match spec:
        case ModelSpec(config):
            return config.tensor_parallel
        case FakeSpec():
            return 1
        case FactorySpec():
            return spec.ranks


def build(spec: ExecutorSpec, progress: ProgressCallback) -> "Executor":
    """Make the executor, in the thread that will run it (torch settings are per thread).

    Raises ModelError and ConfigError for what the user can mend; whatever else the factory raises.
    """
    match spec:
        case ModelSpec(config):
            if not expects_cuda(config.device):
                _import_torch()
            from ramify.gpu.startup.load import load_executor

            return load_executor(config, progress)
        case FakeSpec(settings, model):
            from ramify.gpu.executors.fake import FakeExecutor
            from ramify.gpu.executors.fake_model import FakeModel

            fake: Any = FakeExecutor  # the settings are checked by the call, not by types
            made: Executor = fake(FakeModel(**model), **settings)
            return made
        case FactorySpec(factory, settings):
            executor: Executor = _factory(factory)(**settings)
            return executor


class UntilRead(ModuleType):
    """Stands for a module while others are imported; the first name that is read of it imports it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system looks for
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def _import_torch() -> None:
    """Without what its tracers alone need, a third of its import: that comes when it is asked for.

    A torch that reads names of that module while it is imported gets it at once, and gains nothing.
    """
    if "torch" in sys.modules:
        return
    left_out = sys.modules[_TRACING] = UntilRead(_TRACING)
    try:
        torch = importlib.import_module("torch")
    finally:
        if sys.modules.get(_TRACING) is left_out:
            del sys.modules[_TRACING]
    name = _TRACING.rpartition(".")[2]
    if getattr(torch, name, None) is left_out:
        delattr(torch, name)


def build_rank(
    spec: ExecutorSpec, progress: ProgressCallback, place: RankPlace
) -> "Executor | Follower":
    """One of several ranks: rank 0's executor, or what follows it. Raises as `build` does."""
    match spec:
        case ModelSpec(config):
            from ramify.gpu.startup.load import load_rank

            return load_rank(config, progress, place)
        case FactorySpec(factory, settings):
            made: Executor | Follower = _factory(factory)(place=place, **settings)
            return made
        case FakeSpec():
            raise ConfigError("the fake executor has one rank")


def _factory(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
