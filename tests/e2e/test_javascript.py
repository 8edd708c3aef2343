"""The JavaScript programs in README, docs and examples run as they are printed."""

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ramify.actors.engine import running_engine
from ramify.actors.executor.spec import FakeSpec
from ramify.protocol.config import EngineConfig, ModelConfig, ServerConfig
from tests.conftest import greedy

ROOT = Path(__file__).resolve().parents[2]
SOCKETS = "--experimental-websocket"  # what Node 20 needs, and later ones ignore
ADDRESS = "ws://127.0.0.1:8765"


def _node() -> bool:
    node = shutil.which("node")
    probe = [str(node), SOCKETS, "-e", "new WebSocket('ws://127.0.0.1:9').onerror = () => {}"]
    return node is not None and subprocess.run(probe, capture_output=True, check=False).returncode == 0


def programs() -> list[tuple[str, str]]:
    """(name, source) of every JavaScript program."""
    found = []
    for path in (ROOT / "README.md", ROOT / "docs/javascript.md"):
        for i, block in enumerate(re.findall(r"```js\n(.*?)```", path.read_text(), re.S)):
            found.append((f"{path.name}-{i}", block))
    for path in sorted((ROOT / "examples/javascript").glob("*.mjs")):
        found.append((path.name, path.read_text()))
    return found


@pytest.mark.skipif(not _node(), reason="needs node with WebSocket")
@pytest.mark.parametrize(("name", "source"), programs(), ids=[name for name, _ in programs()])
async def test_a_printed_program_runs(
    name: str, source: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    config = EngineConfig(
        model=ModelConfig(path=greedy(tokenizer_folder, tmp_path)), server=ServerConfig(port=0)
    )
    spec = FakeSpec(model={"vocab_size": 384, "eos": 2, "first": 3, "eos_every": 9999})
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules/ramify").symlink_to(ROOT / "clients/web")
    async with running_engine(config, spec=spec, check_idle=True) as engine:
        (tmp_path / "program.mjs").write_text(source.replace(ADDRESS, f"ws://127.0.0.1:{engine.port}"))
        command = ["node", SOCKETS, "--no-warnings", "program.mjs"]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, output.decode()
    assert output.strip()


def test_there_are_programs() -> None:
    assert len(programs()) >= 4
