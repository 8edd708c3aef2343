"""Numbers and names that say where their owner lives; every message survives its codec."""

from pathlib import Path

import pytest

from ramify.actors.front import core_messages as c
from ramify.actors.front import gateway_messages as w
from ramify.actors.kit.report import CredentialUsage, Report
from ramify.actors.processes.messages import AskMetrics, MetricsText, StartFailed, decoder, encoder
from ramify.protocol import messages as m
from ramify.protocol.config import EngineConfig, ModelConfig, ServerConfig
from ramify.protocol.credentials import Credential, CredentialLimits
from ramify.protocol.wire import Delta, Error, Open, Ping, ServerInfo, StateReply

CONFIG = EngineConfig(model=ModelConfig(path=Path("m")), server=ServerConfig(tokens=("a", "b")))


def test_numbers_name_their_slot_and_never_come_again() -> None:
    seen: set[int] = set()
    for worker in (0, 5, w.MAX_WORKERS - 1):
        first = 1
        for incarnation in range(3):
            names = w.naming(worker, incarnation, first)
            assert names.sockets is not None
            assert names.sessions is not None
            sockets = [next(names.sockets) for _ in range(4)]
            sessions = [next(names.sessions) for _ in range(4)]
            assert {w.worker_of(number) for number in sockets + sessions} == {worker}
            assert not seen & set(sockets)
            first = max(map(w.count_of, sessions)) + 1
            seen.update(sockets)
            assert all(m.session_of(session << 32 | 7) == session for session in sessions)
            assert names.prefix == f"s_{worker}_"


@pytest.mark.parametrize(
    ("session", "worker"),
    [
        ("s_3_ab_c", 3),
        ("s_12_x", 12),
        ("s_abc", None),
        ("s_a_b", None),
        ("", None),
        ("s__x", None),
        (f"s_{'9' * 5000}_x", None),
    ],
)
def test_a_public_id_names_its_owner(session: str, worker: int | None) -> None:
    assert w.owner(session) == worker


@pytest.mark.parametrize(
    "message",
    [
        w.StartGateway(CONFIG, 1, 2, 3, [4, 5], 6, [Credential(name="a", digest=b"\1" * 32)]),
        w.StartGateway(CONFIG, 1, 2, 3, [4], None, [], 7, ["s_1"]),
        w.Bar("s_1"),
        w.Serve(ServerInfo(version=1, epoch="e", model="m", context=9), 9, 384),
        c.ToSessions([(65, m.Tokens([m.Progress(1, b"1234")], [])), (66, m.Inspected(1, [2]))]),
        w.Forwarded([b"x", b"y"]),
        w.EngineState(True, "ready", {"model": None, "limits": {"n": 1}}),
        w.Load({"queue": 1.0}),
        w.Load({"queue": 1.0}, {"alice": 3}),
        w.EngineState(True, "ready", {}, "the executor says nothing for 5 s"),
        w.Accept([Credential(name="alice", digest=b"\0" * 32, limits=CredentialLimits(sockets=1))]),
        w.Peers([0, 1]),
        MetricsText(1, b"text"),
        w.Drain("why", 1.0),
        w.EndGateway(1.0, True),
    ],
)
def test_what_the_core_says(message: w.FromEngine) -> None:
    assert decoder(w.FromEngine).decode(encoder().encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        c.ToCore(
            [m.OpenBranch(1 << 32), m.CancelSession(1), c.Forward(1, b"x"), Report(sockets=1, lag=0.5)]
        ),
        c.ToCore([Report(session_bytes=9, usage={"alice": CredentialUsage(1, 2, 3, 4, 5)})]),
        c.ToCore([m.DropBranches([(1 << 32) - 1 << 32 | 1]), AskMetrics(1)]),
        w.Listening(),
        w.Serving(),
        w.Announced(),
        StartFailed("ModelError", "no"),
    ],
)
def test_what_a_process_says(message: w.ToEngine) -> None:
    assert decoder(w.ToEngine).decode(encoder().encode(message)) == message


def test_what_neighbours_say() -> None:
    messages: w.PeerMessages = [
        m.OpenSession(1, Open(client="c", session="s_1_x", have={"main": 3}), [Ping(n=1)]),
        w.ToSession(1, m.Frame(2, [Ping(n=1)])),
        w.ToSession(1, m.Detached(2)),
        m.Opened(1, 2),
        m.OpenRefused(1, Error(code="no_session", message="gone")),
        m.Deliver(
            1,
            [
                StateReply(session="s", op=0, revision=0, branches=[]),
                Delta(branch="a", position=1, text="x"),
            ],
        ),
        m.CloseSocket(1, 1000, "done"),
    ]
    assert decoder(w.PeerMessages).decode(encoder().encode(messages)) == messages
