"""Flags become an EngineConfig; what is wrong is named by its flag."""

import argparse
from pathlib import Path

import pytest

from ramify.clients.cli import build_parser
from ramify.clients.commands import settings
from ramify.protocol.config import EngineConfig, Limits, ModelConfig
from ramify.protocol.errors import ConfigError


def config(*flags: str) -> EngineConfig:
    args: argparse.Namespace = build_parser().parse_args(["serve", "--model", "m", *flags])
    return settings.engine_config(args)


def test_the_defaults_are_those_of_the_settings() -> None:
    assert config() == EngineConfig(model=ModelConfig(path=Path("m")))


def test_every_flag() -> None:
    made = config(
        *[
            "--host",
            "0.0.0.0",
            "--port",
            "0",
            "--auth-token",
            "a",
            "--auth-token",
            "b",
            "--allowed-host",
            "h",
        ],
        *[
            "--allowed-origin",
            "http://o",
            "--deflate",
            "--session-ttl",
            "5",
            "--grace",
            "2",
            "--token-ttl",
            "9",
        ],
        *[
            "--ping-interval",
            "3",
            "--ping-timeout",
            "4",
            "--device",
            "cpu",
            "--dtype",
            "float32",
            "--context",
            "64",
        ],
        *[
            "--page-size",
            "4",
            "--kv-tokens",
            "999",
            "--max-rows",
            "7",
            "--step-tokens",
            "32",
            "--threads",
            "1",
            "--name",
            "n",
        ],
        *[
            "--executor",
            "process",
            "--in-flight",
            "1",
            "--lookahead",
            "2",
            "--ageing",
            "0.5",
            "--max-waiting",
            "8",
            "--mixed-tokens",
            "24",
            "--itl-target-ms",
            "12.5",
            "--quantum-steps",
            "9",
            "--ahead-tokens",
            "16",
        ],
    )
    server, model = made.server, made.model
    assert (server.host, server.port, server.tokens) == ("0.0.0.0", 0, ("a", "b"))
    assert (server.allowed_hosts, server.allowed_origins) == (("h",), ("http://o",))
    assert (server.session_ttl_s, server.grace_s, server.token_ttl_s) == (5, 2, 9)
    assert (server.ping_interval_s, server.ping_timeout_s, server.deflate) == (3, 4, True)
    assert (model.device, model.dtype, model.context, model.page_size) == ("cpu", "float32", 64, 4)
    assert (model.kv_tokens, model.max_rows, model.step_tokens) == (999, 7, 32)
    assert (model.threads, model.name, made.executor) == (1, "n", "process")
    assert (made.schedule.in_flight, made.schedule.lookahead) == (1, 2)
    assert (made.schedule.ageing, made.schedule.max_waiting) == (0.5, 8)
    assert (made.schedule.mixed_tokens, made.schedule.ahead_tokens) == (24, 16)
    assert (made.schedule.itl_target_ms, made.schedule.quantum_steps) == (12.5, 9)


@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_every_limit_is_a_flag(name: str) -> None:
    flag = f"--limit-{name.replace('_', '-')}"
    assert getattr(config(flag, "77").limits, name) == 77
    with pytest.raises(ConfigError, match=flag):
        config(flag, "0")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--host 0.0.0.0", "--auth-token"),
        ("--port 70000", "--port"),
        ("--page-size 0", "--page-size"),
        ("--in-flight 3", "--in-flight"),
    ],
)
def test_wrong_settings(flags: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config(*flags.split())


def test_without_a_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "files", lambda package: tmp_path)
    with pytest.raises(ConfigError, match="--model DIR"):
        settings.bundled_model()
    (tmp_path / "default_model").mkdir()
    (tmp_path / "default_model" / "config.json").write_text("{}")
    assert settings.bundled_model() == tmp_path / "default_model"
