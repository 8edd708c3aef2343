"""A server that is killed again and again: what do its clients find when the next one has the store?

    python benchmarks/restarts.py [--minutes 3] [--kills 500] [--clients 20] [--life 4] [--gateways 0]
        [--seed 0] [--trace FOLDER] [--store file,postgres,redis] [--servers 1] [--hops 0.02]
        [--victims server,gateway,executor,compiler,database] [--executor process]

Clients play random rounds (append, generate, fork, prune, join, rollback, meta, queued ops) against a
server with the fake executor and a store; it is ended by SIGKILL at random moments, and another one is
started on the same store. With `--store` that is a PostgreSQL or a Redis of our own, which `--servers`
share: one of them is killed each time, and clients go to any of them, also without need (`--hops`: how
often after a frame). Several stores are campaigns side by side, each with servers and clients of its
own. `--victims` says what is killed: a server, one of its processes (gateways, executor, compilers), or
the database, in one of three ways: all its processes by SIGKILL; told to stop at once; or, where one
server has all sessions in memory, killed and started again empty. The server lives on and must lose
nothing. Half of the clients ask for `persist: "sync"`. All resume, send again what has no
reply, and note what contradicts docs/protocol.md, rule 10:

- a session that a client has heard of does not open; a `sync` client hears `lost`
- a branch, a token, a marked input or a `meta` that was confirmed is not there (unless `lost`)
- a token at a position differs from what was seen there, without `truncate`; output comes twice, or not
- an appended text is on a branch twice; an op is answered twice, never, or by an error

The exit code is 1 if anything of this was seen.
"""

import argparse
import asyncio
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from fake_server import FakeServer
from report import headline, machine, percentile, table, write_json
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, WebSocketException

from ramify.actors.store.opening import open_store

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.servers import Server, running_postgres, running_redis

STORES = ("file", "postgres", "redis")
VICTIMS = ("server", "gateway", "executor", "compiler", "database")
MODULES = {
    "gateway": b"ramify.actors.gateway_program",
    "executor": b"ramify.actors.executor.executor_program",
    "compiler": b"ramify.actors.grammar.compile_program",
}
SETTLE_S = 4.0
PATIENCE_S = 60.0  # for the replies to one round, while the server lives
LONGEST = 2500  # tokens of a branch, of the 4,096 that fit
MARK = re.compile(r"\[[\w.]+:[0-9a-f]+\]")  # whole ones: a rollback may go back into one
AWAY = (OSError, WebSocketException, InvalidHandshake, EOFError, TimeoutError)
_decode = msgspec.json.Decoder().decode


@dataclass
class World:
    """What all clients share. `lives`: servers so far."""

    store: str = "file"
    ports: dict[int, int] = field(default_factory=dict)  # of the servers that live, by place
    hops: float = 0.0
    lives: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    back: list[float] = field(default_factory=list)  # seconds from a server's start to `state`
    started: float = 0.0
    trace: Path | None = None  # a folder for what each client says and hears
    up: asyncio.Event = field(default_factory=asyncio.Event)
    kills: Counter[str] = field(default_factory=Counter)


@dataclass
class KnownBranchState:
    """What a client knows of one. `solid`: up to where a reply has confirmed it.

    `outputs`: position -> token. `marks`: confirmed inputs -> their end. `whole`: every output was seen.
    `sure`: the branch is there unless an op of the round has ended it; after `lost` ops of earlier
    rounds may run again, and end it. `heard`: not only `state` has told of it, so `position` is known.
    """

    position: int = 0
    solid: int = 0
    outputs: dict[int, int] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    whole: bool = True
    sure: bool = True
    heard: bool = True

    def cut(self, to: int) -> None:
        self.position, self.solid = min(self.position, to), min(self.solid, to)
        self.outputs = {at: token for at, token in self.outputs.items() if at < to}
        self.marks = {mark: end for mark, end in self.marks.items() if end <= to}

    def copy(self, to: int) -> "KnownBranchState":
        other = KnownBranchState(
            self.position, self.solid, dict(self.outputs), dict(self.marks), self.whole
        )
        other.cut(to)
        other.position = other.solid = to
        return other


