"""What sessions hold is counted, bounded, and given back."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ramify.actors.kit.memory import LOGPROB, SEGMENT, SESSION, TOKEN, Holdings, Meter
from ramify.actors.session.ops import op_bytes
from ramify.gpu.constraints import walk
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.config import Limits
from ramify.protocol.errors import LimitExceeded


def meter_of(engine: Any, client: Any) -> Meter:
    meter: Meter = engine.cores[client.number].state.meter
    return meter


def only(client: Any, ident: int) -> Any:
    (reply,) = client.replies[ident]
    return reply


def test_what_a_conversation_holds_goes_with_it(sim: Callable[..., Any]) -> None:
    """Input, output, forks, meta, kept replies: after the drops only the replies are left."""
    engine = sim()
    client = engine.session()
    engine.pump()
    meter = meter_of(engine, client)
    start = meter.held
    client.send(
        w.Append(id=1, messages=[w.ChatMessage(role="user", content="word " * 50)]),
        w.Fork(id=2, as_=["a", "b"]),
        w.Generate(id=3, branch=["a", "b"], max_tokens=20, logprobs=3),
        w.Set(id=4, branch="a", meta={"x": ["y"] * 50}),
        w.Rollback(id=5, branch="b", to=20),
    )
    engine.pump()
    grown = meter.held
    assert grown - start > 20 * 100
    client.send(w.Fork(id=6, branch="a", as_=[f"f{i}" for i in range(10)]))
    engine.pump()
    assert meter.held - grown < 10 * 2500  # forks share the segments
    client.send(w.Drop(id=7, branch=["a", "b", "main", *(f"f{i}" for i in range(10))]))
    engine.pump()
    gc.collect()
    (reply_log,) = engine.cores[client.number].publisher.reply_logs.values()
    assert meter.held - start == reply_log.held - 1500  # the first branch counted too


def test_a_full_session_refuses_input_and_says_what_to_do(sim: Callable[..., Any]) -> None:
    engine = sim(limits=Limits(session_bytes=100_000, meta_bytes=1 << 20))
    client = engine.session()
    engine.pump()
    text = "x" * 30_000
    for ident in range(1, 5):  # raw text, twice: as it is shown and as it was rendered
        client.send(w.Append(id=ident, tokens=[5] * 500, branch="main"))
        engine.pump()
        client.send(w.Rollback(id=100 + ident, to=0))
        engine.pump()
    client.send(w.Set(id=200, meta={"a": text}))
    engine.pump()
    refused = only(client, 200)
    assert (refused.code, refused.details["max"]) == ("limit", 100_000)
    assert "drop branches" in refused.message
    client.send(w.Append(id=201, tokens=[5, 6]), w.Generate(id=202, max_tokens=3, temperature=0))
    engine.pump()
    assert only(client, 202).reason in ("length", "stop")


def test_output_that_fills_the_session_ends_there(sim: Callable[..., Any]) -> None:
    """With `limit`; its text stays, others go on, and after a drop there is room again."""
    engine = sim(limits=Limits(session_bytes=60_000), eos_every=0, context=2048)
    client, other = engine.session(), engine.session()
    for each in (client, other):
        each.send(w.Append(id=1, tokens=[5, 6, 7]))
    engine.pump()
    client.send(w.Fork(id=2, as_=["a"]), w.Generate(id=3, max_tokens=1500, temperature=0))
    other.send(w.Generate(id=2, max_tokens=50, temperature=0))
    engine.pump()
    done = only(client, 3)
    assert (done.reason, done.error) == ("error", "limit")
    assert "drop branches" in done.message
    assert 50 < done.usage.output < 600
    assert done.position == 3 + done.usage.output
    assert len(client.text("main")) > 10
    assert only(other, 2).reason == "length"
    engine.check_outputs(client.number)
    client.send(w.Generate(id=4, branch="a", max_tokens=5), w.Fork(id=5, as_=["z"]))
    engine.pump()
    assert {only(client, 4).code, only(client, 5).code} == {"limit"}
    client.send(w.Drop(id=6, branch="main"), w.Generate(id=7, branch="a", max_tokens=5, temperature=0))
    engine.pump()
    assert only(client, 7).reason == "length"


def test_ops_that_wait_are_bounded_in_bytes(sim: Callable[..., Any]) -> None:
    limits = Limits(queued_op_bytes=100_000)
    engine = sim(limits=limits, eos_every=0)
    client = engine.session()
    engine.pump()
    client.send(w.Append(id=1, tokens=[5]), w.Generate(id=2, max_tokens=400, temperature=0))
    engine.pump(40)
    waiting = [w.Append(id=ident, text="y" * 20_000) for ident in range(3, 12)]
    for op in waiting:
        client.send(op)
    engine.pump(60)
    refused = [ident for ident in range(3, 12) if ident in client.replies]
    assert refused
    assert only(client, refused[0]).code == "limit"
    assert "wait for replies" in only(client, refused[0]).message
    assert engine.cores[1].runner.queued <= 100_000
    client.send(w.Cancel(id=20))  # passes always
    engine.pump()
    assert client.unanswered == {}
    assert engine.cores[1].runner.queued == 0


def test_one_frame_passes_whatever_its_size(sim: Callable[..., Any]) -> None:
    engine = sim(limits=Limits(queued_op_bytes=1000))
    client = engine.session()
    engine.pump()
    client.send(w.Append(id=1, tokens=[5] * 300))
    engine.pump()
    assert isinstance(only(client, 1), w.Ok)


def test_frames_before_the_state_are_bounded(sim: Callable[..., Any]) -> None:
    """The cache is behind, and a client that resumes sends on."""
    engine = sim(limits=Limits(queued_op_bytes=100_000))
    client = engine.session()
    client.send(w.Append(id=1, tokens=[5]))
    engine.pump()
    client.drop()
    engine.pump()
    meter = meter_of(engine, client)
    before = meter.held
    core = engine.cores[1]
    core.attach(m.Attach(77, w.Open(client="late", session="s_1", key="key"), [], True), 1.0)
    for ident in range(1, 20):
        core.frame(77, [w.Append(id=ident, text="z" * 20_000)], 1.0)
    assert before < meter.held < before + 100_000
    assert [note.code for _, note in core.state.out.notes] == ["limit"] * 15
    core.detached(77, 1.0)
    assert meter.held == before


def test_what_a_slow_socket_does_not_read_counts(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(w.Append(id=1, tokens=[5]))
    engine.pump()
    engine.post_session(1, m.Throttled(client.socket))
    client.send(w.Generate(id=2, max_tokens=30, temperature=0))
    engine.pump()
    meter = meter_of(engine, client)
    held = meter.held
    (subscriber,) = engine.cores[1].subscribers.values()
    assert subscriber.held == 1
    engine.post_session(1, m.Drained(client.socket))
    engine.pump()
    assert subscriber.held == 0
    assert meter.held < held


def test_credit_for_names_that_nobody_expects_is_not_kept(sim: Callable[..., Any]) -> None:
    engine = sim(limits=Limits(ops_in_flight=16))
    client = engine.session()
    client.send(w.Append(id=1, tokens=[5]))
    engine.pump()
    client.send(*(w.Credit(branch=f"n{i}", upto=1) for i in range(1000)))
    client.send(w.Fork(id=2, as_=["a"]), w.Credit(branch="a", upto=3))  # one that is about to come
    engine.pump()
    (subscriber,) = engine.cores[1].subscribers.values()
    assert subscriber._credit == {"a": 3}
    client.send(w.Generate(id=3, branch="a", max_tokens=9, temperature=0))
    engine.pump(200)
    assert client.have["a"] <= 3


def test_a_client_that_never_came_in_leaves_nothing(sim: Callable[..., Any]) -> None:
    """Sockets of ever new names that leave before they have their `state`."""
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, tokens=[5]))
    engine.pump()
    core = engine.cores[1]
    for number in range(200):
        opened = w.Open(client=f"n{number}", session="s_1", key="key", detach="pause")
        core.attach(m.Attach(1000 + number, opened, [], True), 1.0)
        core.detached(1000 + number, 1.0)
    assert len(core.publisher.reply_logs) == 1
    assert not core.generations.waiting.paused


def test_a_session_that_is_due_and_generates_is_looked_at_once_a_second(sim: Callable[..., Any]) -> None:
    """`ttl_s: 0`: it asked for a tick at once, again and again."""
    engine = sim(eos_every=0)
    client = engine.session(ttl_s=0.0)
    client.send(w.Append(id=1, tokens=[5]), w.Generate(id=2, max_tokens=100, temperature=0))
    engine.pump(20)
    client.drop()
    engine.pump(5)
    core = engine.cores[1]
    core.state.out.wake_at = None
    core.tick(engine.now)
    assert core.ended is None
    assert core.state.out.wake_at == pytest.approx(engine.now + 1.0)
    engine.pump()
    core.tick(engine.now + 2.0)
    assert core.ended == "expired"


async def test_a_client_cannot_keep_a_session_longer_than_the_server_lets_it(
    world: Callable[..., Any],
) -> None:
    async with world(ttl_max_s=60.0) as each:
        socket = each.open(client="c", ttl_s=86_400.0)
        await each.settle()
        assert each.state(socket).ttl_s == 60.0
        each.notice(m.Detached(socket))
        await each.settle()
        each.clock.advance(59.0)
        await each.settle()
        assert len(each.directory) == 1
        each.clock.advance(2.0)
        await each.settle()
        assert len(each.directory) == 0


async def test_sessions_are_counted_for_each_credential_and_for_the_server(
    world: Callable[..., Any],
) -> None:
    limits = Limits(client_sessions=2)
    async with world(limits=limits, holdings=Holdings(limits, sessions=3)) as each:
        mine = [each.open(client="c", owner="me") for _ in range(3)]
        yours = [each.open(client="c", owner="you") for _ in range(2)]
        await each.settle()
        codes = [getattr(each.sockets[socket][0], "code", None) for socket in mine + yours]
        assert codes == [None, None, "limit", None, "limit"]
        assert "this client's sessions" in each.sockets[mine[2]][0].message
        assert "the server's sessions" in each.sockets[yours[1]][0].message
        each.send(mine[0], w.CloseSession(id=1))
        await each.settle()
        again = each.open(client="c", owner="you")
        await each.settle()
        assert isinstance(each.sockets[again][0], w.StateReply)


async def test_bytes_of_a_credential_bound_all_its_sessions_and_nobody_elses(
    world: Callable[..., Any],
) -> None:
    limits = Limits(client_bytes=SESSION * 2 + 100_000)
    holdings = Holdings(limits)
    async with world(limits=limits, holdings=holdings) as each:
        first, second = (each.open(client="c", owner="me") for _ in range(2))
        other = each.open(client="c", owner="you")
        await each.settle()
        each.send(first, w.Set(id=1, meta={"k": "v" * 5000}))
        await each.settle()
        each.send(second, w.Set(id=1, meta={"k": "v" * 5000}))
        each.send(other, w.Set(id=1, meta={"k": "v" * 5000}))
        await each.settle()
        (refused,), (taken,) = each.replies(second, 1), each.replies(other, 1)
        assert (refused.code, isinstance(taken, w.Ok)) == ("limit", True)
        assert "this client's sessions hold" in refused.message
        for socket in (first, second, other):
            each.send(socket, w.CloseSession(id=9))
        await each.settle()
        assert (holdings.held, holdings.process.sessions) == (0, 0)


def test_meta_of_all_branches_is_bounded(sim: Callable[..., Any]) -> None:
    engine = sim(limits=Limits(session_meta_bytes=1000))
    client = engine.session()
    for op in (
        w.Fork(id=1, as_=["a", "b"]),
        w.Set(id=2, branch="a", meta={"k": "v" * 600}),
        w.Set(id=3, branch="b", meta={"k": "v" * 600}),
        w.Set(id=4, branch="a", meta={"k": 1}),
        w.Set(id=5, branch="main", meta={"k": "v" * 600}),
        w.Drop(id=6, branch="main"),
        w.Set(id=7, meta={"k": "v" * 600}),
    ):
        client.send(op)
    engine.pump()
    assert only(client, 3).code == "limit"
    assert "meta" in only(client, 3).message
    assert isinstance(only(client, 5), w.Ok)
    assert isinstance(only(client, 7), w.Ok)


def test_a_budget_never_counts_below_zero() -> None:
    holdings = Holdings(Limits())
    one, two = holdings.open("a"), holdings.open("a")
    one.add(1000)
    holdings.close("a", one)
    one.add(-1000)  # a segment that is freed late
    assert holdings.held == two.held == SESSION
    with pytest.raises(LimitExceeded):
        two.require(1 << 62)
    holdings.close("a", two)
    assert holdings.held == 0


def test_lists_weigh_by_their_entries() -> None:
    names = [f"b{i}" for i in range(100)]
    assert op_bytes(w.Append(id=1, tokens=[1] * 1000)) > 40_000
    assert op_bytes(w.Append(id=1, branch=names, text="x")) > 40_000
    assert op_bytes(w.Fork(id=1, as_=names)) > 40_000
    assert op_bytes(w.Set(id=1, meta={"a": [[]] * 1000})) > 16_000
    assert op_bytes(w.Credit(branch="a", upto=1)) < 1000


def test_logprobs_count_with_their_alternatives(sim: Callable[..., Any]) -> None:
    grown = []
    for logprobs in (0, 1, 5):
        engine = sim(eos_every=0)
        client = engine.session()
        client.send(w.Append(id=1, tokens=[5]))
        engine.pump()
        before = meter_of(engine, client).held
        client.send(w.Generate(id=2, max_tokens=20, logprobs=logprobs))
        engine.pump()
        grown.append(meter_of(engine, client).held - before)
    none, one, five = grown
    assert one - none == 20 * 2 * LOGPROB
    assert five - one == 20 * 4 * LOGPROB


def test_what_is_scored_counts_while_it_is(sim: Callable[..., Any]) -> None:
    engine = sim(context=4096)
    client = engine.session()
    client.send(w.Append(id=1, text="hello "))
    engine.pump()
    core, meter = engine.cores[1], meter_of(engine, client)
    before = meter.held
    choices = [f"{i} " * 20 for i in range(10, 30)]
    op = w.Select(id=2, choices=choices)
    core.frame(client.socket, [op], engine.now)
    walked = sum(len(engine.tokenizer.encode(each)) for each in choices)
    assert meter.held - before > 20 * SEGMENT + 3 * TOKEN * walked
    client.unanswered[2] = (op, 1)
    engine.pump()
    assert meter.held - before < 8 * SEGMENT


@pytest.fixture
def rings() -> Iterator[Callable[[], int]]:
    """How many objects only the garbage collector can free, since the last call."""
    walk._kernels()  # else a thread compiles them meanwhile, and leaves rings
    gc.collect()
    gc.disable()
    yield gc.collect
    gc.enable()


class Keeping:
    """A store that has everything at once, but for what it is to keep a while."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.last: list[Any] = []

    def tell(self, message: Any) -> None:
        if isinstance(message, m.Save):
            if message.again is not None:
                self.last.append(message)
            self._world.router.tell(message.session, m.Saved(message.ticket))


