"""The pure client core against the model server: every drop, every program, one outcome."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ramify.clients.errors import ConnectionLost, Internal, SessionLost
from ramify.clients.events import ConnectionRefused, Foreign, Noted, SessionEnded, SessionOpened
from ramify.clients.session import ClientCore, SessionPhase
from ramify.clients.stream import Ticket
from ramify.protocol.codec import Codec
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest, Conflict, Exists, LimitExceeded, NoSession, Skipped
from ramify.protocol.wire import (
    Append,
    BranchState,
    Cancel,
    Credit,
    Delta,
    Done,
    Drop,
    Error,
    Event,
    Fork,
    Generate,
    Join,
    Ok,
    Op,
    Open,
    Prune,
    Rollback,
    ServerInfo,
    Set,
    StateReply,
)
from tests.messages import usage


def append(text: str, branch: str = "main") -> Append:
    return Append(id=0, branch=branch, text=text)


def generate(length: int, branch: str | list[str] = "main", seed: int = 0, **more: Any) -> Generate:
    return Generate(id=0, branch=branch, max_tokens=length, seed=seed, **more)


class Wire:
    """A core and a server, and between them frames that can get lost.

    Every frame in either direction is a transfer, numbered from 0. At a number in `drops` the
    frame is lost and the connection breaks; the server works on for `away` steps.
    """

    def __init__(self, server: Any, drops: frozenset[int] = frozenset(), away: int = 0) -> None:
        self.away = away
        self.server = server
        self.core = ClientCore(Open(client="c"))
        self.drops = drops
        self.transfers = 0
        self.shown: dict[int, str] = {}  # by id() of a stream: the text as a consumer read it
        self.streams: list[Any] = []
        self.connect()

    def connect(self) -> None:
        while True:
            frame = self.core.connected()
            if self.pass_on():
                self.server.receive(frame)
                return
            self.core.disconnected(None)

    def pass_on(self) -> bool:
        number = self.transfers
        self.transfers += 1
        return number not in self.drops

    def drop(self) -> None:
        self.server.disconnect()
        self.core.disconnected(None)
        for _ in range(self.away):
            self.server.step()
        self.connect()

    def submit(self, *ops: Op) -> list[Ticket]:
        tickets = self.core.submit(ops)
        for ticket in tickets:
            for stream in ticket.streams.values():
                self.streams.append(stream)
        return tickets

    def read(self) -> None:
        """What consumers do: read what is new."""
        for stream in self.streams:
            delta = stream.take()
            if delta is not None:
                text = self.shown.get(id(stream), "")
                self.shown[id(stream)] = text[: len(text) - delta.cut] + delta.text

    def run(self, tickets: list[Ticket]) -> None:
        """Until every ticket is settled."""
        for _ in range(10_000):
            if all(ticket.settled for ticket in tickets) and not self.server.out:
                return
            frame = self.core.next_frame()
            if frame is not None:
                if self.pass_on():
                    self.server.receive(frame)
                else:
                    self.drop()
                    continue
            self.server.step()
            if self.server.out:
                messages = self.server.out.popleft()
                if self.pass_on():
                    for message in messages:
                        self.core.receive(message)
                else:
                    self.drop()
            self.read()
        raise AssertionError("the program does not end")


PROGRAMS: dict[str, list[list[Op]]] = {
    "chat": [[append("abc"), generate(4)], [append("de"), generate(3, seed=1)]],
    "one frame": [[append("a"), generate(3), append("b"), generate(2, seed=1), append("c")]],
    "fork": [
        [append("abc"), generate(2), Fork(id=0, as_=["x", "y"]), generate(3, ["x", "y"], 5)],
        [append("z", "x"), generate(2, "x", 6), Drop(id=0, branch="y"), generate(2, seed=7)],
    ],
    "children": [[append("abc"), generate(3), generate(2, n=2, as_=["p", "q"], seed=2)]],
    "rollback": [
        [append("abcdef"), generate(3)],
        [Rollback(id=0, to=4), generate(4, seed=1)],
        [Rollback(id=0, turns=1), append("xy"), generate(2, seed=3)],
    ],
    "quiet": [[append("abc"), generate(3, quiet=True), generate(2, seed=4)]],
    "failure": [[generate(2, "nowhere"), append("a", "nowhere"), append("b"), generate(2)]],
    "drop at once": [[append("abc"), Fork(id=0, as_=["x"]), generate(4, "x"), Drop(id=0, branch="x")]],
    "rollback at once": [[append("abc"), generate(4), Rollback(id=0, to=5), generate(2, seed=1)]],
    "rename at once": [[append("abc"), generate(4), Set(id=0, branch="main", name="other")]],
    "join": [
        [
            append("abc"),
            Fork(id=0, as_=["x", "y"]),
            generate(3, "x", 5),
            generate(2, "y", 6, hidden=True),
            Join(id=0, from_=["x", "y"], each="{text};", suffix="!"),
            generate(3, seed=7),
        ],
        [append("d"), generate(2, seed=8)],
    ],
    "prune": [
        [
            append("abc"),
            generate(2),
            Fork(id=0, as_=["x", "y"]),
            generate(2, "x", 5),
            generate(4, "y", 6),
            Prune(id=0, from_=["x", "y"], into="main", by="vote"),
            generate(3, seed=7),
        ],
        [append("d"), generate(2, seed=8)],
    ],
    "beam": [
        [append("abc"), generate(2, n=3, as_=["x", "y", "z"], seed=5), append("q", "y")],
        [Prune(id=0, from_=["x", "y", "z"], into=["p", "q"], by="vote"), generate(2, ["p", "q"], 7)],
        [Prune(id=0, from_=["p", "q"], k=1, by="vote")],
    ],
    "rename": [[append("a"), Set(id=0, branch="main", name="other")], [generate(3, "other", 9)]],
}


def outcome(wire: Wire, tickets: list[Ticket]) -> list[Any]:
    return [
        (type(t.error), [(s.branch, s.text, wire.shown.get(id(s), "")) for s in t.streams.values()])
        for t in tickets
    ]


def play(
    server: Any, program: list[list[Op]], drops: frozenset[int] = frozenset(), away: int = 0
) -> tuple[list[Any], Wire]:
    wire = Wire(server, drops, away)
    everything: list[Ticket] = []
    for frame in program:
        tickets = wire.submit(*frame)
        everything += tickets
        wire.run(everything)
    assert len(set(server.runs)) == len(server.runs), "an op ran twice"
    return outcome(wire, everything), wire


@pytest.mark.parametrize("away", [0, 2, 99])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_drop_at_any_frame_changes_nothing(name: str, away: int, server_type: Any) -> None:
    program = PROGRAMS[name]
    expected, undisturbed = play(server_type(), program, frozenset())
    positions = {n: b.position for n, b in undisturbed.server.branches.items()}
    for _, streams in expected:
        for _, text, shown in streams:
            assert shown == text
    for number in range(undisturbed.transfers + 4):
        got, wire = play(server_type(), program, frozenset({number}), away)
        assert got == expected, f"drop at {number}"
        assert {n: h.position for n, h in wire.core.heads.by_name.items()} == positions


def test_text_that_is_gone_is_said_to_be_gone(server_type: Any) -> None:
    """Without the text in a repeated `done`, a dropped branch takes it away: never a short text."""
    program = PROGRAMS["drop at once"]
    expected, undisturbed = play(server_type(), program, frozenset())
    lost = 0
    for number in range(undisturbed.transfers):
        got, _ = play(server_type(kept_text=False), program, frozenset({number}), 99)
        for (error, texts), (_, whole) in zip(got, expected, strict=True):
            assert error is Conflict or texts == whole
            lost += error is Conflict
    assert lost


@st.composite
def programs(draw: st.DrawFn) -> list[list[Op]]:
    """Frames over branches that exist. A rollback of unseen text or a drop may make an error."""
    branches, made = ["main"], 0
    frames: list[list[Op]] = [[append("seed")]]
    for _ in range(draw(st.integers(1, 4))):
        frame: list[Op] = []
        for _ in range(draw(st.integers(1, 4))):
            branch = draw(st.sampled_from(branches))
            match draw(st.sampled_from(["append", "generate", "generate", "fork", "many"])):
                case "append":
                    frame.append(append(draw(st.text("ab", min_size=1, max_size=4)), branch))
                case "generate":
                    frame.append(generate(draw(st.integers(1, 4)), branch, draw(st.integers(0, 99))))
                case "fork":
                    made += 1
                    branches.append(f"f{made}")
                    frame.append(Fork(id=0, branch=branch, as_=[f"f{made}"]))
                case "many":
                    made += 1
                    new = [f"m{made}a", f"m{made}b"]
                    branches += new
                    frame.append(generate(2, branch, made, n=2, as_=new))
        frames.append(frame)
    return frames


@settings(max_examples=150, derandomize=True, deadline=None)
@given(programs(), st.frozensets(st.integers(0, 60), max_size=12), st.integers(0, 12), st.booleans())
def test_random_programs_with_random_drops(
    program: list[list[Op]], drops: frozenset[int], away: int, kept_text: bool
) -> None:
    expected, _ = play(_server_type()(), program)
    got, _ = play(_server_type()(kept_text=kept_text), program, drops, away)
    assert got == expected


_TYPES: list[Any] = []


def _server_type() -> Any:
    return _TYPES[0]


@pytest.fixture(autouse=True)
def _remember(server_type: Any) -> None:
    _TYPES[:] = [server_type]


# --- single rules -----------------------------------------------------------------------------


def opened(server: Any) -> Wire:
    wire = Wire(server)
    for frame in (server.out.popleft() for _ in range(len(server.out))):
        for message in frame:
            wire.core.receive(message)
    assert wire.core.phase is SessionPhase.OPEN
    return wire


def test_ids_are_given_in_the_order_of_sending(server: Any) -> None:
    wire = opened(server)
    (first,) = wire.submit(append("a"))
    (urgent,) = wire.submit(Cancel(id=0))
    assert first.id is None
    assert [m.id for m in wire.core.next_frame() or () if isinstance(m, Op)] == [urgent.id]
    wire.core.next_frame()
    assert urgent.id is not None
    assert first.id is not None
    assert first.id > urgent.id


def test_no_more_ops_under_way_than_the_server_keeps_replies(server_type: Any) -> None:
    wire = opened(server_type(Limits(replies_kept=3)))
    for _ in range(5):
        wire.submit(append("a"))
    sent = [wire.core.next_frame() for _ in range(3)]
    assert all(sent)
    assert wire.core.next_frame() is None
    (cancel,) = wire.submit(Cancel(id=0))
    assert wire.core.next_frame() is not None  # passes
    assert cancel.id is not None
    wire.core.receive(Ok(id=1, branch="main", position=1))
    wire.core.receive(Ok(id=2, branch="main", position=2))
    assert wire.core.next_frame() is not None


def test_bad_fields_and_big_frames_never_leave(server_type: Any) -> None:
    wire = opened(server_type(Limits(frame_bytes=200, ops_per_frame=2)))
    with pytest.raises(BadRequest, match="temperature"):
        wire.submit(Generate(id=0, temperature=-1.0))
    with pytest.raises(BadRequest, match="branch"):
        wire.submit(append("a", "no spaces"))
    with pytest.raises(LimitExceeded) as caught:
        wire.submit(append("x" * 300))
    assert caught.value.details == {"max": 200}
    with pytest.raises(LimitExceeded):
        wire.submit(append("a"), append("b"), append("c"))
    assert wire.core.next_frame() is None


def test_a_frame_that_passes_is_not_too_big_with_the_longest_ids(server_type: Any) -> None:
    """Ids are given when the frame is sent, which is after its size was checked."""
    wire = opened(server_type(Limits(frame_bytes=200, ops_per_frame=2)))
    passed = 0
    for length in range(200):
        try:
            wire.submit(append("a"), append("x" * length))
        except LimitExceeded:
            break
        passed = length
    ops = [structs.replace(append(text), id=2**53) for text in ("a", "x" * passed)]
    assert 150 < len(Codec("json").encode(ops)) <= 200


def test_an_op_that_was_not_sent_can_be_taken_back(server: Any) -> None:
    wire = opened(server)
    first, second = wire.submit(append("a"), generate(3))
    assert wire.core.withdraw(second, Conflict("never mind"))
    assert isinstance(first.error, Conflict)
    assert wire.core.next_frame() is None
    (third,) = wire.submit(append("b"))
    wire.core.next_frame()
    assert not wire.core.withdraw(third, Conflict("too late"))


def test_a_failure_names_its_cause_to_the_skipped(server: Any) -> None:
    wire = opened(server)
    first, second = wire.submit(append("a"), generate(3))
    wire.core.next_frame()
    wire.core.receive(Error(code="exists", message="taken", id=first.id, branch="main"))
    wire.core.receive(Error(code="skipped", message="skipped", id=second.id, branch="main"))
    assert isinstance(second.error, Skipped)
    assert isinstance(second.error.__cause__, Exists)


def test_a_done_with_reason_error_is_an_error(server: Any) -> None:
    wire = opened(server)
    (ticket,) = wire.submit(generate(3))
    wire.core.next_frame()
    usage = server_usage(prompt=0)
    wire.core.receive(
        Done(
            id=1, branch="main", position=0, reason="error", usage=usage, error="overloaded", message="x"
        )
    )
    assert ticket.settled
    assert ticket.error is not None
    assert ticket.error.code == "overloaded"


def server_usage(prompt: int) -> Any:

    return usage(prompt=prompt, computed=prompt)


def test_text_behind_a_lost_done_is_that_of_the_next_generation(server: Any) -> None:
    """After a resume the text of two generations may come before the first one's `done`."""
    wire = opened(server)
    first, second = wire.submit(generate(3), generate(3))
    wire.core.next_frame()
    wire.core.receive(Delta(branch="main", position=4, text="abcd"))
    wire.core.receive(Delta(branch="main", position=7, text="efg"))
    wire.core.receive(Done(id=1, branch="main", position=4, reason="stop", usage=server_usage(0)))
    assert [each.streams["main"].text for each in (first, second)] == ["abcd", "efg"]


