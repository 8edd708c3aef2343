"""The session's shell: it waits where others are behind, and ends where a message of its is lost."""

from collections.abc import Callable
from typing import Any

import pytest

from ramify.actors.kit.clock import ManualClock
from ramify.actors.kit.mailbox import Mailbox
from ramify.actors.session.actor import SessionActor
from ramify.actors.session.encoder import Encoder
from ramify.actors.session.turns import Turns
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.messages import Lost


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
