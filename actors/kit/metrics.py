"""The engine's metrics, as Prometheus text.

Actors call plain methods that add to plain ints: `step` runs on the path from one step to the next and
costs a few microseconds. Prometheus' own objects are made only for a scrape (`render`), by a collector
in a registry of this instance: two engines in one process do not meet.

This file does not know who calls it, or what serves the text.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
)
from prometheus_client.metrics_core import Metric

from ramify.actors.kit.metric_families import (
    LATENCY,
    PLAN,
    STEP,
    ConstraintCounts,
    Histogram,
    counter,
    kv_families,
)
from ramify.actors.kit.report import CredentialUsage, KvTier, RankState, Report, StoreHealth, joined
from ramify.protocol.cluster import ReplicaLoad
from ramify.protocol.messages import Finished
from ramify.protocol.plan import PicturesSeen, StepResult, unpack

PAST = -1  # instead of a gateway process' number


class Metrics:
    """All metrics of one engine. Used from its event loop's thread only."""

    def __init__(self) -> None:
        # Set by who knows it: called at each scrape
        self.held: Callable[[], int] = lambda: 0  # bytes that sessions here hold, by estimate
        self.usage: Callable[[], dict[str, CredentialUsage]] = dict  # of this process, by credential
        # tokens that sessions here made of text, and histories by their outcome
        self.histories: Callable[[], Mapping[str, int]] = dict
        self.tiers: Callable[[], Sequence[KvTier]] = tuple
        self.ranks: Callable[[], Sequence[RankState]] = tuple  # that hold the model together
        self.constraints: Callable[[], ConstraintCounts | None] = lambda: None
        self.store_changed: Callable[[], None] = lambda: None  # called when `store` is another one
        self.drafter = ""  # its name; "": none, and no metrics of one
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._running = self._waiting = self._sockets = self._sessions = 0
        self._stores: dict[int, StoreHealth] = {}  # by gateway process
        self._gateways: dict[int, tuple[int, int, float, int]] = {}  # sockets, sessions, lag, bytes
        # By gateway process; PAST: of those that have ended.
        self._usage: dict[int, dict[str, CredentialUsage]] = {}
        self._histories: dict[int, Mapping[str, int]] = {}  # by gateway process, as `_usage`
        self._kv = (0, 0, 0)
        self.canaries: Mapping[str, int] = {}  # blocks that were compared, by result
        self._load_us = 0
        self.copied_s = 0.0  # in which blocks of other replicas were copied
        self._lag = self._worst_lag = 0.0
        self._steps = self._executor_tokens = self._sampled = 0
        self._spare_requests: dict[str, int] = {"computed": 0, "given up": 0}
        self.spare_tokens = 0  # computed before anybody asked
        self.pictures_seen = 0  # by the model's tower
        self._drafted = self._accepted = 0
        self._cached = self._computed = self._output = self._replayed = 0
        self._ends: Counter[str] = Counter()
        self._retractions: Mapping[str, int] = {}
        self._executor_deaths = 0
        self._twice = self._mixed_room = 0
        self._ttft = Histogram("ramify_ttft_seconds", "From arrival to the first token.", LATENCY)
        self._itl = Histogram(
            "ramify_itl_seconds", "Mean time between tokens of each finished request.", LATENCY
        )
        self._queue = Histogram("ramify_queue_seconds", "From arrival to the first step.", LATENCY)
        self._step = Histogram("ramify_step_seconds", "Time of a step on the device.", STEP)
        self._plan = Histogram("ramify_plan_seconds", "Time to plan a step on the host.", PLAN)

    def executor_died(self) -> None:
        """Count an executor that died."""
        self._executor_deaths += 1

    def step(self, result: StepResult, plan_seconds: float) -> None:
        """A step has come back. `plan_seconds`: until the next plan had left."""
        self._steps += 1
        self._executor_tokens += result.computed
        self._sampled += len(result.tokens) >> 2
        if result.drafted:
            counts = unpack(result.counts)
            forced = _forced_drafts(counts, result.forced) if result.forced else 0
            self._drafted += sum(unpack(result.drafted)) - forced
            self._accepted += sum(count - 1 for count in counts if count) - forced
        self._load_us += result.load_us
        self._step.observe(result.elapsed_us * 1e-6)
        self._plan.observe(plan_seconds)

    def seen(self, seen: PicturesSeen) -> None:
        """The tower has run on pictures."""
        self.pictures_seen += len(seen.keys)

    def turn(
        self, running: int, waiting: int, retractions: Mapping[str, int], twice: int, room: int
    ) -> None:
        """After a turn of the scheduler: how many requests run and wait, how they gave way to others,
        and the prompt tokens that a step with decodes may take.
        """
        self._running = running
        self._waiting = waiting
        self._retractions = retractions
        self._twice = twice
        self._mixed_room = room

    def kv(self, free: int, evictable: int, referenced: int) -> None:
        """Set the token slots of the KV pool, by state."""
        self._kv = (free, evictable, referenced)

    def finished(self, f: Finished) -> None:
        """Count a request that has ended. Times that it never reached (0.0) are not observed.

        Of spare requests only the computed tokens count.
        """
        if f.spare:
            self._spare_requests["computed" if f.reason == "length" else "given up"] += 1
            if f.reason == "length":
                self.spare_tokens += f.computed
            return
        self._ends[f.reason] += 1
        self._cached += f.cached
        self._computed += f.computed
        self._replayed += f.replayed
        self._output += f.output
        if f.started:
            self._queue.observe(f.started - f.arrived)
        if f.first_token:
            self._ttft.observe(f.first_token - f.arrived)
            if f.output > 1:
                self._itl.observe((f.ended - f.first_token) / (f.output - 1))

    def sockets(self, delta: int) -> None:
        self._sockets += delta

    def sessions(self, delta: int) -> None:
        self._sessions += delta

    @property
    def store(self) -> StoreHealth:
        """The health of the store, over all processes that have sessions."""
        return joined(self._stores.values())

    def store_is(self, health: StoreHealth, number: int = 0) -> None:
        """Set the health of the store as this process, or gateway process `number`, sees it."""
        if self._stores.get(number, StoreHealth()) != health:
            self._stores[number] = health
            self.store_changed()

    def gateway(self, number: int, report: Report) -> None:
        """Set the gauges of a gateway in another process; they are added to this process' own."""
        self._gateways[number] = (report.sockets, report.sessions, report.lag, report.session_bytes)
        self._usage.setdefault(number, {}).update(report.usage)
        self._histories[number] = report.histories
        self.store_is(report.store, number)

    def gateway_ended(self, number: int) -> None:
        """A gateway process has ended: what it counted stays, its sockets do not."""
        self._gateways[number] = (0, 0, 0.0, 0)
        self.store_is(StoreHealth(), number)
        was = Counter(self._histories.get(PAST, {}))
        self._histories[PAST] = was + Counter(self._histories.pop(number, {}))
        past = self._usage.setdefault(PAST, {})
        for name, usage in self._usage.pop(number, {}).items():
            usage.sockets = 0
            past[name] = past.get(name, CredentialUsage()).plus(usage)

    def sockets_elsewhere(self, number: int) -> dict[str, int]:
        """The sockets that each credential has in other gateway processes than this one."""
        found: Counter[str] = Counter()
        for other, usages in self._usage.items():
            if other != number:
                found.update({name: usage.sockets for name, usage in usages.items() if usage.sockets})
        return dict(found)

    @property
    def open_sockets(self) -> int:
        """Open WebSockets, of all processes."""
        return self._sockets + sum(sockets for sockets, *_ in self._gateways.values())

    @property
    def live_sessions(self) -> int:
        """Live sessions, of all processes."""
        return self._sessions + sum(sessions for _, sessions, *_ in self._gateways.values())

    @property
    def session_bytes(self) -> int:
        """Bytes of the host's memory that sessions hold, of all processes."""
        return self.held() + sum(held for *_, held in self._gateways.values())

    def loop_lag(self, seconds: float) -> None:
        """Observe how late a timer of the event loop was."""
        self._lag = seconds
        self._worst_lag = max(self._worst_lag, seconds)

    @property
    def running(self) -> int:
        """Requests that run."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests that wait to run."""
        return self._waiting

    @property
    def lag(self) -> float:
        """Seconds by which the last timer of the event loop was late."""
        return self._lag

    @property
    def kv_in_use(self) -> float:
        """Part of the pool that running requests hold, 0..1."""
        total = sum(self._kv)
        return self._kv[2] / total if total else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """Share of the prompt tokens of all finished requests that were in the cache; 0.0 if none."""
        prompt = self._cached + self._computed
        return self._cached / prompt if prompt else 0.0

    def report(self, fault: str | None, load: ReplicaLoad, sessions: int) -> Report:
        """How the core of this process is, for one of its fronts."""
        free, evictable, referenced = self._kv
        return Report(
            lag=self._lag,
            sessions=sessions,
            running=self._running,
            waiting=self._waiting,
            free=free,
            evictable=evictable,
            referenced=referenced,
            fault=fault,
            load=load,
        )

    def render(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        return generate_latest(self.registry)

    def scrape(self, done: Callable[[bytes], object], /) -> None:
        """Call `done` with the text, at once. The gateway's interface (see `gateway.interfaces`)."""
        done(self.render())

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics: the interface of a Prometheus collector."""
        yield from self._gauges()
        yield from self._counters()
        for histogram in (self._ttft, self._itl, self._queue, self._step, self._plan):
            yield histogram.family()

    def _gauges(self) -> Iterator[Metric]:
        store = self.store
        for name, help, value in (
            ("requests_running", "Requests that take part in steps.", self._running),
            ("requests_waiting", "Requests that wait to run.", self._waiting),
            ("sockets", "Open WebSockets.", self.open_sockets),
            ("sessions", "Live sessions.", self.live_sessions),
            ("session_bytes", "Host memory that sessions hold, by estimate.", self.session_bytes),
            ("event_loop_lag_seconds", "How late the last timer was.", self._lag),
            ("event_loop_lag_max_seconds", "How late a timer ever was.", self._worst_lag),
            ("cache_hit_rate", "Cached share of all prompt tokens.", self.cache_hit_rate),
            ("mixed_tokens", "Prompt tokens that a step may take beside decodes.", self._mixed_room),
            (
                "store_writable",
                "1 while sessions can be saved, or need not be.",
                float(store.error is None),
            ),
            ("store_damaged_sessions", "Sessions that cannot be saved for damage.", store.damaged),
        ):
            yield GaugeMetricFamily(f"ramify_{name}", help, value=value)
        kv = GaugeMetricFamily("ramify_kv_tokens", "Token slots of the KV pool.", labels=["state"])
        for state, slots in zip(("free", "evictable", "referenced"), self._kv, strict=True):
            kv.add_metric([state], slots)
        yield kv
        yield from kv_families(self.tiers(), self._load_us * 1e-6, self.copied_s, self.canaries)
        yield from self._of_ranks()
        yield from self._owners()
        if self._gateways:
            yield from self._gateway_gauges()

    def _of_ranks(self) -> Iterator[Metric]:
        ranks = self.ranks()
        for name, help, values in (
            ("steps", "Steps that a rank was told.", [each.steps for each in ranks]),
            ("cpu_seconds", "CPU time of a rank.", [each.cpu_s for each in ranks]),
            ("behind", "Steps told that a rank has not taken.", [each.behind for each in ranks]),
            ("resident_bytes", "Host memory of a rank.", [each.resident_bytes for each in ranks]),
        ):
            counts = name in ("steps", "cpu_seconds")
            kind = CounterMetricFamily if counts else GaugeMetricFamily
            family = kind(f"ramify_rank_{name}", help, labels=["rank"])
            for rank, value in enumerate(values):
                family.add_metric([str(rank)], value)
            if ranks:
                yield family

    def _owners(self) -> Iterator[Metric]:
        """Yield the metrics by credential: as many labels as names were ever configured."""
        total: dict[str, CredentialUsage] = {}
        for usages in (self.usage(), *self._usage.values()):
            for name, usage in usages.items():
                total[name] = total.get(name, CredentialUsage()).plus(usage)
        sockets = GaugeMetricFamily("ramify_owner_sockets", "Open WebSockets.", labels=["owner"])
        received = CounterMetricFamily("ramify_owner_received_bytes", "Bytes read.", labels=["owner"])
        frames = CounterMetricFamily("ramify_owner_frames", "WebSocket frames read.", labels=["owner"])
        refused = CounterMetricFamily(
            "ramify_owner_refused_ops", "Ops over the credential's own limit.", labels=["owner"]
        )
        abuses = CounterMetricFamily("ramify_owner_abuses", "Sockets closed, 4429.", labels=["owner"])
        for name, usage in sorted(total.items()):
            abuses.add_metric([name], usage.abuses)
            sockets.add_metric([name], usage.sockets)
            received.add_metric([name], usage.received_bytes)
            frames.add_metric([name], usage.frames)
            refused.add_metric([name], usage.refused_ops)
        yield from (sockets, received, frames, refused, abuses)

    def _texts(self) -> Iterator[Metric]:
        """Yield what became of the text that requests brought."""
        total = Counter(self.histories())
        for counts in self._histories.values():
            total.update(counts)
        yield CounterMetricFamily(
            "ramify_tokenized_tokens", "Tokens that were made of text.", value=total["tokenized"]
        )
        known = {outcome: total[outcome] for outcome in ("bound", "new", "edited", "evicted")}
        about = "Stateless requests, by what was known of their history."
        yield counter("history", about, "outcome", known)

    def _gateway_gauges(self) -> Iterator[Metric]:
        for i, (name, help) in enumerate(
            (
                ("sockets", "Open WebSockets of a gateway process."),
                ("sessions", "Live sessions of a gateway process."),
                ("event_loop_lag_seconds", "How late the last timer of a gateway process was."),
                ("session_bytes", "Host memory that sessions of a gateway process hold, by estimate."),
            )
        ):
            gauge = GaugeMetricFamily(f"ramify_gateway_{name}", help, labels=["gateway"])
            for number, values in sorted(self._gateways.items()):
                gauge.add_metric([str(number)], values[i])
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        for name, help, value in (
            ("steps", "Steps that came back.", self._steps),
            ("executor_deaths", "Executors that died, and were replaced.", self._executor_deaths),
            ("executor_tokens", "Tokens that went through the model.", self._executor_tokens),
            ("sampled_tokens", "Tokens sampled, as steps come back.", self._sampled),
            ("output_tokens", "Output tokens of finished requests.", self._output),
            ("spare_tokens", "Tokens that were computed before anybody asked.", self.spare_tokens),
            ("pictures", "Pictures that the model's tower has seen.", self.pictures_seen),
            ("store_lost_sessions", "Sessions saved whole as the store lost some.", self.store.lost),
            ("replayed_tokens", "Tokens with KV, run again for the fixed state behind.", self._replayed),
            ("computed_twice_tokens", "Tokens that retractions made the model run again.", self._twice),
        ):
            yield CounterMetricFamily(f"ramify_{name}", help, value=value)
        yield from self._texts()
        about = "Prompts computed before anybody asked: saved sessions after a start, next turns."
        yield counter("spare_requests", about, "result", self._spare_requests)
        counts = self.constraints()
        if counts is not None:
            yield from counts.families()
        if self.drafter:
            for name, help, value in (
                ("draft_tokens", "Guessed tokens that went through the model.", self._drafted),
                ("accepted_draft_tokens", "Those of them that were right.", self._accepted),
            ):
                yield counter(name, help, "drafter", {self.drafter: value})
        prompts = {"cached": self._cached, "computed": self._computed}
        yield counter("prompt_tokens", "Prompt tokens of finished requests.", "source", prompts)
        causes = ("priority", "fairness", "memory", "ahead", "not finite", "executor", "lost")
        lost = {cause: self._retractions.get(cause, 0) for cause in causes}
        yield counter("retractions", "Requests that lost their row and pages.", "cause", lost)
        ends = {r: self._ends[r] for r in ("stop", "length", "cancelled", "deadline", "error")}
        yield counter("requests", "Requests that ended.", "reason", ends)


def _forced_drafts(counts: Sequence[int], forced: bytes) -> int:
    """Accepted drafts that constraints had forced: they were no guesses."""
    found = end = 0
    for count in counts:
        found += forced.count(1, end, end + max(0, count - 1))
        end += count
    return found
