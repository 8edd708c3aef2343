"""Where sessions go that are at no replica: to the one with the least to do. Pure."""

from collections.abc import Iterable

from ramify.protocol.messages import Submit


class LeastLoaded:
    """By the requests that run or wait; then by sessions, then by number. A `bindings.Placing`."""

    def __init__(self) -> None:
        self._requests: dict[int, dict[int, int]] = {}  # replica -> session -> requests
        self._open: set[int] = set()

    def joined(self, replica: int) -> None:
        """The replica takes sessions from now on."""
        self._requests[replica] = {}
        self._open.add(replica)

    def shut(self, replica: int) -> None:
        """It takes no more."""
        self._open.discard(replica)

    def gone(self, replica: int) -> None:
        """It is not there any more."""
        self._open.discard(replica)
        self._requests.pop(replica, None)

    def place(self, session: int, namespace: str, tokens: bytes) -> int | None:
        if not self._open:
            return None
        chosen = min(self._open, key=lambda r: (*self._load(self._requests[r].values()), r))
        self._requests[chosen][session] = 0
        return chosen

    @staticmethod
    def _load(requests: Iterable[int]) -> tuple[int, int]:
        counts = list(requests)
        return sum(counts), len(counts)

    def submitted(self, session: int, replica: int, message: Submit) -> None:
        self._requests[replica][session] += 1

    def ended(self, session: int, replica: int, requests: int) -> None:
        self._requests[replica][session] -= requests

    def left(self, session: int, replica: int) -> None:
        self._requests.get(replica, {}).pop(session, None)
