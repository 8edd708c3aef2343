"""Tokens, Host and Origin rules: tables."""

import base64

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.gateway.port.access import auth
from ramify.actors.gateway.port.access.auth import (
    AccessTokens,
    HostPolicy,
    bearer_header,
    bearer_subprotocol,
    split_host,
)
from ramify.protocol.credentials import Credential, CredentialLimits, named
from ramify.protocol.errors import Overloaded


def accepted(*names: str) -> list[Credential]:
    """Each name's token is its name and "-secret"."""
    none = CredentialLimits()
    return [named(name, f"{name}-secret", shared=False, limits=none) for name in names]


def test_minted_tokens_work_once_and_expire() -> None:
    tokens = AccessTokens(accepted("a", "b"), ttl_s=60)
    minter = tokens.configured("b-secret")
    assert minter is not None
    first, second = tokens.mint(minter, 0.0), tokens.mint(minter, 0.0)
    assert first != second
    opened = tokens.admit(first, 59.9)
    assert opened is not None
    assert (opened.name, opened.namespace, opened.digest) == ("b", "b", b"")  # it stands for its minter
    assert not tokens.admit(first, 59.9)
    assert not tokens.admit(second, 60.0)
    assert not tokens.configured(tokens.mint(minter, 61.0))
    for _ in range(2):
        held = tokens.admit("a-secret", 0.0)
        assert held is not None
        assert held.name == "a"
    assert not tokens.admit("", 0.0)
    assert not tokens.admit("sécret\udc00", 0.0)  # any str, even one that is not Unicode


def test_minting_is_bounded_and_forgets_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MINTED_MAX", 3)
    (minter,) = accepted("a")
    tokens = AccessTokens([minter], ttl_s=60)
    for _ in range(3):
        tokens.mint(minter, 0.0)
    with pytest.raises(Overloaded) as full:
        tokens.mint(minter, 59.0)
    assert full.value.retry_ms == 60_000
    assert tokens.mint(minter, 60.0)


def test_without_tokens_none_is_required() -> None:
    assert not AccessTokens([], ttl_s=1).required
    assert AccessTokens(accepted("x"), ttl_s=1).required


def test_replaced_tokens() -> None:
    """What a socket holds is still good if its token is; a minted one if its minter's name is."""
    a, b = accepted("a", "b")
    tokens = AccessTokens([a, b], ttl_s=60)
    minted = tokens.admit(tokens.mint(b, 0.0), 1.0)
    assert minted is not None
    late = tokens.mint(b, 0.0)
    (other,) = accepted("c")
    slow = CredentialLimits(sockets=1)
    changed = msgspec.structs.replace(a, limits=slow)
    tokens.replace([changed, msgspec.structs.replace(other, name="b")])
    assert tokens.current(a) == changed
    assert tokens.current(b) is None  # b has another token now
    assert tokens.current(minted) is not None
    tokens.replace([other])
    assert tokens.current(minted) is None
    assert tokens.admit(late, 1.0) is None  # nobody is left for whom it stands
    assert tokens.required


@pytest.mark.parametrize(
    ("value", "token"),
    [(None, None), ("Bearer a", "a"), ("bearer  a ", "a"), ("Basic a", ""), ("", ""), ("Bearer", "")],
)
def test_bearer_header(value: str | None, token: str | None) -> None:
    assert bearer_header(value) == token


@given(st.text(max_size=40))
@settings(derandomize=True, deadline=None)
def test_bearer_subprotocol_round_trip(token: str) -> None:
    name = "ramify.bearer." + base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")
    assert bearer_subprotocol(["ramify.v1+json", name]) == token


@pytest.mark.parametrize(
    ("name", "token"), [("ramify.bearer.!", ""), ("ramify.bearer.a", ""), ("x", None)]
)
def test_bearer_subprotocol_malformed(name: str, token: str | None) -> None:
    assert bearer_subprotocol([name]) == token


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("127.0.0.1:80", True),
        ("localhost", True),
        ("LOCALHOST:80", True),
        ("[::1]:80", True),
        ("::1", False),  # an address of version 6 needs brackets
        ("localhost:81", False),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("10.0.0.5:80", False),
        ("ramify.example", True),
        ("ramify.example:443", True),
        ("two.example", False),
        ("two.example:8443", True),
        ("", False),
        ("a:b", False),
        ("[::1", False),
        ("[::1]x", False),
        (None, False),
    ],
)
def test_hosts_of_a_loopback_server(header: str | None, allowed: bool) -> None:
    policy = HostPolicy("127.0.0.1", 80, ("Ramify.example", "two.example:8443"), ())
    assert policy.host_allowed(header) == allowed


def test_hosts_of_other_servers() -> None:
    everywhere = HostPolicy("0.0.0.0", 80, (), ())
    assert everywhere.host_allowed("10.0.0.5:8080")  # an address cannot be rebound
    assert everywhere.host_allowed("[fe80::1]:80")
    assert not everywhere.host_allowed("evil.example:80")
    assert HostPolicy("10.0.0.5", 80, (), ()).host_allowed("10.0.0.5:80")
    assert HostPolicy("10.0.0.5", 80, ("*",), ()).host_allowed("anything")


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        (None, "localhost", True),
        ("http://localhost:8765", "localhost:8765", True),
        ("http://localhost", "localhost:80", True),
        ("https://ramify.example", "ramify.example", True),  # TLS ends at a proxy
        ("http://localhost:1", "localhost:8765", False),
        ("http://127.0.0.1:8765", "localhost:8765", False),
        ("http://[::1]:8765", "[::1]:8765", True),
        ("null", "localhost", False),
        ("file://", "localhost", False),
        ("http://localhost:x", "localhost", False),
        ("https://app.example", "localhost:8765", True),
        ("https://app.example.evil", "localhost:8765", False),
        ("http://a", None, False),
    ],
)
def test_origins(origin: str | None, host: str | None, allowed: bool) -> None:
    policy = HostPolicy("127.0.0.1", 8765, (), ("https://app.example/",))
    assert policy.origin_allowed(origin, host) == allowed


@given(st.text(max_size=30))
@settings(derandomize=True, deadline=None)
def test_no_header_value_raises(text: str) -> None:
    policy = HostPolicy("127.0.0.1", 1, (), ())
    policy.host_allowed(text)
    policy.origin_allowed(text, text)
    policy.origin_allowed(f"http://{text}", "localhost")
    split_host(text)
