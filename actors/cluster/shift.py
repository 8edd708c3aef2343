"""The clocks of two machines: what is a time in a message between them is moved from one to the other.

Monotonic clocks count from the start of their machine. On one machine there is nothing to move. Between
two, the difference is known to within the time that a message takes, which is little beside what these
times are for (deadlines, ages). Pure.
"""

from pathlib import Path
from typing import Any

import msgspec

from ramify.protocol.messages import Finished, Inspect, RetainBranches, Submit, Tokens

BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """Which start of which machine this is; "": nobody knows, and no other counts as the same."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


class Shift:
    """`ahead`: by how much the clock here is ahead of the front's, in seconds."""

    def __init__(self, ahead: float) -> None:
        self.ahead = ahead

    @classmethod
    def between(cls, here: str, now: float, there: str, then: float) -> "Shift":
        """Of two machines, by name, whose clocks say `now` and `then`."""
        return cls(0.0 if here and here == there else now - then)

    def inward(self, message: Any) -> Any:
        """A message of the front, in times of this machine."""
        ahead = self.ahead
        if not ahead:
            return message
        if isinstance(message, Submit):
            deadline = None if message.deadline is None else message.deadline + ahead
            return msgspec.structs.replace(message, deadline=deadline, arrived=message.arrived + ahead)
        if isinstance(message, RetainBranches):  # 0: no longer
            until = {b: t and t + ahead for b, t in message.until.items()}
            return msgspec.structs.replace(message, until=until)
        if isinstance(message, Inspect) and message.leases:
            leases = [(end, t and t + ahead) for end, t in message.leases]
            return msgspec.structs.replace(message, leases=leases)
        return message

    def outward(self, message: Any) -> Any:
        """A message for the front, in its times. 0.0 stands for a time that never came."""
        if not self.ahead or not isinstance(message, Tokens) or not message.finished:
            return message
        return Tokens(message.progress, [self._finished(each) for each in message.finished])

    def _finished(self, finished: Finished) -> Finished:
        times = {
            name: time and time - self.ahead
            for name in ("arrived", "started", "first_token", "ended")
            if (time := getattr(finished, name)) is not None
        }
        return msgspec.structs.replace(finished, **times)
