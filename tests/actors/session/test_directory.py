"""The directory: who opened which session is told, keys open sessions, and an end leaves nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest

from ramify.actors.kit.fanout import Router
from ramify.actors.kit.mailbox import Mailbox, MailboxClosed, MailboxFull
from ramify.actors.session import directory as directory_module
from ramify.actors.session import making as making_module
from ramify.actors.session.actor import Displace
from ramify.actors.session.directory import Directory
from ramify.actors.session.making import SessionMaker
from ramify.actors.session.restore import read_head
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.config import Limits
from ramify.protocol.errors import Close


class Doors:
    """A directory without an engine behind it: what it and its sessions tell is noted."""

    def __init__(self, tokenizer: Tokenizer, *, stored: bool) -> None:
        self.inbox: Mailbox[m.DirectoryMessage] = Mailbox("directory", 64)
        self.gateway: Mailbox[Any] = Mailbox("gateway", 64)
        self.cache: Mailbox[Any] = Mailbox("cache", 64)
        self.scheduler: Mailbox[Any] = Mailbox("scheduler", 64)
        self.sessions: Router[Any] = Router("sessions")
        self.metrics = MagicMock()
        self.store: Mailbox[Any] | None = Mailbox("store", 64) if stored else None
        maker = SessionMaker(
            tokenizer,
            server=w.ServerInfo(version=1, epoch="e", model="fake"),
            context=128,
            vocab=384,
            limits=Limits(),
            ttl_s=600.0,
            clock=MagicMock(now=lambda: 100.0),
            store=self.store,
        )
        self.directory = Directory(
            self.inbox,
            maker,
            cache=self.cache,
            scheduler=self.scheduler,
            grammar=Mailbox("grammar", 64),
            gateway=self.gateway,
            sessions=self.sessions,
            metrics=self.metrics,
        )

    async def open(self, socket: int, *ops: Any, **fields: Any) -> list[Any]:
        """What the gateway is told after an `open`."""
        self.inbox.tell(m.OpenSession(socket, w.Open(client="c", **fields), list(ops)))
        return await self.settle()

    async def settle(self) -> list[Any]:
        """Let everybody read; returns what the gateway was told meanwhile."""
        for _ in range(30):
            await asyncio.sleep(0)
        return list(self.gateway.drain_nowait())


@pytest.fixture
def doors(tokenizer: Tokenizer) -> Callable[..., AbstractAsyncContextManager[Doors]]:
    @asynccontextmanager
    async def run(*, stored: bool = False) -> AsyncIterator[Doors]:
        each = Doors(tokenizer, stored=stored)
        running = asyncio.create_task(each.directory.run())
        try:
            yield each
        finally:
            each.inbox.close()
            await running

    return run


def number_of(told: list[Any], socket: int) -> int:
    """The session that a socket was told to have."""
    (opened,) = [each for each in told if isinstance(each, m.Opened)]
    assert opened.socket == socket
    number: int = opened.session
    return number


def state_of(told: list[Any], socket: int) -> w.StateReply:
    (state,) = [
        message
        for each in told
        if isinstance(each, m.Deliver) and each.socket == socket
        for message in each.messages
        if isinstance(message, w.StateReply)
    ]
    return state


def error_of(told: list[Any], socket: int) -> str:
    (refused,) = told
    assert isinstance(refused, m.OpenRefused)
    assert refused.socket == socket
    return str(refused.error.code)


async def test_a_socket_is_told_its_session(doors: Callable[..., Any]) -> None:
    """Without `Opened` the gateway would not know where its frames go."""
    async with doors() as each:
        first, second = await each.open(7), await each.open(8)
        assert number_of(first, 7) != number_of(second, 8)
        assert len(each.directory) == 2
        state = state_of(first, 7)
        assert state.key is not None
        assert not state.resumed
        await each.settle()
        assert each.metrics.sessions.call_args_list[-1].args == (1,)
        # a frame that is sent there arrives
        each.sessions.tell(number_of(first, 7), m.Frame(7, [w.Append(id=3, tokens=[5])]))
        told = await each.settle()
        assert [message.id for d in told for message in d.messages] == [3]


async def test_only_its_keys_open_a_session(doors: Callable[..., Any]) -> None:
    async with doors() as each:
        opened = await each.open(1, w.Append(id=1, tokens=[5]))
        state = state_of(opened, 1)
        assert error_of(await each.open(2, session=state.session), 2) == "forbidden"
        assert error_of(await each.open(2, session=state.session, key="k"), 2) == "forbidden"
        assert error_of(await each.open(2, session="s_unknown", key=state.key), 2) == "no_session"
        assert error_of(await each.open(2, model="another"), 2) == "bad_request"
        assert error_of(await each.open(2, key=state.key), 2) == "bad_request"
        assert len(each.directory) == 1
        told = await each.open(3, session=state.session, key=state.key)
        assert number_of(told, 3) == number_of(opened, 1)


async def test_who_has_the_view_key_changes_nothing(world: Callable[..., Any]) -> None:
    async with world() as each:
        first = each.open(client="c")
        await each.settle()
        state = each.state(first)
        viewer = each.open(
            w.Append(id=1, tokens=[5]), client="v", session=state.session, key=state.view_key
        )
        await each.settle()
        assert [reply.code for reply in each.replies(viewer, 1)] == ["forbidden"]


async def test_others_may_open_a_session_with_its_view_key_only(doors: Callable[..., Any]) -> None:
    """Without that it is not there for them."""
    async with doors() as each:
        opened = await each.open(1)
        state = state_of(opened, 1)
        keys = {"own": state.key, "view": state.view_key}
        for socket, (key, seen) in enumerate((("own", False), ("view", True)), 3):
            opening = w.Open(client="d", session=state.session, key=keys[key])
            each.inbox.tell(m.OpenSession(socket, opening, [], "another"))
            told = await each.settle()
            if seen:
                assert number_of(told, socket) == number_of(opened, 1)
            else:
                assert error_of(told, socket) == "no_session"


async def test_after_the_engine_has_failed_clients_are_told_to_come_back(
    doors: Callable[..., Any],
) -> None:
    async with doors() as each:
        await each.open(1)
        await each.directory.fail()
        await each.settle()
        told = await each.open(2)
        assert error_of(told, 2) == "overloaded"
        assert told[-1].error.retry_ms == 1000


async def test_while_it_drains_nobody_opens_a_session(doors: Callable[..., Any]) -> None:
    async with doors() as each:
        each.inbox.tell(m.Shutdown("bye", 250))
        told = await each.open(1)
        assert error_of(told, 1) == "overloaded"
        assert told[0].error.retry_ms == 250
        assert len(each.directory) == 0


async def test_an_end_leaves_nothing(doors: Callable[..., Any]) -> None:
    async with doors() as each:
        opened = await each.open(5, w.Append(id=1, tokens=[5]))
        number = number_of(opened, 5)
        each.sessions.tell(number, m.Frame(5, [w.CloseSession(id=2)]))
        told = await each.settle()
        closed = [message for message in told if isinstance(message, m.CloseSocket)]
        assert {(message.socket, message.code) for message in closed} <= {(5, Close.DONE)}
        assert len(each.directory) == 0
        assert each.metrics.sessions.call_args_list[-1].args == (-1,)
        assert m.CancelSession(number) in list(each.scheduler.drain_nowait())
        assert error_of(await each.open(6, session="s", key="k"), 6) == "no_session"


async def test_a_session_is_as_urgent_as_its_credential_allows(doors: Callable[..., Any]) -> None:
    async with doors() as each:
        urgent = w.Generate(id=1, priority=3)
        each.inbox.tell(m.OpenSession(1, w.Open(client="c"), [urgent], owner="a", priority=2))
        each.inbox.tell(m.OpenSession(2, w.Open(client="c"), [urgent], owner="b", priority=3))
        replies = [out for told in await each.settle() for out in getattr(told, "messages", ())]
        shown = [out.limits["priority"] for out in replies if isinstance(out, w.StateReply)]
        assert shown == [2, 3]
        codes = [out.code for out in replies if isinstance(out, w.Error)]
        assert codes == ["limit", "bad_request"]  # the second's branch is empty


async def test_where_the_key_was_is_told(doors: Callable[..., Any]) -> None:
    """In a frame of several messages, or alone."""
    async with doors() as each:
        for place, path in ((None, "$.key"), (0, "$[0].key"), (2, "$[2].key")):
            each.inbox.tell(m.OpenSession(1, w.Open(client="c", key="k"), [], place=place))
            (refused,) = await each.settle()
            assert refused.error.details == {"path": path}
            assert path in refused.error.message
        assert len(each.directory) == 0


async def test_the_servers_own_model_may_be_named(doors: Callable[..., Any]) -> None:
    async with doors() as each:
        assert number_of(await each.open(1, model="fake"), 1) == 1


async def test_ids_and_keys_cannot_be_guessed(doors: Callable[..., Any]) -> None:
    async with doors() as each:
        states = [state_of(await each.open(socket), socket) for socket in (1, 2)]
        for prefix, length, name in (("s_", 14, "session"), ("k_", 26, "key"), ("v_", 26, "view_key")):
            values = [getattr(state, name) for state in states]
            assert len(set(values)) == 2
            assert {(value[:2], len(value)) for value in values} == {(prefix, length)}


async def test_a_session_whose_mailbox_is_full_is_overloaded(doors: Callable[..., Any]) -> None:
    async with doors() as each:
        state = state_of(await each.open(1), 1)
        _, entry = each.directory.entries[state.session]
        entry.mailbox.tell = MagicMock(side_effect=MailboxFull("session"))
        told = await each.open(2, session=state.session, key=state.key)
        assert error_of(told, 2) == "overloaded"
        assert told[0].error.retry_ms == 1000


async def test_a_session_that_cannot_be_made_leaves_nothing_and_harms_nobody(
    doors: Callable[..., Any],
) -> None:
    async with doors() as each:
        holdings = each.directory.holdings
        each.directory._metrics.sessions.side_effect = RuntimeError("broken")
        before = holdings.held
        told = await each.open(1)
        assert told[0].error.message == "the session could not be opened"
        assert (holdings.held, holdings.process.sessions) == (before, 0)
        each.directory._metrics.sessions.side_effect = None
        assert number_of(await each.open(2), 2) == 2


async def test_all_its_sockets_are_closed_with_a_session(doors: Callable[..., Any]) -> None:
    """Also those that it has not read of, and what it held is given back."""
    async with doors() as each:
        state = state_of(await each.open(1), 1)
        number, entry = each.directory.entries[state.session]
        late = m.Attach(9, w.Open(client="d"), [], True)
        each.sessions.tell(number, m.Frame(1, [w.CloseSession(id=2)]))
        entry.actor.attach(late)
        told = await each.settle()
        closed = [t.socket for t in told if isinstance(t, m.CloseSocket)]
        assert sorted(set(closed)) == [1, 9]
        with pytest.raises(MailboxClosed):
            entry.mailbox.tell(m.Detached(7))
        assert each.directory._deserted.is_set()
        assert each.directory.holdings.held == 0
        assert m.DropSessions([number]) in list(each.cache.drain_nowait())


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (m.Tick(), None),
        (Displace(), None),
        (m.Frame(1, [w.CloseSession(id=1)]), Close.DONE),
        (m.Lost("a bug"), Close.SERVER_BUG),
    ],
    ids=["expires", "displaced", "closed", "crashes"],
)
async def test_who_comes_in_the_turn_in_which_a_session_ends_hears_of_it(
    doors: Callable[..., Any], end: Any, code: int | None
) -> None:
    """Its end and the `open` wait in the mailbox together: the `open` was lost, and never answered."""
    async with doors() as each:
        opened = await each.open(1, ttl_s=0.0)
        number, state = number_of(opened, 1), state_of(opened, 1)
        if code != Close.DONE:
            each.sessions.tell(number, m.Detached(1))
            await each.settle()
        again = w.Open(client="d", session=state.session, key=state.key)
        each.inbox.tell(m.OpenSession(2, again, []))
        each.sessions.tell(number, end)
        told = await each.settle()
        assert number_of(told, 2) == number
        if code is None:
            assert each.directory.entries[state.session][1].actor.core.sockets == [2]
        else:
            assert [c.code for c in told if isinstance(c, m.CloseSocket) and c.socket == 2] == [code]


async def test_who_comes_when_a_session_has_left_the_memory_is_told_to_come_back(
    doors: Callable[..., Any],
) -> None:
    """It has nothing to tell any more, and a mailbox is full, so that its end takes a while."""
    async with doors(stored=True) as each:
        opened = await each.open(1, ttl_s=0.0)
        number = number_of(opened, 1)
        each.sessions.tell(number, m.Saved(1))
        state = state_of(await each.settle(), 1)
        _, entry = each.directory.entries[state.session]
        room = asyncio.Event()
        each.directory.maker.clock.sleep_until = lambda when: room.wait()
        entry.actor.core.state.out.scheduler.append(m.CancelSession(number))
        while len(each.scheduler) < each.scheduler.capacity:
            each.scheduler.tell(m.CancelSession(99))
        each.sessions.tell(number, m.Detached(1))
        each.sessions.tell(number, m.Tick())
        await each.settle()
        again = await each.open(2, session=state.session, key=state.key)
        assert number_of(again, 2) == number
        each.scheduler.drain_nowait()
        room.set()
        told = await each.settle()
        assert [(each.socket, each.code) for each in told] == [(2, Close.RESTART)]


def test_tokens_that_the_model_lacks_are_told_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    warned = MagicMock()
    monkeypatch.setattr(making_module.log, "warning", warned)
    fits: Any = MagicMock(beyond=lambda vocab: {}, eos_ids=frozenset({2}))
    making_module._compare(fits, 100)
    assert not warned.called
    lacks: Any = MagicMock(
        beyond=lambda vocab: {vocab + i: f"t{i}" for i in (5, 0, 1, 2, 3)},
        eos_ids=frozenset({2, 103, 101}),
    )
    making_module._compare(lacks, 100)
    first, second = warned.call_args_list
    assert (first.kwargs["vocabulary"], first.kwargs["tokens"]) == (100, 5)
    assert first.kwargs["examples"] == {100: "t0", 101: "t1", 102: "t2", 103: "t3"}
    assert second.kwargs == {"tokens": [101, 103]}


@pytest.mark.parametrize("where", ["sessions.add", "metrics.sessions", "log.info", "start"])
async def test_a_session_that_cannot_begin_leaves_nothing(
    doors: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Else the directory would wait for its end when the engine fails or drains."""

    def fails(*args: Any, **fields: Any) -> None:
        raise RuntimeError("made up")

    async with doors() as each:
        with monkeypatch.context() as patch:
            if where == "start":
                patch.setattr(directory_module.SessionActor, "live", property(fails))
            elif where == "log.info":
                patch.setattr(directory_module.log, "info", fails)
            elif where == "sessions.add":
                patch.setattr(each.sessions, "add", fails)
            else:
                patch.setattr(each.metrics.sessions, "side_effect", fails)
            assert error_of(await each.open(1), 1) == "internal"
        assert (len(each.directory), len(each.sessions)) == (0, 0)
        counted = [call.args[0] for call in each.metrics.sessions.call_args_list]
        assert where == "metrics.sessions" or sum(counted) == 0
        holdings = each.directory.holdings
        assert holdings.held == 0
        await asyncio.wait_for(each.directory.fail(), 60)
    async with doors() as each:
        number_of(await each.open(1), 1)


