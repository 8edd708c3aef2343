"""How much has come of messages and requests that are not whole yet, of all sockets of a process.

A message has a limit of its own, but counts for no session before it is whole. A client with a thousand
sockets could have the server keep a thousand of the longest ones for as long as it likes.

Pure. This file does not know sockets.
"""

from collections.abc import Callable

UNFINISHED_BYTES = 256 << 20  # of all clients; one may have all of it
LONGEST = 4  # ... and room for so many of the longest messages
COUNTED = 64 << 10  # less of one socket does not count


class Unfinished:
    """The sockets that have a part of a long message, `parts`. `most`: bytes of all of them.

    With more than that, the client that has most loses the part that it began first: who only sends
    slowly is through before its turn comes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sum = 0
        self._sums: dict[str, int] = {}  # by client, as `_of`
        self._of: dict[str, dict[int, Callable[[], None]]] = {}
        self.parts: dict[int, tuple[str, int]] = {}  # by socket: its client, bytes

    def note(self, client: str, number: int, size: int, shed: Callable[[], None]) -> None:
        """Note that a socket has `size` bytes of a message. `shed` gives them up, and the socket."""
        client, old = self.parts.get(number, (client, 0))
        self.parts[number] = client, size
        self._of.setdefault(client, {})[number] = shed
        self._sums[client] = self._sums.get(client, 0) + size - old
        self._sum += size - old
        while self._sum > self._most:
            most = max(self._sums, key=self._sums.__getitem__)
            first, give_up = next(iter(self._of[most].items()))
            self.leave(first)
            give_up()

    def leave(self, number: int) -> None:
        """Note that a socket's message is whole, or that the socket ends. May be called again."""
        if number not in self.parts:
            return
        client, size = self.parts.pop(number)
        self._sum -= size
        self._sums[client] -= size
        del self._of[client][number]
        if not self._of[client]:
            del self._of[client], self._sums[client]
