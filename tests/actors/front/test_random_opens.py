"""Two fronts over one store, in random orders: each `open` is answered, and nothing is left behind.

Gateways, links, caches and the store are stand-ins, each of which takes some turns of the loop for what
it does. Time is set by hand, so a seed is one order. Sessions live for no time or for a moment, so
opens meet them as they end in every way: expired, displaced, closed, crashed, taken by the other front.
"""

import asyncio
import logging
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from ramify.actors.front.gateway_messages import naming
from ramify.actors.front.peer_router import PeerRouter
from ramify.actors.kit.mailbox import FunctionAddress, Mailbox
from ramify.actors.session.directory import Directory
from ramify.actors.session.making import SessionMaker
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.config import Limits
from ramify.protocol.saved import HEAD
from tests.amount import examples
from tests.manual_clock import ManualClock

MOMENT = 0.001  # a time to live


class World:
    """Both fronts, and what is between them."""

    def __init__(self, seed: int, tokenizer: Tokenizer) -> None:
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.links: dict[tuple[int, int], list[bytes]] = defaultdict(list)
        self.items: dict[str, dict[str, bytes]] = {}  # the store
        self.fences: Counter[str] = Counter()
        self.keys: list[tuple[str, str, str]] = []  # of sessions, with their keys and view keys
        self.fronts = [Front(self, number, tokenizer) for number in (0, 1)]
        self.tasks = [asyncio.create_task(work) for front in self.fronts for work in front.works()]
        for front in self.fronts:
            front.router.peers({0, 1})

    async def turns(self, most: int = 3) -> None:
        for _ in range(self.random.randint(0, most)):
            await asyncio.sleep(0)

    def act(self) -> None:
        """One event: a client comes, goes or closes; time passes; a session has to go, or crashes."""
        front = self.random.choice(self.fronts)
        sockets = list(front.attached)
        entries = list(front.directory.entries)
        match self.random.choices(
            ("open", "go", "close", "wait", "displace", "want", "crash"), (9, 6, 1, 4, 2, 1, 0.3)
        )[0]:
            case "open":
                front.open()
            case "go" if sockets:
                front.end(self.random.choice(sockets))
            case "close" if sockets:
                socket = self.random.choice(sockets)
                frame = m.Frame(socket, [w.CloseSession(id=9)], size=5)
                front.router.sessions.tell(front.attached[socket], frame)
            case "wait":
                self.clock.advance(self.random.choice((0.0, MOMENT / 2, MOMENT)))
            case "displace" if entries:
                _, entry = front.directory.entries[self.random.choice(entries)]
                entry.actor.displace()
            case "want" if entries:
                front.router.to_directory.tell(m.Wanted([self.random.choice(entries)]))
            case "crash" if entries:
                number, _ = front.directory.entries[self.random.choice(entries)]
                front.router.sessions.tell(number, m.Lost("a bug"))

    async def end(self) -> None:
        """All clients go, and all sessions with them."""
        for _ in range(100):
            await self.turns(20)
            self.clock.advance(0.1)
        unanswered = [socket for front in self.fronts for socket in front.waiting]
        for _ in range(100):
            for front in self.fronts:
                for socket in list(front.attached):
                    front.end(socket)
            await self.turns(20)
            self.clock.advance(10.0)
        for task in self.tasks:
            assert not task.done() or task.exception() is None
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert unanswered == []
        assert [len(front.directory) for front in self.fronts] == [0, 0]
        assert [front.router.relayed for front in self.fronts] == [0, 0]