def test_a_frame_without_ops_is_refused(server: Any) -> None:
    with pytest.raises(BadRequest, match="at least one op"):
        opened(server).core.submit([])


def test_text_of_others_is_not_mine(server: Any) -> None:
    """Another client's generation streams on the branch while mine waits behind it."""
    wire = opened(server)
    (ticket,) = wire.submit(generate(2))
    wire.core.next_frame()
    (stream,) = ticket.streams.values()
    wire.core.receive(Delta(branch="main", position=5, text="theirs"))
    assert stream.take().text == "theirs"
    wire.core.receive(Event(revision=9, op="generate", branch="main", by="d", details={"position": 5}))
    assert stream.take().cut == len("theirs")
    wire.core.receive(Delta(branch="main", position=8, text="mine"))
    wire.core.receive(Done(id=1, branch="main", position=8, reason="stop", usage=server_usage(prompt=7)))
    assert stream.text == "mine"
    assert stream.take().text == "mine"


def test_truncate_cuts_a_pending_generation_back(server: Any) -> None:
    """A resume may start below what was received: a child that `n` made is new to this client."""
    wire = opened(server)
    (ticket,) = wire.submit(generate(4))
    wire.core.next_frame()
    (stream,) = ticket.streams.values()
    wire.core.receive(Delta(branch="main", position=3, text="abc"))
    assert stream.take().text == "abc"
    wire.core.receive(Delta(branch="main", position=4, text="abcd", truncate=0))
    wire.core.receive(Done(id=1, branch="main", position=4, reason="stop", usage=server_usage(0)))
    assert (ticket.error, stream.text) == (None, "abcd")
    again = stream.take()
    assert (again.cut, again.text) == (3, "abcd")


