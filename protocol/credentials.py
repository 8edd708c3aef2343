"""Credentials: names, the hashes of their tokens, and the limits of each.

A credentials file holds one JSON object a line; blank lines and lines that begin with `#` are skipped:

    {"name": "alice", "sha256": "9f86d0...", "limits": {"sockets": 4}}
    {"name": "bob", "token": "correct horse", "namespace": "research"}

A name may have several lines, so that a token can be replaced while the old one still works; they must
agree in all else. Fairness, limits, metrics and the log know the name only: a secret is never shown, and
only its SHA-256 is kept.

Pure: text in, values out. Errors are `ConfigError`s that name the line and the field.
"""

import hashlib
import re
from collections.abc import Iterable
from typing import Annotated, ClassVar

import msgspec

from ramify.protocol.errors import ConfigError
from ramify.protocol.settings import Setting, Settings, declared
from ramify.protocol.wire import MOST_PRIORITY

MOST_CREDENTIALS = 4096  # lines of a file; metrics have a label for each name
MOST_CHARACTERS = 4096  # of a token: it must fit into the first frame
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_MOST = 2**53  # of a limit: what every reader of JSON holds exactly


class CredentialLimits(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one credential, for all of its sockets together. Each is a server flag as well."""

    GROUP: ClassVar[str] = "access"
    PREFIX: ClassVar[str] = "credential-"

    sockets: Annotated[int, Setting("most sockets of one token's name", low=1, high=_MOST)] = 1024
    ops_per_second: Annotated[
        int,
        Setting(
            "most messages a second of one token's name, all its sockets together", low=1, high=_MOST
        ),
    ] = 4000  # bursts of two seconds' worth
    bytes_per_second: Annotated[
        int,
        Setting("most bytes a second of one token's name, all its sockets together", low=1, high=_MOST),
    ] = 32 << 20  # received; bursts of two seconds' worth
    priority: Annotated[
        int,
        Setting(
            "the highest `priority` of its generations: a higher one goes before all other names'",
            low=-MOST_PRIORITY,
            high=MOST_PRIORITY,
        ),
    ] = 0


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted token. `digest`: its SHA-256; `namespace`: the radix tree of its sessions."""

    name: str
    digest: bytes
    namespace: str = ""
    limits: CredentialLimits = CredentialLimits()


NOBODY = Credential(name="", digest=b"", limits=CredentialLimits(priority=MOST_PRIORITY))
"""What a socket has where the server asks for no token."""


class _CredentialLine(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    token: str | None = None
    sha256: str | None = None
    namespace: str | None = None
    limits: dict[str, int] = {}


def digest_of(token: str) -> bytes:
    """The SHA-256 that is kept and compared instead of the secret. Any str, even one that is not
    Unicode.
    """
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def check_token(token: str, where: str) -> str:
    """The token, if it can ever match. `where`: what the error names. Raises ConfigError.

    An empty one is most often a variable that is not set; it must not switch authentication off.
    """
    if not token:
        raise ConfigError(f"{where} is empty: is a variable not set? Give a token, or leave it out")
    if token != token.strip() or not token.isprintable():
        raise ConfigError(f"{where}: a token has no line breaks, and no spaces around it")
    if len(token) > MOST_CHARACTERS:
        raise ConfigError(f"{where} has {len(token)} characters: at most {MOST_CHARACTERS}")
    return token


def named(name: str, token: str, *, shared: bool, limits: CredentialLimits) -> Credential:
    """A credential of a flag, a variable or a file with one token."""
    namespace = "" if shared else name
    return Credential(name=name, digest=digest_of(token), namespace=namespace, limits=limits)


def parse_credentials(
    text: str, where: str, *, shared: bool, limits: CredentialLimits
) -> list[Credential]:
    """The credentials of a file. `shared`: one radix tree, but for lines with a `namespace`.

    `limits`: what a line does not say. Raises ConfigError that names `where`, the line and the field.
    """
    decoder = msgspec.json.Decoder(_CredentialLine)
    found: list[Credential] = []
    for number, raw in enumerate(text.splitlines(), 1):
        if not raw.strip() or raw.lstrip().startswith("#"):
            continue
        place = f"{where}, line {number}"
        if len(found) == MOST_CREDENTIALS:
            raise ConfigError(f"{place}: more than {MOST_CREDENTIALS} credentials")
        try:
            line = decoder.decode(raw)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{place}: {error}") from None
        except (msgspec.DecodeError, UnicodeEncodeError):  # whose text may show the secret
            raise ConfigError(f"{place}: not a JSON object in one line") from None
        found.append(_credential(line, place, shared, limits))
    agree(found, where)
    return found


def agree(credentials: Iterable[Credential], where: str) -> None:
    """Raise ConfigError unless credentials of one name agree, and no token has two names."""
    by_name: dict[str, Credential] = {}
    owner: dict[bytes, str] = {}
    for one in credentials:
        first = by_name.setdefault(one.name, one)
        if (first.namespace, first.limits) != (one.namespace, one.limits):
            raise ConfigError(f"{where}: {one.name!r} has two namespaces or two sets of limits")
        if owner.setdefault(one.digest, one.name) != one.name:
            raise ConfigError(f"{where}: {owner[one.digest]!r} and {one.name!r} have the same token")


def _credential(
    line: _CredentialLine, place: str, shared: bool, defaults: CredentialLimits
) -> Credential:
    if not NAME.fullmatch(line.name):
        raise ConfigError(f"{place}: `name` must be 1 to 64 letters, digits, `.`, `_` or `-`")
    if line.namespace is not None and line.namespace and not NAME.fullmatch(line.namespace):
        raise ConfigError(f"{place}: `namespace` must be like a name, or empty")
    if (line.token is None) == (line.sha256 is None):
        raise ConfigError(f"{place}: give one of `token` and `sha256`")
    if line.token is not None:
        digest = digest_of(check_token(line.token, f"{place}: `token`"))
    else:
        if not _HASH.fullmatch(line.sha256 or ""):
            raise ConfigError(f"{place}: `sha256` must be 64 hexadecimal digits")
        digest = bytes.fromhex(line.sha256 or "")
    unknown = line.limits.keys() - set(CredentialLimits.__struct_fields__)
    if unknown:
        known = ", ".join(CredentialLimits.__struct_fields__)
        raise ConfigError(f"{place}: `limits` has no {sorted(unknown)[0]!r}; it knows {known}")
    for each in declared(CredentialLimits):
        each.check(line.limits.get(each.field), f"{place}: `limits.{each.field}`")
    namespace = line.namespace if line.namespace is not None else "" if shared else line.name
    limits = msgspec.structs.replace(defaults, **line.limits)
    return Credential(name=line.name, digest=digest, namespace=namespace, limits=limits)