class Client:
    """Plays rounds on one session until told to stop; its knowledge outlives its sockets."""

    def __init__(self, world: World, index: int, seed: int) -> None:
        self._world = world
        self._name = f"client-{index}"
        self._sync = index % 2 == 0
        self._random = random.Random(seed << 20 | index)
        self._login: dict[str, str] = {}
        self._branches: dict[str, KnownBranchState] = {"main": KnownBranchState()}
        self._revision = 0
        self._told = 0  # the revision of `state` when it resumed
        self._op = 0
        self._sent: dict[int, dict[str, Any]] = {}  # op id -> op, until it is answered
        self._past: dict[int, dict[str, Any]] = {}  # ops of the rounds before
        self._left: dict[int, int] = {}  # op id -> replies that are still to come
        self._heard: dict[tuple[int, str], int] = {}  # (op, branch) -> times
        self._again: set[int] = set()  # ops that were sent twice
        self._meta: int | None = None
        self._resumed = False  # while something of this round was under way
        self._back = False  # ever
        self._lost = False
        self._confirmed = 0  # the highest op that was answered
        self._socket: ClientConnection | None = None
        self._log = world.trace and (world.trace / f"{self._name}.log").open("w")

    # --- rounds ----------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        try:
            if self._sync:
                await self._play([{"type": "set", "persist": "sync"}])
            while not stop.is_set():
                await self._play(self._round())
                await self._play([{"type": "tree", "branch": "main", "text": True, "tokens": True}])
        except Exception as error:  # a fault of the campaign shows as one
            self._fault(f"{type(error).__name__}: {error}; waiting for {self._sent}")
        if self._socket is not None:
            await self._socket.close()

    def _round(self) -> list[dict[str, Any]]:
        chance, n = self._random, self._op
        main = self._branches["main"]
        if main.position > LONGEST:
            return [{"type": "rollback", "branch": "main", "to": 0}]
        kind = chance.choice(["turn", "turn", "prune", "join", "rollback", "meta", "queue", "n"])
        names = [f"b{n}.{i}" for i in range(chance.randint(2, 4))]
        children = [
            {"type": "fork", "branch": "main", "as": names},
            *({"type": "append", "branch": b, "text": self._mark(b)} for b in names),
            *(self._generate(b) for b in names),
        ]
        match kind:
            case "prune":
                end: dict[str, Any] = {"type": "prune", "from": names, "into": "main"}
                return [self._append(), *children, {**end, "by": chance.choice(["first", "logprob"])}]
            case "join":
                return [*children, {"type": "join", "from": names, "branch": "main", "role": None}]
            case "rollback":
                to = chance.randint(0, main.position)
                return [
                    {"type": "rollback", "branch": "main", "to": to},
                    self._append(),
                    self._generate(),
                ]
            case "meta":
                return [{"type": "set", "meta": {"n": n}}, self._append()]
            case "queue":
                ops = [self._append() for _ in range(chance.randint(5, 30))]
                ops.insert(chance.randint(1, len(ops)), self._generate())
                return ops
            case "n":
                many = {**self._generate(), "n": len(names), "as": names}
                return [self._append(), many, {"type": "drop", "branch": names}]
        return [self._append(), self._generate()]

    def _mark(self, branch: str = "main") -> str:
        return f"[{branch}:{self._random.getrandbits(48):x}]"

    def _append(self) -> dict[str, Any]:
        return {"type": "append", "branch": "main", "text": self._mark()}

    def _generate(self, branch: str = "main") -> dict[str, Any]:
        tokens = self._random.choice([1, 5, 20, 100])
        known = {"ignore_eos": True, "seed": 7}
        return {"type": "generate", "branch": branch, "max_tokens": tokens, **known}

    async def _play(self, ops: list[dict[str, Any]]) -> None:
        """Send a frame, and stay until each op has its replies, however many servers that takes."""
        self._resumed = self._lost = False
        self._past = dict([*self._past.items(), *self._sent.items()][-200:])
        self._sent, self._left, self._heard = {}, {}, {}
        for op in ops:
            self._op += 1
            op["id"] = self._op
            self._sent[self._op] = op
            self._left[self._op] = _replies(op)
        fresh = True
        lives, waited = self._world.lives, time.monotonic()
        while self._left:
            try:
                if self._socket is None:
                    await self._attach()
                    self._again |= set() if fresh else set(self._sent)
                    fresh = True
                assert self._socket is not None
                if fresh and self._left:
                    fresh = False
                    again = [self._sent[i] for i in sorted(self._left)]
                    self._note("->", again)
                    await self._socket.send(_frame(again))
                async with asyncio.timeout(2):
                    frame = _decode(await self._socket.recv())
            except AWAY as error:
                if isinstance(error, TimeoutError) and self._socket is not None:
                    if self._world.lives != lives:
                        lives, waited = self._world.lives, time.monotonic()
                    if time.monotonic() - waited > PATIENCE_S:
                        raise
                    continue
                self._drop()
                await asyncio.sleep(0.05 * self._random.random())
                continue
            for message in frame if isinstance(frame, list) else [frame]:
                self._hear(message)
            if self._world.hops and self._random.random() < self._world.hops:
                self._world.counts["hops"] += 1
                self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.transport.abort()
            self._socket = None

    async def _attach(self) -> None:
        world = self._world
        await world.up.wait()
        lives = world.lives
        port = self._random.choice([*world.ports.values()])
        socket = await connect(f"ws://127.0.0.1:{port}/v1/ws", max_size=None, open_timeout=10)
        opened: dict[str, Any] = {"type": "open", "client": self._name, "tokens": True, **self._login}
        if self._login:
            have = {name: branch.position for name, branch in self._branches.items()}
            opened |= {"have": have, "revision": self._revision}
        self._note("->", opened)
        await socket.send(_frame(opened))
        async with asyncio.timeout(20):
            frame = _decode(await socket.recv())
        messages = frame if isinstance(frame, list) else [frame]
        first = messages[0]
        self._note("<-", first)
        if first["type"] == "bye":  # its gateway process outlived the server for a moment
            await socket.close()
            raise EOFError
        if first["type"] == "error" and first["code"] == "overloaded":  # the database is away
            world.counts["refused"] += 1
            await socket.close()
            raise EOFError
        if first["type"] != "state":
            self._fault(f"open was refused: {first}")
            if first.get("code") == "no_session":
                self._login, self._branches, self._revision, self._meta = (
                    {},
                    {"main": KnownBranchState()},
                    0,
                    None,
                )
            await socket.close()
            raise EOFError
        self._socket = socket
        if self._login:
            self._resume(first)
            if lives == world.lives and len(world.ports) == 1:
                world.back.append(time.monotonic() - world.started)
        self._login = {"session": first["session"], "key": first["key"]}
        self._revision = self._told = first["revision"]
        for message in messages[1:]:
            self._hear(message)

    # --- what it hears ---------------------------------------------------------------------------

    def _resume(self, state: dict[str, Any]) -> None:
        world = self._world
        world.counts["resumed"] += 1
        self._resumed = self._back = True
        if not state.get("resumed"):
            self._fault("`state.resumed` is not true")
        here = {each["branch"]: each["position"] for each in state["branches"]}
        if state.get("lost"):
            world.counts["lost"] += 1
            self._lost = True
            if self._sync:
                self._fault("a `sync` session was lost")
            self._heard = {}  # what was answered may run again, also of rounds before
            self._again |= set(range(self._op + 1))
            self._left = {ident: _replies(op) for ident, op in self._sent.items()}
            unsure = {"whole": False, "sure": False}
            self._branches = {
                name: KnownBranchState(**unsure) for name in self._branches if name in here
            }
            self._confirmed = min(self._confirmed, state["op"])
            if (self._meta is not None) and (state.get("meta") or {}).get("n") != self._meta:
                self._meta = (state.get("meta") or {}).get("n")
        else:
            if state["op"] < self._confirmed:
                self._fault(f"op {self._confirmed} was answered, `state.op` is {state['op']}")
            waiting = {op["type"] for op in self._sent.values()}
            for name in [name for name in self._branches if name not in here]:
                if self._branches[name].sure and not waiting & {"drop", "prune", "join"}:
                    self._fault(f"branch {name} is gone")
                del self._branches[name]
            for name, branch in self._branches.items():
                if here[name] < branch.solid and not waiting & {"rollback", "prune"}:
                    self._fault(f"{name}: {branch.solid} was confirmed, `state` has {here[name]}")
                branch.cut(here[name])
            if self._meta != (state.get("meta") or {}).get("n") and "set" not in waiting:
                self._fault(f"meta was {self._meta}, is {state.get('meta')}")
            self._meta = (state.get("meta") or {}).get("n")
        for name in here.keys() - self._branches.keys():
            self._branches[name] = KnownBranchState(heard=False, whole=False, sure=not self._lost)

    def _note(self, way: str, message: Any) -> None:
        if self._log:
            print(self._world.lives, way, _frame(message)[:1000], file=self._log, flush=True)

    def _hear(self, message: dict[str, Any]) -> None:
        self._note("<-", message)
        match message["type"]:
            case "delta":
                self._delta(message)
            case "ok" | "done" | "error" | "state":
                self._reply(message)
            case other:
                self._world.counts[other] += 1
        self._revision = max(self._revision, message.get("revision", 0))

    def _delta(self, delta: dict[str, Any]) -> None:
        name, tokens = delta["branch"], delta.get("tokens", [])
        begins = delta["position"] - len(tokens)  # a child that `n` made begins with its output
        branch = self._branches.setdefault(name, KnownBranchState(begins, whole=False, sure=False))
        if "truncate" in delta:
            to = delta["truncate"]
            self._world.counts["truncated"] += 1
            waiting = {op["type"] for op in self._sent.values()}
            if to < branch.solid and not waiting & {"rollback", "prune"}:
                self._fault(f"{name}: {branch.solid} was confirmed, truncated to {to}")
            branch.cut(to)
        if not branch.heard:
            branch.heard, branch.position = True, begins
        self._world.counts["tokens"] += len(tokens)
        if begins < branch.position or (begins > branch.position and not self._resumed):
            self._fault(f"{name}: delta begins at {begins}, expected {branch.position}: {delta}")
        branch.outputs.update(zip(range(begins, delta["position"]), tokens, strict=True))
        branch.position = delta["position"]

    def _reply(self, reply: dict[str, Any]) -> None:
        ident = reply.get("id")
        if ident is None:
            self._fault(f"an error of no op: {reply}")
            return
        key = (ident, reply.get("branch", ""))
        times = self._heard[key] = self._heard.get(key, 0) + 1
        op, past = self._sent.get(ident), self._past.get(ident)
        if op is None and past is not None and reply.get("revision", 0) > self._revision:
            self._apply(past, reply)  # it ran again after `lost`
        if op is None or times > 1:
            # A `done` at the position that the client has comes again with a resume: it may be missing.
            if ident not in self._again and not (self._lost or (self._back and reply["type"] == "done")):
                self._fault(f"answered twice: {reply}")
            return
        self._world.counts["replies"] += 1
        if reply["type"] == "error":
            self._fault(f"{op} was answered by {reply}")
            reply = {**reply, "revision": -1}
        if reply["type"] == "done" and reply["reason"] not in ("length", "cancelled"):
            self._fault(f"{op} ended with {reply}")
        if reply["type"] == "state" or reply.get("revision", self._told + 1) > self._told:
            self._apply(op, reply)
        if op["type"] != "tree":  # it changes nothing, so nothing of it is saved
            self._confirmed = max(self._confirmed, ident)
        self._left[ident] -= 1
        if not self._left[ident]:
            del self._left[ident]

    def _apply(self, op: dict[str, Any], reply: dict[str, Any]) -> None:
        branches, result = self._branches, reply.get("result") or {}
        at = reply.get("position", 0)
        if reply["type"] == "done":
            branch = branches.setdefault(reply["branch"], KnownBranchState(whole=False))
            if branch.heard and branch.position != at and not self._resumed:
                self._fault(f"{reply['branch']}: done at {at}, seen up to {branch.position}")
            branch.position = branch.solid = max(at, branch.position)
            branch.heard = True
            return
        match op["type"]:
            case "append":
                branch = branches.setdefault(op["branch"], KnownBranchState(whole=False))
                branch.marks[op["text"]] = at
                branch.position = branch.solid = max(at, branch.position)
            case "rollback":
                branches[op["branch"]].cut(at)
            case "fork":
                for name in op["as"]:
                    if name not in branches:
                        branches[name] = branches[op["branch"]].copy(branches[op["branch"]].position)
            case "join":
                for name in result.get("dropped", []):
                    branches.pop(name, None)
                branches["main"].position = branches["main"].solid = at
            case "prune":
                for kept in result.get("kept", []):
                    branch = branches.get(kept["from"])
                    whole = branch is not None and branch.whole
                    branches[kept["into"]] = (
                        branch.copy(kept["position"]) if branch else KnownBranchState()
                    )
                    branches[kept["into"]].whole = whole
                    branches[kept["into"]].position = kept["position"]
                for name in result.get("dropped", []):
                    branches.pop(name, None)
                for name in op["from"]:
                    branches.pop(name, None)
            case "drop":
                branches.pop(reply.get("branch", ""), None)
            case "set" if "meta" in op:
                self._meta = op["meta"]["n"]
            case "tree":
                self._compare(reply)

    def _compare(self, state: dict[str, Any]) -> None:
        """A whole branch, while nothing else is under way, with all that was seen of it."""
        shown = next((each for each in state["branches"] if each["branch"] == "main"), None)
        if shown is None:
            self._fault("main is gone")
            return
        if "next" in state:
            return
        known, text, outputs = self._branches["main"], "", {}
        for turn in shown.get("turns", []):
            text += turn.get("text", "")
            if turn["kind"] == "output":
                outputs.update(zip(range(turn["start"], turn["end"]), turn["tokens"], strict=True))
        wrong = [at for at, token in known.outputs.items() if outputs.get(at) != token]
        if wrong:
            self._fault(f"main: other tokens than those seen, from {min(wrong)} to {max(wrong)}")
        missing = [at for at in outputs if at not in known.outputs]
        if missing and known.whole:
            self._fault(f"main: tokens never seen, from {min(missing)} to {max(missing)}")
        for mark in known.marks:
            if mark not in text:
                self._fault(f"main: input {mark} at {known.marks[mark]} is gone")
        for mark, times in Counter(MARK.findall(text)).items():
            if times > 1:
                self._fault(f"main: input {mark} stands there {times} times")
        self._world.counts["compared"] += 1
        known.whole = True
        known.outputs, known.position = outputs, shown["position"]
        # What runs is confirmed when it is done: after `lost` it may be an op of an earlier round.
        known.solid = shown["started_at"] if "running" in shown else shown["position"]

    def _fault(self, what: str) -> None:
        self._world.counts["faults"] += 1
        kind = "sync" if self._sync else "lazy"
        line = f"{self._world.store}, life {self._world.lives}, {self._name} ({kind}): {what}"
        if len(self._world.faults) < 100:
            self._world.faults.append(line)
            print(line[:600], file=sys.stderr, flush=True)
        self._note("!!", line)


