"""What a session is called, and who may open it. Pure.

The view key follows from the key, so whoever may write can always hand it on, and a store needs only
hashes of both.
"""

import base64
import hashlib
import hmac
import secrets

from ramify.protocol.saved import key_hash, same_key


class Identity:
    """The public id and the keys of a session. `key`: "" until somebody who knows it has come."""

    def __init__(self, session: str, key: str, *, hashes: tuple[bytes, bytes] | None = None) -> None:
        self.session = session
        self.key = key
        self.hashes = hashes or (key_hash(key), key_hash(view_key(key)))
        self._view_key = "" if not key else view_key(key)

    @staticmethod
    def new(prefix: str) -> "Identity":
        """Of a new session, whose id begins with `prefix`."""
        return Identity(f"{prefix}{secrets.token_urlsafe(9)}", f"k_{secrets.token_urlsafe(18)}")

    @property
    def view_key(self) -> str:
        """ "" while nobody has come."""
        return self._view_key

    def opens(self, key: str) -> bool:
        """Whether `key` is the session's; if so it is known from now on."""
        if not same_key(key, self.hashes[0]):
            return False
        if not self.key:
            self.key, self._view_key = key, view_key(key)
        return True

    def shows(self, key: str) -> bool:
        """Whether `key` is the view key; if so it is known from now on."""
        if not same_key(key, self.hashes[1]):
            return False
        self._view_key = key
        return True


def view_key(key: str) -> str:
    """The view key of a session that has this key."""
    digest = hmac.digest(key.encode(), b"view", hashlib.sha256)
    return f"v_{base64.urlsafe_b64encode(digest[:18]).decode()}"
