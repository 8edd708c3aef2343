"""Pictures in requests: each API has its own shape for them, and all become an `append`'s `images`."""

import base64
import binascii

from ramify.protocol.errors import BadRequest
from ramify.protocol.pictures import MARK, MOST_AT_ONCE, MOST_BYTES, MOST_URL, is_remote

NO_IMAGES = (
    "this server reads no images (`pictures_reason` in /v1/info says why, if its model could): send text"
)


class RequestPictures:
    """The pictures of one request, in the order of their marks. `reads`: whether the model sees any.

    `fetches`: the server fetches some of those that are given by their address. `places`: the fields
    of `images`.
    """

    def __init__(self, reads: bool, fetches: bool = False, told: str = NO_IMAGES) -> None:
        """`told`: what to say of a picture where none is read."""
        self.reads = reads
        self._told = told
        self._fetches = fetches
        self.images: list[bytes] = []
        self.places: list[str] = []

    def add_url(self, url: str, kind: str, place: str, field: str) -> str:
        """Add a picture in a data URL, or one that is fetched. Returns its mark.

        `kind`: of the part at `place`; `field`: the URL's. Raises BadRequest.
        """
        self._check(kind, place)
        place = f"{place}.{field}"
        if self._fetches and is_remote(address := url[: MOST_URL + 1].encode(errors="replace")):
            return self._take(address, place)
        head, _, data = url.partition(",")
        if not head.startswith("data:image/") or not head.endswith(";base64"):
            told = "is no `data:image/...;base64,` URL: others are not fetched, send the picture itself"
            raise _refused(place, told)
        return self._add(data, place)

    def add(self, data: str, kind: str, place: str, field: str) -> str:
        """Add a picture in base64. Returns its mark."""
        self._check(kind, place)
        return self._add(data, f"{place}.{field}" if field else place)

    def text(self, text: str) -> str:
        """Guard a client's text, so that nothing in it is taken for a picture's mark."""
        return text.replace(MARK, "\ufffd") if self.reads else text

    def _check(self, kind: str, place: str) -> None:
        if not self.reads:
            raise BadRequest(
                f"`{place}.type` {kind!r}: {self._told}" if kind else f"`{place}`: {self._told}",
                details={"field": f"{place}.type" if kind else place},
            )
        if len(self.images) >= MOST_AT_ONCE:
            raise _refused(place, f"is one of more than {MOST_AT_ONCE} pictures: send fewer")

    def _add(self, data: str, place: str) -> str:
        try:
            found = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise _refused(place, "is no base64") from None
        if not 0 < len(found) <= MOST_BYTES:
            raise _refused(place, f"has {len(found)} bytes: 1 to {MOST_BYTES} are allowed")
        return self._take(found, place)

    def _take(self, image: bytes, place: str) -> str:
        self.images.append(image)
        self.places.append(place)
        return MARK


NO_PICTURES = RequestPictures(False)


def _refused(place: str, told: str) -> BadRequest:
    return BadRequest(f"`{place}` {told}", details={"field": place})
