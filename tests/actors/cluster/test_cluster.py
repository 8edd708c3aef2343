"""What a cluster does beside starting processes, which `e2e/test_replicas.py` tests."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.actors.cluster import starting
from ramify.actors.cluster.bindings import _Session
from ramify.actors.cluster.cluster import (
    WITHOUT_SECONDS,
    Cluster,
)
from ramify.actors.cluster.cores import DEATHS, LOOK_SECONDS, WITHIN_SECONDS
from ramify.actors.cluster.membership import ReplicaMember
from ramify.actors.cluster.metrics import ClusterMetrics
from ramify.actors.cluster.replica_messages import Up
from ramify.actors.kit.report import Report
from ramify.actors.processes.messages import NotStarted
from ramify.protocol import messages as m
from ramify.protocol.cluster import ReplicaLoad
from ramify.protocol.config import EngineConfig, ModelConfig, ReplicasConfig
from ramify.protocol.plan import ExecutorInfo
from tests.manual_clock import ManualClock

INFO = ExecutorInfo(
    model="m",
    architecture="A",
    parameters=8,
    vocab_size=16,
    context=32,
    page_size=1,
    pages=64,
    max_rows=4,
    step_tokens=8,
    device="cpu",
    dtype="float32",
    attention="torch",
    eos_token_ids=[2],
    kv_bytes_per_token=1,
    load_seconds=0.0,
)


class Told:
    """A `Spread` that keeps what sessions are told."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, Any]] = []

    def put(self, messages: Iterable[tuple[int, Any]], /) -> None:
        self.messages += messages

    def start(self) -> None:
        pass

    def flush(self) -> None:
        pass


async def test_a_replica_that_loads_for_long_is_waited_for() -> None:
    """Only a front with none at all gives up."""
    clock = ManualClock()
    config = EngineConfig(model=ModelConfig(path=Path("m")), replicas=ReplicasConfig(count=1))
    cluster = Cluster(config, spec=None, clock=clock, metrics=ClusterMetrics(), epoch="e")

    def pass_time() -> None:
        for _ in range(round(1.5 * WITHOUT_SECONDS / LOOK_SECONDS)):
            clock.advance(LOOK_SECONDS)
            cluster.look(clock.now())

    cluster.members.add(starting := ReplicaMember(0, lambda: None))
    pass_time()
    cluster.ends.gone(starting)
    gone = clock.now()
    with pytest.raises(NotStarted):
        pass_time()
    assert clock.now() - gone > WITHOUT_SECONDS


async def test_a_session_under_which_every_replica_dies_is_ended() -> None:
    """It may be why they die. One that meets as many deaths in a longer time goes on."""
    clock, told, metrics = ManualClock(), Told(), ClusterMetrics()
    config = EngineConfig(model=ModelConfig(path=Path("m")), replicas=ReplicasConfig(count=2))
    cluster = Cluster(config, spec=None, clock=clock, metrics=metrics, epoch="e")
    cluster.cores.spread = told
    for death in range(DEATHS):
        cluster.cores.move([1, 4] if death % 2 else [1, 2, 4], ran={1, 2})
        clock.advance(1.0)
    cluster.cores.move([1, 3])  # nothing died under these
    ends = [(session, type(message)) for session, message in told.messages]
    assert ends.count((1, m.Lost)) == 1
    assert ends.count((1, m.ChangeCore)) == DEATHS
    assert ends.count((2, m.ChangeCore)) == DEATHS // 2
    assert ends.count((4, m.ChangeCore)) == DEATHS  # nothing ran in it: it cannot be why
    assert metrics.moves == len(ends) - 1
    told.messages.clear()
    for _ in range(2 * DEATHS):
        clock.advance(WITHIN_SECONDS / 4)
        cluster.cores.move([9], ran={9})
    assert all(isinstance(message, m.ChangeCore) for _, message in told.messages)


def test_a_replica_whose_texts_would_be_others_is_sent_away() -> None:
    """A session that moves to another precision, or other weights, would not say the same."""
    config = EngineConfig(model=ModelConfig(path=Path("m")), replicas=ReplicasConfig(count=2))
    cluster = Cluster(config, spec=None, clock=ManualClock(), metrics=ClusterMetrics(), epoch="e")
    more = msgspec.structs.replace(INFO, pages=128, device="cuda", attention="triton")
    other = msgspec.structs.replace(INFO, quantization="int8", eos_token_ids=[2, 3])
    killed: list[int] = []
    for number, info in enumerate((INFO, more, other)):
        member = ReplicaMember(number, lambda n=number: killed.append(n))  # type: ignore[misc]
        cluster.members.add(member)
        cluster.ends.receive(member, Up(number, info, pid=1, host="h"))
    assert killed == [2]
    assert [member.state for member in cluster.members] == ["ready", "ready", "starting"]
    why = member.why
    assert "its quantization is 'int8', the others' 'none'" in why
    assert "its eos_token_ids is [2, 3], the others' [2]" in why
    assert "--quantization" in why


