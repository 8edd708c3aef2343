"""A request that a session is going to answer, with its credential and the share that it counts in."""

from collections.abc import Mapping

import msgspec

from ramify.actors.gateway.port.access.auth import shown_token
from ramify.actors.gateway.port.access.shares import Share
from ramify.actors.gateway.port.dialogues.dialogue import Dialogue
from ramify.actors.gateway.port.http import HttpRequest
from ramify.actors.gateway.port.hub import Hub
from ramify.protocol.credentials import NOBODY, Credential

EVENTS = "text/event-stream; charset=utf-8"


class Accepted(msgspec.Struct, frozen=True):
    """`share` counts its connection. `media`: the type of the answer's body, where it is a stream;
    `headers`: more of that answer's."""

    dialogue: Dialogue
    credential: Credential
    share: Share
    media: str = EVENTS
    headers: Mapping[str, str] = {}


def accept(
    hub: Hub,
    dialogue: Dialogue,
    credential: Credential,
    request: HttpRequest,
    now: float,
    *,
    media: str = EVENTS,
    headers: Mapping[str, str] = {},
) -> Accepted:
    """Count it. Raises LimitExceeded."""
    share = hub.shares.of(credential, now)
    share.received(len(request.body), 1, now)
    share.admit(len(dialogue.ops), now)
    share.enter(now)
    return Accepted(dialogue, credential, share, media, headers)


def may_ask(request: HttpRequest, hub: Hub) -> bool:
    """Whether it shows a token, where one is needed. Uses nothing up."""
    token = shown_token(request.headers)
    return not hub.tokens.required or hub.tokens.accepts(token, hub.clock.now())


def credential_of(request: HttpRequest, hub: Hub, now: float, *, spends: bool) -> Credential | None:
    """The credential of a request; None: it is refused. `spends`: use up a minted token."""
    if not hub.tokens.required:
        return NOBODY
    token = shown_token(request.headers)
    if not token:
        return None
    return hub.tokens.admit(token, now) if spends else hub.tokens.configured(token)
