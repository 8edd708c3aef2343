"""Hostile pictures: each is refused by name, in bounded time and memory, and the next one is seen."""

import io
import resource
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Semaphore

import numpy as np
import psutil
import pytest
from PIL import Image

from ramify.actors.tokenizer.fetching import PictureFetcher
from ramify.actors.tokenizer.pictures import PROGRAM, PictureDecoder, _Process
from ramify.protocol.errors import BadRequest
from ramify.protocol.pictures import FIRST, PictureDone, PictureJob, PictureRefused, PictureSettings

SETTINGS = PictureSettings(
    patch=4, unit=8, least=64 * 8, most=64 * 64, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
    before=(1,), after=(2,), token=3, model="test",
)  # fmt: skip


@pytest.fixture(scope="module")
def decoder() -> Iterator[PictureDecoder]:
    made = PictureDecoder(SETTINGS)
    yield made
    made.close()


def file(kind: str, size: tuple[int, int] = (40, 24), mode: str = "RGB", **options: object) -> bytes:
    values = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(values).convert(mode).save(out, kind, **options)  # type: ignore[arg-type]
    return out.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4) + kind + body + zlib.crc32(kind + body).to_bytes(4)


def png(width: int, height: int, data: bytes, *more: bytes) -> bytes:
    """A PNG of 8 bits of grey that says it has this size."""
    head = chunk(b"IHDR", width.to_bytes(4) + height.to_bytes(4) + b"\x08\0\0\0\0")
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def hostile() -> Iterator[tuple[str, bytes]]:
    """200 of them."""
    whole = {kind: file(kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")}
    draw = np.random.default_rng(7)
    for kind, data in whole.items():
        for part in (4, 12, 20, 30, 60):
            yield f"{kind} cut", data[: len(data) * part // 100]
        for _ in range(20):
            broken = bytearray(data)
            for at in draw.integers(0, min(64, len(data)), 8):
                broken[at] ^= 0xFF
            yield f"{kind} flipped", bytes(broken)
    zeros = zlib.compress(bytes(1 << 22), 9)
    for width, height in (
        (1 << 20, 9),
        (16_384, 16_384),
        (0, 9),
        (1 << 30, 1 << 30),
        (900, 2),
        (1, 201),
    ):
        yield "bomb", png(width, height, zeros)
    yield "bomb of text", png(40, 24, zeros, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 26), 9)))
    for kind in ("BMP", "TIFF", "ICO", "PPM", "TGA"):
        yield kind, file(kind)
    yield "EPS", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    yield "SVG", b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>"
    while True:
        yield "noise", draw.bytes(int(draw.integers(1, 4096)))


