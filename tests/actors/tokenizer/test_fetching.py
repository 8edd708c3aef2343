"""Pictures that are fetched: what a hostile address or server can do, and what becomes of it."""

import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ramify.actors.tokenizer import fetching
from ramify.actors.tokenizer.fetching import PictureFetcher, is_public
from ramify.protocol.errors import BadRequest, ConfigError
from ramify.protocol.pictures import MOST_BYTES, Origin

FIELD = "images[0]"
PRIVATE = [
    "127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1",
    "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1",
    "2002:7f00:1::", "2001:0:7f00:1::", "2001:db8::1", "::ffff:8.8.8.8",
]  # fmt: skip
REFUSED = [
    "https://127.0.0.1/a.png", "https://localhost/a.png", "https://[::1]/a.png",
    "https://2130706433/a.png", "https://0x7f.1/a.png", "https://127.1/",
    "https://[::ffff:127.0.0.1]/", "https://169.254.169.254/latest", "http://good.example/a.png",
    "https://good.example:8443/a.png", "https://good.example:0/", "https://good.example:65536/",
    "https://good.example:4 43/", "https://good.example:x/", "https://good.example:/a",
    "https://good.example.evil.example/a.png", "https://evilgood.example/a.png",
    "https://good.example./a.png", "https://user@good.example/a.png",
    "https://good.example@evil.example/", "https://good.example%40evil.example/",
    "https://good.example\\@evil.example/", "https://evil.example#@good.example/",
    "https://evil.example?good.example", "https:///a.png", "https://", "https:good.example/a.png",
    "https:/good.example/a.png", "https://good.example\r\nX: y/",
    "https://good.example/\r\nHost: evil", "https://good.example/a b", "https://good.example/\tx",
    "https://good.example/\x00", "https://g\xf6od.example/", "https://good\u3002example/",
    "https://\u24d6ood.example/", "https://[good.example]/", "https://[::1/",
    "https://-good.example/", "https://.good.example/", "https://*.good.example/",
    "https://below.example/", "https://a..below.example/", "https://xbelow.example/",
    "ftp://good.example/a.png", "file:///etc/passwd", "gopher://good.example/_x",
    "https+unix://good.example/", "//good.example/a",
]  # fmt: skip
REFUSED.append("https://good.example/" + "a" * 2048)


def fetched(fetcher: PictureFetcher, url: str) -> bytes:
    return fetcher.fetch(url.encode(), FIELD, fetcher.allowance())


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is looked up, and nothing is connected to."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("looked up")

    monkeypatch.setattr(fetching.socket, "getaddrinfo", never)


def test_fifty_hostile_addresses(unreachable: None) -> None:
    fetcher = PictureFetcher(["good.example", "*.below.example"])
    assert len(REFUSED) >= 50
    for url in REFUSED:
        with pytest.raises(BadRequest) as refused:
            fetched(fetcher, url)
        assert refused.value.details == {"path": FIELD}
        assert len(refused.value.message) < 300
    with pytest.raises(AssertionError, match="looked up"):
        fetched(fetcher, "https://GOOD.example/a.png")


def test_addresses_of_no_public_place() -> None:
    assert [each for each in PRIVATE if is_public(each)] == []
    assert all(map(is_public, ("8.8.8.8", "1.1.1.1", "2606:4700::1111")))


def test_a_name_with_a_private_address_among_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, 1, 6, "", (each, port)) for each in ("8.8.8.8", "10.0.0.7")]

    monkeypatch.setattr(fetching.socket, "getaddrinfo", found)
    with pytest.raises(BadRequest, match="no public address"):
        fetched(PictureFetcher(["rebinds.example"]), "https://rebinds.example/a.png")


def test_a_resolver_that_hangs_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused in time, with few threads; later ones are served as soon as it answers."""
    answers, asked = threading.Event(), list[str]()

    def found(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        answers.wait(20)
        return [(socket.AF_INET, 1, 6, "", ("10.0.0.7", port))]

    monkeypatch.setattr(fetching.socket, "getaddrinfo", found)
    monkeypatch.setattr(fetching, "LOOKUPS", 3)
    fetcher = PictureFetcher(["slow.example"], seconds=0.05)
    for _ in range(5):
        with pytest.raises(BadRequest, match=r"was not fetched within 0\.05 s"):
            fetched(fetcher, "https://slow.example/a.png")
    assert len(asked) == 3
    answers.set()
    fetcher = PictureFetcher(["slow.example"])
    with pytest.raises(BadRequest, match="no public address"):
        fetched(fetcher, "https://slow.example/a.png")


def test_where_no_thread_is_left_for_a_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused at once, and none of the few lookups is lost by it."""

    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name == "lookup":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(fetching, "LOOKUPS", 1)
    fetcher = PictureFetcher(["slow.example"])
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        for _ in range(2):
            with pytest.raises(BadRequest, match="cannot be fetched"):
                fetched(fetcher, "https://slow.example/a.png")
    address = (socket.AF_INET, 1, 6, "", ("10.0.0.7", 443))
    monkeypatch.setattr(fetching.socket, "getaddrinfo", lambda *_, **__: [address])
    with pytest.raises(BadRequest, match="no public address"):
        fetched(fetcher, "https://slow.example/a.png")


