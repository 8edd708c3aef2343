"""Flags become an EngineConfig; what is wrong is named by its flag."""

import argparse
from pathlib import Path

import pytest

from ramify.clients.cli import build_parser
from ramify.clients.commands import settings
from ramify.protocol.config import EngineConfig, Limits, ModelConfig
from ramify.protocol.errors import ConfigError

PARSER = build_parser()  # which takes longer to make than most that is asked of it


def config(*flags: str) -> EngineConfig:
    args: argparse.Namespace = PARSER.parse_args(["serve", "--model", "m", *flags])
    return settings.engine_config(args)


def test_the_defaults_are_those_of_the_settings() -> None:
    assert config("--store", "none") == EngineConfig(model=ModelConfig(path=Path("m")))


def test_where_sessions_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert config().server.store == "/state/ramify/sessions-8765.db"
    assert config("--port", "9000").server.store == "/state/ramify/sessions-9000.db"
    assert config("--port", "0").server.store is None
    assert config("--port", "0", "--store", "x.db").server.store == "x.db"
    monkeypatch.setenv("RAMIFY_STORE", "redis://h/1")
    assert config("--port", "0").server.store == "redis://h/1"
    assert config("--store", "x.db").server.store == "x.db"
    with pytest.raises(ConfigError, match=r"--store begins with 'ftp://': .*redis://"):
        config("--store", "ftp://h/1")
    assert config("--store-key-file", "k").server.store_key_file == Path("k")
    with pytest.raises(ConfigError, match="--store-key-file needs a store"):
        config("--store", "none", "--store-key-file", "k")


