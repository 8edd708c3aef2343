"""The socket side of a server, and the life of sessions. `settings` says how they are declared."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from ramify.protocol.credentials import CredentialLimits, check_token
from ramify.protocol.errors import ConfigError
from ramify.protocol.pictures import Origin
from ramify.protocol.settings import DAY_S, Setting, Settings, is_loopback
from ramify.protocol.store_url import kind_of
from ramify.protocol.wire import Persist

MOST_MCP = 32
MOST_ORIGINS = 256
SESSIONS_BYTES_LEAST = 1 << 20
STORE_BYTES_LEAST = 1 << 20


def _seconds(help: str, low: float = 0.0, high: float = DAY_S) -> Setting:
    return Setting(help, low=low, high=high, unit="seconds")


def _access(help: str, flag: str = "", unit: str = "") -> Setting:
    return Setting(help, flag=flag, unit=unit, group="access")


class ServerConfig(Settings, frozen=True, kw_only=True):
    """The socket side and the life of sessions."""

    GROUP: ClassVar[str] = "server"

    host: Annotated[
        str,
        Setting(
            "address to bind; other machines reach 0.0.0.0, which needs a token", unit="HOST", first=True
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Setting("port to bind; 0: any free one", low=0, high=65535, first=True)] = 8765
    max_sockets: Annotated[
        int, Setting("most WebSockets of all clients together", low=1, high=1 << 20)
    ] = 10_000
    allowed_hosts: Annotated[
        tuple[str, ...],
        Setting(
            "another name that requests may use for this server; *: any",
            flag="--allowed-host",
            unit="HOST",
        ),
    ] = ()  # beside the bound address and localhost
    allowed_origins: Annotated[
        tuple[str, ...],
        Setting("another site whose pages may connect; *: any", flag="--allowed-origin", unit="ORIGIN"),
    ] = ()  # beside pages served by this server
    proxies: Annotated[
        tuple[str, ...],
        Setting(
            "the IP address of a reverse proxy: what clients without a token may cost is limited by "
            "address, and this one stands for many",
            flag="--proxy",
            unit="ADDRESS",
        ),
    ] = ()
    mcp: Annotated[
        tuple[str, ...],
        Setting(
            "an MCP server (streamable HTTP) whose tools the chat page offers, at /v1/mcp/NAME; the "
            "variable RAMIFY_MCP_NAME_TOKEN holds its token, where it needs one",
            unit="NAME=URL",
        ),
    ] = ()
    fetch_images: Annotated[
        tuple[str, ...],
        Setting(
            "a host whose pictures are fetched where clients give their addresses, over https; else "
            "pictures are sent themselves; HOST:PORT, *.HOST: all below it, http://HOST: without TLS",
            unit="HOST",
        ),
    ] = ()
    deflate: Annotated[bool, Setting("compress frames (costs CPU)")] = False
    ping_interval_s: Annotated[float, _seconds("between WebSocket pings", 0.1)] = 20.0
    ping_timeout_s: Annotated[float, _seconds("for a pong", 0.1)] = 60.0
    grace_s: Annotated[float, _seconds("for running generations at stop")] = 10.0

    tokens: Annotated[
        tuple[str, ...], _access("a token that clients need; shows in `ps`", "--auth-token", "TOKEN")
    ] = ()  # "token-1", "token-2"; no token of any kind: no auth
    environment_token: Annotated[
        str | None,
        Setting("a token that clients need", flag=None, environment="RAMIFY_AUTH_TOKEN", group="access"),
    ] = None
    # "file"; read again at SIGHUP, as is the next one
    token_file: Annotated[
        Path | None,
        Setting(
            "a file that holds one token, which clients need; or set the variable RAMIFY_AUTH_TOKEN",
            flag="--auth-token-file",
            group="access",
            first=True,
        ),
    ] = None
    credentials_file: Annotated[
        Path | None,
        _access(
            'a token a line, as JSON: {"name", "sha256" or "token", "namespace"?, "limits"?}; files are '
            "read again at SIGHUP",
            "--auth-tokens",
        ),
    ] = None
    shared_cache: Annotated[
        bool,
        _access(
            "all tokens share what is cached (else each name has a cache of its own: a shared one tells "
            "a client which prefixes others have used)"
        ),
    ] = False
    credential_limits: CredentialLimits = CredentialLimits()  # of a name that has none of its own
    metrics_auth: Annotated[bool, _access("/metrics needs a token")] = False
    insecure: Annotated[bool, _access("serve other machines without a token")] = False
    token_ttl_s: Annotated[
        float,
        Setting(
            "that a minted single-use token is valid", low=1, high=DAY_S, unit="seconds", group="access"
        ),
    ] = 60.0

    session_ttl_s: Annotated[
        float,
        Setting(
            "that a session without clients is kept",
            low=0,
            high=30 * DAY_S,
            unit="seconds",
            group="sessions",
        ),
    ] = 600.0
    session_ttl_max_s: Annotated[
        float,
        Setting(
            "that a client may ask for instead, --session-ttl or more",
            low=0,
            high=365 * DAY_S,
            unit="seconds",
            group="sessions",
        ),
    ] = 86400.0
    max_sessions: Annotated[
        int, Setting("most sessions at a time", low=1, high=1 << 26, group="sessions")
    ] = 16384
    sessions_bytes: Annotated[
        int,
        Setting(
            "host memory that all sessions may hold",
            low=SESSIONS_BYTES_LEAST,
            high=1 << 50,
            unit="bytes",
            group="sessions",
        ),
    ] = 1 << 32
    # a file or a URL; None: sessions end with the process
    store: Annotated[
        str | None,
        Setting(
            "where sessions are saved, so that they outlive the server; a file, or postgresql://... or "
            "redis://..., which several servers may share; none: nowhere; auto: what the variable "
            "RAMIFY_STORE says, else ramify/sessions-PORT.db in $XDG_STATE_HOME or ~/.local/state, none "
            "if the port is 0",
            words={"none": None},
            default="auto",
            unit="PLACE",
            first=True,
            environment="RAMIFY_STORE",
            group="sessions",
        ),
    ] = None
    store_key_file: Annotated[
        Path | None,
        Setting(
            "encrypt what is saved: a key of 32 bytes in base64 on each line (`openssl rand -base64 "
            "32`); the first one encrypts, all decrypt",
            group="sessions",
        ),
    ] = None
    persist: Annotated[
        Persist,
        Setting(
            "how sessions are saved, where a client does not say; none: not at all; lazy: soon; sync: "
            "before a reply says that it is done",
            group="sessions",
        ),
    ] = "lazy"
    persist_histories: Annotated[
        bool, Setting("save texts and tokens of stateless requests, too, for a day", group="sessions")
    ] = False
    store_days: Annotated[
        float,
        Setting(
            "how long after its last use a session is kept",
            over=0,
            high=36_500,
            unit="days",
            group="sessions",
        ),
    ] = 30.0
    store_bytes: Annotated[
        int,
        Setting(
            "most bytes of sessions there; beyond them, the name with most loses its longest unused",
            low=STORE_BYTES_LEAST,
            high=1 << 50,
            unit="bytes",
            group="sessions",
        ),
    ] = 1 << 33
    warm_start: Annotated[
        int | None,
        Setting(
            "tokens of saved sessions to compute after the start, the last used first, while there is "
            "nothing else to do, so that who comes back does not wait; none; auto: what free pages hold",
            low=0,
            high=1 << 40,
            words={"auto": None, "none": 0},
            default="auto",
            group="sessions",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for token in self.tokens:
            check_token(token, "--auth-token")
        if self.environment_token is not None:
            check_token(self.environment_token, "RAMIFY_AUTH_TOKEN")
        for flag, names in (("host", self.allowed_hosts), ("origin", self.allowed_origins)):
            if not all(names):
                raise ConfigError(f"--allowed-{flag} is empty: is a variable not set?")
        for address in self.proxies:
            try:
                ipaddress.ip_address(address)
            except ValueError:
                raise ConfigError(f"--proxy is {address!r}: must be an IP address") from None
        for each in self.fetch_images[:MOST_ORIGINS]:
            Origin.of(each)
        if len(self.fetch_images) > MOST_ORIGINS:
            raise ConfigError(f"--fetch-images is given more than {MOST_ORIGINS} times")
        for each in self.mcp:
            _check_mcp(each)
        if len(self.mcp) > MOST_MCP or len(self.mcp_servers) < len(self.mcp):
            raise ConfigError(f"--mcp names a server twice, or more than {MOST_MCP}")
        if self.metrics_auth and not self.guarded:
            raise ConfigError(
                "--metrics-auth needs tokens: give --auth-tokens, --auth-token-file or --auth-token"
            )
        if not (is_loopback(self.host) or self.guarded or self.insecure):
            raise ConfigError(
                f"--host {self.host} is reachable from other machines: give --auth-token, "
                "--auth-token-file or --auth-tokens, or --insecure to serve anybody"
            )
        if self.session_ttl_max_s < self.session_ttl_s:
            raise ConfigError(
                f"--session-ttl-max is {self.session_ttl_max_s:g}: must be {self.session_ttl_s:g} (what "
                f"--session-ttl is) to {365 * DAY_S:.0f} seconds"
            )
        if self.store is not None:
            kind_of(self.store)
        elif self.store_key_file is not None:
            raise ConfigError("--store-key-file needs a store: give --store")

    @property
    def mcp_servers(self) -> dict[str, str]:
        """The URL of each MCP server by its name."""
        return dict(each.split("=", 1) for each in self.mcp)

    @property
    def guarded(self) -> bool:
        """True if clients need a token."""
        files = self.token_file is not None or self.credentials_file is not None
        return bool(self.tokens) or self.environment_token is not None or files


def _check_mcp(value: str) -> None:
    """Raises ConfigError. Names are parts of paths, of variables and of tools."""
    name, _, url = value.partition("=")
    try:
        place = urlsplit(url)
        known = place.scheme in ("http", "https") and bool(place.hostname) and place.port != 0
    except ValueError:
        known = False
    known = known and "@" not in url
    if not (known and re.fullmatch(r"[a-z0-9_]{1,32}", name) and re.fullmatch(r"[!-~]{1,2048}", url)):
        raise ConfigError(
            f"--mcp is {value[:200]!r}: must be NAME=URL, as shop=http://127.0.0.1:9000/mcp, without a "
            "user; NAME has 1 to 32 of a-z, 0-9 and _"
        )
