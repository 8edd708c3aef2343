"""The client's half of the protocol (`clients.session`) against the session's, in memory.

A program in one frame is played with the connection lost at each frame in turn: every op ends as without
a loss, the text of each generation is whole, and both halves know the same branches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ramify.clients.session import ClientCore, SessionPhase
from ramify.clients.stream import Ticket
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from tests.amount import stride

Sim = Callable[..., Any]
NAMES = ["a", "b", "c"]
# the first frame at which the connection is lost, of each third one, and how long it stays away
AWAY = pytest.mark.parametrize(("begin", "away"), [(1, 0), (stride(2), 25), (stride(3), 100_000)])


class Half:
    """The client's half, attached to the first session of an engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.core = ClientCore(w.Open(client="half", session="s_1", key="key"))
        self.socket = 0
        self.frames = 0
        self.read: dict[int, str] = {}  # what a reader has of each stream, by id()

    def connect(self) -> None:
        self.engine.sockets += 1
        self.socket = self.engine.sockets
        self.engine.clients[self.socket] = self
        (opened,) = self.core.connected()
        self.engine.post_session(1, m.Attach(self.socket, opened, [], True))

    def drop(self) -> None:
        del self.engine.clients[self.socket]
        self.engine.post_session(1, m.Detached(self.socket))
        self.core.disconnected(None)

    def receive(self, messages: list[w.ServerMessage]) -> None:
        self.frames += 1
        for message in messages:
            self.core.receive(message)
        while self.core.phase is SessionPhase.OPEN and (frame := self.core.next_frame()):
            self.engine.post_session(1, m.Frame(self.socket, list(frame)))

    def look(self, tickets: Sequence[Ticket]) -> None:
        """Read all that is new, as somebody does who shows it."""
        for ticket in tickets:
            for stream in ticket.streams.values():
                while (delta := stream.take()) is not None:
                    shown = self.read.get(id(stream), "")
                    self.read[id(stream)] = shown[: len(shown) - delta.cut] + delta.text


def thoughts() -> list[w.Op]:
    """Three thoughts, the best of which becomes `main`; drafts of it that are joined."""
    return [
        w.Append(id=0, text="hello"),
        w.Generate(id=0, max_tokens=3, temperature=0),
        w.Fork(id=0, as_=NAMES),
        *(w.Append(id=0, branch=name, tokens=[20 + i]) for i, name in enumerate(NAMES)),
        w.Generate(id=0, branch=NAMES, max_tokens=6, temperature=0),
        w.Prune(id=0, from_=NAMES, into="main"),
        w.Generate(id=0, max_tokens=12, temperature=0),
        w.Generate(id=0, n=2, as_=["a", "x"], max_tokens=4, temperature=0.9, seed=1, hidden=True),
        w.Join(id=0, from_=["a", "x"], role=None, each="<{text}>"),
        w.Generate(id=0, max_tokens=5, temperature=0, quiet=True),
        w.Fork(id=0, as_=["p", "q"]),
        w.Append(id=0, branch="p", tokens=[10**6]),
        w.Generate(id=0, branch=["p", "q"], max_tokens=4, temperature=0),
        w.Prune(id=0, from_=["p", "q"], by="vote", into="best"),
        w.Generate(id=0, branch="best", max_tokens=3, temperature=0),
        w.Join(id=0, from_=["best", "p"]),
        w.Generate(id=0, max_tokens=3, temperature=0),
    ]


def race() -> list[w.Op]:
    """The first one wins, the others stop: which one that is does not depend on the connection."""
    lengths = zip(NAMES, (300, 4, 300), strict=True)
    return [
        w.Append(id=0, text="hello"),
        w.Fork(id=0, as_=NAMES),
        *(w.Generate(id=0, branch=n, max_tokens=k, temperature=0.9, seed=3) for n, k in lengths),
        w.Prune(id=0, from_=NAMES, by="first", into=["b"]),
        w.Generate(id=0, branch="b", max_tokens=30, temperature=0),
    ]