class Front:
    """A gateway process. `waiting`: sockets whose `open` has no answer; `attached`: to which session."""

    def __init__(self, world: World, number: int, tokenizer: Tokenizer) -> None:
        self.world, self.number = world, number
        self.names = naming(number, 0, 1, 2)
        self.router = PeerRouter(number, self._forward, 512, workers=2)
        self.store: Mailbox[m.StoreMessage] = Mailbox("store", 1 << 20)
        self.asked: Mailbox[Any] = Mailbox("cache", 1 << 20)
        self.waiting: set[int] = set()
        self.attached: dict[int, int] = {}
        self.answered = 0
        maker = SessionMaker(
            tokenizer,
            server=w.ServerInfo(version=1, epoch="e", model="fake"),
            context=128,
            vocab=384,
            limits=Limits(),
            ttl_s=MOMENT,
            clock=world.clock,
            store=self.store,
            numbers=self.names.sessions,
        )
        self.directory = Directory(
            self.router.to_directory,
            maker,
            cache=self.asked,
            scheduler=FunctionAddress(lambda message: None),
            grammar=FunctionAddress(lambda message: None),
            gateway=self.router.gateway,
            sessions=self.router.sessions,
            metrics=MagicMock(),
            prefix=self.names.prefix,
        )

    def works(self) -> list[Any]:
        return [self.directory.run(), self._keep(), self._cache(), self._gateway(), self._link()]

    def open(self) -> None:
        """A client opens a session of the last few, or a new one."""
        chance, keys = self.world.random, self.world.keys[-4:]
        fields: dict[str, Any] = {}
        if keys and chance.random() < 0.8:
            session, key, view = chance.choice(keys)
            fields = {"session": session, "key": chance.choice((key, key, key, view, "wrong"))}
        ttl = chance.choice((0.0, MOMENT, None))
        assert self.names.sockets is not None
        socket = next(self.names.sockets)
        self.waiting.add(socket)
        saves, displaceable = chance.random() < 0.7, chance.random() < 0.5
        opened = w.Open(client=chance.choice("abc"), ttl_s=ttl, **fields)
        self.router.directory.tell(
            m.OpenSession(socket, opened, [], size=10, saves=saves, displaceable=displaceable)
        )

    def end(self, socket: int) -> None:
        """The socket is gone."""
        self.waiting.discard(socket)
        session = self.attached.pop(socket, None)
        if session is not None:
            self.router.sessions.tell(session, m.Detached(socket))

    # --- stand-ins ------------------------------------------------------------------------------

    def _forward(self, worker: int, body: bytes) -> None:
        self.world.links[self.number, worker].append(body)

    async def _link(self) -> None:
        """What the other front says arrives in order."""
        link = self.world.links[1 - self.number, self.number]
        while True:
            await self.world.turns()
            if link:
                self.router.receive(link.pop(0))
            else:
                await asyncio.sleep(0)

    async def _cache(self) -> None:
        while True:
            for asked in await self.asked.drain():
                if isinstance(asked, m.Inspect):
                    answer = m.Inspected(asked.id, [0] * len(asked.branches))
                    self.router.sessions.tell(asked.session, answer)
            await self.world.turns()

    async def _gateway(self) -> None:
        while True:
            for message in await self.router.to_gateway.drain():
                socket = message.socket
                match message:
                    case m.Opened(_, session) if socket in self.waiting:
                        self.attached[socket] = session
                    case m.Opened(_, session):  # the socket went meanwhile
                        self.router.sessions.tell(session, m.Detached(socket))
                    case m.Deliver(_, messages):
                        self.waiting.discard(socket)
                        self._know(messages)
                    case _:
                        self.end(socket)
            await self.world.turns()

    def _know(self, messages: list[w.ServerMessage]) -> None:
        self.answered += 1
        for state in messages:
            if isinstance(state, w.StateReply) and state.key is not None:
                self.world.keys.append((state.session, state.key, state.view_key or ""))

    def _tell(self, session: int, answer: m.Moved | m.Saved) -> None:
        if session:  # 0: a session that is over hears nothing
            self.router.sessions.tell(session, answer)

    async def _keep(self) -> None:
        """Be the store: as SQLite's, whoever asks for a session gets it."""
        items, fences = self.world.items, self.world.fences
        while True:
            for message in await self.store.drain():
                await self.world.turns()
                match message:
                    case m.Save(session, ticket, changes) if fences[changes.session] > changes.fence:
                        self._tell(session, m.Moved(taken=True))
                    case m.Save(session, ticket, changes):
                        fences[changes.session] = changes.fence
                        before = {} if changes.whole else items.get(changes.session, {})
                        kept = {key: body for key, body in before.items() if key not in changes.drop}
                        items[changes.session] = kept | changes.put
                        self._tell(session, m.Saved(ticket))
                    case m.Fetch(name, "look"):
                        head = {HEAD: items[name][HEAD]} if name in items else {}
                        self.router.to_directory.tell(m.Fetched(name, head))
                    case m.Fetch(name):
                        fences[name] += name in items
                        fence = fences[name] if name in items else 0
                        found = m.Fetched(name, dict(items.get(name, {})), fence=fence)
                        self.router.to_directory.tell(found)
                    case m.Forget(name, fence) if fences[name] == fence:
                        items.pop(name, None)


@pytest.mark.parametrize("seed", range(12, 12 + examples(4, 200)))
async def test_each_open_is_answered(
    tokenizer_folder: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "ramify")
    world = World(seed, Tokenizer.load(tokenizer_folder))
    for _ in range(1000):
        world.act()
        await world.turns(world.random.choice((0, 0, 0, 2)))  # several come in one turn
    await world.end()
    assert sum(front.answered for front in world.fronts) > 100
