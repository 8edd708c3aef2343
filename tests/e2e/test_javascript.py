"""The JavaScript programs in README, docs and examples run as they are printed."""

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from ramify.actors.engine import running_engine
from ramify.actors.executor.spec import FakeSpec
from ramify.protocol import wire
from ramify.protocol.config import EngineConfig, ModelConfig, ServerConfig
from tests.conftest import greedy

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "clients/web"
TSC = WEB / "node_modules/.bin/tsc"
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
    (tmp_path / "node_modules/ramify-client").symlink_to(ROOT / "clients/web")
    async with running_engine(config, spec=spec) as engine:
        (tmp_path / "program.mjs").write_text(source.replace(ADDRESS, f"ws://127.0.0.1:{engine.port}"))
        command = ["node", SOCKETS, "--no-warnings", "program.mjs"]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, output.decode()
    assert output.strip()


@pytest.mark.skipif(not TSC.exists(), reason="needs `npm ci` in clients/web")
def test_the_types_in_the_tree_are_those_of_the_sources(tmp_path: Path) -> None:
    """`npm install ./clients/web` and `npm pack` of a fresh clone build nothing."""
    command = [str(TSC), "-p", str(WEB), "--noEmit", "false", "--outDir", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    made, kept = ({p.name: p.read_text() for p in d.iterdir()} for d in (tmp_path, WEB / "types"))
    assert made == kept, "npm run build:types in clients/web, and commit"


SETS_ITSELF = {  # fields that the library fills in
    "OpenFields": {"client", "session", "key", "token", "have", "revision", "import"},
    "GenerateFields": {"id", "branch"},
    "SelectFields": {"id", "branch", "choices"},
    "JoinFields": {"id", "branch", "from"},
    "PruneFields": {"id", "from", "into", "score_from"},
}
STRUCTS = {
    "OpenFields": wire.Open,
    "GenerateFields": wire.Generate,
    "SelectFields": wire.Select,
    "JoinFields": wire.Join,
    "PruneFields": wire.Prune,
    "Constraint": wire.Constraint,
    "ChatMessage": wire.ChatMessage,
    "StateMessage": wire.StateReply,
    "BranchState": wire.BranchState,
    "OkMessage": wire.Ok,
    "DeltaMessage": wire.Delta,
    "DoneMessage": wire.Done,
    "ErrorMessage": wire.Error,
    "Usage": wire.Usage,
    "EventFields": wire.Event,
}


@pytest.mark.parametrize("name", STRUCTS)
def test_the_types_have_every_field_of_the_wire(name: str) -> None:
    source = (WEB / "lib/protocol.js").read_text()
    block = re.search(rf" \* @typedef \{{object\}} {name}\b(.*?)\n \*\n", source, re.S)
    assert block is not None
    typed = set(re.findall(r"^ \* @property \{.*?\} \[?(\w+)\]?(?: |$)", block[1], re.M)) - {"type"}
    fields = {each.encode_name for each in msgspec.structs.fields(STRUCTS[name])}
    told_by_op = {"op", "details"} if name == "EventFields" else set()
    assert typed == fields - SETS_ITSELF.get(name, set()) - told_by_op


STRICT = {
    "strict": True,
    "exactOptionalPropertyTypes": True,
    "noUncheckedIndexedAccess": True,
    "module": "nodenext",
    "target": "es2022",
    "lib": ["es2022", "dom", "dom.asynciterable"],
    "noEmit": True,
    "types": [],
}
TYPED = """import { connect, TooLong, type Result, type SessionEvents } from "ramify-client";
const session = connect("ws://127.0.0.1:8765");
for await (const { text } of session.main.chat("Hi", { max_tokens: 3 })) console.log(text.length);
const result: Result = await session.main.chat("Hi").result;
console.log(result.usage.prompt satisfies number, TooLong.name);
session.addEventListener("status", ({ detail }) => {
  if (detail.status === "waiting") console.log(detail.retryAt satisfies number);
});
for await (const note of session.events()) {
  if (note.type === "event" && note.op === "fork") console.log(note.details?.as);
}
export type Seen = SessionEvents["tree"];
"""


@pytest.mark.skipif(not TSC.exists(), reason="needs `npm ci` in clients/web")
def test_a_strict_typescript_project_uses_the_package_as_packed(tmp_path: Path) -> None:
    """Nothing but what `npm pack` packs, and no package of development."""
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "tsconfig.json").write_text(
        json.dumps({"compilerOptions": STRICT, "files": ["main.ts"]})
    )
    (tmp_path / "main.ts").write_text(TYPED)
    pack = ["npm", "pack", "--silent", "--pack-destination", str(tmp_path)]
    packed = subprocess.run(pack, cwd=WEB, check=True, capture_output=True, text=True).stdout.strip()
    unpack = ["tar", "-xzf", str(tmp_path / packed), "-C", str(tmp_path)]
    subprocess.run(unpack, check=True)
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "package").rename(tmp_path / "node_modules/ramify-client")
    found = subprocess.run([str(TSC), "-p", str(tmp_path)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_there_are_programs() -> None:
    assert len(programs()) >= 4
