"""The programs in README and docs, and the examples, run as they are printed."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from ramify.actors.engine import Engine, running_engine
from ramify.actors.executor.spec import FakeSpec
from ramify.protocol.config import EngineConfig, ModelConfig, ServerConfig
from tests.conftest import greedy

ROOT = Path(__file__).resolve().parents[2]
URL = "ws://127.0.0.1:8765/v1/ws"


def programs() -> list[tuple[str, str]]:
    """(name, source) of every Python block that is a whole program."""
    found = []
    for path in (ROOT / "README.md", ROOT / "docs/protocol.md"):
        for i, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S)):
            found.append((f"{path.name}-{i}", block))
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text()
        if path.name != "stage.py" and "from stage import" not in source:  # see `test_examples.py`
            found.append((path.name, source))
    return found


async def run_program(engine: Engine, source: str, path: Path) -> tuple[int, str]:
    path.write_text(source.replace(URL, engine.url))
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(path), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode()


@pytest.mark.parametrize(("name", "source"), programs(), ids=[name for name, _ in programs()])
async def test_a_printed_program_runs(
    name: str, source: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    config = EngineConfig(
        model=ModelConfig(path=greedy(tokenizer_folder, tmp_path)), server=ServerConfig(port=0)
    )
    spec = FakeSpec(model={"vocab_size": 384, "eos": 2, "first": 3, "eos_every": 9999})
    async with running_engine(config, spec=spec) as engine:
        code, output = await run_program(engine, source, tmp_path / "program.py")
    assert code == 0, output
    assert output.strip()


def test_there_are_programs() -> None:
    assert len(programs()) >= 5
