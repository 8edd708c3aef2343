"""Pictures: how a model sees them, and how their tokens are told apart.

A picture stands in a branch as placeholder tokens, one for each vector that the model's tower makes of
it. Their ids are no words: from `FIRST` on, each with 30 bits of a hash of the pixels as processed, of
the sizes and of the settings. So whatever compares tokens (the tree, blocks of KV, routers, journals)
tells pictures apart, and no client's tokens can name one.
"""

import hashlib
import math
import re
from array import array
from collections.abc import Sequence
from itertools import chain, islice
from typing import Annotated, Literal, NamedTuple

import msgspec

from ramify.protocol.errors import ConfigError

MARK = "\ufffc"  # where a picture stands in text: Unicode's object replacement character
FIRST = 1 << 30  # ids of placeholder tokens: from here to the end of int32
LEAST_TOKENS = 8  # of a picture: 240 bits of its hash
MOST_SIDE = 16_384  # pixels, before a picture is fitted
MOST_PIXELS = 1 << 25  # the same
MOST_BYTES = 1 << 24  # of a picture's file
MOST_AT_ONCE = 16  # pictures of an op
MOST_URL = 2048  # characters of an address
MOST_ON_BRANCH = 1 << 25  # bytes of pixels
_MOST_RATIO = 200  # of its sides
_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*|\[[0-9a-f:.]+\]")
_PORTS = {"https": 443, "http": 80}

PictureFit = Literal["area", "longest", "crop", "stretch", "within"]
"""How a picture's size is brought to a model's.

"area": to a range of pixels, Qwen; "longest": no side over a bound, Pixtral; "crop": the shorter side
to one length, and the middle of the longer one, CLIP; "stretch": to one square, SigLIP; "within": to
the largest that has no more pixels than a bound, Gemma 4.
"""

Side = Annotated[int, msgspec.Meta(ge=1, le=MOST_SIDE)]


class PictureSettings(msgspec.Struct, frozen=True, array_like=True):
    """What a model's processor does to a picture. `unit`: pixels of a token's side.

    `between`: the tokens between two rows of a picture. `around`: text in front of it and behind it.
    `whole`: its tokens see each other, so a step that computes one computes all those behind it.
    """

    patch: int
    unit: int
    least: int  # pixels of a fitted picture
    most: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    before: tuple[int, ...]  # the tokens in front of a picture, and behind it
    after: tuple[int, ...]
    token: int  # what the model's own vocabulary calls a placeholder
    model: str  # whose tower
    fit: PictureFit = "area"
    between: tuple[int, ...] = ()
    around: str = ""
    whole: bool = False

    @property
    def most_tokens(self) -> int:
        """Of a picture, those that the processor names left out."""
        return self.most // self.unit**2


