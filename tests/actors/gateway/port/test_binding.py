"""Random lives of one socket against the rules: order, one answer per op, one `Detached`."""

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.gateway.port.binding import PENDING_FRAMES, SessionBinding, Stage
from ramify.actors.gateway.port.notices import Notices
from ramify.actors.gateway.port.timers import Timers
from ramify.actors.kit.fanout import Router
from ramify.actors.kit.mailbox import Mailbox
from ramify.protocol.config import Limits
from ramify.protocol.messages import Detached, Drained, Frame, OpenSession, Throttled
from ramify.protocol.wire import Error, Generate, Open
from tests.manual_clock import ManualClock

EVENTS = st.lists(
    st.sampled_from(
        [
            "op",
            "op",
            "op",
            "open",
            "open+op",
            "opened",
            "failed",
            "slow",
            "fast",
            "full",
            "room",
            "gone",
            "end",
        ]
    ),
    max_size=60,
)

GONE = Error(code="no_session", message="gone")


class World:
    """The binding between a stub directory and sessions; each session is used once."""

    def __init__(self) -> None:
        self.directory: Mailbox = Mailbox("directory", 100)
        self.router: Router = Router("sessions")
        self.mailboxes: dict[int, Mailbox] = {}
        self.hub = SimpleNamespace(
            clock=ManualClock(),
            limits=Limits(),
            timers=Timers(),
            directory=self.directory,
            sessions=self.router,
            notices=Notices(self.router),
            failed=False,
            blocked=set(),
        )
        self.socket = SessionBinding(self.hub, 1)  # type: ignore[arg-type]

    def answer(self) -> int:
        """The directory's next answer: a new session."""
        number = len(self.mailboxes) + 1
        self.mailboxes[number] = Mailbox(f"session {number}", 1000)
        self.router.add(number, self.mailboxes[number])
        return number


@given(EVENTS)
@settings(derandomize=True, deadline=None, max_examples=300)
def test_random_lives(events: list[str]) -> None:
    world = World()
    socket, sent, refused, asked = world.socket, 0, [], 0
    gone: set[int] = set()
    for event in [*events, "room", "end"]:
        before = len(world.directory)
        if event in ("op", "open", "open+op"):
            ops = [Open(client="c", token="secret")] if event != "op" else []
            if event != "open":
                ops.append(Generate(id=sent))
                sent += 1
            if socket.stage is not Stage.ENDED:
                refused += socket.route(ops, 10)
            elif event != "open":
                sent -= 1
        elif event == "opened" and asked:
            asked -= 1
            refused += socket.opened(world.answer())
        elif event == "failed" and asked and socket.stage is Stage.OPENING:
            asked -= 1
            refused += socket.failed(GONE)
        elif event in ("slow", "fast"):
            if socket._throttled != (event == "slow"):  # asyncio says each once
                socket.throttle(event == "slow")
        elif event in ("full", "room"):
            for mailbox in world.mailboxes.values():
                mailbox.capacity = 0 if event == "full" else 1000
            world.hub.notices.retry()
            if world.hub.blocked:
                world.hub.blocked.clear()
                refused += socket.retry()
        elif event == "gone":
            for number in world.mailboxes:
                world.router.remove(number)
                gone.add(number)
        elif event == "end":
            socket.end()
        asked += len(world.directory) - before
        assert (socket.open_by is not None) == (socket.stage is Stage.WAITING)
        assert (socket.answer_by is not None) == (socket.stage in (Stage.OPENING, Stage.ATTACHED))
        most = 1 if socket.stage is Stage.ATTACHED else PENDING_FRAMES
        assert socket.congested == (len(socket._pending) >= most)
        assert bool(world.hub.blocked) == (socket.stage is Stage.ATTACHED and bool(socket._pending))

    told = [op.id for message in world.directory.drain_nowait() for op in message.ops]
    for number, mailbox in world.mailboxes.items():
        messages = mailbox.drain_nowait()
        detached = [message for message in messages if isinstance(message, Detached)]
        assert detached == ([] if number in gone and not detached else messages[-1:])
        assert len(detached) == 1 or number in gone
        frames = [message for message in messages if isinstance(message, Frame)]
        told += [frame.ops[0].id for frame in frames]
        flow = [type(m) for m in messages if isinstance(m, Throttled | Drained)]
        assert Throttled not in flow[1::2] or Drained in flow or len(flow) < 2
    answered = [error.id for error in refused if error.id is not None]
    assert len(set(told)) == len(told)
    assert not set(told) & set(answered)
    assert set(told) | set(answered) <= set(range(sent))


def test_frames_keep_their_order_through_a_failed_open() -> None:
    world = World()
    socket = world.socket
    assert socket.route([Open(client="c", token="secret")], 10) == []
    assert world.directory.drain_nowait() == [OpenSession(1, Open(client="c"), [], size=10)]
    assert socket.route([Generate(id=1)], 10) == []
    assert socket.route([Open(client="d"), Generate(id=2)], 10) == []
    assert socket.route([Generate(id=3)], 10) == []
    (stray,) = socket.failed(GONE)
    assert (stray.code, stray.id) == ("bad_request", 1)
    assert world.directory.drain_nowait() == [
        OpenSession(1, Open(client="d"), [Generate(id=2)], size=10)
    ]
    number = world.answer()
    assert socket.opened(number) == []
    assert world.mailboxes[number].drain_nowait() == [Frame(1, [Generate(id=3)], 10)]


def test_a_socket_that_is_slow_before_it_is_attached() -> None:
    world = World()
    world.socket.route([Open(client="c")], 10)
    world.socket.throttle(True)
    number = world.answer()
    world.socket.opened(number)
    world.socket.throttle(False)
    assert world.mailboxes[number].drain_nowait() == [Throttled(1), Drained(1)]