def test_a_generation_that_was_rolled_back_meanwhile_has_its_text_in_done(server: Any) -> None:
    wire = opened(server)
    first, _ = wire.submit(generate(4), generate(2))
    wire.core.next_frame()
    wire.core.receive(Delta(branch="main", position=3, text="abc"))
    wire.core.receive(Delta(branch="main", position=4, text="new", truncate=2))
    again = Done(id=1, branch="main", position=4, reason="stop", usage=server_usage(0), text="abcd")
    wire.core.receive(again)
    assert first.error is None
    assert next(iter(first.streams.values())).text == "abcd"


def test_a_lost_session_fails_everything(server: Any, server_type: Any) -> None:
    wire = opened(server)
    tickets = wire.submit(append("a"), generate(3))
    wire.core.next_frame()
    wire.core.disconnected(None)
    restarted = server_type()
    restarted.receive(wire.core.connected())
    (events,) = [wire.core.receive(m) for m in restarted.out.popleft()]
    assert isinstance(events[-1], SessionEnded)
    assert all(isinstance(t.error, SessionLost) for t in tickets)
    with pytest.raises(SessionLost):
        wire.submit(append("b"))
    assert wire.core.receive(Ok(id=1)) == []


def test_refused_opens() -> None:
    core = ClientCore(Open(client="c", session="s_x", key="k"))
    core.connected()
    (event,) = core.receive(Error(code="no_session", message="unknown"))
    assert isinstance(event, ConnectionRefused)
    assert isinstance(event.error, NoSession)
    assert not event.retry
    (event,) = core.receive(Error(code="overloaded", message="full", retry_ms=100))
    assert isinstance(event, ConnectionRefused)
    assert event.retry


