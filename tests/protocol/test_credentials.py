"""Files of credentials: what is accepted; errors name the line and the field, never a secret."""

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.protocol import credentials
from ramify.protocol.credentials import Credential, CredentialLimits, check_token, parse_credentials
from ramify.protocol.errors import ConfigError

DEFAULTS = CredentialLimits(sockets=10)


def parse(*lines: object, shared: bool = False) -> list[Credential]:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return parse_credentials(text, "tokens.jsonl", shared=shared, limits=DEFAULTS)


def test_lines() -> None:
    secret = hashlib.sha256(b"s").hexdigest().upper()
    found = parse(
        "# who may come in",
        "",
        {"name": "alice", "token": "a"},
        {"name": "bob", "sha256": secret, "limits": {"sockets": 2, "ops_per_second": 5}},
        {"name": "bob", "token": "new", "limits": {"ops_per_second": 5, "sockets": 2}},
        {"name": "carol", "token": "c", "namespace": "research"},
        {"name": "dave", "token": "d", "namespace": ""},
    )
    assert [(one.name, one.namespace) for one in found] == [
        ("alice", "alice"),
        ("bob", "bob"),
        ("bob", "bob"),
        ("carol", "research"),
        ("dave", ""),
    ]
    assert found[0].digest == hashlib.sha256(b"a").digest()
    assert found[1].digest == hashlib.sha256(b"s").digest()
    assert found[0].limits == DEFAULTS
    assert (found[1].limits.sockets, found[1].limits.ops_per_second) == (2, 5)
    assert found[1].limits.bytes_per_second == DEFAULTS.bytes_per_second
    assert "new" not in repr(found)


def test_one_cache_for_all_by_choice() -> None:
    found = parse(
        {"name": "alice", "token": "a"}, {"name": "b", "token": "b", "namespace": "own"}, shared=True
    )
    assert [one.namespace for one in found] == ["", "own"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"name": "", "token": "s3cret"}, "line 2: `name` must be"),
        ({"name": "a b", "token": "s3cret"}, "line 2: `name` must be"),
        ({"name": "x" * 65, "token": "s3cret"}, "line 2: `name` must be"),
        ({"name": "a"}, "line 2: give one of `token` and `sha256`"),
        ({"name": "a", "token": "s3cret", "sha256": "0" * 64}, "line 2: give one of"),
        ({"name": "a", "token": ""}, "line 2: `token` is empty"),
        ({"name": "a", "token": " s3cret"}, "line 2: `token`: a token has no"),
        ({"name": "a", "token": "s3\ncret"}, "line 2: `token`: a token has no"),
        ({"name": "a", "token": "s3cret" * 1000}, "line 2: `token` has 6000 characters"),
        ({"name": "a", "sha256": "abc"}, "line 2: `sha256` must be 64"),
        ({"name": "a", "token": "s3cret", "namespace": "é"}, "line 2: `namespace`"),
        ({"name": "a", "token": "s3cret", "color": 1}, "line 2: .*color"),
        ({"name": "a", "token": "s3cret", "limits": {"colors": 1}}, "line 2: `limits` has no 'colors'"),
        ({"name": "a", "token": "s3cret", "limits": {"sockets": 0}}, "line 2: `limits.sockets` is 0"),
        ({"name": "a", "token": "s3cret", "limits": {"sockets": 2**53 + 1}}, "line 2: `limits.sockets`"),
        ({"name": "a", "token": "s3cret", "limits": {"sockets": 10**40}}, "line 2"),
        ({"name": "a", "token": "s3cret", "limits": {"sockets": "7"}}, "line 2"),
        ({"name": "first", "token": "s3cret"}, "two namespaces or two sets of limits"),
        ({"name": "second", "token": "1"}, "'first' and 'second' have the same token"),
        ("s3cret", "line 2: not a JSON object"),
        ('{"name": "a", "token": "s3cret"', "line 2: not a JSON object"),
        ("[1]", "line 2"),
    ],
)
def test_errors_name_the_line_and_no_secret(line: object, message: str) -> None:
    first = {"name": "first", "token": "1", "limits": {"sockets": 1}}
    with pytest.raises(ConfigError, match=message) as caught:
        parse(first, line)
    assert "s3cret" not in caught.value.message
    assert "tokens.jsonl" in caught.value.message


def test_a_file_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "MOST_CREDENTIALS", 3)
    lines = [{"name": f"n{i}", "token": f"t{i}"} for i in range(4)]
    assert len(parse(*lines[:3])) == 3
    with pytest.raises(ConfigError, match="line 4: more than 3"):
        parse(*lines)


@given(st.text(max_size=200))
@settings(derandomize=True, deadline=None)
def test_no_text_does_more_than_be_refused(text: str) -> None:
    try:
        parse(text)
        check_token(text, "x")
    except ConfigError:
        pass


@pytest.mark.parametrize("name", CredentialLimits.__struct_fields__)
@pytest.mark.parametrize("value", [-9, 2**53 + 1])
def test_limits_are_flags(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"--credential-{name.replace('_', '-')} is"):
        CredentialLimits(**{name: value})


def test_a_name_may_be_urgent_if_its_line_says_so() -> None:
    line = {"name": "a", "token": "t"}
    (one,) = parse(line | {"limits": {"priority": 3}})
    assert (one.limits.priority, DEFAULTS.priority) == (3, 0)
    for value in (-9, 9):
        with pytest.raises(ConfigError, match=r"limits\.priority` is -?9: must be -8 to 8"):
            parse(line | {"limits": {"priority": value}})
