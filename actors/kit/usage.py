"""The usage of one credential: counted by gateways, shown by metrics, labelled with its name."""

import msgspec


class CredentialUsage(msgspec.Struct, array_like=True):
    """`sockets` are those open now; all else counts from the start of the process."""

    sockets: int = 0
    received_bytes: int = 0
    frames: int = 0
    refused_ops: int = 0
    abuses: int = 0  # sockets closed with 4429

    def plus(self, other: "CredentialUsage") -> "CredentialUsage":
        """The sum of two processes."""
        return CredentialUsage(
            self.sockets + other.sockets,
            self.received_bytes + other.received_bytes,
            self.frames + other.frames,
            self.refused_ops + other.refused_ops,
            self.abuses + other.abuses,
        )