def _replies(op: dict[str, Any]) -> int:
    """How many terminal replies the op gets."""
    names = {"generate": op.get("as"), "drop": op.get("branch")}.get(op["type"])
    return len(names) if names else 1


def _frame(messages: Any) -> str:
    return msgspec.json.encode(messages).decode()


def _processes(server: FakeServer, kind: str) -> list[int]:
    """Those of this kind that the server has started."""
    found = []
    for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
        with suppress(OSError):
            if MODULES[kind] in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def _end_database(database: Server, way: str) -> None:
    if way == "stopped":
        database.stop(signal.SIGQUIT)  # PostgreSQL's immediate shutdown
    else:
        database.kill()
    if way == "emptied":
        database.lose()


async def _strike(
    world: World,
    options: argparse.Namespace,
    servers: dict[int, FakeServer],
    database: Server | None,
    chance: random.Random,
) -> None:
    """Kill something, and have a database back afterwards."""
    kinds = [kind for kind in options.victims if kind != "database" or database is not None]
    kind = chance.choice(kinds)
    place = chance.choice(sorted(servers))
    if kind == "database" and database is not None:
        ways = ["killed", "stopped", *(["emptied"] if len(servers) == 1 else [])]
        way = chance.choice(ways)
        if way == "emptied":
            await asyncio.sleep(SETTLE_S)  # until the server has all sessions in memory again
        world.kills[f"database {way}"] += 1
        await asyncio.to_thread(_end_database, database, way)
        await asyncio.sleep(chance.uniform(0, 3))
        await asyncio.to_thread(database.start)
        await asyncio.sleep(SETTLE_S)  # what it has lost is saved again; until then a kill may lose it
        return
    pids = _processes(servers[place], kind) if kind != "server" else []
    if pids:
        world.kills[kind] += 1
        with suppress(ProcessLookupError):
            os.kill(chance.choice(pids), signal.SIGKILL)
        return
    world.kills["server"] += 1
    del world.ports[place]
    if not world.ports:
        world.up.clear()
    await asyncio.to_thread(servers.pop(place).kill)


