"""How a replica and a front prove to each other that they know the same secret. Pure.

    front                                   replica
    GREETING, nonce         ------->
                            <-------        nonce, HMAC(secret, "replica", both nonces)
    HMAC(secret, "front", both nonces)  -->

The secret itself never travels, and an answer is of no use for another connection. All lengths are
fixed, and whoever is a stranger is known to be one before anything that it sent is decoded. The frames
that follow are neither encrypted nor signed by this: where others are on the network, use TLS.
"""

import hashlib
import hmac
import secrets

GREETING = b"ramify replicas\1"
NONCE, PROOF = 32, 32  # bytes
FROM_FRONT, FROM_REPLICA = len(GREETING) + NONCE, NONCE + PROOF
LEAST_SECRET = 16  # bytes


class Stranger(Exception):
    """The peer does not know the secret, or speaks something else."""


class FrontHandshake:
    """The front's side. First send `greeting`; then give `check` the next FROM_REPLICA bytes."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE)
        self.greeting = GREETING + self._nonce

    def check(self, answer: bytes) -> bytes:
        """The proof to send. Raises Stranger."""
        theirs, proof = answer[:NONCE], answer[NONCE:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"replica", self._nonce, theirs)):
            raise Stranger("it does not know the secret")
        return _proof(self._secret, b"front", self._nonce, theirs)


class ReplicaHandshake:
    """The replica's side: `answer` the first FROM_FRONT bytes, then `check` the next PROOF bytes."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._mine = secrets.token_bytes(NONCE)
        self._theirs = b""

    def answer(self, greeting: bytes) -> bytes:
        """What to send. Raises Stranger."""
        if not greeting.startswith(GREETING):
            raise Stranger("this is no port for replicas")
        self._theirs = greeting[len(GREETING) :]
        return self._mine + _proof(self._secret, b"replica", self._theirs, self._mine)

    def check(self, proof: bytes) -> None:
        """Raises Stranger."""
        expected = _proof(self._secret, b"front", self._theirs, self._mine)
        if not hmac.compare_digest(proof, expected):
            raise Stranger("the front does not know the secret")


def _proof(secret: bytes, who: bytes, front: bytes, replica: bytes) -> bytes:
    return hmac.digest(secret, who + front + replica, hashlib.sha256)
