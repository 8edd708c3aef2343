"""Replicas on several Ray nodes: what happens when a node, a link, a front's host or Ray's head is lost?

    sudo .venv/bin/python benchmarks/nodes.py [lost silent joins slow front head bundled] [--json FILE]

The hosts are network namespaces of this machine with a switch between them (`node_hosts.py`), each with
a Ray node of its own; a front with TLS and `--replicas-on ray` on one of them, clients outside. Streams
are greedy, and each text must be that of an undisturbed run; "wait" is the longest time between two
deltas of a stream. The fake executor, but for `bundled`.

    lost     all processes of a node are killed at once, and it is silent
    silent   a node's link goes dead without a word, and works again after 20 s
    joins    a new node comes; more replicas are wanted than there was room for (--replicas-max)
    slow     there and back take 50 ms (+- 7), and 1 % of the packets are lost, for all replicas
    front    the front's host is lost; clients resume at another front with the same store (PostgreSQL)
    head     Ray's head is lost, and comes back after two minutes
    bundled  `lost` and `silent` with the model that comes with Ramify

Needs root on Linux, iproute2 and util-linux, the extra `ray`, and for `front` PostgreSQL and the extra
`postgres`. What it makes is gone behind it. The exit code is 1 if a text differs, a socket was closed or
a stream waited over 5 s where it must not.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

from fake_server import write_model_folder
from node_hosts import Host, Network, obstacle
from report import headline, machine, write_json
from websockets.asyncio.client import ClientConnection, connect

from ramify.actors.engine import running_engine
from ramify.actors.executor.spec import FakeSpec
from ramify.actors.kit.files import allow_files
from ramify.actors.kit.log import configure
from ramify.protocol.config import EngineConfig, LogConfig, ModelConfig, ReplicasConfig, ServerConfig

BUNDLED = Path(__file__).resolve().parents[1] / "gpu" / "default_model"
RAY_PORT, PORT, JOIN_PORT, DATABASE_PORT = 6379, 8765, 7000, 5432
RAY = str(Path(sys.executable).with_name("ray"))
WAIT_S = 5.0  # that no stream may wait
WIRE = (0.025, 0.005, 0.005)  # delay one way, its spread, packets lost: twice that for way and back
HEADLESS_S = 120.0  # without Ray's head
AWAY_S = 20.0  # that a link is dead
PATIENCE_S = 180.0
STEP_S = 0.02
LETTERS = 4  # of a token of the fake executor
SILENCE_S = 1.0  # after which the clients of `front` try the other one
SESSIONS = itemgetter("sessions")
TITLES = {
    "lost": "all processes of a node are killed",
    "silent": f"a node's link is dead for {AWAY_S:g} s",
    "joins": "a node comes when there is too much to do",
    "slow": "slow and lossy links to the replicas",
    "front": "the front's host is lost, another front has the same store",
    "head": "Ray's head is lost",
    "bundled": "the bundled model: a node is lost, a link goes dead",
}
PARTS = tuple(TITLES)


# --- the front's process --------------------------------------------------------------------------


async def serve(options: argparse.Namespace) -> None:
    """Until killed."""
    folder = Path(options.folder)
    size, first = write_model_folder(folder)
    configure(LogConfig(format="json"))
    model, spec = ModelConfig(path=BUNDLED, device="cpu", threads=1), None
    if not options.bundled:
        model = ModelConfig(path=folder)
        settings = {"step_seconds": STEP_S, "pages": 1 << 16, "context": 8192, "max_rows": options.rows}
        spec = FakeSpec(settings, {"vocab_size": size, "first": first, "eos": 2})
    config = EngineConfig(
        model=model,
        server=ServerConfig(host=options.host, port=PORT, insecure=True, store=options.store),
        gateways=0,
        replicas=ReplicasConfig(
            count=options.replicas,
            most=options.most,
            ttft_s=0.1,
            on="ray",
            listen="0.0.0.0",
            listen_port=JOIN_PORT,
            tls_cert=folder / "cert.pem",
            tls_key=folder / "key.pem",
            ray_address=options.ray_address,
            silence_s=options.silence,
        ),
    )
    allow_files(4096)
    async with running_engine(config, spec=spec):
        await asyncio.sleep(1e9)


# --- the cluster ----------------------------------------------------------------------------------


class RayHosts:
    """Hosts with Ray nodes."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.start_head()

    def start_head(self) -> None:
        """Or another one, with the same address."""
        self.head = self.network.host("head")
        self.start(self.head, 0)

    def node(self, name: str, cpus: int = 2, **fields: Any) -> Host:
        """A new host that joins."""
        host = self.network.host(name, **fields)
        self.start(host, cpus)
        return host

    def start(self, host: Host, cpus: int) -> None:
        """Ray on it."""
        at = ["--head", "--port", str(RAY_PORT), "--include-dashboard", "false"]
        if host.name != "head":
            at = ["--address", f"{self.head.address}:{RAY_PORT}"]
        own = ["--node-ip-address", host.address, "--num-cpus", str(cpus), "--disable-usage-stats"]
        host.run([RAY, "start", *at, *own, "--object-store-memory", "80000000"], "ray.log")

    def front(self, host: Host, replicas: int, **fields: Any) -> "FrontHost":
        """`ramify serve` on this host."""
        return FrontHost(self, host, replicas, **fields)


