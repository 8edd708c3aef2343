"""The browser client as the server gives it out, and the page in a real browser where there is one."""

import asyncio
import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from ramify.actors.engine import running_engine
from ramify.actors.executor.spec import FakeSpec
from ramify.protocol.config import EngineConfig, ModelConfig, ServerConfig

WEB = Path(__file__).resolve().parents[2] / "clients/web"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def fetch(url: str) -> tuple[int, dict[str, str], bytes]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()


async def test_every_file_is_served_with_its_type_and_a_strict_policy(tokenizer_folder: Path) -> None:
    config = EngineConfig(model=ModelConfig(path=tokenizer_folder), server=ServerConfig(port=0))
    async with running_engine(config, spec=FakeSpec()) as engine:
        base = f"http://127.0.0.1:{engine.port}/"
        for path in sorted(WEB.iterdir()):
            status, headers, body = await asyncio.to_thread(fetch, base + path.name)
            assert status == 200
            assert headers["content-type"].startswith(TYPES[path.suffix]), path.name
            assert "default-src 'self'" in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert body == path.read_bytes()
        _, headers, body = await asyncio.to_thread(fetch, base)
        assert body == (WEB / "index.html").read_bytes()


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for path in WEB.iterdir():
        urls = re.findall(r"https?://[^\s\"'`)]+", path.read_text())
        assert all("w3.org" in url or "host" in url or "127.0.0.1" in url for url in urls), (
            path.name,
            urls,
        )
    page = (WEB / "index.html").read_text()
    assert "<style" not in page
    assert not re.search(r"<script(?![^>]*src=)", page)
    assert not re.search(r"\son\w+=|\sstyle=", page)


def test_model_text_is_never_markup() -> None:
    for path in WEB.glob("*.js"):
        code = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.S)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", code), (
            path.name
        )


def test_every_id_that_the_script_uses_is_on_the_page() -> None:
    page = set(re.findall(r'id="([^"]+)"', (WEB / "index.html").read_text()))
    used = set(re.findall(r'\$\("([^"]+)"\)', (WEB / "chat.js").read_text()))
    assert used
    assert used <= page, used - page


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize("path", sorted(WEB.glob("*.js")), ids=lambda path: path.name)
def test_the_scripts_parse(path: Path) -> None:
    source = path.read_bytes()
    command = ["node", "--input-type=module", "--check", "-"]
    result = subprocess.run(command, input=source, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()


CORE = """
import { Core } from "./ramify-core.js";
const core = new Core({ client: "t" });
core.receive({ type: "state", session: "s", key: "k", op: 0, revision: 1,
  branches: [{ branch: "main", position: 0 }] });
const ticket = core.submit({ type: "generate", branch: "main" }, 1);
const stream = ticket.streams.get("main");
core.receive({ type: "delta", branch: "main", position: 5, text: "Hel" });
const again = core.openMessage();
core.receive([
  { type: "state", session: "s", op: 1, revision: 2, resumed: true,
    branches: [{ branch: "main", position: 8, running: 1, started_at: 2 }] },
  { type: "delta", branch: "main", position: 8, text: "lo" },
  { type: "done", id: 1, branch: "main", position: 8, reason: "stop", usage: {} },
]);
const { have, session } = again;
console.log(JSON.stringify({ have, session, text: stream.text, done: stream.done.reason }));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_core_resumes_where_it_was() -> None:
    command = ["node", "--input-type=module", "-e", CORE]
    result = subprocess.run(command, cwd=WEB, capture_output=True, check=True)
    assert json.loads(result.stdout) == {
        "have": {"main": 5},
        "session": "s",
        "text": "Hello",
        "done": "stop",
    }
