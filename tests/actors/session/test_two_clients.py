"""Two clients (and a viewer) on one session: whatever they do, each knows what the session holds.

A few programs of the campaign `benchmarks/random_programs.py`; `two_clients.py` says what is checked.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ramify.actors.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def run_program() -> Any:
    path = Path(__file__).parent / "two_clients.py"  # the tests are no package
    spec = importlib.util.spec_from_file_location("two_clients", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.run_program


@pytest.mark.parametrize("seed", range(24))
def test_each_client_knows_what_the_session_holds(
    sim_class: Any, tokenizer: Tokenizer, run_program: Any, seed: int
) -> None:
    done = run_program(sim_class, tokenizer, seed)
    assert done["generate"] > 5
    assert done["event"] > 0
