"""Pictures of requests: refused by the field that has them, before anything is decoded."""

import base64

import pytest

from ramify.actors.gateway.apis.openai.messages import ImageUrl, ImageUrlPart, Message, chat_of
from ramify.actors.gateway.apis.pictures import RequestPictures
from ramify.protocol.errors import BadRequest
from ramify.protocol.pictures import MARK, MOST_AT_ONCE

DATA = base64.b64encode(b"picture").decode()


@pytest.mark.parametrize(
    ("reads", "url", "field", "why"),
    [
        (
            False,
            f"data:image/png;base64,{DATA}",
            "messages[0].content[0].type",
            "this server reads no images",
        ),
        (True, "https://example.org/a.png", "messages[0].content[0].image_url.url", "not fetched"),
        (True, "file:///etc/passwd", "messages[0].content[0].image_url.url", "not fetched"),
        (True, f"data:text/html;base64,{DATA}", "messages[0].content[0].image_url.url", "not fetched"),
        (True, "data:image/png;base64,%", "messages[0].content[0].image_url.url", "no base64"),
        (True, "data:image/png;base64,", "messages[0].content[0].image_url.url", "has 0 bytes"),
    ],
)
def test_what_is_not_taken(reads: bool, url: str, field: str, why: str) -> None:
    message = Message(role="user", content=[ImageUrlPart(image_url=ImageUrl(url=url))])
    with pytest.raises(BadRequest, match=why) as refused:
        chat_of([message], RequestPictures(reads))
    assert refused.value.details == {"field": field}


def test_marks_are_those_of_pictures_alone() -> None:
    pictures = RequestPictures(True)
    part = ImageUrlPart(image_url=ImageUrl(url=f"data:image/png;base64,{DATA}"))
    messages = [Message(role="system", content=f"a{MARK}"), Message(role="user", content=[part, part])]
    assert [each.content for each in chat_of(messages, pictures)] == ["a\ufffd", MARK * 2]
    assert pictures.images == [b"picture"] * 2
    with pytest.raises(BadRequest, match=f"more than {MOST_AT_ONCE} pictures"):
        chat_of(messages * MOST_AT_ONCE, pictures)
    assert chat_of(messages[:1], RequestPictures(False))[0].content == f"a{MARK}"
