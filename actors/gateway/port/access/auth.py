"""Who may connect: bearer tokens, minted single-use tokens, Host and Origin checks.

Pure: time is an argument. This file does not know HTTP or WebSockets; it is handed header values.

A browser sends no `Authorization` header with a WebSocket, so a page mints a token with
`POST /v1/tokens` and offers it as the subprotocol `ramify.bearer.<base64url>` or in `open.token`.
Host and Origin are checked against DNS rebinding and cross-site WebSocket hijacking: a page of
another site can reach a server on this machine, but it cannot forge either header.
"""

import base64
import binascii
import ipaddress
import secrets
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

import msgspec

from ramify.actors.gateway.port.access.minted import Minted, OwnMinted
from ramify.protocol.codec import BEARER_PREFIX
from ramify.protocol.credentials import Credential, digest_of
from ramify.protocol.errors import Overloaded

MINTED_MAX = 10_000  # minted tokens that are neither used nor expired; each name has its part of them
LEAST_MINTED = 4  # that a name has in any case
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARDS = frozenset({"", "0.0.0.0", "::"})
_PORT_DIGITS = 5
_DEFAULT_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}


class AccessTokens:
    """The bearer tokens that a server accepts. `required` is False where it was started without any.

    Tokens are looked up by their hash. That the look-up takes no constant time tells nothing: nobody
    can choose a token so that its hash begins as another one's.
    `minted`: where single-use tokens are kept, if other processes use them too.
    """

    def __init__(
        self, accepted: Iterable[Credential], ttl_s: float, minted: Minted | None = None
    ) -> None:
        self._minted: Minted = minted if minted is not None else OwnMinted(MINTED_MAX)
        self.ttl_s = ttl_s
        self.replace(accepted)
        self.required = bool(self._accepted)

    def replace(self, accepted: Iterable[Credential]) -> None:
        """Accept these tokens from now on, and no others."""
        self._accepted = {one.digest: one for one in accepted}
        self._by_name = {one.name: one for one in self._accepted.values()}

    def configured(self, token: str) -> Credential | None:
        """Find the credential of a token that the server was configured with (these may mint)."""
        return self._accepted.get(digest_of(token))

    def accepts(self, token: str | None, now: float) -> bool:
        """Whether `admit` would accept the token now. Uses nothing up."""
        if not token:
            return False
        digest = digest_of(token)
        return digest in self._accepted or self._minted.holds(digest, now)

    def admit(self, token: str, now: float) -> Credential | None:
        """Find the credential that opens a connection with the token now; None: the token is refused.

        A minted token is used up by this, and stands for whoever minted it: without a digest.
        """
        found = self.configured(token)
        if found is None:
            minter = self._by_name.get(self._minted.take(digest_of(token), now) or "")
            found = minter and msgspec.structs.replace(minter, digest=b"")
        return found

    def current(self, held: Credential) -> Credential | None:
        """Find a socket's credential as it is configured now; None if it was taken away."""
        found = self._accepted.get(held.digest) if held.digest else self._by_name.get(held.name)
        if found is None or found.name != held.name:
            return None
        return found if held.digest else msgspec.structs.replace(found, digest=b"")

    def mint(self, minter: Credential, now: float) -> str:
        """Mint a token for one connection within `ttl_s`. Raises Overloaded if too many are unused."""
        token = "t_" + secrets.token_urlsafe(24)
        most = max(LEAST_MINTED, MINTED_MAX // len(self._by_name))
        if not self._minted.add(digest_of(token), minter.name, now + self.ttl_s, now, most):
            raise Overloaded(
                f"{most} minted tokens of {minter.name!r} are unused: wait until they expire",
                retry_ms=int(self.ttl_s * 1000),
            )
        return token


def bearer_header(value: str | None) -> str | None:
    """Read the token of an `Authorization` header; None without a header, "" if it holds no bearer."""
    if value is None:
        return None
    scheme, _, token = value.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def shown_token(headers: Mapping[str, str]) -> str | None:
    """Read the token that an API's client shows: a bearer, or as Anthropic's clients do."""
    return bearer_header(headers.get("authorization")) or headers.get("x-api-key")


def bearer_subprotocol(offered: Iterable[str]) -> str | None:
    """Read the token among the subprotocols offered; None if there is none, "" if it is malformed."""
    for name in offered:
        if name.startswith(BEARER_PREFIX):
            text = name[len(BEARER_PREFIX) :]
            try:
                padded = text + "=" * (-len(text) % 4)
                return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                return ""
    return None


class HostPolicy:
    """Which `Host` and `Origin` values are answered.

    `host`, `port`: what the server is bound to. `hosts` entries are `name` (any port) or
    `name:port`, `origins` entries `scheme://name[:port]`; `*` allows everything. A server bound
    to all interfaces also answers to IP addresses, whatever they are: rebinding needs a name.
    """

    def __init__(self, host: str, port: int, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self._port = port
        self._names = _LOCAL | {host.lower()}
        self._any_address = host in _WILDCARDS
        self._hosts = {entry.lower() for entry in hosts}
        self._origins = {entry.lower().rstrip("/") for entry in origins}

    def host_allowed(self, header: str | None) -> bool:
        """True if the `Host` header names this server."""
        if header is None:
            return False
        if "*" in self._hosts:
            return True
        split = split_host(header)
        if split is None:
            return False
        name, port = split
        bracketed = f"[{name}]" if ":" in name else name
        if {name, bracketed, f"{bracketed}:{port}"} & self._hosts:
            return True
        if self._any_address and _is_address(name):
            return True
        return name in self._names and port in (None, self._port)

    def origin_allowed(self, origin: str | None, host: str | None) -> bool:
        """True without an Origin (not a browser), for this server's own pages, or if listed."""
        if origin is None or "*" in self._origins or origin.lower() in self._origins:
            return True
        try:
            parts = urlsplit(origin.lower())
            theirs = (parts.hostname, parts.port or _DEFAULT_PORTS.get(parts.scheme))
        except ValueError:
            return False
        split = split_host(host or "")
        if split is None or parts.hostname is None:
            return False
        name, port = split
        return theirs == (name, port or _DEFAULT_PORTS.get(parts.scheme))


def split_host(header: str) -> tuple[str, int | None] | None:
    """Split a `Host` header into lower-case name without brackets, and port; None if malformed."""
    text = header.strip().lower()
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            return None
        port = rest[1:]
    else:
        name, _, port = text.partition(":")
    if not name or (port and not (port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS)):
        return None
    return name, int(port) if port else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
