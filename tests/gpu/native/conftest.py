"""The kernels for this CPU, compiled once for all tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("llvmlite")

from ramify.gpu.native.host import Isa, host_isa
from ramify.gpu.native.kernels import Kernels
from ramify.gpu.native.threads import Crew, Instruction, Program

ENDINGS = ("store", "add", "softcap", "silu", "gelu_tanh")


@pytest.fixture(scope="session")
def isa() -> Isa:
    found = host_isa()
    if found is None:
        pytest.skip("the kernels do not run on this CPU")
    return found


@pytest.fixture(scope="session")
def kernels(isa: Isa) -> Kernels:
    return Kernels(isa, 32, torch.float16, ENDINGS)


@pytest.fixture(scope="session")
def crew(kernels: Kernels) -> Iterator[Crew]:
    crew = Crew(kernels.compiled, 2)
    yield crew
    crew.close()


@pytest.fixture(scope="session")
def run(crew: Crew) -> Callable[..., Any]:
    """Run instructions one after another."""

    def run(*instructions: Instruction) -> None:
        crew.run(Program(instructions))

    return run
