"""A response that was stored: who fetches, deletes or cancels it asks the branch that it is."""

from collections.abc import Sequence

from ramify.actors.gateway.http import Response, json_response
from ramify.actors.gateway.openai.errors import Refused, of_error
from ramify.actors.gateway.openai.response_requests import Stored
from ramify.actors.gateway.openai.responses import META
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import (
    Cancel,
    ClientMessage,
    Done,
    Drop,
    Error,
    JsonObject,
    Ok,
    Open,
    ServerMessage,
    State,
)


class StoredDialogue:
    """GET, DELETE and cancel of a response. `ask`: what it asks of the branch; None: only to see it."""

    streams = False
    outlives = False
    keeps = True

    def __init__(self, stored: Stored, ident: str, ask: "Cancel | Drop | None") -> None:
        ttl = 0.0 if stored.transient else None
        self.ops: list[ClientMessage] = [Open(session=stored.session, key=stored.key, ttl_s=ttl)]
        if ask is not None:
            self.ops.append(ask)
        self.over = False
        self._branch = stored.branch
        self._ident = ident
        self._ask = ask
        self._object: JsonObject | None = None

    def take_ops(self) -> list[ClientMessage]:
        """See `Dialogue`."""
        return []

    def receive(self, messages: Sequence[ServerMessage]) -> Response | None:
        """See `Dialogue`."""
        for message in messages:
            match message:
                case State():
                    self._object = self._kept(message)
                    if self._object is None:
                        return self._answer(of_error(not_found(self._ident)))
                    if self._ask is None:
                        return self._answer(json_response(200, self._object))
                case Ok() | Done() if self._object is not None:
                    return self._answer(self._done(self._object))
                case Error(code="no_session" | "no_branch"):
                    return self._answer(of_error(not_found(self._ident)))
                case Error():
                    return self._answer(of_error(message))
        return None

    def abandon(self) -> list[ClientMessage]:
        """See `Dialogue`."""
        return []

    def fail(self, error: RamifyError) -> Response:
        """See `Dialogue`."""
        return self._answer(of_error(error))

    def _kept(self, state: State) -> JsonObject | None:
        for branch in state.branches:
            if branch.branch == self._branch:
                kept = (branch.meta or {}).get(META)
                return kept if isinstance(kept, dict) else None
        return None

    def _done(self, kept: JsonObject) -> Response:
        if isinstance(self._ask, Drop):
            return json_response(200, {"id": self._ident, "object": "response", "deleted": True})
        if kept.get("status") in ("queued", "in_progress"):
            kept = {**kept, "status": "cancelled"}
        return json_response(200, kept)

    def _answer(self, response: Response) -> Response:
        self.over = True
        return response


def not_found(ident: str) -> Refused:
    """404: it was never kept, or is not any more."""
    message = (
        f"the response {ident[:64]!r} is not kept here: it had `store: false`, was too long to be "
        "kept, was deleted, or its session has ended"
    )
    return Refused(404, message, param=None, named="response_not_found")