@pytest.mark.parametrize(
    "text",
    ["", "*", "*.", "https://", "ftp://a", "a:0", "a:99999", "a b", "a/b", "https://a/b", "u@a", "a..b"],
)
def test_hosts_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--fetch-images"):
        Origin.of(text)


@contextmanager
def server(answer: Callable[[socket.socket], None], tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Its port. Each connection is answered by a thread; the request's head is read before."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threads = list[threading.Thread]()

        def serve(connection: socket.socket) -> None:
            try:
                with tls.wrap_socket(connection, server_side=True) if tls else connection as wrapped:
                    while (got := wrapped.recv(4096)) and not got.endswith(b"\r\n\r\n"):
                        pass
                    answer(wrapped)
            except OSError:
                pass

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=serve, args=(connection,), daemon=True))
                threads[-1].start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for each in threads:
            each.join(5)


def here(port: int, *more: str, seconds: float = 5.0, **options: Any) -> PictureFetcher:
    """Takes this machine for a public place."""
    origins = (f"http://localhost:{port}", *more)
    return PictureFetcher(origins, seconds, lambda address: address in ("127.0.0.1", "::1"), **options)


def test_a_picture_over_redirects_and_the_time_and_bytes_it_may_take() -> None:
    to: dict[str, bytes] = {}

    def answer(connection: socket.socket) -> None:
        connection.sendall(to["answer"])
        if b"slow" in to["answer"]:
            for _ in range(40):
                connection.sendall(b"x")
                time.sleep(0.05)
        if b"endless" in to["answer"]:
            while True:
                connection.sendall(bytes(1 << 16))
        if b"tiny" in to["answer"]:
            while True:
                connection.sendall(b"1\r\nx\r\n" * 5000)

    ok = b"HTTP/1.1 200 OK\r\n"
    with server(answer) as port:
        url = f"http://localhost:{port}/a.png"
        to["answer"] = ok + b"Content-Length: 3\r\n\r\nabc"
        assert fetched(here(port), url) == b"abc"
        to["answer"] = ok + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        assert fetched(here(port), url) == b"abc"
        for said, why in (
            (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", "answered 404"),
            (b"HTTP/1.1 302 Go\r\nLocation: http://127.0.0.1/\r\n\r\n", "fetches none"),
            (b"HTTP/1.1 302 Go\r\nLocation: https://169.254.169.254/\r\n\r\n", "fetches none"),
            (b"HTTP/1.1 302 Go\r\nLocation: file:///etc/passwd\r\n\r\n", "has no address"),
            (b"HTTP/1.1 302 Go\r\nLocation: /again\r\n\r\n", "more than 3 redirects"),
            (b"SSH-2.0-OpenSSH\r\n", "cannot be fetched"),
            (b"", "cannot be fetched"),
            (ok + b"X: " + b"y" * 70_000, "cannot be fetched"),
            (ok + b"X-Kind: endless\r\n\r\n", f"{MOST_BYTES} bytes in all"),
            (ok + b"Transfer-Encoding: chunked\r\nX: endless\r\n\r\n-1\r\n", "bytes in all"),
            (ok + b"Transfer-Encoding: chunked\r\nX: tiny\r\n\r\n", "bytes in all"),
            (ok + b"X-Kind: slow\r\n\r\n", "within 0.5 s"),
            (ok + b"slow: ", "within 0.5 s"),
        ):
            to["answer"] = said
            begin = time.monotonic()
            with pytest.raises(BadRequest, match=why):
                fetched(here(port, seconds=0.5 if b"slow" in said else 5.0), url)
            assert time.monotonic() - begin < 5
        with pytest.raises(BadRequest, match=r"within 0\.5 s"):  # it speaks no TLS
            fetched(here(port, f"localhost:{port}", seconds=0.5), f"https://localhost:{port}/")
        fetcher = here(port, seconds=30.0)
        to["answer"] = ok + b"X-Kind: slow\r\n\r\n"
        threading.Timer(0.3, fetcher.close).start()
        begin = time.monotonic()
        fetched(fetcher, url)  # cut: what came is no whole picture
        assert time.monotonic() - begin < 3


def test_names_of_certificates_count(tmp_path: Path) -> None:
    """One that nobody vouches for is refused; with its own authority it is taken, for its name alone."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate,
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("needs openssl")
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(certificate, key)
    ours = ssl.create_default_context(cafile=str(certificate))
    with server(lambda c: c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na"), theirs) as port:
        names = (f"localhost:{port}", f"127.0.0.1:{port}")
        with pytest.raises(BadRequest, match="SSLCertVerificationError"):
            fetched(here(port, *names), f"https://localhost:{port}/")
        assert fetched(here(port, *names, tls=ours), f"https://localhost:{port}/") == b"a"
        with pytest.raises(BadRequest, match="SSLCertVerificationError"):
            fetched(here(port, *names, tls=ours), f"https://127.0.0.1:{port}/")
