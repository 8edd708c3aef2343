"""Which replica hears what of which session, whatever comes and goes."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ramify.actors.cluster.bindings import HELD, Bindings, prompt, session_in
from ramify.actors.kit.mailbox import MailboxFull
from ramify.protocol import messages as m
from ramify.protocol.cluster import Lacking
from ramify.protocol.sampling import SamplingParams


def handle(session: int, count: int) -> int:
    return session << 32 | count


def submit(session: int, count: int) -> m.Submit:
    return m.Submit(handle(session, count), handle(session, 1), 2, 9, SamplingParams())


class Turns:
    """Replicas take turns."""

    def __init__(self) -> None:
        self.there: list[int] = []
        self.at: dict[int, int] = {}
        self.hots: set[int] = set()
        self.asked: list[tuple[str, bytes]] = []

    def joined(self, replica: int) -> None:
        self.there.append(replica)

    def gone(self, replica: int) -> None:
        self.there.remove(replica)

    def place(self, session: int, namespace: str, tokens: bytes) -> int | None:
        self.asked.append((namespace, tokens))
        if not self.there:
            return None
        self.there.append(self.there.pop(0))
        self.at[session] = self.there[-1]
        return self.there[-1]

    def hot(self, session: int, replica: int) -> bool:
        assert self.at[session] == replica
        return replica in self.hots

    def extended(self, session: int, tokens: int) -> None:
        assert session in self.at

    def submitted(self, session: int, replica: int, message: m.Submit) -> None:
        assert self.at[session] == replica

    def finished(self, finished: list[m.Finished]) -> None:
        assert finished

    def rate(self, replica: int) -> float:
        return 0.0

    def over(self, session: int) -> None:
        assert session not in self.at

    def left(self, session: int) -> None:
        self.at.pop(session, None)


class Wires:
    """What each replica was told. `full`: those that take nothing from clients."""

    def __init__(self) -> None:
        self.told: dict[int, list[Any]] = defaultdict(list)
        self.answers: list[tuple[int, Any]] = []
        self.full: set[int] = set()
        self.placing = Turns()
        self.bindings = Bindings(
            self.placing, self.send, self.must, lambda *answer: self.answers.append(answer)
        )

    def send(self, replica: int, message: Any) -> None:
        if replica in self.full:
            raise MailboxFull("full")
        self.told[replica].append(message)

    def must(self, replica: int, message: Any) -> None:
        self.told[replica].append(message)


def one() -> bytes:
    return b"\1\0\0\0"


def begin(wires: Wires, session: int) -> list[Any]:
    """A session says what it says first: a branch, text, a request."""
    said = [
        m.OpenBranch(handle(session, 1), "mine"),
        m.ExtendBranch(handle(session, 1), one()),
        submit(session, 2),
    ]
    for message in said:
        wires.bindings.tell(message)
    return said


def test_a_session_is_placed_with_its_first_request() -> None:
    """What it said before comes first; from then on all goes there."""
    wires = Wires()
    for replica in (0, 1):
        wires.placing.joined(replica)
    tell = wires.bindings.tell
    opened = m.OpenBranch(handle(5, 1))
    extend = m.ExtendBranch(handle(5, 1), one())
    tell(opened)
    tell(extend)
    tell(m.Inspect(5, handle(5, 2), [handle(5, 1)]))
    assert wires.answers == [(5, m.Inspected(handle(5, 2), [0]))]
    assert wires.told == {}
    suggested = m.Inspect(5, handle(5, 4), [handle(5, 1)], [(None, 9.0)])
    tell(suggested)  # done where it will be, and answered now: its client waits for it
    assert wires.answers[1:] == [(5, m.Inspected(handle(5, 4), [0]))]
    tell(submit(5, 3))
    assert wires.told == {0: [opened, extend, suggested, submit(5, 3)]}
    tell(extend)
    assert wires.told[0][-1] == extend
    assert wires.told[1] == []
    begin(wires, 6)
    assert [type(each) for each in wires.told[1]] == [m.OpenBranch, m.ExtendBranch, m.Submit]
    assert (wires.bindings.of(5), wires.bindings.of(6)) == (0, 1)
    tell(m.DropSessions([5, 6]))
    for replica in (0, 1):
        assert wires.told[replica][-3:] == [
            m.CancelSession(5 + replica),
            m.AbandonSession(5 + replica),
            m.DropSessions([5 + replica]),
        ]
    assert len(wires.bindings) == 0
    assert wires.placing.at == {}


def test_without_a_replica_messages_wait_in_order() -> None:
    wires = Wires()
    said = begin(wires, 1)
    assert wires.bindings.unplaced == 1
    wires.placing.joined(3)
    wires.full.add(3)
    wires.bindings.place()
    assert (wires.told, wires.bindings.unplaced) == ({}, 1)
    wires.full.clear()
    wires.bindings.place()
    assert (wires.told, wires.bindings.unplaced) == ({3: said}, 0)


def test_who_waits_for_a_replica_may_not_say_everything() -> None:
    wires = Wires()
    wires.bindings.tell(m.OpenBranch(handle(1, 1)))
    for count in range(HELD - 1):
        wires.bindings.tell(m.MoveBranch(handle(1, 1), count))
    with pytest.raises(MailboxFull):
        wires.bindings.tell(m.MoveBranch(handle(1, 1), 0))


@pytest.mark.parametrize("much", [False, True])
def test_who_says_very_much_is_placed_without_a_request(much: bool) -> None:
    """Or it would wait for ever for a request that cannot reach it any more, and hold ever more."""
    wires = Wires()
    wires.placing.joined(0)
    wires.bindings.tell(m.OpenBranch(handle(1, 1)))
    more: list[Any] = [
        m.ForkBranch(handle(1, 1), [handle(1, 2)], 0),
        m.ExtendBranch(handle(1, 2), one() * (10_000 if much else 1)),
        m.DropBranches([handle(1, 2)]),
    ]
    for _ in range(200 if much else HELD):
        for message in more:
            wires.bindings.tell(message)
    assert wires.bindings.of(1) == 0
    assert len(wires.told[0]) > 300


def test_those_in_which_something_ran_are_known() -> None:
    wires = Wires()
    wires.placing.joined(0)
    for session in (1, 2):
        begin(wires, session)
    ended = m.Finished(handle(1, 2), "stop", 1, 2, 0, 2, 0.0, 0.0, 0.0, 0.0)
    assert 1 in wires.bindings.here(0)
    wires.bindings.finished(1, [ended])
    assert wires.bindings.busy(0) == {2}
    assert wires.bindings.busy(1) == set()


def test_a_lost_session_is_heard_from_its_reopen_on() -> None:
    wires = Wires()
    wires.placing.joined(0)
    tell = wires.bindings.tell
    begin(wires, 1)
    wires.placing.gone(0)
    assert wires.bindings.gone(0) == [1]
    tell(m.ExtendBranch(handle(1, 1), one()))  # for a cache that is not there
    wires.placing.joined(1)
    wires.bindings.place()
    assert wires.told.keys() == {0}
    tell(m.Reopen(1))
    assert wires.told[1] == begin(wires, 1)
    assert 1 not in wires.bindings.here(0)
    assert 1 in wires.bindings.here(1)


def test_a_session_of_a_busy_replica_is_placed_anew_when_nothing_runs() -> None:
    wires = Wires()
    for replica in (0, 1):
        wires.placing.joined(replica)
    begin(wires, 1)
    wires.placing.hots.add(0)
    wires.bindings.tell(submit(1, 3))  # the first one still runs
    ended = [m.Finished(handle(1, n), "stop", 1, 2, 0, 2, 0.0, 0.0, 0.0, 0.0) for n in (2, 3)]
    assert 1 in wires.bindings.here(0)
    wires.bindings.finished(1, ended)
    assert wires.answers == []
    wires.bindings.tell(submit(1, 4))
    assert wires.answers == [(1, m.ChangeCore())]
    assert wires.told[0][-1] == m.DropSessions([1])
    wires.bindings.tell(m.CancelRequest(handle(1, 4)))  # said before it heard so
    wires.bindings.tell(m.Reopen(1))
    assert wires.told[1] == begin(wires, 1)


def test_sessions_with_something_running_move_first() -> None:
    wires = Wires()
    wires.placing.joined(0)
    for session in (1, 2, 3):
        begin(wires, session)
    for session in (1, 2):
        ended = m.Finished(handle(session, 2), "stop", 1, 2, 0, 2, 0.0, 0.0, 0.0, 0.0)
        assert session in wires.bindings.here(0)
        wires.bindings.finished(session, [ended])
    assert wires.bindings.at(0) == [3, 1, 2]


def test_the_router_sees_the_prompt_of_the_first_request() -> None:
    """Of a fork of a fork, cut back on the way."""
    main, child, grandchild = (handle(1, n) for n in (1, 2, 3))
    held: list[Any] = [
        m.OpenBranch(main, "mine"),
        m.ExtendBranch(main, b"aaaabbbbcccc"),
        m.ForkBranch(main, [child], 2),
        m.ExtendBranch(child, b"dddd"),
        m.ForkBranch(child, [grandchild], 3),
        m.MoveBranch(grandchild, 1),
        m.ExtendBranch(grandchild, b"eeee"),
        m.Submit(handle(1, 4), grandchild, 2, 9, SamplingParams()),
        m.ExtendBranch(grandchild, b"ffff"),
    ]
    assert prompt(held) == ("mine", b"aaaaeeee")
    compiled: Any = m.Compile(handle(1, 4), None)  # type: ignore[arg-type]
    assert prompt([*held[:3], compiled]) == ("mine", b"aaaabbbbcccc")
    assert prompt([*held[:2], *[m.OpenBranch(9)] * 600, *held[2:]]) == ("mine", b"aaaabbbbcccc")


def test_every_message_has_its_session() -> None:
    of = handle(7, 1)
    for message in (
        m.OpenBranch(of),
        m.ExtendBranch(of, b""),
        m.ForkBranch(of, [], 0),
        m.MoveBranch(of, 0),
        m.RetainBranches({of: 1.0}),
        m.DropBranches([of]),
        m.Inspect(7, of, []),
        m.Reopen(7),
        submit(7, 2),
        m.CancelRequest(of),
        m.CancelSession(7),
        m.Compile(of, None),  # type: ignore[arg-type]
        m.Abandon(of),
        m.AbandonSession(7),
    ):
        assert session_in(message) == 7
    with pytest.raises(ValueError, match="DropSessions"):
        session_in(m.DropSessions([7]))


class Coming(RuleBasedStateMachine):
    """Sessions and replicas come and go. Each replica hears of each session a story that makes sense."""

    def __init__(self) -> None:
        super().__init__()
        self.wires = Wires()
        self.alive: set[int] = set()
        self.replicas = 0
        self.sessions: dict[int, int] = {}  # session -> tokens
        self.moving: set[int] = set()
        self.count = 0

    @rule()
    def join(self) -> None:
        if len(self.alive) < 4:
            self.alive.add(self.replicas)
            self.wires.placing.joined(self.replicas)
            self.replicas += 1
            self.wires.bindings.place()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.remove(replica)
        self.wires.placing.gone(replica)
        self.moving.update(self.wires.bindings.gone(replica))

    @rule()
    def open(self) -> None:
        self.count += 1
        self.sessions[self.count] = 0
        self.wires.bindings.tell(m.OpenBranch(handle(self.count, 1)))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), full=st.booleans())
    def say(self, data: st.DataObject, full: bool) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        self.wires.full = set(self.alive) if full else set()
        try:
            self.wires.bindings.tell(m.ExtendBranch(handle(session, 1), b"\1\0\0\0"))
            self.sessions[session] += 1
            self.wires.bindings.tell(submit(session, 2))
        except MailboxFull:
            assert full
        self.wires.full = set()

    @precondition(lambda self: self.moving)
    @rule()
    def move(self) -> None:
        session = self.moving.pop()
        if session in self.sessions:
            self.wires.bindings.tell(m.Reopen(session))
            self.wires.bindings.tell(m.OpenBranch(handle(session, 1)))
            tokens = b"\1\0\0\0" * self.sessions[session]
            if tokens:
                self.wires.bindings.tell(m.ExtendBranch(handle(session, 1), tokens))
                self.wires.bindings.tell(submit(session, 2))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        del self.sessions[session]
        self.wires.bindings.tell(m.DropSessions([session]))

    @invariant()
    def each_replica_has_what_its_sessions_have(self) -> None:
        self.wires.bindings.place()
        found: dict[int, int] = {}
        for replica in self.alive:
            branches: dict[int, int] = {}
            for message in self.wires.told[replica]:
                match message:
                    case m.OpenBranch(branch):
                        assert branch not in branches
                        branches[branch] = 0
                    case m.ExtendBranch(branch, tokens):
                        branches[branch] += len(tokens) // 4
                    case m.DropSessions(sessions):
                        for session in sessions:
                            branches.pop(handle(session, 1), None)
            for branch, tokens in branches.items():
                assert m.session_of(branch) not in found, "at two replicas"
                found[m.session_of(branch)] = tokens
        for session, tokens in self.sessions.items():
            if session not in self.moving and self.alive and tokens:
                assert found.pop(session) == tokens
        assert not found


TestComing = Coming.TestCase
TestComing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Moving(Wires):
    """Session 5 has left replica 0 and is at 1, where its branch was told of; its request waits."""

    def __init__(self) -> None:
        super().__init__()
        for replica in (0, 1, 2):
            self.placing.joined(replica)
            self.bindings.moves.joined(replica, 64, 1 << 20)
        begin(self, 5)
        assert self.bindings.of(5) == 0
        self.bindings.tell(m.Reopen(5))
        self.said = begin(self, 5)

    def kinds(self, replica: int) -> list[str]:
        return [type(each).__name__ for each in self.told[replica]]

    def nothing(self, replica: int) -> None:
        """The target lacks nothing."""
        self.bindings.moves.hears(5, replica, Lacking(5, handle(5, 1)))


LEFT = ["CancelSession", "AbandonSession"]
BEGUN = ["OpenBranch", "ExtendBranch"]


def test_a_session_that_leaves_waits_until_its_kv_has_moved() -> None:
    wires = Moving()
    assert wires.kinds(0)[3:] == LEFT  # its handles stay
    assert wires.kinds(1) == [*BEGUN, "SeekBlocks"]
    assert wires.bindings.leaving(0) == 1
    wires.bindings.tell(m.DropBranches([handle(5, 1)]))
    wires.bindings.tell(m.Inspect(5, handle(5, 9), [handle(5, 1)]))
    assert wires.answers == [(5, m.Inspected(handle(5, 9), [0]))]
    wires.nothing(1)
    assert wires.told[1][3:] == [wires.said[2], m.DropBranches([handle(5, 1)])]
    assert wires.told[0][-1] == m.DropSessions([5])
    assert wires.bindings.leaving(0) == 0


@pytest.mark.parametrize("moving", [True, False])
def test_a_request_that_is_held_is_cancelled_at_once(moving: bool) -> None:
    """Whether KV moves or there is no replica: it ends once, and no replica hears of it."""
    wires: Wires = Moving() if moving else Wires()
    if not moving:
        begin(wires, 5)
    wires.bindings.tell(submit(5, 3))
    for _ in range(2):
        wires.bindings.tell(m.CancelRequest(handle(5, 2), 0, "deadline"))
    wires.bindings.tell(m.CancelRequest(handle(5, 99)))
    [(session, tokens)] = wires.answers
    [finished] = tokens.finished
    assert (session, finished.request, finished.reason) == (5, handle(5, 2), "deadline")
    assert (finished.output, finished.prompt, tokens.progress) == (0, 2, [])
    if isinstance(wires, Moving):
        wires.nothing(1)
    else:
        wires.placing.joined(1)
        wires.bindings.place()
    asked = [each for each in wires.told[1] if isinstance(each, m.Submit | m.CancelRequest)]
    assert asked == [submit(5, 3)]
    wires.bindings.tell(m.CancelRequest(handle(5, 3)))  # it runs: the replica ends it
    assert wires.told[1][-1] == m.CancelRequest(handle(5, 3))
    assert len(wires.answers) == 1


@pytest.mark.parametrize("ends", ["source", "target", "drop", "reopen", "stay"])
def test_a_move_may_end_in_its_midst(ends: str) -> None:
    wires = Moving()
    match ends:
        case "source":
            wires.bindings.gone(0)
        case "target":
            assert wires.bindings.gone(1) == [5]
        case "drop":
            wires.bindings.tell(m.DropSessions([5]))
        case "reopen":  # the target is to leave, too
            wires.bindings.tell(m.Reopen(5))
        case _:
            wires.bindings.stay(0)
    assert wires.bindings.leaving(0) == 0
    assert not len(wires.bindings.moves)
    if ends != "source":
        assert wires.told[0][-1] == m.DropSessions([5])
    if ends in ("drop", "reopen"):
        assert wires.kinds(1)[3:] == [*LEFT, "DropSessions"]
    if ends in ("source", "stay"):
        assert wires.told[1][-1] == wires.said[2]
    assert len(wires.bindings) == (ends != "drop")


def test_an_idle_session_is_placed_while_its_kv_is_there() -> None:
    wires = Moving()
    wires.nothing(1)
    wires.bindings.tell(m.Reopen(5))
    wires.bindings.tell(m.OpenBranch(handle(5, 1)))
    assert wires.bindings.of(5) is None
    wires.bindings.bring()
    assert wires.kinds(2) == ["OpenBranch", "SeekBlocks"]
    wires.nothing(2)
    wires.bindings.tell(m.Reopen(5))
    assert wires.bindings.leaving(2) == 1
    wires.bindings.bring()  # it has no branches
    assert wires.bindings.leaving(2) == 0


def test_nothing_moves_from_where_nothing_is_kept_or_goes_on() -> None:
    wires = Moving()
    wires.nothing(1)
    wires.bindings.moves.stalls(1, True)
    wires.bindings.tell(m.Reopen(5))
    assert wires.kinds(1)[-1] == "DropSessions"
    begin(wires, 5)
    assert wires.kinds(2) == [*BEGUN, "Submit"]
    wires.bindings.moves.stalls(1, False)
    assert wires.bindings.moves.gives(1)


def test_a_session_leaves_a_replica_for_prompts_when_all_have_a_token() -> None:
    wires = Moving()
    wires.nothing(1)
    wires.bindings.tell(submit(5, 3))
    wires.placing.goes_on = lambda replica: replica == 1  # type: ignore[attr-defined]

    def hears(*requests: int, ended: int | None = None) -> bool:
        progress = [m.Progress(handle(5, each), one()) for each in requests]
        finished = [] if ended is None else [SimpleNamespace(request=handle(5, ended))]
        return wires.bindings.goes_on(5, 1, m.Tokens(progress, finished))  # type: ignore[arg-type]

    assert not hears(2)
    assert hears(3)
    assert not hears(2, 3)  # once
