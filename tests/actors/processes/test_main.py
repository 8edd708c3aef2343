"""The watch over a parent, with an end that a test can see."""

import os
import threading

import pytest

from ramify.actors.processes import main


def test_a_process_that_outlives_its_parent_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    ended = threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(main, "HUNG_SECONDS", 0.0)
    reading, held = os.pipe()
    os.set_inheritable(reading, True)
    try:
        main.watch(reading)
        assert not os.get_inheritable(reading)
        assert not ended.wait(0.05)
    finally:
        os.close(held)
    assert ended.wait(5)
    assert codes == [main.GONE]
    os.close(reading)
