"""One text of the front's metrics and those of its replicas."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from ramify.actors.cluster.metrics import ClusterMetrics, ReplicaGauges, joined
from ramify.actors.kit.metrics import Metrics
from ramify.actors.kit.report import Report
from ramify.protocol.messages import Finished


def gauges() -> list[ReplicaGauges]:
    report = Report(running=2, waiting=1, free=50, evictable=25, referenced=25)
    return [ReplicaGauges(0, "ready", 3, report), ReplicaGauges(2, "draining", 1, report)]


def test_the_front_shows_its_own_and_where_the_replicas_are() -> None:
    metrics = ClusterMetrics()
    metrics.watch(gauges, lambda told: 0)
    metrics.sockets(4)
    assert (metrics.running, metrics.waiting, metrics.kv_in_use) == (4, 2, 0.25)
    texts: list[bytes] = []

    async def scrape() -> None:
        metrics.scrape(texts.append)

    asyncio.run(scrape())
    text = texts[0].decode()
    assert "ramify_sockets 4.0" in text
    assert 'ramify_replica_state{replica="2",state="draining"} 1.0' in text
    assert 'ramify_replica_sessions{replica="0"} 3.0' in text
    assert "ramify_steps" not in text


def test_each_sample_of_a_replica_has_its_number() -> None:
    replica = Metrics()
    replica.finished(Finished(1, "stop", 3, 2, 0, 2, 1.0, 2.0, 3.0, 4.0))
    front = ClusterMetrics()
    text = joined(front.render(), {0: replica.render(), 1: Metrics().render()}).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = families["ramify_requests"].samples
    ends = {(s.labels["replica"], s.labels["reason"]): s.value for s in samples}
    assert ends["0", "stop"] == 1.0
    assert ends["1", "stop"] == 0.0
    assert {s.labels["replica"] for s in families["ramify_ttft_seconds"].samples} == {"0", "1"}
    assert [s.labels for s in families["ramify_sockets"].samples] == [{}]
    lag = families["ramify_replica_event_loop_lag_seconds"].samples
    assert [s.labels for s in lag] == [{"replica": "0"}, {"replica": "1"}]
    assert text.count("# TYPE ramify_requests_total") == 1


def test_a_text_that_cannot_be_read_is_left_out() -> None:
    text = joined(b"", {0: Metrics().render(), 1: b"\xff", 2: b'a{b="', 3: b"ramify_steps x"})
    assert b'ramify_steps_total{replica="0"} 0.0' in text
    assert b'replica="1"' not in text
    assert b'replica="3"' not in text


def test_a_replica_that_says_nothing_is_left_out() -> None:
    metrics = ClusterMetrics()
    metrics.watch(gauges, lambda told: (told(0, Metrics().render()), 2)[1])

    async def scrape() -> bytes:
        text: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        metrics.scrape(text.set_result)
        return await text

    assert b'ramify_steps_total{replica="0"} 0.0' in asyncio.run(scrape())
