"""Fetches pictures that clients name by their address, from hosts that the operator names.

A client chooses the address, so it is hostile: it may point into the operator's own network, or at a
server that answers slowly, endlessly, or by pointing elsewhere. A name is resolved once, all addresses
that it has must be public, and the connection goes to one of those: a name that resolves otherwise a
moment later changes nothing. Each redirect is checked as the first address was. No proxy is used, and
nothing of the client's request is sent along.
"""

import contextlib
import io
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from ramify.protocol.errors import BadRequest
from ramify.protocol.pictures import MOST_BYTES, MOST_URL, Origin, host_and_port, is_host, is_remote

FETCHES = 8  # at once
SECONDS = 10.0  # for all pictures of an op
LOOKUPS = 32  # of names at once, those that nobody waits for any more included
_REDIRECTS = 3
_MOVED = (301, 302, 303, 307, 308)
_CHUNK = 1 << 16
_MOST_BESIDE = 1 << 19  # bytes that come for one op beside its pictures: heads of answers and of chunks
_PLAIN = re.compile(r"[!-~]+")  # ASCII without blanks and controls, which parsers leave out
_UNICAST = ipaddress.ip_network("2000::/3")


class _Refused(Exception):
    """Why a picture is not fetched, in words that follow "the picture"."""


def is_public(address: str) -> bool:
    """Whether an IP address may be reached: no private, local or special one, in any disguise."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):  # no IPv4 within: mapped, 6to4, Teredo, NAT64
        return ip in _UNICAST and ip.is_global and ip.sixtofour is None and ip.teredo is None
    return ip.is_global and not ip.is_multicast


class Allowance:
    """What is left for the pictures of one op: `until`, by `time.monotonic`, bytes of theirs, and bytes
    that come beside.
    """

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.bytes = MOST_BYTES
        self.beside = _MOST_BESIDE

    @property
    def seconds(self) -> float:
        """Raises TimeoutError."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class PictureFetcher:
    """`origins`: those that are allowed. `reachable`: whether a connection may go to an IP address."""

    def __init__(
        self,
        origins: Sequence[str],
        seconds: float = SECONDS,
        reachable: Callable[[str], bool] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._origins = [Origin.of(each) for each in origins]
        self._seconds = seconds
        self._reachable = reachable or is_public
        self._tls = tls
        self._open: set[socket.socket] = set()
        self._lookups = threading.BoundedSemaphore(LOOKUPS)

    def allowance(self) -> Allowance:
        """Of an op that begins."""
        return Allowance(self._seconds)

    def fetch(self, address: bytes, field: str, left: Allowance) -> bytes:
        """The file. Blocks; for threads. Raises BadRequest, which names `field`."""
        try:
            url = address.decode("ascii", "replace")
            for _ in range(1 + _REDIRECTS):
                answer = self._answer(self._checked(url), left)
                if isinstance(answer, bytes):
                    return answer
                url = urljoin(url, answer)
            raise _Refused(f"is behind more than {_REDIRECTS} redirects")
        except _Refused as error:
            why = str(error)
        except TimeoutError:
            why = f"was not fetched within {self._seconds:g} s"
        except (OSError, HTTPException, ValueError) as error:  # ssl's and socket's errors are OSErrors
            why = f"cannot be fetched ({type(error).__name__})"
        raise BadRequest(f"the picture {why} - at `{field}`", details={"path": field})

    def close(self) -> None:
        """End what is under way: it fails."""
        for each in list(self._open):
            _shut(each)

    # ---

    def _checked(self, url: str) -> SplitResult:
        """The parts of an address that is allowed. Raises _Refused, ValueError."""
        if (
            len(url) > MOST_URL
            or not _PLAIN.fullmatch(url)
            or "\\" in url
            or not is_remote(url.encode())
        ):
            raise _Refused(
                f"has no address like https://HOST/PATH, in ASCII, of up to {MOST_URL} characters"
            )
        parts = urlsplit(url)
        host, port = host_and_port(parts.netloc.lower(), parts.scheme)
        asked = Origin(parts.scheme, host, port or 0)
        if "@" in parts.netloc or not port or not is_host(host):
            raise _Refused("has an address with a user, or without a host or port that can be")
        if not any(each.holds(asked) for each in self._origins):
            shown = f"{parts.scheme}://{parts.netloc[:64]}"
            raise _Refused(f"is at {shown}, of which this server fetches none (--fetch-images)")
        return parts

    def _answer(self, url: SplitResult, left: Allowance) -> bytes | str:
        """The file, or where it has moved to. Raises _Refused, OSError, HTTPException, ValueError."""
        host, port = host_and_port(url.netloc.lower(), url.scheme)
        assert port is not None
        plain = self._connected(host.strip("[]"), port, left)
        connection = plain
        self._open.add(plain)
        try:
            if url.scheme == "https":
                plain.settimeout(left.seconds)
                tls = self._tls or ssl.create_default_context()
                connection = tls.wrap_socket(plain, server_hostname=host.strip("[]"))
                self._open.add(connection)
            with connection:
                path = (url.path or "/") + (f"?{url.query}" if url.query else "")
                connection.sendall(
                    f"GET {path} HTTP/1.1\r\nHost: {url.netloc}\r\nUser-Agent: ramify\r\n"
                    "Accept: image/png, image/jpeg, image/webp, image/gif\r\n"
                    "Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode()
                )
                return _read(connection, left)
        finally:
            self._open -= {plain, connection}
            plain.close()

    def _resolved(self, host: str, port: int, left: Allowance) -> list[Any]:
        """As of `getaddrinfo`, which has no time limit: a thread waits for it. Raises OSError."""
        if not self._lookups.acquire(timeout=left.seconds):
            raise TimeoutError
        found = Future[list[Any]]()
        found.add_done_callback(lambda _: self._lookups.release())

        def look() -> None:
            try:
                found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            except Exception as error:
                found.set_exception(error)

        try:
            threading.Thread(target=look, name="lookup", daemon=True).start()
        except RuntimeError:  # the system has no room for another thread
            found.set_exception(OSError("no thread is left to look the host up"))
        return found.result(left.seconds)

    def _connected(self, host: str, port: int, left: Allowance) -> socket.socket:
        """A connection to an address that the host has now. Raises _Refused, OSError."""
        found = self._resolved(host, port, left)
        addresses = list(dict.fromkeys((family, str(place[0])) for family, _, _, _, place in found))
        if not addresses or not all(self._reachable(address) for _, address in addresses):
            raise _Refused(f"is at {host[:64]}, which is no public address")
        for family, address in addresses[:-1]:
            try:
                return _connect(family, address, port, left.seconds / 2)
            except OSError:
                continue
        return _connect(*addresses[-1], port, left.seconds)


def _connect(family: int, address: str, port: int, seconds: float) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.settimeout(seconds)
        made.connect((address, port))
    except BaseException:
        made.close()
        raise
    return made


class _Arriving(io.RawIOBase):
    """What a connection receives, however slowly it comes: until the time is over, and up to a size.

    A chunk of -1 bytes makes `HTTPResponse` read all that comes in one go.
    """

    def __init__(self, connection: socket.socket, left: Allowance) -> None:
        self._connection = connection
        self._left = left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview[int]") -> int:  # type: ignore[override]
        self._connection.settimeout(self._left.seconds)
        got = self._connection.recv_into(buffer)
        self._left.beside -= got
        if self._left.beside < 0:
            raise _too_large()
        return got


class _Source:
    """What `HTTPResponse` takes for a socket."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file

    def makefile(self, mode: str) -> io.BufferedReader:
        return self._file


def _read(connection: socket.socket, left: Allowance) -> bytes | str:
    """The body of the answer that comes, or where it points to."""
    response = HTTPResponse(_Source(io.BufferedReader(_Arriving(connection, left))), method="GET")  # type: ignore[arg-type]
    with response:
        response.begin()
        if response.status in _MOVED and (to := response.getheader("Location")):
            return to[: MOST_URL + 1]
        if response.status != 200:
            raise _Refused(f"cannot be fetched: its server answered {response.status}")
        parts = list[bytes]()
        while chunk := response.read(_CHUNK):
            left.bytes -= len(chunk)
            left.beside += len(chunk)
            if left.bytes < 0:
                raise _too_large()
            parts.append(chunk)
        return b"".join(parts)


def _too_large() -> _Refused:
    return _Refused(f"is larger than what is fetched for one op: {MOST_BYTES} bytes in all")


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is not connected any more
        connection.shutdown(socket.SHUT_RDWR)