class Picture(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A picture as processed. `pixels`: RGB, a byte each, row by row, of `width` times `height`."""

    width: Side
    height: Side
    pixels: bytes


class PlacedPicture(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A picture in a row: its placeholders begin at position `start`. `rows`, `columns`: in tokens.

    `key`: names it. `picture`: None: its keys and values are there, only its positions count. `gap`:
    other tokens between two rows.
    """

    start: int
    rows: int
    columns: int
    key: bytes
    picture: Picture | None = None
    gap: int = 0

    def without_pixels(self) -> "PlacedPicture":
        return PlacedPicture(self.start, self.rows, self.columns, self.key, None, self.gap)

    @property
    def stop(self) -> int:
        return self.start + self.rows * (self.columns + self.gap) - self.gap

    def shown(self, position: int) -> int:
        """How many of its placeholders stand before a position."""
        row, column = divmod(max(0, min(position, self.stop) - self.start), self.columns + self.gap)
        return row * self.columns + min(column, self.columns)

    @property
    def shift(self) -> int:
        """By how much its tokens are more than the positions that it takes (M-RoPE)."""
        return self.rows * self.columns - max(self.rows, self.columns)


class PictureLook(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A picture that the tower is to run on, and the key of what it makes."""

    key: bytes
    picture: Picture


class PictureJob(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Decode and fit the picture that the file `data` is, within so many seconds of a processor."""

    data: bytes
    settings: PictureSettings
    seconds: int


class PictureReady(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The process can take a job."""


class PictureDone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`ids`: its placeholder tokens, int32."""

    picture: Picture
    ids: bytes


class PictureRefused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Why it is none that the model can be shown, in words that follow "the picture"."""

    why: str


FromDecoder = PictureReady | PictureDone | PictureRefused


def is_remote(image: bytes) -> bool:
    """Whether it is a picture's address, and not its file."""
    return image[:8].lower().startswith((b"https://", b"http://"))


def fitted(width: int, height: int, settings: PictureSettings) -> tuple[int, int]:
    """The size that a picture is resized to, as the model's processor does. Raises ValueError."""
    if not 1 <= width <= MOST_SIDE or not 1 <= height <= MOST_SIDE or width * height > MOST_PIXELS:
        raise ValueError(
            f"has {width} x {height} pixels: at most {MOST_SIDE} a side and {MOST_PIXELS} in all"
        )
    if max(width, height) > _MOST_RATIO * min(width, height):
        raise ValueError(f"has {width} x {height} pixels: no side may be {_MOST_RATIO} times the other")
    unit, least, most = settings.unit, settings.least, settings.most
    if settings.fit == "stretch":
        return math.isqrt(most), math.isqrt(most)
    if settings.fit == "crop":
        side, shorter = math.isqrt(most), min(width, height)
        return int(side * width / shorter), int(side * height / shorter)
    if settings.fit == "longest":
        ratio = max(1, max(width, height) / math.isqrt(most))
        wide, high = (max(1, math.floor(each / ratio)) for each in (width, height))
        return -(-wide // unit) * unit, -(-high // unit) * unit
    if settings.fit == "within":
        factor = math.sqrt(most / (height * width))
        high, wide = (math.floor(factor * each / unit) for each in (height, width))
        if not high or not wide:  # a strip of one token's height or width
            ratio = min(max(width, height) // min(width, height), most // unit**2)
            high, wide = (1, ratio) if width > height else (ratio, 1)
        return wide * unit, high * unit
    high, wide = round(height / unit) * unit, round(width / unit) * unit
    if high * wide > most:
        beta = math.sqrt(height * width / most)
        high = max(unit, math.floor(height / beta / unit) * unit)
        wide = max(unit, math.floor(width / beta / unit) * unit)
    elif high * wide < least:
        beta = math.sqrt(least / (height * width))
        high, wide = math.ceil(height * beta / unit) * unit, math.ceil(width * beta / unit) * unit
    return wide, high


def box(width: int, height: int, settings: PictureSettings) -> tuple[int, int, int, int]:
    """What is kept of a picture of a fitted size: left, top, right, bottom."""
    if settings.fit != "crop":
        return 0, 0, width, height
    side = math.isqrt(settings.most)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def placeholders(picture: Picture, settings: PictureSettings) -> "array[int]":
    """The ids of its tokens, with those between its rows. Raises ValueError where there are too few to
    tell it from all others."""
    columns = picture.width // settings.unit
    count = columns * (picture.height // settings.unit)
    if count < LEAST_TOKENS:
        raise ValueError(f"is {count} tokens: at least {LEAST_TOKENS} are due, give a larger one")
    said = msgspec.msgpack.encode((picture.width, picture.height, settings))
    digest = hashlib.blake2b(said + hashlib.blake2b(picture.pixels).digest())
    ids = array("i", hashlib.shake_128(digest.digest()).digest(4 * count))
    ids = array("i", (id & (FIRST - 1) | FIRST for id in ids))
    if not settings.between:
        return ids
    rows = (ids[at : at + columns] for at in range(0, count, columns))
    return array("i", chain.from_iterable((*row, *settings.between) for row in rows))[
        : -len(settings.between)
    ]


def placed(
    start: int, tokens: "array[int]", picture: Picture, settings: PictureSettings
) -> PlacedPicture:
    """The picture of a segment, `tokens` from position `start` on."""
    ahead, gap = len(settings.before), len(settings.between)
    sizes = picture.height // settings.unit, picture.width // settings.unit
    return PlacedPicture(start + ahead, *sizes, key_of(tokens[ahead:]), picture, gap)


def key_of(ids: "array[int]") -> bytes:
    """The name of the picture whose tokens these are, or the first of them."""
    first = islice((each for each in ids if each >= FIRST), LEAST_TOKENS)
    return array("i", first).tobytes()


def words(tokens: bytes, settings: PictureSettings) -> bytes:
    """The same int32 tokens as the model's own vocabulary calls them."""
    ids = array("i", tokens)
    return array("i", [settings.token if each >= FIRST else each for each in ids]).tobytes()


def without_pictures(tokens: "array[int]") -> "array[int]":
    """Those before the first placeholder."""
    return tokens[: next((at for at, each in enumerate(tokens) if each >= FIRST), len(tokens))]


def missing(tokens: bytes, start: int, pictures: Sequence[PlacedPicture]) -> bool:
    """Whether placeholders of `tokens`, from position `start` on, belong to none of the pictures."""
    end = start + len(tokens) // 4
    shown = sum(max(0, each.shown(end) - each.shown(start)) for each in pictures)
    return sum(each >= FIRST for each in array("i", tokens)) != shown


class Origin(NamedTuple):
    """Where a picture may come from. `host`: with "*." in front: names below it."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> "Origin":
        """One that an operator names: HOST, *.HOST, HOST:PORT, http://HOST. Raises ConfigError."""
        scheme, _, place = text.rpartition("://")
        host, port = host_and_port(place.lower(), scheme := scheme or "https")
        name = host.removeprefix("*.")
        if scheme not in _PORTS or port is None or not is_host(name) or len(text) > 256:
            raise ConfigError(
                f"--fetch-images {text[:64]!r}: give HOST, *.HOST, HOST:PORT or http://HOST"
            )
        return cls(scheme, host, port)

    def holds(self, other: "Origin") -> bool:
        """Whether it is this one, or below it."""
        below = self.host.startswith("*.") and other.host.endswith(self.host[1:])
        return (self.scheme, self.port) == (other.scheme, other.port) and (
            below or self.host == other.host
        )


def host_and_port(place: str, scheme: str) -> tuple[str, int | None]:
    """Of `place` in an address; the port is None where there is none that can be."""
    host, colon, port = place.rpartition(":")
    if not colon or place.endswith("]"):
        return place, _PORTS.get(scheme)
    good = port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16
    return host, int(port[:6]) if good else None


def is_host(text: str) -> bool:
    """Whether it is a name in ASCII, or an IP address, as it stands in an address."""
    return _NAME.fullmatch(text) is not None