async def campaign(
    options: argparse.Namespace, kind: str, store: str, database: Server | None, seed: int
) -> World:
    hops = options.hops if options.servers > 1 else 0.0
    world = World(store=kind, trace=options.trace, hops=hops)
    chance, stop = random.Random(seed), asyncio.Event()
    count = options.servers if database is not None else 1
    servers: dict[int, FakeServer] = {}
    clients: list[asyncio.Task[None]] = []
    end = time.monotonic() + options.minutes * 60
    try:
        while True:
            for place in set(range(count)) - servers.keys():
                begun = time.monotonic()
                servers[place] = server = await asyncio.to_thread(
                    FakeServer,
                    store=store,
                    step_ms=options.step_ms,
                    gateways=options.gateways,
                    executor=options.executor,
                )
                world.started = time.monotonic()
                world.counts["starts_ms"] += int((world.started - begun) * 1e3)
                world.ports[place] = server.port
                world.lives += 1
                world.up.set()
            if not clients:
                clients = [
                    asyncio.create_task(Client(world, i, seed).run(stop)) for i in range(options.clients)
                ]
            if time.monotonic() > end or world.kills.total() >= options.kills:
                break
            await asyncio.sleep(chance.uniform(0.1, 2 * options.life))
            await _strike(world, options, servers, database, chance)
        stop.set()
        await asyncio.wait(clients, timeout=PATIENCE_S)
        for client in clients:
            if not client.done():
                world.faults.append("a client did not end")
                client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    finally:
        for server in servers.values():
            await asyncio.to_thread(server.kill)
    return world


