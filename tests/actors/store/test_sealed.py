"""Encrypted stores: nobody reads them without their key, and nobody spoils them with another one."""

import base64
import hashlib
import hmac
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ramify.actors.store.base import StoreError
from ramify.actors.store.opening import open_store
from ramify.actors.store.sealed import SEALED, Keys, Unsealable, read_keys
from tests.actors.store.conftest import changes

SECRET = b"the text that nobody is to read"


def key_file(folder: Path, *names: str) -> Path:
    """A file with a key for each name, always the same one."""
    path = folder / "-".join(names)
    lines = [base64.b64encode(hashlib.sha256(name.encode()).digest()).decode() for name in names]
    path.write_text(
        "# keys\n\n" + "".join(f"{line}  # {name}\n" for name, line in zip(names, lines, strict=True))
    )
    path.chmod(0o600)
    return path


@pytest.fixture
def at(place: str, tmp_path: Path) -> Any:
    """`at("a", "b")`: the store at `place` with these keys; `at()`: without."""
    stores: list[Any] = []

    def opened(*names: str, **settings: Any) -> Any:
        stores.append(open_store(place, key_file(tmp_path, *names) if names else None, **settings))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


def raw(store: Any) -> Any:
    """The store inside, as a thief has it."""
    return store._store


def test_what_is_written_is_read_and_nothing_is_there_in_plain(at: Callable[..., Any]) -> None:
    store = at("a")
    store.write([changes(put={"head": b"1", "s1": SECRET}), changes("s_2", put={"head": SECRET})])
    for other in (store, at("a"), at("a", read_only=True), at("b", "a")):
        assert dict(other.read("s_1")) == {"head": b"1", "s1": SECRET}
        assert other.head("s_2") == SECRET
        assert other.head("s_3") is None
        assert other.check() == []
    for session in ("s_1", "s_2"):
        for body in raw(store).read(session).values():
            assert body[:1] == SEALED
            assert SECRET not in body
    taken = at("a").take("s_1", "force")
    assert dict(taken.items) == {"head": b"1", "s1": SECRET}
    assert list(store.write([changes(whole=False)])) == [0]
    assert {kept.session for kept in store.kept()} == {"s_1", "s_2"}


def test_another_key_or_none_opens_nothing_and_changes_nothing(at: Callable[..., Any]) -> None:
    store = at("a")
    store.write([changes(put={"head": SECRET})])
    before = dict(raw(store).read("s_1")), store.mark()
    for names in ((), ("b",), ("b", "c")):
        for settings in ({}, {"read_only": True}, {"converts": True}):
            if names or "converts" not in settings:
                with pytest.raises(StoreError, match="--store-key-file") as error:
                    at(*names, **settings)
                assert base64.b64encode(hashlib.sha256(b"b").digest()).decode() not in str(error.value)
    assert (dict(raw(store).read("s_1")), store.mark()) == before


def test_a_key_is_replaced_by_another_one(at: Callable[..., Any]) -> None:
    """The new one first, then `rekey`, then the old one goes."""
    at("old").write([changes(put={"head": b"1", "s1": SECRET}), changes("s_2", busy=True, used=7.5)])
    both = at("new", "old", converts=True)
    assert dict(both.read("s_1")) == {"head": b"1", "s1": SECRET}
    both.write([changes("s_3", live=True)])
    assert both.rekey() == (2, 1)
    at("old", "new")
    both.release("s_3")
    assert both.rekey() == (3, 0)
    new = at("new")
    assert dict(new.read("s_1")) == {"head": b"1", "s1": SECRET}
    assert {kept.session: (kept.used, kept.busy) for kept in new.kept()}["s_2"] == (7.5, True)
    assert new.check() == []
    with pytest.raises(StoreError, match="does not open the store"):
        at("old")