def choices() -> list[w.Op]:
    """Choices, of which one takes the branch's last token back; on children, pruned; one that fails."""
    return [
        w.Append(id=0, text="hello wor"),
        w.Select(id=0, choices=["ld"]),
        w.Generate(id=0, max_tokens=3, temperature=0),
        w.Fork(id=0, as_=NAMES),
        *(w.Append(id=0, branch=name, tokens=[20 + i]) for i, name in enumerate(NAMES)),
        w.Select(id=0, branch=NAMES, choices=[" one", " two three", "é"]),
        w.Prune(id=0, from_=NAMES, into="main"),
        w.Generate(id=0, max_tokens=5, temperature=0),
        w.Select(id=0, choices=["hi", "e"], method="greedy_token_selection"),
        w.Fork(id=0, branch=None, as_=["void"]),
        w.Select(id=0, branch="void", choices=["hi"]),
        w.Generate(id=0, branch="void", max_tokens=3, temperature=0),
    ]


def play(sim: Sim, ops: list[w.Op], cut: int | None, away: int) -> tuple[Half, list[Ticket]]:
    engine = sim(eos_every=0, seed=1)
    maker = engine.session("maker")
    engine.pump()
    maker.drop()
    half = Half(engine)
    half.connect()
    tickets = half.core.submit(ops)
    while not all(ticket.settled for ticket in tickets):
        engine.pump(1)
        half.look(tickets)
        if half.frames == cut:
            half.drop()
            engine.pump(away)
            half.connect()
            cut = None
    engine.pump()
    half.look(tickets)
    return half, tickets


def outcome(half: Half, tickets: list[Ticket]) -> list[Any]:
    return [
        (
            getattr(ticket.error, "code", None),
            {name: (s.text, half.read.get(id(s), "")) for name, s in ticket.streams.items()},
        )
        for ticket in tickets
    ]


@AWAY
def test_a_program_survives_a_loss_at_each_frame(sim: Sim, begin: int, away: int) -> None:
    half, tickets = play(sim, thoughts(), None, 0)
    whole = outcome(half, tickets)
    assert half.frames > 20
    assert [code for code, _ in whole].count("skipped") == 3  # on "p", the last join, and behind it
    assert all(read == text for _, streams in whole for text, read in streams.values())
    for cut in range(begin, half.frames + 1, stride(3)):
        again, tickets = play(sim, thoughts(), cut, away)
        assert outcome(again, tickets) == whole, cut
        branches = again.engine.cores[1].state.branches
        heads = again.core.heads.by_name
        assert {n: h.position for n, h in heads.items()} == {
            n: b.position for n, b in branches.items()
        }, cut


@AWAY
def test_choices_survive_a_loss_at_each_frame(sim: Sim, begin: int, away: int) -> None:
    half, tickets = play(sim, choices(), None, 0)
    whole = outcome(half, tickets)
    (first,) = tickets[1].replies
    assert isinstance(first, w.Done)
    assert (first.rebased is not None, first.text) == (True, "ld")
    assert [code for code, _ in whole] == [None] * 12 + ["bad_request", "skipped"]
    assert all(read == text for _, streams in whole for text, read in streams.values())
    for cut in range(begin, half.frames + 1, stride(3)):
        again, tickets = play(sim, choices(), cut, away)
        assert outcome(again, tickets) == whole, cut
        branches = again.engine.cores[1].state.branches
        heads = again.core.heads.by_name
        assert {n: h.position for n, h in heads.items()} == {
            n: b.position for n, b in branches.items()
        }, cut


@AWAY
def test_a_race_survives_a_loss_at_each_frame(sim: Sim, begin: int, away: int) -> None:
    half, tickets = play(sim, race(), None, 0)
    texts = outcome(half, tickets)
    for cut in range(begin, half.frames + 1, stride(3)):
        again, tickets = play(sim, race(), cut, away)
        found = outcome(again, tickets)
        assert [code for code, _ in found] == [None] * len(tickets), cut
        assert [found[3], found[6]] == [texts[3], texts[6]], cut  # the winner, before and after
        branches = again.engine.cores[1].state.branches
        assert set(again.core.heads.by_name) == set(branches) == {"main", "b"}, cut
        assert again.core.heads.by_name["b"].position == branches["b"].position
