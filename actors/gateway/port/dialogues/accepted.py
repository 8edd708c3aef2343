"""A request that a session is going to answer, with its credential and the share that it counts in."""

import msgspec

from ramify.actors.gateway.port.access.auth import bearer_header
from ramify.actors.gateway.port.access.shares import Share
from ramify.actors.gateway.port.dialogues.dialogue import Dialogue
from ramify.actors.gateway.port.http import HttpRequest
from ramify.actors.gateway.port.hub import Hub
from ramify.protocol.credentials import NOBODY, Credential

EVENTS = "text/event-stream; charset=utf-8"


class Accepted(msgspec.Struct, frozen=True):
    """`share` counts its connection. `media`: the type of the answer's body, where it is a stream."""

    dialogue: Dialogue
    credential: Credential
    share: Share
    media: str = EVENTS


def accept(
    hub: Hub,
    dialogue: Dialogue,
    credential: Credential,
    request: HttpRequest,
    now: float,
    *,
    media: str = EVENTS,
) -> Accepted:
    """Count it. Raises LimitExceeded."""
    share = hub.shares.of(credential, now)
    share.received(len(request.body), 1, now)
    share.admit(len(dialogue.ops), now)
    share.enter(now)
    return Accepted(dialogue, credential, share, media)


def may_ask(request: HttpRequest, hub: Hub) -> bool:
    """Whether it shows a token, where one is needed. Uses nothing up."""
    token = bearer_header(request.headers.get("authorization"))
    return not hub.tokens.required or hub.tokens.accepts(token, hub.clock.now())


def credential_of(request: HttpRequest, hub: Hub, now: float, *, spends: bool) -> Credential | None:
    """The credential of a request; None: it is refused. `spends`: use up a minted token."""
    if not hub.tokens.required:
        return NOBODY
    token = bearer_header(request.headers.get("authorization"))
    if not token:
        return None
    return hub.tokens.admit(token, now) if spends else hub.tokens.configured(token)
