"""The chat page in a real browser: Chromium, driven by playwright-core from Node (`page/*.mjs`).

Scenes share a server and a browser, and are played side by side where they can be. Needs Chromium,
Node, and `npm ci` in clients/web/page, which `make test` does where npm is there.
"""

import asyncio
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ramify.actors.engine import running_engine
from ramify.actors.executor.spec import FakeSpec
from ramify.protocol.config import EngineConfig, ModelConfig, ServerConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "clients/web/page"
SITE = ROOT / "clients/web/site"
LIBRARY = ROOT / "clients/web/lib"
SCENES = Path(__file__).parent / "page"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
INSTALLED = shutil.which("node") is not None and (PAGE / "node_modules").is_dir()
MOST_S = 480  # however busy the machine is
MOST_BYTES = 300_000  # of a built file
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
    ".txt": "text/plain",
}

needs_packages = pytest.mark.skipif(not INSTALLED, reason="needs node, and `npm ci`")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or not INSTALLED, reason="needs chromium, node, and `npm ci`"
)


def fetch(url: str) -> tuple[int, dict[str, str], bytes]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()


def config(folder: Path, **server: Any) -> EngineConfig:
    return EngineConfig(model=ModelConfig(path=folder), server=ServerConfig(port=0, **server))


def fake(step_seconds: float, *, sees: bool = False) -> FakeSpec:
    """A model whose answers end only where they are cut. `sees`: it is shown pictures."""
    return FakeSpec(
        settings={"step_seconds": step_seconds, "sees": sees},
        model={"vocab_size": 384, "eos": 2, "first": 3, "eos_every": 9999},
    )


async def test_every_file_is_served_with_its_type_and_a_strict_policy(tokenizer_folder: Path) -> None:
    async with running_engine(config(tokenizer_folder), spec=FakeSpec()) as engine:
        base = f"http://127.0.0.1:{engine.port}/"
        for path in sorted([*SITE.iterdir(), *LIBRARY.iterdir()]):
            place = "ramify/" if path.parent == LIBRARY else ""
            status, headers, body = await asyncio.to_thread(fetch, base + place + path.name)
            assert status == 200
            assert headers["content-type"].startswith(TYPES[path.suffix]), path.name
            assert "default-src 'self'" in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert body == path.read_bytes()
        _, _, body = await asyncio.to_thread(fetch, base)
        assert body == (SITE / "index.html").read_bytes()


def test_built_files_are_small() -> None:
    assert [path.name for path in SITE.iterdir() if path.stat().st_size > MOST_BYTES] == []


@pytest.mark.parametrize("name", sorted(path.name for path in SITE.glob("*.html")))
def test_a_page_has_no_code_of_its_own_and_needs_nothing_from_elsewhere(name: str) -> None:
    text = (SITE / name).read_text()
    assert "<style" not in text
    assert not re.search(r"<script(?![^>]*src=)", text)
    assert not re.search(r"\son\w+=|\sstyle=", text)
    assert "//" not in text.replace("<!doctype", "")


def test_our_sources_never_make_markup_of_text() -> None:
    for path in (PAGE / "src").rglob("*.js*"):
        code = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.DOTALL)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", code), path


@needs_packages
def test_the_built_page_is_what_its_sources_make() -> None:
    done = subprocess.run(
        ["node", "build.mjs", "--check"], cwd=PAGE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@needs_browser
@pytest.mark.slow
async def test_scenes(tokenizer_folder: Path) -> None:
    """Two servers, whose models write at different paces, and a browser for each: they mostly wait."""
    quick = _played(0.004, ("chats", "forms", "shell", "offline"), tokenizer_folder)
    slow = _played(0.01, ("branches", "sessions", "render", "watching"), tokenizer_folder)
    for code, said in await asyncio.gather(quick, slow):
        assert code == 0, said


async def _played(step_seconds: float, scenes: tuple[str, ...], folder: Path) -> tuple[int | None, str]:
    """How the scenes ended, and what they said."""
    spec = fake(step_seconds, sees="branches" in scenes)
    async with running_engine(config(folder), spec=spec) as engine:
        process = await asyncio.create_subprocess_exec(
            "node",
            "run.mjs",
            f"http://127.0.0.1:{engine.port}",
            str(CHROMIUM),
            *scenes,
            cwd=SCENES,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), MOST_S)
        finally:
            if process.returncode is None:
                process.kill()
        return process.returncode, said.decode()


@needs_browser
@pytest.mark.slow
async def test_a_chat_outlives_restarts_of_the_server(tokenizer_folder: Path, tmp_path: Path) -> None:
    now, older = tmp_path / "now", tmp_path / "older"
    now.mkdir()
    process = None
    port = 0
    try:
        for asked in (b"restart now\n", b"forget now\n", b""):
            server = ServerConfig(port=port, store=str(now / "sessions.db"), grace_s=0)
            settings = EngineConfig(model=ModelConfig(path=tokenizer_folder), server=server)
            async with running_engine(settings, spec=fake(0.01)) as engine:
                port = engine.port
                if process is None:
                    process = await asyncio.create_subprocess_exec(
                        "node",
                        "run.mjs",
                        f"http://127.0.0.1:{port}",
                        str(CHROMIUM),
                        "restarts",
                        cwd=SCENES,
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=asyncio.subprocess.STDOUT,
                    )
                else:
                    assert process.stdin is not None
                    process.stdin.write(b"done\n")
                said = await _until(process, asked)
            await _closed(now / "sessions.db-wal")
            if asked == b"restart now\n":
                shutil.copytree(now, older)
            elif asked == b"forget now\n":
                shutil.rmtree(now)
                shutil.copytree(older, now)
        assert process is not None
        assert await asyncio.wait_for(process.wait(), MOST_S) == 0, said
    finally:
        if process is not None and process.returncode is None:
            process.kill()


async def _closed(log: Path) -> None:
    """Wait for a thread of the server that may close the store a moment later: its log goes then."""
    for _ in range(50):
        if not log.exists():
            return
        await asyncio.sleep(0.1)


async def _until(process: asyncio.subprocess.Process, line: bytes) -> str:
    """What the scenes say up to a line; b"": to their end."""
    assert process.stdout is not None
    said = []
    async with asyncio.timeout(MOST_S):
        async for each in process.stdout:
            said.append(each.decode())
            if line and each == line:
                return "".join(said)
    assert not line, "".join(said)
    return "".join(said)
