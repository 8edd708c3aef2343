"""What the sockets of one credential share: how many they may be, and how much they may send.

Where several processes have sockets of a credential, each gets its part of the rates: as large as its
part of the sockets, of which the core tells the sum. So the limits hold for the whole server, a few
hundred milliseconds late, and no message or lock is needed to count.

Without tokens everybody is one credential, "", of which only the sockets are counted: a shared rate
would let one client use up what the others need.

Pure: time is an argument. This file does not know sockets.
"""

from collections.abc import Mapping

from ramify.actors.gateway.port.access.buckets import DebtBucket, TokenBucket
from ramify.actors.kit.report import CredentialUsage
from ramify.protocol.credentials import Credential, CredentialLimits
from ramify.protocol.errors import LimitExceeded

BURST_S = 2.0  # a burst is so many seconds' worth
FRAMES_PER_OP = 4  # frames of any kind that are read for each op allowed: parsing one costs 5 us


class Share:
    """What one credential uses of this process, and may use."""

    def __init__(self, credential: Credential, now: float) -> None:
        self.name = credential.name
        self.usage = CredentialUsage()
        self.elsewhere = 0  # its sockets in other processes
        self._limits = credential.limits
        self.metered = bool(credential.name)  # else nobody's: they have no limits together
        self._ops = TokenBucket(*self._rate(self._limits.ops_per_second), now)
        self._bytes = DebtBucket(*self._rate(self._limits.bytes_per_second), now)
        self._frames = DebtBucket(*self._rate(FRAMES_PER_OP * self._limits.ops_per_second), now)

    def configure(self, limits: CredentialLimits, now: float) -> None:
        """Change the limits from now on."""
        self._limits = limits
        self._scale(now)

    def told(self, elsewhere: int, now: float) -> None:
        """Note how many sockets other processes have."""
        if elsewhere != self.elsewhere:
            self.elsewhere = elsewhere
            self._scale(now)

    def enter(self, now: float) -> None:
        """Count one more socket. Raises LimitExceeded if there are enough."""
        most = self._limits.sockets
        if self.metered and self.usage.sockets + self.elsewhere >= most:
            raise LimitExceeded(
                f"{self.name!r} has {most} sockets open, which is its limit: close one first",
                details={"max": most},
            )
        self.usage.sockets += 1
        self._scale(now)

    def leave(self, now: float) -> None:
        """Count one socket less."""
        self.usage.sockets -= 1
        self._scale(now)

    def admit(self, ops: int, now: float) -> None:
        """Count messages. Raises LimitExceeded if all sockets together send too many."""
        wait = self._ops.take(ops, now) if self.metered else 0.0
        if wait:
            self.usage.refused_ops += ops
            rate = self._limits.ops_per_second
            raise LimitExceeded(
                f"all sockets of {self.name!r} send more than {rate} messages a second: slow down",
                details={"max": rate},
                retry_ms=int(wait * 1000) + 1,
            )

    def received(self, size: int, frames: int, now: float) -> None:
        """Count what was read."""
        self.usage.received_bytes += size
        self.usage.frames += frames
        if self.metered:
            self._bytes.spend(size, now)
            self._frames.spend(frames, now)

    def wait(self, now: float) -> float:
        """Seconds until more may be read."""
        return max(self._bytes.wait(now), self._frames.wait(now)) if self.metered else 0.0

    def _rate(self, whole: float) -> tuple[float, float]:
        """Work out this process' part of a rate, and the burst."""
        here = max(1, self.usage.sockets)
        part = whole * here / (here + self.elsewhere)
        return part, max(1.0, part * BURST_S)

    def _scale(self, now: float) -> None:
        if self.metered:
            self._ops.set_rate(*self._rate(self._limits.ops_per_second), now)
            self._bytes.set_rate(*self._rate(self._limits.bytes_per_second), now)
            self._frames.set_rate(*self._rate(FRAMES_PER_OP * self._limits.ops_per_second), now)


class Shares:
    """The shares of this process, by name. Bounded by the names that were ever configured."""

    def __init__(self) -> None:
        self._by_name: dict[str, Share] = {}
        self._totals: Mapping[str, int] = {}

    def of(self, credential: Credential, now: float) -> Share:
        """Find the share of a credential, which is made when it first comes."""
        share = self._by_name.get(credential.name)
        if share is None:
            share = self._by_name[credential.name] = Share(credential, now)
            share.told(self._totals.get(credential.name, 0), now)
        return share

    def told(self, elsewhere: Mapping[str, int], now: float) -> None:
        """Note how many sockets each credential has in other processes."""
        self._totals = elsewhere
        for name, share in self._by_name.items():
            share.told(elsewhere.get(name, 0), now)

    def configure(self, credential: Credential, now: float) -> None:
        """Change the limits of a credential from now on."""
        share = self._by_name.get(credential.name)
        if share is not None:
            share.configure(credential.limits, now)

    def usage(self) -> dict[str, CredentialUsage]:
        """Count what each credential that has been here uses."""
        return {name: share.usage for name, share in self._by_name.items()}

    @property
    def elsewhere(self) -> int:
        """Sockets of all clients in other processes."""
        return sum(self._totals.values())
