"""The README's pictures of the chat page: docs/killed.webp, docs/drafts.webp and docs/chat.webp.

    python benchmarks/recording.py [killed] [drafts] [chat] [--folder docs]

Starts `ramify serve` with a store in a temporary folder and films the chat page in Chromium
(`recording.mjs`, with the page's playwright-core: `npm ci` in clients/web/page). In `killed` the
server's process group gets SIGKILL and is started again. No pictures are taken while it starts, and one
that stands still is shown for 0.9 s at most. Needs Chromium, Node and Pillow. It measures nothing.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
SCENES = ("killed", "drafts", "chat")
MOST_BYTES = 1_000_000
STILL_MS = 900  # the most that one picture is shown
START_S = 180.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A `ramify serve` that can be killed and started again on its port and store."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._store = folder / "sessions.db"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it is ready. Raises RuntimeError."""
        command = [sys.executable, "-m", "ramify.clients.cli", "serve", "--port", str(self.port)]
        command += ["--store", str(self._store), "--log-level", "error"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        until = time.monotonic() + START_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the server did not start")
            time.sleep(0.1)

    def kill(self) -> None:
        """End its processes at once, without a word."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def film(scene: str, server: Server, chromium: str, folder: Path) -> None:
    """Let the page be filmed; do to the server what the film asks for."""
    command = ["node", str(HERE / "recording.mjs"), scene, f"http://127.0.0.1:{server.port}/", chromium]
    with subprocess.Popen(
        [*command, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as node:
        assert node.stdin is not None
        assert node.stdout is not None
        for line in node.stdout:
            {"kill": server.kill, "start": server.start}[line.strip()]()
            node.stdin.write("done\n")
            node.stdin.flush()
    if node.returncode:
        raise RuntimeError("the film broke off")


def assemble(folder: Path, output: Path) -> None:
    """One picture, moving if there are several, each shown as long as it stood, up to a bound."""
    files = sorted(folder.glob("*.png"))
    times = [int(path.stem.split("-")[1]) for path in files]
    pictures: list[Image.Image] = []
    shown: list[int] = []
    for path, begin, end in zip(files, times, [*times[1:], times[-1] + STILL_MS], strict=True):
        picture = Image.open(path).convert("RGB")
        if pictures and picture.tobytes() == pictures[-1].tobytes():
            shown[-1] += end - begin
        else:
            pictures.append(picture)
            shown.append(end - begin)
    for quality in (80, 60, 40):
        pictures[0].save(
            output, save_all=True, append_images=pictures[1:], loop=0, quality=quality, method=4,
            duration=[min(each, STILL_MS) for each in shown],
        )  # fmt: skip
        if output.stat().st_size < MOST_BYTES:
            break
    seconds = sum(min(each, STILL_MS) for each in shown) / 1000
    print(f"{output}: {seconds:.1f} s, {len(pictures)} pictures, {output.stat().st_size:,} bytes")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("scenes", nargs="*", choices=[*SCENES, []], help="which pictures; all")
    parser.add_argument("--folder", type=Path, default=Path("docs"), help="where they go")
    options = parser.parse_args()
    chromium = (
        shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    )
    if chromium is None or shutil.which("node") is None:
        sys.exit("needs Chromium and Node")
    for scene in options.scenes or SCENES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "pictures").mkdir()
            server = Server(folder)
            try:
                server.start()
                film(scene, server, chromium, folder / "pictures")
            finally:
                server.kill()
            assemble(folder / "pictures", options.folder / f"{scene}.webp")


if __name__ == "__main__":
    main()
