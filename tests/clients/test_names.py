"""What a program finds at `ramify`: every exception, and words for a forgotten `await`."""

import re
from pathlib import Path
from typing import Any

import pytest

import ramify
import ramify.agent
import ramify.program
from ramify.clients import agent, errors, program
from ramify.protocol.errors import RamifyError

REFERENCE = Path(__file__).parents[2] / "docs/python.md"


def test_every_exception_that_a_server_causes_is_exported() -> None:
    raised = {kind.__name__ for kind in errors._BY_CODE.values()}
    raised |= {"RamifyError", "ConnectionLost", "Replaced", "SessionLost"}
    assert raised <= set(ramify.__all__)
    assert all(issubclass(getattr(ramify, name), RamifyError) for name in raised)
    assert not hasattr(ramify, "NoSuchName")


def test_agents_and_programs_have_a_module_each() -> None:
    assert set(ramify.agent.__all__) == set(agent.__all__)
    assert set(ramify.program.__all__) == set(program.__all__)
    assert ramify.program.gen is program.gen


@pytest.mark.parametrize("module", [ramify, ramify.agent, ramify.program], ids=lambda m: m.__name__)
def test_the_reference_has_every_name(module: Any) -> None:
    told = set(re.findall(r"`(\w+)", REFERENCE.read_text()))
    assert set(module.__all__) <= told


async def test_a_forgotten_await_is_told(url: str) -> None:
    connecting = ramify.connect(url)
    with pytest.raises(AttributeError, match=r"gives no session yet.*await it, or use `async with`"):
        connecting.main.chat("abc")  # type: ignore[attr-defined]
    async with connecting as session:
        generation = session.main.chat("abc", max_tokens=1)
        with pytest.raises(AttributeError, match="has no 'usage': await it, its result has usage"):
            generation.usage  # type: ignore[attr-defined]  # noqa: B018
        with pytest.raises(AttributeError, match=r"has no 'colour'$"):
            generation.colour  # type: ignore[attr-defined]  # noqa: B018
        assert "await it" in repr(generation)
        assert (await generation).usage.output == 1