async def test_an_end_of_the_process_is_no_refusal(
    doors: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with doors() as each:
        monkeypatch.setattr(each.directory, "_open", MagicMock(side_effect=asyncio.CancelledError))
        with pytest.raises(asyncio.CancelledError):
            each.directory._handle(m.OpenSession(1, w.Open(client="c"), []), MagicMock())
        assert list(each.gateway.drain_nowait()) == []


async def test_a_session_that_nobody_comes_back_to_is_not_saved(doors: Callable[..., Any]) -> None:
    """One of a single HTTP request: what was said in it is on no disk."""
    async with doors(stored=True) as each:
        each.inbox.tell(m.OpenSession(1, w.Open(client="c"), [], saves=False))
        state = state_of(await each.settle(), 1)
        assert state.persist is None
        assert not each.store.drain_nowait()
        each.inbox.tell(m.OpenSession(2, w.Open(client="c"), []))
        await each.settle()
        assert [type(told) for told in each.store.drain_nowait()] == [m.Save]


async def test_what_is_saved_says_whether_it_makes_room(doors: Callable[..., Any]) -> None:
    async with doors(stored=True) as each:
        for socket, displaceable in ((1, False), (2, True)):
            each.inbox.tell(m.OpenSession(socket, w.Open(client="c"), [], displaceable=displaceable))
        await each.settle()
        heads = [read_head(told.changes.put) for told in each.store.drain_nowait()]
        assert [head.displaceable for head in heads] == [False, True]


async def test_a_saved_session_that_breaks_the_server_ends_alone(
    doors: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug, or damage that nobody foresaw: who asked is told, and the others notice nothing."""

    def broken(*_: Any) -> None:
        raise IndexError("out of range")

    async with doors(stored=True) as each:
        each.inbox.tell(m.OpenSession(1, w.Open(client="c"), []))
        await each.settle()
        ((_, entry),) = each.directory.entries.values()
        key = entry.identity.key
        (saved,) = each.store.drain_nowait()
        monkeypatch.setattr(making_module, "restoring", broken)
        each.inbox.tell(m.OpenSession(2, w.Open(client="c", session="s_old", key=key), []))
        await each.settle()
        assert m.Fetch("s_old") in each.store.drain_nowait()
        each.inbox.tell(m.Fetched("s_old", saved.changes.put, fence=5))
        assert error_of(await each.settle(), 2) == "internal"
        assert list(each.store.drain_nowait()) == [m.Release("s_old")]
        assert len(each.directory) == 1
        each.inbox.tell(m.OpenSession(3, w.Open(client="c"), []))
        await each.settle()
        assert len(each.directory) == 2


async def test_only_who_may_open_a_session_takes_it_from_another_server(
    doors: Callable[..., Any],
) -> None:
    """Its head is looked at first. One whose ops wait is taken if no other server has it."""
    async with doors(stored=True) as each:
        state = state_of(await opened(each, 1), 1)
        (saved,) = each.store.drain_nowait()
        items = saved.changes.put
        for socket, key in ((2, "k_wrong"), (3, state.key)):
            each.inbox.tell(m.OpenSession(socket, w.Open(client="c", session="s_old", key=key), []))
            await each.settle()
            assert list(each.store.drain_nowait()) == [m.Fetch("s_old")]
            each.inbox.tell(m.Fetched("s_old", items))
            if socket == 2:
                assert error_of(await each.settle(), 2) == "forbidden"
        assert not await each.settle()
        assert list(each.store.drain_nowait()) == [m.Fetch("s_old", "ask")]
        each.inbox.tell(m.Fetched("s_old", items, fence=5))
        assert number_of(await each.settle(), 3) == 2
        (told,) = each.store.drain_nowait()
        assert (told.changes.fence, told.changes.whole) == (5, False)
        each.inbox.tell(m.Waiting(["s_busy"]))
        await each.settle()
        assert list(each.store.drain_nowait()) == [m.Fetch("s_busy", "free")]
        each.inbox.tell(m.OpenSession(4, w.Open(client="c", session="s_busy", key="k"), []))
        await each.settle()
        each.inbox.tell(m.Fetched("s_busy", {}, held=True))
        await each.settle()
        assert list(each.store.drain_nowait()) == [m.Fetch("s_busy")]


async def opened(each: Doors, socket: int | None = None) -> list[Any]:
    """What the gateway is told once the store has what was saved first."""
    if socket is not None:
        each.inbox.tell(m.OpenSession(socket, w.Open(client="c"), []))
    told = await each.settle()
    assert each.store is not None
    saves = list(each.store.drain_nowait())
    for save in saves:
        each.store.tell(save)
        each.sessions.tell(save.session, m.Saved(save.ticket))
    return told + await each.settle()


async def test_a_session_that_another_server_wants_is_saved_and_let_go(
    doors: Callable[..., Any],
) -> None:
    """Its sockets may come back elsewhere. Of one that is not here the store is told so."""
    async with doors(stored=True) as each:
        told = await opened(each, 1)
        state, number = state_of(told, 1), number_of(told, 1)
        each.store.drain_nowait()
        each.inbox.tell(m.Wanted([state.session, "s_gone"]))
        told = await each.settle()
        assert [close.code for close in told if isinstance(close, m.CloseSocket)] == [Close.RESTART]
        assert each.sessions.has_moved(number)
        release, save = each.store.drain_nowait()
        assert release == m.Release("s_gone")
        assert (save.session, save.changes.live) == (0, False)
        assert len(each.directory) == 0


async def test_a_session_that_another_server_has_taken_ends_unsaved(doors: Callable[..., Any]) -> None:
    async with doors(stored=True) as each:
        told = await opened(each, 1)
        await opened(each, 2)
        each.store.drain_nowait()
        number = number_of(told, 1)
        each.sessions.leave(number, m.Tick())  # so the frame waits behind it
        each.sessions.tell(number, m.Frame(1, [w.Set(id=1, persist="sync")]))
        each.sessions.tell(number, m.Moved(taken=True))
        told = await each.settle()
        assert [(close.socket, close.code) for close in told] == [(1, Close.RESTART)]
        assert not each.store.drain_nowait()
        assert len(each.directory) == 1


async def test_a_socket_that_was_replaced_hears_so_also_where_another_server_takes_the_session(
    doors: Callable[..., Any],
) -> None:
    """It waited for a save, which never came: nobody knew of it, and it was left open."""
    async with doors(stored=True) as each:
        told = await opened(each, 1)
        number, state = number_of(told, 1), state_of(told, 1)
        each.sessions.tell(number, m.Frame(1, [w.Set(id=1, persist="sync")]))
        await each.settle()
        assert number_of(await each.open(2, session=state.session, key=state.key), 2) == number
        each.sessions.tell(number, m.Moved(taken=True))
        told = await each.settle()
        assert [(close.socket, close.code) for close in told] == [
            (1, Close.REPLACED),
            (2, Close.RESTART),
        ]
