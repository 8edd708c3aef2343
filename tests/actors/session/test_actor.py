"""The session's shell: it waits where others are behind, and ends where a message of its is lost."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from ramify.actors.kit.mailbox import Mailbox, MailboxFull, joined
from ramify.actors.kit.turns import Turns
from ramify.actors.session.actor import SessionActor
from ramify.actors.tokenizer import Tokenizer
from ramify.actors.tokenizer.encoder import Encoder
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.errors import Close
from ramify.protocol.messages import Lost
from ramify.protocol.plan import pack
from tests.actors.session.alone import Alone
from tests.manual_clock import ManualClock


async def until(world: Any, socket: int, ident: int) -> list[Any]:
    """Let time pass until the op has a reply."""
    for _ in range(2000):
        world.clock.advance(0.01)
        await world.settle()
        if replies := world.replies(socket, ident):
            return replies
    raise AssertionError(f"op {ident} got no reply")


async def test_a_session_waits_while_the_cache_is_behind(world: Callable[..., Any]) -> None:
    """Its messages keep their order, everything is answered, and the room of others stays free."""
    async with world(room=4) as each:
        most = 0

        def watch(mailbox: Any) -> None:
            tell = mailbox.tell

            def told(message: Any, /) -> None:
                nonlocal most
                tell(message)
                most = max(most, len(mailbox))

            mailbox.tell = told

        watch(each.to_cache)
        watch(each.to_scheduler)
        names = [f"b{i}" for i in range(40)]
        socket = each.open(
            w.Append(id=1, tokens=[5, 6, 7]),
            w.Fork(id=2, as_=names),
            w.Append(id=3, branch=names, tokens=[8, 9]),
            w.Generate(id=4, branch=names, max_tokens=3, temperature=0, ignore_eos=True),
            client="c",
        )
        await until(each, socket, 4)
        each.clock.advance(1.0)
        await each.settle()
        done = each.replies(socket, 4)
        assert len(done) == 40
        assert {d.reason for d in done} == {"length"}
        assert most <= 8  # the room, and what the scheduler and the cache tell each other
        assert len(each.replies(socket, 3)) == 40


async def test_one_message_retains_every_branch(world: Callable[..., Any]) -> None:
    """1,024 branches, 256 ops of one frame: the last word of each is told once."""
    async with world() as each:
        names = [f"b{i}" for i in range(1023)]
        socket = each.open(w.Fork(id=1, as_=names), client="c")
        await each.settle()
        told: list[Any] = []
        tell = each.to_cache.tell
        each.to_cache.tell = lambda message: (told.append(message), tell(message))  # type: ignore[method-assign]
        each.send(
            socket,
            *(w.Set(id=2 + i, retain_s=float(i)) for i in range(256)),
            w.Drop(id=300, branch="b7"),
        )
        await each.settle()
        assert [type(message) for message in told] == [m.DropBranches, m.RetainBranches]
        assert len(told[1].until) == 1023
        assert set(told[1].until.values()) == {each.clock.now() + 255.0}
        assert len(each.replies(socket, 257)) == 1
        assert len(each.replies(socket, 300)) == 1
        assert not each.closed


async def test_much_to_say_is_said_in_turns(world: Callable[..., Any]) -> None:
    """Frames that wait are not worked off at once: cache and scheduler read in between."""
    async with world(room=1 << 19) as each:
        names = [f"b{i}" for i in range(1000)]
        socket = each.open(w.Fork(id=1, as_=names), client="c")
        await each.settle()
        most = 0
        tell = each.to_cache.tell

        def told(message: Any, /) -> None:
            nonlocal most
            tell(message)
            most = max(most, len(each.to_cache))

        each.to_cache.tell = told  # type: ignore[method-assign]
        for ident in range(2, 8):
            each.send(socket, w.Append(id=ident, branch=names, tokens=[5]))
        await each.settle()
        assert len(each.replies(socket, 7)) == 1000
        assert most < 2500


async def test_a_lost_message_ends_the_session(sim: Any) -> None:
    """As a crash does, whose guard (the directory) gives back what it held."""
    engine = sim()
    engine.session()
    mailboxes: list[Mailbox[Any]] = [Mailbox(name, 100) for name in ("cache", "scheduler", "gateway")]
    cache, scheduler, gateway = mailboxes
    mailbox: Mailbox[Any] = Mailbox("session", 100)
    actor = SessionActor(
        mailbox,
        engine.cores[1],
        cache=cache,
        scheduler=scheduler,
        grammar=Mailbox("grammar", 100),
        gateway=gateway,
        encoder=Encoder(),
        turns=Turns(),
        clock=ManualClock(),
    )
    mailbox.tell(Lost("a Tokens cannot be encoded"))
    with pytest.raises(RuntimeError, match="a Tokens cannot be encoded"):
        await actor.run()


def end_of(request: int) -> m.Finished:
    """It has come to its length."""
    return m.Finished(request, "length", 2, 1, 0, 1, 10.0, 10.0, 10.0, 10.0)


class Doorway(Mailbox[Any]):
    """The gateway's mailbox. `full`: it has no room now."""

    full = False

    def tell(self, message: Any, /) -> None:
        if self.full:
            raise MailboxFull("gateway")
        super().tell(message)

    def deltas(self) -> list[w.Delta]:
        """What sockets were told since the last look."""
        said = [each for message in self.drain_nowait() for each in message.messages]
        return [each for each in said if isinstance(each, w.Delta)]


