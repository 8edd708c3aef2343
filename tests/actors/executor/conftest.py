"""Executors for the tests of the runner and of both placements.

`stand_ins` puts a module where the executor's process can import it too. Its executor answers a
plan with one token, the plan's number; plans with certain numbers misbehave.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ramify.actors.executor.spec import FactorySpec

MODULE = '''
import os
import sys
import time

from ramify.gpu.executors.fake import FakeExecutor
from ramify.protocol.errors import ConfigError, ModelError
from ramify.protocol.plan import StepResult, pack


class Done:
    def __init__(self, result):
        self._result = result

    def ready(self):
        return True

    def result(self):
        return self._result


class Scripted:
    """Steps 1000 and up raise, 2000 and up end the process, 3000 and up hang."""

    tower = None

    def __init__(self, closed=""):
        self.info = FakeExecutor().info
        self._closed = closed

    def launch(self, plan):
        if plan.step >= 3000:
            time.sleep(3600)
        if plan.step >= 2000:
            os._exit(7)
        if plan.step >= 1000:
            raise RuntimeError(f"step {plan.step} broke")
        return Done(StepResult(plan.step, pack([0]), pack([plan.step]), 1, 5))

    def close(self):
        if self._closed:
            with open(self._closed, "a") as file:
                file.write("closed\\n")


def fails(kind):
    if kind == "model":
        raise ModelError("config.json: no such architecture", details={"file": "config.json"})
    if kind == "config":
        raise ConfigError("--kv-tokens is too small")
    if kind == "exit":
        os._exit(9)
    if kind == "hang":
        time.sleep(3600)
    raise RuntimeError("a bug")


def modules():
    """Which heavy modules this process has, as the model's name."""
    executor = Scripted()
    names = [name for name in ("asyncio", "torch") if name in sys.modules]
    object.__setattr__(executor, "info", replace(executor.info, ",".join(names)))
    return executor


def replace(info, name):
    import msgspec

    return msgspec.structs.replace(info, model=name)
'''


@pytest.fixture(scope="session", autouse=True)
def _children(children_are_forked: None) -> None: ...


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "stand_ins.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    yield
    sys.modules.pop("stand_ins", None)


@pytest.fixture
def scripted(stand_ins: None, tmp_path: Path) -> FactorySpec:
    return FactorySpec("stand_ins:Scripted", {"closed": str(tmp_path / "closed")})