def spent() -> float:
    """Seconds of a processor, of the processes that decode and of those that were ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive = [child.cpu_times() for child in psutil.Process().children()]
    return ended.ru_utime + ended.ru_stime + sum(each.user + each.system for each in alive)


def test_two_hundred_hostile_pictures(decoder: PictureDecoder) -> None:
    """None takes longer than a large good one; a good one between them is always seen."""
    good, told, named, slowest = file("PNG"), list[str](), True, 0.0
    decoder.decode(good, "images[0]")
    expected = decoder.decode(good, "images[0]")
    for number, (_, data) in zip(range(200), hostile(), strict=False):
        begin = spent()
        try:
            decoder.decode(data, f"images[{number}]")
        except BadRequest as error:
            told.append(error.message)
            named = named and f"images[{number}]" in error.message
        slowest = max(slowest, spent() - begin)
    assert named
    assert max(map(len, told)) < 300
    assert len(told) > 120  # some of what was flipped is a picture, of other colours
    assert slowest < 3.0  # of what it may have, with a new process
    assert decoder.decode(good, "images[0]") == expected


def test_formats_and_what_is_made_of_them(decoder: PictureDecoder) -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        shown = decoder.decode(file(kind), "images[0]")
        assert (shown.picture.width, shown.picture.height) == (40, 24)
        assert len(shown.tokens) == 2 + 15
        assert [shown.tokens[0], shown.tokens[-1]] == [1, 2]
        assert min(shown.tokens[1:-1]) >= FIRST
    upright = Image.open(io.BytesIO(file("PNG"))).getexif()
    upright[0x0112] = 6  # turned by a quarter
    turned = decoder.decode(file("JPEG", exif=upright), "images[0]")
    assert (turned.picture.width, turned.picture.height) == (24, 40)
    for mode in ("L", "P", "RGBA", "1", "LA", "I;16"):
        assert decoder.decode(file("PNG", mode=mode), "images[0]").picture.width == 40


def test_a_process_that_has_died_is_replaced(decoder: PictureDecoder) -> None:
    """The next picture is seen all the same."""
    expected = decoder.decode(file("PNG"), "images[0]")
    died = [each for each in psutil.Process().children() if PROGRAM in each.cmdline()]
    assert died
    for each in died:
        each.kill()
    psutil.wait_procs(died, 0.5)
    for _ in range(3):
        assert decoder.decode(file("PNG"), "images[0]") == expected


def test_what_takes_too_much_of_a_processor_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.actors.tokenizer.pictures.PROCESSOR_SECONDS", 0)
    decoder = PictureDecoder(SETTINGS)
    zeros = png(5700, 5700, zlib.compress(bytes(5701 * 5700), 1))
    try:
        with pytest.raises(BadRequest, match=r"more than 0 s of a processor - at `images\[3\]`"):
            while True:  # the system counts whole seconds
                decoder.decode(zeros, "images[3]")
    finally:
        decoder.close()


def test_what_takes_too_long_is_ended() -> None:
    decoder = PictureDecoder(SETTINGS, seconds=0.0)
    try:
        with pytest.raises(BadRequest, match=r"takes more than 0 s - at `images\[3\]`"):
            decoder.decode(file("PNG", (2000, 2000)), "images[3]")
    finally:
        decoder.close()


def test_fetched_pictures_leave_a_process_to_those_that_are_sent(
    decoder: PictureDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are fetched at once: one of them is decoded at a time."""
    begun, goes_on, work = Semaphore(0), Event(), _Process.work

    def held(self: _Process, job: PictureJob, seconds: float) -> PictureDone | PictureRefused:
        if job.data == far:
            begun.release()
            assert goes_on.wait(30)
        return work(self, job, seconds)

    far, sent = file("PNG"), file("JPEG")
    fetcher = PictureFetcher(["a.example"])
    monkeypatch.setattr(fetcher, "fetch", lambda *_: far)
    monkeypatch.setattr(decoder, "fetcher", fetcher)
    monkeypatch.setattr(_Process, "work", held)
    with ThreadPoolExecutor() as pool:
        fetched = [pool.submit(list, decoder.each([b"https://a.example/"])) for _ in range(3)]
        assert begun.acquire(timeout=30)
        (shown,) = decoder.each([sent])
        assert not begun.acquire(blocking=False)
        goes_on.set()
        assert [each.result(30) for each in fetched] == [fetched[0].result()] * 3
    assert shown != fetched[0].result()[0]


def test_one_party_leaves_a_process_to_others(
    decoder: PictureDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are sent at once, and fetched ones too."""
    begun, goes_on, work = Semaphore(0), Event(), _Process.work

    def held(self: _Process, job: PictureJob, seconds: float) -> PictureDone | PictureRefused:
        if job.data == slow:
            begun.release()
            assert goes_on.wait(30)
        return work(self, job, seconds)

    slow, quick = file("PNG"), file("JPEG")
    fetcher = PictureFetcher(["a.example", "b.example"])
    monkeypatch.setattr(fetcher, "fetch", lambda url, *_: slow if b"a.example" in url else quick)
    monkeypatch.setattr(decoder, "fetcher", fetcher)
    monkeypatch.setattr(_Process, "work", held)
    with ThreadPoolExecutor() as pool:
        mine = [pool.submit(list, decoder.each([b"https://a.example/"], "a"))]
        assert begun.acquire(timeout=30)
        mine += [pool.submit(list, decoder.each([slow], "a")) for _ in range(3)]
        assert begun.acquire(timeout=30)
        assert len([*decoder.each([quick, b"https://b.example/"], "b")]) == 2
        assert not begun.acquire(blocking=False)
        goes_on.set()
        assert [each.result(30) for each in mine] == [mine[0].result()] * 4
