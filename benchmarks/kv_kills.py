"""A server with a disk of KV that is killed again and again: what does the next one find, and serve?

    python benchmarks/kv_kills.py [--kills 500] [--life 1.0] [--prompts 24] [--seed 0] [--flips 2]
        [--form full|states|windows]

The fake executor, whose outputs tell of a wrong page, and which breaks a step that reads another state
or window page than its own, has a pool and host memory too small for all
prompts, and a disk for about half of them. Eight clients ask for random prompts until SIGKILL comes, at
a random moment of at most `--life` seconds. Then every record of the disk that is whole must name a
block that is, sealed under its key; `--flips` bits are flipped, and the next server begins. Each output
is compared with what the tokens alone say. The exit code is 1 if anything differs.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fake_server import BUNDLED
from report import headline, machine
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from ramify.actors.engine import running_engine
from ramify.actors.executor.spec import FakeSpec
from ramify.actors.kit.log import configure
from ramify.actors.tiers.disk_file import DiskFile, empty_block
from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.executors.fake_model import FakeModel
from ramify.gpu.kv.host_memory import HostMemory
from ramify.protocol.config import EngineConfig, LogConfig, ModelConfig, ServerConfig

CLIENTS, OUTPUT, VOCABULARY = 8, 12, 1000
FAKE: dict[str, Any] = {"pages": 2048, "host_blocks": 40, "context": 1024}
FORMS: dict[str, dict[str, int]] = {
    "full": {}, "states": {"state_slots": 40}, "windows": {"window": 16, "window_pages": 2400}
}  # fmt: skip
PLACES = 96


def serve(folder: Path, form: str, pipe: Connection) -> None:
    async def run() -> None:
        disk = {"kv_host": 1, "kv_disk": folder, "kv_disk_bytes": PLACES * (BLOCK_BYTES + 64)}
        config = EngineConfig(
            model=ModelConfig(path=BUNDLED, **disk), server=ServerConfig(port=0), executor="thread"
        )
        async with running_engine(config, spec=FakeSpec(FAKE | FORMS[form], {"eos_every": 0})) as engine:
            pipe.send(engine.port)
            await asyncio.sleep(3600)

    configure(LogConfig(level="error"))
    asyncio.run(run())


_INFO = FakeExecutor(FakeModel(eos_every=0), **FAKE).info
BLOCK_BYTES, STAMP = _INFO.block_bytes, _INFO.kv_stamp


class Campaign:
    def __init__(self, options: argparse.Namespace) -> None:
        self.dice, self.options = random.Random(options.seed), options
        self.prompts = [
            [self.dice.randrange(1, VOCABULARY) for _ in range(self.dice.randrange(200, 900))]
            for _ in range(options.prompts)
        ]
        model = FakeModel(eos_every=0)
        self.expected = [model.expected(prompt, OUTPUT) for prompt in self.prompts]
        self.answers = self.cached = self.wrong = self.torn = self.blocks = 0
        self.flips = self.snapshots = 0  # bits that were flipped, and those of them in snapshots
        self.flipped: set[int] = set()  # places with flipped bits
        self.ready: list[float] = []

    async def ask(self, url: str) -> None:
        """One prompt after the other, until the server is gone."""
        while True:
            number = self.dice.randrange(len(self.prompts))
            ops = [
                {"type": "open", "client": "kills", "ttl_s": 0, "tokens": True},
                {"type": "append", "id": 1, "tokens": self.prompts[number]},
                {"type": "generate", "id": 2, "temperature": 0, "max_tokens": OUTPUT,
                 "ignore_eos": True},
            ]  # fmt: skip
            try:
                async with connect(url, max_size=None) as socket:
                    await socket.send(json.dumps(ops))
                    await self._hear(socket, number)
            except (OSError, WebSocketException):
                return

    async def _hear(self, socket: Any, number: int) -> None:
        heard: list[int] = []
        async for frame in socket:
            found = json.loads(frame)
            for event in found if isinstance(found, list) else [found]:
                if event["type"] == "delta":
                    heard += event.get("tokens", [])
                elif event["type"] == "error":
                    raise RuntimeError(str(event))
                elif event["type"] == "done":
                    self.answers += 1
                    self.cached += event["usage"]["cached"]
                    self.wrong += heard != self.expected[number]
                    return

    async def live(self, port: int, pid: int, seconds: float) -> None:
        url = f"ws://127.0.0.1:{port}/v1/ws"
        clients = asyncio.gather(*(self.ask(url) for _ in range(CLIENTS)))
        await asyncio.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        await clients

    def audit(self, folder: Path) -> None:
        """Read all that the index names; then flip some bits."""
        file, block, seals = self._opened(folder), empty_block(BLOCK_BYTES), HostMemory(1, BLOCK_BYTES)
        for key, place in file.found:
            seal = file.read(place, key, block)
            torn = seal is None or seal != seals.seal(key, block)
            self.torn += torn and place not in self.flipped
            if torn:
                file.put(file.index, bytes(64), 64 * (1 + place))  # the next flips are others
        self.blocks += len(file.found)
        notes = {place for key, place in file.found if key in file.notes}
        self.flipped = set()
        file.close()
        seals.close()
        path = folder / "kv-0.blocks"
        with path.open("r+b") as blocks:
            for _ in range(self.options.flips if path.stat().st_size else 0):
                at = self.dice.randrange(path.stat().st_size)
                blocks.seek(at)
                (was,) = blocks.read(1)
                blocks.seek(at)
                blocks.write(bytes([was ^ 1 << self.dice.randrange(8)]))
                self.flips += 1
                self.snapshots += at // BLOCK_BYTES in notes
                self.flipped.add(at // BLOCK_BYTES)

    @staticmethod
    def _opened(folder: Path) -> DiskFile:
        return DiskFile(folder, STAMP, BLOCK_BYTES, PLACES * (BLOCK_BYTES + 64))

    def run(self) -> None:
        fork = get_context("fork")  # all is imported already
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for kill in range(self.options.kills):
                if kill:
                    self.audit(folder)
                ours, theirs = fork.Pipe()
                server = fork.Process(target=serve, args=(folder, self.options.form, theirs))
                begun = time.perf_counter()
                server.start()
                theirs.close()  # so that the end of a server that cannot start is heard
                port = ours.recv()
                self.ready.append(time.perf_counter() - begun)
                assert server.pid is not None
                asyncio.run(self.live(port, server.pid, self.dice.uniform(0.05, self.options.life)))
                server.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--life", type=float, default=1.0, help="seconds at most")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--flips", type=int, default=2, help="bits that are flipped after each kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", choices=FORMS, default="full", help="of the model's layers")
    campaign = Campaign(parser.parse_args())
    print(headline(machine()))
    try:
        campaign.run()
    finally:
        print(
            f"{len(campaign.ready)} kills, {campaign.answers} answers, {campaign.wrong} of them wrong; "
            f"{campaign.cached} prompt tokens cached; {campaign.blocks} blocks read after kills, "
            f"{campaign.torn} torn ones named; {campaign.flips} bits flipped, "
            f"{campaign.snapshots} of them in snapshots"
        )
    raise SystemExit(int(campaign.wrong > 0 or campaign.torn > 0))


if __name__ == "__main__":
    main()
