"""An API that others speak on the port, over HTTP or WebSocket, and a request that a session answers."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from ramify.actors.gateway.port.access.auth import shown_token
from ramify.actors.gateway.port.access.shares import Share
from ramify.actors.gateway.port.dialogues.dialogue import Dialogue
from ramify.actors.gateway.port.dialogues.door import DoorKind
from ramify.actors.gateway.port.http import HttpRequest, Response
from ramify.actors.gateway.port.hub import Hub
from ramify.protocol.credentials import NOBODY, Credential

EVENTS = "text/event-stream; charset=utf-8"


class Accepted(msgspec.Struct, frozen=True):
    """A request that a session answers.

    `share` counts its connection. `media`: the type of the answer's body, where it is a stream;
    `headers`: more of that answer's."""

    dialogue: Dialogue
    credential: Credential
    share: Share
    media: str = EVENTS
    headers: Mapping[str, str] = {}


class Api(msgspec.Struct, frozen=True):
    """An API over HTTP whose requests a session may answer.

    `spoken_at`: whether a path is one of this API, for a request with these headers. `refuse`: the
    answer that the head of a request already allows, before its body is read; `respond`: the answer to
    the whole request, now or later, or the dialogue that makes one. `reshaped`: an error of the gateway
    itself in the shape of this API.
    """

    spoken_at: Callable[[str, Mapping[str, str]], bool]
    refuse: Callable[[HttpRequest, Hub], Response | None]
    respond: Callable[[HttpRequest, Hub], Response | Accepted | Coroutine[Any, Any, Response]]
    reshaped: Callable[[Response], Response]


class Apis(msgspec.Struct, frozen=True):
    """All APIs of a gateway beside ramify.v1. `doors`: those over WebSocket, by their path."""

    http: tuple[Api, ...] = ()
    doors: Mapping[str, DoorKind] = {}

    def at(self, path: str, headers: Mapping[str, str]) -> Api | None:
        """Find the API over HTTP that is spoken at `path`; None: the path belongs to none."""
        for api in self.http:
            if api.spoken_at(path, headers):
                return api
        return None


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
    """Count a request as accepted. Raises LimitExceeded."""
    share = hub.shares.of(credential, now)
    share.received(len(request.body), 1, now)
    share.admit(len(dialogue.ops), now)
    share.enter(now)
    return Accepted(dialogue, credential, share, media, headers)


def may_ask(request: HttpRequest, hub: Hub) -> bool:
    """Whether a request shows a token, where one is needed. Uses nothing up."""
    token = shown_token(request.headers)
    return not hub.tokens.required or hub.tokens.accepts(token, hub.clock.now())


def credential_of(request: HttpRequest, hub: Hub, now: float, *, spends: bool) -> Credential | None:
    """Find the credential of a request; None: it is refused. `spends`: use up a minted token."""
    if not hub.tokens.required:
        return NOBODY
    token = shown_token(request.headers)
    if not token:
        return None
    return hub.tokens.admit(token, now) if spends else hub.tokens.configured(token)
