"""Signatures of thoughts: a thought that comes back is taken as one only if this server made it.

An HMAC with a key that follows from the server's secret and the credential's name, so nobody can use
what another one's model thought. In front of it stands a mark of the key: a signature with another mark
is of another server, or of an earlier run of one that has no store to keep its secret in.
"""

import base64
import binascii
import hashlib
import hmac
from typing import Literal

MARK = 8  # bytes
DIGEST = 32
Verdict = Literal["ours", "altered", "foreign"]


class Signer:
    """Signs the thoughts of one credential, and knows them again. `owner`: the credential's name."""

    def __init__(self, secret: bytes, owner: str) -> None:
        self._key = hmac.digest(secret, b"thinking of " + owner.encode(), "sha256")
        self._mark = hashlib.sha256(self._key).digest()[:MARK]

    def sign(self, thought: str) -> str:
        """The `signature` of a block with this thought."""
        digest = hmac.digest(self._key, thought.encode(), "sha256")
        return base64.b64encode(self._mark + digest).decode()

    def verify(self, thought: str, signature: str) -> Verdict:
        """Whether the signature is ours, ours of another thought ("altered"), or foreign."""
        if len(signature) != 4 * -(-(MARK + DIGEST) // 3):
            return "foreign"
        try:
            data = base64.b64decode(signature, validate=True)
        except (binascii.Error, ValueError):
            return "foreign"
        if data[:MARK] != self._mark:
            return "foreign"
        digest = hmac.digest(self._key, thought.encode(), "sha256")
        return "ours" if hmac.compare_digest(data[MARK:], digest) else "altered"