def test_an_unknown_answer_breaks_the_protocol(server: Any) -> None:
    core = ClientCore(Open(client="c"))
    core.connected()
    with pytest.raises(Internal, match="before `state`"):
        core.receive(Delta(branch="main", position=1, text="x"))
    wire = opened(server)
    wire.submit(generate(1))
    wire.core.next_frame()
    with pytest.raises(Internal, match="only `done`"):
        wire.core.receive(Ok(id=1, branch="main"))


def test_events_of_others_move_the_table(server: Any) -> None:
    wire = opened(server)
    heads = wire.core.heads.by_name
    note = wire.core.receive(
        Event(revision=4, op="fork", branch="main", by="d", details={"position": 3, "as": ["x"]})
    )
    assert isinstance(note[0], Noted)
    assert heads["x"].position == heads["x"].received == 3
    wire.core.receive(Event(revision=5, op="append", branch="x", by="d", details={"position": 9}))
    wire.core.receive(Event(revision=6, op="rollback", branch="x", by="d", details={"position": 2}))
    assert (heads["x"].position, heads["x"].received) == (2, 2)
    wire.core.receive(Event(revision=7, op="drop", branch="x", by="d"))
    assert "x" not in heads
    assert wire.core.heads.revision == 7


def test_a_frame_too_big_for_the_path_is_given_up(server: Any) -> None:
    wire = opened(server)
    small, big = wire.submit(append("a")) + wire.submit(append("b" * 500))
    wire.core.next_frame()
    wire.core.next_frame()
    verdict, events = wire.core.disconnected(1009)
    assert verdict.action.value == "split"
    assert len(events) == 1
    assert isinstance(big.error, LimitExceeded)
    assert not small.settled