@contextmanager
def _database(kind: str) -> Iterator[Server]:
    """A private one."""
    with (running_postgres if kind == "postgres" else running_redis)() as server:
        if server is None:
            raise SystemExit(f"this machine has no {kind} server")
        yield server


async def _campaigns(options: argparse.Namespace, places: dict[str, tuple[str, Any]]) -> list[World]:
    return await asyncio.gather(
        *(
            campaign(options, kind, place, database, options.seed + number)
            for number, (kind, (place, database)) in enumerate(places.items())
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--kills", type=int, default=10**9, help="end after so many")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--life", type=float, default=4.0, help="of a server, s, on average")
    parser.add_argument("--gateways", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path, help="a folder for what each client says and hears")
    parser.add_argument("--store", type=_listed(STORES), default=["file"], metavar="STORE,...")
    parser.add_argument("--victims", type=_listed(VICTIMS), default=["server"], metavar="VICTIM,...")
    parser.add_argument("--executor", choices=["thread", "process"], default="thread")
    parser.add_argument("--servers", type=int, default=1, help="on one PostgreSQL or Redis")
    parser.add_argument("--hops", type=float, default=0.02, help="among several servers, after a frame")
    parser.add_argument("--json", help="write the results here")
    options = parser.parse_args()
    about = machine()
    print(headline(about))
    if options.trace is not None and len(options.store) > 1:
        parser.error("--trace is of one store: its files are named by clients")
    rows, faults = [], []
    with ExitStack() as stack:
        places: dict[str, tuple[str, Any]] = {}
        for kind in options.store:
            if kind == "file":
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                places[kind] = str(Path(folder) / "sessions.db"), None
            else:
                database = stack.enter_context(_database(kind))
                places[kind] = database.url, database
        for kind, world in zip(places, asyncio.run(_campaigns(options, places)), strict=True):
            store = open_store(places[kind][0], read_only=True)
            size = sum(kept.size for kept in store.kept())
            world.faults += store.check()
            store.close()
            rows.append(_row(kind, world, size))
            faults += world.faults
    print(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))
    write_json(options.json, about, {"stores": rows, "list": faults})
    return 1 if faults else 0


def _listed(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """For argparse: names with commas between them."""

    def listed(text: str) -> list[str]:
        names = text.split(",")
        if not set(names) <= set(known):
            raise argparse.ArgumentTypeError(f"of {', '.join(known)}")
        return names

    return listed


def _row(kind: str, world: World, size: int) -> dict[str, Any]:
    counts = world.counts
    return {
        "store": kind,
        "kills": world.kills.total(),
        "of": ", ".join(f"{count} {name}" for name, count in sorted(world.kills.items())),
        "hops": counts["hops"],
        "resumes": counts["resumed"],
        "replies": counts["replies"],
        "tokens": counts["tokens"],
        "compared": counts["compared"],
        "truncated": counts["truncated"],
        "lost (lazy)": counts["lost"],
        "back p50 ms": round(1e3 * percentile(world.back, 50)) if world.back else 0,
        "back max ms": round(1e3 * max(world.back, default=0.0)),
        "store MiB": round(size / 2**20, 1),
        "faults": len(world.faults),
    }


if __name__ == "__main__":
    sys.exit(main())
