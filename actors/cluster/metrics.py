"""The metrics of a front with replicas: its own, and those of each replica with a label.

A replica renders its own text. What every process has (sockets, sessions) is the front's; what a core
has (steps, requests, KV) comes from the replicas, each sample with `replica="0"`.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ramify.actors.cluster.membership import State
from ramify.actors.kit.log import get_log
from ramify.actors.kit.metrics import Metrics
from ramify.actors.kit.report import Report

PATIENCE_SECONDS = 1.0  # for the replicas' texts
OF_FRONT = (
    "ramify_sockets",
    "ramify_sessions",
    "ramify_session_bytes",
    "ramify_event_loop_lag",
    "ramify_owner_",
    "ramify_gateway_",
    "ramify_history",
    "ramify_tokenized",
    "ramify_replica",
    "ramify_store",
)
log = get_log("ramify.actors.cluster")
STATES: tuple[State, ...] = ("starting", "ready", "stalled", "draining")


class ReplicaGauges(NamedTuple):
    """What the front knows of one replica."""

    number: int
    state: State
    sessions: int
    report: Report


class ClusterMetrics(Metrics):
    """See the module's top. `watch` says where the replicas are."""

    def __init__(self) -> None:
        super().__init__()
        self._replicas: Callable[[], list[ReplicaGauges]] = list
        self._ask: Callable[[Callable[[int, bytes], None]], int] = lambda told: 0
        self._late: Callable[[float], None] = lambda seconds: None
        self._moves_here: Callable[[], int] = lambda: 0
        self._moved = 0  # sessions of gateway processes
        self.deaths = 0

    def watch(
        self,
        replicas: Callable[[], list[ReplicaGauges]],
        ask: Callable[[Callable[[int, bytes], None]], int],
        late: Callable[[float], None] = lambda seconds: None,
        moves: Callable[[], int] = lambda: 0,
    ) -> None:
        """`ask(told)` asks the replicas for their texts and returns how many will come.

        `late` hears how late first tokens are in gateway processes. `moves()`: of sessions in this one.
        """
        self._replicas, self._ask, self._late, self._moves_here = replicas, ask, late, moves

    @property
    def moves(self) -> int:
        """Of sessions, from a replica to another, in all processes."""
        return self._moves_here() + self._moved

    def gateway(self, number: int, report: Report) -> None:
        super().gateway(number, report)
        self._moved += report.moves
        for seconds in report.first_tokens:
            self._late(seconds)

    @property
    def running(self) -> int:
        return sum(replica.report.running for replica in self._replicas())

    @property
    def waiting(self) -> int:
        return sum(replica.report.waiting for replica in self._replicas())

    @property
    def kv_in_use(self) -> float:
        reports = [replica.report for replica in self._replicas()]
        total = sum(each.free + each.evictable + each.referenced for each in reports)
        return sum(each.referenced for each in reports) / total if total else 0.0

    def collect(self) -> Iterator[Metric]:
        """The front's own."""
        for family in super().collect():
            if family.name.startswith(OF_FRONT):
                yield family
        replicas = self._replicas()
        state = GaugeMetricFamily(
            "ramify_replica_state", "1 for the state that a replica is in.", labels=["replica", "state"]
        )
        sessions = GaugeMetricFamily(
            "ramify_replica_sessions", "Sessions at a replica.", labels=["replica"]
        )
        for each in replicas:
            for name in STATES:
                state.add_metric([str(each.number), name], float(each.state == name))
            sessions.add_metric([str(each.number)], each.sessions)
        yield from (state, sessions)
        yield counter("ramify_replica_moves", "Sessions that moved to another replica.", self.moves)
        yield counter("ramify_replica_deaths", "Replicas that died.", self.deaths)

    def scrape(self, done: Callable[[bytes], object], /) -> None:
        """Ask the replicas, and wait for them a moment: one that is slow is left out."""
        loop = asyncio.get_running_loop()
        texts: dict[int, bytes] = {}
        over = False
        expected = -1  # nobody knows yet

        def finish() -> None:
            nonlocal over
            if not over:
                over = True
                timer.cancel()
                if not texts:
                    done(self.render())
                    return
                # In a thread: reading the texts of many replicas takes longer than a turn may.
                made = loop.run_in_executor(None, joined, self.render(), dict(texts))
                made.add_done_callback(lambda text: done(text.result()))

        def told(replica: int, text: bytes) -> None:
            texts[replica] = text
            if len(texts) == expected:
                finish()

        timer = loop.call_later(PATIENCE_SECONDS, finish)
        expected = self._ask(told)
        if len(texts) >= expected:
            finish()


def counter(name: str, help: str, value: float) -> Metric:
    """A counter without labels."""
    family = Metric(name, help, "counter")
    family.add_sample(f"{name}_total", {}, value)
    return family


def joined(own: bytes, texts: dict[int, bytes]) -> bytes:
    """One text of the front's own and the replicas'."""
    families: dict[str, tuple[str, str, list[str]]] = {}
    for replica, text in sorted(texts.items()):
        for family in _parsed(replica, text):
            if family.name.startswith(OF_FRONT) and not family.name.startswith("ramify_event_loop"):
                continue
            name = family.name
            if name.startswith("ramify_event_loop"):
                name = name.replace("ramify_", "ramify_replica_", 1)
            lines = families.setdefault(name, (family.type, family.documentation, []))[2]
            lines += _lines(family, name, str(replica))
    out = [own.decode().removesuffix("# EOF\n")]
    for name, (kind, help, lines) in families.items():
        full = f"{name}_total" if kind == "counter" else name
        out += [f"# HELP {full} {help}\n", f"# TYPE {full} {kind}\n", *lines]
    return "".join(out).encode()


def _parsed(replica: int, text: bytes) -> list[Metric]:
    """What cannot be read is left out: that of another version, perhaps."""
    try:
        return list(text_string_to_metric_families(text.decode()))
    except (ValueError, LookupError) as error:
        log.warning("a replica's metrics cannot be read", replica=replica, reason=str(error))
        return []


def _lines(family: Metric, name: str, replica: str) -> Iterable[str]:
    for sample in family.samples:
        labels = {**sample.labels, "replica": replica}
        inside = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
        yield f"{name}{sample.name[len(family.name) :]}{{{inside}}} {sample.value!r}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