def test_pending_bytes_congest() -> None:
    world = World()
    world.socket.route([Open(client="c")], 10)
    world.socket.route([Generate(id=1)], 1 << 20)
    assert world.socket.congested
    world.socket.end()
    assert not world.socket.congested


def test_a_client_without_a_name_gets_one_that_nobody_has() -> None:
    world = World()
    made = []
    for _ in range(50):
        assert SessionBinding(world.hub, 1).route([Open()], 10) == []  # type: ignore[arg-type]
        (message,) = world.directory.drain_nowait()
        made.append(message.open.who)
    assert len(set(made)) == 50
    assert all(len(name) > 10 for name in made)
    assert world.socket.route([Open(client="mine")], 10) == []
    assert world.directory.drain_nowait()[0].open.who == "mine"


def test_a_frame_that_comes_too_fast_is_answered_by_its_session() -> None:
    """Only that knows which ops it has seen: one that is sent again after a resume may have run."""
    world = World()
    limit = Error(code="limit", message="slow down", retry_ms=5)
    (refused,) = world.socket.route([Generate(id=1)], 10, 0, limit)
    assert (refused.code, refused.id, refused.retry_ms) == ("limit", 1, 5)  # it has no session
    world.socket.route([Open(client="c")], 10)
    assert world.socket.route([Generate(id=2)], 10, 0, limit) == []
    number = world.answer()
    assert world.socket.opened(number) == []
    assert world.socket.route([Generate(id=3)], 10, 0, limit) == []
    told = world.mailboxes[number].drain_nowait()
    assert [(frame.ops[0].id, frame.limit) for frame in told] == [(2, limit), (3, limit)]


def test_a_frame_for_a_session_that_ended_with_the_engine_is_not_answered() -> None:
    """Its socket is about to be closed, and the next server may have the session."""
    world = World()
    world.socket.route([Open(client="c")], 10)
    number = world.answer()
    world.socket.opened(number)
    world.hub.failed = True
    world.hub.sessions.remove(number)
    assert world.socket.route([Generate(id=2)], 10) == []
    world.hub.failed = False
    (refused,) = world.socket.route([Generate(id=3)], 10)
    assert isinstance(refused, Error)
    assert refused.code == "no_session"


def test_a_frame_for_a_session_that_moved_is_not_answered() -> None:
    """It goes on at another server, and its socket is about to be closed (1012)."""
    world = World()
    world.socket.route([Open(client="c")], 10)
    number = world.answer()
    world.socket.opened(number)
    world.hub.sessions.remove(number, moved=True)
    assert world.socket.route([Generate(id=2)], 10) == []
    assert world.socket.stage is Stage.ATTACHED
    world.socket.end()  # the close has come
    assert world.socket.stage is Stage.ENDED


def test_a_resume_that_is_refused_leaves_its_ops_open() -> None:
    limit = Error(code="limit", message="slow down")
    for session, answered in (("s_1", [None]), (None, [None, 1])):
        opened = Open(client="c", session=session, key="k" if session else None)
        replies = World().socket.route([opened, Generate(id=1)], 10, 0, limit)
        assert [reply.id for reply in replies] == answered


def test_ops_that_a_session_has_no_room_for_wait_and_are_answered_once() -> None:
    """One that is sent again after a resume has a reply on its way: an `overloaded` was a second one."""
    world = World()
    world.socket.route([Open(client="c", session="s_1", key="k")], 10)
    number = world.answer()
    world.socket.opened(number)
    mailbox = world.mailboxes[number]
    mailbox.capacity = 1
    assert world.socket.route([Generate(id=1)], 10) == []
    assert not world.socket.congested
    assert world.socket.route([Generate(id=2)], 10) == []
    assert world.socket.route([Generate(id=3)], 10) == []
    assert world.socket.congested
    assert world.socket.retry() == []  # no room yet
    told = mailbox.drain_nowait()
    mailbox.capacity = 10
    assert world.socket.route([Generate(id=4)], 10) == []  # not before those that wait
    assert not len(mailbox)
    assert world.socket.retry() == []
    assert not world.socket.congested
    told += mailbox.drain_nowait()
    assert [frame.ops[0].id for frame in told] == [1, 2, 3, 4]
    assert world.socket._pending_bytes == 0


def test_ops_that_wait_for_a_session_that_ends_are_answered() -> None:
    world = World()
    world.socket.route([Open(client="c")], 10)
    number = world.answer()
    world.socket.opened(number)
    world.mailboxes[number].capacity = 0
    assert world.socket.route([Generate(id=1)], 10) == []
    assert world.socket.route([Generate(id=2)], 10) == []
    world.hub.sessions.remove(number)
    replies = world.socket.retry()
    assert [(reply.code, reply.id) for reply in replies] == [("no_session", 1), ("bad_request", 2)]


def test_ops_behind_a_resume_that_is_tried_again_stay_open() -> None:
    """The session's mailbox was full: they are sent again with the next `open`, and may have run."""
    busy = Error(code="overloaded", message="too much to do", retry_ms=1000)
    world = World()
    world.socket.route([Open(client="c", session="s_1", key="k")], 10)
    world.socket.route([Generate(id=1)], 10)
    assert world.socket.failed(busy) == []
    assert (world.socket.stage, world.socket._pending_bytes) == (Stage.WAITING, 0)
    world.socket.route([Open(client="c")], 10)  # a new session has seen nothing
    world.socket.route([Generate(id=2)], 10)
    assert [reply.id for reply in world.socket.failed(busy)] == [2]
