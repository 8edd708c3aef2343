"""A response that was stored: who fetches, deletes or cancels it asks the branch that it is."""

from collections.abc import Sequence
from urllib.parse import parse_qs

import msgspec

from ramify.actors.gateway.apis.openai.errors import Refused, of_error
from ramify.actors.gateway.apis.openai.responses import INPUT, META, keyed
from ramify.actors.gateway.port.dialogues.dialogue import Dialogue
from ramify.actors.gateway.port.http import Response, json_response
from ramify.protocol.errors import BadRequest, RamifyError
from ramify.protocol.stored_response import Stored
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

MOST_ITEMS = 100  # in a page, as with OpenAI


class ItemPage(msgspec.Struct, frozen=True):
    """Which of a response's input items are wanted."""

    limit: int = 20
    order: str = "desc"
    after: str | None = None

    @classmethod
    def of(cls, query: str) -> "ItemPage":
        """Of a URL. Raises BadRequest."""
        try:
            given = parse_qs(query, keep_blank_values=True, max_num_fields=32)
        except ValueError:
            raise BadRequest("the query has too many fields") from None
        limit, order = given.get("limit", ["20"])[-1], given.get("order", ["desc"])[-1]
        if not (
            limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= MOST_ITEMS
        ):
            raise BadRequest(f"`limit` must be from 1 to {MOST_ITEMS}", details={"field": "limit"})
        if order not in ("asc", "desc"):
            raise BadRequest("`order` must be asc or desc", details={"field": "order"})
        return cls(int(limit), order, given.get("after", [None])[-1])

    def cut(self, items: list[JsonObject]) -> JsonObject:
        """The page of `items`, which are in the order of the input."""
        ordered = items if self.order == "asc" else items[::-1]
        begin = 0
        if self.after is not None:
            places = [i for i, item in enumerate(ordered) if item.get("id") == self.after]
            if not places:
                raise BadRequest("`after` is the id of no item here", details={"field": "after"})
            begin = places[0] + 1
        page = ordered[begin : begin + self.limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": begin + self.limit < len(ordered),
        }


class StoredDialogue(Dialogue):
    """GET, DELETE and cancel of a response. `ask`: what it asks of the branch; None: only to see it.

    `page`: of its input items, where they are wanted.
    """

    keeps = True
    saves = True

    def __init__(
        self, stored: Stored, ident: str, ask: "Cancel | Drop | None", page: ItemPage | None = None
    ) -> None:
        ttl = 0.0 if stored.transient else None
        self.ops: list[ClientMessage] = [Open(session=stored.session, key=stored.key, ttl_s=ttl)]
        if ask is not None:
            self.ops.append(ask)
        self._branch = stored.branch
        self._key = stored.key
        self._ident = ident
        self._ask = ask
        self._page = page
        self._object: JsonObject | None = None
        self._input: list[JsonObject] | None = None

    def receive(self, messages: Sequence[ServerMessage]) -> Response | None:
        """See `Dialogue`."""
        for message in messages:
            match message:
                case State():
                    self._object = self._kept(message)
                    if self._object is None:
                        return self._answer(of_error(not_found(self._ident)))
                    if self._page is not None:
                        return self._answer(self._items(self._page))
                    if self._ask is None:
                        return self._answer(json_response(200, self._object))
                case Ok() | Done() if self._object is not None:
                    return self._answer(self._done(self._object))
                case Error(code="no_session" | "no_branch"):
                    return self._answer(of_error(not_found(self._ident)))
                case Error():
                    return self._answer(of_error(message))
        return None

    def fail(self, error: RamifyError) -> Response:
        """See `Dialogue`."""
        return self._answer(of_error(error))

    def _kept(self, state: State) -> JsonObject | None:
        for branch in state.branches:
            if branch.branch == self._branch:
                kept = (branch.meta or {}).get(META)
                self._input = (branch.meta or {}).get(INPUT)
                return keyed(kept, self._key) if isinstance(kept, dict) else None
        return None

    def _items(self, page: ItemPage) -> Response:
        if self._input is None:
            message = "the input was too long to be kept with the response"
            return of_error(Refused(404, message, param=None, named="input_items_not_found"))
        try:
            return json_response(200, page.cut(self._input))
        except BadRequest as error:
            return of_error(error)

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