class Standing:
    """A cluster of replicas that are ready, and do what a test says. `grown`: as many were started."""

    def __init__(self, count: int, **settings: Any) -> None:
        replicas = ReplicasConfig(**{"count": count, "drain_s": 30.0} | settings)
        config = EngineConfig(
            model=ModelConfig(path=Path("m"), device="cpu"), replicas=replicas, step_timeout_s=600.0
        )
        self.clock, self.told = ManualClock(), Told()
        self.cluster = Cluster(config, spec=None, clock=self.clock, metrics=ClusterMetrics(), epoch="e")
        self.members = self.cluster.members
        self.cluster.cores.spread = self.told
        self.grown: list[int] = []
        self.cluster.starter.scale = self.grown.append  # type: ignore[method-assign]
        for _ in range(count):
            self.joins()

    def joins(self, info: ExecutorInfo | None = INFO) -> ReplicaMember:
        """Another replica; without `info` it still loads."""
        member = ReplicaMember(len(self.members), lambda: None)
        self.members.add(member)
        if info is not None:
            self.up(member)
        return member

    def up(self, member: ReplicaMember) -> None:
        self.cluster.ends.receive(member, Up(member.number, INFO, pid=member.number, host="h"))

    def sits(self, session: int, replica: int) -> None:
        """A session is at a replica, and nothing runs in it."""
        bindings = self.cluster.cores.bindings
        entry = bindings._sessions.setdefault(session, _Session())
        entry.replica = replica
        bindings._at.setdefault(replica, {})[session] = None

    def faults(self, replica: int, fault: str | None) -> None:
        self.cluster.ends.receive(self.member(replica), Report(fault=fault))

    def member(self, number: int) -> ReplicaMember:
        found = self.members.get(number)
        assert found is not None
        return found

    def look(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.cluster.look(self.clock.now())

    @property
    def states(self) -> list[str]:
        return [member.state for member in self.members]


def test_a_front_has_room_for_so_many_replicas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(starting, "MOST_REPLICAS", 2)
    standing = Standing(2, on="join", secret_file=tmp_path / "secret")
    starter = standing.cluster.starter
    assert isinstance(starter, starting.JoinedReplicas)
    with pytest.raises(ConnectionError):
        starter.joins(lambda *fields: None, "host")  # type: ignore[arg-type, return-value]
    assert len(standing.states) == 2


async def test_sessions_leave_a_replica_whose_executor_stands_still() -> None:
    """Long before --step-timeout; it takes none until it makes progress. The last one is not left."""
    standing = Standing(3)
    standing.sits(1, 0)
    standing.faults(0, "no result for 5 s")
    standing.look(5.0)
    assert standing.states == ["ready", "ready", "ready"]
    standing.faults(0, "no result for 11 s")
    standing.look(5.0)
    assert standing.states == ["stalled", "ready", "ready"]
    assert standing.told.messages == [(1, m.ChangeCore())]
    assert standing.cluster.cores.routing.place(2, "", b"") in (1, 2)
    standing.sits(2, 1)
    standing.faults(1, "no result for 5 s")
    standing.look(60.0)
    assert standing.states == ["stalled", "ready", "ready"]  # its session may be why
    standing.faults(0, None)
    standing.look(0.25)
    assert standing.states == ["ready", "stalled", "ready"]
    assert standing.told.messages[1:] == [(2, m.ChangeCore())]
    placed = {standing.cluster.cores.routing.place(3 + i, "", b"") for i in range(8)}
    assert placed == {0, 2}
    standing.faults(1, None)
    standing.look(0.25)
    for replica in range(3):
        standing.faults(replica, "no result for 5 s")
    standing.look(60.0)
    assert standing.states == ["ready"] * 3  # nowhere is better


async def test_a_replica_that_has_stalled_is_no_reason_for_more_or_fewer() -> None:
    """It goes on, or is replaced."""
    standing = Standing(2, most=4)
    standing.joins()
    standing.cluster.starter.wanted = 3
    for number, fault in enumerate((None, None, "no result for 5 s")):
        report = Report(fault=fault, load=ReplicaLoad())
        standing.cluster.ends.receive(standing.member(number), report)
    standing.look(10.0)
    for _ in range(3):
        standing.clock.advance(1000.0)
        standing.cluster.look(standing.clock.now())
    assert standing.states == ["ready", "ready", "stalled"]
    assert standing.grown == []


async def test_the_last_replica_serves_until_its_successor_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starting, "room_beside", lambda config, new, old, pid: (new, old) == (1, 0))
    standing = Standing(1)
    standing.sits(1, 0)
    standing.cluster.drain(0)
    standing.cluster.drain(0)  # told twice
    standing.look(1000.0)
    assert (standing.states, standing.grown, standing.told.messages) == (["ready"], [1], [])
    assert standing.cluster.starter._retired == {0}
    standing.joins()
    assert standing.states == ["draining", "ready"]
    assert standing.told.messages == [(1, m.ChangeCore(quietly=True))]
    standing.look(29.0)
    assert len(standing.told.messages) == 1
    standing.look(1.0)
    assert standing.told.messages[1:] == [(1, m.ChangeCore())]