def test_servers_that_tests_start_save_nothing_in_the_users_home(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    store = config("--port", "9000").server.store
    assert store is not None
    assert Path(store).is_relative_to(tmp_path_factory.getbasetemp())


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
            "--proxy",
            "10.0.0.9",
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
    assert server.proxies == ("10.0.0.9",)
    assert (server.session_ttl_s, server.grace_s, server.token_ttl_s) == (5, 2, 9)
    assert (server.ping_interval_s, server.ping_timeout_s, server.deflate) == (3, 4, True)
    assert (model.device, model.dtype, model.context, model.page_size) == ("cpu", "float32", 64, 4)
    assert (model.kv_tokens, model.max_rows, model.step_tokens) == (999, 7, 32)
    assert (model.threads, model.name, made.executor) == (1, "n", "process")
    assert (made.schedule.in_flight, made.schedule.lookahead) == (1, 2)
    assert (made.schedule.ageing, made.schedule.max_waiting) == (0.5, 8)
    assert (made.schedule.mixed_tokens, made.schedule.ahead_tokens) == (24, 16)
    assert (made.schedule.itl_target_ms, made.schedule.quantum_steps) == (12.5, 9)


def test_how_tool_calls_are_written() -> None:
    assert config().model.tool_parser == "auto"
    assert config("--tool-parser", "llama3").model.tool_parser == "llama3"
    with pytest.raises(SystemExit):
        config("--tool-parser", "gpt")


def test_what_compiles_regexes() -> None:
    assert config().model.grammar_backend == "auto"
    assert config("--grammar-backend", "outlines").model.grammar_backend == "outlines"
    with pytest.raises(SystemExit):
        config("--grammar-backend", "xgrammar")


@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_every_limit_is_a_flag(name: str) -> None:
    flag = f"--limit-{name.replace('_', '-')}"
    value, wrong = ("-3", "9") if name == "priority" else ("77", "0")
    assert getattr(config(flag, value).limits, name) == int(value)
    with pytest.raises(ConfigError, match=flag):
        config(flag, wrong)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--host 0.0.0.0", "--auth-token"),
        ("--port 70000", "--port"),
        ("--page-size 0", "--page-size"),
        ("--in-flight 3", "--in-flight"),
        ("--auth-token=", "--auth-token is empty: is a variable not set"),
        ("--host 0.0.0.0 --auth-token=", "--auth-token is empty"),
        ("--allowed-host=", "--allowed-host is empty"),
        ("--allowed-origin=", "--allowed-origin is empty"),
        ("--proxy nginx", "--proxy is 'nginx': must be an IP address"),
        ("--metrics-auth", "--metrics-auth needs tokens"),
        ("--session-ttl=-1", "--session-ttl is -1: must be 0 to"),
        ("--ping-interval 0", "--ping-interval is 0: must be 0.1 to"),
        ("--threads 0", "--threads is 0: must be 1 to 4096"),
        ("--replicas-on ray", "--replicas-on ray does nothing without --replicas N"),
        ("--replicas-max 3", "--replicas-max does nothing without --replicas N"),
        ("--ray-address auto", "--ray-address does nothing without --replicas N"),
        ("--replica-secret-file f", "--replica-secret-file does nothing without --replicas N"),
        ("--replicas 2 --replica-listen h:70000", "--replica-listen has port 70000"),
    ],
)
def test_wrong_settings(flags: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config(*flags.split())


NUMBERS = [
    (action.option_strings[0], action.type)
    for action in PARSER._subparsers._group_actions[0].choices["serve"]._actions  # type: ignore
    if action.type in (int, float)
]
ZERO = (  # which may be 0
    "--port",
    "--session-ttl",
    "--grace",
    "--gateways",
    "--replica-drain",
    "--replica-gpus",
    "--replica-cpus",
    "--ageing",
    "--itl-target-ms",
    "--kv-host",  # none
    "--kv-canary",  # none is compared
    "--window-tokens",  # layers with a window keep all
    "--retain-share",  # nothing is retained
    "--retain-leases",
)
SIGNED = ("--limit-priority", "--credential-priority")  # which may be negative, too


def test_all_numbers_are_found() -> None:
    assert {flag for flag, _ in NUMBERS} >= {"--threads", "--kv-fraction", "--step-timeout"}
    assert len(NUMBERS) > 40


@pytest.mark.parametrize("value", ["-1", "0", "1" + "0" * 40, "nan", "inf", "-inf"])
@pytest.mark.parametrize(("flag", "kind"), NUMBERS)
def test_no_number_is_taken_that_means_nothing(
    flag: str, kind: type, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Negative, 0, huge, or no number: refused before anything starts, by the flag's name."""
    if (value == "0" and flag in ZERO) or (value in ("0", "-1") and flag in SIGNED):
        config(f"{flag}={value}")
        return
    try:
        with pytest.raises(ConfigError, match=rf"{flag}\b"):
            config(f"{flag}={value}")
    except SystemExit:  # argparse knows that it is no integer
        assert kind is int
        assert flag in capsys.readouterr().err


def test_tokens_from_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not config().server.guarded
    monkeypatch.setenv("RAMIFY_AUTH_TOKEN", "secret")
    made = config(
        "--auth-token-file", "one", "--auth-tokens", "many", "--shared-cache", "--metrics-auth"
    )
    assert made.server.environment_token == "secret"
    assert (made.server.token_file, made.server.credentials_file) == (Path("one"), Path("many"))
    assert made.server.guarded
    assert made.server.shared_cache
    assert made.server.metrics_auth
    assert config("--host", "0.0.0.0").server.guarded  # the variable is enough
    limited = config("--credential-sockets", "7", "--max-sockets", "9", "--step-timeout", "30")
    assert (limited.server.credential_limits.sockets, limited.server.max_sockets) == (7, 9)
    assert limited.step_timeout_s == 30
    monkeypatch.setenv("RAMIFY_AUTH_TOKEN", "")
    with pytest.raises(ConfigError, match="RAMIFY_AUTH_TOKEN is empty: is a variable not set"):
        config()


def test_without_a_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "files", lambda package: tmp_path)
    with pytest.raises(ConfigError, match="--model DIR"):
        settings.bundled_model()
    (tmp_path / "default_model").mkdir()
    (tmp_path / "default_model" / "config.json").write_text("{}")
    assert settings.bundled_model() == tmp_path / "default_model"
