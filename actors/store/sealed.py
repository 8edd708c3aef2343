"""A store whose items are encrypted: AES-256-GCM under keys of a file that the store does not have.

A sealed item is `0xC1`, the key's id (4 bytes), a nonce (12), and the ciphertext with its tag. No record
begins with `0xC1`, which MessagePack never uses, so that what is sealed and what is not are told apart.
Each session has its own cipher key, HMAC-SHA256 of the file's key and the session's id, so that random
nonces do not run out (NIST SP 800-38D, 8.3: 2^32 for one key). Session and item are authenticated along:
an item that was put in another one's place cannot be opened.

Sealed: all of a session's items, which are texts, tokens, ops and hashes of keys. Not sealed: its id,
its owner's name, the names of its clients (in the items' names), sizes and times; the secret with
which servers sign, which serves nobody without a token of theirs.
"""

import base64
import hashlib
import hmac
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ramify.actors.kit.files import read_secret_file
from ramify.actors.kit.log import get_log
from ramify.actors.store.base import How, Refusal, Store, StoreError, Taken
from ramify.protocol.saved import HEAD, Changes, StoredSession

SEALED = b"\xc1"
KEY_BYTES = 32
ID_BYTES = 4
NONCE_BYTES = 12
MOST_KEYS = 64
MOST_BYTES = 1 << 16  # of a key file
CIPHERS = 4096  # that are kept

log = get_log(__name__)


class Unsealable(ValueError):
    """No known key opens the item, or it was changed."""


