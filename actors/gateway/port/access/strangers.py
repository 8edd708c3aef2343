"""What clients without a token may cost: the sockets of one address share one account.

A server with tokens does some work before it knows whose a socket is: it accepts, reads a head, parses
a first frame. That work is charged to the client's address. Where a socket then shows a token, its
charges are given back: many clients behind one proxy pay nothing. An address in debt is read more
slowly, and its new connections are cut off while the debt is large. A proxy, which limits its clients
itself, has no account; each of its sockets is limited all the same (`limits.py`).

Work is counted as in `pump.py`, in bytes' worth of parsing. Pure: time is an argument. This file does
not know sockets.
"""

import ipaddress
from collections.abc import Iterable
from typing import Protocol

from ramify.actors.gateway.port.access.buckets import DebtBucket
from ramify.protocol.errors import Close

WORK_PER_S = 1_250_000  # 0.05 s of CPU each second, at 40 ns
BURST_S = 2.0
CONNECTION_WORK = 12_000  # accept, parse a head, answer, close: 480 us
READ_WORK = 600  # one wake-up for one socket, however little it brings: 24 us
MOST_DEBT_S = 2.0  # an address with more debt has to wait before it may connect again
LEAST_SOCKETS = 64  # of an address at once, before they show a token; a larger server allows more
SOCKETS_PART = 4  # ... its part of all sockets
KEPT = 4096  # addresses that are remembered without a socket


class _Address:
    """The account of an address. `sockets`: how many have not shown a token."""

    __slots__ = ("bucket", "name", "sockets")

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.bucket = DebtBucket(WORK_PER_S, WORK_PER_S * BURST_S, now)
        self.sockets = 0


class Guest:
    """One socket, until it shows a token or ends."""

    __slots__ = ("_address", "_spent", "_strangers")

    def __init__(self, strangers: "Strangers", address: _Address) -> None:
        self._strangers = strangers
        self._address = address
        self._spent = 0.0

    def spend(self, work: float, now: float) -> None:
        """Charge work."""
        self._spent += work
        self._address.bucket.spend(work, now)

    def wait(self, now: float) -> float:
        """Seconds until the address may be read again."""
        return self._address.bucket.wait(now)

    def leave(self, now: float, *, known: bool) -> None:
        """Note that the socket ended, or (`known`) has shown a token, which gives its charges back."""
        if known:
            self._address.bucket.spend(-self._spent, now)
        self._spent = 0.0
        self._strangers.left(self._address)


class Strangers:
    """The accounts of a process. `sockets`: how many the server may have of all clients."""

    def __init__(self, sockets: int, proxies: Iterable[str] = ()) -> None:
        self._proxies = {network_of(address) for address in proxies}
        self._most = max(LEAST_SOCKETS, sockets // SOCKETS_PART)
        self._busy: dict[str, _Address] = {}
        self._idle: dict[str, _Address] = {}  # without a socket, in the order of their last one's end

    def stands_for_many(self, address: str) -> bool:
        """Whether the address is a proxy's."""
        return bool(self._proxies) and network_of(address) in self._proxies

    def refuses(self, address: str, now: float) -> bool:
        """Whether the address has too many sockets, or too much debt, for another one."""
        name = network_of(address)
        found = self._busy.get(name) or self._idle.get(name)
        return found is not None and (
            found.sockets >= self._most or found.bucket.wait(now) > MOST_DEBT_S
        )

    def enter(self, address: str, now: float) -> Guest:
        """Count a new socket."""
        name = network_of(address)
        found = self._busy.get(name) or self._idle.pop(name, None) or _Address(name, now)
        self._busy[name] = found
        found.sockets += 1
        guest = Guest(self, found)
        guest.spend(CONNECTION_WORK, now)
        return guest

    def left(self, address: _Address) -> None:
        """Note that a socket of the address ended or is known."""
        address.sockets -= 1
        if not address.sockets:
            del self._busy[address.name]
            self._idle[address.name] = address
            if len(self._idle) > KEPT:
                del self._idle[next(iter(self._idle))]


class Idler(Protocol):
    """A connection that waits for its next HTTP request."""

    def close(self, code: int, reason: str) -> None: ...


class Idle:
    """The waiting connections of all clients, at most `most`. With one more, the address that has
    most of them loses its oldest.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._of: dict[str, dict[int, Idler]] = {}

    def __len__(self) -> int:
        return self._count

    def enter(self, address: str, number: int, idler: Idler) -> None:
        """Add a connection that is not here yet."""
        self._of.setdefault(network_of(address), {})[number] = idler
        self._count += 1
        if self._count > self._most:
            most = max(self._of.values(), key=len)
            next(iter(most.values())).close(Close.DONE, "")  # it leaves

    def leave(self, address: str, number: int) -> None:
        """Note that a connection is taken up or ends. May be called again."""
        name = network_of(address)
        if (found := self._of.get(name)) is not None and found.pop(number, None) is not None:
            self._count -= 1
            if not found:
                del self._of[name]


def network_of(address: str) -> str:
    """Name the account of an address: an IPv4 address, or the first 64 bits of an IPv6 one."""
    if ":" not in address:
        return address
    try:
        number = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if number.ipv4_mapped is not None:
        return str(number.ipv4_mapped)
    return number.packed[:8].hex()
