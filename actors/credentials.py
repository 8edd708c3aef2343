"""Reads the tokens that a server accepts, at its start and again at SIGHUP.

Files, not the format of a line: that is `protocol.credentials`.
"""

from pathlib import Path

from ramify.actors.kit.files import read_secret_file
from ramify.protocol.config import ServerConfig
from ramify.protocol.credentials import Credential, agree, check_token, named, parse_credentials
from ramify.protocol.errors import ConfigError

MOST_BYTES = 4 << 20  # of a file


def read_credentials(config: ServerConfig) -> list[Credential]:
    """All accepted tokens, none where the server asks for none. Raises ConfigError.

    A server that was started with tokens never ends up without: files that hold none are refused.
    """
    shared, limits = config.shared_cache, config.credential_limits
    sources = [(f"token-{i}", token) for i, token in enumerate(config.tokens, 1)]
    if config.environment_token is not None:
        sources.append(("environment", config.environment_token))
    if config.token_file is not None:
        sources.append(("file", _one_token(config.token_file)))
    found = [named(name, token, shared=shared, limits=limits) for name, token in sources]
    if config.credentials_file is not None:
        path = config.credentials_file
        found += parse_credentials(_read(path, "--auth-tokens"), str(path), shared=shared, limits=limits)
    agree(found, "the tokens given")
    if config.guarded and not found:
        raise ConfigError(f"--auth-tokens {config.credentials_file} holds no token: add one")
    return found


def _one_token(path: Path) -> str:
    lines = _read(path, "--auth-token-file").splitlines()
    if len(lines) > 1:
        raise ConfigError(
            f"--auth-token-file {path} has {len(lines)} lines: it holds one token; several, with a name "
            "each, go into a file for --auth-tokens"
        )
    return check_token(lines[0] if lines else "", f"--auth-token-file {path}")


def _read(path: Path, flag: str) -> str:
    try:
        return read_secret_file(path, MOST_BYTES, flag).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path} is not UTF-8") from None
