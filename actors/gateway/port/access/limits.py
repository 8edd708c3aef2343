"""How much one socket may ask for: ops a second, ops a frame, bytes, frames, strikes.

Two answers to too much. Ops that come too fast are refused, and who goes on all the same is closed.
Bytes, frames and reads that come too fast are read more slowly: an honest client that uploads much
waits, and nothing is lost. The lines of an HTTP head and the pieces of its body count as frames.
Control frames and empty fragments carry nothing that a client needs to send fast: they count as ops, and
too many of them are abuse.

Pure: time is an argument. This file does not know what a refusal looks like on the wire.
"""

from ramify.actors.gateway.port.access.buckets import DebtBucket, TokenBucket
from ramify.actors.gateway.port.access.shares import FRAMES_PER_OP, Share
from ramify.actors.gateway.port.access.strangers import READ_WORK, Guest
from ramify.actors.gateway.port.pump import FRAME_WORK
from ramify.protocol.config import Limits
from ramify.protocol.errors import LimitExceeded

STRIKES = 3  # unparseable frames, then 4400
VIOLATIONS = 10  # refused frames at once, then 4429 ...
FORGIVEN_PER_S = 0.2  # ... one is forgotten every five seconds
READS_PER_OP = 2  # times that the loop wakes up to read the socket, for each op allowed


class SocketLimits:
    """The limits of one socket. After `abusive` turns true the socket is to be closed.

    `share`: what all sockets of its credential share; it counts there as well. `guest`: its account
    while it has to show a token, and has not.
    """

    def __init__(
        self, limits: Limits, now: float, share: Share | None = None, guest: Guest | None = None
    ) -> None:
        self._limits = limits
        self._guest = guest
        self.share = share
        self._ops = TokenBucket(limits.ops_per_second, limits.ops_burst, now)
        self._bytes = DebtBucket(limits.bytes_per_second, limits.bytes_burst, now)
        frames = FRAMES_PER_OP * limits.ops_per_second, FRAMES_PER_OP * limits.ops_burst
        self._frames = DebtBucket(*frames, now)
        reads = READS_PER_OP * limits.ops_per_second, READS_PER_OP * limits.ops_burst
        self._reads = DebtBucket(*reads, now)
        self._debts = self._bytes, self._frames, self._reads
        self._patience = TokenBucket(FORGIVEN_PER_S, VIOLATIONS, now)
        self._strikes = 0
        self.abusive = False

    def strike(self) -> bool:
        """Count an unparseable frame. True if it was the last one allowed."""
        self._strikes += 1
        return self._strikes >= STRIKES

    def admit(self, ops: int, now: float) -> None:
        """Count a frame of `ops` messages. Raises LimitExceeded if it has to be refused whole."""
        most = self._limits.ops_per_frame
        if ops > most:
            self._violation(now)
            raise LimitExceeded(
                f"the frame holds {ops} messages, at most {most} are allowed: split it",
                details={"max": most, "ops": ops},
            )
        wait = self._ops.take(max(1, ops), now)
        if wait:
            self._violation(now)
            raise LimitExceeded(
                f"more than {self._limits.ops_per_second} messages a second "
                f"(bursts of {self._limits.ops_burst}): slow down",
                details={"max": self._limits.ops_per_second},
                retry_ms=int(wait * 1000) + 1,
            )
        if self.share is not None:
            self.share.admit(max(1, ops), now)  # others may have used it up: no violation

    def control(self, now: float) -> None:
        """Count a control frame or an empty fragment: it costs what a message costs."""
        if self._ops.take(1, now):
            self._violation(now)

    def read(self, now: float) -> None:
        """Count a read of the socket, whatever it brought."""
        self._reads.spend(1, now)
        if self._guest is not None:
            self._guest.spend(READ_WORK, now)

    def received(self, size: int, frames: int, now: float) -> None:
        """Count `size` bytes that were read, and the frames that they completed."""
        self._bytes.spend(size, now)
        self._frames.spend(frames, now)
        if self._guest is not None:
            self._guest.spend(size + FRAME_WORK * frames, now)
        if self.share is not None:
            self.share.received(size, frames, now)

    def wait(self, now: float) -> float:
        """Seconds until more may be read."""
        wait = 0.0
        for bucket in self._debts:
            if bucket.level < 0:
                wait = max(wait, bucket.wait(now))
        if self._guest is not None:
            wait = max(wait, self._guest.wait(now))
        if self.share is not None and self.share.metered:
            wait = max(wait, self.share.wait(now))
        return wait

    def enter(self, guest: Guest | None) -> None:
        """Begin another request, whose client may be unknown."""
        self._guest = guest

    def known(self, now: float) -> None:
        """Note that the client has shown a token: what it cost before is not charged to its address."""
        self._leave(now, known=True)

    def end(self, now: float) -> None:
        """End: the socket is gone, or its request is answered."""
        self._leave(now, known=False)

    def _leave(self, now: float, *, known: bool) -> None:
        if self._guest is not None:
            self._guest.leave(now, known=known)
            self._guest = None

    def _violation(self, now: float) -> None:
        if self._patience.take(1, now):
            self.abusive = True
