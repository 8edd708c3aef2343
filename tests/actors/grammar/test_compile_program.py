"""What a compile worker does beside compiling. That it serves, and is limited: `test_pool.py`."""

from typing import Any

import pytest

from ramify.actors.grammar import compile_program


class Over(Exception):
    """The test has seen enough."""


def test_memory_is_looked_at_only_while_there_is_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks every 20 ms, of two idle workers, were nine tenths of what an idle server used."""
    done: list[str] = []

    class Working:
        def wait(self) -> bool:
            if len(done) == 6:
                raise Over
            done.append("wait")
            return True

    def resident() -> int:
        done.append("look")
        return 0

    monkeypatch.setattr(compile_program, "_resident", resident)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    working: Any = Working()
    with pytest.raises(Over):
        compile_program._watch(1, working)
    assert done == ["wait", "look"] * 3