class FrontHost:
    """A front on a host, seen from outside. `lost`: it is known to be gone."""

    def __init__(self, cluster: RayHosts, host: Host, replicas: int, **fields: Any) -> None:
        self.host, self.replicas = host, replicas
        folder = host.folder / "front"
        folder.mkdir(exist_ok=True)
        cert, key = folder / "cert.pem", folder / "key.pem"
        made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        made += ["-nodes", "-days", "2", "-subj", "/CN=front", "-keyout", str(key), "-out", str(cert)]
        subprocess.run(made, check=True, capture_output=True)
        flags = {"folder": folder, "host": host.address, "replicas": replicas} | fields
        flags["ray_address"] = f"{cluster.head.address}:{RAY_PORT}"
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        words = [word.removesuffix("=True") for word in words]
        self.process = host.start([sys.executable, __file__, "serve", *words], "front.log")

    @property
    def url(self) -> str:
        return f"ws://{self.host.address}:{PORT}/v1/ws"

    def members(self) -> list[dict[str, Any]]:
        """Its replicas."""
        at = f"http://{self.host.address}:{PORT}/v1/info"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(at, timeout=5) as answer:
                found: list[dict[str, Any]] = json.load(answer).get("replicas", [])
        except OSError:
            if self.process.poll() is not None:
                raise RuntimeError(f"the front has ended: {self.log()[-3000:]}") from None
            return []
        return found

    def ready(self) -> list[dict[str, Any]]:
        """Those that are."""
        return [each for each in self.members() if each["state"] == "ready"]

    def log(self) -> str:
        """What it has said."""
        return (self.host.folder / "front.log").read_text()

    async def wait(self, condition: "Callable[[list[dict[str, Any]]], bool]") -> float:
        """Seconds until its ready replicas are so. Raises TimeoutError."""
        began = time.monotonic()
        while not condition(await asyncio.to_thread(self.ready)):
            if time.monotonic() - began > PATIENCE_S:
                raise TimeoutError(f"{self.members()}: {self.log()[-3000:]}")
            await asyncio.sleep(0.1)
        return time.monotonic() - began

    async def full(self) -> float:
        """Seconds until all are ready."""
        return await self.wait(lambda ready: len(ready) >= self.replicas)

    def end(self) -> None:
        """Stop it, and its replicas with it."""
        subprocess.run(["kill", "-TERM", str(self.process.pid)], check=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()


# --- streams --------------------------------------------------------------------------------------


class GreedyStream:
    """One greedy generation. What contradicts docs/protocol.md raises AssertionError."""

    def __init__(self, prompt: str, tokens: int) -> None:
        self._prompt, self._tokens = prompt, tokens
        self._login: dict[str, Any] = {}
        self._ws: ClientConnection | None = None
        self.text, self.position, self.revision = "", 0, 0
        self.times: list[float] = []
        self.ended = False
        self.moved = False  # to another front, which may know less than the client
        self.taken_back = 0  # tokens

    async def open(self, front: FrontHost) -> None:
        """A session, or the one that it had, at this front."""
        self._ws = await connect(front.url, subprotocols=["ramify.v1+json"], proxy=None, open_timeout=30)  # type: ignore[list-item]
        opening: dict[str, Any] = {"type": "open", "client": "load"}
        frame = [opening]
        self.moved = bool(self._login)
        if self._login:
            opening |= self._login | {"have": {"main": self.position}, "revision": self.revision}
        else:
            message = {"role": "user", "content": self._prompt}
            frame.append({"type": "append", "id": 1, "messages": [message]})
        await self._ws.send(json.dumps(frame))
        while True:
            for message in await self._receive():
                if message["type"] == "state":
                    if self._login and not message["resumed"]:
                        raise AssertionError(f"another session: {message}")
                    new = {name: message[name] for name in ("session", "key") if name in message}
                    self._login = {**self._login, **new}
                    if self.times:
                        return
                elif message["type"] == "ok":
                    self.position = message.get("position", self.position)
                    return

    async def generate(self, other: FrontHost | None = None) -> None:
        """Ask for it, and take it to its end. `other`: see `follow`."""
        assert self._ws is not None
        sampling = {"temperature": 0, "max_tokens": self._tokens, "ignore_eos": True}
        self.times.append(time.monotonic())
        await self._ws.send(json.dumps({"type": "generate", "id": 2, **sampling}))
        await self.follow(other)

    async def follow(self, other: FrontHost | None = None) -> None:
        """Take the rest. When nothing comes for SILENCE_S, from the `other` front."""
        while not self.ended:
            try:
                async with asyncio.timeout(SILENCE_S if other is not None else None):
                    await self._receive()
            except TimeoutError:
                assert other is not None
                self.drop()
                await self.open(other)
                other = None

    async def _receive(self) -> list[dict[str, Any]]:
        assert self._ws is not None
        frame = json.loads(await self._ws.recv())
        messages = frame if isinstance(frame, list) else [frame]
        for message in messages:
            self.revision = max(self.revision, message.get("revision", 0))
            if message["type"] == "delta":
                cut = message.get("truncate")
                if cut is not None and not self.moved:
                    raise AssertionError(f"cut back: {message}")
                if cut is not None:  # the fake's tokens are words of four letters
                    self.text = self.text[: len(self.text) - LETTERS * (self.position - cut)]
                    self.taken_back += self.position - cut
                    self.position = cut
                if self.times and cut is None and message["position"] <= self.position:
                    raise AssertionError(f"not behind {self.position}: {message}")
                self.position = message["position"]
                self.text += message["text"]
                self.times.append(time.monotonic())
            elif message["type"] == "done":
                if (message["reason"], message["usage"]["output"]) != ("length", self._tokens):
                    raise AssertionError(f"ended early: {message}")
                self.ended = True
            elif message["type"] == "error":
                raise AssertionError(f"an error: {message}")
        return messages

    def drop(self) -> None:
        """Leave the socket where it is."""
        if self._ws is not None:
            self._ws.transport.abort()

    async def close(self) -> None:
        """End the session."""
        assert self._ws is not None
        await self._ws.send('[{"type": "close", "id": 9}]')
        await self._ws.close()

    def gap(self, since: float = 0.0) -> float:
        """The longest time between two deltas."""
        pairs = itertools.pairwise(self.times)
        return max((b - a for a, b in pairs if b >= since), default=0.0)


async def streams(
    front: FrontHost,
    options: argparse.Namespace,
    tokens: int,
    meanwhile: Callable[[], Awaitable[None]],
    other: FrontHost | None = None,
) -> list[GreedyStream]:
    """All at once. `meanwhile` runs beside them."""
    made = [GreedyStream(f"Tell me {n} things about the sea.", tokens) for n in range(options.streams)]
    for stream in made:
        await stream.open(front)
    await asyncio.gather(*(stream.generate(other) for stream in made), meanwhile())
    for stream in made:
        await stream.close()
    return made


async def nothing() -> None:
    """Nothing happens meanwhile."""


def judged(
    what: str, plain: list[GreedyStream], disturbed: list[GreedyStream], moved: int = 0
) -> dict[str, Any]:
    """What became of the streams."""
    waits = [stream.gap() for stream in disturbed]
    return {
        "what": what,
        "streams": len(disturbed),
        "moved": moved,
        "differ": sum(a.text != b.text for a, b in zip(plain, disturbed, strict=True)),
        "wait": max(waits),
        "wait_median": statistics.median(waits),
        "undisturbed": max(stream.gap() for stream in plain),
    }


class NodesBench:
    """The parts."""

    def __init__(self, network: Network, options: argparse.Namespace) -> None:
        self.network, self.options = network, options
        self.results: list[dict[str, Any]] = []
        self.failed = False

    def note(self, **result: Any) -> None:
        """Print and keep."""
        if result.get("differ") or result.get("wait", 0.0) > WAIT_S:
            self.failed = True
        self.results.append(result)
        shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in result.items()}
        print("  " + ", ".join(f"{name} {value}" for name, value in shown.items()), flush=True)

    async def loss(self, wanted: list[str], *, bundled: bool = False) -> None:
        """`lost` and `silent`, one cluster."""
        options = self.options
        cluster = RayHosts(self.network)
        place = cluster.node("front", cpus=0)
        nodes = [cluster.node(f"node{n}") for n in range(3)]
        front = cluster.front(place, 3, bundled=bundled) if bundled else cluster.front(place, 3)
        took = await front.full()
        hosts = sorted(each["host"] for each in front.ready())
        self.note(what="replicas on", hosts=" ".join(hosts), seconds=took)
        tokens = 250 if bundled else 1500
        plain = await streams(front, options, tokens, nothing)
        name = "bundled " if bundled else ""
        for part in wanted:
            result: dict[str, Any] = {}

            async def breaks(part: str = part, result: dict[str, Any] = result) -> None:
                await asyncio.sleep(3.0)
                victim = max(await asyncio.to_thread(front.ready), key=SESSIONS)
                host = self.network.hosts[victim["host"]]
                result["moved"], mine = victim["sessions"], (host.name, victim["pid"])
                began = time.monotonic()
                host.lose() if part == "lost" else host.unplug()
                result["noticed"] = await front.wait(
                    lambda ready, mine=mine: mine not in [(e["host"], e["pid"]) for e in ready]
                )
                if part == "silent":
                    await asyncio.sleep(AWAY_S - (time.monotonic() - began))
                    host.plug()
                    began = time.monotonic()
                await front.full()
                result["again"] = time.monotonic() - began

            done = await streams(front, options, tokens, breaks)
            self.note(
                **judged(name + part, plain, done, result["moved"]),
                noticed=result["noticed"],
                full_again=result["again"],
                on=" ".join(sorted(each["host"] for each in front.ready())),
            )
            if part == "lost":
                nodes.append(cluster.node("node3"))
        front.end()

    async def joins(self) -> None:
        """`joins`: there is room for one replica, and too much to do for it; then a node comes."""
        cluster = RayHosts(self.network)
        front = cluster.front(cluster.node("front", cpus=0), 1, most=2, rows=8)
        cluster.node("node0", cpus=1)
        await front.full()
        plain = await streams(front, self.options, 300, nothing)
        found: dict[str, Any] = {}

        async def comes() -> None:
            await asyncio.sleep(8.0)
            found["replicas_before"] = len(await asyncio.to_thread(front.ready))
            await asyncio.to_thread(cluster.node, "node1", cpus=1)
            found["ready_after"] = await front.wait(lambda ready: len(ready) == 2)

        async def counted() -> None:
            await asyncio.sleep(2.0)
            ready = await asyncio.to_thread(front.ready)
            found["sessions_there"] = sum(e["sessions"] for e in ready if e["host"] == "node1")

        during = await streams(front, self.options, 300, comes)
        done = await streams(front, self.options, 300, counted)
        differ = [judged("", plain, run)["differ"] for run in (during, done)]
        waits = [max(stream.gap() for stream in run) for run in (plain, done)]
        # Streams wait for a row here, for longer than WAIT_S as long as there is one replica.
        self.note(what="joins", differ=sum(differ), wait_alone=waits[0], wait_with_two=waits[1], **found)
        front.end()

    async def slow(self) -> None:
        """`slow`: far nodes, and 1 % of the packets lost on their links."""
        cluster = RayHosts(self.network)
        fast = cluster.node("node0")
        front = cluster.front(cluster.node("front", cpus=0), 2)
        await front.full()
        plain = await streams(front, self.options, 500, nothing)
        front.end()
        fast.lose()
        await asyncio.sleep(1.0)
        front = cluster.front(cluster.node("front2", cpus=0), 2)
        for n in (1, 2):
            cluster.node(f"node{n}", wire=WIRE)
        took = await front.full()
        done = await streams(front, self.options, 500, nothing)
        gone = front.log().count('"a replica has ended"')
        speeds = [sum(500 / (s.times[-1] - s.times[0]) for s in run) for run in (plain, done)]
        ttft = [statistics.median(s.times[1] - s.times[0] for s in run) for run in (plain, done)]
        self.note(
            **judged("slow", plain, done), ready_after=took, taken_for_gone=gone,
            tokens_s_fast=speeds[0], tokens_s_slow=speeds[1], ttft_fast=ttft[0], ttft_slow=ttft[1],
        )  # fmt: skip
        self.failed |= bool(gone)
        front.end()

    async def front(self) -> None:
        """`front`: its host is gone without a word; clients find the other one."""
        cluster = RayHosts(self.network)
        store = database(self.network.host("db"))
        fronts = []
        for n in (0, 1):
            cluster.node(f"node{n}")
        for n in (0, 1):
            fronts.append(cluster.front(cluster.node(f"front{n}", cpus=0), 2, store=store))
        for each in fronts:
            await each.full()
        plain = await streams(fronts[1], self.options, 1000, nothing)

        async def breaks() -> None:
            await asyncio.sleep(5.0)
            fronts[0].host.lose(silently=True)

        done = await streams(fronts[0], self.options, 1000, breaks, fronts[1])
        moved = sum(stream.moved for stream in done)
        back = sum(stream.taken_back for stream in done) / len(done)
        self.note(**judged("front", plain, done, moved), tokens_taken_back_each=back)
        fronts[1].end()

    async def head(self) -> None:
        """`head`: the front and the replicas that live go on; what then becomes of Ray."""
        cluster = RayHosts(self.network)
        place = cluster.node("front", cpus=0)
        front = cluster.front(place, 2)
        nodes = [cluster.node(f"node{n}") for n in range(2)]
        await front.full()
        plain = await streams(front, self.options, 1500, nothing)
        began = 0.0

        async def breaks() -> None:
            nonlocal began
            await asyncio.sleep(3.0)
            began = time.monotonic()
            cluster.head.lose()

        waiting = GreedyStream("Tell me nothing.", 50)
        await waiting.open(front)
        done = await streams(front, self.options, 1500, breaks)
        self.note(**judged("head", plain, done), replicas=len(front.ready()))
        await asyncio.sleep(max(0.0, HEADLESS_S - (time.monotonic() - began)))
        before = front.ready()
        later = await streams(front, self.options, 1500, nothing)
        self.note(**judged(f"head, {HEADLESS_S:g} s later", plain, later), replicas=len(before))
        began = time.monotonic()
        cluster.start_head()
        for host in (place, *nodes):
            cluster.start(host, 0 if host is place else 2)
        nodes_took = time.monotonic() - began
        old = [(each["host"], each["pid"]) for each in before]
        during = await streams(front, self.options, 1500, nothing)
        again = await front.wait(
            lambda ready: [(e["host"], e["pid"]) in old for e in ready] == [False] * front.replicas
        )
        await waiting.generate()  # on the socket that it had all the time
        self.note(
            **judged("head, another one", plain, during),
            nodes_started=nodes_took,
            new_replicas_behind_streams=again,
        )
        front.end()

    async def run(self) -> None:
        """What was asked for."""
        for part in PARTS:
            wanted = [each for each in ("lost", "silent") if each in self.options.parts]
            if part not in self.options.parts or (part == "silent" and "lost" in wanted):
                continue
            print(f"{part}: {TITLES[part]}", flush=True)
            if part in ("lost", "silent"):
                await self.loss(wanted)
            elif part == "bundled":
                await self.loss(["lost", "silent"], bundled=True)
            else:
                await getattr(self, part)()
            self.network.empty()