def test_a_store_that_was_not_encrypted_becomes_so(at: Callable[..., Any]) -> None:
    plain = at()
    plain.write([changes(put={"head": SECRET}), changes("s_2", live=True)])
    with pytest.raises(StoreError, match="ramify store rekey"):
        at("a")
    with pytest.raises(StoreError, match="not encrypted"):
        at("a", read_only=True)
    converting = at("a", converts=True)
    assert converting.rekey() == (1, 1)
    with pytest.raises(StoreError, match="goes on with that"):
        at("a")
    with pytest.raises(StoreError, match="give its --store-key-file"):
        at()
    plain.write([changes("s_2", put={"head": b"last"}, whole=False)])
    assert at("a", converts=True).rekey() == (2, 0)
    store = at("a")
    assert store.head("s_1") == SECRET
    assert store.head("s_2") == b"last"
    assert all(body[:1] == SEALED for body in raw(store).read("s_1").values())


def test_what_was_changed_in_the_store_is_found(at: Callable[..., Any]) -> None:
    """Also what was put in another place; it is not written anew with a good seal."""
    store = at("a")
    store.write([changes(put={"head": b"1", "s1": SECRET}), changes("s_2", put={"head": b"2"})])
    inside = raw(store)
    one, two = inside.read("s_1"), inside.read("s_2")
    for name, body in (
        ("s1", one["s1"][:-1] + bytes([one["s1"][-1] ^ 1])),
        ("s1", one["head"]),
        ("head", two["head"]),
        ("s1", SECRET),
        ("s1", b""),
        ("s1", SEALED),
        ("s1", SEALED + b"none" + one["s1"][5:]),
    ):
        inside.write([changes(put=dict(one) | {name: body}, whole=False)])
        assert store.read("s_1")[name] == SEALED
        (fault,) = store.check()
        assert fault.startswith(f"session s_1, item {name}: ")
    assert at("a", converts=True).rekey() == (1, 1)
    assert inside.read("s_1")["s1"] == body


def test_the_seal_is_what_the_file_says_it_is() -> None:
    """Opened by hand."""
    key = os.urandom(32)
    sealed = Keys([key]).seal("s_1", "head", SECRET)
    assert sealed[1:5] == hashlib.sha256(b"id of " + key).digest()[:4]
    cipher = AESGCM(hmac.digest(key, b"items of s_1", "sha256"))
    assert cipher.decrypt(sealed[5:17], sealed[17:], b"3:s_1head") == SECRET
    assert len(sealed) == len(SECRET) + 33
    assert Keys([key]).seal("s_1", "head", SECRET) != sealed


def test_a_key_opens_no_other_session_and_no_other_item() -> None:
    keys = Keys([os.urandom(32)])
    sealed = keys.seal("s_1", "s11", SECRET)
    assert keys.unseal("s_1", "s11", sealed) == SECRET
    for session, key in (("s_1", "s1"), ("s_2", "s11"), ("s_1s", "11")):
        with pytest.raises(Unsealable, match="changed"):
            keys.unseal(session, key, sealed)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 keys"),
        ("# nothing\n", "0 keys"),
        ("c2hvcnQ=\n", "line 1"),
        ("\nnot base64 at all!\n", "line 2"),
        ("A" * 70_000, "bytes"),
        ((base64.b64encode(bytes(32)).decode() + "\n") * 65, "65 keys"),
    ],
)
def test_key_files_that_are_wrong(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(StoreError, match=words) as error:
        read_keys(path)
    assert "c2hvcnQ=" not in str(error.value)


def test_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        read_keys(tmp_path / "none")


def test_a_key_file_that_others_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = key_file(tmp_path, "a")
    path.chmod(0o644)
    read_keys(path)
    assert "chmod 600" in caplog.text


def test_a_key_that_has_sealed_is_missed_at_the_start(at: Callable[..., Any]) -> None:
    """The key file was put back to what it was before `rekey`."""
    at("old").write([changes(put={"head": b"1"})])
    at("new", "old").write([changes("s_2", put={"head": b"2"})])
    with pytest.raises(StoreError, match="--store-key-file does not open"):
        at("old")
    both = at("old", "new")
    assert (both.head("s_1"), both.head("s_2")) == (b"1", b"2")
    assert at("old", "new", converts=True).rekey() == (2, 0)
    assert at("old").head("s_2") == b"2"
