"""Kinds of metrics: histograms, counts of constraints, labelled counters, and what KV is where."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from ramify.actors.kit.report import KvTier

# Upper bounds in seconds. Latencies that a user feels; steps of a device; planning on the host.
LATENCY = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60)


STEP = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)


PLAN = (2e-5, 5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)


class Histogram:
    """Counts by bucket and a sum. `bounds`: inclusive upper bounds, ascending, in seconds."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = help
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def family(self) -> HistogramMetricFamily:
        """Prometheus' form: cumulative buckets."""
        buckets = []
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return HistogramMetricFamily(self.name, self.help, buckets=buckets, sum_value=self._sum)


@dataclass(slots=True)
class ConstraintCounts:
    """Constraints that clients asked for, since the start, by how their compilation ended.

    `seconds`: of compile workers. `kept`, `kept_bytes`: constraints that requests may name now, and
    their memory in the executor. `waiting`: to be compiled.
    """

    results: dict[str, int]
    seconds: float
    waiting: int
    kept: int
    kept_bytes: int

    def families(self) -> Iterator[Metric]:
        yield counter("constraints", "Constraints that were asked for.", "result", self.results)
        yield CounterMetricFamily(
            "ramify_constraint_compile_seconds", "Time of compile workers.", value=self.seconds
        )
        for name, help, value in (
            ("constraints_waiting", "Constraints that wait to be compiled.", self.waiting),
            ("constraints_kept", "Constraints that requests may name.", self.kept),
            ("constraints_kept_bytes", "Their memory where they are followed.", self.kept_bytes),
        ):
            yield GaugeMetricFamily(f"ramify_{name}", help, value=value)


def counter(name: str, about: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    """A counter with one label."""
    family = CounterMetricFamily(f"ramify_{name}", about, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def kv_families(
    tiers: Iterable[KvTier], host_s: float, peer_s: float, canaries: Mapping[str, int]
) -> Iterator[Metric]:
    """What KV is where. `host_s`, `peer_s`: in which blocks were moved to and from host memory, and came
    from other replicas. `canaries`: blocks that were compared, by result.
    """
    blocks = GaugeMetricFamily("ramify_kv_blocks", "Blocks of 64 tokens with KV.", labels=["tier"])
    held = GaugeMetricFamily("ramify_kv_bytes", "Bytes of KV that is kept.", labels=["tier"])
    hits = CounterMetricFamily(
        "ramify_kv_hit_tokens", "Tokens whose KV requests found.", labels=["tier"]
    )
    loads = CounterMetricFamily(
        "ramify_kv_load_seconds", "Time in which KV was moved to and from it.", labels=["tier"]
    )
    paces = GaugeMetricFamily(
        "ramify_kv_block_seconds", "Time that one block takes now.", labels=["tier", "op"]
    )
    slow = GaugeMetricFamily(
        "ramify_kv_slow", "1 while a block takes longer than computing it.", labels=["tier"]
    )
    for each in tiers:
        blocks.add_metric([each.tier], each.blocks)
        held.add_metric([each.tier], each.bytes)
        hits.add_metric([each.tier], each.hit_tokens)
        if each.load_s is not None:
            loads.add_metric([each.tier], each.load_s)
            slow.add_metric([each.tier], float(each.slow))
        for op, seconds in (("read", each.read_s), ("write", each.write_s)):
            if seconds:
                paces.add_metric([each.tier, op], seconds)
    loads.add_metric(["host"], host_s)
    loads.add_metric(["peer"], peer_s)
    compared = CounterMetricFamily(
        "ramify_kv_canary", "Blocks of KV that were compared with computing.", labels=["result"]
    )
    for result, count in canaries.items():
        compared.add_metric([result], count)
    yield from (blocks, held, hits, loads, paces, slow, compared)
