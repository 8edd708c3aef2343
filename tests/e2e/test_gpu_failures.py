"""What a GPU can do to a server: run out of memory, give NaN, lose its process; and the next start.

Each test drives `ramify serve` with its executor in a process of its own. They need the GPU for
themselves: one of them takes all of its memory.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from ramify.gpu.models.config import read_config
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.startup.random_weights import fill_random

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 512,
    "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 16384,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
POISON = 300  # the token whose embedding is NaN
PATIENCE = 60.0
Message = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights, of which those of one token are no numbers."""
    made = tmp_path_factory.mktemp("model") / "tiny"
    made.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, made)
    (made / "config.json").write_text(json.dumps(SHAPE))
    weights = Decoder(read_config(made), 64, torch.bfloat16, torch.device("cpu")).weights()
    fill_random(weights)
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    weights["lm_head.weight"][POISON] = 0.0  # never the likeliest
    save_file({name: view.contiguous() for name, view in weights.items()}, made / "model.safetensors")
    return made


class Server:
    """`ramify serve` in a process, with all that it says."""

    def __init__(self, folder: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "ramify.clients.cli", "serve", "--model", str(folder)]
        command += ["--device", "cuda", "--kv-tokens", "40000", "--max-rows", "16"]
        self.process = subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        self.said = ""
        self._heard: dict[str, int] = {}
        self._ready = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.output:
            self.said += line
            if "ready: ws://" in line:
                self._ready.set()
        self._ready.set()

    @property
    def url(self) -> str:
        """Once it is ready."""
        assert self._ready.wait(60), self.said
        found = re.search(r"ready: (ws://\S+)", self.said)
        assert found, self.said
        return found[1]

    @property
    def port(self) -> str:
        return self.url.rsplit(":", 1)[1].split("/")[0]

    def executor(self) -> int:
        """Process id of the executor."""
        children = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                command = (stat.parent / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == self.process.pid and b"executor.executor_program" in command:
                children.append(int(stat.parent.name))
        assert len(children) == 1, children
        return children[0]

    def says(self, text: str) -> None:
        """Wait until it has said `text` once more than when it was asked for last."""
        end = time.monotonic() + PATIENCE
        self._heard[text] = self._heard.get(text, 0) + 1
        while self.said.count(text) < self._heard[text]:
            assert time.monotonic() < end, self.said
            time.sleep(0.01)

    def exit_code(self, seconds: float = PATIENCE) -> int:
        """Raises TimeoutExpired if it does not end by itself."""
        return self.process.wait(seconds)


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Server]:
    server = Server(folder, *flags)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        server.reader.join(PATIENCE)
        server.output.close()


class Peer:
    """A socket with a session and one branch."""

    def __init__(self, socket: ClientConnection, server: Server) -> None:
        self.socket = socket
        self.server = server
        self.send({"type": "open", "client": "peer"})
        self.until("state")

    def send(self, *messages: Message) -> None:
        self.socket.send(json.dumps(messages))

    def generate(self, ident: int, prompt: list[int], count: int) -> None:
        self.send(
            {"type": "append", "id": ident, "tokens": prompt},
            {"type": "generate", "id": ident + 1, "max_tokens": count, "temperature": 0,
             "ignore_eos": True},
        )  # fmt: skip

    def until(self, *types: str, ident: int | None = None) -> Message:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                frame = json.loads(self.socket.recv(timeout=max(0.0, end - time.monotonic())))
            except TimeoutError:
                raise AssertionError(f"no {types}: {self.server.said}") from None
            for message in frame if isinstance(frame, list) else [frame]:
                if message["type"] in types and ident in (None, message.get("id")):
                    return dict(message)

    def closed(self) -> int:
        """Read on until the server closes; its code."""
        try:
            while True:
                self.socket.recv(timeout=PATIENCE)
        except ConnectionClosed:
            assert self.socket.close_code is not None
            return self.socket.close_code


@contextmanager
def peer(server: Server) -> Iterator[Peer]:
    with connect(server.url, max_size=None, compression=None) as socket:
        yield Peer(socket, server)


def is_internal(end: Message) -> bool:
    return end.get("error" if end["type"] == "done" else "code") == "internal"


def serves(server: Server) -> None:
    """It answers a request in full."""
    with peer(server) as one:
        one.generate(1, [5, 6, 7], 40)
        done = one.until("done", "error", ident=2)
        assert (done.get("reason"), done["usage"]["output"]) == ("length", 40), done


def test_a_killed_executor(folder: Path) -> None:
    """Another one takes its place, twice; sockets stay, and the generation goes on."""
    with serving(folder, "--port", "0") as server:
        with peer(server) as one, peer(server) as idle:
            one.generate(1, [5, 6, 7], 12_000)
            for _ in range(2):
                going = time.monotonic() + 0.5  # deltas from before the last death are read by then
                while time.monotonic() < going:
                    one.until("delta")
                os.kill(server.executor(), signal.SIGKILL)
                server.says("another executor serves")
            done = one.until("done", "error", ident=2)
            assert (done.get("reason"), done["usage"]["output"]) == ("length", 12_000)
            idle.generate(1, [5, 6, 7], 40)
            assert idle.until("done", "error", ident=2).get("reason") == "length"
        assert server.said.count("SIGKILL") == 2
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0


def test_out_of_memory(folder: Path) -> None:
    """Another program takes the memory; then a step comes that is too large for a graph.

    Once the other program has let go, an executor starts again, and both requests are answered.
    """
    flags = (
        "--step-tokens",
        "16384",
        "--mixed-tokens",
        "16384",
        "--itl-target-ms",
        "0",
        "--context",
        "16384",
    )
    with serving(folder, "--port", "0", *flags) as server:
        serves(server)
        with peer(server) as one, peer(server) as other:
            other.generate(1, [5, 6, 7], 12_000)
            other.until("delta")
            taken = take_all_memory()
            try:
                one.generate(1, [7] * 14_000, 10)
                server.says("the executor failed")
            finally:
                taken.clear()
                torch.cuda.empty_cache()
            for each in (one, other):
                end = each.until("done", "error", ident=2)
                assert end.get("reason") == "length", (end, server.said)
        assert "OutOfMemoryError" in server.said
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0


def take_all_memory() -> list[torch.Tensor]:
    """Everything that the GPU has left, but for crumbs."""
    taken = []
    size = 1 << 36
    while size >= 1 << 21:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size >>= 1
    return taken


def test_logits_that_are_not_finite(folder: Path) -> None:
    """The request ends with `internal`; its neighbours, and those after it, are as without it."""
    with serving(folder, "--port", "0") as server:
        with peer(server) as alone:
            alone.generate(1, [5, 6, 7], 300)
            wanted = alone.until("done", ident=2)
        with peer(server) as bad, peer(server) as good:
            good.generate(1, [5, 6, 7], 300)
            good.until("delta")
            bad.generate(1, [5, POISON], 20)
            assert is_internal(bad.until("done", "error", ident=2))
            done = good.until("done", ident=2)
            assert done["usage"]["output"] == wanted["usage"]["output"]
            bad.send({"type": "rollback", "id": 3, "to": 0})
            bad.until("ok", ident=3)
            bad.generate(4, [5, 6, 7], 20)
            assert bad.until("done", "error", ident=5).get("reason") == "length"
        assert "not finite" in server.said
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
