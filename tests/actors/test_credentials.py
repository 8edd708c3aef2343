"""Where tokens come from: flags, a variable, two kinds of files."""

import json
from pathlib import Path

import pytest

from ramify.actors.credentials import read_credentials
from ramify.protocol.config import ServerConfig
from ramify.protocol.credentials import CredentialLimits, digest_of
from ramify.protocol.errors import ConfigError


def write(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


def test_every_source_has_names(tmp_path: Path) -> None:
    one = write(tmp_path / "one", "from a file\n")
    lines = write(tmp_path / "lines", json.dumps({"name": "alice", "token": "line"}))
    limits = CredentialLimits(sockets=3)
    config = ServerConfig(
        tokens=("first", "second"),
        environment_token="variable",
        token_file=one,
        credentials_file=lines,
        credential_limits=limits,
    )
    found = read_credentials(config)
    assert [(c.name, c.digest) for c in found] == [
        ("token-1", digest_of("first")),
        ("token-2", digest_of("second")),
        ("environment", digest_of("variable")),
        ("file", digest_of("from a file")),
        ("alice", digest_of("line")),
    ]
    assert {c.limits for c in found} == {limits}
    assert [c.namespace for c in found] == [c.name for c in found]


def test_without_tokens() -> None:
    assert read_credentials(ServerConfig()) == []
    shared = read_credentials(ServerConfig(tokens=("a", "b"), shared_cache=True))
    assert {c.namespace for c in shared} == {""}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--auth-token-file .* is empty: is a variable not set"),
        ("\n", "is empty"),
        ("a\nb\n", "has 2 lines: .* --auth-tokens"),
        (b"\xff", "is not UTF-8"),
    ],
)
def test_wrong_token_files(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_credentials(ServerConfig(token_file=write(tmp_path / "t", text)))


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--auth-token-file .* cannot be read: No such file"):
        read_credentials(ServerConfig(token_file=tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"--auth-tokens .* cannot be read"):
        read_credentials(ServerConfig(credentials_file=tmp_path))
    with pytest.raises(ConfigError, match="holds no token"):
        read_credentials(ServerConfig(credentials_file=write(tmp_path / "c", "# nobody\n")))
    monkeypatch.setattr("ramify.actors.credentials.MOST_BYTES", 10)
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        read_credentials(ServerConfig(credentials_file=write(tmp_path / "c", " " * 11)))


def test_a_token_of_two_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'token-1' and 'file' have the same token"):
        read_credentials(ServerConfig(tokens=("same",), token_file=write(tmp_path / "t", "same")))


def test_who_may_read_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read_credentials(ServerConfig(token_file=write(tmp_path / "t", "x", 0o600)))
    assert not caplog.records
    read_credentials(ServerConfig(token_file=write(tmp_path / "t", "x", 0o640)))
    (record,) = caplog.records
    assert "chmod 600" in record.getMessage()