def database(host: Host) -> str:
    """A PostgreSQL of our own there; its URL. Raises RuntimeError."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = shutil.which("initdb")
    if not places and found is None:
        raise RuntimeError("part `front` needs PostgreSQL: install the package postgresql")
    binaries = places[0] if places else Path(found or "").parent
    data = host.folder / "database"
    data.mkdir()
    shutil.chown(data, "postgres")
    for parent in (host.folder, host.folder.parent):
        parent.chmod(0o755)
    user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    made = [str(binaries / "initdb"), "-D", str(data), "-U", "ramify", "-A", "trust", "-N", "-E", "UTF8"]
    host.run([*user, *made, "--locale=C"], "initdb.log")
    with (data / "pg_hba.conf").open("a") as rules:
        rules.write("host all all 0.0.0.0/0 trust\n")
    at = ["-D", str(data), "-k", "", "-h", host.address, "-p", str(DATABASE_PORT), "-c", "fsync=off"]
    host.start([*user, str(binaries / "postgres"), *at], "postgres.log")
    until = time.monotonic() + 30
    while "ready to accept" not in (host.folder / "postgres.log").read_text():
        if time.monotonic() > until:
            raise RuntimeError((host.folder / "postgres.log").read_text())
        time.sleep(0.1)
    return f"postgresql://ramify@{host.address}:{DATABASE_PORT}/postgres"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--json", help="write all results to this file")
    for flag, kind in (("--folder", str), ("--host", str), ("--ray-address", str), ("--store", str)):
        parser.add_argument(flag, type=kind, help=argparse.SUPPRESS)
    for flag, default in (("--replicas", 3), ("--most", None), ("--rows", 256)):
        parser.add_argument(flag, type=int, default=default, help=argparse.SUPPRESS)
    parser.add_argument("--bundled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--silence", type=float, default=3.0, help="--replica-silence (3)")
    options = parser.parse_args()
    if options.parts == ["serve"]:
        asyncio.run(serve(options))
        return 0
    unknown = set(options.parts) - set(PARTS)
    why = obstacle() if not unknown else f"there is no part {', '.join(sorted(unknown))}"
    if why is not None:
        print(f"nodes.py cannot run: {why}", file=sys.stderr)
        return 2
    # One token for all nodes: Ray's head wants one by default, and other nodes do not look for it.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), OMP_NUM_THREADS="1")
    about = machine()
    print(headline(about), flush=True)
    with tempfile.TemporaryDirectory(prefix="ramify-nodes-") as folder, Network(Path(folder)) as network:
        bench = NodesBench(network, options)
        asyncio.run(bench.run())
    print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    write_json(options.json, about, bench.results)
    return int(bench.failed)


if __name__ == "__main__":
    sys.exit(main())
