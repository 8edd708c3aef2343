"""Who reads the vocabulary. What is in it: `actors/session/output/test_constraints.py`."""

import gc
from pathlib import Path

import anyio
import pytest

import ramify
from ramify.actors.grammar import vocabulary
from ramify.actors.grammar.vocabulary import ReadAhead, Unread, read_elsewhere, read_here

FOLDER = Path(ramify.__file__).parent / "gpu" / "default_model"


async def test_a_process_reads_what_a_thread_does() -> None:
    assert await read_elsewhere(FOLDER) == await read_here(FOLDER)


async def test_what_cannot_be_read_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unread, match="exit code 1"):
        await read_elsewhere(tmp_path / "nothing")
    told = capfd.readouterr().err
    assert "is not a folder with a model" in told
    assert "Traceback" not in told


async def test_a_process_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "READ_SECONDS", 0.01)
    with anyio.fail_after(60), pytest.raises(Unread, match=r"not be read within 0.01 s"):
        await read_elsewhere(FOLDER)


async def test_what_is_read_ahead_waits_until_it_is_asked_for() -> None:
    ahead = ReadAhead(FOLDER)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ahead.run)
        assert await ahead.body() == await read_here(FOLDER)


async def test_what_could_not_be_read_ahead_is_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    ahead = ReadAhead(folder)
    await ahead.run()
    with pytest.raises(Unread):
        await ahead.body()
    folder.symlink_to(FOLDER)
    assert await ahead.body() == await read_here(FOLDER)


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.003, 0.05])
async def test_who_stops_waits_for_no_process_and_leaves_none(seconds: float) -> None:
    with anyio.fail_after(60), anyio.move_on_after(seconds) as scope:
        await read_elsewhere(FOLDER)
    assert scope.cancelled_caught
    gc.collect()  # one that was left would be an error of this test