def test_end_fails_what_waits(server: Any) -> None:
    wire = opened(server)
    (sent,) = wire.submit(append("a"))
    wire.core.next_frame()
    (queued,) = wire.submit(append("b"))
    events = wire.core.end(ConnectionLost("gone"))
    assert isinstance(events[-1], SessionEnded)
    assert isinstance(sent.error, ConnectionLost)
    assert isinstance(queued.error, ConnectionLost)
    assert wire.core.end(ConnectionLost("again")) == []


def test_resume_asks_for_what_it_lacks(server: Any) -> None:
    wire = opened(server)
    wire.run(wire.submit(append("abc"), generate(2)))
    wire.core.credit("main", 50)
    wire.core.disconnected(None)
    server.disconnect()
    (message,) = wire.core.connected()
    assert isinstance(message, Open)
    assert (message.session, message.key, message.have) == ("s_1", "k_1", {"main": 5})
    server.receive([message])
    events = [e for m in server.out.popleft() for e in wire.core.receive(m)]
    assert isinstance(events[0], SessionOpened)
    assert events[0].resumed
    credit = wire.core.next_frame()
    assert credit is not None
    assert "Credit" in type(credit[0]).__name__


def test_resume_asks_for_all_text_of_a_branch_that_may_have_been_renamed(server: Any) -> None:
    """The reply is lost: the server may know either name, and an op without a name asks for nothing."""
    wire = opened(server)
    wire.run(wire.submit(append("abc"), generate(2)))
    wire.submit(Set(id=0, branch="main", name="other"), Set(id=0, branch="main", retain_s=1.0))
    wire.core.next_frame()
    wire.core.disconnected(None)
    (message,) = wire.core.connected()
    assert message.have == {"main": 5, "other": 0}


