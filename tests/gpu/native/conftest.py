"""The kernels for this CPU, compiled once for all tests. Without llvmlite there are none to test."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from ramify.gpu.native.host import Isa
    from ramify.gpu.native.kernels import Kernels
    from ramify.gpu.native.threads import Crew, Instruction

collect_ignore_glob = [] if importlib.util.find_spec("llvmlite") is not None else ["test_*.py"]
ENDINGS = ("store", "add", "softcap", "silu", "gelu_tanh", "experts_silu", "experts_weigh")


@pytest.fixture(scope="session")
def isa() -> "Isa":
    from ramify.gpu.native.host import host_isa

    found = host_isa()
    if found is None:
        pytest.skip("the kernels do not run on this CPU")
    return found


@pytest.fixture(scope="session")
def kernels(isa: "Isa") -> "Kernels":
    from ramify.gpu.native.kernels import Kernels

    return Kernels(isa, 32, torch.float16, ENDINGS)


@pytest.fixture(scope="session")
def crew(kernels: "Kernels") -> "Iterator[Crew]":
    from ramify.gpu.native.threads import Crew

    crew = Crew(kernels.isa, 2)
    yield crew
    crew.close()


@pytest.fixture(scope="session")
def run(crew: "Crew") -> Callable[..., Any]:
    """Run instructions one after another."""
    from ramify.gpu.native.threads import Recording

    def run(*instructions: "Instruction") -> None:
        crew.run(Recording(instructions))

    return run
