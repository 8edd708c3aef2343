"""An API that others speak on the port, over HTTP or over WebSocket, as the port sees it."""

from collections.abc import Callable, Mapping

import msgspec

from ramify.actors.gateway.port.dialogues.accepted import Accepted
from ramify.actors.gateway.port.dialogues.door import DoorKind
from ramify.actors.gateway.port.http import HttpRequest, Response
from ramify.actors.gateway.port.hub import Hub


class Api(msgspec.Struct, frozen=True):
    """An API over HTTP whose requests a session may answer.

    `spoken_at`: whether a path is one of this API, for a request with these headers. `refuse`: the
    answer that the head of a request already allows, before its body is read; `respond`: the answer to
    the whole request, or the dialogue that makes one. `reshaped`: an error of the gateway
    itself in the shape of this API.
    """

    spoken_at: Callable[[str, Mapping[str, str]], bool]
    refuse: Callable[[HttpRequest, Hub], Response | None]
    respond: Callable[[HttpRequest, Hub], Response | Accepted]
    reshaped: Callable[[Response], Response]


class Apis(msgspec.Struct, frozen=True):
    """All APIs of a gateway beside ramify.v1. `doors`: those over WebSocket, by their path."""

    http: tuple[Api, ...] = ()
    doors: Mapping[str, DoorKind] = {}

    def at(self, path: str, headers: Mapping[str, str]) -> Api | None:
        """The API over HTTP that is spoken at `path`; None: the path belongs to none."""
        for api in self.http:
            if api.spoken_at(path, headers):
                return api
        return None