def test_the_text_of_a_branch_goes_on_when_another_of_its_op_fails(server: Any) -> None:
    wire = opened(server)
    (ticket,) = wire.submit(generate(3, ["a", "b"]))
    wire.core.next_frame()
    wire.core.receive(Error(code="no_branch", message="x", id=ticket.id, branch="a"))
    assert not ticket.settled
    wire.core.receive(Delta(branch="b", position=1, text="<"))
    assert [stream.text for stream in ticket.streams.values()] == ["", "<"]


# --- what a resume, an error or another client does to text ---------------------------------------


def resumed(wire: Wire, seen: int, *branches: BranchState) -> list[Any]:
    """The connection broke; the server has seen ops up to `seen`. The events of its `state`."""
    core = wire.core
    core.disconnected(None)
    core.connected()
    assert core.session is not None
    state = StateReply(session=core.session, op=seen, revision=50, branches=list(branches))
    return core.receive(state)


def ended(ident: int, position: int, prompt: int, **more: Any) -> Done:
    usage = structs.replace(server_usage(prompt), output=more.pop("output", position - prompt))
    fields = {"reason": "length", "branch": "main"} | more
    return Done(id=ident, position=position, usage=usage, **fields)


def test_credit_is_sent_once_and_again_after_a_resume(server: Any) -> None:
    wire = opened(server)
    wire.core.credit("main", 50)
    wire.core.credit("main", 60)
    assert wire.core.next_frame() == [Credit(branch="main", upto=50), Credit(branch="main", upto=60)]
    assert wire.core.next_frame() is None
    resumed(wire, 0, BranchState(branch="main", position=0))
    assert wire.core.next_frame() == [Credit(branch="main", upto=60)]
    assert wire.core.next_frame() is None


def test_a_resume_keeps_what_it_does_not_say_again(server: Any) -> None:
    core = ClientCore(Open(client="c"))
    core.connected()
    info = ServerInfo(version=1, epoch="e", model="m")
    core.receive(
        StateReply(
            session="s",
            op=0,
            revision=1,
            branches=[],
            key="k",
            view_key="v",
            limits={"ops_per_frame": 3},
            server=info,
            tools=["f"],
            notes=["it rewrites"],
        )
    )
    assert core.tool_names == ["f"]
    assert core.notes == ["it rewrites"]
    core.disconnected(None)
    core.connected()
    (event,) = core.receive(StateReply(session="s", op=0, revision=2, branches=[]))
    assert core.tool_names == core.notes == []
    assert isinstance(event, SessionOpened)
    assert (core.key, core.view_key, core.limits, core.server) == ("k", "v", {"ops_per_frame": 3}, info)


def test_nothing_is_sent_between_two_connections(server: Any) -> None:
    wire = opened(server)
    wire.submit(append("a"))
    wire.core.disconnected(None)
    assert wire.core.next_frame() is None
    wire.core.connected()
    assert wire.core.next_frame() is None
    with pytest.raises(Internal, match="before `state`"):
        wire.core.receive(Ok(id=1))


def test_a_server_without_limits_gets_256_ops_at_once() -> None:
    core = ClientCore(Open(client="c"))
    core.connected()
    core.receive(StateReply(session="s", op=0, revision=1, branches=[]))
    for _ in range(300):
        core.submit([append("a")])
    sent = 0
    while core.next_frame() is not None:
        sent += 1
    assert sent == 256


def test_an_end_after_the_end_keeps_the_first_reason(server: Any) -> None:
    wire = opened(server)
    wire.core.end(gone := ConnectionLost("gone"))
    verdict, events = wire.core.disconnected(1001)
    assert (verdict.action.value, verdict.error, events) == ("stop", gone, [])


def on_another_branch(server: Any) -> tuple[Wire, Any]:
    """A branch is renamed and generated on; no reply has come."""
    wire = opened(server)
    wire.submit(Set(id=0, branch="main", name="other"))
    wire.core.next_frame()
    (ticket,) = wire.submit(generate(4, "other"))
    wire.core.next_frame()
    return wire, ticket.streams["other"]


def test_text_that_a_generation_inherits_is_not_its_own(server: Any) -> None:
    """The server knows the new name, but not the generation: what comes first was there before it."""
    wire, stream = on_another_branch(server)
    resumed(wire, 1, BranchState(branch="other", position=5))
    wire.core.receive(Delta(branch="other", position=5, text="old"))
    assert stream.take() is None
    wire.core.receive(Delta(branch="other", position=8, text="new"))
    assert stream.take().text == "new"