class Generating:
    """A session alone that generates; its task waits for something to do."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.alone = Alone(tokenizer)
        (submit,) = self.alone.send(
            w.Append(id=1, tokens=[65]), w.Generate(id=2, max_tokens=50, ignore_eos=True, stop=["Z"])
        )
        self.request = submit.request
        self.clock = ManualClock(self.alone.now)
        self.mailbox: Mailbox[Any] = Mailbox("session", 100)
        self.gateway = Doorway("gateway", 100)
        self.scheduler: Mailbox[Any] = Mailbox("scheduler", 100)
        self.actor = SessionActor(
            self.mailbox,
            self.alone.core,
            cache=Mailbox("cache", 100),
            scheduler=self.scheduler,
            grammar=Mailbox("grammar", 100),
            gateway=self.gateway,
            encoder=Encoder(),
            turns=Turns(),
            clock=self.clock,
        )

    def step(self, letter: str, *finished: Any) -> m.Tokens:
        """The message of a step that gave a letter."""
        tokens = pack(self.tokenizer.encode(letter))
        return m.Tokens([m.Progress(self.request, tokens)], list(finished))

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


@asynccontextmanager
async def generating(tokenizer: Tokenizer) -> AsyncIterator[Generating]:
    it = Generating(tokenizer)
    task = asyncio.ensure_future(it.actor.run())
    await it.settle()
    it.gateway.drain_nowait()
    yield it
    task.cancel()
    await asyncio.wait([task])


async def test_a_token_is_sent_in_the_turn_that_brings_it(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer) as it:
        messages: list[m.SessionMessage] = [it.step("B")]
        it.actor.tell_all(messages)
        assert [delta.text for delta in it.gateway.deltas()] == ["B"]
        assert (messages, len(it.mailbox)) == ([], 0)


async def test_tokens_that_waited_together_are_one_delta(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer) as it:
        it.actor.tell_all([it.step("B"), it.step("C"), it.step("D")])
        assert [(d.text, d.position) for d in it.gateway.deltas()] == [("BCD", 4)]


async def test_nothing_overtakes_what_waits_for_the_session(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer) as it:
        it.mailbox.leave(it.step("B"))
        it.actor.tell_all([it.step("C")])
        it.actor.tell_all([it.step("D")])
        assert not it.gateway.deltas()
        await it.settle()
        assert "".join(delta.text for delta in it.gateway.deltas()) == "BCD"


async def test_the_end_of_a_request_is_told_in_the_turn_that_brings_it(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer) as it:
        ended = end_of(it.request)
        it.actor.tell_all([it.step("B"), it.step("C", ended)])
        (sent,) = it.gateway.drain_nowait()
        assert [type(each) for each in sent.messages] == [w.Delta, w.Done]
        assert sent.messages[0].text == "BC"


def frame_of(*ops: w.Op) -> m.Frame:
    return m.Frame(1, list(ops))


@asynccontextmanager
async def resting(tokenizer: Tokenizer) -> AsyncIterator[Generating]:
    """One whose generation has ended."""
    async with generating(tokenizer) as it:
        it.actor.tell_all([it.step("B", end_of(it.request))])
        it.gateway.drain_nowait()
        await asyncio.sleep(0)
        yield it


async def test_a_frame_is_run_in_the_turn_that_brings_it(tokenizer: Tokenizer) -> None:
    async with resting(tokenizer) as it:
        it.actor.tell(frame_of(w.Fork(id=3, as_=["twin"]), w.Generate(id=4, branch="twin")))
        assert "twin" in it.alone.core.state.branches
        assert [type(each) for each in it.scheduler.drain_nowait()[-1:]] == [m.Submit]
        assert not len(it.mailbox)


async def test_a_frame_behind_others_waits_for_its_turn(tokenizer: Tokenizer) -> None:
    async with resting(tokenizer) as it:
        it.mailbox.leave(it.step("B"))
        it.actor.tell(frame_of(w.Fork(id=3, as_=["twin"])))
        assert "twin" not in it.alone.core.state.branches
        assert len(it.mailbox) == 2


async def test_a_frame_that_comes_while_it_sends_waits_and_loses_nothing(tokenizer: Tokenizer) -> None:
    """Whoever gets a reply may answer it at once, in the same turn of the loop."""
    async with resting(tokenizer) as it:
        told: list[int] = []

        class Answering:
            def tell(self, message: m.Deliver) -> None:
                told.extend(reply.id for reply in message.messages if isinstance(reply, w.Ok))
                if told == [3]:
                    it.actor.tell(frame_of(w.Fork(id=4, as_=["second"])))

        it.actor._gateway = cast(Any, Answering())
        it.actor.tell(frame_of(w.Fork(id=3, as_=["first"])))
        assert it.alone.core.state.branches.keys() == {"main", "first"}
        for _ in range(3):
            await it.settle()
        assert it.alone.core.state.branches.keys() == {"main", "first", "second"}
        assert told == [3, 4]


async def test_what_is_too_much_for_the_turn_of_another_is_done_by_the_task(
    tokenizer: Tokenizer,
) -> None:
    async with resting(tokenizer) as it:
        core = it.alone.core
        core.work.most = core.work.left = 300
        forks = [w.Fork(id=3 + i, branch="main", as_=[f"twin{i}"]) for i in range(20)]
        it.actor.tell(frame_of(*forks))
        assert core.unfinished
        it.actor.tell(frame_of(w.Fork(id=30, branch="twin19", as_=["last"])))  # behind what is left
        assert "last" not in core.state.branches
        for _ in range(50):
            await it.settle()
        assert not core.unfinished
        assert {"twin0", "twin19", "last"} <= core.state.branches.keys()


async def test_a_close_that_is_too_much_for_a_turn_is_answered_with_all_before_it(world: Any) -> None:
    async with world() as each:
        socket = each.open(client="c")
        await each.settle()
        forks = [w.Fork(id=1 + i, as_=[f"b{i}n{j}" for j in range(100)]) for i in range(9)]
        appends = [w.Append(id=100 + i, text="x y " * 500) for i in range(40)]
        each.send(socket, *forks, *appends, w.CloseSession(id=900))
        await until(each, socket, 900)
        for op in (*forks, *appends):
            assert len(each.replies(socket, op.id)) == 1, op.id


async def test_each_turn_of_the_loop_has_its_budget(tokenizer: Tokenizer) -> None:
    async with resting(tokenizer) as it:
        core = it.alone.core
        for i in range(3):
            it.actor.tell(frame_of(w.Fork(id=3 + i, branch="main", as_=[f"twin{i}"])))
        spent = core.work.most - core.work.left
        assert spent > 0
        await asyncio.sleep(0)
        assert core.work.left == core.work.most


async def test_an_op_that_ends_the_session_ends_its_task(tokenizer: Tokenizer) -> None:
    it = Generating(tokenizer)
    task = asyncio.ensure_future(it.actor.run())
    await it.settle()
    it.actor.tell(frame_of(w.CloseSession(id=3)))
    await asyncio.wait_for(task, 10)
    assert it.alone.core.ended is not None


async def test_a_fault_with_a_frame_ends_the_session_not_who_told_it(tokenizer: Tokenizer) -> None:
    it = Generating(tokenizer)
    ends: list[int] = []
    task = asyncio.ensure_future(it.actor.live(lambda code, reason: ends.append(code)))
    await it.settle()

    def fault(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    it.alone.core.framed = fault  # type: ignore[method-assign]
    it.actor.tell(frame_of(w.Fork(id=3, as_=["twin"])))
    await asyncio.wait_for(task, 10)
    assert ends == [Close.SERVER_BUG]


async def test_what_the_gateway_has_no_room_for_is_sent_later_in_order(tokenizer: Tokenizer) -> None:
    async with generating(tokenizer) as it:
        it.gateway.full = True
        it.actor.tell_all([it.step("B")])
        await it.settle()
        it.actor.tell_all([it.step("C")])  # its task tries again and again
        assert len(it.mailbox) == 1
        it.gateway.full = False
        it.clock.advance(0.01)
        await it.settle()
        assert [delta.text for delta in it.gateway.deltas()] == ["B", "C"]
        it.actor.tell_all([it.step("D")])
        assert [delta.text for delta in it.gateway.deltas()] == ["D"]


async def test_a_fault_with_tokens_ends_the_session_not_who_told_them(tokenizer: Tokenizer) -> None:
    it = Generating(tokenizer)
    ends: list[int] = []
    task = asyncio.ensure_future(it.actor.live(lambda code, reason: ends.append(code)))
    await it.settle()

    def fault(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    it.alone.core.tokens = fault  # type: ignore[method-assign]
    it.actor.tell_all([it.step("B")])
    it.actor.tell_all([it.step("C")])
    assert not ends
    await asyncio.wait_for(task, 60)
    assert ends == [Close.SERVER_BUG]
    assert it.alone.core.ended == "crashed"


async def test_an_engine_that_goes_down_is_no_crash_of_the_session(tokenizer: Tokenizer) -> None:
    it = Generating(tokenizer)
    ends: list[int] = []
    task = asyncio.ensure_future(it.actor.live(lambda code, reason: ends.append(code)))
    await it.settle()
    it.scheduler.close()
    it.actor.tell_all([it.step("Z")])  # its stop: the scheduler is told
    await asyncio.wait_for(task, 60)
    assert ends == [Close.RESTART]
    assert isinstance(it.gateway.drain_nowait()[-1].messages[-1], w.Done)  # it had ended there


def test_tokens_join_up_to_an_end_and_not_across_others() -> None:
    one, two, three = (m.Tokens([m.Progress(i, b"")], []) for i in range(3))
    end = m.Tokens([], [end_of(1)])
    tick = m.Tick()
    assert joined([one]) == [one]
    made = joined([one, two, end, three, tick, one, two])
    assert made == [
        m.Tokens([*one.progress, *two.progress], end.finished),
        three,
        tick,
        m.Tokens([*one.progress, *two.progress], []),
    ]
    assert len(one.progress) == 1  # what was told is left as it is
