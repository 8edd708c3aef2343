"""Puts pictures in the places of their marks, between the pieces of a text."""

from collections.abc import Sequence

from msgspec.structs import replace

from ramify.actors.session.branches.segments import Tail
from ramify.actors.session.branches.tasks import PendingAppend, PendingPart
from ramify.actors.tokenizer.encoder import Party
from ramify.actors.tokenizer.pictures import PictureDecoder
from ramify.protocol.errors import BadRequest
from ramify.protocol.pictures import MARK


def with_pictures(
    pending: PendingAppend, images: Sequence[bytes], decoder: PictureDecoder | None, party: Party
) -> PendingAppend:
    """Put each picture in the place of its mark. `party`: whose pictures. Raises BadRequest."""
    parts = list[PendingPart]()
    if decoder is None:
        raise BadRequest(
            "this server takes no pictures (`pictures_reason` in /v1/info says why, if its model could)"
            ": leave `images` out"
        )
    marks = sum(part.text.count(MARK) for part in pending.parts)
    if marks != len(images):
        raise BadRequest(f"the template shows {marks} of {len(images)} `images`")
    found = decoder.each(images, party)
    around = decoder.settings.around
    for part in pending.parts:
        pieces: list[PendingPart] = []
        for number, text in enumerate(part.text.replace(MARK, f"{around}{MARK}{around}").split(MARK)):
            if number:
                shown = next(found)
                piece = replace(_inside(part), text=MARK, picture=shown.picture, ids=shown.tokens)
                pieces.append(piece)
            if text:
                pieces.append(replace(_inside(part), text=text))
        if not pieces:
            pieces = [part]
        pieces[-1] = replace(pieces[-1], tail=part.tail, role=part.role)
        first = {"messages": part.messages, "turn": part.turn, "history": part.history}
        parts += [replace(pieces[0], **first), *pieces[1:]]
    return replace(pending, parts=parts)


def _inside(part: PendingPart) -> PendingPart:
    """Make a piece inside of a part: no turn ends with it."""
    tail = Tail.RAW if part.tail is Tail.RAW else Tail.OPEN
    return replace(part, tail=tail, messages=(), turn=0, history=None)