def test_text_that_a_running_generation_inherits_is_not_its_own(server: Any) -> None:
    wire, stream = on_another_branch(server)
    resumed(wire, 2, BranchState(branch="other", position=8, running=2, started_at=5))
    wire.core.receive(Delta(branch="other", position=5, text="old"))
    wire.core.receive(Delta(branch="other", position=8, text="new"))
    assert stream.take().text == "new"


@pytest.mark.parametrize("running", [None, 7])
def test_text_of_a_generation_that_has_ended_is_held_until_done_tells_its_begin(
    server: Any, running: int | None
) -> None:
    wire, stream = on_another_branch(server)
    started = None if running is None else 8
    resumed(wire, 2, BranchState(branch="other", position=8, running=running, started_at=started))
    wire.core.receive(Delta(branch="other", position=5, text="old"))
    wire.core.receive(Delta(branch="other", position=8, text="new"))
    assert stream.take() is None
    wire.core.receive(ended(2, 8, 5, branch="other"))
    assert stream.take().text == "new"


def test_text_of_others_moves_the_branch(server: Any) -> None:
    wire = opened(server)
    (event,) = wire.core.receive(Delta(branch="main", position=12, text="theirs"))
    assert isinstance(event, Foreign)
    head = wire.core.heads.by_name["main"]
    assert (head.position, head.received) == (12, 12)


def test_a_quiet_generation_moves_the_branch(server: Any) -> None:
    wire = opened(server)
    wire.submit(generate(4, quiet=True))
    wire.core.next_frame()
    wire.core.receive(structs.replace(ended(1, 4, 0), text="abcd"))
    head = wire.core.heads.by_name["main"]
    assert (head.position, head.received) == (4, 4)


def test_only_a_generation_can_be_done(server: Any) -> None:
    wire = opened(server)
    wire.submit(append("a"))
    wire.core.next_frame()
    with pytest.raises(Internal, match="does not target"):
        wire.core.receive(ended(1, 4, 0))


def test_a_failed_generation_fails_its_stream(server: Any) -> None:
    wire = opened(server)
    (ticket,) = wire.submit(generate(4))
    wire.core.next_frame()
    wire.core.receive(ended(1, 0, 0, reason="error", error="internal", message="x"))
    assert isinstance(ticket.streams["main"].error, Internal)


def test_text_behind_a_lost_done_goes_to_the_very_next_generation(server: Any) -> None:
    wire = opened(server)
    tickets = wire.submit(generate(2), generate(2), generate(2))
    wire.core.next_frame()
    streams = [ticket.streams["main"] for ticket in tickets]
    wire.core.receive(Delta(branch="main", position=2, text="ab"))
    wire.core.receive(Delta(branch="main", position=4, text="cd"))
    events = wire.core.receive(ended(1, 2, 0))
    assert [event.ticket for event in events] == tickets[:2]
    assert [stream.text for stream in streams] == ["ab", "cd", ""]
    wire.core.receive(ended(2, 4, 2))
    wire.core.receive(Delta(branch="main", position=6, text="ef"))
    wire.core.receive(Delta(branch="main", position=8, text="theirs"))
    assert len(wire.core.receive(ended(3, 6, 4))) == 1
    assert [stream.text for stream in streams] == ["ab", "cd", "ef"]


@pytest.mark.parametrize(
    ("came", "done", "lost"),
    [
        (9, {"reason": "length"}, False),
        (8, {"reason": "length"}, True),
        (8, {"reason": "stop"}, False),  # the token that stops need not be announced
        (8, {"reason": "tool"}, False),
        (7, {"reason": "stop"}, True),
        (6, {"reason": "stop", "stop": "\n"}, False),  # a stop string: its text is not shown
        (7, {"reason": "stop", "stop": 7}, True),
        (0, {"reason": "cancelled", "output": 0}, False),
    ],
)
def test_a_text_that_is_too_short_after_a_resume_is_a_conflict(
    server: Any, came: int, done: dict[str, Any], lost: bool
) -> None:
    for again in (True, False):
        wire = opened(type(server)())
        (ticket,) = wire.submit(append("abcde"), generate(4))[1:]
        wire.core.next_frame()
        if again:
            resumed(wire, 2, BranchState(branch="main", position=9, running=2, started_at=5))
        if came:
            wire.core.receive(Delta(branch="main", position=came, text="text"))
        wire.core.receive(ended(2, 9, 5, **done))
        assert isinstance(ticket.error, Conflict) == (lost and again)
        stream = ticket.streams["main"]
        assert isinstance(stream.error, Conflict) == (lost and again)


