"""The browser client as the server gives it out, and the page in a real browser where there is one."""

import asyncio
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect

from ramify.actors.engine import running_engine
from ramify.actors.executor.spec import FakeSpec
from ramify.protocol.config import EngineConfig, ModelConfig, ServerConfig

WEB = Path(__file__).resolve().parents[2] / "clients/web/page"
LIBRARY = WEB.parent / "lib"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
]
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def fetch(url: str) -> tuple[int, dict[str, str], bytes]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()


async def test_every_file_is_served_with_its_type_and_a_strict_policy(tokenizer_folder: Path) -> None:
    config = EngineConfig(model=ModelConfig(path=tokenizer_folder), server=ServerConfig(port=0))
    async with running_engine(config, spec=FakeSpec()) as engine:
        base = f"http://127.0.0.1:{engine.port}/"
        for path in sorted([*WEB.iterdir(), *LIBRARY.iterdir()]):
            place = "ramify/" if path.parent == LIBRARY else ""
            status, headers, body = await asyncio.to_thread(fetch, base + place + path.name)
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


def test_every_id_that_the_scripts_use_is_on_the_page() -> None:
    page = set(re.findall(r'id="([^"]+)"', (WEB / "index.html").read_text()))
    for path in WEB.glob("*.js"):
        used = set(re.findall(r'\$\("([^"]+)"\)', path.read_text()))
        assert used <= page, (path.name, used - page)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts where every version of node takes them for modules."""
    folder = tmp_path_factory.mktemp("web")
    for path in WEB.glob("*.js"):
        shutil.copy(path, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def node(modules: Path, script: str) -> Any:
    """What `script` prints, which is JSON."""
    (modules / "script.js").write_text(script)
    result = subprocess.run(["node", "script.js"], cwd=modules, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()
    return json.loads(result.stdout)


@needs_node
@pytest.mark.parametrize("name", sorted(path.name for path in WEB.glob("*.js")))
def test_the_scripts_parse(modules: Path, name: str) -> None:
    result = subprocess.run(["node", "--check", name], cwd=modules, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()


@needs_node
def test_a_conversation_can_be_built_again_from_its_text(modules: Path) -> None:
    """Replayed into an empty tree, the ops give the same branches, turns and children."""
    script = """
import { Conversation } from "./conversation.js";
const talk = new Conversation();
let id = 0;
const say = (name, content, position) => {
  const messages = [{ role: "user", content }];
  talk.appended(talk.append(name, messages), messages, { id: ++id, position });
};
const reply = (name, text, position, prompt) =>
  talk.answered(name, { id: ++id, position, reason: "stop", usage: { prompt }, text });
say("main", "one", 5); reply("main", "1", 7, 5); say("main", "two", 12);
talk.forked("main", ["b2", "b3"], 12);
reply("b2", "2", 14, 12); reply("b3", "zwei", 15, 12);
talk.forked("b2", ["b4"], 7); say("b4", "other", 11);
const shape = [...talk.branches.values()]
  .map(({ name, turns }) => [name, turns.map(({ text }) => text)]);
const built = new Map([["main", []]]);
for (const { op, branch, as, turn } of talk.replay()) {
  if (op === "root") built.set(as, []);
  else if (op === "fork") built.set(as, [...built.get(branch)]);
  else built.get(branch).push(turn.text);
}
const answers = talk.answers("main").map(({ name }) => name);
console.log(JSON.stringify({ built: [...built].sort(), shape: shape.sort(), answers }));
"""
    result = node(modules, script)
    assert result["built"] == result["shape"]
    assert result["answers"] == ["b2", "b3"]


class Browser:
    """A page of a headless Chromium, over the DevTools protocol."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._last = 0

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        await self._socket.send(json.dumps({"id": self._last, "method": method, "params": params}))
        while True:
            answer = json.loads(await asyncio.wait_for(self._socket.recv(), 20))
            if answer.get("id") == self._last:
                return answer

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        result = answer.get("result", {})
        assert "exceptionDetails" not in result, result
        return result.get("result", {}).get("value")

    async def until(self, condition: str) -> None:
        """Wait for a JavaScript condition, also while the page is loading."""
        poll = (
            f"setInterval(() => {{ if ({condition}) {{ clearInterval(timer); resolve(true); }} }}, 10)"
        )
        for _ in range(100):
            if await self.value(f"new Promise((resolve) => {{ const timer = {poll}; }})"):
                return
        raise AssertionError(f"the page never got to {condition}")


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Browser]:
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *QUIET, f"--user-data-dir={folder}", "about:blank", stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        async for line in process.stderr:
            if found := re.search(rb"listening on ws://([^/]+)/", line):
                break
        else:
            pytest.skip("chromium does not start here")
        _, _, body = await asyncio.to_thread(fetch, f"http://{found[1].decode()}/json/list")
        page = next(each for each in json.loads(body) if each["type"] == "page")
        async with connect(page["webSocketDebuggerUrl"], max_size=None) as socket:
            yield Browser(socket)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
async def test_the_page_streams_through_a_refresh(tokenizer_folder: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=ModelConfig(path=tokenizer_folder), server=ServerConfig(port=0))
    spec = FakeSpec(
        settings={"step_seconds": 0.01},
        model={"vocab_size": 384, "eos": 2, "first": 3, "eos_every": 9999},
    )
    ask = """(text, answers) => {
      document.getElementById("answers").value = answers;
      document.getElementById("input").value = text;
      document.getElementById("composer").requestSubmit();
    }"""
    texts = "[...document.querySelectorAll('#turns .text')].map((each) => each.textContent)"
    opened = "document.getElementById('status')?.dataset.status === 'open'"
    async with running_engine(config, spec=spec) as engine, browser(tmp_path) as page:
        await page.call("Page.navigate", url=f"http://127.0.0.1:{engine.port}/")
        await page.until(opened)
        await page.value("localStorage.setItem('ramify chat settings', '{\"max-tokens\": \"150\"}')")
        await page.call("Page.reload")
        await page.until(f"{opened} && document.activeElement.id === 'input'")
        await page.value(f"({ask})('<b>Hello</b>', 1)")
        await page.until(f"{texts}[0]?.length > 40")
        (before,) = await page.value(texts)
        await page.call("Page.reload")
        await page.until(f"{opened} && {texts}[0]?.length > {len(before)}")
        await page.until("document.querySelector('#turns .stats') && !document.querySelector('.live')")
        (after,) = await page.value(texts)
        assert after.startswith(before)
        assert await page.value("document.querySelector('.bubble').textContent") == "<b>Hello</b>"
        assert "150 tokens" in await page.value("document.querySelector('#turns .stats').textContent")

        await page.value(f"({ask})('Two, please', 2)")
        await page.until("document.querySelectorAll('.card .choose').length === 2")
        answers = (await page.value(texts))[1:]
        await page.value("document.querySelectorAll('.card .choose')[1].click()")
        assert (await page.value(texts))[1:] == [answers[1]]
        assert await page.value("document.querySelectorAll('#tree .pick').length") == 3