async def test_the_last_replica_leaves_at_once_where_nothing_follows_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No room for two, or it has stalled: to wait would only make it longer for all."""
    for fault in (None, "no result for 5 s"):
        monkeypatch.setattr(starting, "room_beside", lambda *where, room=fault: room is not None)
        standing = Standing(1)
        standing.sits(1, 0)
        standing.faults(0, fault)
        standing.cluster.drain(0)
        standing.look(0.25)
        assert standing.states == ["draining"]
        assert standing.told.messages == [(1, m.ChangeCore(quietly=True)), (1, m.ChangeCore())]
        assert standing.grown == []


async def test_the_last_of_several_serves_until_another_one_is_back() -> None:
    """All were told to end at once."""
    standing = Standing(2)
    for replica in (0, 1):
        standing.sits(replica, replica)
        standing.cluster.drain(replica)
        standing.look(0.25)
    assert standing.states == ["draining", "ready"]
    standing.joins()
    assert standing.states == ["draining", "draining", "ready"]


async def test_a_replica_elsewhere_does_not_wait_for_ever_for_another_one(tmp_path: Path) -> None:
    """Who ends it does not wait longer, either."""
    secret = tmp_path / "secret"
    standing = Standing(1, on="join", secret_file=secret)
    loads = standing.joins(None)
    standing.cluster.drain(0)
    standing.look(0.25)
    assert standing.states == ["ready", "starting"]
    standing.look(30.0)
    assert standing.states == ["draining", "starting"]
    standing = Standing(1, on="join", secret_file=secret)
    loads = standing.joins(None)
    standing.cluster.drain(0)
    standing.look(0.25)
    standing.up(loads)
    assert standing.states == ["draining", "ready"]
    standing = Standing(1, on="join", secret_file=secret)
    standing.cluster.drain(0)
    standing.look(0.25)
    assert standing.states == ["draining"]


@pytest.mark.parametrize(("device", "stays"), [("cpu", ["ready"]), ("cuda", [])])
def test_replicas_that_ray_has_forgotten_leave(device: str, stays: list[str]) -> None:
    """A new head has new ones started. On a CPU one serves until the first of these is ready."""
    standing = Standing(3, on="ray")
    cluster = standing.cluster
    old = list(standing.members)
    for member in old:
        member.info = msgspec.structs.replace(INFO, device=device)
    cluster.starter.orphaned()
    standing.look(0.0)
    assert [member.state for member in old] == ["draining"] * (3 - len(stays)) + stays
    standing.joins()
    assert [member.state for member in old] == ["draining"] * 3
    assert standing.member(3).state == "ready"


async def test_all_replicas_are_replaced_one_after_the_other() -> None:
    standing = Standing(3)
    old = list(standing.members)
    standing.cluster.replace_all()
    for count, member in enumerate(old):
        for _ in range(2):
            standing.look(0.25)
            assert [each.state for each in old].count("draining") == 1
        assert member.state == "draining"
        standing.cluster.ends.gone(member)
        standing.look(0.25)  # its successor is not there yet
        standing.members.add(fresh := ReplicaMember(member.number))
        standing.look(0.25)
        assert [each.state for each in old].count("ready") == 2 - count
        standing.up(fresh)
    standing.look(0.25)
    assert standing.states == ["ready"] * 3
