"""Where sessions go, for real: a front with replicas on Ray, beside what `routing_sim.py` says of it.

    python benchmarks/routing_real.py mooncake --requests 500 --policies ours-sessions ours random

Requests, arrivals, policies and step times are those of the simulation, eight tokens of a trace being
one; the clock, the sockets, the tokenizer, the links and the processes are real. Replicas have an
executor that sleeps as long as a step takes (`timed_executor.py`), so four of them fit on two cores.
Each policy gets a server of its own, and the same arrivals.

`ours-sessions` is what a stateful client does: a conversation is one session, a turn rolls back to what
it shares with the one before and sends the rest. For all others each request is a session that has the
whole prompt, as of a stateless API. In a session a turn that is early is sent when the one before it has
ended, and its TTFT begins then; no simulated one waits so. `consistent-hash` is told whose conversation
a prompt is.

`--stretch 4`: all that a policy, a schedule and a device know as seconds takes four times as long, and
what is reported is divided by four: for loads of more requests a second than this machine has cores for.
TTFT is from the frame to its first delta, at the client, on this machine.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fake_server import write_model_folder
from load import Recorder
from replicas import ready
from report import headline, machine, table, write_json
from routing_peers import PEERS
from routing_sim import (
    BLOCK,
    SCALE,
    Request,
    Simulation,
    View,
    arguments,
    capacity,
    requests_of,
    schedule_config,
)

from ramify.actors.engine import running_engine
from ramify.actors.executor.spec import FactorySpec
from ramify.actors.kit.clock import MonotonicClock
from ramify.actors.kit.files import allow_files
from ramify.actors.kit.log import LogConfig, configure
from ramify.actors.routing.router import Policy
from ramify.actors.routing.session_router import SessionRouter
from ramify.protocol.cluster import ReplicaLoad
from ramify.protocol.config import EngineConfig, Limits, ModelConfig, ReplicasConfig, ServerConfig
from ramify.protocol.messages import Finished, Submit

HERE = Path(__file__).resolve().parent
SIZE = BLOCK // SCALE  # tokens of a block here, digits of its text
DIGITS = 16  # of a block's number, again and again
PATIENCE_S = 600.0  # for what is under way after the last arrival
DIGIT = "0123456789"


def text_of(blocks: list[int], tokens: int) -> str:
    """Digits: a token each, whatever stands beside them."""
    return "".join(f"{block:0{DIGITS}d}" * (SIZE // DIGITS) for block in blocks)[:tokens]


# --- the server's process -------------------------------------------------------------------------


class Asked(msgspec.Struct):
    """What policies of `routing_peers.py` see of a request."""

    blocks: list[int]
    session: int


class PeerRouter(SessionRouter):
    """Sessions go where a policy of `routing_peers.py` says, and stay."""

    def __init__(self, options: argparse.Namespace, name: str, first_digit: int) -> None:
        super().__init__(MonotonicClock().now)
        self._view = View(options.replicas)
        tree = options.tree * options.pool // BLOCK
        self._peer = PEERS[name](self._view, options.seed, tree)
        self._first = first_digit
        self._known = {text_of(r.blocks, r.prompt): r.session for r in requests_of(options)}
        self._at: dict[int, int] = {}  # request: its replica

    def place(self, session: int, namespace: str, tokens: bytes) -> int | None:
        digits = np.frombuffer(tokens, dtype=np.int32) - self._first
        text = "".join(map(str, digits))
        blocks = [int(text[at : at + DIGITS]) for at in range(0, len(text), SIZE)]
        return self._peer.choose(Asked(blocks, self._known.get(text, -1)))

    def hot(self, session: int, replica: int) -> bool:
        return False

    def load(self, replica: int, load: ReplicaLoad) -> None:
        self._view.waiting[replica] = load.waiting
        self._view.kv[replica] = (load.slots - load.free - load.evictable) / max(1, load.slots)

    def submitted(self, session: int, replica: int, message: Submit) -> None:
        self._at[message.request] = replica
        self._view.in_flight[replica] += 1

    def finished(self, finished: list[Finished]) -> None:
        for each in finished:
            self._view.in_flight[self._at.pop(each.request)] -= 1


def stretched(policy: Policy, times: float) -> Policy:
    """The same in a world that is slower."""
    names = [name for name in policy.__struct_fields__ if name.endswith("_s")]
    return msgspec.structs.replace(policy, **{name: times * getattr(policy, name) for name in names})


async def serve(options: argparse.Namespace, folder: Path) -> None:
    """Until stdin ends."""
    size, first = write_model_folder(folder)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    digits = [tokenizer.token_to_id(digit) for digit in DIGIT]
    assert digits == list(range(digits[0], digits[0] + 10))
    settings = {
        "model": {"vocab_size": size, "first": first, "eos": 2},
        "context": 1 << 16,
        "pages": options.pool // SCALE,
        "max_rows": options.rows,
        "step_tokens": 8192 // SCALE,
        "verify": False,
        "stretch": options.stretch,
    }
    schedule = schedule_config()
    config = EngineConfig(
        model=ModelConfig(path=folder),
        server=ServerConfig(port=0, grace_s=1.0, ping_interval_s=60.0, ping_timeout_s=600.0),
        limits=Limits(ops_per_second=100_000, frame_bytes_before_open=1 << 20),
        schedule=msgspec.structs.replace(
            schedule, itl_target_ms=options.stretch * schedule.itl_target_ms
        ),
        gateways=0,
        replicas=ReplicasConfig(count=options.replicas, on=options.on, cpus=0.1),
    )
    name = options.policies[0]
    placing = (
        SessionRouter(MonotonicClock().now, stretched(Policy(), options.stretch))
        if name.startswith("ours")
        else PeerRouter(options, name, digits[0])
    )
    allow_files(10_000)
    configure(LogConfig(level="warning"))
    spec = FactorySpec("timed_executor:TimedExecutor", settings)
    async with running_engine(config, spec=spec, routing=placing) as engine:
        print(engine.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


class Server:
    """`serve` in a process."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        program = [sys.executable, __file__, *sys.argv[1:], "--serve", "--policies", name]
        self._process = subprocess.Popen(
            [*program, f"--busy={options.busy}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        while line and not line.strip().isdigit():  # Ray says things there
            line = self._process.stdout.readline()
        self.port = int(line)
        while len(ready(self.port)) < options.replicas:
            time.sleep(0.1)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


# --- clients --------------------------------------------------------------------------------------


class Conversation:
    """A session on a socket of its own. `have`: blocks that its branch begins with."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._turn = asyncio.Lock()
        self._have: list[int] = []
        self._op = 0

    async def ask(self, port: int, request: Request, began: float, stretch: float) -> None:
        """A turn: notes in the request when its first token came, and what was cached.

        It is sent, and counts as having arrived, when the one before it has ended.
        """
        early = self._turn.locked()
        async with self._turn:
            if early:
                request.arrives = (time.perf_counter() - began) / stretch
            ops: list[dict[str, Any]] = []
            if self._recorder is None:
                self._recorder = await Recorder.connect(port)
                ops.append({"type": "open", "client": "load"})
            recorder = self._recorder
            shared = 0
            for a, b in zip(self._have, request.blocks[: request.prompt // SIZE], strict=False):
                if a != b:
                    break
                shared += 1
            shared = min(shared, (request.prompt - 1) // SIZE)
            if self._have:
                ops.append({"type": "rollback", "to": SIZE * shared})
            text = text_of(request.blocks, request.prompt)[SIZE * shared :]
            ops.append({"type": "append", "text": text})
            sampling = {"temperature": 0, "max_tokens": request.output, "ignore_eos": True}
            ops.append({"type": "generate", **sampling})
            for op in ops:
                if op["type"] != "open":
                    self._op += 1
                    op["id"] = self._op
            self._have = request.blocks[: request.prompt // SIZE]
            recorder.chunks.clear()
            done = asyncio.ensure_future(recorder.until_done(1))
            await asyncio.sleep(0)
            recorder.send(*ops)
            await done
            for when, message in recorder.messages():
                if message["type"] == "delta" and request.first < 0:
                    request.first = when - began
                elif message["type"] == "done":
                    if (message["reason"], message["usage"]["output"]) != ("length", request.output):
                        raise AssertionError(f"a generation ended early: {message}")
                    request.ended = when - began
                    request.cached = message["usage"]["cached"]
                elif message["type"] == "error":
                    raise AssertionError(f"unexpected: {message}")

    async def end(self) -> None:
        if self._recorder is not None:
            await self._recorder.end_session()


async def drive(port: int, requests: list[Request], stretch: float, *, sessions: bool) -> float:
    """All requests at their times. Returns how late the latest of them was sent, in seconds."""
    talks: dict[int, Conversation] = {}
    late = 0.0

    async def one(request: Request) -> None:
        if sessions:
            talk = talks.setdefault(request.session, Conversation())
            await talk.ask(port, request, began, stretch)
            return
        alone = Conversation()
        await alone.ask(port, request, began, stretch)
        await alone.end()

    began = time.perf_counter()
    async with (
        asyncio.timeout(stretch * requests[-1].arrives + PATIENCE_S),
        asyncio.TaskGroup() as group,
    ):
        for request in requests:
            at = began + stretch * request.arrives
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            late = max(late, time.perf_counter() - at)
            group.create_task(one(request))
    await asyncio.gather(*(talk.end() for talk in talks.values()))
    for request in requests:
        request.first, request.ended = request.first / stretch, request.ended / stretch
    return late


def row(options: argparse.Namespace, name: str, requests: list[Request]) -> dict[str, Any]:
    """As `Simulation.row` has it."""
    counted = [each for each in requests if each.arrives >= options.warm * requests[-1].arrives]
    ttft = np.array([each.first - each.arrives for each in counted])
    return {
        "policy": name,
        "hit": round(100 * sum(r.cached for r in counted) / sum(r.prompt for r in counted), 1),
        **{f"p{q}": round(1e3 * float(np.percentile(ttft, q))) for q in (50, 90, 99)},
        "mean": round(1e3 * float(ttft.mean())),
        "req_s": round(len(requests) / max(each.ended for each in requests), 2),
    }


def main() -> int:
    parser = arguments(__doc__, requests=500, fronts=1)
    parser.add_argument("--on", choices=["ray", "processes"], default="ray", help="(default ray)")
    parser.add_argument("--stretch", type=float, default=1.0, help="(default 1)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.track = False
    if options.serve:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(serve(options, Path(folder)))
        return 0
    about = machine()
    print(headline(about), flush=True)
    options.busy = options.busy or capacity(options)
    print(f"work of a request: {options.busy:.3f} s of a replica", flush=True)
    columns = ("policy", "hit", "p50", "p90", "p99", "mean", "req_s")
    rows = []
    for name in options.policies:
        requests = requests_of(options)
        with Server(options, name) as server:
            sessions = name == "ours-sessions"
            late = asyncio.run(drive(server.port, requests, options.stretch, sessions=sessions))
        real = row(options, name, requests)
        options.track = name == "dynamo"
        simulation = Simulation(options, name, requests_of(options))
        simulation.run()
        told = simulation.row(0.0)
        for kind, found in (("real", real), ("simulated", told)):
            rows.append({"kind": kind, **{column: found[column] for column in columns}})
        print(rows[-2], rows[-1], f"sent late: {1e3 * late:.0f} ms", flush=True)
    print(table(list(rows[0]), [[str(value) for value in each.values()] for each in rows]))
    print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    write_json(options.json, about, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