def test_a_generation_that_fails_has_no_text(server: Any) -> None:
    """What came was what its branch inherited, or is the next one's."""
    wire = opened(server)
    tickets = wire.submit(generate(4), generate(4), generate(4))
    wire.core.next_frame()
    streams = [ticket.streams["main"] for ticket in tickets]
    wire.core.receive(Delta(branch="main", position=1, text="a"))
    wire.core.receive(Delta(branch="main", position=4, text="bcd"))
    wire.core.receive(Error(code="cancelled", message="x", id=1, branch="main"))
    assert [stream.text for stream in streams] == ["", "abcd", ""]
    wire.core.receive(ended(2, 4, 0))
    wire.core.receive(Delta(branch="main", position=6, text="ef"))
    wire.core.receive(Error(code="cancelled", message="x", id=3, branch="main"))
    assert [stream.text for stream in streams] == ["", "abcd", ""]


def test_an_error_of_a_whole_op_leaves_alone_what_has_ended(server: Any) -> None:
    wire = opened(server)
    (ticket,) = wire.submit(generate(2, ["main", "b"]))
    wire.core.next_frame()
    wire.core.receive(Delta(branch="main", position=2, text="ab"))
    wire.core.receive(Delta(branch="b", position=2, text="cd"))
    wire.core.receive(ended(1, 2, 0))
    wire.core.receive(Error(code="internal", message="x", id=1))
    assert [stream.text for stream in ticket.streams.values()] == ["ab", ""]
    assert [stream.error is None for stream in ticket.streams.values()] == [True, False]
    assert ticket.settled


def test_an_error_of_one_branch_leaves_the_text_of_the_others(server: Any) -> None:
    wire = opened(server)
    (ticket,) = wire.submit(generate(2, ["main", "b"]))
    wire.core.next_frame()
    wire.core.receive(Delta(branch="main", position=2, text="ab"))
    wire.core.receive(Delta(branch="b", position=2, text="cd"))
    wire.core.receive(Error(code="internal", message="x", id=1, branch="b"))
    assert [stream.text for stream in ticket.streams.values()] == ["ab", ""]


@pytest.mark.parametrize("op", ["set", "append", "rollback"])
def test_only_a_generation_of_others_takes_text_away(server: Any, op: str) -> None:
    wire = opened(server)
    (ticket,) = wire.submit(generate(9))
    wire.core.next_frame()
    wire.core.receive(Delta(branch="main", position=5, text="mine"))
    wire.core.receive(Event(revision=9, op=op, branch="main", by="d", details={"position": 5}))
    assert ticket.streams["main"].text == "mine"


def test_a_generation_of_others_is_the_first_of_mine_only(server: Any) -> None:
    """The second one of mine may begin further back."""
    wire = opened(server)
    _, _, ticket = wire.submit(generate(3), Rollback(id=0, to=2), generate(3))
    wire.core.next_frame()
    wire.core.receive(Event(revision=9, op="generate", branch="main", by="d", details={"position": 5}))
    wire.core.receive(Delta(branch="main", position=8, text="abc"))
    wire.core.receive(ended(1, 8, 5))
    wire.core.receive(Ok(id=2, branch="main", position=2))
    wire.core.receive(Delta(branch="main", position=4, text="de"))
    assert ticket.streams["main"].text == "de"


def test_an_op_that_failed_makes_room_and_is_not_sent_again(server_type: Any) -> None:
    wire = opened(server_type(Limits(replies_kept=1)))
    wire.submit(append("a"))
    wire.submit(append("b"))
    wire.core.next_frame()
    assert wire.core.next_frame() is None
    wire.core.receive(Error(code="conflict", message="x", id=1, branch="main"))
    (second,) = wire.core.next_frame() or ()
    assert isinstance(second, Append)
    assert (second.id, second.text) == (2, "b")
    resumed(wire, 1, BranchState(branch="main", position=0))
    assert wire.core.next_frame() == [second]
    assert wire.core.next_frame() is None