async def live(world: Any, end: str) -> None:
    """A session from its `open` to its end. One that crashes does so while a text is tokenized."""
    socket = world.open(client="c")
    await world.settle()
    world.send(
        socket,
        w.Append(id=1, text="hello there"),
        w.Fork(id=2, as_=["a", "b"]),
        w.Generate(id=3, branch=["a", "b"], max_tokens=5),
        w.Tree(id=4),
        w.Prune(id=5, from_=["a", "b"], by="first"),
    )
    await world.settle()
    ((number, entry),) = world.directory.entries.values()
    if end == "closed":
        world.send(socket, w.CloseSession(id=6))
    elif end == "crashed":
        world.send(socket, w.Append(id=6, branch="a", text="word " * 20_000))
        await asyncio.sleep(0)
        world.router.tell(number, m.Lost("a bug"))
    else:
        world.notice(m.Detached(socket))
        entry.actor.displace()
    del entry
    await world.settle()
    assert not len(world.directory)


@pytest.mark.parametrize("end", ["closed", "crashed", "displaced", "left"])
async def test_what_a_session_held_goes_with_its_end_without_the_collector(
    world: Callable[..., Any], rings: Callable[[], int], end: str
) -> None:
    """The collector walks old objects once in ten minutes only (`kit/collector.py`)."""
    each = world()
    store = Keeping(each)
    if end == "left":
        each.settings["store"] = store
    async with each:
        await live(each, end)  # what is made once
        store.last.clear()
        rings()
        await live(each, end)
        assert len(store.last) == (end == "left")
        if store.last:  # it may have to be made again, from all that the session is
            assert store.last.pop().again() is not None
        assert rings() == 0


async def test_a_refused_import_leaves_nothing_to_the_collector(
    world: Callable[..., Any], rings: Callable[[], int]
) -> None:
    async with world() as each:
        for _ in range(2):  # what is made once
            rings()
            socket = each.open(client="c", import_="no file")
            await each.settle()
            assert each.sockets[socket][0].code == "bad_request"
        assert rings() == 0