class Keys:
    """The first one seals, all open. `keys`: of 32 bytes each."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = {_ident(key): key for key in keys}
        self.first = _ident(keys[0])  # the one that seals
        self._cipher = lru_cache(CIPHERS)(self._make)

    def _make(self, ident: bytes, session: str) -> AESGCM:
        return AESGCM(hmac.digest(self._keys[ident], b"items of " + session.encode(), hashlib.sha256))

    def __contains__(self, ident: object) -> bool:
        return ident in self._keys

    @property
    def ids(self) -> list[str]:
        """The keys' ids, which errors may name."""
        return [ident.hex() for ident in self._keys]

    def seal(self, session: str, key: str, body: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._cipher(self.first, session).encrypt(nonce, body, _about(session, key))
        return b"".join((SEALED, self.first, nonce, sealed))

    def unseal(self, session: str, key: str, body: bytes) -> bytes:
        """Raises Unsealable."""
        ident, rest = body[1 : 1 + ID_BYTES], body[1 + ID_BYTES :]
        if body[:1] != SEALED or len(rest) < NONCE_BYTES:
            raise Unsealable("it is not sealed")
        if ident not in self._keys:
            raise Unsealable(f"it is sealed with the key {ident.hex()}, which is not in the key file")
        nonce, sealed = rest[:NONCE_BYTES], rest[NONCE_BYTES:]
        try:
            return self._cipher(ident, session).decrypt(nonce, sealed, _about(session, key))
        except InvalidTag:
            raise Unsealable(f"it was changed since it was sealed with the key {ident.hex()}") from None


def read_keys(path: Path) -> Keys:
    """A key in base64 on each line; what follows `#` is not read. Raises StoreError."""
    data = read_secret_file(path, MOST_BYTES, "--store-key-file", StoreError)
    keys: list[bytes] = []
    for number, line in enumerate(data.splitlines(), 1):
        text = line.partition(b"#")[0].strip()
        if not text:
            continue
        try:
            key = base64.b64decode(text, validate=True)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise StoreError(
                f"--store-key-file {path}, line {number}: no key of {KEY_BYTES} bytes in base64; "
                "`openssl rand -base64 32` makes one"
            )
        keys.append(key)
    if not 1 <= len(keys) <= MOST_KEYS:
        raise StoreError(f"--store-key-file {path} has {len(keys)} keys: it needs 1 to {MOST_KEYS}")
    return Keys(keys)


class SealHeader(msgspec.Struct, frozen=True):
    """The header of a sealed store. `check`: nothing, sealed. `plain`: some items may not be sealed.
    `keys`: ids of the keys that may have sealed items, in the order in which they were first in the key
    file.
    """

    check: bytes
    plain: bool = False
    keys: list[bytes] = []


class SealedStore:
    """`store`, whose items `keys` seal. `converts`: it may have items that are not sealed.

    Raises StoreError if the keys are not the store's; then nothing was changed.
    """

    def __init__(
        self, store: Store, keys: Keys, *, read_only: bool = False, converts: bool = False
    ) -> None:
        self._store = store
        self._keys = keys
        self.shared = store.shared
        self._ids: list[bytes] = []
        self.converts = converts
        self._marked = store.connections  # the connection over which the mark was seen
        mark = _read_mark(store)
        if mark is None and read_only:
            raise StoreError("the store is not encrypted: leave --store-key-file out")
        if mark is None:
            plain = next(store.kept(), None) is not None
            if plain and not converts:
                raise StoreError(
                    "the store has sessions that are not encrypted: `ramify store rekey` encrypts them"
                )
            store.set_mark(self._mark(plain), replace=False)
            mark = _read_mark(store)  # another server may have been faster
            assert mark is not None
        self._plain = mark.plain
        self._ids = list(mark.keys) or [mark.check[1 : 1 + ID_BYTES]]
        try:
            keys.unseal("", "check", mark.check)
        except Unsealable as error:
            raise StoreError(f"--store-key-file does not open the store: {error}") from None
        unknown = [ident.hex() for ident in self._ids if ident not in keys]
        if unknown:
            raise StoreError(
                f"--store-key-file does not open all of the store: the key {unknown[0]} has sealed "
                "some, and is not in the file: put it back, behind the first, until `ramify store "
                "rekey` is done"
            )
        if mark.plain and not converts and not read_only:
            raise StoreError(
                "not all sessions of the store are encrypted yet: `ramify store rekey` goes on with that"
            )

    def _mark(self, plain: bool) -> bytes:
        ids = self._ids or [self._keys.first]
        return msgspec.msgpack.encode(SealHeader(self._keys.seal("", "check", b""), plain, ids))

    def rekey(self) -> tuple[int, int]:
        """Seal everything with the first key. Returns how many sessions that were, and how many were
        left as they are, because a server has them or because they are damaged. If none was, the other
        keys are needed no more.
        """
        done = left = 0
        for kept in list(self._store.kept()):
            taken = None if kept.live else self._store.take(kept.session, "free")
            if taken is None:
                left += 1
                continue
            try:
                items = {key: self._unseal(kept.session, key, body) for key, body in taken.items.items()}
            except Unsealable as error:
                log.error("a session cannot be decrypted", session=kept.session, reason=str(error))
                self._store.release(kept.session)
                left += 1
                continue
            changes = Changes(
                session=kept.session,
                owner=kept.owner,
                put=items,
                drop=[],
                size=sum(map(len, items.values())),
                used=kept.used,
                expires=kept.expires,
                busy=kept.busy,
                live=False,
                sync=True,
                fence=taken.fence,
            )
            done += not self.write([changes])
        if not left:
            self._plain, self._ids = False, [self._keys.first]
            self._store.set_mark(self._mark(plain=False), replace=True)
            self._store.rewrite()  # what it was before stands in free pages
        return done, left

    def _unseal(self, session: str, key: str, body: bytes) -> bytes:
        if self._plain and body[:1] != SEALED:
            return body
        return self._keys.unseal(session, key, body)

    def _opened(self, session: str, items: Mapping[str, bytes]) -> dict[str, bytes]:
        return {key: self._body(session, key, body) for key, body in items.items()}

    def _body(self, session: str, key: str, body: bytes) -> bytes:
        """The unsealed body; for one that cannot be opened, bytes that no record decodes from, so that
        readers find it damaged.
        """
        try:
            return self._unseal(session, key, body)
        except Unsealable as error:
            log.error("an item cannot be decrypted", session=session, item=key, reason=str(error))
            return SEALED

    # --- a `Store` -------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        return self._store.connections

    def behind(self, known: Mapping[str, tuple[int, int]]) -> Collection[str]:
        return self._store.behind(known)

    def set_aside(self, session: str) -> None:
        self._store.set_aside(session)

    def rewrite(self) -> None:
        self._store.rewrite()

    def write(self, batch: Sequence[Changes]) -> Mapping[int, Refusal]:
        if self._keys.first not in self._ids:  # before anything is sealed with it
            self._ids.append(self._keys.first)
            self._store.set_mark(self._mark(self._plain), replace=True)
        if self._marked != self._store.connections:  # the store may have come back empty
            self._store.set_mark(self._mark(plain=False), replace=False)
            self._marked = self._store.connections
        seal, replaced = self._keys.seal, msgspec.structs.replace
        return self._store.write(
            [
                replaced(
                    each,
                    put={key: seal(each.session, key, body) for key, body in each.put.items()},
                )
                for each in batch
            ]
        )

    def take(self, session: str, how: How) -> Taken | None:
        taken = self._store.take(session, how)
        return None if taken is None else Taken(taken.fence, self._opened(session, taken.items))

    def release(self, session: str) -> None:
        self._store.release(session)

    def forget(self, session: str, fence: int) -> None:
        self._store.forget(session, fence)

    def head(self, session: str) -> bytes | None:
        body = self._store.head(session)
        return None if body is None else self._body(session, HEAD, body)

    def read(self, session: str) -> Mapping[str, bytes]:
        return self._opened(session, self._store.read(session))

    def delete(self, sessions: Sequence[str]) -> None:
        self._store.delete(sessions)

    def kept(self) -> Iterator[StoredSession]:
        return self._store.kept()

    def waiting(self) -> list[str]:
        return self._store.waiting()

    def sweep(self, *, older_than: float, most: int, now: float) -> int:
        return self._store.sweep(older_than=older_than, most=most, now=now)

    def tend(self) -> list[str]:
        return self._store.tend()

    def clock(self) -> float | None:
        return self._store.clock()

    def set_clock(self, now: float) -> None:
        self._store.set_clock(now)

    def secret(self) -> bytes:
        return self._store.secret()

    def mark(self) -> bytes | None:
        return self._store.mark()

    def set_mark(self, value: bytes, *, replace: bool) -> None:
        self._store.set_mark(value, replace=replace)

    def check(self) -> list[str]:
        faults = self._store.check()
        for kept in self._store.kept():
            for key, body in self._store.read(kept.session).items():
                try:
                    self._unseal(kept.session, key, body)
                except Unsealable as error:
                    faults.append(f"session {kept.session}, item {key}: {error}")
        return faults

    def warnings(self) -> list[str]:
        return self._store.warnings()

    def close(self) -> None:
        self._store.close()


def _read_mark(store: Store) -> SealHeader | None:
    mark = store.mark()
    try:
        return None if mark is None else msgspec.msgpack.decode(mark, type=SealHeader)
    except msgspec.MsgspecError as error:
        raise StoreError("what the store says of its encryption is damaged") from error


def _ident(key: bytes) -> bytes:
    return hashlib.sha256(b"id of " + key).digest()[:ID_BYTES]


def _about(session: str, key: str) -> bytes:
    return f"{len(session)}:{session}{key}".encode()
