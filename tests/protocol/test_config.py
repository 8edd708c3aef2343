"""Settings are refused with the flag's name; the defaults are those of the protocol page."""

from pathlib import Path

import pytest

from ramify.protocol.config import (
    EngineConfig,
    Limits,
    ModelConfig,
    ReplicasConfig,
    ScheduleConfig,
    ServerConfig,
)
from ramify.protocol.errors import ConfigError

MODEL = ModelConfig(path=Path("m"))


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (lambda: Limits(ops_per_frame=0), "--limit-ops-per-frame"),
        (lambda: Limits(queued_bytes=-1), "--limit-queued-bytes"),
        (lambda: Limits(n=1025), "--limit-n"),
        (lambda: Limits(meta_bytes=0), "--limit-meta-bytes"),
        (lambda: ModelConfig(path=Path("m"), page_size=0), "--page-size"),
        (lambda: ModelConfig(path=Path("m"), max_rows=0), "--max-rows"),
        (lambda: ModelConfig(path=Path("m"), step_tokens=15), "--step-tokens"),
        (lambda: ModelConfig(path=Path("m"), context=1), "--context"),
        (lambda: ModelConfig(path=Path("m"), page_size=8, kv_tokens=15), "--kv-tokens"),
        (lambda: ScheduleConfig(in_flight=3), "--in-flight"),
        (lambda: ScheduleConfig(mixed_tokens=15), "--mixed-tokens"),
        (lambda: ScheduleConfig(ahead_tokens=0), "--ahead-tokens"),
        (lambda: ScheduleConfig(itl_target_ms=0.5), "--itl-target-ms"),
        (lambda: ScheduleConfig(itl_target_ms=float("nan")), "--itl-target-ms"),
        (lambda: ScheduleConfig(itl_target_ms=float("inf")), "--itl-target-ms"),
        (lambda: ScheduleConfig(itl_target_ms=-1), "--itl-target-ms"),
        (lambda: ScheduleConfig(quantum_steps=0), "--quantum-steps"),
        (lambda: ScheduleConfig(lookahead=0), "--lookahead"),
        (lambda: ScheduleConfig(ageing=-0.1), "--ageing"),
        (lambda: ScheduleConfig(max_waiting=0), "--max-waiting"),
        (lambda: Limits(session_bytes=0), "--limit-session-bytes"),
        (lambda: ServerConfig(session_ttl_max_s=5), "--session-ttl-max"),
        (lambda: ServerConfig(max_sessions=0), "--max-sessions"),
        (lambda: ServerConfig(sessions_bytes=5), "--sessions-bytes"),
        (lambda: ServerConfig(port=65536), "--port"),
        (lambda: ServerConfig(port=-1), "--port"),
        (lambda: ServerConfig(host="0.0.0.0"), "--host"),
        (lambda: ServerConfig(host="::"), "--insecure"),
        (lambda: ServerConfig(host=""), "--host"),
        (lambda: ServerConfig(mcp=("shop",)), "--mcp"),
        (lambda: ServerConfig(mcp=("shop=file:///etc/passwd",)), "--mcp"),
        (lambda: ServerConfig(mcp=("Shop=http://a/mcp",)), "--mcp"),
        (lambda: ServerConfig(mcp=("shop=http://me:pw@a/mcp",)), "--mcp"),
        (lambda: ServerConfig(mcp=("shop=http://a:99999/",)), "--mcp"),
        (lambda: ServerConfig(mcp=("shop=http://a/x y",)), "--mcp"),
        (lambda: ServerConfig(mcp=("shop=http://a/", "shop=http://b/")), "--mcp names a server twice"),
        (lambda: ServerConfig(mcp=tuple(f"s{i}=http://a/" for i in range(33))), "more than 32"),
    ],
)
def test_out_of_range_names_the_flag(make, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        make()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_loopback_needs_no_auth(host: str) -> None:
    assert ServerConfig(host=host).tokens == ()


def test_other_addresses_need_auth_or_insecure() -> None:
    assert ServerConfig(host="0.0.0.0", tokens=("k",)).tokens == ("k",)
    assert ServerConfig(host="0.0.0.0", insecure=True).insecure


def test_a_name_that_only_looks_like_loopback_is_not() -> None:
    with pytest.raises(ConfigError, match="--host"):
        ServerConfig(host="127.evil.example")


def test_defaults_are_the_documented_ones() -> None:
    limits = EngineConfig(model=MODEL).limits.wire()
    assert limits["frame_bytes"] == 1 << 20
    assert limits["frame_bytes_before_open"] == 8 << 10
    assert (limits["ops_per_frame"], limits["ops_in_flight"]) == (512, 1024)
    assert (limits["ops_per_second"], limits["ops_burst"]) == (200, 1024)
    assert (limits["branches"], limits["running"], limits["n"]) == (1024, 64, 64)
    assert limits["attachments"] == 8
    assert limits["queued_bytes"] == 256 << 10
    server = ServerConfig()
    assert (server.ping_interval_s, server.ping_timeout_s, server.session_ttl_s) == (20.0, 60.0, 600.0)


@pytest.mark.parametrize("roles", ["prefill=0", "prefill=2", "prefill=", "decode=1", "prefill=1x", "x"])
def test_roles_leave_a_replica_that_continues(roles: str) -> None:
    with pytest.raises(ConfigError, match="must be prefill=K, and K less than --replicas"):
        ReplicasConfig(count=2, roles=roles)


def test_roles_need_host_memory_of_one_process() -> None:
    replicas = ReplicasConfig(count=2, roles="prefill=1")
    assert replicas.prefill == 1
    with pytest.raises(ConfigError, match="--roles does not go with --replicas-max"):
        ReplicasConfig(count=2, most=3, roles="prefill=1")
    for model, flag in (
        (ModelConfig(path=Path("m")), "--kv-host"),
        (ModelConfig(path=Path("m"), kv_host=1 << 30, tensor_parallel=2), "--tensor-parallel"),
    ):
        with pytest.raises(ConfigError, match=flag):
            EngineConfig(model=model, replicas=replicas)


def test_a_replica_has_as_many_gpus_as_ranks() -> None:
    model = ModelConfig(path=Path("m"), tensor_parallel=4)
    with pytest.raises(ConfigError, match="--replica-gpus 1: each of 4 ranks has a GPU; give 4"):
        EngineConfig(model=model, replicas=ReplicasConfig(count=2, gpus=1.0))
    EngineConfig(model=model, replicas=ReplicasConfig(count=2, gpus=4.0))
